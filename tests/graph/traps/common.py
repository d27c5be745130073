"""Ordinary networks, which must stay prunable in spite of the checks for traps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv, named
from graph.traps.base import Net, images, ordinary, trap


@ordinary(2)
class Plain(Net):
    pass


@ordinary(3)
class AuxiliaryClassifier(Net):
    """GoogLeNet: a second classifier in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.aux = conv(8, 5, 1), nn.Linear(5 * 16, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        y = self.head(F.relu(self.body(x)))
        if self.training:
            return y, self.aux(F.adaptive_avg_pool2d(F.relu(self.squeeze(x)), 4).flatten(1))
        return y


@ordinary(3)
class StochasticDepth(Net):
    """A branch that train mode drops, image by image."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = conv(8, 5), conv(5, 8)

    def middle(self, x: Tensor) -> Tensor:
        y = self.outer(F.relu(self.inner(x)))
        return x + (y * (torch.rand(len(x), 1, 1, 1, dtype=x.dtype) < 0.7) / 0.7 if self.training else y)


@ordinary(2, example=images(1, batch=1), second=images(2, batch=3))
def normalised_batch_of_one() -> nn.Module:
    """Batch norm over one value raises in train mode with a batch of one."""
    return named(
        stem=conv(3, 8), relu=nn.ReLU(), pool=nn.AdaptiveAvgPool2d(1), norm=nn.BatchNorm2d(8), body=conv(8, 6, 1),
        relu2=nn.ReLU(), head=conv(6, 4, 1),
    )  # fmt: skip


def sequence(seed: int) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed))


@ordinary(1, example=lambda: sequence(1), second=lambda: sequence(2))
def encoder_layer() -> nn.Module:
    """torch's encoder layer, whose fused kernel runs only in eval mode without gradients."""
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)


def observe(module: nn.Module, args: Any, result: Tensor) -> None:
    module.__dict__["seen"] = tuple(result.shape)


def subtract_mean(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result - result.mean(1, keepdim=True)


class Hooked(Net):
    """A hook on a layer between the first and the second convolution."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = conv(8, 8)
        self.inner.register_forward_hook(hook)

    def middle(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x))


@ordinary(3)
def observed_by_a_hook() -> nn.Module:
    return Hooked(observe)


@trap()
def changed_by_a_hook() -> nn.Module:
    return Hooked(subtract_mean)


def divide_by_width(module: nn.Module, args: Any) -> Any:
    return (args[0] / args[0].new_tensor([args[0].shape[1]]),) if module.training else None


def mean_of_gradients(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
    return (incoming[0] - incoming[0].mean(1, keepdim=True),) if incoming[0] is not None else None


@trap()
def changed_by_a_pre_hook_in_train_mode() -> nn.Module:
    net = Net()
    net.body.register_forward_pre_hook(divide_by_width)
    return net


@trap()
def hook_on_the_backward_pass() -> nn.Module:
    net = Net()
    net.body.register_full_backward_hook(mean_of_gradients)
    return net
