"""Code that hides something from a trace: another mode, the width as a number, layers that run later, hooks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import BATCH, LEAKS, LEAVES, NUMERIC, Block, Shape, block, one_of
from graph.layers import WidthInBackward, wrapped

# --- code that runs only in train mode, behind a hidden condition ------------------------------------------


class Mode:
    """Refers to a module and its mode."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __bool__(self) -> bool:
        return self.owner.training


class Hidden(Block):
    """A block with many ways to test for train mode."""

    def __init__(self, shape: Shape, switch: str) -> None:
        super().__init__(shape)
        self.switch = switch
        self.mode = Mode(self)

    @property
    def is_learning(self) -> bool:
        return self.training

    @torch.autocast("cpu", enabled=False)
    def under_autocast(self) -> bool:
        return self.training

    @wrapped
    def under_wrapper(self) -> bool:
        return self.training

    def active(self, x: Tensor) -> bool:
        ways: dict[str, Callable[[], Any]] = {
            "property": lambda: self.is_learning,
            "autocast": self.under_autocast,
            "wrapper": self.under_wrapper,
            "helper": lambda: self.mode,
            "computed name": lambda: getattr(self, "".join(["train", "ing"])),
            "gradients": torch.is_grad_enabled,
            "grad function": lambda: x.grad_fn is not None,
            "attribute getter": lambda: operator.attrgetter("training")(self),
            "real device": lambda: self.is_learning and x.device.type == "cpu",
        }
        return bool(ways[self.switch]())


SWITCHES = one_of(
    "property",
    "autocast",
    "wrapper",
    "helper",
    "computed name",
    "gradients",
    "attribute getter",
)


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
    "tensor": lambda x: x / torch.tensor(x.shape[1]),
    "full": lambda x: x / torch.full((1,), float(x.shape[1])),
    "arange": lambda x: x * torch.arange(x.shape[1])[-1].add(1),
    "linspace": lambda x: x * torch.linspace(0.5, 2, x.shape[1] + 1)[1],
    "ones": lambda x: x / torch.ones(x.shape[1]).sum(),
    "seed": lambda x: x * torch.rand((), generator=torch.Generator().manual_seed(x.shape[1])),
}


@block(LEAKS, NUMERIC, how=st.sampled_from(sorted(WIDTHS_AS_NUMBERS)), switch=one_of("always", "property", "gradients"))
class WidthAsNumber(Hidden):
    def __init__(self, shape: Shape, how: str, switch: str) -> None:
        super().__init__(shape, switch)
        self.how = how
        self.expects["in"] = ""

    def forward(self, x: Tensor) -> Tensor:
        return WIDTHS_AS_NUMBERS[self.how](x) if self.switch == "always" or self.active(x) else x


@block(LEAKS, NUMERIC, kind=one_of("below", "full", "parity", "one", "loop"))
class BranchOnWidth(Block):
    """Python code that depends on the channel count."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind, self.full = kind, self.channels
        self.expects["in"] = "" if self.channels > 1 else self.expects["in"]

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        if self.kind == "loop":
            for _ in range(width):
                x = torch.sin(x + 1)
            return x
        chosen = {
            "below": width > self.full // 2,
            "full": width == self.full,
            "parity": width % 2 == self.full % 2,
            "one": width > 1,
        }
        return torch.sin(x + 1) if chosen[self.kind] else torch.cos(x)


@block(LEAKS, NUMERIC)
class SkipWhereShapesAgree(Block):
    """The widths differ until both are pruned to the same one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, self.channels + 2)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * x if x.shape == y.shape else y


@block(LEAKS, NUMERIC, kind=one_of("function", "hook"))
class WidthInGradient(Block):
    """Outputs are right, gradients are not."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind
        self.expects["in"] = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "function":
            return WidthInBackward.apply(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad / grad.shape[1])
        return x


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


# --- hooks ----------------------------------------------------------------------------------------------------------


def _observe(module: nn.Module, args: Any, result: Tensor) -> None:
    module.__dict__["seen"] = tuple(result.shape)


def _subtract_mean(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result - result.mean(1, keepdim=True)


@block(LEAVES)
class Observed(Block):
    """A hook that only observes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4)
        self.layer.register_forward_hook(_observe)
        self.expects["layer.weight"] = 4

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAKS)
class ChangedByHook(Block):
    """A hook that replaces what a layer returns."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4)
        self.layer.register_forward_hook(_subtract_mean)
        self.expects["layer.weight"] = "mean"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
