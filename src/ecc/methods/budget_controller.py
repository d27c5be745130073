"""Closed-loop budget control.

The energy model is only a prediction. `BudgetController` measures networks and rescales the target of the method by the
ratio of predicted to measured cost. So the *measured* cost ends within `TOLERANCE_BAND`:

    target  1.0 ─┐
                 └─┐  at 15 %: measure what the method would prune to; the model is off by r there, target = budget / r
                   └──┐  at 50 % and 75 %: the same, several times, until a measured result is within the band
                      └───── at 100 %: the network has exactly the widths that were measured

Any widths can be measured, whether the network has been pruned to them or not. So the final widths are found while
there are still more channels than needed, and no pruning has to be undone.

It serves every method. A method that prunes while it trains (`progress`, see `Method`) is measured at `CHECKPOINTS` of
its schedule, other methods when they are done.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ecc.energy import Cost, dense_cost
from ecc.errors import option_hint
from ecc.records import from_builtins, to_builtins
from ecc.run_records import CostCheck

from .base import Method, PruningContext, schedule_progress
from .cost_evaluator import MeasuredCost
from .model_error import BLOCK, SAFETY_MARGIN, estimate_errors, safety_margin

CHECKPOINTS = (0.15, 0.5, 0.75, 1.0)
"""Fractions of the pruning schedule at which the network is measured.

