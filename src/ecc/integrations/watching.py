"""What the callbacks share: the solver among a trainer's optimizers, what it has to tell, and the cut at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from ecc.errors import EccError
from ecc.graph import ChannelGraph, live_channels
from ecc.graph.slimming import build_slim
from ecc.methods.ecc.solver import EccSolver

_PATCHED = ("forward", "_original_forward")  # what accelerate puts on a network of mixed precision


class Watch:
    """Looks after a solver that is in a trainer's hands.

    Args:
        network: The very module that was traced.
        graph: Its channel graph.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph) -> None:
        self.network, self.graph = network, graph
        self.solver: EccSolver | None = None
        self.slim: nn.Module | None = None

    def begin(self, optimizers: Iterable[Any], steps: float) -> None:
        """Finds the solver, before the first step.

        Args:
            optimizers: Of the trainer, as it wraps them.
            steps: Optimizer steps that the trainer will make in all.

        Raises:
            EccError: If there is no solver, or its schedule is longer than the training.
        """
        found = [solver for solver in map(_unwrapped, optimizers) if isinstance(solver, EccSolver)]
        if len(found) != 1:
            raise EccError(f"this training has {len(found)} EccSolvers among its optimizers; give it one.")
        (self.solver,) = found
        if self.solver.steps > steps:
            raise EccError(
                f"the EccSolver was made for {self.solver.steps} steps, and the trainer makes {steps:g}: it would end "
                f"above its budget. Make it with steps={steps:g}."
            )

    def facts(self) -> dict[str, float]:
        """What is alive now costs, what the schedule allows, and each width. Waits for the device."""
        if self.solver is None:
            return {}
        widths = {f"ecc/width/{name}": float(width) for name, width in self.solver.widths.items()}
        return {"ecc/energy": float(self.solver.energy), "ecc/target": self.solver.target, **widths}

    def end(self) -> None:
        """Cuts the dead channels off a copy.

        Warns if the budget is not met, as after a training that was stopped, and if channels are alive again: trainers
        that end with an average of weights, or with the best checkpoint, bring back what the solver had removed.
        """
        if self.solver is None:
            return
        self.solver.warn_if_unmet()
        alive = sum(live_channels(self.network, self.graph).values())
        self.solver.mask_(self.network)
        back = alive - sum(live_channels(self.network, self.graph).values())
        if back:
            warnings.warn(
                f"{back} channels that the solver had removed were alive again at the end of the training, as after "
                "loading an earlier checkpoint (load_best_model_at_end) or averaging weights. They are silenced, so "
                "that the budget holds; a network from before the budget was met is not trained without them.",
                stacklevel=2,
            )
        patched = {name: vars(self.network).pop(name) for name in _PATCHED if name in vars(self.network)}
        try:
            self.slim = build_slim(self.network, self.graph, self.solver.width_multiple)
        finally:
            vars(self.network).update(patched)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer within what accelerate, or another trainer, wraps it into."""
    for _ in range(4):
        if isinstance(optimizer, EccSolver) or not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    return optimizer
