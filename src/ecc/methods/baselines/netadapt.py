"""NetAdapt: in each round, prune the one group whose removal of a given share of the cost hurts the score least.

Yang, Howard, Chen, Zhang, Go, Sandler, Sze, Adam: NetAdapt: Platform-Aware Neural Network Adaptation for Mobile
Applications. ECCV 2018, arXiv:1804.03230. Their code: github.com/denru01/netadapt.

As in the paper: a round lowers the target by an amount that decays from round to round. Each group alone is pruned as
little as meets the target, by magnitude. Each proposal is trained for a short while, and the one with the highest score
on held-out training data is taken. Long-term finetuning is the finetuning of all methods.

Changed for energy:
- The cost is predicted by the energy model, not by a table of latencies per layer. Of several budgets, the one that is
  violated most, relative to its target, counts.
- Units are channel groups, so that shortcuts and depthwise layers are pruned together and any network works. The
  magnitude of a channel is that of the weights that consume it, as for the other baselines.
- A round saves no more than half of the groups could save alone, so that there is a choice. In a deep network 4 % of
  the cost are more than most groups have.
- The target of the last round is the budget itself. After `rounds` rounds it is the budget in any case: a reduction of
  2.5 % that decays by 0.96 sums up to 62.5 %, and would never reach a quarter.
- At equal numbers of batches, the short trainings of all proposals would have a few steps each, where the authors' code
  has 500. So proposals are first scored without training, and the best ones are trained: as many as can have 100 steps.
- If no group can meet the target alone, near the minimum widths, each goes to its minimum and others follow; the paper
  would stop. Different groups then often propose the same network, which is trained once.
- Proposals are compared on held-out data; the authors' code uses training images. It also divides the loss of accuracy
  by the saved resource, which the paper does not, and neither does this.
- Batch norms are recalibrated before a candidate is scored (`recalibration.py`), as for all methods here.
- Short trainings use Adam and the teacher, as everything here does, and all of a round see the same batches.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from ecc.errors import InfeasibleBudget, option_hint
from ecc.methods.base import PruningContext, magnitudes
from ecc.options import check_options, option
from ecc.training import BatchStream

from .widths import allowed_widths

INITIAL_REDUCTION = 0.04
ENOUGH_STEPS = 100
"""Training steps with which a candidate can be judged."""


@dataclass(frozen=True, kw_only=True)
class NetAdaptSettings:
    """Settings of NetAdapt."""

    initial_reduction: float | None = option(
        None,
        "Reduction of the first round, as a fraction of the dense cost. None is 0.04, and in each round at most what "
        "half of the groups can save alone.",
        above=0,
        range=(None, 1),
    )
    decay: float = option(0.98, "Reduction of a round, as a fraction of the one before.", above=0, range=(None, 1))
    rounds: int = option(100, "Maximum number of rounds; the last one meets the targets.", range=(1, None))
    short_steps: int | None = option(
        None,
        "Training steps of each candidate, of which all are trained, as in the paper. None divides the pruning steps "
        "among the expected rounds, and those of a round among its best candidates, so that NetAdapt sees about as "
        "many batches as ECC.",
        range=(1, None),
    )
    within_prune_steps: bool = option(
        True, "Whether given `short_steps` are reduced so that all candidates together see no more than `prune_steps`."
    )

    def __post_init__(self) -> None:
        check_options(self)

    def reduction(self, done: int, most: float = 1.0) -> float:
        """Reduction of the next round after some are done, as a fraction of the dense cost.

        Args:
            done: Number of rounds.
            most: What half of the groups can save; for a given `initial_reduction` it has no influence.
        """
        if self.initial_reduction is not None:
            return self.initial_reduction * self.decay**done
        return min(INITIAL_REDUCTION * self.decay**done, most)

    def rounds_to(self, fraction: float, most: float = 1.0) -> int:
        """Number of rounds to a fraction of the dense cost, if each saves what it should; `most` as for `reduction`."""
        left, done = 1.0, 0
        while left > fraction + 1e-9 and done < self.rounds:
            left -= self.reduction(done, most)
            done += 1
        return max(1, done)


@dataclass(frozen=True)
class Proposal:
    """Widths that a round may end with."""

    widths: tuple[int, ...]
    groups: tuple[str, ...]
    """Groups that proposed them."""


@dataclass(frozen=True)
class _Candidate:
    """A proposal after its short training."""

    proposal: Proposal
    score: float
    rank: tuple[float, float]
    model: nn.Module
    stream: BatchStream


class NetAdapt:
    """Prunes one group per round, the one after which the network recovers best."""

    name = "netadapt"
    needs_held_out = True

    def __init__(self, settings: NetAdaptSettings | None = None) -> None:
        self.settings = settings or NetAdaptSettings()
        self.rounds: list[dict[str, Any]] = []
        """Proposals and choice of each round so far."""

    def config(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self.settings)

    def start(self, context: PruningContext) -> None:
        """Find the widths that each group can have."""
        self._context = context
        self._full = [group.width for group in context.graph.groups]
        self._allowed = allowed_widths(context)
        self._first_batch = context.stream.total
        self.rounds = []

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._violation(self._context.widths()) <= 0

    def target(self, widths: Sequence[int]) -> float:
        """Constraint violation that the next round may leave; 0 in the last round."""
        if len(self.rounds) + 1 >= self.settings.rounds:
            return 0.0
        dense = 1 + self._violation(self._full)
        reduction = self.settings.reduction(len(self.rounds), self.largest_reduction(widths))
        return max(0.0, self._violation(widths) - reduction * dense)

    def largest_reduction(self, widths: Sequence[int]) -> float:
        """What half of the groups that can still be pruned can save alone, as a fraction of the dense cost."""
        now, dense = self._violation(widths), 1 + self._violation(self._full)
        least = [
            self._violation(_with(widths, group, below[0]))
            for group, width in enumerate(widths)
            if (below := self._below(group, width))
        ]
        savings = sorted(((now - one) / dense for one in least), reverse=True)
        return savings[(len(savings) - 1) // 2] * (1 - 1e-9) if savings else 1.0  # not above it by rounding

    def step(self) -> None:
        """One round."""
        context = self._context
        before = context.widths()
        target = self.target(before)
        proposals = self.proposals(before, target)
        if not proposals:
            raise InfeasibleBudget(
                f"the predicted cost is {self._violation(before):.1%} above the target with every group at its minimum "
                f"width. Raise the budget, or lower {option_hint('min_width_ratio')}."
            )
        best: _Candidate | None = None
        scores = {}
        importance = magnitudes(context)
        trained, steps = self.short_training(len(proposals))
        if trained < len(proposals):
            ranks = [self._try(proposal, before, importance, 0).rank for proposal in proposals]
            chosen = sorted(range(len(proposals)), key=lambda number: ranks[number], reverse=True)[:trained]
            proposals = [proposals[number] for number in sorted(chosen)]
        for proposal in proposals:
            candidate = self._try(proposal, before, importance, steps)
            scores[", ".join(proposal.groups)] = candidate.score
            if best is None or candidate.rank > best.rank:  # only the best is kept, to save memory
                best = candidate
        assert best is not None  # there are proposals
        self._take(best)
        self._log(best, target, scores)

    def _violation(self, widths: Sequence[float]) -> float:
        return self._context.constraint_violation(widths)

    # ------------------------------------------------------------ proposals

    def proposals(self, widths: Sequence[int], target: float) -> list[Proposal]:
        """Proposal of each group, without duplicates; empty if no group can be pruned any further."""
        found: dict[tuple[int, ...], tuple[str, ...]] = {}
        prunable = [group for group, width in enumerate(widths) if self._below(group, width)]
        alone = {group: self._alone(widths, group, target) for group in prunable}
        for group, width in alone.items():
            if width is not None:
                proposed = _with(widths, group, width)
            elif all(other is None for other in alone.values()):
                proposed = self._together(widths, group, target)
            else:
                continue
            found[tuple(proposed)] = (*found.get(tuple(proposed), ()), self._context.graph.groups[group].name)
        return [Proposal(proposed, groups) for proposed, groups in found.items()]

    def _below(self, group: int, width: int) -> list[int]:
        """Allowed widths of a group below one, ascending."""
        allowed = self._allowed[group]
        return allowed[: bisect_left(allowed, width)]

    def _alone(self, widths: Sequence[int], group: int, target: float) -> int | None:
        """Largest width of one group that meets the target, or None. Costs never fall when widths grow."""
        below = self._below(group, widths[group])
        meet = bisect_right(below, target, key=lambda width: self._violation(_with(widths, group, width)))
        return below[meet - 1] if meet else None

    def _together(self, widths: Sequence[int], first: int, target: float) -> list[int]:
        """One group at its minimum, then as many others as needed, those first that save most."""
        found = _with(widths, first, self._allowed[first][0])
        while self._violation(found) > target:
            at_minimum = {
                group: self._violation(_with(found, group, below[0]))
                for group, width in enumerate(found)
                if (below := self._below(group, width))
            }
            if not at_minimum:
                break
            helper = min(at_minimum, key=at_minimum.__getitem__)
            width = self._alone(found, helper, target)
            found[helper] = self._allowed[helper][0] if width is None else width
        return found

    # ------------------------------------------------------------ candidates

    def short_training(self, candidates: int) -> tuple[int, int]:
        """How many candidates of this round are trained, and the steps of each."""
        settings, given = self.settings, self.settings.short_steps
        left = max(0, self._context.settings.prune_steps - (self._context.stream.total - self._first_batch))
        if given is not None:
            return candidates, min(given, left // candidates) if settings.within_prune_steps else given
        most = self.largest_reduction(self._full)
        rounds = settings.rounds_to(1 / (1 + self._violation(self._full)), most) - len(self.rounds)
        shared = left // max(1, rounds)
        trained = max(1, min(candidates, shared // ENOUGH_STEPS))
        return trained, shared // trained

    def _try(
        self, proposal: Proposal, before: Sequence[int], importance: Mapping[str, Tensor], steps: int
    ) -> _Candidate:
        """Prune a copy of the network, train it on a fork of the stream, and score it."""
        context = self._context
        model, stream = copy.deepcopy(context.model), context.stream.fork()
        context.keep_channels_(model, importance, proposal.widths)
        if steps:
            context.train(model, steps, context.settings.lr, stream)
        score = float(context.held_out(model))
        return _Candidate(proposal, score, self._rank(score, before, proposal.widths), model, stream)

    def _rank(self, score: float, before: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
        """The highest rank wins; ties go to the one that saves most, then to the first in the graph."""
        saved = (self._violation(before) - self._violation(after)) / (1 + self._violation(self._full))
        return -math.inf if math.isnan(score) else score, saved

    def _take(self, winner: _Candidate) -> None:
        """Copy the winner's weights and its position in the stream."""
        self._context.model.load_state_dict(winner.model.state_dict())
        self._context.stream.restore(winner.stream.state())  # read now, its total counts the batches of all candidates

    def _log(self, winner: _Candidate, target: float, scores: Mapping[str, float]) -> None:
        context, widths = self._context, winner.proposal.widths
        line = {
            "phase": self.name,
            "round": len(self.rounds) + 1,
            "target": 1 + target,  # as a fraction of the targets
            "chosen": list(winner.proposal.groups),
            "widths": list(widths),
            "predicted": context.predicted(dict(zip(context.graph.full_widths, widths, strict=True))),
            "score": winner.score,
            "scores": dict(scores),
            "total": context.stream.total,
            "lineage": context.stream.lineage,
        }
        self.rounds.append(line)
        context.log(line)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The rounds so far."""
        return {"first_batch": self._first_batch, "rounds": [dict(line) for line in self.rounds]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._first_batch = int(state["first_batch"])
        self.rounds = [dict(line) for line in state["rounds"]]


def _with(widths: Sequence[int], group: int, width: int) -> list[int]:
    """The same widths with one changed."""
    return [*widths[:group], width, *widths[group + 1 :]]
