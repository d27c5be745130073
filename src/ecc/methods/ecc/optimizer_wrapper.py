"""`PruningOptimizer`: what the solvers of channels and of single weights have in common.

Each step is an iteration of Algorithm 1: the optimizer's step on the weights, then, at some steps, the removal of
channels; dead channels are kept at zero. A step does not synchronise with the device. Every decision depends on
weights, gradients and optimizer state alone, so the processes of a distributed run take the same decisions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from ecc.errors import BadFile, EccError, EccWarning
from ecc.formatting import si
from ecc.methods.ecc.constraints import TOLERANCE, Limit, ResourceConstraints
from ecc.methods.ecc.importance import BranchExits, TaylorImportance, adam_preconditioners, taylor_interval
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import Schedule
from ecc.settings import IMPORTANCES
from ecc.training import fused_on_gpu


class Duals(NamedTuple):
    """The dual variables of Eq. (4)."""

    width: dict[str, float]
    """y: value of one more channel of each group, in units of the loss."""
    energy: float
    """z: value of one more unit of the cost; with several costs, of one more fraction of the dense cost."""


class PrunableParts(Protocol):
    """The parts of a network that can be removed (channels or weights), in the order of a `ChannelRanking`."""

    tensors: list[Tensor]
    """The tensors that hold them."""

    def norms(self, preconditioners: Iterable[Tensor | None] | None = None) -> Tensor:
        """a_i = ||w_i||_B^2 of each part, float32, given B for each of `tensors`."""

    def products(self) -> Tensor:
        """Sum of w g of each part, float32."""

    def set_mask(self, alive: Tensor) -> None:
        """Prepare the masks that `apply_mask_` multiplies with."""

    def apply_mask_(self) -> None:
        """Zero the dead parts."""


class WidthSolver(Protocol):
    """Decides which parts are removed. Its state is a tuple of tensors, replaced and never changed in place."""

    name: str

    @property
    def state(self) -> tuple[Tensor, ...]:
        """Everything needed to resume."""

    @property
    def alive(self) -> Tensor:
        """(channels,) bool."""

    def is_due(self, schedule: Schedule, step: int) -> bool:
        """Whether `update` is called at this step."""

    def update(self, importance: Tensor, schedule: Schedule, step: int, weight_lr: float) -> None:
        """Remove channels."""

    def propose(self, importance: Tensor, ends: Sequence[float]) -> list[int] | None:
        """Widths that it would end with for these costs, if the importance stays as it is; None if it cannot tell."""

    def fix_plan(self, widths: Sequence[int] | None) -> None:
        """End with these widths, whatever the importance will be; None for those that it finds itself."""

    def duals(self, weight_lr: float) -> tuple[Tensor, Tensor]:
        """y of each group and z, on the device."""

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Restore a state."""


