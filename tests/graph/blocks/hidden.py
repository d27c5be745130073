"""Code that hides something from a trace: another mode, the width as a number, layers that run later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from graph.blocks.base import BATCH, LEAKS, LEAVES, NUMERIC, Block, Shape, block, one_of
from graph.layers import WidthInBackward, wrapped

# --- code that runs only in train mode, behind a hidden condition ------------------------------------------


class Hidden(Block):
    """A block with some ways to test for train mode."""

    def __init__(self, shape: Shape, switch: str) -> None:
        super().__init__(shape)
        self.switch = switch

    @wrapped
    def under_wrapper(self) -> bool:
        return self.training

    def active(self, x: Tensor) -> bool:
        ways: dict[str, Callable[[], Any]] = {
            "wrapper": self.under_wrapper,
            "gradients": torch.is_grad_enabled,
            "grad function": lambda: x.grad_fn is not None,
            "real device": lambda: self.training and x.device.type == "cpu",
        }
        return bool(ways[self.switch]())


SWITCHES = one_of("wrapper", "gradients")


@block(LEAVES, switch=SWITCHES)
class HiddenBranch(Hidden):
    """A branch that can be traced like any other."""

    def __init__(self, shape: Shape, switch: str) -> None:
        super().__init__(shape, switch)
        self.hidden = self.conv(self.channels, 4)
        self.layer = self.conv(4, self.channels)
        self.expects["hidden.weight"] = 4

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(F.relu(self.hidden(x))) if self.active(x) else x


@block(LEAKS, switch=SWITCHES)
class HiddenLeak(Hidden):
    """In train mode the mean over channels is subtracted."""

    def __init__(self, shape: Shape, switch: str) -> None:
        super().__init__(shape, switch)
        self.expects["in"] = "mean"

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.active(x) else x


@block(LEAKS, NUMERIC, switch=one_of("real device", "grad function"))
class LeakUnseenOnMeta(Hidden):
    """A trace on meta tensors does not run it."""

    def __init__(self, shape: Shape, switch: str) -> None:
        super().__init__(shape, switch)
        self.expects["in"] = ""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.active(x) else x


# --- the width as a number ------------------------------------------------------------------------------------------

WIDTHS_AS_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "new_tensor": lambda x: x / x.new_tensor([x.shape[1]]),
    "full": lambda x: x / torch.full((1,), float(x.shape[1])),
    "linspace": lambda x: x * torch.linspace(0.5, 2, x.shape[1] + 1)[1],
    "seed": lambda x: x * torch.rand((), generator=torch.Generator().manual_seed(x.shape[1])),
    "branch": lambda x: torch.sin(x + 1) if x.shape[1] > 1 else torch.cos(x),
    "gradient": WidthInBackward.apply,
}


@block(LEAKS, NUMERIC, how=st.sampled_from(sorted(WIDTHS_AS_NUMBERS)), switch=one_of("always", "gradients"))
class WidthAsNumber(Hidden):
    def __init__(self, shape: Shape, how: str, switch: str) -> None:
        super().__init__(shape, switch)
        self.how = how
        if how != "branch" or self.channels > 1:
            self.expects["in"] = ""

    def forward(self, x: Tensor) -> Tensor:
        return WIDTHS_AS_NUMBERS[self.how](x) if self.switch == "always" or self.active(x) else x


# --- layers that run later ------------------------------------------------------------------------------------------


@block(LEAKS, opened=one_of("batch", "never"))
class IdleLayer(Block):
    """One of two experts, which the example input does not choose."""

    def __init__(self, shape: Shape, opened: str) -> None:
        super().__init__(shape)
        self.opened = opened
        self.layer, self.idle = self.conv(self.channels, self.channels), self.conv(self.channels, self.channels)
        self.expects.update({"in": "does not run", "layer.weight": "does not run"})

    def forward(self, x: Tensor) -> Tensor:
        return self.idle(x) if self.opened == "batch" and len(x) > BATCH else self.layer(x)
