"""Feasibility of budgets, checked before any training step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ecc.budget import MEASURED_UNITS, Budget, dense_cost
from ecc.energy import Cost, EnergyModel, counted_cost
from ecc.errors import BadBudget, InfeasibleBudget, option_hint
from ecc.graph import ChannelGraph
from ecc.run_records import Feasibility

from .baselines.widths import largest_ratio
from .ecc.constraints import group_min_widths


def resolve_budgets(
    graph: ChannelGraph,
    budgets: Sequence[Budget],
    energy_models: Mapping[str, EnergyModel],
    batch: int,
    tokens: Mapping[str, int] | None = None,
) -> tuple[list[Cost], list[float]]:
    """The cost of each budget, and its limit in the unit of the cost.

    Resources of the workloads of a language model are per token, of which `tokens` are processed in one run.

    Raises:
        BadBudget: If a budget of energy or latency has no model.
    """
    costs: list[Cost] = []
    for budget in budgets:
        if budget.resource not in MEASURED_UNITS:
            costs.append(counted_cost(graph, budget.resource))
        elif budget.resource in energy_models:
            costs.append(energy_models[budget.resource])
        else:
            raise BadBudget(
                f"the budget {budget} needs a {budget.resource} model. Fit one: "
                f"ecc fit PROFILE --resource {budget.resource} -o {budget.resource}.json"
            )
    items = [(tokens or {}).get(budget.resource, batch) for budget in budgets]
    return costs, [budget.limit(cost, many) for budget, cost, many in zip(budgets, costs, items, strict=True)]


def check_feasibility(
    graph: ChannelGraph, costs: Sequence[Cost], limits: Sequence[float], *, min_width_ratio: float, width_multiple: int
) -> list[Feasibility]:
    """What each budget asks of the network."""
    min_widths = group_min_widths(graph, min_width_ratio, width_multiple)
    return [
        feasibility_of(cost, limit, min_widths, without_branches(graph, cost, min_widths))
        for cost, limit in zip(costs, limits, strict=True)
    ]


def without_branches(graph: ChannelGraph, cost: Cost, min_widths: Sequence[int]) -> list[int]:
    """Minimum widths, with width 0 for the groups of all branches whose removal the cost is known for."""
    known = {name for branch in graph.branches if branch.name in cost.branches for name in branch.groups}
    return [0 if group.name in known else width for group, width in zip(graph.groups, min_widths, strict=True)]


def feasibility_of(
    cost: Cost, limit: float, min_widths: Sequence[int], least: Sequence[int] | None = None
) -> Feasibility:
    """What one budget asks of the network.

    Args:
        cost: Of the network.
        limit: In the unit of the cost.
        min_widths: Minimum width of each group.
        least: Widths of the smallest network, if branches can be removed.
    """
    cost = cost.to("cpu")
    full, low = (torch.tensor(widths, dtype=torch.float64) for widths in (cost.full_widths, min_widths))
    ratio = _uniform_ratio(cost, full, low, limit)
    smallest = low if least is None else torch.tensor(least, dtype=torch.float64)
    min_cost = float(cost.value(smallest))
    return Feasibility(cost.resource, cost.unit, cost.label, dense_cost(cost), min_cost, limit, ratio)


def refuse_infeasible(
    graph: ChannelGraph,
    costs: Sequence[Cost],
    found: Sequence[Feasibility],
    min_width_ratio: float,
    width_multiple: int,
    with_branches: ChannelGraph | None = None,
) -> None:
    """Check that every budget is reachable.

    Args:
        graph: The network.
        costs: One for each budget.
        found: From `check_feasibility`.
        min_width_ratio: In use.
        width_multiple: In use.
        with_branches: The network with branches that `depth=True` would allow to remove, if it is off.

    Raises:
        InfeasibleBudget: Names the first budget that is not, and what would help, with numbers.
    """

    def reached(cost: Cost, ratio: float, multiple: int, network: ChannelGraph = graph) -> float:
        widths = without_branches(network, cost, group_min_widths(network, ratio, multiple))
        return float(cost.to("cpu").value(torch.tensor(widths, dtype=torch.float64)))

    for cost, one in zip(costs, found, strict=True):
        if not one.is_feasible:
            half = min_width_ratio / 2
            options = {option_hint("min_width_ratio", half): reached(cost, half, width_multiple)}
            if width_multiple > 1:
                options[option_hint("width_multiple", 1)] = reached(cost, min_width_ratio, 1)
            deep = cost
            if with_branches is not None and cost.label == "counted":
                deep = counted_cost(with_branches, cost.resource)
            if with_branches is not None and deep.branches:
                options[option_hint("depth", True)] = reached(deep, min_width_ratio, width_multiple, with_branches)
            elif with_branches is not None and with_branches.branches:
                options[f"{option_hint('depth', True)}, which removes residual branches"] = -math.inf
            tiny = 0.0 if graph.branches else 1e-9  # width 0 means that a branch is removed
            base = float(cost.to("cpu").value(torch.full((len(cost.groups),), tiny, dtype=torch.float64)))
            removed = sum(branch.name in cost.branches for branch in graph.branches)
            raise_infeasible(one, min_width_ratio, options, base, removed=removed)


def raise_infeasible(
    one: Feasibility,
    min_width_ratio: float,
    options: Mapping[str, float],
    base: float = 0.0,
    parts: str = "channels",
    removed: int = 0,
) -> None:
    """Raise the error for a budget that is not reachable.

    Args:
        one: The budget.
        min_width_ratio: In use.
        options: What the user can change, and the cost that it would reach; minus infinity if that is not known.
        base: Cost that does not depend on the widths, and little on the batch size.
        parts: What is pruned.
        removed: Number of branches that the smallest network lacks.

    Raises:
        InfeasibleBudget: Always.
    """
    if one.min_cost >= one.dense:
        raise InfeasibleBudget(
            f"{one.resource} budget {one.text(one.limit)}{one.per} is not reachable: no part of this network that "
            f"costs {one.resource} can be pruned. `ecc inspect` shows why."
        )
    lowest = _percent_above(one.min_cost / one.dense)
    ways = [f"a budget of at least {lowest} %"]
    for option, cost in options.items():
        if cost < one.min_cost - 0.005 * one.dense:
            known = f" (reaches {_percent_above(cost / one.dense)} %)" if math.isfinite(cost) else ""
            ways.append(f"{option}{known}")
    if one.resource in MEASURED_UNITS and base > 0.5 * one.min_cost:
        ways.append(f"a larger batch ({100 * base / one.dense:.0f} % of the dense cost does not depend on the widths)")
    kept = f"{100 * min_width_ratio:g} % of the {parts} in every group" if min_width_ratio else "one channel per group"
    kept += f" and without the {removed} residual branches that can be removed" if removed else ""
    raise InfeasibleBudget(
        f"{one.resource} budget {one.text(one.limit)}{one.per} is not reachable: with {kept} this network still uses "
        f"{one.text(one.min_cost)}{one.per} ({lowest} % of dense). Options: {'; '.join(ways)}."
    )


def _percent_above(share: float) -> str:
    """The share in percent, not rounded down; with one digit below 10 %."""
    if share >= 0.1:
        return f"{math.ceil(100 * share)}"
    return f"{math.ceil(1000 * share) / 10:g}"


def _uniform_ratio(cost: Cost, full: Tensor, min_widths: Tensor, limit: float) -> float | None:
    if float(cost.value(min_widths)) > limit:
        return None
    if float(cost.value(full)) <= limit:
        return 1.0
    return largest_ratio(lambda ratio: float(cost.value(torch.maximum(ratio * full, min_widths))) <= limit)
