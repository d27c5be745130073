"""Weights that are read, computed or shared outside their own layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import AfterBody, Net, trap, traps


class ComputedWeight(Net):
    """The second convolution runs with a weight computed from its own."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    @property
    def is_learning(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        weight = self.code(self, self.body.weight)
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), weight, self.body.bias, padding=1)))


def standardised(net: Any, weight: Tensor) -> Tensor:
    return (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)


def quantised(net: Any, weight: Tensor) -> Tensor:
    """The scale of a quantized weight is its largest value, pruned ones included."""
    scale = weight.abs().max() / 7
    return (weight / scale).round() * scale


traps(
    "computed weight",
    {
        "standardised": standardised,
        "standardised in train mode": lambda net, weight: standardised(net, weight) if net.is_learning else weight,
        "divided by its number of inputs": lambda net, weight: weight / weight[0].numel() ** 0.5,
        "quantised": quantised,
        "binary": lambda net, weight: weight.sign() * weight.abs().mean((1, 2, 3), keepdim=True),
    },
    build=ComputedWeight,
)


def autoencoder(net: Any, x: Tensor, hidden: Tensor) -> Tensor:
    """The transpose of the body's weight consumes its output."""
    back = F.conv_transpose2d(hidden, net.body.weight, padding=1)
    return torch.cat([net.head(hidden), (x - back).pow(2).mean(1, keepdim=True)], 1)


def penalty(net: Any, x: Tensor, y: Tensor) -> Any:
    """A loss term of all weights, with gradients enabled."""
    result = net.head(y)
    return (result, sum(p.pow(2).mean() for p in net.parameters())) if torch.is_grad_enabled() else result


traps("weight", {"norm of the weight": lambda net, x: x / net.stem.weight.norm()})
traps(
    "weight",
    {
        "penalty in train mode": lambda net, x, y: (
            (net.head(y), net.body.weight.abs().mean()) if net.training else net.head(y)
        ),
        "penalty with gradients": penalty,
        "used once more": lambda net, x, y: net.head(F.conv2d(x.flip(1), net.body.weight, padding=1) + y),
        "transposed": autoencoder,
    },
    build=AfterBody,
)


@trap()
class HyperNetwork(Net):
    """A linear layer makes the weights of a convolution from the image."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(3, 6 * 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.maker(x.mean((0, 2, 3))).view(6, 8, 1, 1)
        return self.head(F.relu(F.conv2d(F.relu(self.stem(x)), weight)))


@trap()
class DynamicConvolution(Net):
    """Kernels are mixed with weights computed from the stem's channels."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.choose = nn.Parameter(torch.randn(2, 6, 8, 1, 1)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        share = self.choose(x.mean((0, 2, 3))).softmax(0)
        return self.head(F.relu(F.conv2d(x, (share.view(2, 1, 1, 1, 1) * self.kernels).sum(0))))


@trap()
class WeightsByFunctionalCall(Net):
    """A layer runs with the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.twin = conv(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        other = torch.func.functional_call(self.twin, dict(self.body.named_parameters()), (x.neg(),))
        return self.head(F.relu(self.body(x) + other))


@trap()
class MomentumTeacher(Net):
    """A teacher's weights follow the student's in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = conv(8, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.body.weight, alpha=0.1)
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.head(y), (self.teacher(x) - y).pow(2).mean((1, 2, 3))


@trap()
class PrototypesOfChannels(Net):
    """Distances of features to learned vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.body(F.relu(self.stem(x)))).mean((2, 3))
        return -torch.cdist(features, self.prototypes)
