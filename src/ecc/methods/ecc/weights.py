"""`WeightSolver`: fine-grained pruning to an energy budget. Weights go one by one, in place of whole channels.

The paper's problem with one weight a "channel": phi counts the nonzeros of a layer, a_i = w_i^2 B_i is the energy of a
weight in the metric of Eq. (7), and the cost is linear in the counts (`ecc.energy.counted`), so that its slope is a
constant price for each layer and the order of `pace.py`, by a_i per joule, is exact at any size of step: what is kept
minimises the sum of the a_i that are lost, up to the last weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy.counted import NonzeroCost
from ecc.errors import BadWidths
from ecc.graph.model_copy import named_tensors
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.checks import check_optimizer
from ecc.methods.ecc.constraints import Limit, ResourceConstraints
from ecc.methods.ecc.dynamics import FixedMask, ScheduledSolver
from ecc.methods.ecc.optimizer_wrapper import BudgetedOptimizer, adam_of, checked_ends, device_of, shares_of
from ecc.methods.ecc.schedule import RAMP, WARM_UP, Schedule


class WeightSolver(BudgetedOptimizer):
    """Trains a network and removes single weights on the way, until their energy is within a budget.

        cost = nonzero_cost(graph, Platform("eyeriss"))
        solver = WeightSolver(model, cost, budget="40%", steps=len(loader))
        for images, labels in loader:
            loss(model(images), labels).backward()
            solver.step()
            solver.zero_grad()

    It takes an optimizer's place as `EccSolver` does; what is said there of schedulers, clipping and averages holds
    here too. An update sorts all weights at once and needs about 150 bytes of memory for each.

    Args:
        model: The network that the cost was made of, with trained weights. Weights that are zero already stay zero,
            but where a tensor has fewer nonzeros than its floor it was not trained yet, and counts as whole.
        cost: Joules of nonzero weights; only the weights that it names are removed.
        budget: `"40%"` of what the dense network spends, or joules. None removes nothing more and keeps what is zero
            at zero, as for tuning after a solve.
        steps: Calls of `step` that will be made. The budget is met after `warm_up + ramp` of them, and the rest train
            what is left.
        optimizer: What steps the weights; Adam with the paper's settings by default.
        lr: Of the default optimizer.
        min_width_ratio: No tensor falls below this share of its weights, and none below one weight.
        warm_up: Share of the steps before weights are removed.
        ramp: Share of the steps in which they are.

    Raises:
        InfeasibleBudget: The network spends more with every tensor at its floor.
        BadWidths: The cost belongs to another network.
        EccError: The optimizer holds no parameter of the model. One that holds a part of them warns.
    """

    def __init__(
        self,
        model: nn.Module,
        cost: NonzeroCost,
        budget: Limit | None,
        steps: int,
        *,
        optimizer: Optimizer | None = None,
        lr: float = 1e-5,  # Sec. 4.1, as for channels
        min_width_ratio: float = MIN_WIDTH_RATIO,
        warm_up: float = WARM_UP,
        ramp: float = RAMP,
    ) -> None:
        if optimizer is not None:
            check_optimizer(model, optimizer)
        inner = adam_of(model, lr) if optimizer is None else optimizer
        device = device_of(model)
        weights = Weights(model, cost, device)
        least = floor_counts(cost.full_widths, min_width_ratio)
        floors = torch.tensor(least, dtype=torch.long, device=device)
        ladder, limits = ChannelRanking(cost.full_widths, device), ResourceConstraints([cost], weights, device)
        alive = weights.alive([0] * len(least) if budget is None else least)
        start = shares_of(limits, ladder.widths(alive))
        ends = start if budget is None else checked_ends(limits, budget, floors, "min_width_ratio")
        kind = FixedMask if budget is None else ScheduledSolver
        super().__init__(
            inner,
            weights,
            ladder,
            limits,
            floors,
            kind(ladder, limits, floors, 1, alive),
            Schedule(start, ends, steps, warm_up, ramp),
            names=cost.groups,
            network=f"weights of {cost.network}",
            importance="adam_norm",
        )

    @property
    def counts(self) -> dict[str, int]:
        """Live weights of each tensor. Waits for the device."""
        return self._live()

    def mask_(self, model: nn.Module) -> None:
        """Zeroes the dead weights in a copy of the network too, such as an average of its weights."""
        masks = self._dynamics.alive.split(list(self._ladder.full_widths))
        tensors = named_tensors(model)
        with torch.no_grad():
            for name, mask in zip(self._names, masks, strict=True):
                tensor = tensors[name]
                tensor.mul_(mask.view(tensor.shape).to(tensor.device, tensor.dtype))


class Weights:
    """All weights that a cost names, one behind the other; see `Slices` in `budgeted.py`.

    Args:
        model: The network.
        cost: Names the tensors.
        device: Where scores and masks live.

    Raises:
        BadWidths: If the network has no such tensors.
    """

    def __init__(self, model: nn.Module, cost: NonzeroCost, device: torch.device) -> None:
        found = _tensors(model, cost)
        self.full_widths: Mapping[str, int] = dict(zip(cost.groups, cost.full_widths, strict=True))
        """Weights of each tensor."""
        self.tensors = list(found.values())
        """In the order of the cost."""
        self._device = device
        self._masks: list[Tensor] = []

    def alive(self, floors: Sequence[int]) -> Tensor:
        """(weights,) bool: what is not zero, and everything where less than the floor is not. Waits for the device."""
        masks = [tensor.detach().flatten().to(self._device) != 0 for tensor in self.tensors]
        pairs = zip(masks, floors, strict=True)
        return torch.cat([mask if int(mask.sum()) >= floor else torch.ones_like(mask) for mask, floor in pairs])

    @torch.no_grad()
    def scores(self, metrics: Iterable[Tensor | None]) -> Tensor:
        """a_i = w_i^2 B_i of all weights, float32.

        Args:
            metrics: B for each of `tensors`; None for the identity.
        """
        parts = []
        for tensor, metric in zip(self.tensors, metrics, strict=True):
            energies = tensor.detach().to(torch.float32).square()
            parts.append((energies if metric is None else energies.mul_(metric)).flatten().to(self._device))
        return torch.cat(parts)

    @torch.no_grad()
    def products(self) -> Tensor:
        """w g of all weights, float32; 0 where there is no gradient."""
        return torch.cat(
            [
                (torch.zeros_like(tensor) if tensor.grad is None else tensor.detach() * tensor.grad).flatten().float()
                for tensor in self.tensors
            ]
        ).to(self._device)

    def set_mask(self, alive: Tensor) -> None:
        """Prepares the masks that `apply_mask_` multiplies with."""
        parts = alive.split(list(self.full_widths.values()))
        self._masks = [
            part.view(tensor.shape).to(tensor.dtype).to(tensor.device)
            for part, tensor in zip(parts, self.tensors, strict=True)
        ]

    @torch.no_grad()
    def apply_mask_(self) -> None:
        """Zeroes dead weights, which the optimizer's step has moved."""
        torch._foreach_mul_(self.tensors, self._masks)


