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

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ecc.energy import Cost, dense_cost
from ecc.records import from_builtins, to_builtins
from ecc.run_records import CostCheck

from .base import Method, PruningContext, schedule_progress
from .cost_evaluator import MeasuredCost

CHECKPOINTS = (0.15, 0.5, 0.75, 1.0)
"""Fractions of the pruning schedule at which the network is measured.

Pruned channels do not come back, so the first check has to be early: with the cubic schedule, 39 % of the reduction is
done at 15 % of the steps.
"""

PROPOSALS = (4, 12, 4)
"""Most measurements of proposed widths at each checkpoint before the last."""

TOLERANCE_BAND = (0.98, 1.0)
"""Measured cost of a good result, as a fraction of the budget."""

MAX_CORRECTIONS = 6
"""Corrections after the end of the schedule."""

CANDIDATES = (0.0, 0.003, 0.006, 0.012, 0.02, 0.035, 0.06, 0.1)
"""Relative distances from the present targets, on both sides, for which the method is asked for proposals."""

_COMMON_ERROR, _WIDTH_ERROR = 0.1, 0.06  # standard deviations of the model's error
_SAFETY_MARGIN = (0.002, 0.015)  # smallest and largest, as a fraction of the budget


@dataclass(frozen=True)
class _Bracket:
    """A result on one side of the tolerance band, and the targets that led to it."""

    targets: list[float]
    ratio: float
    check: CostCheck


