"""Tables for the terminal: inspect, profile, fit, compress, compare and export.

Names and notes come from files and from other people's code, so they are shown as plain text: no markup, and no control
characters that a terminal would obey.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import Budget, EnergyModel
from ecc.energy.quality import describe_learning_curve, describe_outlier_widths
from ecc.formatting import percent, score_text, si
from ecc.graph import ChannelGraph, Role
from ecc.measure.early_stopping import quick_error
from ecc.measure.profile import Profile, drift_remedy
from ecc.run_records import Feasibility, Front, RunSummary
from ecc.settings import deployment

from .records import GridRow, MeanStd

if TYPE_CHECKING:
    from ecc.export.run_export import ExportedRun

MAX_ITEMS = 12
"""Groups or tensors in a line of the terminal; the files have all of them."""
MAX_NAME = 24
"""Characters of a module path that a column shows in one line, if the terminal is wide enough."""
MIN_NAME = 6
"""Characters of a module path in one line, however narrow the terminal is."""
MIN_REASON = 12
"""Characters in a line of the reason why a group is not prunable."""


def plain(text: object) -> Text:
    """Text without markup; characters that are not printable become `?`."""
    return Text("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(text)))


def _table(*columns: str, left: int = 1, title: str | None = None) -> Table:
    table = Table(title=None if title is None else plain(title), title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    return table


def _optional(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    return "-" if value is None else percent(value, digits, sign=sign)


def _first(parts: Sequence[str], count: int = MAX_ITEMS) -> str:
    return ", ".join(parts[:count]) + (f" and {len(parts) - count} more" if len(parts) > count else "")


def _lines(parts: Sequence[str], count: int) -> str:
    """One name per line, so that narrow columns do not divide names."""
    return "\n".join([*parts[:count], *([f"and {len(parts) - count} more"] if len(parts) > count else [])])


# ---------------------------------------------------------------- ecc inspect


def graph_summary(graph: ChannelGraph) -> dict[str, Any]:
    """A channel graph for `ecc inspect --json`. `frozen` says why a group is not prunable; None if it is.

    `branch` is the residual branch that a group is removed with; None if it cannot be removed entirely.
    """
    inside = {name: branch.name for branch in graph.branches for name in branch.groups}
    return {
        "fingerprint": graph.fingerprint,
        "macs": int(graph.macs()),
        "parameters": int(graph.parameters()),
        "weight_bytes": int(graph.weight_bytes()),
        "activation_bytes": int(graph.activation_bytes()),
        "prunable_share_of_parameters": prunable_share(graph),
        "max_relative_diff": graph.max_relative_diff,
        "notes": graph.notes,
        "groups": [
            {
                "name": group.name,
                "width": group.width,
                "producers": group.layers(Role.PRODUCER),
                "per_channel": group.layers(Role.PER_CHANNEL),
                "consumers": group.layers(Role.CONSUMER),
                "share_of_macs": graph.share_of_macs(group),
                "frozen": group.frozen,
                "branch": inside.get(group.name),
            }
            for group in graph.groups
        ],
        "branches": [
            {
                "name": branch.name,
                "groups": branch.groups,
                "share_of_macs": 1 - float(graph.macs(widths) / graph.macs().clamp(min=1)),
                "share_of_parameters": 1 - float(graph.parameters(widths) / graph.parameters().clamp(min=1)),
            }
            for branch in graph.branches
            for widths in [dict.fromkeys(branch.groups, 0)]
        ],
        "kept_branches": dict(graph.kept_branches),
    }


def prunable_share(graph: ChannelGraph) -> float:
    """Fraction of the parameters that is removed at minimum widths, without the branches that can be removed."""
    removed = {name: 0 for branch in graph.branches for name in branch.groups}
    smallest = graph.parameters({**{group.name: group.min_width for group in graph.prunable}, **removed})
    return float(1 - smallest / graph.parameters().clamp(min=1))


@dataclass(frozen=True)
class _GroupTable:
    """The rows of the channel groups; the columns of names become narrower before the reasons are cut off."""

    title: str
    rows: list[tuple[str, str, str, str, str]]
    """Producers, width, consumers, MACs and whether it is prunable."""
    is_frozen: list[bool]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        del console
        head = ("producers", "width", "consumers", "MACs", "prunable")
        columns = zip(head, *self.rows, strict=True)
        widths = [max(len(line) for cell in cells for line in cell.splitlines()) for cells in columns]
        space = options.max_width - 3 * (len(head) - 1) - 2 - widths[1] - widths[3]  # without those of the box
        if widths[0] + widths[2] + widths[4] > space:
            least = max((space - min(widths[4], MIN_REASON)) // 2, MIN_NAME)
            names = [min(widths[number], MAX_NAME, least) for number in (0, 2)]
            reason = max(min(widths[4], space - sum(names)), 1)
            names[0] = min(widths[0], max(names[0], space - reason - names[1]))
            names[1] = min(widths[2], max(names[1], space - reason - names[0]))
            widths[0], widths[2], widths[4] = *names, reason
        table = Table(
            title=plain(self.title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for name, width in zip(head, widths, strict=True):
            justify: Literal["left", "right"] = "right" if name in ("width", "MACs") else "left"
            table.add_column(name, justify=justify, overflow="fold", width=width)
        for row, is_frozen in zip(self.rows, self.is_frozen, strict=True):
            table.add_row(*map(plain, row), style="dim" if is_frozen else None)
        yield table


def graph_table(graph: ChannelGraph, title: str) -> RenderableType:
    """The channel groups of a network, named after their first producer, with a summary and notes."""
    removable = {name for branch in graph.branches for name in branch.groups}
    rows = []
    for group in graph.groups:
        prunable = "yes" if group.frozen is None else f"no: {group.frozen}"
        if group.name in removable:
            prunable = "yes, or removed" if group.frozen is None else f"removed or whole: {group.frozen}"
        channels = group.slices[0].index.numel()  # of its first producer; more than the width where channels are tied
        others = [path for path in group.layers(Role.PRODUCER) if path != group.name.partition("#")[0]]
        width = str(group.width) if channels == group.width else f"{group.width} ({channels} ch.)"
        consumers = _lines(group.layers(Role.CONSUMER), 2)
        share = percent(graph.share_of_macs(group))
        rows.append((_lines([group.name, *others], 3), width, consumers, share, prunable))
    table = _GroupTable(
        title, rows, [group.frozen is not None and group.name not in removable for group in graph.groups]
    )
    verified = "not verified"
    if graph.max_relative_diff is not None:
        verified = f"verified: max relative difference {graph.max_relative_diff:.0e}"
    summary = (
        f"{len(graph.prunable)} of {len(graph.groups)} groups are prunable; {si(float(graph.macs()), '')} MACs, "
        f"{si(float(graph.parameters()), '')} parameters, {prunable_share(graph):.0%} of them prunable; {verified}."
    )
    lines = [*_branch_lines(graph), *(f"note: {note}" for note in graph.notes)]
    return Group(table, Text(summary), *map(plain, lines))


def _branch_lines(graph: ChannelGraph) -> Iterator[str]:
    """What removing branches saves, and the branches that cannot be removed."""
    if graph.branches:
        widths = {name: 0 for branch in graph.branches for name in branch.groups}
        left = [float(cost(widths) / cost().clamp(min=1)) for cost in (graph.macs, graph.parameters)]
        yield (
            f"{len(graph.branches)} residual branches can be removed entirely: "
            f"{_first([branch.name for branch in graph.branches])}. Without them {left[0]:.0%} of the MACs and "
            f"{left[1]:.0%} of the parameters are left."
        )
    for name, reason in graph.kept_branches:
        yield f"branch {name} cannot be removed: {reason}"


# ---------------------------------------------------------------- ecc profile

FLOOR_SHARE = 0.7
"""If the narrowest sample uses more than this share of the dense energy, the summary says so."""

NARROW = 0.35
"""Share of the channels up to which a sample is narrow enough for that statement."""


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """A profile, for `ecc profile --json`."""

    label: str
    meter: str
    device: str
    batch: int
    runner: str | None
    runner_reason: str | None
    samples: int
    measurements: int
    references: int
    dense_joules: float | None
    min_joules: float | None
    max_joules: float | None
    narrowest_share: float | None
    seconds_per_sample: float | None
    repeat_noise: float | None
    reference_cv: float | None
    drift_corrected: bool
    steady: bool
    quick_fit_error: float | None


def profile_summary(profile: Profile, graph: ChannelGraph | None = None) -> ProfileSummary:
    """A profile as a record; with the graph of its network, also the error of a quick fit."""
    header, drift = profile.header, profile.drift
    samples = profile.corrected(allow_drift=True)
    dense = sorted(sample.joules for sample in profile.references)
    joules = [sample.joules for sample in samples]
    return ProfileSummary(
        label=header.label,
        meter=header.meter.name,
        device=header.meter.device,
        batch=header.batch,
        runner=None if header.settings is None else deployment(header.settings),
        runner_reason=header.runner_reason,
        samples=len(samples),
        measurements=len(profile.design_samples),
        references=len(profile.references),
        dense_joules=dense[len(dense) // 2] if dense else None,
        min_joules=min(joules, default=None),
        max_joules=max(joules, default=None),
        narrowest_share=min((sum(one.widths) / sum(header.full_widths) for one in samples), default=None),
        seconds_per_sample=profile.seconds_per_sample,
        repeat_noise=profile.repeat_noise,
        reference_cv=None if drift is None else drift.cv,
        drift_corrected=drift is not None and drift.is_significant,
        steady=drift is None or drift.is_steady,
        quick_fit_error=None if graph is None else quick_error(graph, profile),
    )


def profile_text(profile: Profile, path: str | Path, graph: ChannelGraph | None = None) -> str:
    """A profile in a few lines."""
    found = profile_summary(profile, graph)
    lines = [f"{path}: {found.samples} samples, {found.label}: {found.device}, batch {found.batch}"]
    if found.runner_reason:
        lines.append(f"runner {found.runner}: {found.runner_reason}")
    unit = "J" if profile.header.meter.has_energy else "s"
    if found.min_joules is not None and found.max_joules is not None and found.narrowest_share is not None:
        dense = "" if found.dense_joules is None else f"; dense {si(found.dense_joules, unit)}"
        lines.append(f"{si(found.min_joules, unit)} to {si(found.max_joules, unit)} per inference{dense}")
        share = found.min_joules / found.dense_joules if found.dense_joules else 0.0
        if found.narrowest_share < NARROW and share > FLOOR_SHARE:
            lines.append(
                f"the narrowest network still uses {share:.0%} of the dense {'energy' if unit == 'J' else 'latency'}: "
                "lower budgets are not reachable"
            )
    if found.seconds_per_sample is not None:
        lines.append(f"{found.seconds_per_sample:.2f} s per sample")
    if found.repeat_noise is not None:
        lines.append(f"std of repeated measurements: {percent(found.repeat_noise, 2)}")
    if found.quick_fit_error is not None:
        lines.append(f"cross-validated error of a quick fit: {percent(found.quick_fit_error)}")
    if profile.drift is not None and profile.header.device_type is not None:
        lines.append(str(profile.drift))
        if not profile.drift.is_steady:
            lines.append(f"warning: the reference drifted too much for a reliable profile. {drift_remedy()}")
    return "\n".join(lines)


# ---------------------------------------------------------------- ecc fit

MAX_FIT_LAYERS = 8


def fit_summary(model: EnergyModel) -> dict[str, Any]:
    """An energy model for `ecc fit --json`."""
    origin, own = model.origin, ("resource", "label", "kind", "dense", "min_cost", "errors", "quality")
    about = {"device": origin.meter.device, "batch": origin.batch, "samples": origin.samples}
    return {**{name: getattr(model, name) for name in own}, **about, "per_layer": model.per_layer()}


def fit_table(model: EnergyModel, title: str) -> RenderableType:
    """How well an energy model predicts, what the layers cost, and which budgets can be met."""
    quality = model.quality
    columns = ("model", "mean", "p90", "max", "bias", "dense", "held out", "smallest", "near dense", "uniform")
    table = _table(*columns, title=title)
    for name, found in quality.families.items():
        selected = " (selected)" if name == model.kind and len(quality.families) > 1 else ""
        numbers = [_optional(getattr(found, key)) for key in ("mean", "p90", "max")]
        numbers += [_optional(getattr(found, key), sign=True) for key in ("bias", "dense_fitted", "dense", "smallest")]
        numbers += [_optional(getattr(found, key)) for key in ("near_dense", "uniform")]
        table.add_row(name + selected, *numbers)
    noise = quality.noise
    about = (
        "Relative errors on held-out samples (10-fold cross-validation). `dense`: the dense network in the final fit. "
    )
    about += "`held out`, `smallest`: the dense and the smallest network, each left out of the fit. "
    errors = model.errors
    if errors is not None and errors.max_at_ends is not None:
        about += (
            f"Mean, p90, max and bias leave out {errors.ends} networks that every fit needs (dense and smallest, with "
            f"and without branches): when held out, the largest error there is {percent(errors.max_at_ends, 2)}. "
        )
    about += "The noise was not measured." if noise is None else f"Std of one measurement: {percent(noise, 2)}."
    sentences = [text for text in (describe_learning_curve(quality), describe_outlier_widths(quality)) if text]
    layers: list[RenderableType] = ["Most expensive layers of the dense network, predicted:", _layer_table(model)]
    return Group(table, about, *map(plain, sentences), *layers, plain(reachable_budgets(model)))


def _layer_table(model: EnergyModel) -> Table:
    costs = model.per_layer()
    total = sum(costs.values())
    outside = costs.pop("") - model.fitted.base  # operators that the network calls between its layers
    costs |= {"(constant)": model.fitted.base} | ({"(outside any layer)": outside} if outside > 0 else {})
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    table = _table("layer", model.unit, "share")
    for path, cost in ranked[:MAX_FIT_LAYERS]:
        table.add_row(plain(path), si(cost, model.unit), f"{cost / total:.0%}")
    rest = sum(cost for _, cost in ranked[MAX_FIT_LAYERS:])
    if rest > 0:
        table.add_row(f"{len(ranked) - MAX_FIT_LAYERS} others", si(rest, model.unit), f"{rest / total:.0%}")
    return table


def reachable_budgets(model: EnergyModel) -> str:
    """Which budgets can be met."""
    dense, smallest, batch = model.dense_profiled, min_cost(model), model.origin.batch
    least = min_cost(model, depth=True)
    without = f"{si(least, model.unit)} without the residual branches as well. " if model.branches else ""
    label = model.label if model.dense_sample is not None else "predicted"
    each = f" ({si(dense / batch, model.unit)} per item)" if batch > 1 else ""
    return (
        f"Dense: {si(dense, model.unit)}{each}, {label}; {model.origin.meter.device}, batch {batch}. With "
        f"{MIN_WIDTH_RATIO:.0%} of the channels in every group (default --min-width-ratio): "
        f"{si(smallest, model.unit)}, predicted. {without}Reachable budgets: {least / dense:.0%} to 100%"
        f"{f', with --no-depth {smallest / dense:.0%} to 100%' if model.branches else ''}."
    )


def min_cost(model: EnergyModel, *, depth: bool = False) -> float:
    """Predicted cost with the default minimum width in every group, in the multiples that were profiled.

    Args:
        model: Of the network.
        depth: Whether all residual branches are removed that the model knows the cost without.
    """
    removed = {group for groups in model.branch_groups for group in groups} if depth else set()
    steps = model.width_steps or [model.origin.width_multiple or 1] * len(model.full_widths)
    widths = [
        0
        if number in removed
        else full
        if least == full
        else min(full, max(least, step * math.ceil(MIN_WIDTH_RATIO * full / step)))
        for number, (full, least, step) in enumerate(zip(model.full_widths, model.min_widths, steps, strict=True))
    ]
    return float(model.value(torch.tensor(widths, dtype=torch.float64)))


def check_budget(model: EnergyModel, budget: Budget) -> tuple[bool, str]:
    """Whether a budget is useful and reachable, and a sentence that says so."""
    limit, smallest = budget.limit(model, model.origin.batch), min_cost(model, depth=True)
    dense, removed = model.dense_profiled, " and without residual branches" if model.branches else ""
    shown = f"budget {si(limit, model.unit)}"
    if limit < smallest:
        return False, (
            f"{shown} is not reachable: with {MIN_WIDTH_RATIO:.0%} of the channels in every group{removed} it "
            f"still uses {si(smallest, model.unit)} ({smallest / dense:.0%} of dense). Give a budget of at least "
            f"{math.ceil(100 * smallest / dense)}%, or lower --min-width-ratio."
        )
    if limit >= dense:
        return False, f"{shown} is already met by the dense network, which uses {si(dense, model.unit)}."
    return True, f"{shown} is reachable: {limit / dense:.0%} of dense."


# ---------------------------------------------------------------- ecc compress


def feasibility_table(found: Sequence[Feasibility]) -> Table:
    """Which costs are reachable, before training."""
    columns = ("", "dense", "minimum", "budget", "of dense", "uniform widths")
    table = _table(*columns, title="Feasibility")
    for one in found:
        ratio = "not reachable" if one.uniform_ratio is None else f"{one.uniform_ratio:.0%}"
        costs = [one.text(cost) for cost in (one.dense, one.min_cost, one.limit)]
        table.add_row(f"{one.resource}{one.per} ({one.label})", *costs, f"{one.limit / one.dense:.0%}", ratio)
    return table


def compress_table(summary: RunSummary, folder: str | Path) -> RenderableType:
    """The result of a compression."""
    sparse = summary.sparse
    what = " (unstructured)" if sparse is not None else ""
    title = f"{summary.task} by {summary.method}{what}" + (f" on {summary.device}" if summary.device else "")
    table = _table("", "dense", "result", "budget", "of budget", "", title=title)
    for resource, row in summary.budgets.items():
        per, costs = summary.amounts(resource)
        verdict = "met" if row.met else "NOT MET"
        table.add_row(plain(f"{resource}{per} ({row.label})"), *costs, percent(row.result / row.limit), verdict)
    for name, shown, counts in (("macs", "MACs", summary.macs), ("params", "parameters", summary.parameters)):
        if name not in summary.budgets and counts is not None:
            table.add_row(f"{shown} (counted)", si(counts.dense, ""), si(counts.result, ""), "", "", "")
    if sparse is not None:
        totals = [si(sum(counts.values()), "") for counts in (sparse.weights, sparse.nonzeros)]
        table.add_row("prunable weights (counted)", *totals, "", "", "")
    scores = summary.scores
    if scores:
        table.add_row(summary.metric, *summary.score_texts(), "", "", "")
    full, kept = (summary.full_widths, summary.widths) if sparse is None else (sparse.weights, sparse.nonzeros)
    parts = [f"{name} {count}/{full[name]}" for name, count in kept.items() if count != full.get(name, count)]
    lines = [f"{'Widths' if sparse is None else 'Nonzero weights'}: {_first(parts) or 'unchanged'}."]
    if removed := [name for name, is_removed in summary.branches.items() if is_removed]:
        lines.append(f"Removed residual branches: {_first(removed)}.")
    files = "slim.safetensors, widths.json"
    if sparse is not None:
        zeros = 1 - sum(sparse.nonzeros.values()) / max(1, sum(sparse.weights.values()))
        lines += [f"{percent(zeros)} of the weights are zero.", f"The estimate assumes: {sparse.assumes}."]
        files = "sparse.safetensors, nonzeros.json"
    if summary.max_relative_diff is not None:
        lines.append(f"Verified: masked and slim outputs differ by at most {summary.max_relative_diff:.1g} (relative).")
    if not scores:
        lines.append("No score: no evaluate= given.")
    if summary.note:
        lines.append(f"Note: {summary.note}")
    lines.append(f"{folder}: {files}, summary.json, history.jsonl")
    return Group(table, *map(plain, lines))


def front_table(front: Front, folder: str | Path) -> RenderableType:
    """The results of several budgets."""
    metric = front.metric
    dense = "" if front.dense_score is None else f", dense {score_text(front.dense_score, metric)}"
    table = _table("budget", "result", "of dense", "of budget", metric + dense, "batches", "", title=front.task)
    for row in front.rows:
        table.add_row(
            plain(row.budget),
            plain(f"{si(row.result, row.unit)} ({row.label})"),
            percent(row.result / row.dense),
            percent(row.result / row.limit),
            "" if row.score is None else score_text(row.score, metric),
            f"{row.batches:,}",
            "met" if row.met else "NOT MET",
        )
    places = ", ".join(row.folder for row in front.rows)
    lines = [f"{front.batches:,} batches in all.", f"{folder}: front.json; the networks are in {places}"]
    return Group(table, *map(plain, lines))


# ---------------------------------------------------------------- ecc compare


def grid_table(rows: Sequence[GridRow]) -> RenderableType:
    """Scores and costs of all methods and budgets, and the runs that failed."""
    labels = ", ".join(sorted({label for row in rows for label in row.labels}))
    columns = ("budget", "method", "finetuned", "pruned", "of dense", "batches", "seconds", "peak MB", "p")
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    failed: list[str] = []
    for row in sorted(rows, key=lambda row: row.budget, reverse=True):
        table.add_row(
            plain(row.budget),
            plain(row.method + (" (over budget)" if row.met is False else "")),
            _mean_std(row.finetuned, row.metric),
            _mean_std(row.pruned, row.metric),
            "-" if row.cost_ratio is None else percent(row.cost_ratio.mean),
            "-" if row.batches_total is None else f"{row.batches_lineage:.0f}/{row.batches_total:.0f}",
            "-" if row.seconds is None else f"{row.seconds:.0f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
            "" if row.p_value is None else f"{row.p_value:.3f}",
        )
        failed += [f"failed: {row.method} {row.budget} {reason}" for reason in row.failures]
    metric = next((row.metric for row in rows if row.finetuned), "score").capitalize()
    title = f"{metric} after and before finetuning, mean ± std over seeds; cost {labels}"
    legend = "batches: of the result / all that were drawn; p: paired t-test of the scores against ecc"
    return Group(plain(title), table, legend, *map(plain, failed))


def _mean_std(found: MeanStd | None, metric: str) -> str:
    if found is None:
        return "-"
    if metric == "perplexity":  # of the mean log-likelihood, whose std is the relative one of the perplexity
        return score_text(found.mean, metric) + (f"±{percent(found.std)}" if found.std else "")
    return f"{found.mean:.3f}" + (f"±{found.std:.3f}" if found.std else "")


# ---------------------------------------------------------------- ecc export


def export_table(result: ExportedRun) -> RenderableType:
    """The files of an export, how they were verified, and their latency in onnxruntime."""
    score = result.summary.score
    files = _table("file", "bytes", "dense bytes", "max relative error", "tolerance")
    times = _table("onnxruntime", "before", "after", "speedup")
    notes: dict[str, None] = {}  # each once, in order
    for file in result.files:
        tolerance = "none" if file.tolerance is None else f"{file.tolerance:g}"
        before = "" if file.beside_bytes is None else f"{file.beside_bytes:,}"
        files.add_row(plain(file.file), f"{file.bytes:,}", before, f"{file.error:.2g}", tolerance)
        latency = file.latency
        if latency is not None:
            low, high = latency.ratio_range
            seconds = [si(latency.dense_seconds, "s"), si(latency.slim_seconds, "s")]
            times.add_row(plain(file.file), *seconds, f"{latency.ratio:.2f} ({low:.2f} to {high:.2f})")
            threads = f"{latency.threads} thread" + ("s" if latency.threads > 1 else "")
            notes[f"Latency is {latency.label}, batch {latency.batch}, {threads}, {latency.clock}."] = None
    for file in result.files:
        if file.tolerance is None:
            scores = "the task has no score" if file.score is None else f"score {file.score:.4f}"
            scores += "" if score is None else f", in floating point {score:.4f}"
            notes[f"{file.file} is compared with the same network in floating point: {scores}."] = None
    batches = ", ".join(map(str, result.files[0].batches)) if result.files else ""
    error = (
        "max relative error: largest difference from the outputs of the slim network, relative to the largest output. "
        f"Each file was run by its own runtime at batch sizes {batches}."
    )
    names = ", ".join([*(file.file for file in result.files), "model_card.md"])
    shown = [times] if times.row_count else []
    return Group(files, Text(error), *shown, *map(plain, (*notes, *result.notes, f"{result.folder}: {names}")))
