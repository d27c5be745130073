"""The default solver (`solver="scheduled"`): the fixed point of Algorithm 1, reached on schedule and without constants.

Why this solves the problem of the paper. With the trim of Sec. 3.3.3, y_u = a_u / (2 alpha), where a_u is the
importance of the next channel that group u would lose. With the projection of z, z is the smallest number that moves
some width in Eq. (10), so z = min over u of y_u / (dE/ds_u). The group that moves is the one with the smallest a_u per
joule. It loses that channel (Algorithm 2), its y_u rises to the next one, and so on until E <= E_budget. Then no width
moves: z dE/ds_u <= y_u in all groups, with equality at the margin. This is stationarity of Eq. (4) in s, and channel i
of group u is alive exactly if

    a_i / (dE/ds_u)  >=  2 alpha z,

one threshold for the whole network. So an update ranks all channels by a_i / (dE/ds_u), removes them in this order
until the cost is what the schedule allows, and reads off the duals: 2 alpha z is the ratio of the last channel removed,
and 2 alpha y_u is the importance of the next one. The paper's alpha, beta, rho and epsilon determine how fast its
iterates move along this order, but not the order; here the schedule determines the speed.

dE/ds is taken at the widths before the update. It is exact in the limit of many small updates, as in Eq. (10).

The order alone wastes budget where channels are removed in blocks (`width_multiple`), and where costs have steps or
products: the last block may save a sixth of the network's energy where a hundredth was needed. So `WidthPlanner`
allocates the widths at the end of the schedule from the current importance (`allocation.py`), an update does not remove
what the plan keeps, and the last update prunes to the plan.

Where the plan removes whole branches, they go first, and channels only as far as the schedule asks for more. A branch
costs energy however narrow it is, and later plans cannot widen a group again. If channels went first, every group would
become as narrow as its narrowest plan, and many narrow branches would use up the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ecc.methods.ecc.constraints import Fractions, PruningProblem
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.ranking import ChannelRanking, SortedChannels
from ecc.training.cuda_graph import CudaGraphFunction

# ---------------------------------------------------------------- schedule

WARM_UP = 0.02
RAMP = 0.6
MAX_UPDATES = 400  # keeps updates a small part of the training time
ENOUGH_UPDATES = 100  # beyond these, updates are `UPDATE_INTERVAL` steps apart
UPDATE_INTERVAL = 4
PLANS = 32  # plans per schedule; a plan waits for the device


@dataclass(frozen=True)
class Schedule:
    """How much each cost may be at each step, in plain numbers. Steps are counted from 1.

        warm-up   the importance settles, nothing is removed          2 % of the steps
        ramp      e_t = b + (e_0 - b) (1 - tau)^3                     60 % of the steps
        rest      the final structure trains on

    The cube is that of gradual pruning (Zhu and Gupta, 2017): unimportant channels are removed early, and training has
    the most time to recover where every channel matters.

    Args:
        start: Cost at the start, one fraction of the dense cost for each budget.
        end: Cost at the end of the ramp. Where it is above `start`, nothing is removed.
        steps: Number of training steps.
        warm_up: Fraction of the steps before the ramp.
        ramp: Fraction of the steps of the ramp.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]
    steps: int
    warm_up: float = WARM_UP
    ramp: float = RAMP

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1.")
        if not 0 <= self.warm_up < 1 or not 0 < self.ramp <= 1 or self.warm_up + self.ramp > 1:
            raise ValueError(
                f"warm_up={self.warm_up} and ramp={self.ramp} are fractions of the steps: warm_up must be at least 0, "
                "ramp above 0, and their sum at most 1."
            )

    @property
    def ramp_steps(self) -> int:
        """Number of steps of the ramp, at least one."""
        return max(1, int(self.ramp * self.steps))

    @property
    def ramp_start(self) -> int:
        """Last step of the warm-up."""
        return min(-int(-self.warm_up * self.steps // 1), self.steps - self.ramp_steps)

    @property
    def ramp_end(self) -> int:
        """Step after which the budget is met."""
        return self.ramp_start + self.ramp_steps

    @property
    def every(self) -> int:
        """Steps from one update to the next."""
        return max(1, self.ramp_steps // MAX_UPDATES, min(UPDATE_INTERVAL, self.ramp_steps // ENOUGH_UPDATES))

    def updates_at(self, step: int) -> bool:
        """Whether channels are removed at this step. The last step of the ramp always is such a step."""
        done = step - self.ramp_start
        return 0 < done <= self.ramp_steps and (done % self.every == 0 or done == self.ramp_steps)

    def plans_at(self, step: int) -> bool:
        """Whether the final widths are planned again before the update at this step: the first, the last, and some."""
        done = step - self.ramp_start
        update = -(-done // self.every)  # counted from 1
        return update == 1 or update % self._updates_of_a_plan == 0 or done == self.ramp_steps

    @property
    def _updates_of_a_plan(self) -> int:
        return max(1, self.ramp_steps // self.every // PLANS)

    def done(self, step: int) -> float:
        """Share of the reduction that is done at a step."""
        return 1 - (1 - min(max(step - self.ramp_start, 0), self.ramp_steps) / self.ramp_steps) ** 3

    def fractions(self, step: int) -> tuple[float, ...]:
        """Allowed cost at a step, as fractions of the dense cost."""
        left = 1 - self.done(step)
        return tuple(end + max(start - end, 0) * left for start, end in zip(self.start, self.end, strict=True))

    def fractions_of_next_plan(self, step: int) -> tuple[float, ...]:
        """Allowed cost when the widths are planned the next time after a step."""
        return self.fractions(step + self._updates_of_a_plan * self.every)


# ---------------------------------------------------------------- one update

FANOUT = 64  # candidates per level of the search: two levels find one of 4,096 prefixes, three one of 262,144
FANOUT_ON_GPU = 1024  # on a GPU a level costs its kernel launches, whatever their size


class PruneDecision(NamedTuple):
    """Result of an update."""

    alive: Tensor
    """(channels,) bool."""
    next_importance: Tensor
    """2 alpha y: importance of the next channel that each group would lose."""
    threshold: Tensor
    """2 alpha z: importance per fraction of the dense cost of the last channel removed."""


class _Blocks(NamedTuple):
    """Blocks of channels that can be removed, in ascending order of importance per cost."""

    groups: Tensor
    counts: Tensor
    """Channels in each block, int64; 0 for blocks that must stay."""
    ratios: Tensor
    """Mean importance per cost."""


class ScheduledPruner:
    """Removes channels in the order of importance per cost, as a pure function of vectors.

    Channels are removed in blocks. The first block of a group makes its width an allowed one, and each further block
    has as many channels as the step of the group (`StructureSpec.width_steps`). A block is ranked by its mean
    importance. A group that is not wider than its step keeps its width.

    Args:
        problem: Channels, costs and allowed widths.
    """

    def __init__(self, problem: PruningProblem) -> None:
        ranking = problem.ranking
        self._ranking, self._constraints, self._min_widths = ranking, problem.constraints, problem.min_widths
        self._steps, self._remainders = problem.step, problem.rest
        device, steps = ranking.group.device, self._steps.tolist()
        counts = [width // step + 1 for width, step in zip(ranking.full_widths, steps, strict=True)]
        blocks = ChannelRanking(counts, device)
        self._block_group, self._block_steps = blocks.group, self._steps[blocks.group]
        # Rank of the first channel of each block if the width were a multiple; `_blocks` shifts it.
        self._block_start = blocks.rank * self._block_steps
        self._within = torch.arange(max(steps, default=1), device=device)
        self._fanout = FANOUT if device.type == "cpu" else FANOUT_ON_GPU
        self._levels = 1
        while self._fanout**self._levels <= len(self._block_group):
            self._levels += 1

    def start(self, alive: Tensor) -> PruneDecision:
        """State before the first update: nothing removed, duals 0."""
        groups = len(self._ranking.full_widths)
        zeros = torch.zeros(groups, dtype=torch.float64, device=alive.device)
        return PruneDecision(alive, zeros, zeros.new_zeros(()))

    def update(
        self,
        before: PruneDecision,
        importance: Tensor,
        fractions: Fractions,
        ends: Fractions,
        planned: Tensor | None = None,
    ) -> PruneDecision:
        """Remove channels until every cost is within its fraction.

        Args:
            before: The last update.
            importance: a of each channel.
            fractions: Cost that is allowed now, as fractions of the dense cost.
            ends: Cost that is allowed in the end; it determines how several costs are combined.
            planned: (groups,) int64, widths that a `plan` for no larger fractions keeps; None for the minimum widths.
        """
        ranked = self._ranking.sort(importance, before.alive)
        least = self._min_widths if planned is None else torch.maximum(self._min_widths, planned)
        blocks = self._blocks(ranked, ends, least)
        removed, count = self._search(blocks, ranked.widths, fractions)
        # Not `ratios[count - 1]`: indexing with a 0-dimensional tensor synchronises with the device.
        last = blocks.ratios.index_select(0, (count - 1).clamp(min=0).view(1)).squeeze(0)
        return PruneDecision(
            self._ranking.remove_least(ranked, removed),
            self._ranking.next_importance(ranked, removed).to(torch.float64),
            torch.where(count > 0, last, before.threshold),
        )

    def prune_to(self, before: PruneDecision, importance: Tensor, widths: Tensor, ends: Fractions) -> PruneDecision:
        """Remove the least important channels of each group until it has a given width.

        Args:
            before: The last update.
            importance: a of each channel.
            widths: (groups,) int64. A group that is narrower already stays as it is.
            ends: Cost that is allowed in the end.
        """
        ranked = self._ranking.sort(importance, before.alive)
        removed = (ranked.widths - widths).clamp(min=0)
        blocks = self._blocks(ranked, ends, torch.maximum(self._min_widths, widths))
        ratios = torch.where(blocks.counts > 0, blocks.ratios, before.threshold.to(blocks.ratios))
        return PruneDecision(
            self._ranking.remove_least(ranked, removed),
            self._ranking.next_importance(ranked, removed).to(torch.float64),
            ratios.amax(),
        )

    def _blocks(self, ranked: SortedChannels, ends: Fractions, least: Tensor) -> _Blocks:
        """All blocks, sorted by mean importance per cost."""
        group = self._block_group
        slope = self._constraints.gradient(ranked.widths.to(torch.float64), ends)
        # Where the cost has a plateau, its slope is 0. A small slope instead ranks these channels last.
        slope = torch.maximum(slope, 1e-9 * slope.amax()).clamp(min=1e-300)
        missing = (self._remainders - ranked.widths) % self._steps  # the first block is shorter by this
        removable = (ranked.widths - least).clamp(min=0)
        ranks = (self._block_start - missing[group])[:, None] + self._within
        inside = (ranks >= 0) & (ranks < removable[group, None]) & (self._within < self._block_steps[:, None])
        entries = (self._ranking.first[group, None] + ranks).clamp(0, len(ranked.importance) - 1)
        # Sums of float32 numbers in float64 are exact enough that equal blocks tie.
        sums = torch.where(inside, ranked.importance[entries].to(torch.float64), 0.0).sum(1)
        counts = inside.sum(1)
        ratios = torch.where(counts > 0, sums / counts.clamp(min=1) / slope[group], torch.inf)
        order = ratios.sort(stable=True).indices  # ties keep their order
        return _Blocks(group[order], counts[order], ratios[order])

    def _search(self, blocks: _Blocks, widths: Tensor, fractions: Fractions) -> tuple[Tensor, Tensor]:
        """Shortest prefix of the blocks after whose removal every cost is within its fraction.

        Costs never rise when channels are removed. So the prefixes that are too short come first, and a search with
        `fanout` branches finds the boundary: a level evaluates the cost after `low + k * stride` blocks for
        k = 0 ... fanout in one call, counts how many exceed the budget, and continues between the last prefix that
        exceeds it and the next one. A loop over single blocks, or a bisection, would need far more kernels.

        Returns:
            Channels removed from each group, int64, and the number of blocks, 0-dimensional.
        """
        groups, fanout = len(widths), self._fanout
        position = torch.arange(len(blocks.groups), device=widths.device)
        low = torch.zeros((), dtype=torch.long, device=widths.device)
        removed = torch.zeros_like(widths)
        for level in reversed(range(self._levels)):
            stride = fanout**level
            bucket = torch.div(position - low, stride, rounding_mode="floor")
            counted = torch.where((bucket >= 0) & (bucket < fanout), blocks.counts, 0)
            cell = blocks.groups * (fanout + 1) + bucket.clamp(0, fanout - 1) + 1
            # Integer sums do not depend on their order, which varies on a GPU. A GPU sums along rows much faster than
            # along columns.
            table = widths.new_zeros(groups * (fanout + 1)).index_add(0, cell, counted).view(groups, fanout + 1)
            candidates = removed + table.cumsum(1).T  # row k: k strides removed beyond `low`
            exceeding = self._constraints.exceeded((widths - candidates).to(torch.float64), fractions).sum()
            chosen = exceeding.clamp(max=fanout) if level == 0 else (exceeding - 1).clamp(0, fanout - 1)
            low = low + chosen * stride
            removed = candidates.index_select(0, chosen.view(1)).squeeze(0)
        return removed, torch.minimum(low, (blocks.counts > 0).sum())


# ---------------------------------------------------------------- the solver

MAX_CUDA_GRAPH_SIZE = 2**17
"""Largest number of channels for which an update is a CUDA graph, which keeps its memory. Single weights are more."""


class _State(NamedTuple):
    """A `PruneDecision`, and the widths of the last plan."""

    alive: Tensor
    next_importance: Tensor
    threshold: Tensor
    planned: Tensor
    """(groups,) int64; the minimum widths if nothing was planned."""
    is_fixed: Tensor
    """0-dimensional bool: whether the plan is final."""


class ScheduledSolver:
    """Runs `ScheduledPruner` at the update steps of the schedule.

    Args:
        problem: Channels, costs and allowed widths.
        alive: (channels,) bool.
        planner: Plans the final widths. None removes channels in order until the budget is met, which is exact where
            channels are removed one by one and the cost is linear.
    """

    name = "scheduled"

    def __init__(
        self,
        problem: PruningProblem,
        alive: Tensor,
        *,
        planner: WidthPlanner | None = None,
    ) -> None:
        constraints = problem.constraints
        self._pruner = ScheduledPruner(problem)
        self._planner = planner
        self._cuda_graph = CudaGraphFunction(self._updated) if len(alive) <= MAX_CUDA_GRAPH_SIZE else None
        self._unit = constraints.dense[0] if len(constraints.costs) == 1 else 1.0
        self.state = _State(*self._pruner.start(alive), problem.min_widths, torch.zeros((), dtype=torch.bool))
        self._is_fixed = False  # as in the state, where reading it would synchronise with the device
        self.removed = self._removed()
        """Positions of the branches that are removed, among those of the planner."""

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""
        return self.state.alive

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Whether the schedule updates at this step."""
        return schedule.updates_at(step)

    def update(self, importance: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """Prune to the cost that the schedule allows. The order does not depend on alpha."""
        del weight_lr
        *before, planned, is_fixed = self.state
        decision, ends = PruneDecision(*before), schedule.end
        channels = importance[: len(decision.alive)]
        if self._planner is not None and schedule.plans_at(step):
            if not self._is_fixed:
                planned = self._planner.plan(decision.alive, importance, ends)
            if step >= schedule.ramp_end:
                self.state = _State(*self._pruner.prune_to(decision, channels, planned, ends), planned, is_fixed)
                self.removed = self._removed()
                return
            if self._planner.branches:
                next_fractions = schedule.fractions_of_next_plan(step)
                decision = self._remove_branches(decision, importance, planned, next_fractions)
        importance = channels
        fractions = schedule.fractions(step)
        if self._cuda_graph is None or not importance.is_cuda:
            updated = self._pruner.update(decision, importance, fractions, ends, planned)
            self.state = _State(*updated, planned, is_fixed)
            return
        allowed = torch.tensor([fractions, ends], dtype=torch.float64, device="cpu")
        allowed = allowed.to(importance.device, non_blocking=True)
        alive, next_importance, threshold = self._cuda_graph(*decision, importance, allowed, planned)
        self.state = _State(alive, next_importance, threshold, planned, is_fixed)

    def _updated(
        self,
        alive: Tensor,
        next_importance: Tensor,
        threshold: Tensor,
        importance: Tensor,
        allowed: Tensor,
        planned: Tensor,
    ) -> tuple[Tensor, ...]:
        """`ScheduledPruner.update` as a function of tensors: on a GPU its many small kernels are one CUDA graph."""
        fractions, ends = allowed
        return self._pruner.update(
            PruneDecision(alive, next_importance, threshold), importance, fractions, ends, planned
        )

    def propose(self, importance: Tensor, ends: Sequence[float]) -> list[int] | None:
        """Widths that a plan for these costs would have now; None without a planner."""
        return None if self._planner is None else self._planner.plan(self.alive, importance, ends).tolist()

    def fix_plan(self, widths: Sequence[int] | None) -> None:
        """Prune to these widths, whatever the importance will be; None plans again."""
        planned = self.state.planned if widths is None else torch.tensor(widths).to(self.state.planned)
        self._is_fixed = widths is not None
        self.state = self.state._replace(planned=planned, is_fixed=torch.tensor(self._is_fixed))

    def _remove_branches(
        self, decision: PruneDecision, importance: Tensor, planned: Tensor, allowed: Fractions
    ) -> PruneDecision:
        """Remove branches that the plan removes, the least important first, until every cost is within its fraction."""
        assert self._planner is not None
        branches, kept = self._planner.branches, planned.tolist()
        chosen = [b for b, groups in enumerate(branches) if not any(kept[g] for g in groups)]
        worth = importance[len(decision.alive) :].tolist()
        chosen.sort(key=lambda b: (b not in self.removed, worth[b]))
        widths = self._pruner._ranking.widths(decision.alive).to(torch.float64)
        after = widths.repeat(len(chosen) + 1, 1)  # row k: without the first k branches
        for number, branch in enumerate(chosen):
            after[number + 1 :, branches[branch]] = 0
        needed = int(self._pruner._constraints.exceeded(after, allowed).sum())
        gone = {group for b in chosen[:needed] for group in branches[b]}
        masks = decision.alive.split(list(self._pruner._ranking.full_widths))
        alive = torch.cat([torch.zeros_like(mask) if g in gone else mask for g, mask in enumerate(masks)])
        decision = decision._replace(alive=alive)
        self.state = _State(*decision, planned, self.state.is_fixed)
        self.removed = self._removed()
        return decision

    def _removed(self) -> tuple[int, ...]:
        """Branches without live channels. Synchronises with the device."""
        if self._planner is None or not self._planner.branches:
            return ()
        widths = self._pruner._ranking.widths(self.state.alive).tolist()
        return tuple(b for b, groups in enumerate(self._planner.branches) if not any(widths[g] for g in groups))

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """y of each group and z, read off the last update."""
        return self.state.next_importance / (2 * weight_lr), self.state.threshold / (2 * weight_lr * self._unit)

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Restore a state."""
        self.state = _State(*load_like(tensors, self.state))
        self._is_fixed = bool(self.state.is_fixed)
        self.removed = self._removed()


class FixedMask(ScheduledSolver):
    """Keeps dead channels dead, and removes nothing."""

    name = "fixed"

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Never."""
        del schedule, step
        return False


def load_like(tensors: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors with the device and type of others."""
    return [
        torch.as_tensor(new).to(device=mine.device, dtype=mine.dtype, copy=True)
        for new, mine in zip(tensors, old, strict=True)
    ]
