"""Attention written in the styles that users write it in. The number of heads is an attribute, or found with -1."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Projections of width `heads * head_dim` inside a residual stream of width `dim`."""

    def __init__(self, dim: int = 12, heads: int = 4, head_dim: int = 5, kv_heads: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.kv_heads = heads, head_dim, kv_heads or heads
        self.inner_dim = heads * head_dim
        self.scale = head_dim**-0.5
        self.query = nn.Linear(dim, self.inner_dim)
        self.key = nn.Linear(dim, self.kv_heads * head_dim)
        self.value = nn.Linear(dim, self.kv_heads * head_dim)
        self.out = nn.Linear(self.inner_dim, dim)


class Sdpa(Attention):
    """View by number of heads, result by -1."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, -1))


class SdpaInner(Attention):
    """The head width is computed from the inner width, and the result is viewed by the inner width."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, self.inner_dim // self.num_heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(n, length, self.inner_dim))


class Explicit(Attention):
    """Matrix products, a causal mask and dropout; heads found by -1."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q = self.query(x).view(n, length, -1, self.head_dim).permute(0, 2, 1, 3)
        k = self.key(x).view(n, length, -1, self.head_dim).permute(0, 2, 1, 3)
        v = self.value(x).view(n, length, -1, self.head_dim).permute(0, 2, 1, 3)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~mask, -1e9)
        weights = F.dropout(scores.softmax(-1), 0.0, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Merged(Attention):
    """Batch and heads on one axis, as with `torch.bmm`."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape

        def heads(t: Tensor) -> Tensor:
            t = t.view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
            return t.reshape(n * self.num_heads, length, self.head_dim)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        weights = torch.bmm(q * self.scale, k.transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(weights, v).view(n, self.num_heads, length, self.head_dim).transpose(1, 2)
        return self.out(mixed.reshape(n, length, self.inner_dim))


class Einsum(Attention):
    """Two einsums."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.query, self.key, self.value))
        weights = (torch.einsum("blhd,bmhd->bhlm", q, k) * self.scale).softmax(-1)
        return self.out(torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(-2))


class Rotary(Attention):
    """Rotary embeddings by halves, and a learned scale for each head."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__(head_dim=6)
        self.register_buffer("frequencies", torch.rand(3))
        self.temperature = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, -1, self.head_dim).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        angles = torch.outer(torch.arange(length, dtype=x.dtype, device=x.device), self.frequencies)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def rotated(t: Tensor) -> Tensor:
            first, second = t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]
            return t * cos + torch.cat([-second, first], -1) * sin

        scores = rotated(q) @ rotated(k).transpose(-1, -2) * self.temperature
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, -1))


class Fused(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, style: str = "reshape", dim: int = 12, heads: int = 4, head_dim: int = 5) -> None:
        super().__init__()
        self.style, self.num_heads, self.head_dim, self.inner_dim = style, heads, head_dim, heads * head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.out = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        made = self.qkv(x)
        if self.style == "reshape":
            q, k, v = made.reshape(n, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.style == "unflatten":
            q, k, v = made.unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        else:
            parts = made.chunk(3, -1) if self.style == "chunk" else made.split(self.inner_dim, dim=-1)
            q, k, v = (part.view(n, length, self.num_heads, -1).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Grouped(Attention):
    """Fewer heads of keys and values than of queries."""

    def __init__(self, style: str = "sdpa", heads: int = 6, kv_heads: int = 3) -> None:
        super().__init__(heads=heads, kv_heads=kv_heads)
        self.style, self.repeats = style, heads // kv_heads

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, -1, self.head_dim).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.style == "expand":
            k, v = (
                t[:, :, None].expand(-1, -1, self.repeats, -1, -1).reshape(n, -1, length, self.head_dim) for t in (k, v)
            )
        elif self.style == "interleave":
            k, v = (t.repeat_interleave(self.repeats, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.style == "sdpa")
        return self.out(mixed.transpose(1, 2).reshape(n, length, -1))


class OneKeyHead(Attention):
    """All query heads share one head of keys and values, by broadcasting."""

    def __init__(self) -> None:
        super().__init__(kv_heads=1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q = self.query(x).view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = self.key(x)[:, None], self.value(x)[:, None]
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, -1))


class PositionBias(Attention):
    """A table of position biases with a head axis, as in Swin (added to scores or given as mask)."""

    index: Tensor

    def __init__(self, length: int = 7, *, as_mask: bool = False) -> None:
        super().__init__()
        self.as_mask = as_mask
        self.table = nn.Parameter(torch.rand(2 * length - 1, 4))
        index = torch.arange(length)
        self.register_buffer("index", index[:, None] - index[None, :] + length - 1)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        bias = self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1)
        if self.as_mask:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        else:
            mixed = ((q * self.scale) @ k.transpose(-2, -1) + bias[None]).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Cross(Attention):
    """Queries from the stream, keys and values from a second input; the values are wider than the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(12, 4 * 3), nn.Linear(4 * 3, 12)

    def forward(self, x: Tensor) -> Tensor:
        other = x.flip(1)[:, :4]
        q, k = self.query(x).unflatten(-1, (-1, self.head_dim)), self.key(other).unflatten(-1, (-1, self.head_dim))
        v = self.value(other).unflatten(-1, (-1, 3))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.out(mixed.transpose(1, 2).flatten(2))


# --- what cannot be pruned -------------------------------------------------------------------------


class SizesFromInput(Attention):
    """timm's older style: the width of the stream is also the width of the heads."""

    def __init__(self) -> None:
        super().__init__(dim=20)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            layer(x).reshape(n, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))


