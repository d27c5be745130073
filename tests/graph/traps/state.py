"""State that a forward pass leaves behind."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graph.layers import conv
from graph.traps.base import Net, ordinary, trap, traps


@trap()
class CacheOfThePreviousCall(Net):
    """The second call uses the mean of the first call's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def middle(self, x: Tensor) -> Tensor:
        last, self.last = self.last, x.detach().clone()
        return x if last is None else x - last.mean(1, keepdim=True)


@trap()
class CacheOfTheWidth(Net):
    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None

    def middle(self, x: Tensor) -> Tensor:
        if self.width is None:
            self.width = x.shape[1]
            return x
        return x / x.new_tensor([self.width])


@trap()
class AverageOfAllChannels(Net):
    """Train mode keeps one number of all channels, and eval mode uses it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Tensor:
        if self.is_learning:
            self.average.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x * self.average


@ordinary(2)
class KeepsItsFeatures(Net):
    """The features of the last call are kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = F.relu(self.stem(x))
        return self.head(F.relu(self.body(self.features)))


@trap()
class CounterInABuffer(Net):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def set_weights_(self) -> None:
        self.calls.zero_()

    def middle(self, x: Tensor) -> Tensor:
        self.calls += x.shape[1]
        return x / (1 + self.calls)


def on_a_view(net: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, : y.shape[1] // 2].mul_(2)
    return y


traps("in place", {"on the input": lambda net, x: x.add_(0.5).mul_(0.7), "on a view": on_a_view})


@trap()
class ParameterMadeLater(Net):
    """A parameter that the first forward pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = None

    def middle(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((x.shape[1], 1, 1), 1.0 / x.shape[1], dtype=x.dtype, device=x.device)
        return x * self.scale


@trap()
class TiedWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = conv(8, 8), conv(8, 8)
        self.second.weight = self.first.weight

    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))