class BudgetController:
    """Measures during pruning and corrects the target costs.

    Args:
        method: Has started on the context.
        context: Its `targets` are corrected.
        limits: The budgets, each in the unit of its cost.
        measure: Measured cost of given widths; see `CostEvaluator`.
        band: Tolerance band of the result, as fractions of the budget.
    """

    def __init__(
        self,
        method: Method,
        context: PruningContext,
        limits: Sequence[float],
        measure: Callable[[Mapping[str, int]], MeasuredCost],
        band: tuple[float, float] = TOLERANCE_BAND,
    ) -> None:
        self._method, self._context, self._limits, self._measure = method, context, tuple(limits), measure
        self._band = band
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

    def run(self, after_step: Callable[[CostCheck | None], None]) -> None:
        """Step the method until the measured cost meets the budget, or cannot meet it.

        Args:
            after_step: Called after every step, with the measurement if there was one. The state can be saved then.

        Raises:
            InfeasibleBudget: If a measurement during pruning shows that the budget cannot be met.
        """
        while not self.is_finished:
            if self._prune_again or not self._method.is_done:
                self._method.step()
                self.steps, self._prune_again = self.steps + 1, False
            after_step(self.after_step())

    @property
    def is_finished(self) -> bool:
        """Whether the result is final. A method with a schedule also trains it until its steps are used up."""
        is_decided = self.is_met or bool(self.note)
        return is_decided and (self._method.is_done or schedule_progress(self._method) is None)

    def after_step(self) -> CostCheck | None:
        """Measure and correct the targets if it is time.

        Returns:
            The measurement, or None.
        """
        progress = schedule_progress(self._method)
        is_last = self._method.is_done and not self._prune_again
        if progress is None:
            if not is_last:
                return None
        elif not is_last and (self.is_met or self.note or progress < CHECKPOINTS[self._next_checkpoint]):
            return None
        widths = self._context.named_widths()
        if self.is_met or self.note:  # the network has been trained since
            if widths == self.checks[-1].widths:
                return None
            self.is_met, self.note = False, ""
        is_final = progress is None or progress >= 1.0 or is_last
        known = self._accept_chosen(widths) if is_final else self._measure_proposals(progress or 0.0)
        if known is not None:
            return known
        if is_final and any(widths == check.widths for check in self.checks if check.progress >= 1.0):
            # Measured often enough, a network above its budget would pass by chance.
            return self._stop_at_best()
        check = self._check(widths, 1.0 if progress is None else progress)
        self.checks.append(check)
        if progress is not None:
            while self._next_checkpoint < len(CHECKPOINTS) - 1 and progress >= CHECKPOINTS[self._next_checkpoint]:
                self._next_checkpoint += 1  # a short schedule passes several at once
        if is_final:
            return self._decide(check) or check
        self._context.targets = list(check.targets.values())
        return check

    def _accept_chosen(self, widths: Mapping[str, int]) -> CostCheck | None:
        """If the network has the chosen widths, they need not be measured again."""
        if self._chosen is None or widths != self._chosen.check.widths:
            return None
        check = replace(self._chosen.check, step=self.steps, progress=1.0)
        self.checks.append(check)
        self._chosen = None
        return self._decide(check) or check

    def _measure_proposals(self, progress: float) -> CostCheck | None:
        """Measure widths that the method would prune to, until some are within the band, and choose these.

        The choice at the second checkpoint leaves room for more channels. It is replaced at the third one, where the
        importance is known better, if widths within the band are found again.

        The candidates are the method's proposals for many targets. After each measurement, `estimate_error` says where
        the others are on the device, and the one that seems to be closest to the middle of the band is measured next.
        """
        if not hasattr(self._method, "propose"):
            return None
        tries = PROPOSALS[self._next_checkpoint]
        while self._next_checkpoint < len(CHECKPOINTS) - 1 and progress >= CHECKPOINTS[self._next_checkpoint]:
            tries = max(tries, PROPOSALS[self._next_checkpoint])  # a short schedule passes several at once
            self._next_checkpoint += 1
        chooses = self._next_checkpoint > 1  # from the second checkpoint on
        if (check := self._check_dense(progress)) is not None:
            return check
        found = self._search(tries, progress, chooses)
        if not found:
            return None
        top, _ = self._aim()
        fitting = [one for one in found if one.ratio <= top]
        if not any(one.ratio >= self._band[0] for one in fitting):  # rather half of the margin than a smaller network
            fitting += [one for one in found if top < one.ratio <= (top + self._band[1]) / 2]
        best = max(fitting, key=lambda one: one.ratio) if fitting else min(found, key=lambda one: one.ratio)
        self._context.targets = list(best.targets)
        if best not in fitting or best.ratio < self._band[0]:
            self._context.targets = self._corrected(best.check.widths)
        is_better = best in fitting and (self._chosen is None or best.ratio >= self._band[0])
        if chooses and is_better and not self._is_dense(best.check.widths):
            self._chosen = best
            self._method.fix_widths(best.check.widths)  # type: ignore[attr-defined]
        if self._chosen is not None:
            self._context.targets = list(self._chosen.targets)
        return self.checks[-1]

    def _search(self, tries: int, progress: float, with_neighbours: bool) -> list[_Bracket]:
        """Measure proposals until one is within the band."""
        candidates = self._candidates()
        found: list[_Bracket] = []
        while candidates and len(found) < tries:
            top, aim = self._aim()
            ratios = {number: self._estimated_ratio(widths) for number, (widths, _) in enumerate(candidates)}
            number = min(ratios, key=lambda one: (ratios[one] > top, abs(ratios[one] - aim)))
            widths, targets = candidates.pop(number)
            check = self._check(widths, progress)
            self.checks.append(check)
            ratio = max(budget_ratios(check.measured, check.predicted, self._context.costs, self._limits).values())
            found.append(_Bracket(targets, ratio, check))
            if self._band[0] <= ratio <= self._aim()[0]:
                break
            if len(found) == 1:
                candidates = self._candidates()  # around corrected targets
            if with_neighbours and (2 * len(found) >= tries or not candidates):
                candidates += self._neighbours(found)
        return found

    def _check_dense(self, progress: float) -> CostCheck | None:
        """If the method would prune nothing, and does not have to, the measurement of the dense network."""
        widths = self._propose(self._context.targets)
        if widths is None or not self._is_dense(widths):
            return None
        check = self._check(widths, progress)
        ratios = budget_ratios(check.measured, check.predicted, self._context.costs, self._limits)
        if max(ratios.values()) > self._band[1]:
            return None
        self.checks.append(check)
        self._context.targets = list(check.targets.values())
        return check

    def _aim(self) -> tuple[float, float]:
        """Largest ratio that is accepted, and the ratio to aim at: the middle of the band where readings have noise."""
        relative_ci = self.checks[-1].relative_ci if self.checks else None
        top = self._band[1] - _margin(relative_ci)
        return top, top - (0.5 if relative_ci else 0.1) * (top - self._band[0])

    def _candidates(self) -> list[tuple[dict[str, int], list[float]]]:
        """Different proposals of the method, for targets around the present ones, or around corrected ones."""
        context, found = self._context, {}
        first = self._propose(context.targets)
        if first is None:
            return []
        centre = self._corrected(first) if self.checks else list(context.targets)
        is_exact = [bool(self.checks) and cost.resource not in self.checks[-1].measured for cost in context.costs]
        measured = {tuple(check.widths.values()) for check in self.checks}
        for distance in dict.fromkeys(sign * distance for distance in CANDIDATES for sign in (1, -1)):
            targets = [one if exact else one * (1 + distance) for one, exact in zip(centre, is_exact, strict=True)]
            widths = self._propose(targets)
            if widths is not None:
                found[tuple(widths.values())] = (widths, targets)
        last = self.checks[-1].step if self.checks else -1  # a network is not measured twice at one checkpoint
        return [one for key, one in found.items() if key not in measured or last != self.steps]

    def _corrected(self, widths: Mapping[str, int]) -> list[float]:
        """Targets that lead to the middle of the band, if the model is off as at these widths."""
        _, aim = self._aim()
        found = []
        for cost, limit in zip(self._context.costs, self._limits, strict=True):
            is_measured = cost.resource in self.checks[-1].measured  # an exact cost has its budget as target
            found.append(aim * limit / estimate_error(self.checks, cost.resource, widths) if is_measured else limit)
        return found

    def _propose(self, targets: Sequence[float]) -> dict[str, int] | None:
        if not is_reachable(self._context, targets):
            return None
        widths: dict[str, int] | None = self._method.propose(targets)  # type: ignore[attr-defined]
        return widths

    def _neighbours(self, found: Sequence[_Bracket]) -> list[tuple[dict[str, int], list[float]]]:
        """Widths that differ in one group from the best ones: one step wider if they cost too little, else narrower.

        Where costs have large steps, no proposal may be within the band. All other widths are those of a measured
        network, so the estimate is good.
        """
        context, step = self._context, self._context.width_multiple
        present, least = context.named_widths(), dict(zip(context.graph.full_widths, context.min_widths(), strict=True))
        measured = {tuple(check.widths.values()) for check in self.checks}
        below = [one for one in found if one.ratio <= self._band[0]]
        above = [one for one in found if one.ratio > self._band[0]]
        bases = [(max(below, key=lambda one: one.ratio), step)] if below else []
        bases += [(min(above, key=lambda one: one.ratio), -step)] if above else []
        neighbours = {}
        for base, change in bases:
            for name, width in base.check.widths.items():
                new = min(present[name], width + change)
                if width > 0 and new != width and new >= least[name]:
                    widths = {**base.check.widths, name: new}
                    predicted = context.predicted(widths).values()
                    targets = [max(*pair) for pair in zip(base.targets, predicted, strict=True)]
                    neighbours[tuple(widths.values())] = (widths, targets)
        return [one for key, one in neighbours.items() if key not in measured]

    def _estimated_ratio(self, widths: Mapping[str, int]) -> float:
        """What the cost of these widths would be on the device, as a fraction of the budget."""
        predicted, ratios = self._context.predicted(widths), []
        for cost, limit in zip(self._context.costs, self._limits, strict=True):
            error = estimate_error(self.checks, cost.resource, widths)
            ratios.append(predicted[cost.resource] * error / limit)
        return max(ratios)

    def _next_targets(self, check: CostCheck, below: _Bracket | None, above: _Bracket | None) -> list[float]:
        """Corrected targets; between a network that is too small and one that is too large, interpolated ones."""
        top = self._band[1] - _margin(check.relative_ci)
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

    def _decide(self, check: CostCheck) -> CostCheck | None:
        """After the end of the schedule: accept the result, correct the targets once more, or give up with a note.

        Returns:
            An earlier check, if the result goes back to it.
        """
        context = self._context
        ratios = budget_ratios(check.measured, check.predicted, context.costs, self._limits)
        tightest = max(ratios, key=ratios.__getitem__)
        ratio, where = ratios[tightest], f"the {tightest} is {ratios[tightest]:.1%} of its budget"
        if self._is_dense(check.widths) and ratio <= self._band[1]:
            self.is_met, self.note = True, f"{where} without pruning."
        elif self._band[0] <= ratio <= self._band[1]:
            self.is_met = True
        elif ratio < self._band[0] or self._below is not None:
            return self._approach_band(check, ratio)
        elif self._corrections >= MAX_CORRECTIONS:
            self.note = f"{where} after {self._corrections} corrections."
        elif schedule_progress(self._method) is not None and self._method.is_done:
            self.note = f"{where}, and no pruning steps are left; use more prune_steps (--prune-steps)."
        elif not is_reachable(context, list(check.targets.values())):
            self.note = f"{where}, and the minimum widths do not allow less; lower min_width_ratio (--min-width-ratio)."
        else:
            self._corrections += 1
            context.targets = list(check.targets.values())
        return None

    def _approach_band(self, check: CostCheck, ratio: float) -> CostCheck | None:
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
            return self._stop_at_best()
        self._corrections, self._prune_again = self._corrections + 1, True
        context.targets = self._next_targets(check, self._below, self._above)
        return None

    def _stop_at_best(self) -> CostCheck | None:
        """No other network can be had: go back to the largest one within the budget, if there was one."""
        last, context = self.checks[-1], self._context
        if self._below is None:
            ratio = max(budget_ratios(last.measured, last.predicted, context.costs, self._limits).values())
            self.note = f"the cost is {ratio:.1%} of the budget, and {self._method.name} does not prune further."
            return None
        if context.targets != self._below.targets:
            context.targets = list(self._below.targets)
            self._method.step()
        self.is_met = True
        self.note = (
            f"the cost is {self._below.ratio:.1%} of the budget, below {self._band[0]:.0%}: widths change in steps."
        )
        if last == self._below.check:
            return None
        self.checks.append(self._below.check)
        return self._below.check

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
        self.checks = from_builtins(state["checks"], list[CostCheck], "the checkpoint")
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
    margin = _margin(measured.relative_ci)
    targets = {}
    for cost, limit in zip(costs, limits, strict=True):
        name = cost.resource
        is_measured = name in measured.amounts
        targets[name] = (top - margin) * limit * predicted[name] / measured.amounts[name] if is_measured else limit
    return targets


