"""`ResourceConstraints`: the budgets of Eq. (2c), E(s) <= E_budget, and the smallest widths that are allowed.

Inside the solver every cost is a fraction of the dense network's cost. Costs of different units can then be combined,
and one schedule serves all of them. Values in the unit of the cost appear only in the public interface.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ecc.budget import parse_budget
from ecc.energy.cost import Cost
from ecc.energy.model import EnergyModel
from ecc.errors import BadBudget, BadWidths, InfeasibleBudget
from ecc.graph import ChannelGraph, ChannelGroup, kept_masks, live_masks
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.torch_utils import device_of

Limit = str | float
"""A budget: a text such as `"60%"` or `"24 mJ"`, or a number in the unit of the cost."""

Fractions = Sequence[float] | Tensor
"""One fraction of the dense cost for each cost: numbers, or a vector on the device."""

TOLERANCE = 1e-9  # relative; a sum of floats may differ from the same sum in another order


class Grouped(Protocol):
    """A network whose parts are counted by group, such as a `ChannelGraph`."""

    @property
    def full_widths(self) -> Mapping[str, int]:
        """Number of parts of each group before pruning."""


class ResourceConstraints:
    """Costs that must all stay within their budgets, evaluated on one device.

    Args:
        costs: At least one cost.
        graph: The network whose widths the costs depend on.
        device: Device of the widths.

    Raises:
        BadWidths: A cost belongs to another network.
    """

    def __init__(self, costs: Sequence[Cost], graph: Grouped, device: torch.device | str) -> None:
        if not costs:
            raise ValueError("no cost was given; pass one cost, such as an energy model, for each budget.")
        for cost in costs:
            if dict(zip(cost.groups, cost.full_widths, strict=True)) != graph.full_widths:
                raise BadWidths(
                    f"the cost {cost.resource!r} belongs to another network: its groups are not those of the graph. "
                    "Fit it to a profile of this network."
                )
        self.costs = tuple(cost.to(device) for cost in costs)
        full = torch.tensor(list(graph.full_widths.values()), dtype=torch.float64, device=device)
        self.dense = tuple(float(cost.value(full)) for cost in self.costs)
        """Predicted cost of the dense network, in the unit of each cost."""

    def parse(self, budgets: Limit | Sequence[Limit]) -> tuple[float, ...]:
        """Budgets as fractions of the dense costs, one for each cost.

        Raises:
            BadBudget: A budget is not a positive amount, or their number is not that of the costs.
        """
        if isinstance(budgets, str) or not isinstance(budgets, Sequence):
            budgets = [budgets]
        if len(budgets) != len(self.costs):
            raise BadBudget(f"{len(budgets)} budgets were given for {len(self.costs)} costs; pass one for each cost.")
        return tuple(_fraction(*each) for each in zip(budgets, self.costs, self.dense, strict=True))

    def parse_feasible(
        self, budgets: Limit | Sequence[Limit], min_widths: Tensor, advice: str = "min_width_ratio"
    ) -> tuple[float, ...]:
        """`parse`, and refuse budgets that no allowed widths meet.

        Args:
            budgets: The budgets.
            min_widths: Smallest width of each group.
            advice: Names of the settings that lower the smallest widths.

        Raises:
            InfeasibleBudget: States the smallest cost that can be reached.
        """
        fractions = self.parse(budgets)
        is_number = isinstance(budgets, int | float) and budgets < 1  # a method passes a sequence of limits
        hint = f' For a share of the dense cost write "{100 * budgets:g}%".' if is_number else ""  # type: ignore[operator]
        for cost, fraction, dense in zip(self.costs, fractions, self.dense, strict=True):
            least = float(cost.value(min_widths.to(torch.float64)))
            unit = f" {cost.unit}" if cost.unit else f" {cost.resource}"
            if is_number and fraction > 1:
                raise BadBudget(f"budget {budgets:g}{unit} is above the dense cost of {dense:.4g}{unit}.{hint}")
            if least > fraction * dense * (1 + TOLERANCE):
                raise InfeasibleBudget(
                    f"budget {fraction * dense:.4g}{unit} is not reachable: with every group at its minimum width the "
                    f"network still uses {least:.4g}{unit} ({least / dense:.0%} of dense). "
                    f"Raise the budget, or lower {advice}.{hint}"
                )
        return fractions

    def cost(self, widths: Tensor) -> tuple[Tensor, ...]:
        """Each cost at one vector of widths, in its own unit."""
        return tuple(cost.value(widths.to(torch.float64)) for cost in self.costs)

    def fractions(self, widths: Tensor) -> tuple[float, ...]:
        """Each cost at one vector of widths, as a fraction of the dense cost. Synchronises with the device."""
        return tuple(float(cost) / dense for cost, dense in zip(self.cost(widths), self.dense, strict=True))

    def exceeded(self, widths: Tensor, fractions: Fractions) -> Tensor:
        """For each row of widths, whether any cost is above its fraction."""
        over = [
            cost.value(widths) > fraction * dense
            for cost, fraction, dense in zip(self.costs, fractions, self.dense, strict=True)
        ]
        return torch.stack(over).any(0)

    def gradient(self, widths: Tensor, fractions: Fractions) -> Tensor:
        """dE/ds: derivative of the cost by each width, as a fraction of the dense cost per channel.

        Several costs are combined with weights proportional to the relative reduction that each still needs. The cost
        furthest from its budget has the largest weight, and one that is met has none.
        """
        gradients = [cost.gradient(widths) / dense for cost, dense in zip(self.costs, self.dense, strict=True)]
        if len(gradients) == 1:
            return gradients[0]
        needed = [
            (1 - fraction * dense / cost.value(widths)).clamp(min=0)
            for cost, fraction, dense in zip(self.costs, fractions, self.dense, strict=True)
        ]
        weights = torch.stack(needed)
        weights = weights / weights.sum().clamp(min=TOLERANCE)
        return (weights[:, None] * torch.stack(gradients)).sum(0)


@dataclass(frozen=True)
class PruningProblem:
    """What every solver chooses widths from: the channels, the costs and the allowed widths."""

    ranking: ChannelRanking
    """Layout of the channels."""
    constraints: ResourceConstraints
    """The costs."""
    min_widths: Tensor
    """(groups,) int64, allowed widths, or the initial width of groups that are not pruned."""
    width_multiple: int = 1
    """Channels of layers are multiples of this."""
    remainders: Tensor | None = None
    """(groups,) int64: allowed widths modulo `steps`, see `StructureSpec.width_remainders`; None for 0."""
    steps: Tensor | None = None
    """(groups,) int64: differences of allowed widths, see `StructureSpec.width_steps`; None for `width_multiple`."""

    @property
    def rest(self) -> Tensor:
        """(groups,) int64, the remainders."""
        return torch.zeros_like(self.min_widths) if self.remainders is None else self.remainders

    @property
    def step(self) -> Tensor:
        """(groups,) int64, the steps."""
        return torch.full_like(self.min_widths, self.width_multiple) if self.steps is None else self.steps


def _fraction(budget: Limit, cost: Cost, dense: float) -> float:
    """A budget as a fraction of the predicted dense cost."""
    if isinstance(budget, str):
        is_named = "=" in budget or budget.strip().endswith("%")
        parsed = parse_budget(budget if is_named else f"{cost.resource}={budget}")
        if "=" in budget and parsed.resource != cost.resource:
            raise BadBudget(f"budget {budget!r} is for {parsed.resource}, and the cost is {cost.resource}.")
        if parsed.per_item and not isinstance(cost, EnergyModel):
            raise BadBudget(f"budget {budget!r} is per image; give it for the whole example batch.")
        # A percentage refers to the dense cost in the profile, which the fitted model may miss slightly.
        limit = parsed.limit(cost, cost.origin.batch if isinstance(cost, EnergyModel) else 1)
    else:
        try:
            limit = float(budget)
        except TypeError:
            raise BadBudget(
                f"budget is {budget!r}; give a text such as '50%', or a number in the unit of the cost."
            ) from None
    if not 0 < limit / dense < float("inf"):
        raise BadBudget(f"budget {budget!r} must be positive and finite.")
    return limit / dense


# ---------------------------------------------------------------- minimum widths


def group_min_widths(graph: ChannelGraph, min_width_ratio: float, width_multiple: int) -> list[int]:
    """Smallest allowed width of each group, for a network without dead channels.

    Args:
        graph: Channel graph of the network.
        min_width_ratio: Minimum fraction of channels kept in each group. `ChannelGroup.min_width` is kept in any case.
        width_multiple: Channels of layers are multiples of this. A group that is not wider keeps its width.
    """
    _check_ratio(min_width_ratio, width_multiple)
    structure = graph.structure
    parts = zip(
        graph.groups, structure.width_steps(width_multiple), structure.width_remainders(width_multiple), strict=True
    )
    return [_min_width(group, group.width, min_width_ratio, step, rest) for group, step, rest in parts]


def initial_channels(
    model: nn.Module, graph: ChannelGraph, min_width_ratio: float, width_multiple: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Channels that are alive when a solver starts, s = phi(W) in Algorithm 1, and the smallest widths.

    Alive are the channels that some layer uses with nonzero weights, and as many dead ones as make the width a multiple
    of `width_multiple`; these are the first to be removed. A group with fewer live channels than its minimum was not
    trained yet (for example, before a head that is initialised with zeros), so all of its channels count as alive.
    Groups that are frozen or have no consumer with weights keep their width.

    Args:
        model: The traced network.
        graph: Its channel graph.
        min_width_ratio: As for `group_min_widths`.
        width_multiple: As for `group_min_widths`.
        device: Device of the result.

    Returns:
        (channels,) bool and (groups,) int64.
    """
    _check_ratio(min_width_ratio, width_multiple)
    alive, min_widths = [], []
    steps, remainders = graph.structure.width_steps(width_multiple), graph.structure.width_remainders(width_multiple)
    live = live_masks(model, graph)
    kept = kept_masks(graph, live, width_multiple)
    for group, lives, mask, step, remainder in zip(graph.groups, live, kept, steps, remainders, strict=True):
        is_whole = _keeps_width(group) or int(lives.sum()) < _required(group, min_width_ratio)
        mask = torch.ones_like(mask) if is_whole else mask
        alive.append(mask.to(device))
        min_widths.append(_min_width(group, int(mask.sum()), min_width_ratio, step, remainder))
    return torch.cat(alive), torch.tensor(min_widths, dtype=torch.long, device=device)


