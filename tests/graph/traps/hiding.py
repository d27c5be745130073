"""Errors that zeros, tiny values, NaN or another, large output hide from a comparison of outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import EXAMPLE, SECOND, Between, Net, images, ordinary, trap, traps


def by_width(x: Tensor) -> Tensor:
    """The error in all of these networks."""
    return x / x.new_tensor([x.shape[1]])


def zeros() -> Tensor:
    return torch.zeros(2, 3, 8, 8)


class WithoutBiases(Between):
    def __init__(self, code: Callable[[Any, Tensor], Any], train_only: bool = False) -> None:
        super().__init__(code, train_only)
        self.stem, self.body, self.head = conv(3, 8, bias=False), conv(8, 6, bias=False), conv(6, 4, 1, bias=False)


for _value in (0.0, 1e-30, 1e25):
    example = partial(torch.full, (2, 3, 8, 8), _value)
    traps(f"example of {_value:g}", {"": lambda net, x: by_width(x)}, build=WithoutBiases, example=example)
traps(
    "example of zeros in train mode",
    {"": lambda net, x: torch.tanh(by_width(x))},
    build=WithoutBiases,
    example=zeros,
    train_only=True,
)


@trap(example=zeros, second=SECOND)
class ZerosHideABranch(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] > 4 else x

    def set_weights_(self) -> None:
        self.stem.bias.zero_()  # type: ignore[union-attr]


class TwoOutputs(Net):
    """A second output, which is wrong, beside the first."""

    def __init__(self, code: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.code, self.other = code, conv(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        return self.code(self.head(F.relu(self.body(x))), self.other(by_width(x)))


traps(
    "tiny output",
    {
        "in the same tensor": lambda large, small: torch.cat([1e4 * large, 1e-2 * small], 1),
        "of its own": lambda large, small: {"large": 1e6 * large, "small": 1e-5 * small},
    },
    build=TwoOutputs,
)


@trap()
class NanBesideIt(Net):
    """One output is NaN, the other is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.other = conv(8, 4, 1)

    def set_weights_(self) -> None:
        self.other.weight.fill_(float("nan"))

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.body(by_width(x)))), self.other(x)


class WrongByWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return by_width(x)


@trap()
class NanInAllWeights(WrongByWidth):
    def set_weights_(self) -> None:
        self.head.weight.fill_(float("nan"))


@trap()
class ZeroInitialisedBranch(Net):
    """The branch is multiplied by zero until it is trained: only gradients show the error."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = conv(8, 8)

    def set_weights_(self) -> None:
        self.branch.weight.zero_()
        self.branch.bias.zero_()  # type: ignore[union-attr]

    def middle(self, x: Tensor) -> Tensor:
        return x + self.branch(by_width(x))


class ZeroGate(Net):
    """A value that is zero now and set later: a learned scalar, or a buffer that train mode increases."""

    gate: Tensor

    def __init__(self, learned: bool) -> None:
        super().__init__()
        if learned:
            self.gate = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("gate", torch.zeros(()))

    def set_weights_(self) -> None:
        self.gate.zero_()

    def middle(self, x: Tensor) -> Tensor:
        if self.training and not isinstance(self.gate, nn.Parameter):
            self.gate += 0.5
        return x + self.gate * by_width(x)


trap("zero gate: learned")(partial(ZeroGate, True))
trap("zero gate: buffer")(partial(ZeroGate, False))


@trap()
class SmallBesideAConstant(WrongByWidth):
    """A sigmoid of small numbers is one half, which hides the error before it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x) * 1e-5)


# Wrong only where features are larger than the example's.
clamped = {"": lambda net, x: x.clamp(max=float(5 * x.shape[1]))}
traps("clamped until the input is large", clamped, example=EXAMPLE, second=lambda: 40 * SECOND())


@trap()
class IntegerOutput(Net):
    """Labels in place of scores: a comparison of floating-point values shows nothing."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(by_width(x) - 0.3) if self.training else by_width(x)

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores if self.training else scores.argmax(1)


@trap()
class NoOutputInEvalMode(WrongByWidth):
    """Detectors return losses in train mode and boxes, here none, in eval mode."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return {"loss": result.pow(2).mean()} if self.training else []


@ordinary(2, example=zeros)
def zero_example_of_an_ordinary_network() -> nn.Module:
    return Net()


@ordinary(2, example=images(1, batch=1))
class ZeroInitialisedResidual(Net):
    """As ResNets start: the last scale of each branch is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer, self.last = conv(8, 5), nn.BatchNorm2d(5), conv(5, 8), nn.BatchNorm2d(8)

    def set_weights_(self) -> None:
        self.last.weight.zero_()
        self.last.bias.zero_()

    def middle(self, x: Tensor) -> Tensor:
        return x + self.last(self.outer(F.relu(self.norm(self.inner(x)))))
