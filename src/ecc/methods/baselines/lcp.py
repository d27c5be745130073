"""LcP and LeGR: prune by one global ranking of all channels, with a learned compensation for each group.

T.-W. Chin, C. Zhang, D. Marculescu: Layer-compensated Pruning for Resource-constrained Convolutional Neural Networks,
arXiv:1810.00518 (LcP, shifts the norms of a layer), and T.-W. Chin, R. Ding, C. Zhang, D. Marculescu: Towards Efficient
Model Compression via Learned Global Ranking, CVPR 2020 (LeGR, scales them too). All numbers are those of the authors'
code, github.com/enyac-group/LeGR, for both.

As there: channels are removed in ascending order of `scale * squared norm + shift`. Scales and shifts are found by
regularised evolution (400 candidates, population 64, tournaments of 16, a tenth of the layers mutated, scales by
exp(N(0, 1)) with a step that shrinks to a fifth, shifts by N(0, std of the layer's norms)). The fitness of a candidate
is the loss of the network that it leaves, after a few steps of training or none. The plain norms are among the first
candidates. At least a tenth of a layer stays. One search serves every budget.

Changed for energy: the ranking ends where the predicted joules meet the targets, not the FLOPs. Energy has no other
influence: the order is by score, not by score per joule, since the compensation can learn the value of a layer.

Changed besides, and why:
- Layers are channel groups, and the norm is that of the weights that consume a channel, as for all methods here, not of
  the filter that produces it. A channel that several layers share counts once, with all of them.
- The loss is that of a few training batches (`calibration_loss.py`), not of test data as in the published scripts.
- Batch norms are recalibrated before the loss is computed (`recalibration.py`), as for all methods.
- At least one group is mutated. The authors' tenth of fewer than ten layers is none, and the search would stop.
- Widths are rounded down to allowed widths.
- `short_steps` is 0, as in their CIFAR-10 table. Their 200 for ImageNet are 80,000 batches with 400 candidates, and
  comparisons here are at equal batches.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadWidths
from ecc.graph import ChannelGroup
from ecc.methods.base import PruningContext, magnitudes
from ecc.options import check_options, option
from ecc.training import derived_seed

from .calibration_loss import CalibrationBatches, calibration_loss
from .widths import check_feasible

LAST_STEP = 0.2
"""Step of the mutations of scales at the last candidate, relative to the first one."""


@dataclass(frozen=True, kw_only=True)
class LcpSettings:
    """Settings of the search. The defaults are those of LeGR's code."""

    scale: bool = option(False, "Scale and shift the norms (LeGR), or only shift them (LcP).")
    candidates: int = option(400, "Number of candidates; 1 uses the plain norms.", range=(1, None))
    population: int = option(64, "Size of the population.", range=(1, None))
    tournament: int = option(16, "Members drawn for a tournament; the best has a child.", range=(1, None))
    mutation_ratio: float = option(0.1, "Fraction of the groups that are mutated.", above=0, range=(None, 1))
    sigma: float = option(1.0, "Standard deviation of the logarithm of scales.", range=(0, None))
    spread: float = option(1.0, "Standard deviation of shifts, in that of the group's norms.", range=(0, None))
    short_steps: int = option(0, "Training steps of each candidate.", range=(0, None))
    batches: int = option(4, "Training batches of the loss that candidates are compared by.", range=(1, None))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Compensation:
    """Scale and shift of the norms of each group that can be pruned, in the order of the graph."""

    scales: tuple[float, ...]
    shifts: tuple[float, ...]

    @classmethod
    def none(cls, groups: int) -> Compensation:
        """The plain norms."""
        return cls((1.0,) * groups, (0.0,) * groups)


