"""Algorithm 1 to the letter: constant beta and rho, one iteration a training step.

Kept for fidelity, not for use: how many iterations it needs follows from beta, and nobody knows beta beforehand
(`pace.py` has the same fixed point and arrives on time). Widths are channels and energies the cost's own unit, as in
the authors' code, so that their settings mean what they meant there. The order within an iteration is theirs too:
weights (the caller's), prox with the trim of y, phi, s with the projection of z, duals, stop test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ecc.energy.cost import Cost
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.proximal import keeps, trimmed_dual
from ecc.methods.ecc.updates import (
    project_energy_dual,
    step_widths,
    update_energy_dual,
    update_width_dual,
    width_slope,
)
from ecc.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class AdmmSettings:
    """Constants of Algorithm 1; the defaults are those of the authors' published command."""

    width_lr: float = option(3.0, "Learning rate of the widths (beta of the paper).", above=0, flag="admm_width_lr")
    width_penalty: float = option(10.0, "Penalty of the widths (rho_1).", above=0, flag="admm_width_penalty")
    energy_penalty: float = option(10.0, "Penalty of the energy (rho_2).", above=0, flag="admm_energy_penalty")
    min_energy_slope: float = option(
        1e-3, "Smallest slope of the energy dual (epsilon, Sec. 3.3.3).", above=0, flag="admm_min_energy_slope"
    )
    max_norm: float | None = option(1.0, "Largest norm of the gradient of the widths.", above=0, flag="admm_max_norm")
    whole_dual: bool = option(True, "Use floor(s) in Eq. (11), as in the authors' code, not s.", flag="admm_whole_dual")
    projects: bool = option(True, "Project z (Eq. 12). Without it the solver stalls.", flag="admm_projects")

    def __post_init__(self) -> None:
        check_options(self)


class AdmmState(NamedTuple):
    """The variables of Eq. (4) beside the weights, and which channels live."""

    alive: Tensor
    """(channels,) bool."""
    widths: Tensor
    """s, real-valued bounds."""
    width_dual: Tensor
    """y."""
    energy_dual: Tensor
    """z."""


class AdmmDynamics:
    """One iteration of Algorithm 1 after the optimizer's step, as a pure function of vectors.

    Args:
        ladder: The layout of the channels.
        cost: The energy model.
        floors: Least width of each group.
        settings: Constants.
    """

    def __init__(self, ladder: ChannelRanking, cost: Cost, floors: Tensor, settings: AdmmSettings) -> None:
        self._ladder, self._cost, self._settings = ladder, cost, settings
        self._floors = floors.to(torch.float64)

    def start(self, alive: Tensor) -> AdmmState:
        """s = phi(W), y = 0, z = 0."""
        widths = self._ladder.widths(alive).to(torch.float64)
        return AdmmState(alive, widths, torch.zeros_like(widths), widths.new_zeros(()))

    def step(self, state: AdmmState, scores: Tensor, *, weight_lr: float, budget: float) -> AdmmState:
        """The next iteration; once E(phi) is within the budget, nothing changes any more.

        Args:
            state: Before it.
            scores: a of each channel, after the optimizer's step.
            weight_lr: alpha.
            budget: E_budget.
        """
        ladder, settings = self._ladder, self._settings
        if not weight_lr > 0:
            return state  # thresholds scale with alpha: without a step of the weights nothing is pruned
        alive, width_dual = self._prune(state, scores, weight_lr)
        live = ladder.widths(alive).to(torch.float64)

        excess, energy_slope = self._cost.value(state.widths) - budget, self._cost.gradient(state.widths)
        slope = width_slope(
            width_dual,
            live - state.widths,
            excess,
            energy_slope,
            width_penalty=settings.width_penalty,
            energy_penalty=settings.energy_penalty,
        )
        energy_dual = state.energy_dual
        if settings.projects:
            movable = state.widths > self._floors
            energy_dual = project_energy_dual(
                energy_dual, slope, energy_slope, movable, min_energy_slope=settings.min_energy_slope
            )
        widths = step_widths(
            state.widths,
            slope + energy_dual * energy_slope,
            self._floors,
            width_lr=settings.width_lr,
            max_norm=settings.max_norm,
        )
        width_dual = update_width_dual(
            width_dual, live, widths, width_penalty=settings.width_penalty, whole=settings.whole_dual
        )
        excess = self._cost.value(widths) - budget
        energy_dual = update_energy_dual(energy_dual, excess, energy_penalty=settings.energy_penalty)

        # Paper: stop when E(s) <= budget and phi <= s. Authors' code and we: when E(phi) <= budget.
        is_met = self._cost.value(ladder.widths(state.alive)) <= budget
        new = AdmmState(alive, widths, width_dual, energy_dual)
        return AdmmState(*(torch.where(is_met, a, b) for a, b in zip(state, new, strict=True)))

    def _prune(self, state: AdmmState, scores: Tensor, weight_lr: float) -> tuple[Tensor, Tensor]:
        """Algorithm 2 in all groups at once: the channels that stay, and y after the trim."""
        ladder = self._ladder
        rungs = ladder.sort(scores, state.alive)
        survivors = state.widths.floor().long()
        margin = ladder.least(rungs, (rungs.widths - survivors).clamp(min=0))
        width_dual = trimmed_dual(state.width_dual, margin, weight_lr=weight_lr)
        stays = keeps(
            rungs.scores.to(torch.float64),
            (rungs.widths[ladder.group] - ladder.place).to(torch.float64),
            state.widths[ladder.group],
            width_dual[ladder.group],
            weight_lr=weight_lr,
            width_penalty=self._settings.width_penalty,
        )
        stays = stays & (ladder.place < rungs.widths[ladder.group])
        # Algorithm 2 keeps a prefix; counting it spares a second scatter.
        kept = torch.zeros_like(rungs.widths).index_add(0, ladder.group, stays.long())
        return ladder.without_least(rungs, rungs.widths - kept), width_dual
