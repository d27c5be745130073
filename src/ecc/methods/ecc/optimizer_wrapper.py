"""`BudgetedOptimizer`: what solvers of channels and of single weights have in common.

Each step is Algorithm 1: the optimizer's step on the weights, then, at some steps, something is removed, and what is
dead is kept at zero. Nothing in a step waits for the device, and every decision is a function of weights,
gradients and optimizer state alone, so that the processes of a distributed run decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ecc.errors import BadFile, EccError
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.checks import has_gradients, warn_no_gradients
from ecc.methods.ecc.constraints import TOLERANCE, Limit, ResourceConstraints
from ecc.methods.ecc.dynamics import Dynamics
from ecc.methods.ecc.importance import IMPORTANCES, adam_metrics
from ecc.methods.ecc.schedule import Schedule
from ecc.methods.ecc.taylor import Taylor
from ecc.training import fused_on_gpu


class Duals(NamedTuple):
    """The dual variables of Eq. (4)."""

    width: dict[str, float]
    """y: what one more channel of each group is worth, in units of the loss."""
    energy: float
    """z: what one more unit of the cost (of several: one more share of the dense network's) is worth."""


class Slices(Protocol):
    """The parts of a network that can be removed, in the order of a ladder."""

    tensors: list[Tensor]
    """Where they lie."""

    def scores(self, metrics: Iterable[Tensor | None]) -> Tensor:
        """a of each part, float32, given B for each of `tensors`."""

    def products(self) -> Tensor:
        """The sum of w g of each part, float32."""

    def set_mask(self, alive: Tensor) -> None:
        """Prepares the masks that `apply_mask_` multiplies with."""

    def apply_mask_(self) -> None:
        """Zeroes what is dead."""


class BudgetedOptimizer(Optimizer):
    """An optimizer around another one, which removes parts of the network on a schedule.

    Args:
        inner: The optimizer that steps the weights.
        parts: What can be removed.
        ladder: The layout of the parts.
        limits: The costs.
        floors: Least number of live parts of each group.
        dynamics: Which parts are removed.
        schedule: When.
        names: Of the groups.
        network: Whose state this is; a state of another one is refused.
        importance: One of `IMPORTANCES`.
        advice: What lowers the floors.

    Raises:
        ValueError: If there is no such metric.
    """

    def __init__(
        self,
        inner: Optimizer,
        parts: Slices,
        ladder: ChannelRanking,
        limits: ResourceConstraints,
        floors: Tensor,
        dynamics: Dynamics,
        schedule: Schedule,
        *,
        names: Sequence[str],
        network: str,
        importance: str,
        advice: str = "min_width_ratio",
    ) -> None:
        if importance not in IMPORTANCES:
            raise ValueError(f"importance={importance!r} is unknown; give one of {', '.join(IMPORTANCES)}.")
        self.inner = inner
        """The optimizer that steps the weights."""
        super().__init__(inner.param_groups, inner.defaults)
        self._share_state()
        self._parts, self._ladder, self._limits, self._floors = parts, ladder, limits, floors
        self._dynamics, self._schedule = dynamics, schedule
        self._names, self._network, self._importance, self._advice = tuple(names), network, importance, advice
        alive = dynamics.alive
        self._taylor = Taylor(len(alive), alive.device) if importance == "taylor" else None
        self._budget = (
            None if dynamics.name == "fixed" else schedule.end
        )  # as asked for; `retarget` changes the schedule
        self._has_warned = False  # of steps without gradients
        self._steps = 0  # of the present schedule
        self._set_masks(masked=not bool(dynamics.alive.all()))

    # --- the optimizer's part --------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # no overloads
        """One step of the weights, and of what is removed when it is time.

        Warns:
            EccWarning: Once, if no parameter has a gradient.
        """
        if closure is None:
            self._check_gradients()
            loss: float | None = self.inner.step()
        else:
            loss = self.inner.step(closure)
            self._check_gradients()
        self._steps += 1
        if self._taylor is not None and self._taylor.is_due(self._steps):
            self._taylor.look(self._parts.products())
        if self._dynamics.is_due(self._schedule, self._steps):
            with torch.no_grad():
                scores = (
                    self._parts.scores(adam_metrics(self.inner, self._parts.tensors))
                    if self._taylor is None
                    else self._taylor.scores
                )
                rate = max(group["lr"] for group in self.inner.param_groups)  # one group may be frozen by a rate of 0
                self._dynamics.advance(scores, self._schedule, self._steps, rate)
            self._set_masks(masked=True)
        if self._is_masked:
            self._parts.apply_mask_()
        return loss

    def _check_gradients(self) -> None:
        if self._has_warned or has_gradients(self.inner):
            return
        self._has_warned = True
        warn_no_gradients(self.inner, stacklevel=4)  # step, and torch's function around it

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Hands more parameters to the optimizer within."""
        if not any(param_group is mine for mine in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def __reduce__(self) -> Any:
        """A copy would step the same weights: torch's own way leaves out all but the parameters.

        Raises:
            EccError: Always.
        """
        raise EccError(f"an {type(self).__name__} cannot be copied or pickled; keep its state_dict().")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and under `ecc` what the solver itself needs to go on: tensors and plain values."""
        schedule = self._schedule
        own = {
            "graph": self._network,
            "steps": self._steps,
            "schedule": [list(schedule.start), list(schedule.end), schedule.steps, schedule.warm_up, schedule.ramp],
            "solver": self._dynamics.name,
            "importance": self._importance,
            "optimizer": type(self.inner).__name__,
            "budget": None if self._budget is None else list(self._budget),
            "taylor": None if self._taylor is None else list(self._taylor.state),
            "tensors": list(self._dynamics.state),
            "masked": self._is_masked,
        }
        return {**self.inner.state_dict(), "ecc": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where a solver with the same settings stood; load the network's weights as well.

        Raises:
            BadFile: Not the state of such a solver.
        """
        own = state_dict.get("ecc")
        if own is None:
            raise BadFile(
                f"this state has no entry 'ecc': it is not a state of {type(self).__name__}. "
                "Load it into a plain optimizer."
            )
        then = tuple(own[name] for name in ("graph", "solver", "importance"))
        now = (self._network, self._dynamics.name, self._importance)
        if then != now:
            raise BadFile(
                f"this state belongs to network {then[0]}, solver {then[1]!r} and importance {then[2]!r}, the solver to "
                f"{now[0]}, {now[1]!r} and {now[2]!r}. Make the solver as it was made then."
            )
        if own.get("optimizer") != type(self.inner).__name__:
            raise BadFile(
                f"this state was saved with the optimizer {own.get('optimizer')}, and the solver has "
                f"{type(self.inner).__name__}, whose state differs. Make the solver with the same optimizer."
            )
        if not any(_same(self._budget, budget) for budget in (own.get("budget"), own["schedule"][1])):
            raise BadFile(
                f"this state was saved by a solver with the budget {_percent(own.get('budget'))}, and this solver has "
                f"{_percent(self._budget)}. Make the solver with the budget of the state (set_limit changes it after "
                "loading), or load the weights of the model alone."
            )
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "ecc"})
        self._share_state()
        self._budget = None if own.get("budget") is None else tuple(own["budget"])
        start, end, steps, warm_up, ramp = own["schedule"]
        self._schedule, self._steps = Schedule(tuple(start), tuple(end), steps, warm_up, ramp), own["steps"]
        self._dynamics.load(own["tensors"])
        if self._taylor is not None:
            self._taylor.load(own["taylor"])
        self._set_masks(masked=own["masked"])

    def _share_state(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    # --- the budget's part -----------------------------------------------------------------------

    @property
    def cost(self) -> tuple[Tensor, ...]:
        """What is alive costs, each cost in its unit; does not wait for the device."""
        return self._limits.cost(self._ladder.widths(self._dynamics.alive))

    @property
    def energy(self) -> Tensor:
        """What is alive costs, by the first cost."""
        return self.cost[0]

    @property
    def limits(self) -> tuple[float, ...]:
        """The budgets, each in the unit of its cost."""
        return tuple(end * dense for end, dense in zip(self._schedule.end, self._limits.dense, strict=True))

    @property
    def target(self) -> float:
        """What the schedule allows now, by the first cost."""
        return self._schedule.shares(self._steps)[0] * self._limits.dense[0]

    @property
    def is_met(self) -> bool:
        """Whether all budgets are met. Waits for the device."""
        return all(float(cost) <= limit * (1 + TOLERANCE) for cost, limit in zip(self.cost, self.limits, strict=True))

    @property
    def steps(self) -> int:
        """Calls of `step` that the present schedule is made for."""
        return self._schedule.steps

    @property
    def progress(self) -> float:
        """Share of the steps that were made."""
        return min(1.0, self._steps / self._schedule.steps)

    @property
    def duals(self) -> Duals:
        """y and z at the last update. Waits for the device."""
        y, z = self._dynamics.duals(self.inner.param_groups[0]["lr"])
        return Duals(dict(zip(self._names, y.tolist(), strict=True)), float(z))

    @property
    def descent(self) -> float:
        """How much of the present descent is done, from 0 to 1; its budget is met at 1."""
        schedule = self._schedule
        return min(max(self._steps - schedule.ramp_start, 0) / schedule.ramp_steps, 1.0)

    def retarget(self, limit: Limit | Sequence[Limit]) -> None:
        """Corrects where the present descent ends, as after a measurement on the way. Its pace stays.

        Raises:
            InfeasibleBudget: As at construction.
            EccError: If the descent has ended, so that nothing would come of it.
        """
        if self.descent >= 1:
            raise EccError("the descent has ended, and its aim cannot be changed; set_limit begins another.")
        self._schedule = replace(self._schedule, end=self._ends(limit))

    def set_limit(self, limit: Limit | Sequence[Limit], steps: int | None = None, *, ramp: float | None = None) -> None:
        """Begins a new descent from here, as after a measurement that missed the budget. There is no warm-up again.

        What is dead does not come back: a limit above what is spent now removes nothing more.

        Args:
            limit: As `budget`.
            steps: Steps of the new descent and of the training after it; by default those that are left.
            ramp: Share of them in which something is removed; by default as before.

        Raises:
            InfeasibleBudget: As at construction.
        """
        ends = self._ends(limit)
        left = max(1, self._schedule.steps - self._steps)
        start = self._schedule.shares(self._steps)
        ramp = self._schedule.ramp if ramp is None else ramp
        self._schedule = Schedule(start, ends, left if steps is None else steps, 0.0, ramp)
        self._steps = 0

    def _ends(self, limit: Limit | Sequence[Limit]) -> tuple[float, ...]:
        return checked_ends(self._limits, limit, self._floors, self._advice)

    def _unmet(self) -> str:
        """What a user should know before the network is slimmed; empty if the budgets are met. Waits for the device."""
        for cost, spent, limit in zip(self._limits.costs, self.cost, self.limits, strict=True):
            if float(spent) > limit * (1 + TOLERANCE):
                left = self._schedule.steps - self._steps
                way = (
                    f"Call step() {left} more times before you slim the network, or make the solver with fewer steps."
                    if left > 0
                    else "Call set_limit() with more steps, or raise the budget."
                )
                return (
                    f"the budget is not met: {cost.resource} {float(spent):.4g} {cost.unit}".rstrip()
                    + f", and the limit is {limit:.4g}, after {self.progress:.0%} of the {self.steps} steps. {way}"
                )
        return ""

    def _live(self) -> dict[str, int]:
        """Live parts of each group. Waits for the device."""
        counts = self._ladder.widths(self._dynamics.alive).tolist()
        return dict(zip(self._names, counts, strict=True))

    def _set_masks(self, *, masked: bool) -> None:
        self._is_masked = masked  # False while nothing is dead: a multiplication by one is left out
        self._parts.set_mask(self._dynamics.alive)


# --- for the constructors of solvers ---------------------------------------------------------------


def adam_of(model: nn.Module, lr: float) -> Adam:
    """Adam with the paper's settings over what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Adam(trained, lr=lr, betas=(0.9, 0.999), fused=fused_on_gpu(trained))


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter lies."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _same(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(one, other, strict=True))


def _percent(shares: Sequence[float] | None) -> str:
    return "None" if shares is None else " and ".join(f"{100 * share:.4g}% of dense" for share in shares)


def checked_ends(
    limits: ResourceConstraints, budget: Limit | Sequence[Limit], floors: Tensor, advice: str
) -> tuple[float, ...]:
    """Budgets as shares of the dense network's costs.

    Raises:
        InfeasibleBudget: If they cannot be met.
    """
    ends = limits.parse(budget)
    limits.check(ends, floors, advice)
    return ends


def shares_of(limits: ResourceConstraints, widths: Tensor) -> tuple[float, ...]:
    """What is spent at some widths, as shares of the dense network's costs."""
    return tuple(float(cost) / dense for cost, dense in zip(limits.cost(widths), limits.dense, strict=True))
