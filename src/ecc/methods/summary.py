"""The result of a compression as a `RunSummary`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ecc.energy import Budget, Cost
from ecc.graph import ChannelGraph
from ecc.run_records import BudgetResult, CostCheck, DenseAndResult, SolverLine

from .cost_evaluator import MeasuredCost
from .ecc.solver import EccSolver


def budget_results(
    graph: ChannelGraph,
    budgets: Sequence[Budget],
    costs: Sequence[Cost],
    limits: Sequence[float],
    widths: dict[str, int],
    dense: MeasuredCost,
    last: CostCheck | None,
) -> dict[str, BudgetResult]:
    """What became of each budget, by resource.

    Args:
        graph: The dense network.
        budgets: One for each cost.
        costs: What is limited.
        limits: In the units of the costs.
        widths: Of the result.
        dense: Cost of the dense network.
        last: The last measurement of the result; None if nothing was measured.
    """
    found: dict[str, BudgetResult] = {}
    for budget, cost, limit in zip(budgets, costs, limits, strict=True):
        full = torch.tensor(cost.full_widths, dtype=torch.float64)
        result = float(cost.to("cpu").value(graph.widths(widths)))
        if last is not None:
            result = last.measured.get(cost.resource, result)
        found[cost.resource] = BudgetResult(
            budget=str(budget),
            limit=limit,
            unit=cost.unit,
            dense=dense.amounts.get(cost.resource, float(cost.to("cpu").value(full))),
            result=result,
            label=_label(cost, last),
            met=result <= limit,
        )
    return found


def measured_costs(dense: MeasuredCost, last: CostCheck | None) -> dict[str, DenseAndResult]:
    """Measured costs of the dense network and of the result, by resource."""
    if last is None:
        return {}
    return {
        name: DenseAndResult(dense=dense.amounts[name], result=amount)
        for name, amount in last.measured.items()
        if name in dense.amounts
    }


def solver_line(solver: EccSolver, costs: Sequence[Cost], step: int, total: int) -> SolverLine:
    """The state of the solver as a line of the history."""
    spent, duals, widths = solver.numbers
    return SolverLine(
        step=step,
        cost=dict(zip((cost.resource for cost in costs), spent, strict=True)),
        target=solver.target,
        energy_dual=duals.energy,
        width_duals=duals.width,
        widths=widths,
        total=total,
    )


def describe_check(check: CostCheck, limits: Sequence[float], costs: Sequence[Cost]) -> str:
    """One line for the terminal, each amount with its label."""
    parts = []
    for cost, limit in zip(costs, limits, strict=True):
        amount = check.measured.get(cost.resource, check.predicted[cost.resource])
        value = f"{amount:.4g} {cost.unit}".strip()
        parts.append(f"{cost.resource} {value} ({_label(cost, check)}), {amount / limit:.1%} of the budget")
    return f"step {check.step}: {'; '.join(parts)}"


def _label(cost: Cost, check: CostCheck | None) -> str:
    if check is not None and cost.resource in check.measured:
        return check.label
    return cost.label if cost.label == "counted" else "predicted"
