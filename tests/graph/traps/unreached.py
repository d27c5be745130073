"""Layers and buffers that run for a batch of more than two alone, fed by channels in many ways.

The example input is a batch of one, so nothing of them is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import Net, Trap, images

UNREACHED: dict[str, Trap] = {}


def unreached(build: Callable[[], nn.Module]) -> Any:
    UNREACHED[build.__name__] = Trap(build, images(1, batch=1), images(2, batch=3), idle=("late",))
    return build


class Late(Net):
    """`late` consumes the result of `fed` on the channels of stem and body, and is added to the result."""

    make: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.late = type(self).make()

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        raise NotImplementedError

    def read(self, x: Tensor) -> Tensor:
        return self.late(x)

    def forward(self, x: Tensor) -> Tensor:
        stem = F.relu(self.stem(x))
        body = F.relu(self.body(stem))
        result = self.head(body)
        if len(x) <= 2:
            return result
        late = self.read(self.fed(stem, body))
        return result + late.reshape(len(x), -1).mean(1).view(-1, 1, 1, 1)


@unreached
class OfTheSameWidth(Late):
    make = staticmethod(lambda: conv(8, 4, 1))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem


@unreached
class OfTwoConcatenated(Late):
    make = staticmethod(lambda: conv(14, 4, 1))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return torch.cat([stem, body], 1)


@unreached
class OfAPart(Late):
    make = staticmethod(lambda: conv(4, 4, 1))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem.chunk(2, 1)[0]


@unreached
class OfShuffledPixels(Late):
    make = staticmethod(lambda: conv(2, 4, 1))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return F.pixel_shuffle(stem, 2)


@unreached
class OfFlattenedFeatures(Late):
    make = staticmethod(lambda: nn.Linear(8 * 16, 4))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(stem, 4).flatten(1)


@unreached
class Depthwise(Late):
    make = staticmethod(lambda: conv(8, 8, groups=8))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem


@unreached
class BatchNorm(Late):
    make = staticmethod(lambda: nn.BatchNorm2d(8))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem


@unreached
class BatchNormWithoutParameters(Late):
    make = staticmethod(lambda: nn.BatchNorm2d(8, affine=False))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem


@unreached
class LayerNorm(Late):
    make = staticmethod(lambda: nn.LayerNorm(8))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem.movedim(1, -1)


@unreached
class Recurrent(Late):
    make = staticmethod(lambda: nn.GRU(8, 4, batch_first=True))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem.flatten(2).mT

    def read(self, x: Tensor) -> Tensor:
        return self.late(x)[0]


@unreached
class InASubmodule(Late):
    make = staticmethod(lambda: nn.Sequential(nn.Sequential(conv(8, 4, 1)), nn.ReLU()))

    def fed(self, stem: Tensor, body: Tensor) -> Tensor:
        return stem


@unreached
class ScaleInABuffer(Net):
    late: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", torch.ones(8, 1, 1))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.late if len(x) > 2 else x


@unreached
class BesideAReachedLayerOfTheSameSize(nn.Module):
    """The module that holds the late layer also holds a layer of the same width, which ran."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.mix = conv(3, 8), conv(8, 4, 1), conv(8, 4, 1)
        self.side = nn.ModuleDict({"used": conv(3, 8), "late": conv(8, 4, 1)})

    def forward(self, x: Tensor) -> Tensor:
        stem, used = F.relu(self.stem(x)), F.relu(self.side["used"](x))
        result = self.head(stem) + self.mix(used)
        return result + self.side["late"](stem) if len(x) > 2 else result
