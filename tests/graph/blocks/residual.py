"""Residual streams under RMSNorm, and other sums over channels that are exact, because masked channels are zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, Block, Shape, block, one_of


class RootMeanSquare(nn.Module):
    def __init__(self, width: int, form: str) -> None:
        super().__init__()
        self.form, self.eps = form, 0.05
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "scaled unit":
            return F.normalize(x, dim=-1) * 3.0 * self.weight
        size = x.pow(2).mean(-1, keepdim=True)
        if self.form == "one plus":
            return x * torch.rsqrt(size + self.eps) * (1 + self.weight)
        if self.form == "divided":
            return x / (size + self.eps).sqrt() * self.weight
        return self.weight * (x * torch.rsqrt(size + self.eps))


NORMS = ("hand-written", "one plus", "divided", "scaled unit", "module", "module without weight")


def norm_of(form: str, width: int) -> nn.Module:
    if form.startswith("module"):
        return nn.RMSNorm(width, eps=0.05, elementwise_affine=form == "module")
    return RootMeanSquare(width, form)


@block(
    LEAVES,
    norm=one_of(*NORMS),
    heads=one_of(2, 3),
    groups=one_of(1, 2),
    hidden=st.integers(3, 6),
    scale=FLAG,
    position=FLAG,
    bias=FLAG,
    final=FLAG,
)
class ResidualStream(Block):
    """Attention and gated MLP with RMSNorm: width, heads and hidden width can be pruned."""

    is_plain = False

    def __init__(
        self,
        shape: Shape,
        norm: str,
        heads: int,
        groups: int,
        hidden: int,
        scale: bool,
        position: bool,
        bias: bool,
        final: bool,
    ) -> None:
        super().__init__(shape)
        width, inner = 6, 4
        self.heads, self.inner = heads * groups, inner
        self.patches = self.conv(self.channels, width)
        self.place = nn.Parameter(torch.empty(1, 1, width)) if position else None
        self.norm1, self.norm2 = norm_of(norm, width), norm_of(norm, width)
        self.q = nn.Linear(width, heads * groups * inner, bias=bias)
        self.k, self.v = (nn.Linear(width, heads * inner, bias=bias) for _ in range(2))
        self.out = nn.Linear(heads * groups * inner, width, bias=bias)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.scale = nn.Parameter(torch.empty(width)) if scale else None
        self.norm3 = norm_of(norm, width) if final else nn.Identity()
        self.head = nn.Linear(width, 4)
        self.expects.update({"patches.weight": width, "k.weight": heads, "up.weight": hidden})

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.place is not None:
            tokens = tokens + self.place
        n, length = tokens.shape[:2]
        y = self.norm1(tokens)
        q, k, v = (layer(y).view(n, length, -1, self.inner).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).reshape(n, length, -1)
        tokens = tokens + self.out(y)
        y = self.norm2(tokens)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        tokens = tokens + (y if self.scale is None else y * self.scale)
        return self.head(self.norm3(tokens)).transpose(1, 2).reshape(n, -1, *x.shape[2:])


@block(
    LEAVES, kind=one_of("unit", "whole sum", "response", "largest norm", "gated"), act=one_of("relu", "gelu", "none")
)
class SummedOver(Block):
    """Sums and norms over the channels of a layer, which masked channels do not change."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str, act: str) -> None:
        super().__init__(shape)
        self.kind, self.act, self.eps = kind, act, 0.05
        self.layer = self.conv(self.channels, 5)
        self.after = self.conv(5, 3)
        self.gamma = nn.Parameter(torch.empty(5, *[1] * self.dims)) if kind == "response" else None
        self.expects["layer.weight"] = 5

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y = y if self.act == "none" else getattr(F, self.act)(y)
        if self.kind == "unit":
            y = F.normalize(y, dim=1)
        elif self.kind == "whole sum":
            y = y / (1 + y.abs().sum())
        elif self.kind == "response":
            size = y.flatten(2).norm(dim=2)
            size = size / (size.mean(1, keepdim=True) + self.eps)
            y = self.gamma * (y * self.over_space(size)) + y
        elif self.kind == "largest norm":
            y = y / (1 + y.norm(p=3, dim=1, keepdim=True))
        else:
            y = y * y.sum(1, keepdim=True).sigmoid()
        return self.after(y)
