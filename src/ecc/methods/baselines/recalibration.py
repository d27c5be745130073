"""Batch norms of a network that was cut see a few batches again before it is judged.

Their running statistics are those of the dense network. A cut network that was hardly trained scores like chance with
them, whatever was cut, and a search that judges candidates so is blind. With statistics of its own, even over few
batches, the score tells good cuts from bad ones. ECC needs none of it: it trains while it cuts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ecc.task import call_model

BATCHES = 2
"""Forward passes without labels, over the same batches for all candidates; they do not count as training."""


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Sequence[Any]) -> None:
    """Gives every batch norm the mean statistics of some inputs.

    Args:
        model: Changed in place, in its running statistics alone. Without batch norms nothing is run.
        batches: Inputs of the network, where it lies.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms or not batches:
        return
    modes = [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    try:
        for norm in norms:
            norm.train()
            norm.reset_running_stats()
        for number, batch in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1 / number  # the plain mean over all batches; with None it would wait for the device
            call_model(model, batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode


@contextmanager
def recalibrated(model: nn.Module, batches: Sequence[Any]) -> Iterator[None]:
    """A block in which batch norms have statistics of their own; after it, those they had."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        recalibrate_(model, batches)
        yield
    finally:
        with torch.no_grad():
            for buffer, old in before:
                buffer.copy_(old)
