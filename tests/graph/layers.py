"""Layers and inputs for small networks in tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def named(**layers: nn.Module) -> nn.Sequential:
    """A sequence of named layers."""
    net = nn.Sequential()
    for name, layer in layers.items():
        net.add_module(name, layer)
    return net


def image(channels: int = 3, size: int = 8, batch: int = 2) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, channels, size, size)


def conv(inputs: int, outputs: int, kernel: int = 3, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **settings)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides the function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class WidthInBackward(torch.autograd.Function):
    """The identity, whose gradient is divided by the number of channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.shape[1]
