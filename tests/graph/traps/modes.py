"""Train mode differs from eval mode, behind something that the source of `forward` does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv, wrapped
from graph.traps.base import Net, images, trap, traps


class Penalty(Net):
    """A loss term of the features of the stem, if a condition holds. It can be tested in many ways."""

    def __init__(self, condition: Callable[[Any, Tensor], bool]) -> None:
        super().__init__()
        self.condition = condition

    @wrapped
    def under_wrapper(self) -> bool:
        return self.training

    @property
    def is_learning(self) -> bool:
        return self.training

    def extra(self, features: Tensor) -> Tensor:
        return features.pow(2).mean()

    def forward(self, x: Tensor) -> Any:
        features = F.relu(self.stem(x))
        result = self.head(F.relu(self.body(features)))
        return (result, self.extra(features)) if self.condition(self, features) else result


class Auxiliary(Penalty):
    """A second head on the stem in place of the loss term."""

    def __init__(self, condition: Callable[[Any, Tensor], bool]) -> None:
        super().__init__(condition)
        self.aux = conv(8, 4, 1)

    def extra(self, features: Tensor) -> Tensor:
        return self.aux(features)


BOTH: dict[str, Callable[[Any, Tensor], bool]] = {
    "wrapper": lambda net, x: net.under_wrapper(),
    "gradients": lambda net, x: torch.is_grad_enabled(),
    "not on meta": lambda net, x: not x.is_meta,
}
traps("second head", BOTH, build=Auxiliary)
traps(
    "penalty",
    {
        **BOTH,
        "outside inference": lambda net, x: not torch.is_inference_mode_enabled(),
        "gradients are required": lambda net, x: x.requires_grad,
        # A trace on meta tensors sees no difference between the modes.
        "train mode, on the CPU": lambda net, x: net.training and x.device.type == "cpu",
        "half of the calls": lambda net, x: net.training and float(torch.rand(())) < 0.5,
    },
    build=Penalty,
)
traps("width in eval mode", {"property": lambda net, x: x if net.is_learning else x / x.new_tensor([x.shape[1]])})

ONE, THREE = images(1, batch=1, size=8), images(2, batch=3, size=8)


@trap(example=ONE, second=THREE)
class PenaltyBehindANormOfOneValue(Penalty):
    """In train mode a batch of one cannot be normalized, so the example input runs in eval mode only."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: net.under_wrapper())
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        first = result[0] if isinstance(result, tuple) else result
        return result, self.norm(first.mean((2, 3)))


def needs_three(net: Any, x: Tensor) -> bool:
    if net.training and len(x) != 3:
        raise ValueError("batch of three expected")
    return bool(net.under_wrapper())


traps("second head that refuses the example", {"": needs_three}, build=Auxiliary, example=ONE, second=THREE)
