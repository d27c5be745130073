"""`Ecc`: the method of the paper behind the interface of all methods (`ecc.methods.base.Method`).

ECC prunes while it trains: `EccSolver` takes the place of the optimizer, and one step of the method is one
training step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ecc.methods.base import PruningContext
from ecc.methods.ecc.solver import EccSolver
from ecc.run_records import SolverLine

CORRECTION_RAMP = 0.03
"""Steps of a correction after the end of the schedule, as a fraction of all pruning steps."""


class Ecc:
    """ECC. Its settings are those of the run (`CompressSettings`): solver, importance, uniform_floor."""

    name = "ecc"
    needs_held_out = False
    removes_branches = True

    def config(self) -> dict[str, Any]:
        """No settings besides those of the run."""
        return {}

    def start(self, context: PruningContext) -> None:
        """Create the solver around Adam."""
        settings = context.settings
        chosen: dict[str, Any] = {"solver": settings.solver, "uniform_floor": settings.uniform_floor}
        if settings.solver == "paper":
            chosen = {
                "solver": settings.paper_constants,
                "warm_up": 0.0,
                "ramp": 1.0,
            }  # no schedule: it may use all steps
        self._context, self._step, self._targets = context, 0, list(context.targets)
        self.solver = EccSolver(
            context.model,
            context.graph,
            list(context.costs),
            list(context.targets),
            settings.prune_steps,
            optimizer=None if context.make_optimizer is None else context.make_optimizer(),
            min_width_ratio=settings.min_width_ratio,
            width_multiple=context.width_multiple,
            importance=settings.importance,
            **chosen,
        )
        self._training = context.training(self.solver, settings.prune_steps)

    @property
    def progress(self) -> float:
        """Fraction of the pruning schedule that is done."""
        return self.solver.descent

    @property
    def is_done(self) -> bool:
        """Whether all pruning steps were taken."""
        return self._step >= self._context.settings.prune_steps

    def step(self) -> None:
        """One training step: the optimizer's step on the weights, and pruning where the schedule says so."""
        self._apply_targets()
        self._step = next(self._training)
        if self._step % self._context.settings.train.log_every == 0:
            self._context.log_solver(self._line())

    def propose(self, targets: Sequence[float]) -> dict[str, int] | None:
        """Widths that the present schedule would end with for other targets, without pruning to them."""
        return self.solver.propose(list(targets)) if self.solver.descent < 1 else None

    def fix_widths(self, widths: Mapping[str, int]) -> None:
        """Prune to these widths until the end of the schedule."""
        self.solver.fix_widths(widths)

    def _apply_targets(self) -> None:
        """Pass changed targets on to the solver. After the end of its schedule they start a new, short one."""
        if self._context.targets == self._targets:
            return
        self._targets = list(self._context.targets)
        if self.solver.descent < 1:
            self.solver.retarget(self._targets)
            return
        steps = self._context.settings.prune_steps
        left = steps - self._step
        self.solver.set_limit(self._targets, left, ramp=min(1.0, max(1.0, CORRECTION_RAMP * steps) / left))

    def _line(self) -> SolverLine:
        cost, duals, widths = self.solver.numbers
        return SolverLine(
            step=self._step,
            cost=dict(zip((one.resource for one in self._context.costs), cost, strict=True)),
            target=self.solver.target,
            energy_dual=duals.energy,
            width_duals={name: dual if math.isfinite(dual) else None for name, dual in duals.width.items()},
            widths=widths,
        )

    def state_dict(self) -> dict[str, Any]:
        """Steps and targets; the training loop saves the solver."""
        return {"step": self._step, "targets": list(self._targets)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the training loop restores the solver."""
        self._step, self._targets = int(state["step"]), [float(target) for target in state["targets"]]
