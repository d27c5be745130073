"""Activations, norms of each channel by itself, bare parameters and gates."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, WIDTHS, Block, Shape, block, one_of

ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda _: nn.ReLU(),
    "relu in place": lambda _: nn.ReLU(inplace=True),
    "relu6": lambda _: nn.ReLU6(),
    "silu": lambda _: nn.SiLU(),
    "hardswish": lambda _: nn.Hardswish(),
    "hardswish in place": lambda _: nn.Hardswish(inplace=True),
    "gelu": lambda _: nn.GELU(),
    "leaky relu": lambda _: nn.LeakyReLU(),
    "softplus": lambda _: nn.Softplus(),
    "prelu": nn.PReLU,
    "shared prelu": lambda _: nn.PReLU(),
    "dropout": lambda _: nn.Dropout(0.5),
    "identity": lambda _: nn.Identity(),
}


@block(LEAVES, kind=one_of(*sorted(ACTIVATIONS), "channel dropout"))
class Act(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.layer = ACTIVATIONS[kind](self.channels) if kind in ACTIVATIONS else self.of_dims("Dropout")(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, kind=one_of("relu", "x * sigmoid", "hardtanh", "tanh", "where", "clamp"))
class FunctionalAct(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "x * sigmoid":
            return x * torch.sigmoid(x)
        if self.kind == "where":
            return torch.where(x > 0, x, 0.1 * x)
        if self.kind == "clamp":
            return x.clamp(min=-1.0)
        return (getattr(torch, self.kind, None) or getattr(F, self.kind))(x)


@block(
    LEAVES,
    kind=one_of("BatchNorm", "InstanceNorm"),
    affine=FLAG,
    statistics=FLAG,
)
class Norm(Block):
    def __init__(self, shape: Shape, kind: str, affine: bool, statistics: bool) -> None:
        super().__init__(shape)
        kind = kind if math.prod(self.spatial) > 1 else "BatchNorm"
        self.layer = self.of_dims(kind)(self.channels, affine=affine, track_running_stats=statistics)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, bias=FLAG)
class ChannelLayerNorm(Block):
    """Statistics over the channels of each position. Masked channels are left out of them."""

    def __init__(self, shape: Shape, bias: bool) -> None:
        super().__init__(shape)
        self.layer = nn.LayerNorm(self.channels, bias=bias)
        if self.channels == 2:
            self.expects["in"] = "it already has its minimum width"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


@block(LEAVES)
class SpatialLayerNorm(Block):
    """Statistics over the positions of each channel by itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = nn.LayerNorm(self.spatial)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


PARAMETERS: dict[str, Callable[[Shape], Shape]] = {
    "[C, 1, 1]": lambda shape: (shape[0], *[1] * (len(shape) - 1)),
    "[1, C, 1, 1]": lambda shape: (1, shape[0], *[1] * (len(shape) - 1)),
    "[C]": lambda shape: (shape[0],),
    "[1, C, H, W]": lambda shape: (1, *shape),
    "[C, H, W]": lambda shape: shape,
    "[1]": lambda shape: (1,),
    "[]": lambda shape: (),
}


@block(LEAVES, kind=st.sampled_from(sorted(PARAMETERS)), does=one_of("scales", "adds", "gates"))
class BareParameter(Block):
    """Layer scale, a bias without a layer, a positional embedding."""

    def __init__(self, shape: Shape, kind: str, does: str) -> None:
        super().__init__(shape)
        self.value = nn.Parameter(torch.empty(PARAMETERS[kind](shape)))
        self.last = kind == "[C]"
        self.does = does
        if does == "gates" and "H" in kind:
            self.expects = {}  # the gate is computed from a parameter of several axes: may freeze

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1) if self.last else x
        if self.does == "adds":
            x = x + self.value
        elif self.does == "gates":
            x = x * torch.sigmoid(self.value)
        else:
            x = self.value * x
        return x.movedim(-1, 1) if self.last else x


@block(LEAVES, squeeze=one_of("mean", "pool", "flat"), hidden=st.integers(2, 4), gate=one_of("sigmoid", "hardsigmoid"))
class SqueezeExcite(Block):
    def __init__(self, shape: Shape, squeeze: str, hidden: int, gate: str) -> None:
        super().__init__(shape)
        self.squeeze, self.gate = squeeze, gate
        self.pool = self.of_dims("AdaptiveAvgPool")(1)
        flat = squeeze == "flat"
        self.reduce = nn.Linear(self.channels, hidden) if flat else self.conv(self.channels, hidden)
        self.expand = nn.Linear(hidden, self.channels) if flat else self.conv(hidden, self.channels)
        self.expects["reduce.weight"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        if self.squeeze == "mean":
            s = x.mean(list(range(2, x.dim())), keepdim=True)
        else:
            s = self.pool(x)
        if self.squeeze == "flat":
            s = s.view(x.shape[0], x.shape[1])
        s = getattr(F, self.gate)(self.expand(F.relu(self.reduce(s))))
        return x * s.view(*s.shape[:2], *[1] * self.dims)


@block(LEAVES, out=WIDTHS)
class SpatialGate(Block):
    """A gate of one channel over all channels."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.value = self.conv(self.channels, out)
        self.gate = self.conv(self.channels, 1, 3)
        self.expects.update({"value.weight": out, "gate.weight": "broadcasts"})

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


@block(LEAVES, out=st.integers(2, 5))
class Modulated(Block):
    """FiLM: scales and shifts of the channels are computed."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.value = self.conv(self.channels, out)
        self.film = nn.Linear(self.channels, 2 * out)
        self.expects.update({"value.weight": out, "film.weight": out})

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.film(x.flatten(2).mean(2)).chunk(2, 1)
        return self.value(x) * self.over_space(scale) + self.over_space(shift)


@block(LEAVES, out=st.integers(2, 5), hidden=st.integers(2, 4))
class SelectiveKernels(Block):
    """A softmax over branches, not over channels."""

    def __init__(self, shape: Shape, out: int, hidden: int) -> None:
        super().__init__(shape)
        self.first = self.conv(self.channels, out)
        self.second = self.conv(self.channels, out, 3)
        self.reduce, self.expand = nn.Linear(out, hidden), nn.Linear(hidden, 2 * out)
        self.expects.update({"first.weight": out, "second.weight": out, "reduce.weight": hidden})

    def forward(self, x: Tensor) -> Tensor:
        both = torch.stack([self.first(x), self.second(x)], 1)
        gates = self.expand(F.relu(self.reduce(both.sum(1).flatten(2).mean(2))))
        gates = gates.view(x.shape[0], 2, -1).softmax(1)
        return (both * self.over_space(gates)).sum(1)
