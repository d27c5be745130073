"""Algorithm 1 in relative units (`solver="admm"`): the paper's iteration without constants that depend on the network.

The published form (`admm.py`) has constants in channels, joules and units of the weights, so they have to be set for
each network. Here every quantity is relative; the functions are those of `admm.py`.

    alpha   1/2; y and z have the unit of the importance, whatever the criterion
    rho_1   a fraction of the importance of the next channel, so y reaches it after about 1 / DUAL_STEP iterations
    s       steps are relative to the full widths, and no longer than `MAX_STEP` of them or one block of channels
    beta    the shortest step after which E(s) is what the schedule allows now, so the iteration ends on time
    z       projected to the smallest value that moves a width, times 1 + `SPREAD`: groups whose importance per cost is
            within this factor of the smallest one shrink together
    rho_2   not needed: after a step E(s) is what is allowed, so Eq. (12) adds nothing to the projection

Several costs are combined as in `ResourceConstraints.gradient`. With a width multiple, channels are removed in blocks,
and the limit on y keeps the smallest allowed width that is not below s. When the schedule ends, s is rounded to allowed
widths, up or down, within the budgets (`WidthPlanner.round`), and the network is pruned to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ecc.methods.ecc.admm import project_energy_dual, proximal_rule, step_widths, trim_width_dual
from ecc.methods.ecc.constraints import Fractions, PruningProblem
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.ranking import SortedChannels
from ecc.methods.ecc.scheduled import Schedule, load_like

DUAL_STEP = 0.5
SPREAD = 0.1
MAX_STEP = 0.02
ITERATIONS = 200  # in a schedule, at least; a schedule with few updates has several in each
PROPOSED_ITERATIONS = 64  # from the present widths to those of a proposal
STEP_CANDIDATES = 32  # step sizes that are compared in an iteration
_ALPHA = 0.5  # the threshold 2 alpha y of the proximal step is y


class RelativeAdmmState(NamedTuple):
    """The variables of Eq. (4) besides the weights, the live channels, and the final widths if they are fixed."""

    alive: Tensor
    """(channels,) bool."""
    widths: Tensor
    """s, real-valued bounds."""
    width_dual: Tensor
    """2 alpha y."""
    energy_dual: Tensor
    """2 alpha z, per fraction of the dense cost."""
    planned: Tensor
    """(groups,) int64; the minimum widths if nothing is fixed."""
    is_fixed: Tensor
    """0-dimensional bool."""


class RelativeAdmmSolver:
    """Iterations of Algorithm 1 at the update steps of the schedule.

    Args:
        problem: Channels, costs and allowed widths.
        alive: (channels,) bool.
        planner: Rounds the real-valued widths in the end.
    """

    name = "admm"

    def __init__(self, problem: PruningProblem, alive: Tensor, planner: WidthPlanner) -> None:
        self._ranking, self._constraints, self._planner = problem.ranking, problem.constraints, planner
        self._min_widths, self._steps, self._rest = problem.min_widths, problem.step, problem.rest
        device = alive.device
        self._full = torch.tensor(self._ranking.full_widths, dtype=torch.float64, device=device)
        self._longest = (MAX_STEP * self._full).clamp(min=self._steps)
        self._scale = torch.linspace(0, 1, STEP_CANDIDATES + 1, dtype=torch.float64, device=device)
        self._unit = self._constraints.dense[0] if len(self._constraints.costs) == 1 else 1.0
        self._is_fixed = False  # as in the state, where reading it would synchronise with the device
        self.state = self._start(alive)

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""
        return self.state.alive

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Whether the schedule updates at this step."""
        return schedule.updates_at(step)

    def update(self, importance: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """Some iterations with what the schedule allows now; the last update prunes to the rounded widths."""
        del weight_lr
        state = self.state
        for _ in range(-(-ITERATIONS * schedule.every // schedule.ramp_steps)):
            state = self.iterate(state, importance, schedule.fractions(step), schedule.end)
        if step >= schedule.ramp_end:
            widths = state.planned if self._is_fixed else self._round(state, importance, schedule.end)
            ranked = self._ranking.sort(importance, state.alive)
            alive = self._ranking.remove_least(ranked, (ranked.widths - widths).clamp(min=0))
            state = state._replace(alive=alive, widths=widths.to(torch.float64))
        self.state = state

    def iterate(
        self, state: RelativeAdmmState, importance: Tensor, fractions: Fractions, ends: Fractions
    ) -> RelativeAdmmState:
        """Next state, as a pure function.

        Args:
            state: Current state.
            importance: a of each channel.
            fractions: Cost that is allowed now, as fractions of the dense cost.
            ends: Cost that is allowed in the end; it determines how several costs are combined.
        """
        ranking, least = self._ranking, state.planned.to(torch.float64)
        ranked = ranking.sort(importance, state.alive)
        whole = self._allowed_above(state.widths, ranked.widths)
        margin = ranking.next_importance(ranked, ranked.widths - whole).to(torch.float64)
        margin = torch.nan_to_num(margin, posinf=torch.finfo(torch.float32).max)
        penalty = DUAL_STEP * margin / self._steps  # rho_1
        width_dual = trim_width_dual(state.width_dual, margin, weight_lr=_ALPHA)

        alive = self._prune(ranked, whole, width_dual, penalty, state.planned)  # Eq. (8)
        live = ranking.widths(alive)

        slope = self._constraints.gradient(state.widths, ends)
        slope = torch.maximum(slope, 1e-9 * slope.amax()).clamp(min=1e-300)  # plateaus of the cost come last
        resistance = width_dual + penalty * (live - state.widths).clamp(min=0)
        movable = state.widths > least
        slack = SPREAD * resistance + 1e-6 * resistance.where(movable, 0).mean() + 1e-30
        zero = torch.zeros_like(state.energy_dual)
        energy_dual = project_energy_dual(zero, -resistance, slope, movable, min_energy_slope=slack)
        gradient = (energy_dual * slope - resistance).clamp(min=0).masked_fill(~movable, 0)
        # The gradient by s / s_full, and the step of s that belongs to it.
        direction = torch.nan_to_num(gradient * self._full.square(), posinf=0.0)
        direction = direction / (direction / self._longest).amax().clamp(min=1e-300)
        widths = self._step(state.widths, direction, least, fractions)  # Eq. (10)

        below = live - self._allowed_above(widths, live)
        width_dual = width_dual + penalty * below  # Eq. (11)
        return state._replace(alive=alive, widths=widths, width_dual=width_dual, energy_dual=energy_dual)

    def propose(self, importance: Tensor, ends: Sequence[float]) -> list[int] | None:
        """Widths at the end of iterations to these costs, if the importance stays as it is."""
        state = self._start(self.state.alive)
        first = self._constraints.fractions(state.widths)
        for number in range(1, PROPOSED_ITERATIONS + 1):
            left = 1 - number / PROPOSED_ITERATIONS
            allowed = [end + max(start - end, 0) * left for start, end in zip(first, ends, strict=True)]
            state = self.iterate(state, importance, allowed, ends)
        return self._round(state, importance, ends).tolist()

    def fix_plan(self, widths: Sequence[int] | None) -> None:
        """Prune to these widths, whatever the importance will be; None ends at those of the iteration."""
        self._is_fixed = widths is not None
        planned = self._min_widths if widths is None else torch.tensor(widths).to(self._min_widths)
        bounds = self.state.widths if widths is None else torch.maximum(self.state.widths, planned.to(torch.float64))
        self.state = self.state._replace(
            planned=planned, widths=bounds, is_fixed=torch.tensor(self._is_fixed, device=planned.device)
        )

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """y of each group and z."""
        return self.state.width_dual / (2 * weight_lr), self.state.energy_dual / (2 * weight_lr * self._unit)

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Restore a state."""
        self.state = RelativeAdmmState(*load_like(tensors, self.state))
        self._is_fixed = bool(self.state.is_fixed)

    def _start(self, alive: Tensor) -> RelativeAdmmState:
        """s = phi(W), and y so large that the first iteration trims it to the importance of the next channel."""
        widths = self._ranking.widths(alive).to(torch.float64)
        large = torch.full_like(widths, torch.finfo(torch.float32).max)
        fixed = torch.zeros((), dtype=torch.bool, device=alive.device)
        return RelativeAdmmState(alive, widths, large, widths.new_zeros(()), self._min_widths, fixed)

    def _allowed_above(self, bounds: Tensor, live: Tensor) -> Tensor:
        """s, rounded up to an allowed width, int64. The present width is allowed too."""
        blocks = torch.div(bounds - 1e-9 - self._rest, self._steps).ceil().long()
        return torch.minimum(torch.maximum(self._rest + self._steps * blocks, self._min_widths), live)

    def _prune(
        self, ranked: SortedChannels, bounds: Tensor, width_dual: Tensor, penalty: Tensor, least: Tensor
    ) -> Tensor:
        """Algorithm 2 in all groups at once. With a multiple, the number of kept channels is rounded up."""
        ranking, group = self._ranking, self._ranking.group
        stays = proximal_rule(
            ranked.importance.to(torch.float64),
            (ranked.widths[group] - ranking.rank).to(torch.float64),
            bounds[group].to(torch.float64),
            width_dual[group],
            weight_lr=_ALPHA,
            width_penalty=penalty[group],
        )
        stays = stays & (ranking.rank < ranked.widths[group])
        kept = torch.zeros_like(ranked.widths).index_add(0, group, stays.long())
        blocks = torch.div(kept - self._rest + self._steps - 1, self._steps, rounding_mode="floor")
        rounded = torch.maximum(self._rest + self._steps * blocks, least)
        return ranking.remove_least(ranked, (ranked.widths - rounded).clamp(min=0))

    def _step(self, widths: Tensor, direction: Tensor, least: Tensor, fractions: Fractions) -> Tensor:
        """The shortest of some steps after which every cost is within its fraction; the longest if none is."""
        rows = torch.stack([step_widths(widths, direction, least, width_lr=1.0)])
        rows = widths + self._scale[:, None] * (rows - widths)
        exceeding = self._constraints.exceeded(rows, fractions).sum().clamp(max=STEP_CANDIDATES)
        return rows.index_select(0, exceeding.view(1)).squeeze(0)

    def _round(self, state: RelativeAdmmState, importance: Tensor, ends: Sequence[float]) -> Tensor:
        """Allowed widths around s that lose the least importance within the budgets. Synchronises with the device."""
        return self._planner.round(state.alive, importance, ends, state.widths)
