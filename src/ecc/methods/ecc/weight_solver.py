"""`WeightSolver`: unstructured pruning to an energy budget. Single weights are removed instead of channels.

The paper's problem with one weight per "channel": phi counts the nonzeros of a tensor, a_i = w_i^2 B_i is the
importance of a weight, and the cost is linear in the counts (`ecc.energy.counted`). dE/ds is then one constant per
tensor, so the order of `scheduled.py` is exact for any size of step: the kept weights minimise the sum of the a_i lost.
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
from ecc.methods.ecc.constraints import Limit, PruningProblem, ResourceConstraints
from ecc.methods.ecc.importance import squared_norm
from ecc.methods.ecc.optimizer_wrapper import PruningOptimizer, adam_for, check_optimizer
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import RAMP, WARM_UP, FixedMask, Schedule, ScheduledSolver
from ecc.torch_utils import device_of


class WeightSolver(PruningOptimizer):
    """Optimizer that trains a network and removes single weights until their energy is within a budget.

        cost = nonzero_cost(graph, Platform("eyeriss"))
        solver = WeightSolver(model, cost, budget="40%", steps=len(loader))
        for images, labels in loader:
            loss(model(images), labels).backward()
            solver.step()
            solver.zero_grad()

    It replaces an optimizer as `EccSolver` does; see there for schedulers, clipping and averaged weights. An update
    sorts all weights at once and needs about 150 bytes of memory per weight.

    Args:
        model: The network of the cost, with trained weights. Weights that are zero stay zero; a tensor with fewer
            nonzeros than its minimum was not trained yet, and all of its weights count as alive.
        cost: Joules of nonzero weights. Only the weights that it names are removed.
        budget: `"40%"` of the dense network's cost, or joules. None removes nothing and keeps zeros at zero, for
            fine-tuning.
        steps: Number of calls of `step`. The budget is met after a fraction `warm_up + ramp` of them.
        optimizer: Optimizer of the weights; Adam without weight decay by default.
        lr: Learning rate of the default optimizer.
        min_width_ratio: Minimum fraction of weights kept in each tensor; at least one weight is kept.
        warm_up: Fraction of the steps before weights are removed.
        ramp: Fraction of the steps in which weights are removed.

    Raises:
        InfeasibleBudget: The network is above the budget with every tensor at its minimum.
        BadWidths: The cost belongs to another network.
        EccError: The optimizer holds no parameter of the model. An optimizer that holds some of them is a warning.
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
        inner = adam_for(model, lr) if optimizer is None else optimizer
        device = device_of(model)
        weights = Weights(model, cost, device)
        counts = min_counts(cost.full_widths, min_width_ratio)
        min_widths = torch.tensor(counts, dtype=torch.long, device=device)
        ranking, constraints = ChannelRanking(cost.full_widths, device), ResourceConstraints([cost], weights, device)
        alive = weights.alive([0] * len(counts) if budget is None else counts)
        start = constraints.fractions(ranking.widths(alive))
        ends = start if budget is None else constraints.parse_feasible(budget, min_widths)
        solver = FixedMask if budget is None else ScheduledSolver
        super().__init__(
            inner,
            weights,
            ranking,
            constraints,
            min_widths,
            solver(PruningProblem(ranking, constraints, min_widths), alive),
            Schedule(start, ends, steps, warm_up, ramp),
            names=cost.groups,
            network=f"weights of {cost.network}",
            importance="adam_norm",
        )

    @property
    def counts(self) -> dict[str, int]:
        """Live weights of each tensor. Synchronises with the device."""
        return self._live_counts()

    def mask_(self, model: nn.Module) -> None:
        """Zero the dead weights in a copy of the network, such as averaged weights."""
        masks = self._solver.alive.split(list(self._ranking.full_widths))
        tensors = named_tensors(model)
        with torch.no_grad():
            for name, mask in zip(self._names, masks, strict=True):
                tensor = tensors[name]
                tensor.mul_(mask.view(tensor.shape).to(tensor.device, tensor.dtype))