class PruningOptimizer(Optimizer):
    """An optimizer around another one that removes parts of the network on a schedule.

    Args:
        inner: The optimizer that steps the weights.
        parts: The parts that can be removed.
        ranking: Layout of the parts.
        constraints: The costs.
        min_widths: Smallest number of live parts of each group.
        solver: Decides which parts are removed.
        schedule: When parts are removed, and how many.
        names: Names of the groups.
        network: Identifies the network; a state of another one is refused.
        importance: One of `IMPORTANCES`.
        advice: Settings that lower the minimum widths.
        exits: Of the branches that can be removed.

    Raises:
        ValueError: The importance is unknown.
    """

    def __init__(
        self,
        inner: Optimizer,
        parts: PrunableParts,
        ranking: ChannelRanking,
        constraints: ResourceConstraints,
        min_widths: Tensor,
        solver: WidthSolver,
        schedule: Schedule,
        *,
        names: Sequence[str],
        network: str,
        importance: str,
        advice: str = "min_width_ratio",
        exits: BranchExits | None = None,
    ) -> None:
        if importance not in IMPORTANCES:
            raise ValueError(f"importance={importance!r} is unknown; choose one of {', '.join(IMPORTANCES)}.")
        self.inner = inner
        """The optimizer that steps the weights."""
        super().__init__(inner.param_groups, inner.defaults)
        self._share_state()
        self._parts, self._ranking, self._constraints, self._min_widths = parts, ranking, constraints, min_widths
        self._solver, self._schedule, self._exits = solver, schedule, exits
        self._names, self._network, self._importance, self._advice = tuple(names), network, importance, advice
        alive = solver.alive
        count = len(alive) + (exits.count if exits is not None else 0)
        self._taylor = TaylorImportance(count, alive.device) if importance == "taylor" else None
        # The budget of the constructor; `retarget` and `set_limit` change the schedule only.
        self._budget = None if solver.name == "fixed" else schedule.end
        self._has_warned = False  # about steps without gradients
        self._steps = 0  # of the present schedule
        self._set_masks(masked=not bool(solver.alive.all()))

    # --- optimizer -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # no overloads
        """Step the weights, and remove channels when it is time.

        Warns:
            EccWarning: Once, if no parameter has a gradient.
        """
        if closure is None:
            self._check_gradients()
            loss: float | None = self.inner.step()
        else:
            loss = self.inner.step(closure)
            self._check_gradients()
        if self._taylor is not None and self._steps % taylor_interval(self._schedule.steps) == 0:
            products = self._parts.products()
            self._taylor.add(products if self._exits is None else torch.cat([products, self._exits.products()]))
        self._advance()
        return loss

    def skip_step(self) -> None:
        """Count a step that was skipped because gradients overflowed, and remove channels when it is time.

        Weights and importance stay as they are. Without it, skipped steps delay the schedule.
        """
        self._advance()

    def _advance(self) -> None:
        """The part of a step after that of the weights."""
        self._steps += 1
        if self._solver.is_due(self._schedule, self._steps):
            with torch.no_grad():
                rate = max(group["lr"] for group in self.inner.param_groups)  # a group may be frozen by a rate of 0
                self._solver.update(self._present_importance(), self._schedule, self._steps, rate)
            self._set_masks(masked=True)
        if self._is_masked:
            self._parts.apply_mask_()
            if self._exits is not None:
                self._exits.apply_mask_()

    def propose(self, limit: Limit | Sequence[Limit]) -> dict[str, int] | None:
        """Widths at the end of a ramp to another limit, if importance stays as it is. Synchronises with the device.

        Returns:
            None if the solver does not plan, or nothing is known about the importance yet.

        Raises:
            InfeasibleBudget: As for the constructor.
        """
        if not self._steps:
            return None
        with torch.no_grad():
            widths = self._solver.propose(self._present_importance(), self._ends(limit))
        return None if widths is None else dict(zip(self._names, widths, strict=True))

    def fix_widths(self, widths: Mapping[str, int] | None) -> None:
        """Prune to these widths until the end of the ramp, for example those of `propose`; None plans again."""
        self._solver.fix_plan(None if widths is None else [widths[name] for name in self._names])

    def _present_importance(self) -> Tensor:
        """Importance of all parts and branches; the norms of weights while all steps were skipped."""
        return self._norms() if self._taylor is None or not self._taylor.samples else self._taylor.values

    def _norms(self) -> Tensor:
        """a_i = ||w_i||_B^2 of all parts, and of all branches."""
        parts = [one for one in (self._parts, self._exits) if one is not None]
        return torch.cat([one.norms(adam_preconditioners(self.inner, one.tensors)) for one in parts])

    def _check_gradients(self) -> None:
        groups = self.inner.param_groups
        if self._has_warned or any(parameter.grad is not None for group in groups for parameter in group["params"]):
            return
        self._has_warned = True
        count = sum(len(group["params"]) for group in groups)
        warnings.warn(
            f"step() was called, but none of the optimizer's {count} parameters has a gradient: the network "
            "is pruned without being trained. Call loss.backward() before step(), and zero_grad() after it.",
            EccWarning,
            stacklevel=4,  # the caller of step(), and torch's wrapper around it
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer."""
        if not any(param_group is mine for mine in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def __reduce__(self) -> Any:
        """Refuse copies: a copy would step the same weights.

        Raises:
            EccError: Always.
        """
        raise EccError(f"{type(self).__name__} cannot be copied or pickled; save its state_dict().")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer, and under `ecc` the state of the solver: tensors and plain values."""
        schedule = self._schedule
        own = {
            "graph": self._network,
            "steps": self._steps,
            "schedule": [list(schedule.start), list(schedule.end), schedule.steps, schedule.warm_up, schedule.ramp],
            "solver": self._solver.name,
            "importance": self._importance,
            "optimizer": type(self.inner).__name__,
            "budget": None if self._budget is None else list(self._budget),
            "taylor": None if self._taylor is None else list(self._taylor.state),
            "tensors": list(self._solver.state),
            "masked": self._is_masked,
            "sign": getattr(self._parts, "sign", None),
        }
        return {**self.inner.state_dict(), "ecc": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the state of a solver with the same settings. Load the model's weights as well.

        Raises:
            BadFile: The state belongs to another network, solver, optimizer or budget.
        """
        own = state_dict.get("ecc")
        if own is None:
            raise BadFile(
                f"this state has no entry 'ecc', so it is not a state of {type(self).__name__}. "
                "Load it into a plain optimizer."
            )
        self._check_state(own)
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "ecc"})
        self._share_state()
        self._budget = None if own.get("budget") is None else tuple(own["budget"])
        start, end, steps, warm_up, ramp = own["schedule"]
        self._schedule, self._steps = Schedule(tuple(start), tuple(end), steps, warm_up, ramp), own["steps"]
        self._solver.load(own["tensors"])
        if self._taylor is not None:
            self._taylor.load(own["taylor"])
        if own.get("sign") is not None:
            self._parts.sign = own["sign"]  # type: ignore[attr-defined]
        self._set_masks(masked=own["masked"])

    def _check_state(self, own: dict[str, Any]) -> None:
        here = {
            "graph": self._network,
            "solver": self._solver.name,
            "importance": self._importance,
            "optimizer": type(self.inner).__name__,
        }
        for name, value in here.items():
            if own.get(name) != value:
                raise BadFile(
                    f"this state was saved with {name} {own.get(name)!r}, but this solver has {name} {value!r}. "
                    f"Create the solver with the same {name}."
                )
        if not any(_is_close(self._budget, budget) for budget in (own.get("budget"), own["schedule"][1])):
            raise BadFile(
                f"this state was saved with the budget {_percent(own.get('budget'))}, but this solver has "
                f"{_percent(self._budget)}. Create the solver with the budget of the state (set_limit changes it after "
                "loading), or load only the model's weights."
            )

    def _share_state(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    # --- budget ----------------------------------------------------------------------------------

    @property
    def cost(self) -> tuple[Tensor, ...]:
        """Predicted costs of the live channels, each in its unit. Does not synchronise with the device."""
        return self._constraints.cost(self._ranking.widths(self._solver.alive))

    @property
    def energy(self) -> Tensor:
        """The first of `cost`."""
        return self.cost[0]

    @property
    def resources(self) -> tuple[str, ...]:
        """What each cost counts, such as energy or macs."""
        return tuple(cost.resource for cost in self._constraints.costs)

    @property
    def limits(self) -> tuple[float, ...]:
        """The budgets, each in the unit of its cost."""
        return tuple(end * dense for end, dense in zip(self._schedule.end, self._constraints.dense, strict=True))

    @property
    def target(self) -> float:
        """What the schedule allows now, for the first cost."""
        return self._schedule.fractions(self._steps)[0] * self._constraints.dense[0]

    @property
    def is_met(self) -> bool:
        """Whether all budgets are met. Synchronises with the device."""
        return all(float(cost) <= limit * (1 + TOLERANCE) for cost, limit in zip(self.cost, self.limits, strict=True))

    @property
    def steps(self) -> int:
        """Number of steps of the present schedule."""
        return self._schedule.steps

    @property
    def progress(self) -> float:
        """Fraction of the steps that are done."""
        return min(1.0, self._steps / self._schedule.steps)

    @property
    def duals(self) -> Duals:
        """y and z at the last update. Synchronises with the device."""
        y, z = self._solver.duals(self.inner.param_groups[0]["lr"])
        return Duals(dict(zip(self._names, y.tolist(), strict=True)), float(z))

    @property
    def descent(self) -> float:
        """Fraction of the ramp that is done, from 0 to 1. The budget is met at 1."""
        schedule = self._schedule
        return min(max(self._steps - schedule.ramp_start, 0) / schedule.ramp_steps, 1.0)

    def retarget(self, limit: Limit | Sequence[Limit]) -> None:
        """Change the cost at which the present ramp ends, for example after a measurement. Its length stays.

        Raises:
            InfeasibleBudget: As for the constructor.
            EccError: The ramp has ended.
        """
        if self.descent >= 1:
            raise EccError("the ramp has ended, so its target cannot change; set_limit() starts another ramp.")
        self._schedule = replace(self._schedule, end=self._ends(limit))

    def set_limit(self, limit: Limit | Sequence[Limit], steps: int | None = None, *, ramp: float | None = None) -> None:
        """Start a new ramp from here, without warm-up, for example after a measurement above the budget.

        Dead channels do not come back: a limit above the present cost removes nothing.

        Args:
            limit: As `budget` of the constructor.
            steps: Steps of the new ramp and of the training after it; by default those that are left.
            ramp: Fraction of them in which channels are removed; by default as before.

        Raises:
            InfeasibleBudget: As for the constructor.
        """
        ends = self._ends(limit)
        self.fix_widths(None)
        left = max(1, self._schedule.steps - self._steps)
        start = self._schedule.fractions(self._steps)
        ramp = self._schedule.ramp if ramp is None else ramp
        self._schedule = Schedule(start, ends, left if steps is None else steps, 0.0, ramp)
        self._steps = 0

    def _ends(self, limit: Limit | Sequence[Limit]) -> tuple[float, ...]:
        return self._constraints.parse_feasible(limit, self._min_widths, self._advice)

    def _unmet_message(self) -> str:
        """Warning for a network that is slimmed now; empty if the budgets are met. Synchronises with the device."""
        for cost, value, limit in zip(self._constraints.costs, self.cost, self.limits, strict=True):
            if float(value) > limit * (1 + TOLERANCE):
                left = self._schedule.steps - self._steps
                advice = (
                    f"Call step() {left} more times before slim(), or create the solver with fewer steps."
                    if left > 0
                    else "Call set_limit() with more steps, or raise the budget."
                )
                return (
                    f"the budget is not met: {cost.resource} {si(float(value), cost.unit)}, "
                    f"limit {si(limit, cost.unit)}, after {self.progress:.0%} of the {self.steps} steps. {advice}"
                )
        return ""

    def _live_counts(self) -> dict[str, int]:
        """Live parts of each group. Synchronises with the device."""
        counts = self._ranking.widths(self._solver.alive).tolist()
        return dict(zip(self._names, counts, strict=True))

    def _set_masks(self, *, masked: bool) -> None:
        self._is_masked = masked  # False while nothing is dead: a multiplication by one is skipped
        self._parts.set_mask(self._solver.alive)
        if self._exits is not None:
            self._exits.remove(getattr(self._solver, "removed", ()))


# --- helpers of the constructors -------------------------------------------------------------------


def adam_for(model: nn.Module, lr: float) -> Adam:
    """Adam with its default betas and without weight decay over the trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Adam(trained, lr=lr, betas=(0.9, 0.999), fused=fused_on_gpu(trained))


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of another network, and warn about parameters that the optimizer does not train.

    Parameters with `requires_grad=False` are meant to stay constant and are not counted.

    Raises:
        EccError: The optimizer holds no parameter of the model.
    """
    if not isinstance(optimizer, Optimizer):
        raise EccError(f"optimizer is {optimizer!r}; give an optimizer of the model's parameters, such as Adam(...).")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    kind = type(optimizer).__name__
    if named and not any(id(parameter) in held for parameter in named.values()):
        raise EccError(
            f"the optimizer ({kind}) holds none of the model's {len(named)} parameters, such as {next(iter(named))!r}: "
            f"the model would be pruned but not trained. Create it from this model: {kind}(model.parameters(), ...)."
        )
    trainable = {name: id(parameter) for name, parameter in named.items() if parameter.requires_grad}
    missing = [name for name, key in trainable.items() if key not in held]
    if missing:
        warnings.warn(
            f"the optimizer ({kind}) does not hold {len(missing)} of the model's {len(trainable)} trainable "
            f"parameters, such as {missing[0]!r}: they are pruned but not trained. Add them to the optimizer, "
            "or call requires_grad_(False) on them if they should stay constant.",
            EccWarning,
            stacklevel=3,
        )


def _is_close(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(one, other, strict=True))


def _percent(fractions: Sequence[float] | None) -> str:
    return "None" if fractions is None else " and ".join(f"{100 * one:.4g}% of dense" for one in fractions)
