"""`SolverMonitor`: finds the solver of a trainer, reads its metrics, and slims the network at the end."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from ecc.errors import EccError, EccWarning
from ecc.graph import ChannelGraph, live_channels
from ecc.graph.slimming import build_slim
from ecc.methods.ecc.solver import EccSolver

_PATCHED = ("forward", "_original_forward")  # set by accelerate for mixed precision


class SolverMonitor:
    """Follows the solver of a trainer; shared by the callbacks."""

    def __init__(self, network: nn.Module, graph: ChannelGraph) -> None:
        self.network, self.graph = network, graph
        self.solver: EccSolver | None = None
        self.slim: nn.Module | None = None

    def begin(self, optimizers: Iterable[Any], steps: float) -> None:
        """Find the solver, before the first step."""
        found = [solver for solver in map(_unwrap, optimizers) if isinstance(solver, EccSolver)]
        if len(found) != 1:
            raise EccError(f"the trainer has {len(found)} optimizers of type EccSolver; give exactly one.")
        (self.solver,) = found
        if self.solver.steps > steps:
            raise EccError(
                f"the EccSolver needs {self.solver.steps} steps, but the trainer makes {steps:g}, so the budget would "
                f"not be met. Create it with steps={steps:g}."
            )

    def metrics(self) -> dict[str, float]:
        """Current costs by resource, target of the first cost, and widths. Synchronises with the device."""
        if self.solver is None:
            return {}
        widths = {f"ecc/width/{name}": float(width) for name, width in self.solver.widths.items()}
        costs = zip(self.solver.resources, self.solver.cost, strict=True)
        return {**{f"ecc/{name}": float(cost) for name, cost in costs}, "ecc/target": self.solver.target, **widths}

    def end(self) -> None:
        """Build the slim network from a copy.

        Warns if the budget is not met, for example after an early stop, and if pruned channels are nonzero again: a
        trainer that loads its best checkpoint or averages weights restores what the solver had pruned.
        """
        if self.solver is None:
            return
        self.solver.warn_if_unmet()
        alive = sum(live_channels(self.network, self.graph).values())
        self.solver.mask_(self.network)
        back = alive - sum(live_channels(self.network, self.graph).values())
        if back:
            warnings.warn(
                f"{back} pruned channels were nonzero again at the end of the training, as after loading an earlier "
                "checkpoint (load_best_model_at_end) or averaging weights. They are masked, so that the budget holds, "
                "but such a network was not trained without them.",
                EccWarning,
                stacklevel=2,
            )
        patched = {name: vars(self.network).pop(name) for name in _PATCHED if name in vars(self.network)}
        try:
            self.slim = build_slim(self.network, self.graph, self.solver.width_multiple)
        finally:
            vars(self.network).update(patched)


def _unwrap(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of accelerate or another trainer."""
    for _ in range(4):
        if isinstance(optimizer, EccSolver) or not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    return optimizer
