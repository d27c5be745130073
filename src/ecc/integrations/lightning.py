"""ECC in Lightning: the solver is the optimizer; a callback logs, checks the budget and slims.

class Module(LightningModule):
    def configure_optimizers(self):
        return EccSolver(self.net, self.graph, energy, "60%", self.trainer.estimated_stepping_batches)

callback = EccCallback(module.net, module.graph)
Trainer(max_epochs=10, callbacks=[callback]).fit(module, loader)
callback.slim  # the small network
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from torch import nn

from ecc.graph import ChannelGraph

from .monitor import SolverMonitor


class EccCallback(Callback):  # type: ignore[misc] # untyped where Lightning is not installed
    """Logs cost and widths to the trainer's loggers, and slims the network when the training ends.

    Args:
        network: The module that was traced, such as `module.net`.
        graph: Its channel graph.
        every: Steps between two entries; reading the metrics synchronises with the device.

    Raises:
        EccError: When training starts, if the trainer has no `EccSolver`, or one for more steps than it makes.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph, *, every: int = 50) -> None:
        self._monitor, self._every = SolverMonitor(network, graph), every

    @property
    def slim(self) -> nn.Module | None:
        """The small network, once training has ended."""
        return self._monitor.slim

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the solver."""
        del pl_module
        self._monitor.begin(trainer.optimizers, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the metrics of the solver."""
        del pl_module, outputs, batch, batch_idx
        if trainer.global_step % self._every == 0 and trainer.loggers:
            metrics = self._monitor.metrics()
            for logger in trainer.loggers:  # log_dict would repeat a value until the next one
                logger.log_metrics(metrics, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Slim the network."""
        del trainer, pl_module
        self._monitor.end()
