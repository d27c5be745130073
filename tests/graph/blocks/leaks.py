"""Operators that mix channels, so that a masked channel still changes the output."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import LEAKS, Block, Shape, block, one_of

LEAKING: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "softmax": ("softmax", lambda x: x.softmax(1)),
    "log softmax": ("log_softmax", lambda x: F.log_softmax(x, 1)),
    "mean": ("mean", lambda x: x - x.mean(1, keepdim=True)),
    "largest": ("max", lambda x: x * x.max(1, keepdim=True).values),
    "cumsum": ("cumsum", lambda x: x.cumsum(1)),
    "sort": ("sort", lambda x: x.sort(1).values),
    "fft": ("fft", lambda x: torch.fft.fft(x, dim=1).real),
    "cdist": ("dist", lambda x: torch.cdist(x.flatten(2).mT, x.flatten(2).mT)),
    "gram": ("matmul", lambda x: x.flatten(2).mT @ x.flatten(2)),
    "local response": ("blocks.1", lambda x: F.local_response_norm(x, 3)),
}


@block(LEAKS, kind=st.sampled_from(sorted(LEAKING)))
class Leak(Block):
    """An operator that mixes channels."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        word, self.does = LEAKING[kind]
        self.expects["in"] = word

    def forward(self, x: Tensor) -> Tensor:
        y = self.does(x)
        return y if y.shape == x.shape else x * y.mean((1, 2)).view(-1, 1, *[1] * self.dims)


@block(LEAKS, kind=one_of("layer without weight", "layer over all", "group"))
class LeakyNorm(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind
        self.layer: nn.Module
        if kind == "group":
            self.layer = nn.GroupNorm(1, self.channels)
        else:
            plain = kind == "layer without weight"
            self.layer = nn.LayerNorm(self.channels if plain else shape, elementwise_affine=not plain)
        self.expects["in"] = "group_norm" if kind == "group" else "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer without weight":
            return self.layer(x.movedim(1, -1)).movedim(-1, 1)
        return self.layer(x)


@block(LEAKS)
class ComputedWeight(Block):
    """A convolution with standardized weights: its channels are not prunable."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4, 3)
        self.expects["in"] = "computed"

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.layer.weight
        weight = weight - weight.mean(list(range(1, weight.dim())), keepdim=True)
        return getattr(F, f"conv{self.dims}d")(x, weight, self.layer.bias, padding=1)