class Weights:
    """All weights that a cost names, concatenated; the `PrunableParts` of single weights.

    Args:
        model: The network.
        cost: Names the tensors.
        device: Device of importance and masks.

    Raises:
        BadWidths: The network has no such tensors.
    """

    def __init__(self, model: nn.Module, cost: NonzeroCost, device: torch.device) -> None:
        found = _tensors(model, cost)
        self.full_widths: Mapping[str, int] = dict(zip(cost.groups, cost.full_widths, strict=True))
        """Weights of each tensor."""
        self.tensors = list(found.values())
        """In the order of the cost."""
        self._device = device
        self._masks: list[Tensor] = []

    def alive(self, min_counts: Sequence[int]) -> Tensor:
        """(weights,) bool: nonzero weights, and all weights of tensors with fewer nonzeros than the minimum."""
        masks = [tensor.detach().flatten().to(self._device) != 0 for tensor in self.tensors]
        pairs = zip(masks, min_counts, strict=True)
        return torch.cat([mask if int(mask.sum()) >= least else torch.ones_like(mask) for mask, least in pairs])

    @torch.no_grad()
    def norms(self, preconditioners: Iterable[Tensor | None] | None = None) -> Tensor:
        """a_i = w_i^2 B_i of all weights, float32.

        Args:
            preconditioners: B for each of `tensors`; None for the identity.
        """
        given = [None] * len(self.tensors) if preconditioners is None else preconditioners
        pairs = zip(self.tensors, given, strict=True)
        return torch.cat([squared_norm(tensor, one).flatten().to(self._device) for tensor, one in pairs])

    @torch.no_grad()
    def products(self) -> Tensor:
        """w g of all weights, float32; 0 without a gradient."""
        return torch.cat(
            [
                (torch.zeros_like(tensor) if tensor.grad is None else tensor.detach() * tensor.grad).flatten().float()
                for tensor in self.tensors
            ]
        ).to(self._device)

    def set_mask(self, alive: Tensor) -> None:
        """Prepare the masks that `apply_mask_` multiplies with."""
        parts = alive.split(list(self.full_widths.values()))
        self._masks = [
            part.view(tensor.shape).to(tensor.dtype).to(tensor.device)
            for part, tensor in zip(parts, self.tensors, strict=True)
        ]

    @torch.no_grad()
    def apply_mask_(self) -> None:
        """Zero dead weights, which the optimizer's step has changed."""
        torch._foreach_mul_(self.tensors, self._masks)


def min_counts(full: Sequence[int], min_width_ratio: float) -> list[int]:
    """Minimum number of weights of each tensor, at least one.

    Args:
        full: Number of weights of each tensor.
        min_width_ratio: Minimum fraction of them.
    """
    if not 0 <= min_width_ratio <= 1:
        raise ValueError(f"min_width_ratio={min_width_ratio} must be between 0 and 1.")
    return [min(size, max(1, math.ceil(min_width_ratio * size - 1e-9))) for size in full]


def count_nonzeros(model: nn.Module, cost: NonzeroCost) -> dict[str, int]:
    """Number of nonzero weights of each tensor that a cost names.

    Raises:
        BadWidths: The cost belongs to another network.
    """
    return {name: int(tensor.detach().count_nonzero()) for name, tensor in _tensors(model, cost).items()}


def _tensors(model: nn.Module, cost: NonzeroCost) -> dict[str, Tensor]:
    tensors = named_tensors(model)
    for name, size in zip(cost.groups, cost.full_widths, strict=True):
        if name not in tensors or tensors[name].numel() != size:
            has = "has no such tensor" if name not in tensors else f"has {tensors[name].numel()}"
            raise BadWidths(
                f"the cost belongs to another network: it counts {size} weights of {name!r}, but this network {has}. "
                "Create the cost from a graph of this network."
            )
    return {name: tensors[name] for name in cost.groups}
