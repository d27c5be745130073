"""Channels that are compared, sorted, counted or chosen by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graph.layers import conv
from graph.traps.base import Net, ordinary, traps

MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "argsort": lambda x: x.gather(1, x.mean((2, 3), keepdim=True).argsort(1).expand_as(x)),
    "topk": lambda x: x * (x >= x.topk(2, 1).values[:, 1:]),
    "topk of means": lambda x: x * (x.mean((2, 3)) >= x.mean((2, 3)).topk(2, 1).values[:, 1:])[..., None, None],
    "median": lambda x: x - x.median(1, keepdim=True).values,
    "quantile": lambda x: x - x.flatten(1).quantile(0.3, 1).view(-1, 1, 1, 1),
    "standard deviation": lambda x: x / (x.std((1, 2, 3), keepdim=True) + 1),
    "count of positive ones": lambda x: x / (1 + (x > 0).sum(1, keepdim=True)),
    "maxout": lambda x: x * (x == x.amax(1, keepdim=True)),
    "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "product": lambda x: x * (1 + x).prod(1, keepdim=True).tanh(),
    "index of the first": lambda x: x * x[:, :1],
    "index of the last": lambda x: x + x[:, -1:],
    "every second": lambda x: torch.cat([x[:, ::2].tanh(), x[:, 1::2]], 1),
    "flip and add": lambda x: x + x.flip(1),
    "roll": lambda x: x.roll(1, 1) - x,
    "difference of neighbours": lambda x: torch.cat([x[:, :1], x.diff(dim=1)], 1),
    "einsum of pairs": lambda x: x * torch.einsum("nchw,ndhw->nhw", x, x)[:, None].tanh(),
    "einsum gram": lambda x: x + torch.einsum("nchw,ndhw->ncd", x, x).mean(2)[..., None, None],
    "unfold of channels": lambda x: x + F.pad(x, (0, 0, 0, 0, 1, 1)).unfold(1, 3, 1).mean(-1),
    "view of literal size": lambda x: x.view(x.shape[0], 2, 4, 8, 8).softmax(2).view(x.shape),
    "reshape to pairs": lambda x: x.reshape(x.shape[0], -1, 2, 8, 8).flip(2).reshape(x.shape[0], -1, 8, 8),
    "vmap": torch.vmap(lambda image: image / (1 + image.abs().sum(0))),
    "histogram": lambda x: x * torch.histc(x.detach().float(), 4).to(x).amax() / 1000,
    "unique": lambda x: x / x.detach().sign().unique().numel(),
    "where of scalar": lambda x: torch.where(x.mean() > 0.3, x, x.neg()),
    "cosine of neighbours": lambda x: x * F.cosine_similarity(x, x.roll(1, 3), 1)[:, None],
    "normalize": lambda x: F.normalize(x, dim=1),
    "local response": lambda x: F.local_response_norm(x, 3),
    "pairwise distance": lambda x: x * torch.cdist(x.flatten(2).mT, x.flatten(2).mT).mean(),
    "grid by channel": lambda x: F.grid_sample(x, x[:, :2].tanh().movedim(1, -1), align_corners=False),
}


def _code(how: str) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, x: MIDDLES[how](x)


IN_TRAIN_MODE = ("softmax", "cumsum", "topk", "index of the last", "every second", "roll", "view of literal size")
traps("channels", {how: _code(how) for how in MIDDLES}, every=2)
traps("channels in train mode", {how: _code(how) for how in IN_TRAIN_MODE}, train_only=True, every=3)
traps(
    "checkpoint",  # in train mode
    {
        "mean": lambda net, x: checkpoint(lambda t: t - t.mean(1, keepdim=True), x, use_reentrant=False),
        "width": lambda net, x: checkpoint(lambda t: t / t.new_tensor([t.shape[1]]), x, use_reentrant=False),
    },
)


@ordinary(2)
class Checkpointed(Net):
    def middle(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(torch.tanh, x, use_reentrant=False)
        return result


@ordinary(3)
class CheckpointedInTraining(Net):
    """As in large networks: with gradients enabled, the branch is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = conv(8, 5), conv(5, 8)

    def branch(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x)))

    def middle(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return x + checkpoint(self.branch, x, use_reentrant=False)
        return x + self.branch(x)
