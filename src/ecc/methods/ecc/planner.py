"""Plans of the default solver: the widths at the end of the schedule, from the current importance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecc.energy.cost import CostForm
from ecc.methods.ecc.allocation import Allocation, WidthAllocator
from ecc.methods.ecc.constraints import PruningProblem

UNIFORM_CANDIDATES = 128  # uniform width ratios that `uniform_min_widths` compares
UNIFORM_BUDGET = 0.9  # of the budget: the most that `uniform_min_widths` may use, so that there is a choice left
MAX_CANDIDATES = 64  # widths of a group that a plan compares at once
BRANCH_FAILURES = 3  # branches that are tried in vain before a plan is final


class WidthPlanner:
    """Allocates the widths at the end of the schedule, if importance stays as it is. Works on the CPU.

    Args:
        problem: Channels, costs and allowed widths.
        uniform_floor: Keep at least this fraction of the widths under uniform pruning, see `uniform_min_widths`.
        per_remaining_share: Whether importance is in units of the loss (the Taylor criterion). Then what a group loses
            is divided by the square root of the share of its channels that remain: behind a batch norm what remains is
            scaled up, and the error with it. `benchmarks/recovery.py` compares this with the share itself.
        branches: For each branch that may be removed, the positions of its groups.
        streams: For each branch, a number that is the same for branches that add to the same activations. With
            `per_remaining_share`, what removed branches lose is divided by the share of the terms of their stream that
            remain. None for no such division.
    """

    def __init__(
        self,
        problem: PruningProblem,
        uniform_floor: float = 0.0,
        *,
        per_remaining_share: bool = False,
        branches: Sequence[Sequence[int]] = (),
        streams: Sequence[int] | None = None,
    ) -> None:
        self._ranking, self._constraints = problem.ranking, problem.constraints
        self._steps = problem.step.cpu()
        self._per_remaining_share = per_remaining_share
        self.branches = [list(groups) for groups in branches]
        self._streams = list(streams) if streams is not None and per_remaining_share else None
        self._min_widths, self._remainders = problem.min_widths.cpu(), problem.rest.cpu()
        self._uniform_floor = uniform_floor

    def plan(self, alive: Tensor, importance: Tensor, ends: Sequence[float]) -> Tensor:
        """Widths that lose the least importance within the costs that are allowed in the end.

        Branches are removed while that loses less. The multipliers of an allocation say what a reduction of the cost
        is worth, so the branches whose removal seems to pay are tried first, and an allocation without them decides.
        Then removed branches are restored or exchanged for others in the same way.

        Args:
            alive: (channels,) bool. A branch without live channels is removed.
            importance: a of each channel, then that of each branch.
            ends: Cost that is allowed in the end, as fractions of the dense cost.

        Returns:
            (groups,) int64; 0 for the groups of removed branches.
        """
        problem = self._problem(alive, importance, ends)
        dead = frozenset(b for b, groups in enumerate(self.branches) if not any(problem.live[g] for g in groups))
        best, removed = problem.solve(dead), dead
        failures = 0
        while failures < BRANCH_FAILURES:
            gains = {b: problem.gain(best, removed, b) for b in range(len(self.branches)) if b not in removed}
            pays = [b for b, gain in gains.items() if gain > 0 or not best.is_feasible]
            promising = sorted(pays, key=lambda b: -gains[b])[failures:]
            if not promising:
                break
            # Several at once as long as many pay, then one by one.
            some = frozenset(promising[: 1 if failures else -(-len(promising) // 4)])
            found = problem.solve(removed | some)
            if (not found.is_feasible, found.lost) < (not best.is_feasible, best.lost) or not best.is_feasible:
                best, removed, failures = found, removed | some, 0
            else:
                failures += 1
        if best.is_feasible:
            best = self._exchange(problem, best, removed, dead)
        return torch.tensor(best.widths, dtype=torch.long, device=alive.device)

    def _exchange(
        self, problem: _PlanProblem, best: Allocation, removed: frozenset[int], dead: frozenset[int]
    ) -> Allocation:
        """Restore a removed branch, or exchange it for another one, while that loses less."""
        failures = 0
        while failures < BRANCH_FAILURES:
            kept = {b: problem.gain(best, removed, b) for b in range(len(self.branches)) if b not in removed}
            back = {b: problem.gain_of_restoring(best, removed, b) for b in removed - dead}
            changes = [(gain, {b}, set[int]()) for b, gain in back.items()]
            changes += [(back[b] + gain, {b}, {other}) for b in back for other, gain in kept.items()]
            promising = sorted((one for one in changes if one[0] > 0), key=lambda one: -one[0])[failures:]
            if not promising:
                break
            _, restored, instead = promising[0]
            without = (removed - restored) | instead
            found = problem.solve(without)
            if found.is_feasible and found.lost < best.lost:
                best, removed, failures = found, without, 0
            else:
                failures += 1
        return best

    def round(self, alive: Tensor, importance: Tensor, ends: Sequence[float], bounds: Tensor) -> Tensor:
        """Allowed widths next to real-valued ones that lose the least importance within the costs.

        Args:
            alive: (channels,) bool.
            importance: a of each channel.
            ends: Cost that is allowed, as fractions of the dense cost.
            bounds: (groups,) real-valued widths.

        Returns:
            (groups,) int64. If no widths next to `bounds` are within the costs, smaller ones are used as well.
        """
        problem = self._problem(alive, importance, ends)
        below, near = [], []
        for widths, bound in zip(problem.allowed, bounds.tolist(), strict=True):
            above = sum(width >= bound - 1e-9 for width in widths)  # the widest come first
            below.append(widths[max(0, above - 1) :])
            near.append(widths[max(0, above - 1) : above + 1])
        found = replace(problem, allowed=near).solve(frozenset())
        if not found.is_feasible:
            found = replace(problem, allowed=below).solve(frozenset())
        return torch.tensor(found.widths, dtype=torch.long, device=alive.device)

    def _problem(self, alive: Tensor, importance: Tensor, ends: Sequence[float]) -> _PlanProblem:
        channels = len(alive)
        ranked = self._ranking.sort(importance[:channels], alive)
        ascending = ranked.importance.cpu().to(torch.float64).numpy()
        live = ranked.widths.tolist()
        least = (self.uniform_min_widths(ends) if self._uniform_floor else self._min_widths).tolist()
        parts = zip(live, least, self._steps.tolist(), self._remainders.tolist(), strict=True)
        allowed = [allowed_widths(*part) for part in parts]
        lost = []
        full = self._ranking.full_widths
        for one, width, dense in zip(np.split(ascending, np.cumsum(full)[:-1]), live, full, strict=True):
            removed = np.concatenate([[0.0], one[:width].cumsum()])
            remaining = np.arange(width, -1, -1).clip(min=1)
            lost.append(removed * np.sqrt(dense / remaining) if self._per_remaining_share else removed)
        budgets = [end * dense for end, dense in zip(ends, self._constraints.dense, strict=True)]
        forms = [cost.form(budget) for cost, budget in zip(self._constraints.costs, budgets, strict=True)]
        of_branches = []
        for groups, own in zip(self.branches, importance[channels:].tolist(), strict=True):
            # Norms of different parameters cannot be compared, so a removed branch loses at least as much as one with
            # minimum widths. The Taylor criterion is in units of the loss.
            parts_lost = [lost[group][live[group] - allowed[group][-1]] for group in groups]
            of_branches.append(own if self._per_remaining_share else max([own, *parts_lost]))
        return _PlanProblem(forms, budgets, live, allowed, lost, self.branches, of_branches, self._streams)

    def uniform_min_widths(self, ends: Sequence[float]) -> Tensor:
        """Smallest widths of a plan with `uniform_floor`: a fraction of the widths under uniform pruning.

        Channel importance ignores interactions, so the ranking may prune a few groups too aggressively where the budget
        is mild. The widths under uniform pruning are found by comparing all ratios k / UNIFORM_CANDIDATES at once.

        Returns:
            (groups,) int64. They use at most `UNIFORM_BUDGET` of the budget, unless the minimum widths use more.
        """
        min_widths, step = self._min_widths.to(torch.float64), self._steps.to(torch.float64)
        full = torch.tensor(self._ranking.full_widths, dtype=torch.float64, device="cpu")
        ratios = torch.arange(UNIFORM_CANDIDATES, device="cpu", dtype=torch.float64) / UNIFORM_CANDIDATES
        uniform = ratios[:, None] * full
        # Costs rarely fall when widths grow, so the ratios that meet the budget come first and can be counted.
        fitting = self._count_fitting(torch.maximum(uniform, min_widths), ends)
        remainder = self._remainders.to(torch.float64)
        rounded = remainder + ((self._uniform_floor * uniform - remainder) / step).ceil() * step
        bounds = torch.maximum(torch.minimum(rounded, full), min_widths)
        roomy = self._count_fitting(bounds, [UNIFORM_BUDGET * end for end in ends])
        return bounds[max(0, min(fitting, roomy) - 1)].long()

    def _count_fitting(self, widths: Tensor, ends: Sequence[float]) -> int:
        return int((~self._constraints.exceeded(widths.to(self._ranking.first.device), ends)).sum())


@dataclass
class _PlanProblem:
    """What a plan chooses from."""

    forms: list[CostForm]
    budgets: list[float]
    live: list[int]
    """Present widths."""
    allowed: list[list[int]]
    lost: list[NDArray[np.float64]]
    """For each group, the importance lost if 0, 1, 2, ... channels are removed."""
    branches: list[list[int]]
    branch_lost: list[float]
    """What the removal of each branch alone loses."""
    streams: list[int] | None
    """The stream of each branch; None if what a branch loses does not depend on others."""

    def lost_with(self, removed: frozenset[int]) -> dict[int, float]:
        """What each of the removed branches loses; more if few terms of its stream remain.

        A stream is the sum of its branches and of what enters it, so one term more than it has branches.
        """
        if self.streams is None:
            return {b: self.branch_lost[b] for b in removed}
        live = [b for b, groups in enumerate(self.branches) if any(self.live[g] for g in groups)]
        before = Counter(self.streams[b] for b in live)
        after = Counter(self.streams[b] for b in live if b not in removed)
        return {
            b: self.branch_lost[b] * (before[stream] + 1) / (after[stream] + 1)
            for b in removed
            for stream in [self.streams[b]]
        }

    def solve(self, removed: frozenset[int]) -> Allocation:
        """Allocation without some branches."""
        zero = {group for b in removed for group in self.branches[b]}
        forms = [form.without(zero) if form.switched else form for form in self.forms]
        extra = {self.branches[b][0]: lost for b, lost in self.lost_with(removed).items()}
        allowed = [[0] if group in zero else widths for group, widths in enumerate(self.allowed)]
        near = allowed
        while True:
            # With more widths than can be compared at once: every n-th one, then those around the best.
            stride = -(-max(len(widths) for widths in near) // MAX_CANDIDATES)
            compared = [[*widths[:-1:stride], widths[-1]] for widths in near]
            losses = [
                np.array([extra.get(group, 0.0)]) if group in zero else lost[[live - width for width in widths]]
                for group, (lost, live, widths) in enumerate(zip(self.lost, self.live, compared, strict=True))
            ]
            found = WidthAllocator(forms, self.budgets, compared).solve(losses)
            if stride == 1:
                return found
            places = [widths.index(width) for widths, width in zip(allowed, found.widths, strict=True)]
            near = [widths[max(0, k - stride) : k + stride + 1] for widths, k in zip(allowed, places, strict=True)]

    def gain(self, found: Allocation, removed: frozenset[int], branch: int) -> float:
        """What the removal of a branch seems to gain: the value of the cost that it saves, less what it loses.

        If no widths meet the budgets, all groups are at their minimum widths, and a reduction of the cost is worth any
        loss. Then it is minus the loss for each unit of cost that is saved.
        """
        widths = np.array(found.widths, dtype=np.float64)
        after = widths.copy()
        after[self.branches[branch]] = 0
        saved = [(form.value(widths) - form.value(after)) / b for form, b in zip(self.forms, self.budgets, strict=True)]
        lost = sum(self.lost_with(removed | {branch}).values()) - sum(self.lost_with(removed).values())
        if not found.is_feasible:
            return -lost / max(sum(saved), 1e-12)
        kept = sum(float(self.lost[g][self.live[g] - found.widths[g]]) for g in self.branches[branch])
        worth = sum(multiplier * one for multiplier, one in zip(found.multipliers, saved, strict=True))
        return worth - (lost - kept)

    def gain_of_restoring(self, found: Allocation, removed: frozenset[int], branch: int) -> float:
        """What restoring a removed branch seems to gain: what its removal lost, less what it adds then."""
        widths = np.array(found.widths, dtype=np.float64)
        added_value = 0.0
        for group in self.branches[branch]:  # each at the best width beside those before it
            added_values = []
            for width in self.allowed[group]:
                after = widths.copy()
                after[group] = width
                added = [
                    multiplier * (form.value(after) - form.value(widths)) / budget
                    for multiplier, form, budget in zip(found.multipliers, self.forms, self.budgets, strict=True)
                ]
                added_values.append(sum(added) + float(self.lost[group][self.live[group] - width]))
            best = int(np.argmin(added_values))
            added_value += added_values[best]
            widths[group] = self.allowed[group][best]
        return sum(self.lost_with(removed).values()) - sum(self.lost_with(removed - {branch}).values()) - added_value


def allowed_widths(live: int, least: int, step: int, remainder: int) -> list[int]:
    """The present width, and every width `remainder + k * step` from below it down to the minimum."""
    largest = remainder + (live - 1 - remainder) // step * step
    return [live, *range(largest, min(least, live) - 1, -step)] if live else [0]
