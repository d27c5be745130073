"""`Landing`: bring a descent to the budget by weighing on the way down, not by believing the energy model.

    predicted  1.0 ─┐
                    └─┐  weigh: the model errs by r here, so aim at budget / r
                      └──┐  weigh again, nearer: aim better
                         └───── weigh: within 97..100 % of the budget? If above, descend once more

Removed channels do not come back, so corrections are made while there is still some way to go, and the aim is below
the budget by as much as the scales may err.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ecc.energy.cost import Cost
from ecc.errors import InfeasibleBudget
from ecc.run_records import CostCheck

from .cost_evaluator import MeasuredCost
from .ecc.solver import EccSolver

MARKS = (0.25, 0.5, 0.75, 1.0)
"""Shares of a descent at which the network is weighed; with the cubic schedule 42, 12 and 2 % of the way are left.

The first must come early: a model that is 25 % too high has overshot when 12 % of its way are left.
"""

BAND = (0.97, 1.0)
"""What counts as landed, in shares of the budget."""

MAX_DESCENTS = 6
_CORRECTION = 0.03  # of all steps: a descent after the first
_MARGIN = (0.002, 0.015)  # least and most, as a share of the budget


class Landing:
    """Watches a solver and corrects its limits.

    Args:
        solver: At the start of its descent.
        costs: As the solver has them.
        limits: The budgets, each in the unit of its cost.
        scales: Tell what widths really cost; see `CostEvaluator`.
        steps: Of the whole solve.
        band: The shares of a budget between which the result must lie.
    """

    def __init__(
        self,
        solver: EccSolver,
        costs: Sequence[Cost],
        limits: Sequence[float],
        scales: Callable[[Mapping[str, int]], MeasuredCost],
        steps: int,
        band: tuple[float, float] = BAND,
    ) -> None:
        self._solver, self._costs, self._limits, self._scales = solver, tuple(costs), tuple(limits), scales
        self._steps, self._band = steps, band
        self._next_mark = 0
        self._descents = 1
        self.weighings: list[CostCheck] = []
        self.landed = False
        self.note = ""
        """Why it did not land, or what should be known; empty if all is well."""

    def after_step(self, step: int) -> CostCheck | None:
        """To be called after each step of the solver; a weighing, if it was time for one.

        Raises:
            InfeasibleBudget: If the network cannot get as small as it would have to.
        """
        descent, is_last = self._solver.descent, step >= self._steps
        if (self.landed or self.note or descent < MARKS[self._next_mark]) and not is_last:
            return None
        widths = self._solver.widths
        if self.landed or self.note:
            if widths == self.weighings[-1].widths:
                return None
            self.landed, self.note = False, ""  # what was silent when it landed is read by now
        weighed = self._scales(widths)
        predicted = {cost.resource: float(spent) for cost, spent in zip(self._costs, self._solver.cost, strict=True)}
        targets = targets_after(weighed, predicted, self._costs, self._limits, self._band[1])
        if self._is_whole and max(shares_of(weighed, predicted, self._costs, self._limits).values()) <= self._band[1]:
            targets = {name: max(aim, predicted[name]) for name, aim in targets.items()}  # nothing needs to go
        while self._next_mark < len(MARKS) - 1 and descent >= MARKS[self._next_mark]:  # a short one passes several
            self._next_mark += 1
        if descent < 1.0 and not is_last:
            self._solver.retarget(list(targets.values()))
        else:
            self._judge(weighed, predicted, targets, step)
        found = CostCheck(
            step=step,
            progress=descent,
            widths=widths,
            predicted=predicted,
            measured=weighed.amounts,
            label=weighed.label,
            relative_ci=weighed.relative_ci,
            targets=targets,
        )
        self.weighings.append(found)
        return found

    @property
    def _is_whole(self) -> bool:
        return self._solver.widths == dict(zip(self._costs[0].groups, self._costs[0].full_widths, strict=True))

    def _judge(
        self, weighed: MeasuredCost, predicted: Mapping[str, float], targets: Mapping[str, float], step: int
    ) -> None:
        """At the end of a descent: landed, or one more descent, or why not."""
        shares = shares_of(weighed, predicted, self._costs, self._limits)
        tightest = max(shares, key=shares.__getitem__)
        if shares[tightest] <= self._band[1]:
            self.landed = True
            if self._is_whole:
                self.note = f"the dense network is at {shares[tightest]:.1%} of the budget of {tightest} as it is."
            elif shares[tightest] < self._band[0]:
                self.note = (
                    f"the result lies at {shares[tightest]:.1%} of the budget of {tightest}, below "
                    f"{self._band[0]:.0%}: channels leave in steps, and removed ones do not come back."
                )
            return
        left = self._steps - step
        if self._descents >= MAX_DESCENTS or left < 1:
            why = f"after {self._descents} descents" if left >= 1 else "and no steps are left"
            self.note = f"the result lies at {shares[tightest]:.1%} of the budget of {tightest} {why}."
            return
        self._descents += 1
        ramp = min(1.0, max(1.0, _CORRECTION * self._steps) / left)
        try:
            self._solver.set_limit(list(targets.values()), left, ramp=ramp)
        except InfeasibleBudget as error:
            self.note = f"the result lies at {shares[tightest]:.1%} of the budget of {tightest}: {error}"

    # ------------------------------------------------------------ to go on later

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "next_mark": self._next_mark,
            "descents": self._descents,
            "landed": self.landed,
            "note": self.note,
            "weighings": [asdict(weighing) for weighing in self.weighings],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse; the solver's own state is restored by its owner."""
        self._next_mark, self._descents = int(state["next_mark"]), int(state["descents"])
        self.landed, self.note = bool(state["landed"]), str(state["note"])
        self.weighings = [CostCheck(**weighing) for weighing in state["weighings"]]


# ---------------------------------------------------------------- what a weighing says, for every method


def shares_of(
    weighed: MeasuredCost, predicted: Mapping[str, float], costs: Sequence[Cost], limits: Sequence[float]
) -> dict[str, float]:
    """Each cost as a share of its budget: weighed where it can be, counted where it is exact."""
    return {
        cost.resource: weighed.amounts.get(cost.resource, predicted[cost.resource]) / limit
        for cost, limit in zip(costs, limits, strict=True)
    }


def targets_after(
    weighed: MeasuredCost, predicted: Mapping[str, float], costs: Sequence[Cost], limits: Sequence[float], top: float
) -> dict[str, float]:
    """What the model must predict for the scales to show `top` of the budget, or a little less where they scatter."""
    least, most = _MARGIN
    margin = min(most, max(least, weighed.relative_ci or 0.0))
    targets = {}
    for cost, limit in zip(costs, limits, strict=True):
        name = cost.resource
        error = weighed.amounts[name] / predicted[name] if name in weighed.amounts else None
        targets[name] = limit if error is None else (top - margin) * limit / error
    return targets
