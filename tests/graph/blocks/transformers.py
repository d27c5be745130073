"""Attention, and a block of a vision transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, Block, Shape, block, one_of


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, style: str) -> None:
        super().__init__()
        self.heads, self.style = heads, style
        self.scale = (width // heads) ** -0.5
        if style == "module":
            self.whole = nn.MultiheadAttention(width, heads, batch_first=True)
            return
        if "fused" in style:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, c = x.shape
        if self.style == "module":
            return self.whole(x, x, x, need_weights=False)[0]
        if "fused" in self.style:
            qkv = self.qkv(x).reshape(n, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
        else:
            q, k, v = (layer(x).view(n, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if "sdpa" in self.style:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(n, length, -1))


@block(
    LEAVES,
    style=one_of("fused", "fused sdpa", "separate", "separate sdpa", "module"),
    heads=one_of(1, 2),
    hidden=st.integers(2, 6),
    norm=FLAG,
    scale=FLAG,
    position=FLAG,
)
class Transformer(Block):
    """A block of a vision transformer, between flattening and folding back."""

    is_plain = False

    def __init__(
        self, shape: Shape, style: str, heads: int, hidden: int, norm: bool, scale: bool, position: bool
    ) -> None:
        super().__init__(shape)
        width = 4
        self.patches = self.conv(self.channels, width)
        self.place = nn.Parameter(torch.empty(1, math.prod(self.spatial), width)) if position else None
        self.norm1 = nn.LayerNorm(width) if norm else nn.Identity()
        self.attention = Attention(width, heads, style)
        self.norm2 = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.empty(width)) if scale else None
        self.expects["up.weight"] = hidden
        if norm:
            self.expects["patches.weight"] = "norm"

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.place is not None:
            tokens = tokens + self.place
        tokens = tokens + self.attention(self.norm1(tokens))
        made = self.down(F.gelu(self.up(self.norm2(tokens))))
        tokens = tokens + (made if self.scale is None else self.scale * made)
        return tokens.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
