"""Concatenation, parts and shuffles of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import BODY, FLAG, LEAVES, WIDTHS, Block, Shape, Step, block, divisor, one_of, shape_after
from graph.blocks.sums import Body


@block(body=BODY)
class DenseCat(Block):
    """DenseNet: the input concatenated with the output of a layer."""

    def __init__(self, shape: Shape, body: Sequence[Step]) -> None:
        super().__init__(shape)
        self.body = Body(shape, body)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


@block(bodies=st.lists(BODY, min_size=1, max_size=3), pool=FLAG)
class Inception(Block):
    def __init__(self, shape: Shape, bodies: Sequence[Sequence[Step]], pool: bool) -> None:
        super().__init__(shape)
        self.bodies = nn.ModuleList(Body(shape, body) for body in bodies)
        self.pooled = self.of_dims("MaxPool")(3, stride=1, padding=1) if pool else None
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        branches = [body(x) for body in self.bodies]
        if self.pooled is not None:
            branches.insert(0, self.pooled(x))
        return torch.cat(branches, 1)


@block(body=BODY, up=one_of("nearest", "transposed"), merge=one_of("cat", "add"))
class UNet(Block):
    """Down, body, up, and concatenated with the input."""

    def __init__(self, shape: Shape, body: Sequence[Step], up: str, merge: str) -> None:
        super().__init__(shape)
        c = self.channels
        self.down = self.of_dims("Conv")(c, 4, 3, stride=2, padding=1)
        self.body = Body(shape_after(self.down, shape), body)
        inside = self.body.out
        self.up = self.of_dims("ConvTranspose")(inside, inside, 2, stride=2) if up == "transposed" else None
        self.match = self.conv(inside, c) if merge == "add" else None
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.down(x))
        if self.up is not None:
            y = self.up(y)
        y = F.interpolate(y, size=x.shape[2:], mode="nearest")
        return x + self.match(y) if self.match is not None else torch.cat([y, x], 1)


@block(out=WIDTHS, norm=FLAG)
class ErfDown(Block):
    """ERFNet's downsampler: a convolution concatenated with the pooled input."""

    def __init__(self, shape: Shape, out: int, norm: bool) -> None:
        super().__init__(shape)
        stride = 2 if min(self.spatial) >= 4 else 1
        self.layer = self.of_dims("Conv")(self.channels, out, 3, stride=stride, padding=1)
        self.pool = self.of_dims("MaxPool")(stride, stride=stride, ceil_mode=True)
        self.norm = self.of_dims("BatchNorm")(out + self.channels) if norm else nn.Identity()
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(torch.cat([self.layer(x), self.pool(x)], 1)))


