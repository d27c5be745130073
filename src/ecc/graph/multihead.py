"""`nn.MultiheadAttention` with any number of heads.

torch's layer computes the width of a head from the width of its input, so that it cannot have fewer heads than before.
`HeadAttention` has the same parameters under the same names and computes the same, but takes the number of heads from
its weights. Copies for tracing contain it in place of torch's layer. A smaller network contains it where heads were
removed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HeadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose inner width may differ from the width of its input."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As for `nn.MultiheadAttention`."""
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True needs attn_mask, which it describes.")
        same = query is key and key is value
        batched = query.dim() == 3
        query, key, value = (self._batch_first(x, batched) for x in (query, key, value))
        q, k, v = self._projected(query, key, value, same)
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(x.shape[0], 1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _mask(attn_mask, key_padding_mask, q, extra)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q * self.head_dim**-0.5 @ k.transpose(-1, -2)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            y = F.dropout(weights, dropout) @ v if dropout else weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        y = F.linear(y.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        return y, weights

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, same: bool) -> tuple[Tensor, Tensor, Tensor]:
        whole, bias = self.in_proj_weight, self.in_proj_bias
        if same and whole is not None:
            q, k, v = F.linear(query, whole, bias).chunk(3, -1)
            return q, k, v
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if whole is None else whole.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, extra: int) -> Tensor | None:
    """One mask to add to the scores, with positions for `extra` keys that are always used."""
    masks = []
    if attn_mask is not None:
        added = F.pad(_added(attn_mask, query), (0, extra))
        masks.append(added if added.dim() == 2 else added.unflatten(0, (query.shape[0], -1)))
    if key_padding_mask is not None:
        padding = F.pad(_added(key_padding_mask, query), (0, extra))
        masks.append(padding.reshape(-1, 1, 1, padding.shape[-1]))
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, float("-inf"))


def use_head_attention_(model: nn.Module) -> None:
    """Replace the class of torch's attention layers, for a trace."""
    for module in model.modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = HeadAttention


def fit_attention_(module: nn.Module) -> None:
    """Set the sizes of an attention layer from its weights, and its class: torch's own if it has all heads."""
    if type(module) not in (nn.MultiheadAttention, HeadAttention):
        return
    state: dict[str, Any] = vars(module)
    fused = state["_parameters"].get("in_proj_weight")
    first = fused if fused is not None else state["_parameters"]["q_proj_weight"]
    inner = first.shape[0] // (1 if fused is None else 3)
    state["embed_dim"] = first.shape[1]
    for name, key in (("kdim", "k_proj_weight"), ("vdim", "v_proj_weight")):
        state[name] = first.shape[1] if fused is not None else state["_parameters"][key].shape[1]
    state["num_heads"] = inner // state["head_dim"]
    whole = inner == state["embed_dim"] == state["_modules"]["out_proj"].weight.shape[0]
    module.__class__ = nn.MultiheadAttention if whole else HeadAttention
    # torch takes fused kernels, which need the dense sizes, only if this is true.
    state["_qkv_same_embed_dim"] = whole and fused is not None
