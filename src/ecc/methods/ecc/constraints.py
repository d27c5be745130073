"""`ResourceConstraints`: the budgets of a solve, each cost as a share of what the dense network spends.

With shares, costs of different units can be mixed and scheduled alike. Units come back at the edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ecc.energy.budget import dense_cost
from ecc.energy.cost import Cost
from ecc.errors import BadWidths, InfeasibleBudget

Limit = str | float
"""`"60%"` of the dense network's cost, or a number in the cost's unit."""

Shares = Sequence[float] | Tensor
"""One for each cost, of what the dense network spends; as numbers, or as a vector on the device."""

TOLERANCE = 1e-9  # relative; one sum of floats may differ from the same sum in another order


class Grouped(Protocol):
    """A network whose parts are counted by group, such as a `ChannelGraph`."""

    @property
    def full_widths(self) -> Mapping[str, int]:
        """Parts of each group when nothing is removed."""


class ResourceConstraints:
    """Costs that belong together, computing on one device.

    Args:
        costs: At least one.
        graph: Whose widths they are functions of.
        device: Where widths live.

    Raises:
        BadWidths: A cost of another network.
    """

    def __init__(self, costs: Sequence[Cost], graph: Grouped, device: torch.device | str) -> None:
        if not costs:
            raise ValueError("no cost was given; give one, such as an energy model, for each budget.")
        for cost in costs:
            if dict(zip(cost.groups, cost.full_widths, strict=True)) != graph.full_widths:
                raise BadWidths(
                    f"the cost {cost.resource!r} belongs to another network: its groups are not those of the graph. "
                    "Fit it to a profile of this network."
                )
        self.costs = tuple(cost.to(device) for cost in costs)
        full = torch.tensor(list(graph.full_widths.values()), dtype=torch.float64, device=device)
        self.dense = tuple(float(cost.value(full)) for cost in self.costs)
        """What the dense network spends by each cost, in its unit."""

    def parse(self, limits: Limit | Sequence[Limit]) -> tuple[float, ...]:
        """Budgets as shares of the dense network's costs, one for each cost."""
        if isinstance(limits, str) or not isinstance(limits, Sequence):
            limits = [limits]
        if len(limits) != len(self.costs):
            raise ValueError(f"{len(limits)} budgets for {len(self.costs)} costs; give one for each cost.")
        known = [dense_cost(cost) for cost in self.costs]  # not what a model says of it
        return tuple(_share(*each) for each in zip(limits, self.dense, known, strict=True))

    def check(self, shares: Sequence[float], floors: Tensor, advice: str) -> None:
        """Refuses budgets that no allowed widths meet.

        Args:
            shares: The budgets.
            floors: Least width of each group.
            advice: What lowers the floors.

        Raises:
            InfeasibleBudget: Names the least that can be spent.
        """
        for cost, share, dense in zip(self.costs, shares, self.dense, strict=True):
            least = float(cost.value(floors.to(torch.float64)))
            if least > share * dense * (1 + TOLERANCE):
                unit = f" {cost.unit}" if cost.unit else f" {cost.resource}"
                raise InfeasibleBudget(
                    f"budget {share * dense:.4g}{unit} is below {least:.4g}{unit}, the least this network can use "
                    f"with every group at its floor. Raise the budget, lower {advice}, or shrink the input."
                )

    def cost(self, widths: Tensor) -> tuple[Tensor, ...]:
        """Each cost at one vector of widths, in its own unit."""
        return tuple(cost.value(widths.to(torch.float64)) for cost in self.costs)

    def exceeded(self, widths: Tensor, shares: Shares) -> Tensor:
        """For each row of widths, whether any cost is above its share."""
        over = [
            cost.value(widths) > share * dense
            for cost, share, dense in zip(self.costs, shares, self.dense, strict=True)
        ]
        return torch.stack(over).any(0)

    def slope(self, widths: Tensor, shares: Shares) -> Tensor:
        """Derivative of the cost in the widths, as a share of the dense cost for each channel.

        Several costs are mixed by the relative reduction that each still needs to reach its share, so that the one
        furthest from its budget decides, and one that is met has no say.
        """
        slopes = [cost.gradient(widths) / dense for cost, dense in zip(self.costs, self.dense, strict=True)]
        if len(slopes) == 1:
            return slopes[0]
        needed = [
            (1 - share * dense / cost.value(widths)).clamp(min=0)
            for cost, share, dense in zip(self.costs, shares, self.dense, strict=True)
        ]
        weights = torch.stack(needed)
        weights = weights / weights.sum().clamp(min=TOLERANCE)
        return (weights[:, None] * torch.stack(slopes)).sum(0)


def _share(limit: Limit, dense: float, known: float) -> float:
    text = limit.strip() if isinstance(limit, str) else ""
    try:
        share = (float(text[:-1]) / 100 * known if text.endswith("%") else float(limit)) / dense
    except ValueError:
        raise ValueError(
            f"budget {limit!r} is neither a share such as '60%' nor a number in the cost's unit."
        ) from None
    if not 0 < share < float("inf"):
        raise ValueError(f"budget {limit!r} must be above 0 and finite.")
    return share