def estimate_error(checks: Sequence[CostCheck], resource: str, widths: Mapping[str, int]) -> float:
    """Measured / predicted cost of widths that were not measured, from those that were.

    The logarithm of the error is a constant plus an error of each width of each group, all of them independent. So
    networks have similar errors if they share widths. The estimate is the mean of this Gaussian process given the
    measurements.

    Args:
        checks: The measurements.
        resource: Which cost.
        widths: By name of the group.
    """
    known = [check for check in checks if resource in check.measured]
    if not known:
        return 1.0
    names = list(widths)
    here = np.array([widths[name] for name in names])
    there = np.array([[check.widths[name] for name in names] for check in known])
    errors = np.log([check.measured[resource] / check.predicted[resource] for check in known])
    noise = np.array([_margin(check.relative_ci) / 2 for check in known])

    def covariance(one: Any, other: Any) -> Any:
        return _COMMON_ERROR**2 + _WIDTH_ERROR**2 * (one == other).mean(-1)

    between = covariance(there[:, None], there[None]) + np.diag(noise**2)
    return float(np.exp(covariance(there, here) @ np.linalg.solve(between, errors)))


def _margin(relative_ci: float | None) -> float:
    smallest, largest = _SAFETY_MARGIN
    return min(largest, max(smallest, relative_ci or 0.0))


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
