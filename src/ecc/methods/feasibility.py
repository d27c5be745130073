"""What can be reached at all, told before any training step is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ecc.energy import Budget, Cost, EnergyModel, counted_cost, dense_cost
from ecc.errors import BadBudget, InfeasibleBudget
from ecc.graph import ChannelGraph

from .ecc.constraints import group_min_widths

_WAYS = (
    "lower min_width_ratio (--min-width-ratio) or width_multiple (--width-multiple), freeze less, or shrink the input"
)


@dataclass(frozen=True)
class Feasibility:
    """One budget, and what the network could do about it; in the unit of the cost."""

    resource: str
    unit: str
    label: str
    """Of the cost: measured, estimated, counted, ..."""
    dense: float
    min_cost: float
    """With every group at its floor."""
    limit: float
    uniform_ratio: float | None
    """The share of all widths, cut evenly, at which the limit is met; None if it is not even at the floors."""

    @property
    def is_feasible(self) -> bool:
        """Whether some widths meet it."""
        return self.min_cost <= self.limit


def costs_of(
    graph: ChannelGraph, budgets: Sequence[Budget], energies: Mapping[str, EnergyModel]
) -> tuple[list[Cost], list[float]]:
    """The cost of each budget, and its limit in the unit of the cost.

    Raises:
        BadBudget: If a budget is about something that must be measured, and no model of it was given.
    """
    costs: list[Cost] = []
    limits = []
    batch = next(iter(energies.values())).origin.batch
    for budget in budgets:
        cost: Cost
        if budget.resource in ("energy", "latency"):
            if budget.resource not in energies:
                raise BadBudget(
                    f"there is a budget of {budget.resource} but no model of it. Fit one: "
                    f"ecc fit PROFILE --resource {budget.resource} -o {budget.resource}.json"
                )
            cost = energies[budget.resource]
        else:
            cost = counted_cost(graph, budget.resource)
        costs.append(cost)
        limits.append(budget.limit(cost, batch))
    return costs, limits


def check_feasibility(
    graph: ChannelGraph, costs: Sequence[Cost], limits: Sequence[float], *, min_width_ratio: float, width_multiple: int
) -> list[Feasibility]:
    """What each budget asks of the network.

    Args:
        graph: The network.
        costs: One for each budget.
        limits: In the units of the costs.
        min_width_ratio: Floor of each group, as a share of its width.
        width_multiple: Widths are multiples of this.
    """
    floors = group_min_widths(graph, min_width_ratio, width_multiple)
    return [reach(cost, limit, floors) for cost, limit in zip(costs, limits, strict=True)]


def reach(cost: Cost, limit: float, floors: Sequence[int]) -> Feasibility:
    """What one budget asks of the network.

    Args:
        cost: Of the network.
        limit: In the unit of the cost.
        floors: Least width of each group.
    """
    cost = cost.to("cpu")
    full, low = (torch.tensor(widths, dtype=torch.float64) for widths in (cost.full_widths, floors))
    dense, least = dense_cost(cost), float(cost.value(low))
    return Feasibility(cost.resource, cost.unit, cost.label, dense, least, limit, _even_share(cost, full, low, limit))


def refuse_infeasible(found: Sequence[Feasibility], ways: str = _WAYS) -> None:
    """Refuses budgets that no widths meet.

    Args:
        found: What each asks for.
        ways: What a user can do beside raising the budget.

    Raises:
        InfeasibleBudget: Names the first of them, and the least that can be spent.
    """
    for one in found:
        if not one.is_feasible:
            limit, least = (f"{amount:.4g} {one.unit}".rstrip() for amount in (one.limit, one.min_cost))
            raise InfeasibleBudget(
                f"budget {limit} of {one.resource} is below {least}, the least this network can use. Raise the budget, "
                f"{ways}."
            )


def _even_share(cost: Cost, full: Tensor, floors: Tensor, limit: float) -> float | None:
    """By bisection: costs never fall when widths grow."""
    if float(cost.value(floors)) > limit:
        return None
    low, high = 0.0, 1.0
    if float(cost.value(full)) <= limit:
        return 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        if float(cost.value(torch.maximum(middle * full, floors))) <= limit:
            low = middle
        else:
            high = middle
    return low
