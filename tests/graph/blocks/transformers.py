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

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.place is not None:
            tokens = tokens + self.place
        tokens = tokens + self.attention(self.norm1(tokens))
        made = self.down(F.gelu(self.up(self.norm2(tokens))))
        tokens = tokens + (made if self.scale is None else self.scale * made)
        return tokens.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])


@block(
    LEAVES,
    product=one_of("sdpa", "explicit", "bmm", "einsum"),
    view=one_of("heads", "rest", "inner", "unflatten"),
    fused=FLAG,
    heads=one_of(2, 3, 4),
    repeats=one_of(1, 2),
    width=one_of(2, 4, 5),
    position=one_of("none", "rotary", "table", "mask", "scale"),
    scaled=one_of("none", "queries", "scores", "argument"),
)
class Heads(Block):
    """Attention whose heads can be pruned: their number is an attribute, or found from the tensors."""

    is_plain = False

    def __init__(
        self,
        shape: Shape,
        product: str,
        view: str,
        fused: bool,
        heads: int,
        repeats: int,
        width: int,
        position: str,
        scaled: str,
    ) -> None:
        super().__init__(shape)
        self.product, self.view, self.position, self.scaled = product, view, position, scaled
        self.num_heads, self.kv_heads, self.repeats, self.head_dim = heads * repeats, heads, repeats, width
        self.inner, self.kv_inner = self.num_heads * width, heads * width
        self.embed = nn.Linear(self.channels, 4)
        self.norm = nn.LayerNorm(4)
        if fused:
            self.qkv = nn.Linear(4, self.inner + 2 * self.kv_inner, bias=position != "none")
        else:
            self.q = nn.Linear(4, self.inner)
            self.k, self.v = nn.Linear(4, self.kv_inner, bias=False), nn.Linear(4, self.kv_inner)
        self.fused = fused
        length = math.prod(self.spatial)
        self.table = nn.Parameter(torch.empty(1, self.num_heads, length, length)) if position == "table" else None
        self.per_head = nn.Parameter(torch.empty(self.num_heads, 1, 1)) if position == "scale" else None
        self.out = nn.Linear(self.inner, self.channels)
        self.expects["qkv.weight" if fused else "q.weight"] = heads

    def heads(self, x: Tensor, count: int, inner: int) -> Tensor:
        n, length, _ = x.shape
        if self.view == "heads":
            x = x.view(n, length, count, self.head_dim)
        elif self.view == "rest":
            x = x.view(n, length, -1, self.head_dim)
        elif self.view == "inner":
            x = x.view(n, length, count, inner // count)
        else:
            x = x.unflatten(-1, (count, self.head_dim))
        return x.transpose(1, 2)

    def rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)[:, None] * 0.3
        angle = angle.expand(-1, x.shape[3])
        half = x.shape[3] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * angle.cos() + turned * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.embed(x.flatten(2).transpose(1, 2)))
        if self.fused and self.repeats == 1:
            made = self.qkv(tokens).chunk(3, -1)
        elif self.fused:
            made = self.qkv(tokens).split([self.inner, self.kv_inner, self.kv_inner], -1)
        else:
            made = self.q(tokens), self.k(tokens), self.v(tokens)
        q = self.heads(made[0], self.num_heads, self.inner)
        k, v = (self.heads(part, self.kv_heads, self.kv_inner) for part in made[1:])
        if self.position == "rotary":
            q, k = self.rotated(q), self.rotated(k)
        if self.per_head is not None:
            q = q * self.per_head
        y = self.mixed(q, k, v)
        y = self.out(y.transpose(1, 2).reshape(x.shape[0], tokens.shape[1], -1))
        return y.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias: Tensor | None = self.table
        if self.position == "mask":
            bias = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype, device=q.device).tril()
        scale = q.shape[-1] ** -0.5 if self.scaled == "argument" else None
        if self.scaled == "queries":
            q = q * q.shape[-1] ** -0.5
        if self.product == "sdpa" and self.repeats > 1:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
        k, v = k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)
        if self.product == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        n, heads, length, _ = q.shape
        if self.product == "einsum":
            scores = torch.einsum("nhld,nhmd->nhlm", q, k)
        elif self.product == "bmm":
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(n, heads, length, length)
        else:
            scores = q @ k.transpose(-1, -2)
        if self.scaled == "scores":
            scores = scores / math.sqrt(self.head_dim if self.view == "heads" else q.shape[-1])
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return torch.einsum("nhlm,nhmd->nhld", weights, v) if self.product == "einsum" else weights @ v
