"""Code that treats channels by their number.

What such code computes depends on how many channels there are, or on which one comes first. Whether it can be cut
is for the tracer to decide; if it says so, the cut must be exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.blocks.base import FLAG, HARD, Block, Shape, block, one_of


@block(HARD, way=one_of("zero", "scale", "relu", "one of them", "half"))
class PartInPlace(Block):
    """Some channels are changed in place through a view."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.way == "zero":
            x[:, : self.part] = 0
        elif self.way == "scale":
            x[:, : self.part] *= 0.5
        elif self.way == "relu":
            F.relu(x[:, : self.part], inplace=True)
        elif self.way == "half":
            x[:, : x.shape[1] // 2].mul_(0.5)
        else:
            x[:, self.part - 1] += 1
        return x


@block(HARD, way=one_of("first", "last", "third", "each"))
class PartActivated(Block):
    """An activation on some channels, the others beside them."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "each":
            return torch.cat([x[:, i : i + 1] * (i + 1) for i in range(x.shape[1])], 1)
        if self.way == "last":
            return torch.cat([x[:, :-1], F.relu(x[:, -1:])], 1)
        part = self.part if self.way == "first" else x.shape[1] // 3
        return torch.cat([F.relu(x[:, :part]), x[:, part:]], 1)


@block(HARD)
class Interleaved(Block):
    """One layer for the even channels, one for the odd ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.even = self.conv((self.channels + 1) // 2, 3)
        self.odd = self.conv(self.channels // 2, 3)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.even(x[:, ::2]) - self.odd(x[:, 1::2])


@block(HARD, by=one_of("roll", "cat"), steps=one_of(1, 2))
class Rotated(Block):
    def __init__(self, shape: Shape, by: str, steps: int) -> None:
        super().__init__(shape)
        self.by, self.steps = by, steps
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "roll":
            return x.roll(self.steps, 1)
        return torch.cat([x[:, self.steps :], x[:, : self.steps]], 1)


@block(HARD, way=one_of("item", "branch", "gather", "sort", "sample", "embedding"))
class ByOneChannel(Block):
    """The values of one channel decide what happens to all."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = "gather" if way == "sample" and self.dims != 2 else way
        self.table = nn.Embedding(2, self.channels)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0]
        if self.way == "item":
            return x * first.mean().item()
        if self.way == "branch":
            return x if first.mean() > 0 else -x
        if self.way == "embedding":
            return x + self.table((first > 0).long()).movedim(-1, 1)
        if self.way == "sample":
            grid = torch.tanh(first)[..., None].expand(*first.shape, 2)
            return F.grid_sample(x, grid, align_corners=False)
        flat = x.flatten(2)
        if self.way == "sort":
            return flat[:, :, first[0].flatten().argsort()].view(x.shape)
        order = first.flatten(1).argsort(1)[:, None].expand(flat.shape)
        return flat.gather(2, order).view(x.shape)


@block(HARD, way=one_of("power", "tensor", "count", "branch", "sum of ones"))
class ByWidth(Block):
    """Arithmetic with the channel count."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "power":
            return x * x.shape[1] ** -0.5
        if self.way == "tensor":
            return x * torch.tensor(1 / x.shape[1])
        if self.way == "count":
            return x / x[0].numel()
        if self.way == "sum of ones":
            return x / torch.ones_like(x).sum(1, keepdim=True)
        return F.relu(x) if x.shape[1] == self.channels else x


@block(HARD, way=one_of("cumsum", "cat", "pad", "set", "arange"))
class BuiltMask(Block):
    """A constant made for the number of channels, of which not all entries are equal."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(x.shape[1])
        if self.way == "cumsum":
            mask = ones.cumsum(0)
        elif self.way == "cat":
            mask = torch.cat([0.5 * ones[:1], ones[1:]])
        elif self.way == "pad":
            mask = F.pad(ones[1:], (1, 0), value=0.5)
        elif self.way == "arange":
            mask = torch.arange(1, 1 + x.shape[1], dtype=x.dtype)
        else:
            mask = ones
            mask[:1] = 0.5
        return x * self.over_space(mask)


@block(HARD, way=one_of("norm", "mean of a filter"))
class WeightStatistics(Block):
    """A layer's output is scaled by a statistic of its weight."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.layer = self.conv(self.channels, 4)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.layer.weight
        if self.way == "norm":
            return self.layer(x) / weight.norm()
        return self.layer(x) * self.over_space(weight.flatten(1).mean(1))


@block(HARD, residual=FLAG)
class TransposedKernel(Block):
    def __init__(self, shape: Shape, residual: bool) -> None:
        super().__init__(shape)
        self.residual = residual
        self.kernel = nn.Parameter(torch.empty(self.channels, self.channels, *[1] * self.dims))
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(F, f"conv{self.dims}d")(x, self.kernel.transpose(0, 1))
        return x + y if self.residual else y


@block(HARD, way=one_of("narrow", "add", "assign"))
class BufferLike(Block):
    """A few channels are written into zeros that are as wide as others, and added to those."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.layer = self.conv(self.channels, self.part)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        zeros, y = torch.zeros_like(x), self.layer(x)
        if self.way == "narrow":
            zeros.narrow(1, 0, self.part).copy_(y)
        elif self.way == "add":
            view = zeros[:, : self.part]
            view += y
        else:
            zeros[:, : self.part] = y
        return x + zeros


@block(HARD)
class Squeezed(Block):
    """`squeeze` without an axis drops the channel axis too if there is one channel."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.pool = self.of_dims("AdaptiveAvgPool")(1)
        self.layer = nn.Linear(self.channels, 4)
        self.up = self.conv(self.channels, 4)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x).squeeze() if x.shape[1] > 1 or self.channels > 1 else self.pool(x).flatten(1)
        return self.up(x) * self.over_space(self.layer(pooled))
