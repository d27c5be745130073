"""What stands at the end of a network."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import FLAG, HEADS, Block, Shape, block, one_of


@block(HEADS, way=one_of("mean", "pool", "flatten", "view", "literal view"), hidden=st.integers(0, 5), norm=FLAG)
class Classifier(Block):
    def __init__(self, shape: Shape, way: str, hidden: int, norm: bool) -> None:
        super().__init__(shape)
        self.way = way
        self.pool = self.of_dims("AdaptiveAvgPool")(1)
        features = self.channels if way in ("mean", "pool") else math.prod(shape)
        self.features = features
        self.norm = nn.BatchNorm1d(features) if norm else nn.Identity()
        layers: list[nn.Module] = [nn.Linear(features, 3)]
        if hidden > 1:
            layers = [nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)]
            self.expects["layers.0.weight"] = hidden
        self.layers = nn.Sequential(*layers)
        self.expects[f"layers.{len(layers) - 1}.weight"] = "output"
        if way == "literal view":
            self.expects["in"] = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "mean":
            x = x.mean(list(range(2, x.dim())))
        elif self.way == "pool":
            x = torch.flatten(self.pool(x), 1)
        elif self.way == "flatten":
            x = x.flatten(1)
        elif self.way == "view":
            x = x.reshape(x.shape[0], -1)
        else:
            x = x.reshape(-1, self.features)
        return self.layers(self.norm(x))


@block(HEADS, transposed=FLAG)
class DensePrediction(Block):
    def __init__(self, shape: Shape, transposed: bool) -> None:
        super().__init__(shape)
        if transposed:
            self.layer = self.of_dims("ConvTranspose")(self.channels, 3, 2, stride=2)
        else:
            self.layer = self.conv(self.channels, 3)
        self.expects[f"layer.weight:{int(transposed)}"] = "output"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(HEADS, kind=one_of("dict", "tuple", "in training"))
class TwoHeads(Block):
    """Two results, or an auxiliary one in training."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind
        self.main = self.conv(self.channels, 3)
        self.hidden = self.conv(self.channels, 4)
        self.more = self.conv(4, 2)
        self.expects["hidden.weight"] = 4

    def forward(self, x: Tensor) -> Any:
        main = self.main(x)
        if self.kind == "in training" and not self.training:
            return main
        more = self.more(F.relu(self.hidden(x)))
        return {"main": main, "more": [more]} if self.kind == "dict" else (main, more)
