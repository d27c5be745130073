"""`EccSolver`: takes an optimizer's place in any training loop, and a budget is met when the loop ends.

Each step is Algorithm 1: the optimizer's step on the weights, then, at some steps, channels are removed, and what is
dead is kept at zero. Nothing in a step waits for the device, and every decision is a function of weights and
optimizer state alone, so that the processes of a distributed run decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ecc.energy.cost import Cost
from ecc.errors import BadFile
from ecc.graph import ChannelGraph, zero_channels_
from ecc.methods.ecc.dynamics import Dynamics, Literal, Paced
from ecc.methods.ecc.floors import MIN_SHARE, alive_and_floors
from ecc.methods.ecc.ladder import Ladder
from ecc.methods.ecc.limits import TOLERANCE, Limit, Limits
from ecc.methods.ecc.paper import PaperSettings
from ecc.methods.ecc.schedule import RAMP, WARM_UP, Schedule
from ecc.methods.ecc.scores import Readers, adam_metrics


class Duals(NamedTuple):
    """The dual variables of Eq. (4)."""

    width: dict[str, float]
    """y: what one more channel of each group is worth, in units of the loss."""
    energy: float
    """z: what one more unit of the cost (of several: one more share of the dense network's) is worth."""


class EccSolver(Optimizer):
    """Trains a network and prunes it to a budget on the way.

        solver = EccSolver(model, graph, energy, budget="60%", steps=len(loader))
        for images, labels in loader:
            loss(model(images), labels).backward()
            solver.step()
            solver.zero_grad()
        small = slim(model, graph)

    It shares the parameter groups and the state of the optimizer it wraps, so learning-rate schedulers, gradient
    clipping and accumulation work as with that one. A step that a GradScaler skips is no step: `step` is not called,
    and nothing is counted. Averages of weights remember dead channels: `mask_` an EMA network before you cut it. Dead
    slices still get gradients, which are without effect but count in the norm that clipping looks at.

    Args:
        model: The network that was traced, with trained weights. Channels that are dead already stay dead.
        graph: Its channel graph.
        energy: What is limited; several costs if there are several budgets.
        budget: `"60%"` of what the dense network spends, or a number in the cost's unit; one for each cost.
        steps: Calls of `step` that will be made. The budget is met after `warm_up + ramp` of them, and the rest train
            the final structure.
        optimizer: What steps the weights; Adam with the paper's settings by default. Adam's kin give the paper's metric
            B; with any other optimizer, SGD among them, B is the identity.
        lr: Of the default optimizer.
        min_share: No group falls below this share of its channels.
        round_to: Widths become multiples of this, 8 for most GPUs; a group no wider than this stays, and one that is
            joined with others is cut in such steps (`Skeleton.lattice`).
        warm_up: Share of the steps before channels are removed.
        ramp: Share of the steps in which they are.
        dynamics: `"pace"` meets the budget on schedule (see `pace.py`). `"paper"`, or its settings, walks by the
            paper's constants, and arrives when it arrives.

    Raises:
        InfeasibleBudget: The network spends more with every group at its floor.
        BadWidths: The graph or a cost belongs to another network.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        energy: Cost | Sequence[Cost],
        budget: Limit | Sequence[Limit],
        steps: int,
        *,
        optimizer: Optimizer | None = None,
        lr: float = 1e-5,  # Sec. 4.1
        min_share: float = MIN_SHARE,
        round_to: int = 1,
        warm_up: float = WARM_UP,
        ramp: float = RAMP,
        dynamics: str | PaperSettings = "pace",
    ) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.inner = Adam(trained, lr=lr, betas=(0.9, 0.999)) if optimizer is None else optimizer
        """The optimizer that steps the weights."""
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self._share_state()

        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._graph, self._round_to = graph, round_to
        self._ladder = Ladder([group.width for group in graph.groups], device)
        self._readers = Readers(model, graph, device)
        costs = [energy] if isinstance(energy, Cost) else list(energy)
        self._limits = Limits(costs, graph, device)
        alive, self._floors = alive_and_floors(model, graph, min_share, round_to, device)
        ends = self._limits.parse(budget)
        self._check(ends)
        spent = self._limits.spent(self._ladder.widths(alive))
        start = tuple(float(cost) / dense for cost, dense in zip(spent, self._limits.dense, strict=True))
        self._schedule = Schedule(start, ends, steps, warm_up, ramp)
        self._steps = 0  # of the present schedule
        self._dynamics: Dynamics
        if dynamics == "pace":
            left = torch.tensor(graph.skeleton.lattice(round_to), dtype=torch.long, device=device)
            self._dynamics = Paced(self._ladder, self._limits, self._floors, round_to, alive, left)
        else:
            self._dynamics = Literal(dynamics, self._ladder, self._limits, self._floors, round_to, alive)
        self._set_masks(alive, masked=not bool(alive.all()))

    # --- the optimizer's part --------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # no overloads
        """One step of the weights, and of the widths when it is time."""
        loss: float | None = self.inner.step() if closure is None else self.inner.step(closure)
        self._steps += 1
        if self._dynamics.is_due(self._schedule, self._steps):
            with torch.no_grad():
                scores = self._readers.scores(adam_metrics(self.inner, self._readers.tensors))
                self._dynamics.advance(scores, self._schedule, self._steps, self.inner.param_groups[0]["lr"])
            self._set_masks(self._dynamics.alive, masked=True)
        if self._is_masked:
            self._readers.apply_mask_()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hands more parameters to the optimizer within."""
        if not any(param_group is mine for mine in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and under `ecc` what the solver itself needs to go on: tensors and plain values."""
        schedule = self._schedule
        own = {
            "graph": self._graph.fingerprint,
            "steps": self._steps,
            "schedule": [list(schedule.start), list(schedule.end), schedule.steps, schedule.warm_up, schedule.ramp],
            "dynamics": self._dynamics.name,
            "tensors": list(self._dynamics.state),
            "masked": self._is_masked,
        }
        return {**self.inner.state_dict(), "ecc": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a solver with the same settings stood; load the network's weights as well.

        Raises:
            BadFile: Not the state of such a solver.
        """
        own = state_dict.get("ecc")
        if own is None:
            raise BadFile(
                "this state has no entry 'ecc': it is not a state of EccSolver. Load it into a plain optimizer."
            )
        if own["graph"] != self._graph.fingerprint or own["dynamics"] != self._dynamics.name:
            raise BadFile(
                f"this state belongs to network {own['graph']} and dynamics {own['dynamics']!r}, the solver to "
                f"{self._graph.fingerprint} and {self._dynamics.name!r}. Make the solver as it was made then."
            )
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "ecc"})
        self._share_state()
        start, end, steps, warm_up, ramp = own["schedule"]
        self._schedule, self._steps = Schedule(tuple(start), tuple(end), steps, warm_up, ramp), own["steps"]
        self._dynamics.load(own["tensors"])
        self._set_masks(self._dynamics.alive, masked=own["masked"])

    def _share_state(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    # --- the budget's part -----------------------------------------------------------------------

    @property
    def widths(self) -> dict[str, int]:
        """Live channels of each group. Waits for the device."""
        counts = self._ladder.widths(self._dynamics.alive).tolist()
        return dict(zip(self._graph.full_widths, counts, strict=True))

    @property
    def spent(self) -> tuple[Tensor, ...]:
        """What the live channels cost, each cost in its unit; does not wait for the device."""
        return self._limits.spent(self._ladder.widths(self._dynamics.alive))

    @property
    def energy(self) -> Tensor:
        """What the live channels cost, by the first cost."""
        return self.spent[0]

    @property
    def limits(self) -> tuple[float, ...]:
        """The budgets, each in the unit of its cost."""
        return tuple(end * dense for end, dense in zip(self._schedule.end, self._limits.dense, strict=True))

    @property
    def target(self) -> float:
        """What the schedule allows now, by the first cost."""
        return self._schedule.shares(self._steps)[0] * self._limits.dense[0]

    @property
    def is_met(self) -> bool:
        """Whether all budgets are met. Waits for the device."""
        return all(float(cost) <= limit * (1 + TOLERANCE) for cost, limit in zip(self.spent, self.limits, strict=True))

    @property
    def progress(self) -> float:
        """Share of the steps that were made."""
        return min(1.0, self._steps / self._schedule.steps)

    @property
    def duals(self) -> Duals:
        """y and z at the last update. Waits for the device."""
        y, z = self._dynamics.duals(self.inner.param_groups[0]["lr"])
        return Duals(dict(zip(self._graph.full_widths, y, strict=True)), z)

    @property
    def descent(self) -> float:
        """How much of the present descent is done, from 0 to 1; its budget is met at 1."""
        schedule = self._schedule
        return min(max(self._steps - schedule.ramp_start, 0) / schedule.ramp_steps, 1.0)

    def aim(self, limit: Limit | Sequence[Limit]) -> None:
        """Corrects where the present descent ends, as after a measurement on the way. Its pace stays.

        Raises:
            InfeasibleBudget: As at construction.
        """
        ends = self._limits.parse(limit)
        self._check(ends)
        self._schedule = replace(self._schedule, end=ends)

    def set_limit(self, limit: Limit | Sequence[Limit], steps: int | None = None, *, ramp: float | None = None) -> None:
        """Begins a new descent from here, as after a measurement that missed the budget. There is no warm-up again.

        Dead channels do not come back: a limit above what is spent now removes nothing more.

        Args:
            limit: As `budget`.
            steps: Steps of the new descent and of the training after it; by default those that are left.
            ramp: Share of them in which channels are removed; by default as before.

        Raises:
            InfeasibleBudget: As at construction.
        """
        ends = self._limits.parse(limit)
        self._check(ends)
        left = max(1, self._schedule.steps - self._steps)
        start = self._schedule.shares(self._steps)
        ramp = self._schedule.ramp if ramp is None else ramp
        self._schedule = Schedule(start, ends, left if steps is None else steps, 0.0, ramp)
        self._steps = 0

    def mask_(self, model: nn.Module) -> None:
        """Silences the dead channels in a copy of the network too, such as an average of its weights."""
        masks = self._dynamics.alive.split(list(self._ladder.full_widths))
        named = zip(self._graph.groups, masks, strict=True)
        zero_channels_(model, self._graph, {group.name: ~mask for group, mask in named if group.frozen is None})

    def _check(self, ends: Sequence[float]) -> None:
        advice = "min_share" if self._round_to == 1 else "min_share or round_to"
        self._limits.check(ends, self._floors, advice)

    def _set_masks(self, alive: Tensor, *, masked: bool) -> None:
        self._is_masked = masked  # False while nothing is dead: a multiplication by one is left out
        self._readers.set_mask(alive)
