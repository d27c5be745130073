"""ECC in Lightning: the solver is the optimizer, and a callback logs, checks the budget and cuts.

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

from .watching import Watch


class EccCallback(Callback):  # type: ignore[misc] # untyped where Lightning is not installed
    """Logs live energy and widths to the trainer's loggers, and cuts the network when the training ends.

    Args:
        network: The very module that was traced, such as `module.net`.
        graph: Its channel graph.
        every: Steps between two entries; looking waits for the device.

    Raises:
        EccError: When training starts, if the trainer has no `EccSolver`, or one for more steps than it makes.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph, *, every: int = 50) -> None:
        self._watch, self._every = Watch(network, graph), every

    @property
    def slim(self) -> nn.Module | None:
        """The small network, once training has ended."""
        return self._watch.slim

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Finds the solver."""
        del pl_module
        self._watch.begin(trainer.optimizers, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs."""
        del pl_module, outputs, batch, batch_idx
        if trainer.global_step % self._every == 0 and trainer.loggers:
            facts = self._watch.facts()
            for logger in trainer.loggers:  # not by log_dict, which repeats a number until the next one
                logger.log_metrics(facts, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Cuts."""
        del trainer, pl_module
        self._watch.end()
