"""Recalibrate the batch norms of a pruned network before it is scored.

Their running statistics are those of the dense network. With them a pruned network without training scores like chance,
whatever was pruned, and a search over candidates learns nothing. With statistics of its own, even over a few batches,
the score separates good candidates from bad ones. ECC does not need this: it trains while it prunes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ecc.task import call_model
from ecc.torch_utils import preserve_modes

BATCHES = 2
"""Forward passes without labels, over the same batches for all candidates. They do not count as training."""


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Sequence[Any]) -> None:
    """Give every batch norm the mean statistics of some inputs.

    Args:
        model: Its running statistics are changed in place. Without batch norms nothing is run.
        batches: Inputs of the network, on its device.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms or not batches:
        return
    momenta = [norm.momentum for norm in norms]
    with preserve_modes(model):
        model.eval()
        try:
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
            for number, batch in enumerate(batches, start=1):
                for norm in norms:
                    norm.momentum = 1 / number  # the mean over all batches; None would synchronise with the device
                call_model(model, batch)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


@contextmanager
def recalibrated(model: nn.Module, batches: Sequence[Any]) -> Iterator[None]:
    """Recalibrate within a block, and restore the statistics at its end."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        recalibrate_(model, batches)
        yield
    finally:
        with torch.no_grad():
            for buffer, old in before:
                buffer.copy_(old)
