"""Branches that are added, and the body that a block with branches may hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.blocks.base import BODY, FLAG, LEAVES, WIDTHS, Block, Shape, Step, block, one_of, shape_after
from graph.blocks.convolutions import Conv
from graph.blocks.elementwise import ACTIVATIONS


class Body(nn.Sequential):
    """The steps inside another block."""

    def __init__(self, shape: Shape, steps: Sequence[Step], out: int | None = None) -> None:
        super().__init__()
        for number, step in enumerate(steps):
            inner = step.build(shape)
            self.add_module(str(number), inner)
            shape = shape_after(inner, shape)
        if out is not None and shape[0] != out:
            self.add_module("match", Conv(shape, out=out, kernel=1, dilation=1, bias=True))
            shape = (out, *shape[1:])
        self.out = shape[0]


@block(body=BODY, before=one_of("nothing", "relu in place", "norm", "relu"), assigned=FLAG)
class Residual(Block):
    """x + body(x), with a projection where the widths differ, also behind a shared pre-activation."""

    def __init__(self, shape: Shape, body: Sequence[Step], before: str, assigned: bool) -> None:
        super().__init__(shape)
        known = ACTIVATIONS | {"norm": self.of_dims("BatchNorm"), "nothing": lambda _: nn.Identity()}
        self.before = known[before](self.channels)
        self.body = Body(shape, body)
        out = self.body.out
        self.project = nn.Identity() if out == self.channels else self.conv(self.channels, out)
        self.assigned = assigned
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.before(x))
        if self.assigned:
            y += self.project(x)
            return y
        return self.project(x) + y


@block(out=WIDTHS, stride=one_of(1, 2), shortcut=one_of("projection", "identity", "zero padding"), written=FLAG)
class BasicBlock(Block):
    """ResNet's block; option A pads the shortcut with zero channels on both sides, or at the end."""

    def __init__(self, shape: Shape, out: int, stride: int, shortcut: str, written: bool) -> None:
        super().__init__(shape)
        c = self.channels
        stride = stride if min(self.spatial) >= 4 else 1
        if shortcut == "identity":
            out, stride = c, 1
        if shortcut == "zero padding":
            out = max(out, c)
        self.stride, self.shortcut = stride, shortcut
        self.padding = ((out - c) // 2, out - c - (out - c) // 2) if written else (0, out - c)
        self.first = self.of_dims("Conv")(c, 4, 3, stride=stride, padding=1, bias=False)
        self.first_norm = self.of_dims("BatchNorm")(4)
        self.second = self.conv(4, out, 3, bias=False)
        self.second_norm = self.of_dims("BatchNorm")(out)
        self.project = self.of_dims("Conv")(c, out, 1, stride=stride) if shortcut == "projection" else None
        self.expects.update({"first.weight": 4, "second.weight": out if self.project is not None else c})

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.project is not None:
            x = self.project(x)
        elif self.shortcut == "zero padding":
            x = x[(slice(None), slice(None), *[slice(None, None, self.stride)] * self.dims)]
            x = F.pad(x, (0, 0) * self.dims + self.padding)
        return F.relu(x + y)


@block(LEAVES)
class InPlaceSum(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, self.channels)
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x
        y *= 0.7
        return y.relu_()


@block(LEAVES, way=one_of("sum", "amax", "mean"))
class Stacked(Block):
    """Branches stacked on a new axis and summed over it."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.first = self.conv(self.channels, 5)
        self.second = self.conv(self.channels, 5, 3)
        self.way = way
        self.expects["first.weight"] = self.expects["second.weight"] = 5

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch.stack([self.first(x), self.second(x)], 1), self.way)(1)


@block(LEAVES, out=WIDTHS)
class Buffer(Block):
    """Branches written side by side into one new tensor."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.first = self.conv(self.channels, out)
        self.second = self.conv(self.channels, 3)
        self.expects.update({"first.weight": "copy", "second.weight": "copy"})

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        both = x.new_zeros(x.shape[0], first.shape[1] + second.shape[1], *x.shape[2:])
        both[:, : first.shape[1]] = first
        both[:, first.shape[1] :] = second
        return both
