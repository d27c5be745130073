"""Pooling, upsampling and padding."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from graph.blocks.base import LEAVES, Block, Shape, block, one_of


@block(kind=one_of("max", "avg", "adaptive", "stride"))
class Pool(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        size = 2 if min(self.spatial) >= 4 else 1
        self.kind, self.size = kind, size
        self.layer = {
            "max": self.of_dims("MaxPool")(size),
            "avg": self.of_dims("AvgPool")(size),
            "adaptive": self.of_dims("AdaptiveAvgPool")(max(min(self.spatial) // size, 1)),
        }.get(kind)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            index: tuple[Any, ...] = (..., *[slice(None, None, self.size)] * self.dims)
            return x[index]
        return self.layer(x)


@block(mode=one_of("nearest", "linear", "repeat"))
class Upsample(Block):
    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__(shape)
        self.mode = mode if max(self.spatial) <= 8 else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "none":
            return x
        if self.mode == "repeat":
            return x.repeat_interleave(2, -1).repeat_interleave(2, -2 if self.dims > 1 else -1)
        mode = self.mode if self.mode == "nearest" else ["linear", "bilinear", "trilinear"][self.dims - 1]
        return F.interpolate(x, scale_factor=2, mode=mode)


@block(LEAVES, mode=one_of("constant", "reflect", "replicate", "circular"), kernel=one_of(2, 3))
class Padded(Block):
    def __init__(self, shape: Shape, mode: str, kernel: int) -> None:
        super().__init__(shape)
        mode = mode if min(self.spatial) > kernel // 2 else "constant"
        self.before = [kernel // 2, (kernel - 1) // 2] * self.dims
        self.mode = mode
        self.layer = self.of_dims("Conv")(self.channels, 4, kernel)
        self.expects["layer.weight"] = 4
        if mode == "circular":
            del self.expects["in"]  # torch writes it piece by piece into a new tensor: may freeze

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, self.before, mode=self.mode))