@block(LEAVES, way=one_of("chunk", "split", "shape", "literal", "sizes"), out=WIDTHS)
class Halves(Block):
    """CSP: a layer on one half of the channels, concatenated with the other half."""

    def __init__(self, shape: Shape, way: str, out: int) -> None:
        super().__init__(shape)
        self.way, self.first_width = way, max(self.channels // 2, 1)
        first = (self.channels + 1) // 2 if way == "chunk" else self.first_width
        self.layer = self.conv(first, out)
        self.expects = {"in": self.first_width, "layer.weight": out}
        if way in ("literal", "sizes", "split") or self.channels % 2:
            self.expects = {}  # hard-coded sizes or unequal parts: may freeze

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "chunk":
            first, second = x.chunk(2, 1)
        elif self.way == "split":
            first, *rest = x.split(self.first_width, 1)
            second = torch.cat(rest, 1)
        elif self.way == "sizes":
            first, second = x.split([self.first_width, self.channels - self.first_width], 1)
        elif self.way == "shape":
            first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        else:
            first, second = x[:, : self.first_width], x[:, self.first_width :]
        return torch.cat([second, F.relu(self.layer(first))], 1)


@block(LEAVES, by_hand=FLAG)
class GatedHalves(Block):
    """A gated linear unit: one half of the channels gates the other."""

    def __init__(self, shape: Shape, by_hand: bool) -> None:
        super().__init__(shape)
        self.by_hand = by_hand
        self.layer = self.conv(self.channels, 6)
        if by_hand:
            self.expects["layer.weight"] = 3

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.glu(self.layer(x), 1)
        value, gate = self.layer(x).chunk(2, dim=1)
        return value * torch.sigmoid(gate)


@block(LEAVES, parts=one_of(2, 3), written=FLAG)
class Hierarchy(Block):
    """Res2Net: equal parts of the channels, each with a layer that also sees the part before."""

    def __init__(self, shape: Shape, parts: int, written: bool) -> None:
        super().__init__(shape)
        self.part = self.channels // divisor(self.channels, parts)
        self.written = written
        layers = [self.conv(self.part, self.part) for _ in range(self.channels // self.part - 1)]
        self.layers = nn.ModuleList(layers)
        self.expects = {} if written else {"in": self.part}

    def forward(self, x: Tensor) -> Tensor:
        size = self.part if self.written else x.shape[1] // (len(self.layers) + 1)
        first, *rest = x.split(size, 1)
        made = [first]
        for layer, part in zip(self.layers, rest, strict=False):
            made.append(F.relu(layer(part + made[-1])))
        return torch.cat(made, 1)


@block(LEAVES, way=one_of("module", "view", "literal view"), groups=one_of(2, 3))
class Shuffle(Block):
    def __init__(self, shape: Shape, way: str, groups: int) -> None:
        super().__init__(shape)
        self.groups = divisor(self.channels, groups)
        self.way = way
        self.module = nn.ChannelShuffle(self.groups)
        self.expects["in"] = "" if way == "literal view" else self.channels // self.groups

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "module":
            return self.module(x)
        n, c = x.shape[:2]
        c = self.channels if self.way == "literal view" else c
        x = x.view(n, self.groups, c // self.groups, *x.shape[2:])
        return x.transpose(1, 2).reshape(n, c, *x.shape[3:])


@block(way=one_of("module", "functional", "view", "view with -1"), out=one_of(2, 3))
class PixelShuffle(Block):
    def __init__(self, shape: Shape, way: str, out: int) -> None:
        super().__init__(shape)
        self.way = way if self.dims == 2 else "view"
        self.layer = self.conv(self.channels, out * 2**self.dims)
        self.module = nn.PixelShuffle(2)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.way == "module":
            return self.module(x)
        if self.way == "functional":
            return F.pixel_shuffle(x, 2)
        n, c, *spatial = x.shape
        count = -1 if "-1" in self.way else c // 2**self.dims
        x = x.view(n, count, *[2] * self.dims, *spatial)
        # (n, c, 2, 2, h, w) -> (n, c, h, 2, w, 2)
        order = [0, 1] + [axis for d in range(self.dims) for axis in (2 + self.dims + d, 2 + d)]
        return x.permute(order).reshape(n, -1, *[2 * size for size in spatial])


@block(way=one_of("module", "view", "slices"))
class PixelUnshuffle(Block):
    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way if self.dims == 2 else "view"
        self.module = nn.PixelUnshuffle(2)
        self.fits = min(self.spatial) >= 4 and self.channels <= 16

    def forward(self, x: Tensor) -> Tensor:
        if not self.fits:
            return x
        even: tuple[Any, ...] = (..., *[slice(0, size - size % 2) for size in x.shape[2:]])
        x = x[even]
        n, c, *spatial = x.shape
        if self.way == "module":
            return self.module(x)
        if self.way == "slices":  # Swin's patch merging, YOLO's focus layer
            corners = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
            return torch.cat(corners, 1)
        x = x.reshape(n, c, *[part for size in spatial for part in (size // 2, 2)])
        order = [0, 1, *range(3, x.dim(), 2), *range(2, x.dim(), 2)]
        return x.permute(order).reshape(n, c * 2**self.dims, *[size // 2 for size in spatial])


@block(LEAVES, way=one_of("flip", "repeat", "repeat_interleave", "cat with itself"))
class Rearranged(Block):
    """Channels in another order or several times, at any width."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "flip":
            return x.flip(1)
        if self.way == "repeat":
            return x.repeat(1, 2, *[1] * self.dims)
        if self.way == "repeat_interleave":
            return x.repeat_interleave(2, 1)
        return torch.cat([x, F.relu(x)], 1)


@block(LEAVES)
class Maxout(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 6)
        self.expects["layer.weight"] = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x.view(x.shape[0], -1, 2, *x.shape[2:]).amax(2)
