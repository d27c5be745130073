"""Attention whose scale follows the width of heads, in the ways in which code computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention_nets import Attention


class Scaled(Attention):
    """Explicit products with a scale that the code computes in `style`."""

    def __init__(self, style: str, head_dim: int = 6) -> None:
        super().__init__(head_dim=head_dim)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        width, keys = q.shape[-1], k.transpose(-1, -2)
        if self.style == "queries":
            return (q * width**-0.5) @ keys
        if self.style == "keys":
            return q @ (keys / math.sqrt(width))
        if self.style == "a quarter each":
            return (q * width**-0.25) @ (keys * width**-0.25)
        if self.style == "scores":
            return q @ keys * width**-0.5
        if self.style == "twice":
            return q @ keys / width**0.25 / width**0.25
        if self.style == "in place":
            scores = q @ keys
            scores /= math.sqrt(width)
            return scores
        if self.style == "tensor":
            return q @ keys / torch.tensor(float(width)).sqrt()
        if self.style == "full":
            return q @ keys / torch.full([], width**0.5)
        if self.style == "the width itself":
            return q @ keys / width
        return self.other_products(q, k, width)

    def other_products(self, q: Tensor, k: Tensor, width: int) -> Tensor:
        keys = k.transpose(-1, -2)
        if self.style == "einsum":
            return torch.einsum("nhld,nhmd->nhlm", q, k) * (1 / math.sqrt(width))
        if self.style == "bmm":
            merged = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).view(*q.shape[:2], -1, k.shape[2])
            return merged / math.sqrt(width)
        if self.style == "baddbmm":
            start = torch.zeros(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
            added = torch.baddbmm(start, q.flatten(0, 1), keys.flatten(0, 1), beta=0, alpha=width**-0.5)
            return added.view(*q.shape[:2], q.shape[2], k.shape[2])
        assert self.style == "mask, then scale", self.style  # the mask is scaled too
        mask = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device).tril()
        return (q @ keys + mask) * width**-0.5


class ScaleArgument(Attention):
    """`scale=` computed from the shape of the queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(q.shape[-1]))
        return self.out(y.transpose(1, 2).flatten(2))


class Normed(Attention):
    """Norms of queries and keys."""

    def __init__(self, kind: str) -> None:
        super().__init__(head_dim=6)
        make: Callable[[int], nn.Module] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[kind]
        self.query_norm, self.key_norm = make(6), make(6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


class Interleaved(Attention):
    """Rotary embeddings of neighbouring columns."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__(head_dim=6)
        self.register_buffer("frequencies", torch.rand(3), persistent=False)
        self.register_buffer("copied", self.frequencies.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = (
            layer(x).view(n, length, self.num_heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        angles = torch.outer(torch.arange(length, dtype=x.dtype, device=x.device), self.frequencies)

        def rotated(t: Tensor) -> Tensor:
            even, odd = t[..., 0::2], t[..., 1::2]
            turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
            return torch.stack(turned, -1).flatten(-2)

        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v)
        return self.out(y.transpose(1, 2).flatten(2))


class TwoUses(Attention):
    """Queries, keys or scores with a second use, for which the factor of the first would be wrong."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        if use == "queries":
            self.extra = nn.Linear(self.inner_dim, 12)
        elif use == "keys are values":
            del self.value

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.query(x), self.key(x)
        value = key if self.use == "keys are values" else self.value(x)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (query, key, value))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.use == "queries":
            return y + self.extra(query.relu())
        if self.use == "unscaled":
            return y + self.out((q @ k.transpose(-1, -2)).tanh().matmul(v).transpose(1, 2).flatten(2))
        if self.use == "written":
            changed = q.clone()
            changed[:, :, 0] = 1.0
            return y + self.out(F.scaled_dot_product_attention(changed, k, v).transpose(1, 2).flatten(2))
        return y


class ComputedQueries(Attention):
    """Queries that are not linear in any parameter, with the default scale."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q.tanh(), k, v)
        return self.out(y.transpose(1, 2).flatten(2))


STYLES = (
    "queries",
    "keys",
    "a quarter each",
    "scores",
    "twice",
    "in place",
    "einsum",
    "bmm",
    "baddbmm",
    "the width itself",
)

WIDTH: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{f"scale of {style}": (partial(Scaled, style), 6) for style in STYLES},
    "scale argument": (ScaleArgument, 5),
    "layer norm of queries": (lambda: Normed("layer"), 6),
    "rms norm of queries": (lambda: Normed("rms"), 6),
    "neighbouring rotary pairs": (Interleaved, 3),
}
"""Name -> (module, number of prunable columns of queries and keys, or pairs of them)."""

NO_FACTOR: dict[str, Callable[[], Any]] = {
    "a number in float32": lambda: Scaled("tensor"),
    "another number in float32": lambda: Scaled("full"),
    "the mask is scaled": lambda: Scaled("mask, then scale"),
    "keys are values": lambda: TwoUses("keys are values"),
    "queries elsewhere": lambda: TwoUses("queries"),
    "unscaled scores": lambda: TwoUses("unscaled"),
    "queries written": lambda: TwoUses("written"),
    "computed queries": ComputedQueries,
}
"""Modules in which no parameter can take up the factor of the scale: heads are pruned instead."""
