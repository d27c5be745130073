"""Convolutions and linear layers, plain, grouped, tied and functional."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, WIDTHS, Block, Shape, block, divisor, one_of


@block(LEAVES, out=WIDTHS, kernel=one_of(1, 3), dilation=one_of(1, 2), bias=FLAG)
class Conv(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, dilation: int, bias: bool) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, out, kernel, dilation, bias=bias)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS, kernel=one_of(1, 3), act=one_of("relu", "silu"))
class ConvNormAct(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, act: str) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, out, kernel, bias=False)
        self.norm = self.of_dims("BatchNorm")(out)
        self.act = getattr(F, act)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.layer(x)), inplace=True)


@block(out=WIDTHS, kernel=one_of(2, 3), stride=one_of(1, 2), padding=one_of(0, 1), dilation=one_of(1, 2))
class ValidConv(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
        super().__init__(shape)
        if min(self.spatial) < 6:
            kernel, stride, padding, dilation = 1, 1, 0, 1
        self.layer = self.of_dims("Conv")(
            self.channels, out, kernel, stride=stride, padding=padding, dilation=min(dilation, kernel - 1) or 1
        )
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS, bias=FLAG)
class FunctionalConv(Block):
    def __init__(self, shape: Shape, out: int, bias: bool) -> None:
        super().__init__(shape)
        self.kernel = nn.Parameter(torch.empty(out, self.channels, *[1] * self.dims))
        self.shift = nn.Parameter(torch.empty(out)) if bias else None
        self.expects["kernel"] = out

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, f"conv{self.dims}d")(x, self.kernel, self.shift)


@block(LEAVES, source=one_of("parameter", "buffer"))
class FunctionalDepthwise(Block):
    """As many groups as there are channels, whatever their number; a buffer as in anti-aliased pooling."""

    def __init__(self, shape: Shape, source: str) -> None:
        super().__init__(shape)
        kernel = torch.empty(self.channels, 1, *[3] * self.dims)
        if source == "buffer":
            self.register_buffer("kernel", kernel)
        else:
            self.kernel = nn.Parameter(kernel)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, f"conv{self.dims}d")(x, self.kernel, padding=1, groups=x.shape[1])


@block(LEAVES, multiplier=one_of(1, 2), kernel=one_of(1, 3), bias=FLAG)
class Depthwise(Block):
    def __init__(self, shape: Shape, multiplier: int, kernel: int, bias: bool) -> None:
        super().__init__(shape)
        c = self.channels
        self.layer = self.conv(c, c * multiplier, kernel, groups=c, bias=bias)
        self.expects["layer.weight"] = c

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, groups=one_of(2, 3, 4), out=one_of(1, 2, 3), kernel=one_of(1, 3), bias=FLAG)
class Grouped(Block):
    def __init__(self, shape: Shape, groups: int, out: int, kernel: int, bias: bool) -> None:
        super().__init__(shape)
        groups = divisor(self.channels, groups)
        self.layer = self.conv(self.channels, out * groups, kernel, groups=groups, bias=bias)
        self.expects.update({"in": groups, "layer.weight": groups})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(out=one_of(1, 2, 3), groups=one_of(1, 2, 3), kernel=one_of(2, 3), stride=one_of(1, 2), bias=FLAG)
class Transposed(Block):
    def __init__(self, shape: Shape, out: int, groups: int, kernel: int, stride: int, bias: bool) -> None:
        super().__init__(shape)
        if groups > 1:
            groups = divisor(self.channels, groups)
        if max(self.spatial) > 8:
            stride = 1
        out = max(out * groups, 2)
        self.layer = self.of_dims("ConvTranspose")(
            self.channels, out, kernel, stride=stride, padding=(kernel - 1) // 2, groups=groups, bias=bias
        )
        self.expects.update({"in": groups} if groups > 1 else {"layer.weight:1": out})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS)
class ChannelLinear(Block):
    """A linear layer on the last axis, as ConvNeXt has it."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, out)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