def floor_counts(full: Sequence[int], min_width_ratio: float) -> list[int]:
    """The least number of weights of each tensor.

    Args:
        full: Weights of each.
        min_width_ratio: The least share of them; at least one weight stays in any case.
    """
    if not 0 <= min_width_ratio <= 1:
        raise ValueError(f"min_width_ratio={min_width_ratio} is a share of a tensor's weights, from 0 to 1.")
    return [min(size, max(1, math.ceil(min_width_ratio * size - 1e-9))) for size in full]


def count_nonzeros(model: nn.Module, cost: NonzeroCost) -> dict[str, int]:
    """How many weights of each tensor are not zero.

    Raises:
        BadWidths: If the cost belongs to another network.
    """
    return {name: int(tensor.detach().count_nonzero()) for name, tensor in _tensors(model, cost).items()}


def _tensors(model: nn.Module, cost: NonzeroCost) -> dict[str, Tensor]:
    tensors = named_tensors(model)
    for name, size in zip(cost.groups, cost.full_widths, strict=True):
        if name not in tensors or tensors[name].numel() != size:
            has = "no such tensor" if name not in tensors else f"{tensors[name].numel()} weights there"
            raise BadWidths(
                f"the cost belongs to another network: it counts {size} weights of {name!r}, and this one has {has}. "
                "Make it of a graph of this network."
            )
    return {name: tensors[name] for name in cost.groups}