Pruned channels do not come back, so the first check has to be early: with the cubic schedule, 39 % of the reduction is
done at 15 % of the steps.
"""

READINGS = (1, 8, 6)
"""Most readings of proposed widths at each checkpoint before the last. None is taken after one within the band."""

HEADROOM = 1.06
"""Targets, as multiples of the corrected ones, until widths are chosen: pruned channels do not come back."""

TOLERANCE_BAND = (0.98, 1.0)
"""Measured cost of a good result, as a fraction of the budget."""

MAX_CORRECTIONS = 6
"""Corrections after the end of the schedule."""

CONFIRMED_CI = 0.008
"""Readings with a wider confidence interval, as those of clocks, are repeated where they are near the band: with one
noisy reading, the network that is chosen is more often one that was read too high."""

MAX_CONFIRMATIONS = 6
"""Most readings of one network that are averaged."""

CANDIDATES = (0.0, 0.003, 0.006, 0.012, 0.02, 0.035, 0.06, 0.1)
"""Relative distances from the present targets, on both sides, for which the method is asked for proposals."""


@dataclass(frozen=True)
class _Bracket:
    """A result on one side of the tolerance band, and the targets that led to it."""

    targets: list[float]
    ratio: float
    check: CostCheck


_Candidate: TypeAlias = tuple[dict[str, int], list[float]]
"""Widths, and targets that lead to them."""


class BudgetController:
    """Measures during pruning and corrects the target costs.

    Args:
        method: Has started on the context.
        context: Its `targets` are corrected.
        limits: The budgets, each in the unit of its cost.
        measure: Measured cost of given widths; see `CostEvaluator`.
        known: Measurements of earlier runs with the same network and models. With them, fewer networks have to be
            measured.
        band: Tolerance band of the result, as fractions of the budget.
    """

    def __init__(
        self,
        method: Method,
        context: PruningContext,
        limits: Sequence[float],
        measure: Callable[[Mapping[str, int]], MeasuredCost],
        known: Sequence[CostCheck] = (),
        band: tuple[float, float] = TOLERANCE_BAND,
    ) -> None:
        self._method, self._context, self._limits, self._measure = method, context, tuple(limits), measure
        self._known, self._band = list(known), band
        self.checks: list[CostCheck] = []
        """All measurements; the last one is that of the result."""
        self.is_met = False
        """Whether the last measured cost is within the budget."""
        self.note = ""
        """Why the result is not in the tolerance band; empty if it is."""
        self.steps = 0
        """Steps of the method."""
        self._next_checkpoint = 0
        self._corrections = 0
        self._below: _Bracket | None = None  # the last result below the band
        self._above: _Bracket | None = None  # the last result above the budget since then
        self._prune_again = False  # step although the method is done, because the targets were raised
        self._chosen: _Bracket | None = None  # widths that were measured and are being pruned to

    def run(self, after_step: Callable[[list[CostCheck]], None]) -> None:
        """Step the method until the measured cost meets the budget, or cannot meet it.

        Args:
            after_step: Called after every step with its measurements, often none. The state can be saved then.

        Raises:
            InfeasibleBudget: If a measurement during pruning shows that the budget cannot be met.
        """
        while not self.is_finished:
            if self._prune_again or not self._method.is_done:
                self._method.step()
                self.steps, self._prune_again = self.steps + 1, False
            known = len(self.checks)
            self._after_step()
            after_step(self.checks[known:])

    @property
    def is_finished(self) -> bool:
        """Whether the result is final. A method with a schedule also trains it until its steps are used up."""
        is_decided = self.is_met or bool(self.note)
        return is_decided and (self._method.is_done or schedule_progress(self._method) is None)

    def _after_step(self) -> None:
        """Measure and correct the targets if it is time."""
        progress = schedule_progress(self._method)
        is_last = self._method.is_done and not self._prune_again
        if progress is None:
            if not is_last:
                return
        elif not is_last and (self.is_met or self.note or progress < CHECKPOINTS[self._next_checkpoint]):
            return
        widths = self._context.named_widths()
        if self.is_met or self.note:  # the network has been trained since
            if widths == self.checks[-1].widths:
                return
            self.is_met, self.note = False, ""
        is_final = progress is None or progress >= 1.0 or is_last
        if self._accept_chosen(widths) if is_final else self._measure_proposals(progress or 0.0):
            return
        if is_final and any(widths == check.widths for check in self.checks if check.progress >= 1.0):
            # Measured often enough, a network above its budget would pass by chance.
            self._stop_at_best()
            return
        check = self._check(widths, 1.0 if progress is None else progress)
        self.checks.append(check)
        if is_final and (mean := self._confirmed(check)) is not check:
            check = mean
            self.checks.append(check)  # the last one is that of the result
        if progress is not None:
            while self._next_checkpoint < len(CHECKPOINTS) - 1 and progress >= CHECKPOINTS[self._next_checkpoint]:
                self._next_checkpoint += 1  # a short schedule passes several at once
        if is_final:
            self._decide(check)
        else:
            self._context.targets = list(check.targets.values())

    def _accept_chosen(self, widths: Mapping[str, int]) -> bool:
        """If the network has the chosen widths, they need not be measured again."""
        if self._chosen is None or widths != self._chosen.check.widths:
            return False
        check = replace(self._chosen.check, step=self.steps, progress=1.0)
        self.checks.append(check)
        self._chosen = None
        self._decide(check)
        return True

    def _measure_proposals(self, progress: float) -> bool:
        """Measure widths that the method would prune to, until some are within the band, and choose these.

        The first checkpoint only corrects the targets. The choice at the second one leaves room for more channels. The
        third one is used if nothing was within the band.
        """
        if not hasattr(self._method, "propose"):
            return False
        first = self._propose(self._context.targets)
        if first is None:
            return False
        if self._known and self._next_checkpoint == 0 and progress < CHECKPOINTS[1] and not self._is_dense(first):
            self._next_checkpoint = 1  # the targets are corrected without measuring
            self._context.targets = [HEADROOM * target for target in self._corrected(first)]
            return True
        readings = READINGS[self._next_checkpoint]
        while self._next_checkpoint < len(CHECKPOINTS) - 1 and progress >= CHECKPOINTS[self._next_checkpoint]:
            readings = max(readings, READINGS[self._next_checkpoint])  # a short schedule passes several at once
            self._next_checkpoint += 1
        if self._is_dense(first):
            check = self._check(first, progress)
            if self._ratio(check) <= self._band[1]:  # nothing has to be pruned
                self.checks.append(check)
                self._context.targets = list(check.targets.values())
                return True
        found = self._search(first, readings, progress)
        if self._chosen is not None and self._can_reach(self._chosen.check.widths):
            found.append(self._chosen)  # the best one of the checkpoint before
        fitting = [one for one in found if one.ratio <= self._top(one.check)]
        if not any(one.ratio >= self._band[0] for one in fitting):
            near = [one for one in found if self._top(one.check) < one.ratio <= self._band[1]]
            fitting += self._measure_again(near, progress)
        best = max(fitting, key=lambda one: one.ratio) if fitting else min(found, key=lambda one: one.ratio)
        is_good = best in fitting and best.ratio >= self._band[0]
        is_last = self._next_checkpoint == len(CHECKPOINTS) - 1
        self._chosen = best if best in fitting and self._next_checkpoint > 1 else None
        if is_good or (is_last and fitting):
            self._context.targets = list(best.targets)
        else:
            room = 1.0 if is_last else HEADROOM
            self._context.targets = [room * target for target in self._corrected(best.check.widths)]
        if self._chosen is not None and (is_good or is_last):
            self._method.fix_widths(best.check.widths)  # type: ignore[attr-defined]
            self._next_checkpoint = len(CHECKPOINTS) - 1
        return True

    def _can_reach(self, widths: Mapping[str, int]) -> bool:
        """Whether the present network can be pruned to these widths."""
        present = self._context.named_widths()
        return all(width <= present[name] for name, width in widths.items())

    def _search(self, first: dict[str, int], readings: int, progress: float) -> list[_Bracket]:
        """Measure the candidate that is most probably within the band, until one is.

        Candidates are proposals of the method for targets around the corrected ones, and networks that differ from a
        measured one in a single group.
        """
        candidates = {_key(first): (first, list(self._context.targets))}
        found: list[_Bracket] = []
        while len(found) < readings:
            if self._readings and len(found) < 2:
                candidates = self._proposals(first) or candidates  # around corrected targets, if these can be reached
            neighbours = self._neighbours(found)
            measured = {_key(check.widths) for check in self.checks if check.step == self.steps}
            choices = [one for key, one in {**neighbours, **candidates}.items() if key not in measured]
            if not choices:
                break
            widths, targets = self._most_probable(choices)
            check = self._check(widths, progress)
            self.checks.append(check)
            check = self._confirmed(check)
            found.append(_Bracket(targets, self._ratio(check), check))
            low, top, _ = self._aim(check.relative_ci)
            if low <= found[-1].ratio <= top:
                break
        return found

    def _confirmed(self, check: CostCheck) -> CostCheck:
        """The mean of several readings of a network near the band, if one has a wide confidence interval."""
        readings, mean = [check], check
        while len(readings) < MAX_CONFIRMATIONS and (mean.relative_ci or 0.0) > CONFIRMED_CI:
            wide = mean.relative_ci or 0.0
            if not self._band[0] - wide <= self._ratio(mean) <= self._band[1] + wide:
                break
            readings.append(self._check(check.widths, check.progress))
            self.checks.append(readings[-1])
            mean = _mean_check(readings)
        return mean

    def _measure_again(self, near: Sequence[_Bracket], progress: float) -> list[_Bracket]:
        """The cheapest of networks within the safety margin, if the mean of more readings leaves its smaller margin.

        The first reading is not part of the mean: this network was chosen because that reading was low.
        """
        if not near:
            return []
        one = min(near, key=lambda one: one.ratio)
        readings: list[CostCheck] = []
        while len(readings) < MAX_CONFIRMATIONS:
            readings.append(self._check(one.check.widths, progress))
            self.checks.append(readings[-1])
            mean = _mean_check(readings)
            if self._ratio(mean) <= self._top(mean):
                return [_Bracket(one.targets, self._ratio(mean), mean)]
            if self._ratio(mean) > self._band[1] - SAFETY_MARGIN[0]:
                break
        return []

    @property
    def _readings(self) -> list[CostCheck]:
        """All measurements, those of earlier runs first."""
        return [*self._known, *self.checks]

    def _top(self, check: CostCheck) -> float:
        """Largest accepted ratio of a measurement."""
        return self._band[1] - safety_margin(check.relative_ci)

    def _aim(self, relative_ci: float | None = None) -> tuple[float, float, float]:
        """Smallest and largest accepted ratio, and the one to aim at: the middle where readings have noise.

        Args:
            relative_ci: Of the measurement; by default what is expected of the next one, after it was repeated.
        """
        if relative_ci is None and self._readings and (relative_ci := self._readings[-1].relative_ci) is not None:
            relative_ci = min(relative_ci, max(CONFIRMED_CI, relative_ci / math.sqrt(MAX_CONFIRMATIONS)))
        margin = safety_margin(relative_ci)
        low, top = self._band[0] + margin / 3, self._band[1] - margin
        return low, top, top - (0.5 if relative_ci else 0.1) * (top - low)

    def _most_probable(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The candidate whose cost is most probably within the band; of equal ones, the closest to the aim."""
        low, top, aim = self._aim()
        predicted = [self._context.predicted(widths) for widths, _ in candidates]
        below_low, below_top, ratios = np.ones(len(candidates)), np.ones(len(candidates)), np.zeros(len(candidates))
        for cost, limit in zip(self._context.costs, self._limits, strict=True):
            error, deviation = estimate_errors(self._readings, cost.resource, [widths for widths, _ in candidates])
            ratio = np.log([one[cost.resource] / limit for one in predicted]) + error
            is_exact = bool(self._readings) and cost.resource not in self._readings[-1].measured
            below_low *= _normal_cdf((np.log(low) - ratio) / deviation)
            below_top *= _normal_cdf((np.log(self._band[1] if is_exact else top) - ratio) / deviation)
            ratios = np.maximum(ratios, np.exp(ratio))
        order = np.lexsort((abs(ratios - aim), -np.round(below_top - below_low, 2)))
        return candidates[int(order[0])]

    def _proposals(self, first: Mapping[str, int]) -> dict[tuple[int, ...], _Candidate]:
        """Different proposals of the method, for targets around corrected ones."""
        found, centre = {}, self._corrected(first)
        is_exact = [cost.resource not in self._readings[-1].measured for cost in self._context.costs]
        for distance in dict.fromkeys(sign * distance for distance in CANDIDATES for sign in (1, -1)):
            targets = [one if exact else one * (1 + distance) for one, exact in zip(centre, is_exact, strict=True)]
            widths = self._propose(targets)
            if widths is not None:
                found[_key(widths)] = (widths, targets)
        return found

    def _corrected(self, widths: Mapping[str, int]) -> list[float]:
        """Targets that lead to the middle of the band, if the model is off as at these widths."""
        *_, aim = self._aim()
        found = []
        for cost, limit in zip(self._context.costs, self._limits, strict=True):
            if cost.resource in self._readings[-1].measured:
                error, _ = estimate_errors(self._readings, cost.resource, [widths])
                found.append(aim * limit / float(np.exp(error[0])))
            else:
                found.append(limit)  # an exact cost has its budget as target
        return found

    def _propose(self, targets: Sequence[float]) -> dict[str, int] | None:
        if not is_reachable(self._context, targets):
            return None
        widths: dict[str, int] | None = self._method.propose(targets)  # type: ignore[attr-defined]
        return widths

    def _neighbours(self, found: Sequence[_Bracket]) -> dict[tuple[int, ...], _Candidate]:
        """Networks that differ in one group from those measured closest to the band: wider below it, narrower above.

        All other widths are those of a measured network, so the estimate of their cost is good.
        """
        context, structure = self._context, self._context.graph.structure
        steps = dict(zip(structure.groups, structure.width_steps(context.width_multiple), strict=True))
        present, least = context.named_widths(), dict(zip(context.graph.full_widths, context.min_widths(), strict=True))
        below = [one for one in found if one.ratio <= self._band[0]]
        above = [one for one in found if one.ratio > self._band[0]]
        bases = [(max(below, key=lambda one: one.ratio), 1)] if below else []
        bases += [(min(above, key=lambda one: one.ratio), -1)] if above else []
        neighbours = {}
        for base, sign in bases:
            for name, width in base.check.widths.items():
                change = sign * steps[name]
                near = {width + change, *self._aligned(width, change), *(check.widths[name] for check in self.checks)}
                for new in {min(present[name], one) for one in near}:
                    if width > 0 and new != width and least[name] <= new <= present[name]:
                        widths = {**base.check.widths, name: new}
                        predicted = context.predicted(widths).values()
                        targets = [max(*pair) for pair in zip(base.targets, predicted, strict=True)]
                        neighbours[_key(widths)] = (widths, targets)
        return neighbours

    def _aligned(self, width: int, change: int) -> set[int]:
        """The next widths in this direction that are even and that fill a block; of the width multiple as well."""
        multiples = {math.lcm(abs(change), one) for one in (2, BLOCK)}
        return {(width // one + 1) * one if change > 0 else (width - 1) // one * one for one in multiples}

    def _ratio(self, check: CostCheck) -> float:
        """The largest cost as a fraction of its budget."""
        return max(budget_ratios(check.measured, check.predicted, self._context.costs, self._limits).values())

    def _next_targets(self, check: CostCheck, below: _Bracket | None, above: _Bracket | None) -> list[float]:
        """Corrected targets; between a network that is too small and one that is too large, interpolated ones."""
        top = self._band[1] - safety_margin(check.relative_ci)
        aim = statistics.fmean((self._band[0], top))
        if below is None or above is None:
            scale = {name: aim / top if name in check.measured else 1.0 for name in check.targets}
            return [scale[name] * target for name, target in check.targets.items()]
        part = min(max((aim - below.ratio) / max(above.ratio - below.ratio, 1e-9), 0.1), 0.9)
        return [one + part * (two - one) for one, two in zip(below.targets, above.targets, strict=True)]

    def _check(self, widths: dict[str, int], progress: float) -> CostCheck:
        """Measure the network and compute corrected targets."""
        predicted, measured = self._context.predicted(widths), self._measure(widths)
        targets = corrected_targets(measured, predicted, self._context.costs, self._limits, self._band[1])
        ratio = max(budget_ratios(measured.amounts, predicted, self._context.costs, self._limits).values())
        if self._is_dense(widths) and ratio <= self._band[1]:
            targets = {name: max(target, predicted[name]) for name, target in targets.items()}  # prune nothing
        return CostCheck(
            step=self.steps,
            progress=progress,
            widths=widths,
            predicted=predicted,
            measured=measured.amounts,
            label=measured.label,
            relative_ci=measured.relative_ci,
            targets=targets,
        )

    def _decide(self, check: CostCheck) -> None:
        """After the end of the schedule: accept the result, correct the targets once more, or give up with a note."""
        context = self._context
        ratios = budget_ratios(check.measured, check.predicted, context.costs, self._limits)
        tightest = max(ratios, key=ratios.__getitem__)
        ratio, where = ratios[tightest], f"the {tightest} is {ratios[tightest]:.1%} of its budget"
        if self._is_dense(check.widths) and ratio <= self._band[1]:
            self.is_met, self.note = True, f"{where} without pruning."
        elif self._band[0] <= ratio <= self._band[1]:
            self.is_met = True
        elif ratio < self._band[0] or self._below is not None:
            self._approach_band(check, ratio)
        elif self._corrections >= MAX_CORRECTIONS:
            self.note = f"{where} after {self._corrections} corrections."
        elif schedule_progress(self._method) is not None and self._method.is_done:
            self.note = f"{where}, and no pruning steps are left; use more {option_hint('prune_steps')}."
        elif not is_reachable(context, list(check.targets.values())):
            self.note = f"{where}, and the minimum widths do not allow less; lower {option_hint('min_width_ratio')}."
        else:
            self._corrections += 1
            context.targets = list(check.targets.values())

    def _approach_band(self, check: CostCheck, ratio: float) -> None:
        """Search for a larger network that still meets the budget, between one that is too small and one too large.

        Only a method that prunes from the dense network can give a larger network. The first larger targets are the
        corrected ones. Once a network is above the budget, targets are interpolated between both sides.
        """
        context = self._context
        if ratio < self._band[0]:
            self._below = _Bracket(list(context.targets), ratio, check)
        else:
            self._above = _Bracket(list(context.targets), ratio, check)
        assert self._below is not None  # the first result above the budget is corrected downwards
        raises = any(new > old for new, old in zip(check.targets.values(), context.targets, strict=True))
        can_grow = getattr(self._method, "prunes_from_dense", False) and (raises or self._above is not None)
        if not can_grow or self._corrections >= MAX_CORRECTIONS:
            self._stop_at_best()
            return
        self._corrections, self._prune_again = self._corrections + 1, True
        context.targets = self._next_targets(check, self._below, self._above)

    def _stop_at_best(self) -> None:
        """No other network can be had: go back to the largest one within the budget, if there was one."""
        last, context = self.checks[-1], self._context
        if self._below is None:
            self.note = (
                f"the cost is {self._ratio(last):.1%} of the budget, and {self._method.name} does not prune further."
            )
            return
        if context.targets != self._below.targets:
            context.targets = list(self._below.targets)
            self._method.step()
        self.is_met = True
        reason = "widths change in steps"
        if not getattr(self._method, "prunes_from_dense", False):
            reason += f", or the prediction was too high, and {self._method.name} does not widen a network again"
        self.note = f"the cost is {self._below.ratio:.1%} of the budget, below {self._band[0]:.0%}: {reason}."
        if last != self._below.check:
            self.checks.append(self._below.check)

    def _is_dense(self, widths: Mapping[str, int]) -> bool:
        return widths == self._context.graph.full_widths

    # ------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and the state of the method."""
        return {
            "steps": self.steps,
            "targets": list(self._context.targets),
            "next_checkpoint": self._next_checkpoint,
            "corrections": self._corrections,
            "prune_again": self._prune_again,
            "is_met": self.is_met,
            "note": self.note,
            "known": to_builtins(self._known),
            "checks": to_builtins(self.checks),
            "brackets": to_builtins([self._below, self._above, self._chosen]),
            "method": self._method.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the network and the stream of batches are restored by their owner."""
        self.steps, self._corrections = int(state["steps"]), int(state["corrections"])
        self._context.targets = [float(target) for target in state["targets"]]
        self._next_checkpoint, self._prune_again = int(state["next_checkpoint"]), bool(state["prune_again"])
        self.is_met, self.note = bool(state["is_met"]), str(state["note"])
        self._known, self.checks = (
            from_builtins(state[name], list[CostCheck], "the checkpoint") for name in ("known", "checks")
        )
        self._below, self._above, self._chosen = from_builtins(
            state["brackets"], list[_Bracket | None], "the checkpoint"
        )
        self._method.load_state_dict(state["method"])


def budget_ratios(
    measured: Mapping[str, float], predicted: Mapping[str, float], costs: Sequence[Cost], limits: Sequence[float]
) -> dict[str, float]:
    """Each cost as a fraction of its budget: measured if it can be, otherwise counted or predicted."""
    return {
        cost.resource: measured.get(cost.resource, predicted[cost.resource]) / limit
        for cost, limit in zip(costs, limits, strict=True)
    }


def corrected_targets(
    measured: MeasuredCost, predicted: Mapping[str, float], costs: Sequence[Cost], limits: Sequence[float], top: float
) -> dict[str, float]:
    """Predicted costs to aim at so that the measured costs meet their budgets.

    target = (top - safety_margin) * budget * predicted / measured

    The safety margin is the confidence interval of the measurement, between 0.2 % and 1.5 %. A cost that is not
    measured is exact, and its target is the budget.
    """
    margin = safety_margin(measured.relative_ci)
    targets = {}
    for cost, limit in zip(costs, limits, strict=True):
        name = cost.resource
        is_measured = name in measured.amounts
        targets[name] = (top - margin) * limit * predicted[name] / measured.amounts[name] if is_measured else limit
    return targets


def _normal_cdf(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


def _mean_check(readings: Sequence[CostCheck]) -> CostCheck:
    """The mean of several readings of one network."""
    last, count = readings[-1], len(readings)
    measured = {name: statistics.fmean(one.measured[name] for one in readings) for name in last.measured}
    ci = None if last.relative_ci is None else math.hypot(*(one.relative_ci or 0.0 for one in readings)) / count
    return replace(last, measured=measured, relative_ci=ci)


def _key(widths: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(widths.values())


def is_reachable(context: PruningContext, targets: Sequence[float]) -> bool:
    """Whether the smallest network that is allowed meets the targets."""
    return replace(context, targets=list(targets)).constraint_violation(context.smallest_widths()) <= 0


def initial_targets(costs: Sequence[Cost], limits: Sequence[float], dense: MeasuredCost) -> list[float]:
    """The budgets, corrected by the change of the dense network's cost since it was profiled."""
    profiled = [dense_cost(cost) for cost in costs]
    return [
        limit * then / dense.amounts.get(cost.resource, then)
        for cost, limit, then in zip(costs, limits, profiled, strict=True)
    ]