def channel_problem(
    model: nn.Module, graph: ChannelGraph, costs: Sequence[Cost], min_width_ratio: float, width_multiple: int
) -> tuple[PruningProblem, Tensor]:
    """The problem of a network, on its device, and (channels,) bool: the channels that are alive.

    Raises:
        BadWidths: A cost belongs to another network.
    """
    device = device_of(model)
    constraints = ResourceConstraints(costs, graph, device)
    alive, min_widths = initial_channels(model, graph, min_width_ratio, width_multiple, device)
    steps, remainders = (
        torch.tensor(find(width_multiple), dtype=torch.long, device=device)
        for find in (graph.structure.width_steps, graph.structure.width_remainders)
    )
    ranking = ChannelRanking([group.width for group in graph.groups], device)
    return PruningProblem(ranking, constraints, min_widths, width_multiple, remainders, steps), alive


def _min_width(group: ChannelGroup, live: int, min_width_ratio: float, step: int, remainder: int) -> int:
    """Smallest width of the form `remainder + k * step` that the ratio allows."""
    if _keeps_width(group):
        return live
    missing = max(0, -((remainder - _required(group, min_width_ratio)) // step))
    return min(live, remainder + missing * step)


def _required(group: ChannelGroup, min_width_ratio: float) -> int:
    return min(group.width, max(group.min_width, math.ceil(min_width_ratio * group.width - 1e-9)))


def _keeps_width(group: ChannelGroup) -> bool:
    return group.frozen is not None or not group.masked_slices


def _check_ratio(min_width_ratio: float, width_multiple: int) -> None:
    if not 0 <= min_width_ratio <= 1:
        raise ValueError(f"min_width_ratio={min_width_ratio} must be between 0 and 1.")
    if width_multiple < 1:
        raise ValueError(f"width_multiple={width_multiple} must be at least 1; 1 allows any width.")