class LiteralHeads(Attention):
    """Four heads, written in the code."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (layer(x).view(n, length, 4, 5).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, 20))


class Slopes(Attention):
    """A constant slope for each head, as in ALiBi."""

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        slopes = 2.0 ** -torch.arange(1, self.num_heads + 1, dtype=x.dtype, device=x.device)
        distance = torch.arange(length, dtype=x.dtype, device=x.device)
        scores = q @ k.transpose(-1, -2) * self.scale + slopes[:, None, None] * distance
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TalkingHeads(Attention):
    """A linear layer mixes the heads of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, -1, self.head_dim).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = self.talk((q @ k.transpose(-1, -2)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class HeadsOfConfig(Attention):
    """The number of heads is an attribute of a configuration that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"heads": self.num_heads}

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.sizes["heads"], self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Multihead(nn.Module):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    """An attention branch and an MLP branch, with an embedding before and a head after them."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        dim = (
            next(layer.in_features for layer in attention.modules() if isinstance(layer, nn.Linear))
            if not isinstance(attention, Multihead)
            else 12
        )
        self.embed, self.head = nn.Linear(3, dim), nn.Linear(dim, 2)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(dim, 9), nn.GELU(), nn.Linear(9, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(self.norm1(x))
        return self.head(x + self.mlp(self.norm2(x)))


PRUNABLE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "sdpa": (Sdpa, 4),
    "sdpa, inner width": (SdpaInner, 4),
    "explicit": (Explicit, 4),
    "batch and heads merged": (Merged, 4),
    "einsum": (Einsum, 4),
    "rotary": (Rotary, 4),
    "fused, reshape": (Fused, 4),
    "fused, unflatten": (lambda: Fused("unflatten"), 4),
    "fused, chunk": (lambda: Fused("chunk"), 4),
    "fused, split": (lambda: Fused("split"), 4),
    "grouped, sdpa": (Grouped, 3),
    "grouped, expand": (lambda: Grouped("expand"), 3),
    "grouped, interleave": (lambda: Grouped("interleave"), 3),
    "one key head": (OneKeyHead, 4),
    "position bias": (PositionBias, 4),
    "position bias as mask": (lambda: PositionBias(as_mask=True), 4),
    "cross": (Cross, 4),
    "talking heads": (TalkingHeads, 4),
    "nn.MultiheadAttention": (Multihead, 4),
    "two heads": (lambda: Sdpa(heads=2), 2),
    "as many heads as width": (lambda: Sdpa(heads=5, head_dim=5), 5),
    "as many heads as tokens": (lambda: SdpaInner(heads=7, head_dim=2), 7),
}
"""Name -> (module, number of prunable heads or key heads)."""

FROZEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "literal heads": (LiteralHeads, "hard-coded channel count"),
    "constant slopes": (Slopes, "not prunable"),
    "heads of a config": (HeadsOfConfig, "hard-coded channel count"),
}
"""Name -> (module, part of the reason why its heads are not prunable)."""
