"""Layers and buffers that run for a batch of more than two alone, fed by channels in many ways.

The example input is a batch of one, so nothing of them is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import Between, Net, Trap, images

UNREACHED: dict[str, Trap] = {}


def unreached(name: str, build: Callable[[], nn.Module]) -> None:
    UNREACHED[name] = Trap(build, images(1, batch=1), images(2, batch=3), idle=("late",))


class Late(Net):
    """`late` consumes the result of `fed` on the channels of stem and body, and is added to the result."""

    def __init__(self, make: Callable[[], nn.Module], fed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.late, self.fed = make(), fed

    def forward(self, x: Tensor) -> Tensor:
        stem = F.relu(self.stem(x))
        body = F.relu(self.body(stem))
        result = self.head(body)
        if len(x) <= 2:
            return result
        late = self.late(self.fed(stem, body))
        late = late[0] if isinstance(late, tuple) else late
        return result + late.reshape(len(x), -1).mean(1).view(-1, 1, 1, 1)


def whole_stem(stem: Tensor, body: Tensor) -> Tensor:
    return stem


LATE: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "the same width": (lambda: conv(8, 4, 1), whole_stem),
    "two concatenated": (lambda: conv(14, 4, 1), lambda stem, body: torch.cat([stem, body], 1)),
    "a part": (lambda: conv(4, 4, 1), lambda stem, body: stem.chunk(2, 1)[0]),
    "shuffled pixels": (lambda: conv(2, 4, 1), lambda stem, body: F.pixel_shuffle(stem, 2)),
    "flattened": (lambda: nn.Linear(8 * 16, 4), lambda stem, body: F.adaptive_avg_pool2d(stem, 4).flatten(1)),
    "depthwise": (lambda: conv(8, 8, groups=8), whole_stem),
    "batch norm": (lambda: nn.BatchNorm2d(8), whole_stem),
    "batch norm without parameters": (lambda: nn.BatchNorm2d(8, affine=False), whole_stem),
    "layer norm": (lambda: nn.LayerNorm(8), lambda stem, body: stem.movedim(1, -1)),
    "recurrent": (lambda: nn.GRU(8, 4, batch_first=True), lambda stem, body: stem.flatten(2).mT),
    "submodule": (lambda: nn.Sequential(nn.Sequential(conv(8, 4, 1)), nn.ReLU()), whole_stem),
}
for _name, (_make, _fed) in LATE.items():
    unreached(_name, partial(Late, _make, _fed))


class ScaleInABuffer(Between):
    late: Tensor

    def __init__(self) -> None:
        super().__init__(lambda net, x: x * net.late if len(x) > 2 else x)
        self.register_buffer("late", torch.ones(8, 1, 1))


class BesideAReachedLayerOfTheSameSize(nn.Module):
    """The module that holds the late layer also holds a layer of the same width, which ran."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.mix = conv(3, 8), conv(8, 4, 1), conv(8, 4, 1)
        self.side = nn.ModuleDict({"used": conv(3, 8), "late": conv(8, 4, 1)})

    def forward(self, x: Tensor) -> Any:
        stem, used = F.relu(self.stem(x)), F.relu(self.side["used"](x))
        result = self.head(stem) + self.mix(used)
        return result + self.side["late"](stem) if len(x) > 2 else result


unreached("scale in a buffer", ScaleInABuffer)
unreached("beside a reached layer of the same size", BesideAReachedLayerOfTheSameSize)
