"""Weights that are read, computed or shared outside their own layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import Net, trap


@trap()
class DividedByTheNormOfTheWeight(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x / self.stem.weight.norm()


@trap()
class WeightPenaltyInTrainMode(Net):
    """A loss term of the weights, if a property is true."""

    @property
    def is_learning(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return (result, self.body.weight.abs().mean()) if self.is_learning else result


@trap()
class WeightPenaltyInAHelper(Net):
    """A loss term of all weights, with gradients enabled."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return (result, sum(p.pow(2).mean() for p in self.parameters())) if torch.is_grad_enabled() else result


@trap()
class WeightOfAnotherLayer(Net):
    """The weights of the body convolve once more."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(F.conv2d(x, self.body.weight, padding=1) + self.body(x.flip(1)))
        return self.head(y)


@trap()
class TransposedWeightOfAnotherLayer(Net):
    """An autoencoder with one weight: the transpose of the body's weight consumes its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        hidden = F.relu(self.body(x))
        back = F.conv_transpose2d(hidden, self.body.weight, padding=1)
        return torch.cat([self.head(hidden), (x - back).pow(2).mean(1, keepdim=True)], 1)


@trap()
class StandardisedWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight = self.body.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.head(F.relu(F.conv2d(x, weight, self.body.bias, padding=1)))


@trap()
class StandardisedInTrainMode(Net):
    def weight(self, weight: Tensor) -> Tensor:
        return weight - weight.mean((1, 2, 3), keepdim=True)

    @property
    def is_learning(self) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight = self.weight(self.body.weight) if self.is_learning else self.body.weight
        return self.head(F.relu(F.conv2d(x, weight, self.body.bias, padding=1)))


@trap()
class FanInScaling(Net):
    """Equalized learning rates divide a weight by its number of inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight = self.body.weight / self.body.weight[0].numel() ** 0.5
        return self.head(F.relu(F.conv2d(x, weight, self.body.bias, padding=1)))


@trap()
class QuantisedWeight(Net):
    """The scale of a quantized weight is its largest value, pruned ones included."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight = self.body.weight
        scale = weight.abs().max() / 7
        weight = (weight / scale).round() * scale
        return self.head(F.relu(F.conv2d(x, weight, self.body.bias, padding=1)))


@trap()
class BinaryWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weight = self.body.weight.sign() * self.body.weight.abs().mean((1, 2, 3), keepdim=True)
        return self.head(F.relu(F.conv2d(x, weight, self.body.bias, padding=1)))


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
    """A teacher's weights follow the student's by name, in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = conv(8, 6).requires_grad_(False)

    @functools.cached_property
    def pairs(self) -> list[tuple[str, str]]:
        return [("teacher.weight", "body.weight")]

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(self.body.weight, alpha=0.1)
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.head(y), (self.teacher(x) - y).pow(2).mean((1, 2, 3))  # type: ignore[return-value]


@trap()
class PrototypesOfChannels(Net):
    """Distances of features to learned vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.body(F.relu(self.stem(x)))).mean((2, 3))
        return -torch.cdist(features, self.prototypes)
