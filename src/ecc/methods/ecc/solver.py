"""`EccSolver`: takes an optimizer's place in any training loop, and a budget is met when the loop ends."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy.cost import Cost
from ecc.errors import EccWarning
from ecc.graph import ChannelGraph, mask_channels_
from ecc.graph.slimming import check_before_slim
from ecc.methods.ecc.admm import AdmmSettings
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.checks import check_optimizer
from ecc.methods.ecc.constraints import Limit, ResourceConstraints
from ecc.methods.ecc.dynamics import AdmmSolver, Dynamics, ScheduledSolver
from ecc.methods.ecc.importance import ConsumerSlices
from ecc.methods.ecc.min_widths import alive_and_floors
from ecc.methods.ecc.optimizer_wrapper import BudgetedOptimizer, Duals, adam_of, checked_ends, device_of, shares_of
from ecc.methods.ecc.schedule import RAMP, WARM_UP, Schedule

__all__ = ["Duals", "EccSolver"]


class EccSolver(BudgetedOptimizer):
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
            B; with any other optimizer, SGD among them, B is the identity. Other metrics than the paper's need no B.
        lr: Of the default optimizer.
        min_width_ratio: No group falls below this share of its channels.
        width_multiple: Widths become multiples of this, 8 for most GPUs; a group no wider than this stays, and one that is
            joined with others is cut in such steps (`StructureSpec.width_remainders`). Give `slim` the same number.
        warm_up: Share of the steps before channels are removed.
        ramp: Share of the steps in which they are.
        solver: `"scheduled"` meets the budget on schedule (see `pace.py`). `"admm"`, or its settings, walks by the
            paper's constants, and arrives when it arrives.
        uniform_floor: No group falls below this share of what an even cut to the budget would leave of it, see `ScheduledPruner.bound`; 0
            for `min_width_ratio` alone, and for the paper's dynamics, which do not plan.
        importance: What a channel counts for: `"taylor"`, what the loss says of it (see `taylor.py`), or `"adam_norm"`, the
            paper's norm of its weights. None for the paper's with the paper's dynamics, and for `"taylor"` otherwise.

    Raises:
        InfeasibleBudget: The network spends more with every group at its floor.
        BadWidths: The graph or a cost belongs to another network.
        EccError: The optimizer holds no parameter of the model. One that holds a part of them warns.
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
        min_width_ratio: float = MIN_WIDTH_RATIO,
        width_multiple: int = 1,
        warm_up: float = WARM_UP,
        ramp: float = RAMP,
        solver: str | AdmmSettings = "scheduled",
        uniform_floor: float = 0.0,
        importance: str | None = None,
    ) -> None:
        if not 0 <= uniform_floor < 1:
            raise ValueError(f"uniform_floor={uniform_floor} is a share of the even cut, from 0 to below 1.")
        if uniform_floor and solver != "scheduled":
            raise ValueError(f"uniform_floor={uniform_floor} is for solver='scheduled'; the paper's do not plan.")
        if optimizer is not None:
            check_optimizer(model, optimizer)
        inner = adam_of(model, lr) if optimizer is None else optimizer
        device = device_of(model)
        costs = [energy] if isinstance(energy, Cost) else list(energy)
        ladder = ChannelRanking([group.width for group in graph.groups], device)
        limits = ResourceConstraints(costs, graph, device)
        alive, floors = alive_and_floors(model, graph, min_width_ratio, width_multiple, device)
        advice = "min_width_ratio" if width_multiple == 1 else "min_width_ratio or width_multiple"
        ends = checked_ends(limits, budget, floors, advice)
        moves: Dynamics
        if solver == "scheduled":
            left = torch.tensor(graph.structure.width_remainders(width_multiple), dtype=torch.long, device=device)
            moves = ScheduledSolver(
                ladder, limits, floors, width_multiple, alive, left, plans=True, uniform_floor=uniform_floor
            )
        else:
            moves = AdmmSolver(solver, ladder, limits, floors, width_multiple, alive)
        schedule = Schedule(shares_of(limits, ladder.widths(alive)), ends, steps, warm_up, ramp)
        self._readers = ConsumerSlices(model, graph, device)
        super().__init__(
            inner,
            self._readers,
            ladder,
            limits,
            floors,
            moves,
            schedule,
            names=tuple(graph.full_widths),
            network=graph.fingerprint,
            importance=importance or ("taylor" if solver == "scheduled" else "adam_norm"),
            advice=advice,
        )
        self._model, self._graph, self.width_multiple = model, graph, width_multiple
        check_before_slim(model, self.warn_if_unmet)

    @property
    def widths(self) -> dict[str, int]:
        """Channels of each group that `slim` would keep now. Waits for the device.

        These are the live ones, and dead ones to round up. Where a group began with less than its floor it counts as
        whole in the descent, as one that is not trained yet; what is still silent then is cut off all the same.
        """
        return self._kept_widths(self._live_counts().tolist())

    @property
    def numbers(self) -> tuple[tuple[float, ...], Duals, dict[str, int]]:
        """`cost`, `duals` and `widths`, for which the device is waited for only once."""
        y, z = self._dynamics.duals(self.inner.param_groups[0]["lr"])
        parts = [torch.stack(self.cost), y, z.view(1), self._live_counts()]
        found = torch.cat([part.to(torch.float64) for part in parts]).cpu().split([len(part) for part in parts])
        spent, width_duals, energy_dual, live = (part.tolist() for part in found)
        duals = Duals(dict(zip(self._names, width_duals, strict=True)), energy_dual[0])
        return tuple(spent), duals, self._kept_widths([int(count) for count in live])

    def _live_counts(self) -> Tensor:
        """(groups,) int64: channels that are not removed and that some layer reads."""
        return self._ladder.widths(self._readers.live() & self._dynamics.alive)

    def _kept_widths(self, live: list[int]) -> dict[str, int]:
        return dict(zip(self._names, self._graph.structure.padded(live, self.width_multiple), strict=True))

    def warn_if_unmet(self) -> None:
        """Warns if a budget is not met, with the way out; `slim` calls it. Waits for the device."""
        if text := self._unmet():
            warnings.warn(text, EccWarning, stacklevel=3)

    def mask_(self, model: nn.Module) -> None:
        """Silences the dead channels in a copy of the network too, such as an average of its weights."""
        masks = self._dynamics.alive.split(list(self._ladder.full_widths))
        named = zip(self._graph.groups, masks, strict=True)
        mask_channels_(model, self._graph, {group.name: ~mask for group, mask in named if group.frozen is None})
