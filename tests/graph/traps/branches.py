"""Python branches on a width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graph.layers import conv
from graph.traps.base import Net, ordinary, trap


@trap()
class SkipWhereShapesAgree(Net):
    """8 and 6 channels: the skip runs once both are pruned to the same width."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.head(y + x if x.shape == y.shape else y)


@trap()
class SkipWhereWidthsAgree(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.head(y * (x if x.shape[1] == y.shape[1] else 1))


@trap()
class SkipWhereBroadcastingWorks(Net):
    """A single remaining channel is added to all."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        try:
            return self.head(x + y)
        except RuntimeError:
            return self.head(y)


@trap()
class OtherActivationBelowAWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] > 4 else torch.sigmoid(x)


@trap()
class OtherActivationAtOneChannel(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] > 1 else x.neg()


@trap()
class ActivationAtTheFullWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] == 8 else x


@trap()
class LayerByParity(Net):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = conv(6, 4, 1), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.body(x))
        return self.even(y) if x.shape[1] % 2 == 0 else self.odd(y)


@trap()
class ActivationByParity(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.shape[1] % 2 == 0 else x.neg()


@trap()
class LoopOverTheWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[1] // 4):
            x = torch.tanh(x)
        return x


@trap()
class BranchOnTheModulesWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.stem.out_channels > 5 else x


@trap()
class BranchOnTheNumberOfElements(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.numel() > 600 else x


@trap()
class BranchOnATensorOfTheWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if torch.tensor(x.shape[1]) > 4 else x


@trap()
class BranchOnWidthInTrainMode(Net):
    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.is_learning and x.shape[1] > 4 else x


@trap()
class BranchOnTheRatioOfWidths(Net):
    def end(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.stem.weight.shape[0] > x.shape[1] else x


@trap()
class AveragePoolingByWidth(Net):
    """The kernel of a pooling is the number of channels, at most two."""

    def middle(self, x: Tensor) -> Tensor:
        kernel = min(x.shape[1], 2)
        return F.interpolate(F.avg_pool2d(x, kernel), x.shape[2:])


@trap()
class ActivationByOtherGroupsWidth(Net):
    """The width of the stem decides what happens to the channels of the body."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        wide = x.shape[1] > 4
        y = self.body(x)
        return self.head(torch.tanh(y) if wide else F.relu(y))


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
