"""The width enters a computation as a number: in eval mode, and in train mode alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graph.traps.base import traps


def over_channels(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)


WIDTH_VALUES: dict[str, Callable[[Any, Tensor], Any]] = {
    "new_tensor": lambda net, x: x / x.new_tensor([x.shape[1]]),
    "tensor": lambda net, x: x / torch.tensor(x.shape[1]),
    "float tensor": lambda net, x: x / torch.tensor(float(x.shape[1])),
    "tensor of the shape": lambda net, x: x / torch.tensor(x.shape)[1],
    "as_tensor": lambda net, x: x / torch.as_tensor([x.size(1)]),
    "from numpy": lambda net, x: x / torch.from_numpy(np.array([x.shape[1]])),
    "scalar_tensor": lambda net, x: x / torch.scalar_tensor(x.shape[1]),
    "full": lambda net, x: x / torch.full((1,), x.shape[1]),
    "new_full": lambda net, x: x / x.new_full((), x.shape[1]),
    "fill_": lambda net, x: x / x.new_empty(1).fill_(x.shape[1]),
    "arange": lambda net, x: x * over_channels(torch.arange(x.shape[1])),
    "last of arange": lambda net, x: x * torch.arange(x.shape[1])[-1],
    "linspace": lambda net, x: x * over_channels(torch.linspace(0.5, 2, x.shape[1])),
    "sum of ones": lambda net, x: x / torch.ones(x.shape[1]).sum(),
    "trace of eye": lambda net, x: x / torch.eye(x.shape[1]).trace(),
    "count": lambda net, x: x / torch.ones_like(x).sum((1, 2, 3), keepdim=True),
    "square root": lambda net, x: x / math.sqrt(x.size(1)),
    "numpy square root": lambda net, x: x / float(np.sqrt(x.size(1))),
    "numel": lambda net, x: x / x.numel(),
    "length": lambda net, x: x / len(x[0]),
    "stride": lambda net, x: x * x.stride(0),
    "out_channels": lambda net, x: x / net.stem.out_channels,
    "shape of the weight": lambda net, x: x / net.stem.weight.shape[0],
    "tensor of the weight's shape": lambda net, x: x / x.new_tensor(net.stem.weight.shape)[0],
    "multiplied twice": lambda net, x: x * x.new_tensor([x.shape[1]]).log(),
    "power": lambda net, x: x.abs() ** (1 + 1 / x.shape[1]),
    "clamp": lambda net, x: x.clamp(max=x.shape[1] / 8),
    "comparison": lambda net, x: x * (torch.arange(16) < x.shape[1]).sum(),
    "where": lambda net, x: torch.where(x > x.new_tensor(x.shape[1]) / 8, x, -x),
    "lerp": lambda net, x: x.lerp(x * x, 1 / x.shape[1]),
    "addcmul": lambda net, x: torch.addcmul(x, x, x, value=1 / x.shape[1]),
    "temperature of a softmax": lambda net, x: (x.flatten(2) / x.new_tensor([x.shape[1]])).softmax(2).view(x.shape),
    "index of a table": lambda net, x: x * torch.linspace(0.1, 2, 20)[x.shape[1]],
    "dropped seed": lambda net, x: x * torch.rand((), generator=torch.Generator().manual_seed(x.shape[1])),
}


traps("width", WIDTH_VALUES, every=3)
traps("width in train mode", dict(list(WIDTH_VALUES.items())[::3]), train_only=True, every=3)
