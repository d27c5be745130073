"""The outputs agree, and the gradients do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graph.traps.base import Net, trap


class WidthInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.shape[1]


class MeanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(1, keepdim=True)


@trap()
class BackwardDividesByTheWidth(Net):
    def middle(self, x: Tensor) -> Tensor:
        return WidthInBackward.apply(x)


@trap()
class BackwardTakesTheMean(Net):
    def middle(self, x: Tensor) -> Tensor:
        return MeanInBackward.apply(x)


@trap()
class HookOnTheGradient(Net):
    def middle(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad - grad.mean(1, keepdim=True))
        return x


@trap()
class DetachedScaleByTheWidth(Net):
    """The forward value is one; the gradient is the width."""

    def middle(self, x: Tensor) -> Tensor:
        scaled = x * x.new_tensor([x.shape[1]])
        return scaled - scaled.detach() + x.detach()