class Evolution:
    """Regularised evolution: the best of a tournament has a child, and the oldest of the population is removed."""

    def __init__(self, spreads: Sequence[float], settings: LcpSettings, seed: int) -> None:
        self._spreads = torch.tensor(spreads, dtype=torch.float64) * settings.spread
        self._settings = settings
        self._generator = torch.Generator().manual_seed(seed)
        self.scored = 0
        self.population: list[tuple[float, Compensation]] = []
        """Fitness and candidate, the oldest first."""
        self.best: tuple[float, Compensation] = (-math.inf, Compensation.none(len(spreads)))
        """The best of all candidates; the first one of equals."""

    @property
    def is_over(self) -> bool:
        """Whether all candidates were scored."""
        return self.scored >= self._settings.candidates

    def propose(self) -> Compensation:
        """The next candidate. Every call draws random numbers."""
        count = len(self._spreads)
        if self.scored == 0 or not count:
            return Compensation.none(count)
        if self.scored < self._settings.population:
            return self._mutate(Compensation.none(count), list(range(count)), 1.0)
        drawn = torch.randint(len(self.population), (self._settings.tournament,), generator=self._generator).tolist()
        _, parent = self.population[max(drawn, key=lambda member: self.population[member][0])]
        mutated = max(1, int(self._settings.mutation_ratio * count))
        places = torch.randperm(count, generator=self._generator)[:mutated].tolist()
        return self._mutate(parent, places, 1 - (1 - LAST_STEP) * self.scored / self._settings.candidates)

    def add(self, candidate: Compensation, fitness: float) -> None:
        """Add a candidate to the population. Higher is fitter; NaN counts as the lowest fitness."""
        fitness = -math.inf if math.isnan(fitness) else fitness
        self.population.append((fitness, candidate))
        del self.population[: -self._settings.population]
        if self.scored == 0 or fitness > self.best[0]:
            self.best = (fitness, candidate)
        self.scored += 1

    def _mutate(self, base: Compensation, places: Sequence[int], step: float) -> Compensation:
        """A compensation that differs in some groups."""
        drawn = torch.randn(2, len(places), generator=self._generator, dtype=torch.float64)
        scales, shifts = list(base.scales), list(base.shifts)
        for place, up, along in zip(places, *drawn.tolist(), strict=True):
            if self._settings.scale:
                scales[place] *= math.exp(self._settings.sigma * step * up)
            shifts[place] += float(self._spreads[place]) * along
        return Compensation(tuple(scales), tuple(shifts))

    def state(self) -> dict[str, Any]:
        """Plain values, and the state of the generator."""
        return {
            "scored": self.scored,
            "population": [_plain(member) for member in self.population],
            "best": _plain(self.best),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.scored = int(state["scored"])
        self.population = [_member(member) for member in state["population"]]
        self.best = _member(state["best"])
        self._generator.set_state(state["generator"].cpu().clone())


class Lcp:
    """Searches the compensation of each group, and prunes by the ranking until the targets are met.

    Args:
        settings: Settings.
        found: The `compensation` of an earlier search of the same network; then nothing is searched.
    """

    prunes_from_dense = True
    needs_held_out = False

    def __init__(
        self, settings: LcpSettings | None = None, *, found: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        self.settings = settings or LcpSettings()
        self._found = None if found is None else {name: (float(a), float(b)) for name, (a, b) in found.items()}

    @property
    def name(self) -> str:
        """legr if norms are scaled, else lcp."""
        return "legr" if self.settings.scale else "lcp"

    def config(self) -> dict[str, Any]:
        """All settings, and `found`."""
        found = None if self._found is None else {name: list(pair) for name, pair in self._found.items()}
        return {**asdict(self.settings), "found": found}

    def start(self, context: PruningContext) -> None:
        """Keep the dense weights and their norms."""
        self._context = context
        self._dense = copy.deepcopy(context.model.state_dict())
        self._trial = copy.deepcopy(context.model)  # pruned for each candidate
        self._batches = CalibrationBatches(context, self.settings.batches)
        pairs = zip(context.graph.groups, context.min_widths(), strict=True)
        self._groups = [group for group, least in pairs if group.frozen is None and least < group.width]
        self._start_search({name: norms.double().cpu() for name, norms in magnitudes(context).items()})
        names = {group.name for group in self._groups}
        if self._found is not None and not names <= set(self._found):
            raise BadWidths(f"the compensation lacks {sorted(names - set(self._found))}; it must be of this network.")

    def _start_search(self, norms: dict[str, Tensor]) -> None:
        self._norms = norms
        spreads = [float(norms[group.name].std(unbiased=False)) for group in self._groups]
        self._evolution = Evolution(spreads, self.settings, derived_seed(self._context.settings.train.seed, "lcp"))

    @property
    def is_searching(self) -> bool:
        """Whether candidates are left."""
        return self._found is None and not self._evolution.is_over

    @property
    def is_done(self) -> bool:
        """Whether the search is over and the targets are met."""
        return not self.is_searching and self._context.constraint_violation(self._context.widths()) <= 0

    @property
    def compensation(self) -> dict[str, tuple[float, float]]:
        """Best scale and shift of each group so far; pass it as `found` at another budget."""
        if self._found is not None:
            return dict(self._found)
        _, best = self._evolution.best
        pairs = zip(best.scales, best.shifts, strict=True)
        return {group.name: pair for group, pair in zip(self._groups, pairs, strict=True)}

    def step(self) -> None:
        """Score one candidate. After all are scored, prune the dense network to the targets by the best of them."""
        if self.is_searching:
            self._score_candidate()
        else:
            self._prune()

    def _score_candidate(self) -> None:
        context, evolution = self._context, self._evolution
        candidate = evolution.propose()
        widths = ranked_widths(context, self._groups, self._norms, candidate)
        self._trial.load_state_dict(self._dense)
        context.keep_channels_(self._trial, self._norms, widths)
        if self.settings.short_steps:
            context.train(self._trial, self.settings.short_steps, context.settings.lr, context.stream.fork())
        fitness = -calibration_loss(context, self._trial, self._batches())
        evolution.add(candidate, fitness)
        line = {"candidate": evolution.scored, "fitness": fitness, "best": evolution.best[0], "widths": widths}
        context.log({"phase": self.name, **line})

    def _prune(self) -> None:
        context, found = self._context, self.compensation
        scales, shifts = (tuple(found[group.name][k] for group in self._groups) for k in (0, 1))
        widths = ranked_widths(context, self._groups, self._norms, Compensation(scales, shifts))
        context.model.load_state_dict(self._dense)
        context.keep_channels_(context.model, self._norms, widths)
        compensation = {name: list(pair) for name, pair in found.items()}
        context.log({"phase": self.name, "compensation": compensation, "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """Norms of the dense weights, and the state of the search."""
        return {
            "norms": dict(self._norms),
            "evolution": self._evolution.state(),
            "first_batch": self._batches.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Norms are not computed again, since every bit counts in a ranking."""
        self._start_search({name: norms.cpu() for name, norms in state["norms"].items()})
        self._evolution.restore(state["evolution"])
        self._batches.restore(state["first_batch"])


def ranked_widths(
    context: PruningContext, groups: Sequence[ChannelGroup], norms: Mapping[str, Tensor], compensation: Compensation
) -> list[int]:
    """Widths after the fewest channels of the ranking are removed that meet the targets.

    Widths are rounded down to allowed widths, but not below the minimum width: a channel that comes up in a group at
    its minimum stays. Costs never fall when widths grow, so a bisection finds the number of channels.
    """
    check_feasible(context)
    positions = {group.name: position for position, group in enumerate(context.graph.groups)}
    full = torch.tensor([group.width for group in context.graph.groups])
    scores, owners = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.long)]
    for group, scale, shift in zip(groups, compensation.scales, compensation.shifts, strict=True):
        scores.append(scale * norms[group.name].double() + shift)
        owners.append(torch.full((group.width,), positions[group.name]))
    order = torch.cat(owners)[torch.cat(scores).argsort(stable=True)]

    def left(removed: int) -> list[int]:
        return context.round_widths((full - order[:removed].bincount(minlength=len(full))).tolist())

    # The last one, with all channels removed, meets the targets.
    fits = bisect_left(range(len(order)), True, key=lambda removed: context.constraint_violation(left(removed)) <= 0)
    return left(fits)


def _plain(member: tuple[float, Compensation]) -> list[Any]:
    return [member[0], list(member[1].scales), list(member[1].shifts)]


def _member(plain: Sequence[Any]) -> tuple[float, Compensation]:
    fitness, scales, shifts = plain
    return float(fitness), Compensation(tuple(map(float, scales)), tuple(map(float, shifts)))
