"""NetAdapt: round after round, the one group whose cut hurts least is cut until the round's share of energy is saved.

Yang, Howard, Chen, Zhang, Go, Sandler, Sze, Adam: NetAdapt: Platform-Aware Neural Network Adaptation for Mobile
Applications. ECCV 2018, arXiv:1804.03230. Their code: github.com/denru01/netadapt.

As in the paper: a round lowers the bound by an amount that decays from round to round; each group proposes to be cut,
alone, as little as meets the bound; what has the least magnitude goes; each proposal is trained for a short while and
the one of highest score on held-out training data is taken. Long-term fine-tuning is the tuning of all methods.

Changed for energy:
- The resource is what the energy model predicts, in place of a table of latencies by layer. Of several budgets the
  bound is on the one that is exceeded most, by its share of the aim.
- Units are channel groups: what shortcuts or depthwise layers tie together is cut together, so that any network goes.
  The magnitude of a channel is of the weights that read it, as for the other controls.
- The last round's bound is the aim itself, so that all methods spend the same. After `rounds` rounds it is the aim in
  any case: a reduction that decays by 0.96 from 2.5 % sums up to 62.5 %, and would never reach a quarter.
- Where no group can meet the bound alone, near the floors, each goes to its floor and others help; the paper would
  end. Different groups then often propose the same network, which is trained once.
- Held out is what the task holds out; the authors' code selects on training images. It also divides the loss of
  accuracy by the saved resource, which the paper does not; `selection` has both.
- Batch norms get statistics of their own before a candidate is judged (`recalibration.py`), as for all methods here.
- Short trainings take Adam and the teacher as everything here does, and all of a round see the same batches. They run
  one after the other: the batches are counted either way, and with one device nothing would be gained.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import EccError, InfeasibleBudget
from ecc.methods.base import PruningContext, magnitudes
from ecc.training import BatchStream

SELECTIONS = ("score", "score per joule")
_LEAST_LOSS, _LEAST_SAVING = 1e-6, 1e-5  # of score and resource, against division by nothing; the authors' numbers


@dataclass(frozen=True, kw_only=True)
class NetAdaptSettings:
    """How NetAdapt works. With the defaults half of the energy is reached within 15 rounds, a quarter within 24.

    Raises:
        EccError: If a value is out of its range.
    """

    initial_reduction: float = 0.04
    """What the first round saves, as a share of the dense network's cost."""
    decay: float = 0.98
    """The reduction of a round, as a share of that of the round before."""
    rounds: int = 30
    """In this round, at the latest, the targets are met."""
    short_steps: int | None = None
    """Training steps of each candidate, or fewer where they are not left. None shares the steps of the solve among the
    rounds that are to be expected, and those of a round among its candidates, as ECC's authors did: then NetAdapt sees
    about as many batches as ECC, losers included."""
    selection: str = "score"
    """Who wins a round: the highest score, as in the paper; or the least loss of score for what is saved, as in the
    authors' code ("score per joule")."""

    def __post_init__(self) -> None:
        for name in ("initial_reduction", "decay"):
            if not 0 < getattr(self, name) <= 1:
                raise EccError(f"{name}={getattr(self, name)} is a share, above 0 and at most 1.")
        for name in ("rounds", "short_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EccError(f"{name}={value} is below 1, the least it may be.")
        if self.selection not in SELECTIONS:
            raise EccError(f"selection={self.selection!r} is none of {', '.join(map(repr, SELECTIONS))}.")

    def reduction(self, done: int) -> float:
        """What a round should save after some that are done, as a share of the dense network's cost."""
        return self.initial_reduction * self.decay**done

    def rounds_to(self, share: float) -> int:
        """How many rounds reach a share of the dense network's cost, if each saves what it should."""
        left, done = 1.0, 0
        while left > share + 1e-9 and done < self.rounds:
            left -= self.reduction(done)
            done += 1
        return max(1, done)


@dataclass(frozen=True)
class Proposal:
    """Widths that a round might end with."""

    widths: tuple[int, ...]
    groups: tuple[str, ...]
    """Who proposed them."""


@dataclass(frozen=True)
class _Candidate:
    """A proposal that was trained."""

    proposal: Proposal
    score: float
    rank: tuple[float, float]
    model: nn.Module
    stream: BatchStream


class NetAdapt:
    """Cuts one group a round, the one of which the network recovers best.

    Args:
        settings: How.
    """

    name = "netadapt"
    needs_held_out = True

    def __init__(self, settings: NetAdaptSettings | None = None) -> None:
        self.settings = settings or NetAdaptSettings()
        self.rounds: list[dict[str, Any]] = []
        """What each round so far proposed and chose."""

    def config(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self.settings)

    def start(self, work: PruningContext) -> None:
        """Notes the widths that each group can have."""
        self._work = work
        self._full = [group.width for group in work.graph.groups]
        self._ladders = _ladders(work)
        self._score: float | None = None  # of the network as it is
        self._begun = work.stream.total
        self.rounds = []

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._work.constraint_violation(self._work.widths()) <= 0

    def target(self, widths: Sequence[int]) -> float:
        """The excess that the next round may leave; 0 in the last."""
        if len(self.rounds) + 1 >= self.settings.rounds:
            return 0.0
        dense = 1 + self._work.constraint_violation(self._full)
        return max(0.0, self._work.constraint_violation(widths) - self.settings.reduction(len(self.rounds)) * dense)

    def step(self) -> None:
        """One round.

        Raises:
            BadTask: If the task has nothing held out to choose by.
            InfeasibleBudget: If every group is at its floor, and the targets are not met.
        """
        work = self._work
        if self._score is None:
            self._score = float(work.held_out(work.model))
        before = work.widths()
        target = self.target(before)
        proposals = self.proposals(before, target)
        if not proposals:
            raise InfeasibleBudget(
                f"the energy model still predicts {work.constraint_violation(before):.1%} too much with every group at its floor; "
                "raise the budget or lower min_width_ratio (--min-width-ratio)."
            )
        best: _Candidate | None = None
        scores = {}
        norms, steps = magnitudes(work), self.short_steps(len(proposals))
        for proposal in proposals:
            candidate = self._tried(proposal, before, norms, steps)
            scores[", ".join(proposal.groups)] = candidate.score
            if best is None or candidate.rank > best.rank:  # only the best is kept, for memory
                best = candidate
        assert best is not None  # there are proposals
        self._take(best)
        self._note(best, target, scores)

    # ------------------------------------------------------------ proposals

    def proposals(self, widths: Sequence[int], target: float) -> list[Proposal]:
        """What each group proposes, without repeats; empty if none can be cut any further.

        Args:
            widths: As they are.
            target: The excess that the round may leave.
        """
        found: dict[tuple[int, ...], tuple[str, ...]] = {}
        can = [group for group, width in enumerate(widths) if self._below(group, width)]
        alone = {group: self._alone(widths, group, target) for group in can}
        for group, width in alone.items():
            if width is not None:
                proposed = _with(widths, group, width)
            elif all(other is None for other in alone.values()):
                proposed = self._together(widths, group, target)
            else:
                continue
            found[tuple(proposed)] = (*found.get(tuple(proposed), ()), self._work.graph.groups[group].name)
        return [Proposal(proposed, groups) for proposed, groups in found.items()]

    def _below(self, group: int, width: int) -> list[int]:
        """What a group can be cut to, from the least."""
        ladder = self._ladders[group]
        return ladder[: bisect_left(ladder, width)]

    def _alone(self, widths: Sequence[int], group: int, target: float) -> int | None:
        """The largest width of one group that meets the target, or None; costs never fall when widths grow."""
        below = self._below(group, widths[group])
        meet = bisect_right(
            below, target, key=lambda width: self._work.constraint_violation(_with(widths, group, width))
        )
        return below[meet - 1] if meet else None

    def _together(self, widths: Sequence[int], first: int, target: float) -> list[int]:
        """One group at its floor, and then as many others as it takes, those first that save most."""
        found = _with(widths, first, self._ladders[first][0])
        while self._work.constraint_violation(found) > target:
            at_floor = {
                group: self._work.constraint_violation(_with(found, group, below[0]))
                for group, width in enumerate(found)
                if (below := self._below(group, width))
            }
            if not at_floor:
                break
            helper = min(at_floor, key=at_floor.__getitem__)
            width = self._alone(found, helper, target)
            found[helper] = self._ladders[helper][0] if width is None else width
        return found

    # ------------------------------------------------------------ candidates

    def short_steps(self, candidates: int) -> int:
        """Training steps of each candidate of this round: the same for all, and none that were not given."""
        left = self._work.settings.prune_steps - (self._work.stream.total - self._begun)
        rounds = self.settings.rounds_to(1 / (1 + self._work.constraint_violation(self._full))) - len(self.rounds)
        shared = left // max(1, rounds) if self.settings.short_steps is None else left
        return max(0, min(self.settings.short_steps or shared, shared // candidates))

    def _tried(self, proposal: Proposal, before: Sequence[int], norms: Mapping[str, Tensor], steps: int) -> _Candidate:
        """A copy of the network, cut, trained for a short while on a fork of the stream, and judged."""
        work = self._work
        model, stream = copy.deepcopy(work.model), work.stream.fork()
        work.keep_channels_(model, norms, proposal.widths)
        if steps:
            work.train(model, steps, work.settings.lr, stream)
        score = float(work.held_out(model))
        return _Candidate(proposal, score, self._rank(score, before, proposal.widths), model, stream)

    def _rank(self, score: float, before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
        """The highest wins; of equals the one that saves most, and then the first in the graph."""
        saved = (self._work.constraint_violation(before) - self._work.constraint_violation(after)) / (
            1 + self._work.constraint_violation(self._full)
        )
        if math.isnan(score):
            return -math.inf, saved
        if self.settings.selection == "score":
            return score, saved
        assert self._score is not None  # judged at the start of the round
        return -(self._score - score + _LEAST_LOSS) / (saved + _LEAST_SAVING), saved

    def _take(self, winner: _Candidate) -> None:
        """The winner's weights and its place in the stream become the work's."""
        self._work.model.load_state_dict(winner.model.state_dict())
        self._work.stream.restore(winner.stream.state())  # asked for now, its total counts the losers' batches too
        self._score = winner.score

    def _note(self, winner: _Candidate, target: float, scores: Mapping[str, float]) -> None:
        work, widths = self._work, winner.proposal.widths
        vector = torch.tensor(widths, dtype=torch.float64)
        facts = {
            "phase": self.name,
            "round": len(self.rounds) + 1,
            "reduction": self.settings.reduction(len(self.rounds)),
            "target": 1 + target,  # as a share of the targets
            "chosen": list(winner.proposal.groups),
            "widths": list(widths),
            "predicted": {cost.resource: float(cost.to("cpu").value(vector)) for cost in work.costs},
            "score": winner.score,
            "scores": dict(scores),
            "total": work.stream.total,
            "lineage": work.stream.lineage,
        }
        self.rounds.append(facts)
        work.log(facts)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The rounds so far, whose number tells the reduction, and the score of the network as it is."""
        return {"score": self._score, "begun": self._begun, "rounds": [dict(facts) for facts in self.rounds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts them back."""
        self._score = None if state["score"] is None else float(state["score"])
        self._begun = int(state["begun"])
        self.rounds = [dict(facts) for facts in state["rounds"]]


def _with(widths: Sequence[int], group: int, width: int) -> list[int]:
    """The same widths but one."""
    found = list(widths)
    found[group] = width
    return found


def _ladders(work: PruningContext) -> list[list[int]]:
    """The widths on the width_remainders that each group can have, from its floor to all of it."""
    widths = [group.width for group in work.graph.groups]
    ladders = [[width] for width in widths]
    while (lower := work.round_widths([width - 1 for width in widths])) != widths:
        for ladder, width in zip(ladders, lower, strict=True):
            if width < ladder[0]:
                ladder.insert(0, width)
        widths = lower
    return ladders
