"""Code that branches: on a size, on a value, on the mode."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from graph.blocks.base import LEAKS, LEAVES, Block, Shape, block, one_of


@block(LEAKS, limit=one_of(1, 5))
class BranchOnSize(Block):
    """Another input size would run the other layer, so channels that may be its input are frozen."""

    def __init__(self, shape: Shape, limit: int) -> None:
        super().__init__(shape)
        self.limit = limit
        self.small = self.conv(self.channels, 4)
        self.large = self.conv(self.channels, 4, 3)
        run = "large.weight" if self.spatial[-1] > limit else "small.weight"
        self.expects.update({"in": "does not run", run: "does not run"})

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > self.limit:
            return self.large(x)
        return self.small(x)


@block(LEAKS)
class BranchOnValue(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4)
        self.expects.update({"in": "Python", "layer.weight": 4})

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().sum() > 0:
            return self.layer(x)
        return self.layer(-x)


@block(LEAVES, kind=one_of("branch", "skipped", "twice"))
class OnlyInTraining(Block):
    """A branch that runs in training only, or in evaluation only."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind
        self.hidden = self.conv(self.channels, 4)
        self.layer = self.conv(4, self.channels)
        self.expects["hidden.weight"] = 4

    def forward(self, x: Tensor) -> Tensor:
        if self.training == (self.kind == "branch"):
            x = x + self.layer(F.relu(self.hidden(x)))
        if self.training and self.kind == "twice":
            x = x + self.layer(self.hidden(x))
        return x
