"""How widths move, behind one face: `ScheduledSolver` on schedule, `AdmmSolver` as in Algorithm 1, `FixedMask` not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ecc.methods.ecc.admm import AdmmDynamics, AdmmSettings, AdmmState
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.schedule import Schedule
from ecc.methods.ecc.scheduled import PruneDecision, ScheduledPruner
from ecc.training.cuda_graph import CudaGraphFunction

MOST_GRAPHED = 2**17
"""Parts of a network up to which an update is a CUDA graph, which keeps its memory; single weights are more."""


class Dynamics(Protocol):
    """What the solver asks of its dynamics. State is a tuple of tensors, replaced and never changed in place."""

    name: str

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All that is needed to go on."""

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Whether widths move at this step."""

    def advance(self, scores: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """Moves them."""

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """y of each group, and z, on the device."""

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Puts a state back."""


class _Planned(NamedTuple):
    """A `PruneDecision`, and what the last plan keeps."""

    alive: Tensor
    next_energies: Tensor
    margin: Tensor
    least: Tensor
    """(groups,) int64; the floors where nothing was planned."""


class ScheduledSolver:
    """`ScheduledPruner` at the updates of the schedule.

    Args:
        ladder, limits, floors, width_multiple, left, uniform_floor: As for `ScheduledPruner`.
        alive: (channels,) bool.
        plans: Whether updates look ahead, for parts that are removed in coarse blocks.
    """

    name = "scheduled"

    def __init__(
        self,
        ladder: ChannelRanking,
        limits: ResourceConstraints,
        floors: Tensor,
        width_multiple: int,
        alive: Tensor,
        left: Tensor | None = None,
        *,
        plans: bool = False,
        uniform_floor: float = 0.0,
    ) -> None:
        self._pace, self._plans = ScheduledPruner(ladder, limits, floors, width_multiple, left, uniform_floor), plans
        self._graphed = CudaGraphFunction(self._updated) if len(alive) <= MOST_GRAPHED else None
        self._unit = limits.dense[0] if len(limits.costs) == 1 else 1.0
        self.state = _Planned(*self._pace.start(alive), floors)

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""
        return self.state.alive

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """At the updates of the schedule."""
        return schedule.updates_at(step)

    def advance(self, scores: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """Down to what the schedule allows; the order of removal does not depend on alpha."""
        del weight_lr
        *before, least = self.state
        cut, ends = PruneDecision(*before), schedule.end
        if self._plans and schedule.plans_at(step):
            least = self._pace.plan(cut, scores, ends)
        shares = schedule.shares(step)
        if self._graphed is None or not scores.is_cuda:
            self.state = _Planned(*self._pace.update(cut, scores, shares, ends, least), least)
            return
        allowed = torch.tensor([shares, ends], dtype=torch.float64, device="cpu").to(scores.device, non_blocking=True)
        alive, next_energies, margin = self._graphed(*cut, scores, allowed, least)
        self.state = _Planned(alive, next_energies, margin, least)

    def _updated(
        self, alive: Tensor, next_energies: Tensor, margin: Tensor, scores: Tensor, allowed: Tensor, least: Tensor
    ) -> tuple[Tensor, ...]:
        """`ScheduledPruner.update` as a function of tensors: on a GPU its many small kernels are one CUDA graph."""
        shares, ends = allowed
        return self._pace.update(PruneDecision(alive, next_energies, margin), scores, shares, ends, least)

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """Read off the margin, see `pace.py`."""
        return self.state.next_energies / (2 * weight_lr), self.state.margin / (2 * weight_lr * self._unit)

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Puts a state back."""
        self.state = _Planned(*_like(tensors, self.state))


class FixedMask(ScheduledSolver):
    """What is dead stays dead, and nothing else is removed."""

    name = "fixed"

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Never."""
        del schedule, step
        return False


class AdmmSolver:
    """`AdmmDynamics` at every step; of the schedule it takes the final budget alone.

    Raises:
        ValueError: Several costs, or rounding, which the paper does not have.
    """

    name = "admm"

    def __init__(
        self,
        settings: str | AdmmSettings,
        ladder: ChannelRanking,
        limits: ResourceConstraints,
        floors: Tensor,
        width_multiple: int,
        alive: Tensor,
    ) -> None:
        settings = AdmmSettings() if settings == "admm" else settings
        if isinstance(settings, str):
            raise ValueError(f"solver={settings!r} is unknown; give 'scheduled', 'admm' or AdmmSettings.")
        if len(limits.costs) > 1 or width_multiple > 1:
            raise ValueError("the paper's dynamics know one cost and no rounding; solver='scheduled' knows both.")
        self._paper = AdmmDynamics(ladder, limits.costs[0], floors, settings)
        self._dense = limits.dense[0]
        self.state = self._paper.start(alive)

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""
        return self.state.alive

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Always: widths move a little each step."""
        del schedule, step
        return True

    def advance(self, scores: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """One iteration of Algorithm 1."""
        del step
        budget = schedule.end[0] * self._dense
        self.state = self._paper.step(self.state, scores, weight_lr=weight_lr, budget=budget)

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """The variables themselves."""
        del weight_lr
        return self.state.width_dual, self.state.energy_dual

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Puts a state back."""
        self.state = AdmmState(*_like(tensors, self.state))


def _like(tensors: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.as_tensor(new).to(device=mine.device, dtype=mine.dtype, copy=True)
        for new, mine in zip(tensors, old, strict=True)
    ]
