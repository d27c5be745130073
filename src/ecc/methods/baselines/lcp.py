"""LcP and LeGR: one global ranking of all channels by norm, made fair by a learned compensation of each group.

T.-W. Chin, C. Zhang, D. Marculescu: Layer-compensated Pruning for Resource-constrained Convolutional Neural Networks,
arXiv:1810.00518 (LcP, adds a shift to the norms of a layer), and T.-W. Chin, R. Ding, C. Zhang, D. Marculescu: Towards
Efficient Model Compression via Learned Global Ranking, CVPR 2020 (LeGR, scales them too). All numbers are those of the
authors' code, github.com/enyac-group/LeGR, for both.

As there: channels go in ascending order of `scale * squared norm + shift`; scales and shifts come from regularised
evolution, in which the oldest dies (400 candidates, population 64, tournaments of 16, a tenth of the layers mutated,
scales by exp(N(0, 1)) with a step that shrinks to a fifth, shifts by N(0, spread of the layer's norms)), and each
candidate is judged by the network that it leaves, after a few steps of training or none. The plain norms are among the
first candidates. At least a tenth of a layer stays. One search serves every budget.

Changed for energy: the ranking is cut where the predicted joules meet the targets, not the FLOPs. The energy enters there
alone: the order is by score, not by score per joule, for the compensation can learn what a layer is worth.

Changed besides, and why:
    - Layers are channel groups of the graph, and the norm is that of the weights that read a channel, as for all
      methods here, not of the filter that writes it: so a channel that many layers share counts once, with all of them.
    - Candidates are judged by the score on held-out data, never on test data, as the published scripts do.
    - Batch norms get statistics of their own before a candidate is judged (`recalibration.py`), as for all methods.
    - At least one group is mutated. The authors' tenth of fewer than ten layers is none, and the search would stand.
    - Widths are rounded down to the width_remainders that the hardware likes.
    - `short_steps` is 0, as in their CIFAR-10 table. Their 200 for ImageNet are 80,000 batches with 400 candidates,
      and comparisons here are at equal batches; where they are trained, it is by the trainer all methods share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadWidths, EccError, InfeasibleBudget
from ecc.graph import ChannelGroup
from ecc.methods.base import PruningContext, magnitudes
from ecc.training import derived_seed

LAST_STEP = 0.2
"""Of the mutations of scales, in those of the first candidate."""


@dataclass(frozen=True, kw_only=True)
class LcpSettings:
    """How to search; the defaults are those of LeGR's code.

    Raises:
        EccError: If a value is out of its range.
    """

    scale: bool = False
    """Whether norms are scaled and shifted, as by LeGR, or only shifted, as by LcP."""
    candidates: int = 400
    """Networks that are judged; 1 takes the norms as they are."""
    population: int = 64
    tournament: int = 16
    """Drawn from the population, with repeats; the best of them has a child."""
    mutated: float = 0.1
    """Share of the groups in which a child differs."""
    sigma: float = 1.0
    """Of the logarithm of scales."""
    spread: float = 1.0
    """Of shifts, in standard deviations of a group's norms."""
    short_steps: int = 0
    """Steps that a candidate is trained before it is judged."""
    short_lr: float | None = None
    """Learning rate of these; by default as in the solve."""
    search_share: float | None = None
    """What candidates may cost, of the dense network, such as that of the tightest budget to come. None: the targets."""

    def __post_init__(self) -> None:
        for name, least in (("candidates", 1), ("population", 1), ("tournament", 1), ("short_steps", 0)):
            if getattr(self, name) < least:
                raise EccError(f"{name}={getattr(self, name)} is below {least}, the least it may be.")
        if not 0 < self.mutated <= 1:
            raise EccError(f"mutated={self.mutated} is a share of the groups, above 0 and up to 1.")
        for name in ("sigma", "spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise EccError(f"{name}={getattr(self, name)} is not a number of at least 0.")
        if self.short_lr is not None and not 0 < self.short_lr < 1:
            raise EccError(f"short_lr={self.short_lr} is outside 0..1.")
        if self.search_share is not None and not 0 < self.search_share <= 1:
            raise EccError(f"search_share={self.search_share} is a share of the dense network, above 0 and up to 1.")


@dataclass(frozen=True)
class Compensation:
    """What is done to the norms of each group that can shrink, in the order of the graph."""

    scales: tuple[float, ...]
    shifts: tuple[float, ...]

    @classmethod
    def none(cls, groups: int) -> Compensation:
        """Leaves the norms as they are."""
        return cls((1.0,) * groups, (0.0,) * groups)


class Evolution:
    """Regularised evolution of compensations: the best of a few has a child, and the oldest of all dies.

    Args:
        spreads: Standard deviation of the norms of each group.
        settings: How.
        seed: Of all that is drawn.
    """

    def __init__(self, spreads: Sequence[float], settings: LcpSettings, seed: int) -> None:
        self._spreads = torch.tensor(spreads, dtype=torch.float64) * settings.spread
        self._settings = settings
        self._generator = torch.Generator().manual_seed(seed)
        self.judged = 0
        self.population: list[tuple[float, Compensation]] = []
        """Fitness and candidate, the oldest first."""
        self.best: tuple[float, Compensation] = (-math.inf, Compensation.none(len(spreads)))
        """Of all that ever lived; the first one of equals."""

    @property
    def is_over(self) -> bool:
        """Whether all candidates were judged."""
        return self.judged >= self._settings.candidates

    def propose(self) -> Compensation:
        """The next candidate; draws anew at each call."""
        count = len(self._spreads)
        if self.judged == 0 or not count:
            return Compensation.none(count)
        if self.judged < self._settings.population:
            return self._moved(Compensation.none(count), list(range(count)), 1.0)
        drawn = torch.randint(len(self.population), (self._settings.tournament,), generator=self._generator).tolist()
        _, parent = self.population[max(drawn, key=lambda member: self.population[member][0])]
        mutated = max(1, int(self._settings.mutated * count))
        places = torch.randperm(count, generator=self._generator)[:mutated].tolist()
        return self._moved(parent, places, 1 - (1 - LAST_STEP) * self.judged / self._settings.candidates)

    def judge(self, candidate: Compensation, fitness: float) -> None:
        """Takes a candidate in, and lets the oldest go where there are too many; higher is fitter."""
        fitness = -math.inf if math.isnan(fitness) else fitness  # a network that broke
        self.population.append((fitness, candidate))
        del self.population[: -self._settings.population]
        if self.judged == 0 or fitness > self.best[0]:
            self.best = (fitness, candidate)
        self.judged += 1

    def _moved(self, base: Compensation, places: Sequence[int], step: float) -> Compensation:
        """Another compensation that differs in some groups."""
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
            "judged": self.judged,
            "population": [_plain(member) for member in self.population],
            "best": _plain(self.best),
            "generator": self._generator.get_state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse."""
        self.judged = int(state["judged"])
        self.population = [_member(member) for member in state["population"]]
        self.best = _member(state["best"])
        self._generator.set_state(state["generator"].cpu().clone())


class Lcp:
    """Searches for the compensation of each group, and cuts the ranking at the targets.

    Args:
        settings: How.
        found: The `compensation` of an earlier search of the same network: nothing is searched then.
    """

    prunes_from_dense = True

    def __init__(
        self, settings: LcpSettings | None = None, *, found: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        self.settings = settings or LcpSettings()
        self._found = None if found is None else {name: (float(a), float(b)) for name, (a, b) in found.items()}

    @property
    def name(self) -> str:
        """By whether norms are scaled."""
        return "legr" if self.settings.scale else "lcp"

    @property
    def needs_held_out(self) -> bool:
        """Where it searches."""
        return self._found is None

    def config(self) -> dict[str, Any]:
        """The settings, and what was found before."""
        found = None if self._found is None else {name: list(pair) for name, pair in self._found.items()}
        return {**asdict(self.settings), "found": found}

    def start(self, work: PruningContext) -> None:
        """Remembers the dense weights, from which every candidate is cut, and their norms.

        Raises:
            BadWidths: If what was found before is of another network.
            InfeasibleBudget: If no candidate could cost as little as `search_share`.
        """
        self._work = work
        self._dense = copy.deepcopy(work.model.state_dict())
        self._trial = copy.deepcopy(work.model)  # pruned anew for each candidate
        pairs = zip(work.graph.groups, work.min_widths(), strict=True)
        self._groups = [group for group, floor in pairs if group.frozen is None and floor < group.width]
        self._begin({name: norms.double().cpu() for name, norms in magnitudes(work).items()})
        share = self.settings.search_share
        self._search_aims = None
        if share is not None:
            full = torch.tensor([group.width for group in work.graph.groups], dtype=torch.float64)
            self._search_aims = [share * float(cost.to("cpu").value(full)) for cost in work.costs]
            if self._found is None:
                _refuse_infeasible(self._search_work)
        if self._found is not None and not {group.name for group in self._groups} <= set(self._found):
            missing = sorted({group.name for group in self._groups} - set(self._found))
            raise BadWidths(f"the compensation has nothing for {missing}; it must be of this network, or be searched.")

    def _begin(self, norms: dict[str, Tensor]) -> None:
        self._norms = norms
        spreads = [float(norms[group.name].std(unbiased=False)) for group in self._groups]
        self._evolution = Evolution(spreads, self.settings, derived_seed(self._work.settings.train.seed, "lcp"))

    @property
    def is_searching(self) -> bool:
        """Whether candidates are left to judge."""
        return self._found is None and not self._evolution.is_over

    @property
    def is_done(self) -> bool:
        """Whether the search is over and the targets are met."""
        return not self.is_searching and self._work.constraint_violation(self._work.widths()) <= 0

    @property
    def compensation(self) -> dict[str, tuple[float, float]]:
        """Scale and shift of each group, the best so far; for `found` at another budget."""
        if self._found is not None:
            return dict(self._found)
        _, best = self._evolution.best
        pairs = zip(best.scales, best.shifts, strict=True)
        return {group.name: pair for group, pair in zip(self._groups, pairs, strict=True)}

    def step(self) -> None:
        """Judges one candidate; once all are judged, cuts the dense network to the targets by the best of them."""
        if self.is_searching:
            self._judge()
        else:
            self._cut()

    def _judge(self) -> None:
        work, evolution = self._work, self._evolution
        candidate = evolution.propose()
        widths = ranked_widths(self._search_work, self._groups, self._norms, candidate)
        self._trial.load_state_dict(self._dense)
        work.keep_channels_(self._trial, self._norms, widths)
        if self.settings.short_steps:
            lr = self.settings.short_lr or work.settings.lr
            work.train(self._trial, self.settings.short_steps, lr, work.stream.fork())
        fitness = float(work.held_out(self._trial))
        evolution.judge(candidate, fitness)
        work.log(
            {
                "phase": self.name,
                "candidate": evolution.judged,
                "fitness": fitness,
                "best": evolution.best[0],
                "widths": widths,
            }
        )

    def _cut(self) -> None:
        work, found = self._work, self.compensation
        pairs = [found[group.name] for group in self._groups]
        candidate = Compensation(tuple(scale for scale, _ in pairs), tuple(shift for _, shift in pairs))
        widths = ranked_widths(work, self._groups, self._norms, candidate)
        work.model.load_state_dict(self._dense)
        work.keep_channels_(work.model, self._norms, widths)
        compensation = {name: list(pair) for name, pair in found.items()}
        work.log({"phase": self.name, "compensation": compensation, "widths": widths})

    @property
    def _search_work(self) -> PruningContext:
        return self._work if self._search_aims is None else replace(self._work, targets=self._search_aims)

    def state_dict(self) -> dict[str, Any]:
        """The norms of the dense weights, and where the search stands."""
        return {"norms": dict(self._norms), "evolution": self._evolution.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts them back; every bit of a norm counts in a ranking, so they are not computed again."""
        self._begin({name: norms.cpu() for name, norms in state["norms"].items()})
        self._evolution.restore(state["evolution"])


def ranked_widths(
    work: PruningContext, groups: Sequence[ChannelGroup], norms: Mapping[str, Tensor], compensation: Compensation
) -> list[int]:
    """What is left when the fewest channels of the ranking are removed that meet the targets.

    Widths are rounded down to the width_remainders, and none goes below its floor: a channel that comes up in a group at its
    floor stays. Costs never fall when widths grow, so that a bisection finds the very channel.

    Args:
        work: Its targets are met.
        groups: Those that can shrink.
        norms: Of each channel of each of them.
        compensation: Of each of them.

    Raises:
        InfeasibleBudget: If the targets are below what all floors cost.
    """
    _refuse_infeasible(work)
    places = {group.name: place for place, group in enumerate(work.graph.groups)}
    full = torch.tensor([group.width for group in work.graph.groups])
    scores, owners = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.long)]
    for group, scale, shift in zip(groups, compensation.scales, compensation.shifts, strict=True):
        scores.append(scale * norms[group.name].double() + shift)
        owners.append(torch.full((group.width,), places[group.name]))
    order = torch.cat(owners)[torch.cat(scores).argsort(stable=True)]

    def left(removed: int) -> list[int]:
        return work.round_widths((full - order[:removed].bincount(minlength=len(full))).tolist())

    low, high = 0, len(order)  # high meets the targets
    while low < high:
        middle = (low + high) // 2
        if work.constraint_violation(left(middle)) <= 0:
            high = middle
        else:
            low = middle + 1
    return left(high)


def _refuse_infeasible(work: PruningContext) -> None:
    excess = work.constraint_violation(work.min_widths())
    if excess > 0:
        raise InfeasibleBudget(
            f"with every group at its floor this network still costs {1 + excess:.1%} of what it may. Raise the budget "
            "or the search_share, or lower min_width_ratio."
        )


def _plain(member: tuple[float, Compensation]) -> list[Any]:
    return [member[0], list(member[1].scales), list(member[1].shifts)]


def _member(plain: Sequence[Any]) -> tuple[float, Compensation]:
    fitness, scales, shifts = plain
    return float(fitness), Compensation(tuple(map(float, scales)), tuple(map(float, shifts)))
