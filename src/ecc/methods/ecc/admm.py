"""The published algorithm (`solver="paper"`): Algorithm 1 with constant step sizes, one iteration per training step.

The paper solves

    min over W, s   loss(W)    subject to   phi(W) <= s   (2b)   and   E(s) <= E_budget   (2c)

by its minimax form (4) with the dual variables y >= 0 of (2b) and z >= 0 of (2c). One iteration is

    W   optimizer step on the loss, done by the caller             Eq. (7)
    W   proximal step: remove channels, with y trimmed             Eq. (8), Algorithm 2
    s   gradient step, with z projected                            Eq. (10), Sec. 3.3.3
    y   <- [y + rho_1 (phi(W) - s)]_+                              Eq. (11)
    z   <- [z + rho_2 (E(s) - E_budget)]_+                         Eq. (12)

in the order of the authors' code. Widths are channels and costs have their own unit, as in that code, so that its
constants keep their meaning. How many iterations it takes depends on beta, rho_1 and rho_2, and it may not converge
within `steps`. `relative_admm.py` has the same iteration in relative units and ends on schedule; so does
`scheduled.py`, which computes its fixed point.

In the functions below, widths, duals and gradients are vectors with one entry per group, and costs are 0-dimensional
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ecc.methods.ecc.constraints import PruningProblem
from ecc.methods.ecc.scheduled import Schedule, load_like
from ecc.settings import PaperSettings

# ---------------------------------------------------------------- Algorithm 2: the proximal step
#
# A channel's importance is a_i = ||w_i||_B^2, the sum over its consumer slices of w^2 B. The step minimises, over all
# sets of kept channels and with k the number kept,
#
#     1/2 (sum of a_i over the removed) + alpha (rho_1 / 2 [k - s]_+^2 + y k)
#
# Sort the channels by descending a. The gain of keeping the r-th one falls with r and its cost rises, so the best set
# is a prefix, and each channel can be decided by its rank alone.


def penalty_of_rank(
    ranks: Tensor, bounds: Tensor | float, *, weight_lr: float, width_penalty: float | Tensor
) -> Tensor:
    """Cost of keeping the r-th channel by the quadratic penalty: rho_1 alpha ([r - s]_+^2 - [r - 1 - s]_+^2).

    Args:
        ranks: Rank by descending importance, from 1.
        bounds: s, the width bound of the group.
        weight_lr: alpha.
        width_penalty: rho_1.
    """
    above, before = (ranks - bounds).clamp(min=0), (ranks - 1 - bounds).clamp(min=0)
    return width_penalty * weight_lr * (above.square() - before.square())


def trim_width_dual(width_dual: Tensor, margin: Tensor, *, weight_lr: float) -> Tensor:
    """y, lowered so that floor(s) channels survive the proximal step (Sec. 3.3.3): y <- min(y, margin / (2 alpha)).

    Args:
        width_dual: y of each group.
        margin: Importance of the floor(s)-th most important channel of each group.
        weight_lr: alpha.
    """
    return torch.minimum(width_dual, margin.to(width_dual.dtype) / (2 * weight_lr))


def proximal_rule(
    importance: Tensor,
    ranks: Tensor,
    bounds: Tensor | float,
    width_dual: Tensor | float,
    *,
    weight_lr: float,
    width_penalty: float | Tensor,
) -> Tensor:
    """Whether each channel is kept: a >= penalty_of_rank + 2 alpha y, or rank <= floor(s) because of the trim.

    Paper: kept if greater. We: greater or equal, since the trim makes exact ties. The arguments are those of
    `proximal_keep`, with the rank of each channel in its group, and s and y of that group.
    """
    threshold = (
        penalty_of_rank(ranks, bounds, weight_lr=weight_lr, width_penalty=width_penalty) + 2 * weight_lr * width_dual
    )
    whole = torch.floor(torch.as_tensor(bounds, dtype=torch.float64, device=ranks.device))
    return (importance >= threshold) | (ranks <= whole)


def proximal_keep(
    importance: Tensor,
    bound: float | Tensor,
    width_dual: float | Tensor,
    *,
    weight_lr: float,
    width_penalty: float,
    trim: bool = True,
) -> Tensor:
    """Which channels of one group survive: Algorithm 2 in closed form.

    Args:
        importance: a, one number per channel, at least 0.
        bound: s.
        width_dual: y.
        weight_lr: alpha.
        width_penalty: rho_1.
        trim: Keep at least floor(s) channels; False gives the plain argmin.
    """
    order = importance.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1, device=order.device)
    step = {"weight_lr": weight_lr, "width_penalty": width_penalty}
    if trim:
        return proximal_rule(importance, ranks, bound, width_dual, **step)
    return importance >= penalty_of_rank(ranks, bound, **step) + 2 * weight_lr * width_dual


# ---------------------------------------------------------------- Eq. (10) to (12): s, y and z


def width_gradient(
    width_dual: Tensor,
    width_excess: Tensor,
    energy_excess: Tensor,
    energy_slope: Tensor,
    *,
    width_penalty: float,
    energy_penalty: float,
) -> Tensor:
    """Gradient of L1 + L2 by s without the term of z, from Eq. (10).

        g1 = rho_2 [E(s) - E_budget]_+ dE/ds - y - rho_1 [phi - s]_+

    Paper: sum of squares. Authors' code: square of the sum. We: as the paper; no difference was seen.

    Args:
        width_dual: y.
        width_excess: phi - s.
        energy_excess: E(s) - E_budget.
        energy_slope: dE/ds.
        width_penalty: rho_1.
        energy_penalty: rho_2.
    """
    pull = energy_penalty * energy_excess.clamp(min=0) * energy_slope
    return pull - width_dual - width_penalty * width_excess.clamp(min=0)


def project_energy_dual(
    energy_dual: Tensor, gradient: Tensor, energy_slope: Tensor, movable: Tensor, *, min_energy_slope: float | Tensor
) -> Tensor:
    """z, raised until at least one width moves (Sec. 3.3.3): max over u of the gradient >= epsilon.

    The projection drives the algorithm: without it y outgrows z dE/ds and the energy does not fall. As in the authors'
    code, z >= min over unsaturated u of ([-g1_u]_+ + epsilon) / dE_u. If no width can move, or none that can saves
    energy, z is unchanged.

    Args:
        energy_dual: z.
        gradient: g1, from `width_gradient`.
        energy_slope: dE/ds.
        movable: Whether each width is above its minimum.
        min_energy_slope: epsilon.
    """
    useful = movable & (energy_slope > 0)
    needed = ((-gradient).clamp(min=0) + min_energy_slope) / energy_slope.where(useful, 1)
    least = needed.masked_fill(~useful, torch.inf).amin()
    return torch.where(least.isfinite(), torch.maximum(energy_dual, least), energy_dual)


def step_widths(
    widths: Tensor, gradient: Tensor, min_widths: Tensor, *, width_lr: float, max_norm: float | None = None
) -> Tensor:
    """Gradient step on s, Eq. (10): s <- s - beta [gradient]_+. Widths never grow, and stop at their minimum.

    Args:
        widths: s.
        gradient: The whole gradient by s, the term of z included.
        min_widths: Smallest widths.
        width_lr: beta.
        max_norm: Longer gradients are scaled to this norm.
    """
    descent = gradient.clamp(min=0).masked_fill(widths <= min_widths, 0)
    if max_norm is not None:
        descent = descent * (max_norm / descent.norm().clamp(min=1e-300)).clamp(max=1)
    return torch.minimum(torch.maximum(widths - width_lr * descent, min_widths), widths)


def update_width_dual(
    width_dual: Tensor, live: Tensor, widths: Tensor, *, width_penalty: float, whole: bool = True
) -> Tensor:
    """Projected ascent on y, Eq. (11): y <- [y + rho_1 (phi - s)]_+.

    Args:
        width_dual: y.
        live: phi.
        widths: s.
        width_penalty: rho_1.
        whole: Use floor(s), as the authors' code does. With the paper's s, y grows while s is between two integers,
            which is 200 times faster and gives a slightly worse allocation.
    """
    return (width_dual + width_penalty * (live - (widths.floor() if whole else widths))).clamp(min=0)


def update_energy_dual(energy_dual: Tensor, energy_excess: Tensor, *, energy_penalty: float) -> Tensor:
    """Projected ascent on z, Eq. (12): z <- [z + rho_2 (E(s) - E_budget)]_+."""
    return (energy_dual + energy_penalty * energy_excess).clamp(min=0)


# ---------------------------------------------------------------- Algorithm 1


class AdmmState(NamedTuple):
    """The variables of Eq. (4) besides the weights, and which channels are alive."""

    alive: Tensor
    """(channels,) bool."""
    widths: Tensor
    """s, real-valued bounds."""
    width_dual: Tensor
    """y."""
    energy_dual: Tensor
    """z."""


class PaperSolver:
    """One iteration of Algorithm 1 after every training step. Of the schedule it uses only the final budget.

    Args:
        settings: Constants.
        problem: Channels, the energy model and the smallest widths.
        alive: (channels,) bool.

    Raises:
        ValueError: There are several costs, or `width_multiple` is above 1; the paper has neither.
    """

    name = "paper"

    def __init__(self, settings: PaperSettings, problem: PruningProblem, alive: Tensor) -> None:
        ranking, constraints = problem.ranking, problem.constraints
        if len(constraints.costs) > 1 or problem.width_multiple > 1:
            raise ValueError(
                f"solver='paper' supports one cost and width_multiple=1, but got {len(constraints.costs)} costs and "
                f"width_multiple={problem.width_multiple}; use solver='admm' or 'scheduled'."
            )
        self._settings, self._ranking = settings, ranking
        self._min_widths = problem.min_widths.to(torch.float64)
        self._cost, self._dense = constraints.costs[0], constraints.dense[0]
        widths = ranking.widths(alive).to(torch.float64)  # s = phi(W), y = 0, z = 0
        self.state = AdmmState(alive, widths, torch.zeros_like(widths), widths.new_zeros(()))

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""
        return self.state.alive

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Always true: widths move at every step."""
        del schedule, step
        return True

    def update(self, importance: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """One iteration. Without a learning rate nothing changes: thresholds scale with alpha."""
        del step
        budget = schedule.end[0] * self._dense
        if weight_lr > 0:
            self.state = self.iterate(self.state, importance, weight_lr=weight_lr, budget=budget)

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """y and z."""
        del weight_lr
        return self.state.width_dual, self.state.energy_dual

    def propose(self, importance: Tensor, ends: Sequence[float]) -> list[int] | None:
        """None: it is not known where it ends."""
        del importance, ends
        return None

    def fix_plan(self, widths: Sequence[int] | None) -> None:
        """Nothing: it proposes no widths."""
        del widths

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Restore a state."""
        self.state = AdmmState(*load_like(tensors, self.state))

    def iterate(self, state: AdmmState, importance: Tensor, *, weight_lr: float, budget: float) -> AdmmState:
        """Next state, as a pure function. Once E(phi) is within the budget, nothing changes.

        Args:
            state: Current state.
            importance: a of each channel, after the optimizer's step.
            weight_lr: alpha, above 0.
            budget: E_budget, in the unit of the cost.
        """
        ranking, settings = self._ranking, self._settings
        alive, width_dual = self._prune(state, importance, weight_lr)
        live = ranking.widths(alive).to(torch.float64)

        excess, energy_slope = self._cost.value(state.widths) - budget, self._cost.gradient(state.widths)
        gradient = width_gradient(
            width_dual,
            live - state.widths,
            excess,
            energy_slope,
            width_penalty=settings.width_penalty,
            energy_penalty=settings.energy_penalty,
        )
        energy_dual = state.energy_dual
        if settings.project_energy_dual:
            movable = state.widths > self._min_widths
            energy_dual = project_energy_dual(
                energy_dual, gradient, energy_slope, movable, min_energy_slope=settings.min_energy_slope
            )
        widths = step_widths(
            state.widths,
            gradient + energy_dual * energy_slope,
            self._min_widths,
            width_lr=settings.width_lr,
            max_norm=settings.max_norm,
        )
        width_dual = update_width_dual(
            width_dual, live, widths, width_penalty=settings.width_penalty, whole=settings.floor_width_dual
        )
        excess = self._cost.value(widths) - budget
        energy_dual = update_energy_dual(energy_dual, excess, energy_penalty=settings.energy_penalty)

        # Paper: stop when E(s) <= budget and phi <= s. Authors' code and we: when E(phi) <= budget.
        is_met = self._cost.value(ranking.widths(state.alive)) <= budget
        new = AdmmState(alive, widths, width_dual, energy_dual)
        return AdmmState(*(torch.where(is_met, a, b) for a, b in zip(state, new, strict=True)))

    def _prune(self, state: AdmmState, importance: Tensor, weight_lr: float) -> tuple[Tensor, Tensor]:
        """Algorithm 2 in all groups at once: the channels that stay, and y after the trim."""
        ranking = self._ranking
        ranked = ranking.sort(importance, state.alive)
        survivors = state.widths.floor().long()
        margin = ranking.next_importance(ranked, (ranked.widths - survivors).clamp(min=0))
        width_dual = trim_width_dual(state.width_dual, margin, weight_lr=weight_lr)
        stays = proximal_rule(
            ranked.importance.to(torch.float64),
            (ranked.widths[ranking.group] - ranking.rank).to(torch.float64),
            state.widths[ranking.group],
            width_dual[ranking.group],
            weight_lr=weight_lr,
            width_penalty=self._settings.width_penalty,
        )
        stays = stays & (ranking.rank < ranked.widths[ranking.group])
        # Algorithm 2 keeps a prefix, so counting the kept channels is enough.
        kept = torch.zeros_like(ranked.widths).index_add(0, ranking.group, stays.long())
        return ranking.remove_least(ranked, ranked.widths - kept), width_dual
