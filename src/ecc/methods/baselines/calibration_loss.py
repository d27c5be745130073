"""Training batches on which baselines compare pruned networks, and the loss on them.

The loss tells two candidates apart where accuracy cannot: shortly after pruning many candidates score like chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ecc.methods.base import PruningContext
from ecc.task import model_inputs_of
from ecc.torch_utils import eval_mode
from ecc.training.distill import training_loss

from .recalibration import recalibrated

BATCHES = 4
"""Calibration batches by default."""


class CalibrationBatches:
    """The next training batches at the first use, and the same ones after a resume. They are counted once.

    Args:
        context: Its stream does not advance.
        count: Number of batches.
    """

    def __init__(self, context: PruningContext, count: int = BATCHES) -> None:
        self._context, self._stream, self._count = context, context.stream, count
        self._batches: list[Any] | None = None
        self._first: dict[str, int] | None = None  # position of the first one in the stream

    def __call__(self) -> list[Any]:
        """The batches."""
        if self._batches is None:
            counted = None if self._first is None else self._stream.state()
            fork = self._stream.fork()
            fork.rank = 0  # all processes must take the same decisions, so they use the same batches
            if self._first is None:
                self._first = fork.state()
            else:
                fork.restore(self._first)
            self._batches = [next(fork) for _ in range(self._count)]
            if counted is not None:
                self._stream.restore(counted)
        return self._batches

    def inputs(self) -> list[Any]:
        """The inputs of the batches."""
        return [model_inputs_of(self._context.model, batch, self._context.loss) for batch in self()]

    def state(self) -> dict[str, int] | None:
        """The position of the first batch, if there was one."""
        return self._first

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take the batches at this position."""
        self._batches = None
        self._first = None if state is None else {name: int(value) for name, value in state.items()}


@torch.no_grad()
def calibration_loss(context: PruningContext, model: nn.Module, batches: Sequence[Any]) -> float:
    """Mean loss of a pruned network in eval mode on some batches, with batch norms recalibrated on them."""
    inputs = [model_inputs_of(model, batch, context.loss) for batch in batches]
    with recalibrated(model, inputs), eval_mode(model):
        losses = [training_loss(model, batch, context.loss, None).double() for batch in batches]
    return float(torch.stack(losses).mean())
