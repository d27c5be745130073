"""ECC in Hugging Face's Trainer: the solver is the optimizer; a callback logs, checks the budget and slims.

model.to(args.device)  # before the solver is created
solver = EccSolver(model, graph, energy, "60%", args.max_steps)
callback = EccCallback(model, graph)
Trainer(model, args, train_dataset=data, optimizers=(solver, None), callbacks=[callback]).train()
callback.slim  # the small network
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ecc.graph import ChannelGraph
from ecc.training import Logger

from .monitor import SolverMonitor


class EccCallback(TrainerCallback):  # type: ignore[misc] # untyped where transformers is not installed
    """Adds cost and widths to the logs of the Trainer, and slims the network when the training ends.

    The Trainer calls its own reporters first, so they do not see these metrics; `log_history` and `loggers` have them.

    Args:
        network: The module that was traced: the Trainer's model or a part of it.
        graph: Its channel graph.
        loggers: Also receive the metrics, such as `ecc.integrations.wandb.WandbLogger`.

    Raises:
        EccError: When training starts, if the Trainer has no `EccSolver`, or one for more steps than it makes.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph, *, loggers: Sequence[Logger] = ()) -> None:
        self._monitor, self._loggers = SolverMonitor(network, graph), tuple(loggers)
        self._last = -1

    @property
    def slim(self) -> nn.Module | None:
        """The small network, once training has ended."""
        return self._monitor.slim

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the solver."""
        del args, control
        self._monitor.begin([kwargs.get("optimizer")], state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics of the solver."""
        del args, control
        metrics = self._monitor.metrics() if self._monitor.slim is None else {}
        for entry in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(metrics)
        if metrics and state.global_step > self._last:  # the Trainer logs once more at the end
            self._last = state.global_step
            for logger in self._loggers:
                logger.log(metrics, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Slim the network."""
        del args, state, control, kwargs
        self._monitor.end()
        for logger in self._loggers:
            logger.close()
