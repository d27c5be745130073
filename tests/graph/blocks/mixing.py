"""Norms of channel groups, gates, patches, Fourier transforms, complex pairs, scattered sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, WIDTHS, Block, Shape, block, divisor, one_of


@block(LEAVES, groups=one_of(2, 3, 4))
class GroupNorm(Block):
    """The channels of one normalization group are one unit."""

    def __init__(self, shape: Shape, groups: int) -> None:
        super().__init__(shape)
        self.layer = nn.GroupNorm(divisor(self.channels, groups), self.channels)
        self.expects["in"] = self.layer.num_groups

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, width=WIDTHS, way=one_of("glu", "chunk"))
class Gated(Block):
    """A gated linear unit."""

    def __init__(self, shape: Shape, width: int, way: str) -> None:
        super().__init__(shape)
        self.layer, self.way = self.conv(self.channels, 2 * width), way
        self.expects["layer.weight"] = width

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.way == "glu":
            return F.glu(x, 1)
        values, gates = x.chunk(2, 1)
        return values * gates.sigmoid()


@block(LEAVES, fold=FLAG)
class Patches(Block):
    """3 x 3 patches of each channel, and their sum."""

    def __init__(self, shape: Shape, fold: bool) -> None:
        super().__init__(shape)
        self.fold = fold

    def forward(self, x: Tensor) -> Tensor:
        if self.dims != 2:
            return x
        patches = F.unfold(x, 3, padding=1)
        if self.fold:
            return F.fold(patches, x.shape[2:], 3, padding=1) / 9
        return patches.unflatten(1, (-1, 9)).amax(2).unflatten(2, x.shape[2:])


@block(LEAVES, real=FLAG)
class Fourier(Block):
    """A low-pass filter of the last axis."""

    def __init__(self, shape: Shape, real: bool) -> None:
        super().__init__(shape)
        self.real = real

    def forward(self, x: Tensor) -> Tensor:
        if self.real:
            waves = torch.fft.rfft(x)
            return torch.fft.irfft(torch.cat([waves[..., :1], 0.5 * waves[..., 1:]], -1), n=x.shape[-1])
        return torch.fft.ifft(0.5 * torch.fft.fft(x)).real


@block(LEAVES, half=one_of(2, 3, 4))
class Rotated(Block):
    """Pairs of channels as complex numbers, rotated."""

    def __init__(self, shape: Shape, half: int) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 2 * half)
        self.expects["layer.weight"] = half

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.layer(x).movedim(1, -1).unflatten(-1, (-1, 2)).contiguous()
        return torch.view_as_real(torch.view_as_complex(pairs) * (0.6 + 0.8j)).flatten(-2).movedim(-1, 1)


@block(LEAVES, way=one_of("index_add", "scatter_add"))
class Scattered(Block):
    """Sums of pixels at given positions of the last axis."""

    index: Tensor

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.register_buffer("index", torch.arange(shape[-1]) // 2)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "index_add":
            return x.index_add(x.dim() - 1, self.index, 0.5 * x)
        return torch.zeros_like(x).scatter_add(-1, self.index.expand_as(x), x)


@block(out=one_of(8, 10, 12), sides=FLAG)
class PaddedShortcut(Block):
    """Option A of ResNet, with the number of new channels computed from both branches."""

    def __init__(self, shape: Shape, out: int, sides: bool) -> None:
        super().__init__(shape)
        self.out = max(out, self.channels + 6)
        self.out += (self.out - self.channels) % 2
        self.layer, self.sides = self.conv(self.channels, self.out), sides
        more = self.out - self.channels
        self.expects["layer.weight"] = self.channels + (more // 2 if sides else more)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        more = y.shape[1] - x.shape[1]
        before = more // 2 if self.sides else 0
        return y + F.pad(x, (0, 0) * self.dims + (before, more - before))


@block(LEAVES, width=WIDTHS)
class Bilinear(Block):
    """A bilinear layer of the mean and the largest values."""

    is_plain = False

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__(shape)
        self.first = nn.Linear(self.channels, width)
        self.layer, self.gate = nn.Bilinear(width, self.channels, 5), nn.Linear(5, 4)
        self.expects.update({"in": "multiplies its width by two others", "first.weight": width, "layer.weight": 5})

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(self.layer(self.first(x.flatten(2).mean(2)), x.flatten(2).amax(2)).tanh())
        return x * self.over_space(gate.mean(1, keepdim=True))