@block(LEAVES, by=one_of("matmul", "transposed weight"))
class BareLinear(Block):
    """A product with a parameter that belongs to no layer."""

    def __init__(self, shape: Shape, by: str) -> None:
        super().__init__(shape)
        self.by = by
        self.matrix = nn.Parameter(torch.empty(self.channels, 4))
        self.expects["matrix:1"] = 4

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        if self.by == "matmul":
            return (rows @ self.matrix).movedim(-1, 1)
        return F.linear(rows, self.matrix.t()).movedim(-1, 1)


@block(LEAVES, way=one_of("linear", "convolution"), hidden=st.integers(2, 5))
class TiedAutoencoder(Block):
    """One weight that consumes channels and produces them again."""

    def __init__(self, shape: Shape, way: str, hidden: int) -> None:
        super().__init__(shape)
        self.way = way
        ones = [1] * self.dims if way == "convolution" else []
        self.kernel = nn.Parameter(torch.empty(hidden, self.channels, *ones))
        self.expects["kernel"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "linear":
            hidden = F.relu(F.linear(x.movedim(1, -1), self.kernel))
            return F.linear(hidden, self.kernel.t()).movedim(-1, 1)
        hidden = F.relu(getattr(F, f"conv{self.dims}d")(x, self.kernel))
        return getattr(F, f"conv_transpose{self.dims}d")(hidden, self.kernel)


@block(out=st.integers(2, 4), written=FLAG)
class Decoder(Block):
    """A linear layer whose features are folded into channels and positions."""

    def __init__(self, shape: Shape, out: int, written: bool) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, out * 2**self.dims)
        self.count = out if written else -1
        self.expects = {"layer.weight": ""} if written else {**self.expects, "layer.weight": out}

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x.flatten(2).mean(2))
        return features.view(x.shape[0], self.count, *[2] * self.dims)


@block(LEAVES)
class Windows(Block):
    """Swin's windows: a linear layer inside tiles of two by two."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, self.channels)
        self.tile = 2 if all(size % 2 == 0 for size in self.spatial) else 1
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        n, c, *spatial = x.shape
        rows = x.movedim(1, -1)
        tiled = [part for size in spatial for part in (size // self.tile, self.tile)]
        order = [0, *range(1, 2 * self.dims, 2), *range(2, 2 * self.dims + 1, 2), 2 * self.dims + 1]
        tiles = rows.reshape(n, *tiled, c).permute(order)
        made = self.layer(tiles.reshape(-1, self.tile**self.dims, c)).view(tiles.shape)
        back = [order.index(axis) for axis in range(len(order))]
        return (rows + made.permute(back).reshape(rows.shape)).movedim(-1, 1)


@block(LEAVES)
class TokenMixing(Block):
    """A linear layer along the positions: the channels pass through."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        positions = math.prod(self.spatial)
        self.layer = nn.Linear(positions, positions)
        self.expects["layer.weight"] = "another axis"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2)).view(x.shape)


@block(LEAVES, between=one_of("relu", "norm", "nothing"))
class UsedTwice(Block):
    def __init__(self, shape: Shape, between: str) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, self.channels, 3)
        self.norm = self.of_dims("BatchNorm")(self.channels) if between == "norm" else nn.Identity()
        self.between = between
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.between != "nothing":
            x = self.norm(x) if self.between == "norm" else F.relu(x)
        return self.layer(x)


@block(LEAVES, out=WIDTHS, chained=FLAG)
class TiedWeights(Block):
    """Two layers with one weight and biases of their own."""

    def __init__(self, shape: Shape, out: int, chained: bool) -> None:
        super().__init__(shape)
        out = self.channels if chained else out
        self.first = self.conv(self.channels, out)
        self.second = self.conv(self.channels, out)
        self.second.weight = self.first.weight
        self.chained = chained
        self.expects["first.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        if self.chained:
            return self.second(F.relu(self.first(x)))
        return torch.cat([self.first(x), self.second(-x)], 1)
