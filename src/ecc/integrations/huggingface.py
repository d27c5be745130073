"""ECC in Hugging Face's Trainer: the solver is the optimizer, and a callback logs, checks the budget and cuts.

model.to(args.device)  # the solver works where the network is
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

from .watching import Watch


class EccCallback(TrainerCallback):  # type: ignore[misc] # untyped where transformers is not installed
    """Adds live energy and widths to what the Trainer logs, and cuts the network when the training ends.

    The Trainer tells its own reporters before it tells us, so they do not see what we add; `log_history` has it, and
    so have `loggers`.

    Args:
        network: The very module that was traced; the Trainer's model or a part of it.
        graph: Its channel graph.
        loggers: Are told too, such as `ecc.integrations.wandb.WandbLogger`.

    Raises:
        EccError: When training starts, if the Trainer has no `EccSolver`, or one for more steps than it makes.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph, *, loggers: Sequence[Logger] = ()) -> None:
        self._watch, self._loggers = Watch(network, graph), tuple(loggers)
        self._last = -1

    @property
    def slim(self) -> nn.Module | None:
        """The small network, once training has ended."""
        return self._watch.slim

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finds the solver."""
        del args, control
        self._watch.begin([kwargs.get("optimizer")], state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds what the solver has to tell."""
        del args, control
        facts = self._watch.facts() if self._watch.slim is None else {}
        for entry in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(facts)
        if facts and state.global_step > self._last:  # the Trainer logs once more when it is done
            self._last = state.global_step
            for logger in self._loggers:
                logger.log(facts, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cuts."""
        del args, state, control, kwargs
        self._watch.end()
        for logger in self._loggers:
            logger.close()
