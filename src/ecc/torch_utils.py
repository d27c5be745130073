"""Small helpers for torch modules and tensors, shared by all packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_MAX_DEPTH = 8  # of plain objects inside each other, which may refer to each other


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter, else of the first buffer, else the CPU."""
    for tensor in model.parameters():
        return tensor.device
    for tensor in model.buffers():
        return tensor.device
    return torch.device("cpu")


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore train or eval mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of every module at the end."""
    with preserve_modes(model):
        model.eval()
        yield


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in a nested value: sequences, mappings, dataclasses and plain objects, but not modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name), depth + 1)
    elif hasattr(value, "__dict__") and depth < _MAX_DEPTH and not isinstance(value, (nn.Module, type)):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)
