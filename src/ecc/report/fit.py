"""An energy model in words and tables: how well it predicts, what costs what, which budgets can be met."""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import EnergyModel
from ecc.energy.budget import Budget
from ecc.energy.fitting import describe_learning_curve, describe_outlier_widths

LAYERS_SHOWN = 8


def fit_view(model: EnergyModel, title: str) -> RenderableType:
    """Tables and sentences for a terminal."""
    parts: list[RenderableType] = [_errors(model, title)]
    quality = model.quality
    noise = quality.get("noise")
    parts.append(
        "Errors are relative, on networks that the model had not seen (10-fold); the dense network once in the fit, "
        "and once held out. "
        + ("Repeats were not measured." if noise is None else f"One measurement alone scatters by {noise:.2%}.")
    )
    parts += [sentence for sentence in (describe_learning_curve(quality), describe_outlier_widths(quality)) if sentence]
    parts += ["What costs most in the dense network, as this model divides it:", _layers(model), reach(model)]
    return Group(*parts)


def _errors(model: EnergyModel, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("model", "mean", "9 in 10", "largest", "bias", "dense", "held out", "near dense", "scaled"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, found in model.quality.get("families", {}).items():
        cells = [_percent(found[key]) for key in ("mean", "ninetieth", "largest")]
        cells += [_percent(found[key], sign=True) for key in ("bias", "dense_fitted", "dense")]
        cells += [_percent(found[key]) for key in ("near_dense", "path")]
        mark = " <- chosen" if name == model.kind and len(model.quality["families"]) > 1 else ""
        table.add_row(name + mark, *cells)
    return table


def _layers(model: EnergyModel) -> Table:
    """The layers that cost most, dense."""
    costs = model.per_layer()
    total = sum(costs.values())
    outside = costs.pop("") - model.fitted.base  # operators that the network calls between its layers
    costs |= {"(constant)": model.fitted.base} | ({"(outside any layer)": outside} if outside > 0 else {})
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column(model.unit, justify="right")
    table.add_column("share", justify="right")
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    for path, cost in ranked[:LAYERS_SHOWN]:
        table.add_row(path, si(cost, model.unit), f"{cost / total:.0%}")
    rest = sum(cost for _, cost in ranked[LAYERS_SHOWN:])
    if rest > 0:
        table.add_row(f"{len(ranked) - LAYERS_SHOWN} others", si(rest, model.unit), f"{rest / total:.0%}")
    return table


def reach(model: EnergyModel) -> str:
    """Which budgets can be met."""
    dense, least, batch = model.dense_profiled, least_of(model), model.origin.batch
    whose = "by this model of what was" if model.quality.get("dense_fitted") is None else "as"
    each = f" ({si(dense / batch, model.unit)} an item)" if batch > 1 else ""
    return (
        f"Dense: {si(dense, model.unit)}{each} {whose} {model.label} on {model.origin.meter.device}, batch {batch}. "
        f"With {MIN_WIDTH_RATIO:.0%} of every group (the default --min-width-ratio), by this model: {si(least, model.unit)}. "
        f"Budgets from {least / dense:.0%} to 100% can be met."
    )


def least_of(model: EnergyModel) -> float:
    """What is left with every group at its default floor, in the multiples that were profiled."""
    step = model.origin.width_multiple or 1
    floors = [
        full if least == full else min(full, max(least, step * math.ceil(MIN_WIDTH_RATIO * full / step)))
        for full, least in zip(model.full_widths, model.min_widths, strict=True)
    ]
    return float(model.value(torch.tensor(floors, dtype=torch.float64)))


def budget_warning(model: EnergyModel, budget: Budget) -> str:
    """Why a budget cannot be met or need not be; empty if it is in reach."""
    limit, least = budget.limit(model, model.origin.batch), least_of(model)
    if limit < least:
        return (
            f"budget {si(limit, model.unit)} is below {si(least, model.unit)}, the least this network can use with "
            f"{MIN_WIDTH_RATIO:.0%} of every group. Raise it above {least / model.dense_profiled:.0%} of dense, lower "
            "--min-width-ratio, or shrink the input."
        )
    if limit >= (dense := model.dense_profiled):
        return f"budget {si(limit, model.unit)} is met by the dense network, which uses {si(dense, model.unit)}."
    return ""


def budget_within(model: EnergyModel, budget: Budget) -> str:
    """That a budget can be met."""
    limit = budget.limit(model, model.origin.batch)
    return f"budget {si(limit, model.unit)} can be met: it is {limit / model.dense_profiled:.0%} of dense."


def fit_facts(model: EnergyModel) -> dict[str, Any]:
    """For programs."""
    return {
        "resource": model.resource,
        "label": model.label,
        "device": model.origin.meter.device,
        "batch": model.origin.batch,
        "kind": model.kind,
        "rows": model.origin.rows,
        "dense": model.dense,
        "least": model.least,
        "quality": model.quality,
        "per_layer": model.per_layer(),
    }


def si(value: float, unit: str) -> str:
    """Three digits and a prefix: 24.7 mJ."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "-" if value is None else f"{value:+.2%}" if sign else f"{value:.2%}"
