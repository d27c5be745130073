"""What came out of a compression, as plain values: for the run's summary.json, for tables and for pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ecc.energy import Budget, Cost
from ecc.graph import ChannelGraph

from .cost_evaluator import MeasuredCost
from .driving import Drive
from .ecc.solver import EccSolver
from .landing import BAND, CostCheck, Landing


def summary_of(
    graph: ChannelGraph,
    budgets: Sequence[Budget],
    costs: Sequence[Cost],
    limits: Sequence[float],
    widths: dict[str, int],
    dense: MeasuredCost,
    landing: Landing | Drive,
) -> dict[str, Any]:
    """Budgets and whether they are met, what was weighed, and the widths.

    Args:
        graph: Of the dense network.
        budgets: As they were asked for.
        costs: One for each budget.
        limits: In the units of the costs.
        widths: That are left.
        dense: The dense network on the scales.
        landing: How the descent went.
    """
    last = landing.weighings[-1] if landing.weighings else None
    found = {cost.resource: float(cost.to("cpu").value(graph.widths(widths))) for cost in costs}  # counted, predicted
    found |= {} if last is None else last.weighed
    rows = {}
    for budget, cost, limit in zip(budgets, costs, limits, strict=True):
        full = torch.tensor(cost.full_widths, dtype=torch.float64)
        rows[cost.resource] = {
            "budget": str(budget),
            "limit": limit,
            "unit": cost.unit,
            "dense": dense.amounts.get(cost.resource, float(cost.to("cpu").value(full))),
            "result": found[cost.resource],
            "label": _label(cost, last),
            "met": found[cost.resource] <= limit,
        }
    return {
        "label": "predicted" if last is None else last.label,
        "budgets": rows,
        "met": all(row["met"] for row in rows.values()),
        "landed": landing.landed,
        "band": list(BAND),
        "note": landing.note,
        "weighed": {"dense": dense.amounts, "result": {} if last is None else last.weighed},
        "relative_ci": None if last is None else last.relative_ci,
        "weighings": len(landing.weighings),
        "widths": widths,
        "full_widths": graph.full_widths,
        "macs": {"dense": float(graph.macs()), "result": float(graph.macs(widths))},
        "parameters": {"dense": float(graph.parameters()), "result": float(graph.parameters(widths))},
    }


def solver_facts(solver: EccSolver, costs: Sequence[Cost], step: int) -> dict[str, Any]:
    """Where the solver stands, as a line of the history."""
    spent, duals, widths = solver.numbers
    return {
        "phase": "solver",
        "step": step,
        "spent": dict(zip((cost.resource for cost in costs), spent, strict=True)),
        "target": solver.target,
        "energy_dual": duals.energy,
        "width_duals": duals.width,
        "widths": widths,
    }


def told(weighing: CostCheck, limits: Sequence[float], costs: Sequence[Cost]) -> str:
    """A look at the scales in words, each amount with its label."""
    parts = []
    for cost, limit in zip(costs, limits, strict=True):
        amount = weighing.weighed.get(cost.resource, weighing.predicted[cost.resource])
        value = f"{amount:.4g} {cost.unit}".strip()
        parts.append(f"{cost.resource} {value} ({_label(cost, weighing)}), {amount / limit:.1%} of the budget")
    return f"step {weighing.step}: {'; '.join(parts)}"


def _label(cost: Cost, weighing: CostCheck | None) -> str:
    """Where the amount of a cost comes from: the scales if they weigh it, else a count or the energy model."""
    if weighing is not None and cost.resource in weighing.weighed:
        return weighing.label
    return cost.label if cost.label == "counted" else "predicted"
