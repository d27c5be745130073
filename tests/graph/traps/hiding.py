"""Errors that zeros, tiny values, NaN or another, large output hide from a comparison of outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import EXAMPLE, SECOND, Net, images, ordinary, trap


def by_width(x: Tensor) -> Tensor:
    """The error in all of these networks."""
    return x / x.new_tensor([x.shape[1]])


class WithoutBiases(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8, bias=False), conv(8, 6, bias=False), conv(6, 4, 1, bias=False)

    def middle(self, x: Tensor) -> Tensor:
        return by_width(x)


@trap(example=lambda: torch.zeros(2, 3, 8, 8))
def zero_example() -> nn.Module:
    return WithoutBiases()


@trap(example=lambda: torch.full((2, 3, 8, 8), 1e-30))
def tiny_example() -> nn.Module:
    return WithoutBiases()


@trap(example=lambda: torch.full((2, 3, 8, 8), 1e25))
def huge_example() -> nn.Module:
    return WithoutBiases()


class ZeroInTrain(WithoutBiases):
    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(by_width(x)) if self.is_learning else x


@trap(example=lambda: torch.zeros(2, 3, 8, 8))
def zero_example_in_train_mode() -> nn.Module:
    return ZeroInTrain()


@trap(example=lambda: torch.zeros(2, 3, 8, 8), second=SECOND)
class ZerosHideABranch(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] > 4 else x

    def set_weights_(self) -> None:
        self.stem.bias.zero_()  # type: ignore[union-attr]


@trap()
class TinyOutputBesideALargeOne(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = conv(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        return torch.cat([1e4 * self.head(F.relu(self.body(x))), 1e-2 * self.other(by_width(x))], 1)


@trap()
class TinyOutputOfItsOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = conv(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        return {"large": 1e6 * self.head(F.relu(self.body(x))), "small": 1e-5 * self.other(by_width(x))}


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


@trap()
class NanInAllWeights(Net):
    def set_weights_(self) -> None:
        self.head.weight.fill_(float("nan"))

    def middle(self, x: Tensor) -> Tensor:
        return by_width(x)


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


@trap()
class ZeroScalarGate(Net):
    """A learned scalar that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def set_weights_(self) -> None:
        self.gate.zero_()

    def middle(self, x: Tensor) -> Tensor:
        return x + self.gate * by_width(x)


@trap()
class ZeroBuffer(Net):
    """A schedule's value that is zero now and set later."""

    amount: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amount", torch.zeros(()))

    def set_weights_(self) -> None:
        self.amount.zero_()

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.amount += 0.5
        return x + self.amount * by_width(x)


@trap()
class SmallBesideAConstant(Net):
    """A sigmoid of small numbers is one half, which hides the error before it."""

    def middle(self, x: Tensor) -> Tensor:
        return by_width(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x) * 1e-5)


@trap(example=EXAMPLE, second=lambda: 40 * SECOND())
class ClampedUntilTheInputIsLarge(Net):
    """Wrong only where features are larger than the example's."""

    def middle(self, x: Tensor) -> Tensor:
        return x.clamp(max=float(5 * x.shape[1]))


@trap()
class IntegerOutput(Net):
    """Labels in place of scores: a comparison of floating-point values shows nothing."""

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(by_width(x) - 0.3) if self.training else by_width(x)

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores if self.training else scores.argmax(1)


@trap()
class NoOutputInEvalMode(Net):
    """Detectors return losses in train mode and boxes, here none, in eval mode."""

    def middle(self, x: Tensor) -> Tensor:
        return by_width(x)

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return {"loss": result.pow(2).mean()} if self.training else []


@ordinary(2, example=lambda: torch.zeros(2, 3, 8, 8))
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
