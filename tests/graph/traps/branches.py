"""Python branches on a width."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graph.layers import conv
from graph.traps.base import AfterBody, Net, ordinary, trap, traps


def loop(net: Any, x: Tensor) -> Tensor:
    for _ in range(x.shape[1] // 4):
        x = torch.tanh(x)
    return x


def skip_where_broadcasting_works(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A single remaining channel is added to all."""
    try:
        return net.head(x + y)
    except RuntimeError:
        return net.head(y)


BELOW = {"below a width": lambda net, x: torch.tanh(x) if x.shape[1] > 4 else torch.sigmoid(x)}
traps("branch in train mode", BELOW, train_only=True)
traps(
    "branch",
    {
        **BELOW,
        "at one channel": lambda net, x: torch.tanh(x) if x.shape[1] > 1 else x.neg(),
        "at the full width": lambda net, x: torch.tanh(x) if x.shape[1] == 8 else x,
        "by parity": lambda net, x: torch.tanh(x) if x.shape[1] % 2 == 0 else x.neg(),
        "loop": loop,
        "width of the module": lambda net, x: torch.tanh(x) if net.stem.out_channels > 5 else x,
        "number of elements": lambda net, x: torch.tanh(x) if x.numel() > 600 else x,
        "tensor of the width": lambda net, x: torch.tanh(x) if torch.tensor(x.shape[1]) > 4 else x,
        "kernel of a pooling": lambda net, x: F.interpolate(F.avg_pool2d(x, min(x.shape[1], 2)), x.shape[2:]),
    },
)
traps(
    "branch on two widths",
    {
        # 8 and 6 channels: they may be pruned to the same width.
        "skip where shapes agree": lambda net, x, y: net.head(y + x if x.shape == y.shape else y),
        "skip where widths agree": lambda net, x, y: net.head(y * (x if x.shape[1] == y.shape[1] else 1)),
        "skip where broadcasting works": skip_where_broadcasting_works,
        "ratio": lambda net, x, y: net.head(torch.tanh(y) if net.stem.weight.shape[0] > y.shape[1] else y),
        "width of the other group": lambda net, x, y: net.head(torch.tanh(y) if x.shape[1] > 4 else y),
    },
    build=AfterBody,
)


@trap()
class LayerByParity(Net):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = conv(6, 4, 1), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.even(y) if x.shape[1] % 2 == 0 else self.odd(y)


@ordinary(2)
class BranchOnTheImage(Net):
    def middle(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2) if x.shape[-1] >= 8 else x


@ordinary(1)
class SkipOfEqualWidths(Net):
    """8 and 8 channels are added, so they are one group and always have the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(8, 8)

    def middle(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        assert x.shape == y.shape
        return x + y
