"""The outputs agree, and the gradients do not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graph.layers import WidthInBackward
from graph.traps.base import traps


class MeanInBackward(WidthInBackward):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(1, keepdim=True)


def hooked(net: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
    return x


def detached(net: Any, x: Tensor) -> Tensor:
    """The forward value is x; the gradient is the width."""
    scaled = x * x.new_tensor([x.shape[1]])
    return scaled - scaled.detach() + x.detach()


traps(
    "gradient",
    {
        "divided by the width": lambda net, x: WidthInBackward.apply(x),
        "without its mean": lambda net, x: MeanInBackward.apply(x),
        "hook": hooked,
        "detached scale": detached,
    },
)
