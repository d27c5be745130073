"""Small networks, one idea each, with the channel groups found by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph import ChannelGraph, trace_channels
from ecc.zoo.erfnet import Downsampler
from graph.layers import conv, image, named
from graph.special_nets import (
    AuxiliaryHead,
    DictOutput,
    HardCodedView,
    Shared,
    SpatialGate,
    SqueezeExcite,
    Squeezes,
    Tied,
    TransformerBlock,
    TwoInputs,
    UnknownOperator,
    ValueDependent,
    group_norm,
    group_norm_of_groups,
    instance_norm,
    layer_norm,
    softmax,
)

Inputs = Any
OUTPUT = "output of the network"


@dataclass(frozen=True)
class Case:
    """A network, its input, and what its graph must be."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    prunable: Mapping[str, int]
    """Prunable groups: name -> width."""
    frozen: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Frozen groups: name -> (width, words of the reason)."""
    notes: tuple[str, ...] = ()
    """Words of the notes, one for each note."""


def call(net: nn.Module, inputs: Inputs) -> Any:
    """Call a network the way `trace_channels` does."""
    if isinstance(inputs, Mapping):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, tuple) else net(inputs)


# ---------------------------------------------------------------- chains


def chain() -> nn.Sequential:
    return named(
        conv1=conv(3, 8), bn1=nn.BatchNorm2d(8), relu1=nn.ReLU(), conv2=conv(8, 6), relu2=nn.ReLU(), conv3=conv(6, 4, 1)
    )


def flattened_chain() -> nn.Sequential:
    """8 channels of 4 x 4 positions: one channel is 16 columns of fc1."""
    return named(
        conv=conv(3, 8),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(8 * 16, 10),
        relu2=nn.ReLU(),
        fc2=nn.Linear(10, 5),
    )


def conv1d_chain() -> nn.Sequential:
    return named(conv1=nn.Conv1d(3, 8, 3), bn=nn.BatchNorm1d(8), relu=nn.ReLU(), conv2=nn.Conv1d(8, 4, 3))


def conv3d_chain() -> nn.Sequential:
    return named(conv1=nn.Conv3d(2, 6, 3), bn=nn.BatchNorm3d(6), pool=nn.AvgPool3d(2), conv2=nn.Conv3d(6, 4, 1))


def transposed_chain() -> nn.Sequential:
    return named(
        conv1=conv(3, 8),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2),
        bn=nn.BatchNorm2d(6),
        relu=nn.ReLU(),
        head=nn.ConvTranspose2d(6, 4, 2, stride=2),
    )


def sequence_chain() -> nn.Sequential:
    return named(fc1=nn.Linear(5, 8), relu=nn.ReLU(), fc2=nn.Linear(8, 6), gelu=nn.GELU(), fc3=nn.Linear(6, 4))


# ---------------------------------------------------------------- additions


class Residual(nn.Module):
    """stem, then x + conv2(conv1(x)), then a head; `project` puts a 1 x 1 convolution on the shortcut."""

    def __init__(self, *, project: bool = False) -> None:
        super().__init__()
        width = 12 if project else 8
        self.stem = conv(3, 8)
        self.conv1 = conv(8, 6)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = conv(6, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = conv(8, width, 1) if project else nn.Identity()
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        x = F.relu(branch + self.shortcut(x))
        return self.head(x.mean((2, 3)))


class PreActivation(nn.Module):
    """The batch norm comes before the convolution, on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.bn1, self.conv1 = nn.BatchNorm2d(8), conv(8, 6)
        self.bn2, self.conv2 = nn.BatchNorm2d(6), conv(6, 8)
        self.head = conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return self.head(x)


class OptionA(nn.Module):
    """The shortcut pads 8 channels to 12: the 2 + 2 channels added to the padding are not prunable."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.conv = conv(8, 12)
        self.head = conv(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.conv(x) + F.pad(x, (0, 0, 0, 0, 2, 2))))


class LayerScale(nn.Module):
    """A parameter of shape (channels, 1, 1) times a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = conv(3, 8), conv(8, 8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))
        self.head = conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.scale * self.conv(x))


# ---------------------------------------------------------------- groups of channels in one layer


def depthwise(multiplier: int = 1) -> nn.Sequential:
    return named(
        conv1=conv(3, 8),
        relu1=nn.ReLU6(),
        dw=conv(8, 8 * multiplier, groups=8),
        bn=nn.BatchNorm2d(8 * multiplier),
        pw=conv(8 * multiplier, 6, 1),
        relu2=nn.ReLU6(),
        head=conv(6, 4, 1),
    )


def grouped() -> nn.Sequential:
    """4 convolution groups of 2 channels in and 3 out: a unit is a whole one of them."""
    return named(conv1=conv(3, 8), relu=nn.ReLU(), conv2=conv(8, 12, groups=4), head=conv(12, 4, 1))


class ChannelShuffle(nn.Module):
    """ShuffleNet's: (groups, n) becomes (n, groups) between two grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 12), conv(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, channels, height, width = x.shape
        x = x.view(batch, 3, channels // 3, height, width).transpose(1, 2).reshape(batch, channels, height, width)
        return self.head(x)


class PixelShuffle(nn.Module):
    """2 x 2 channels become one: a unit is four channels of the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shuffle, self.head = conv(3, 12), nn.PixelShuffle(2), conv(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.shuffle(self.stem(x)))


# ---------------------------------------------------------------- concatenation and splits


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = conv(3, 4), conv(3, 6), conv(10, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), F.relu(self.right(x))], dim=1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = conv(3, 6), conv(6, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 5, 2, stride=2), conv(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down(x))
        x = F.relu(self.middle(F.max_pool2d(skip, 2)))
        return self.head(torch.cat([self.up(x), skip], dim=1))


def erfnet_downsampler() -> nn.Sequential:
    """A convolution (6) beside the pooled input (4), with one batch norm over both."""
    return named(stem=conv(3, 4), down=Downsampler(4, 10), head=conv(10, 4, 1))


class ChunkAndCat(nn.Module):
    """Half of the channels go through a convolution: the halves must stay equal."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = conv(3, 8), conv(4, 4), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, worked = self.stem(x).chunk(2, dim=1)
        return self.head(torch.cat([kept, F.relu(self.branch(worked))], dim=1))


# ---------------------------------------------------------------- the catalogue

CASES: dict[str, Case] = {
    "chain": Case(chain, image(), {"conv1": 8, "conv2": 6}, {"conv3": (4, OUTPUT)}),
    "flattened chain": Case(flattened_chain, image(), {"conv": 8, "fc1": 10}, {"fc2": (5, OUTPUT)}),
    "conv1d": Case(conv1d_chain, lambda: torch.randn(2, 3, 12), {"conv1": 8}, {"conv2": (4, OUTPUT)}),
    "conv3d": Case(conv3d_chain, lambda: torch.randn(2, 2, 6, 6, 6), {"conv1": 6}, {"conv2": (4, OUTPUT)}),
    "transposed": Case(transposed_chain, image(size=4), {"conv1": 8, "up": 6}, {"head": (4, OUTPUT)}),
    "sequence": Case(sequence_chain, lambda: torch.randn(2, 7, 5), {"fc1": 8, "fc2": 6}, {"fc3": (4, OUTPUT)}),
    "residual": Case(Residual, image(), {"stem": 8, "conv1": 6}, {"head": (5, OUTPUT)}),
    "residual with projection": Case(
        lambda: Residual(project=True), image(), {"stem": 8, "conv1": 6, "conv2": 12}, {"head": (5, OUTPUT)}
    ),
    "pre-activation": Case(PreActivation, image(), {"stem": 8, "conv1": 6}, {"head": (4, OUTPUT)}),
    "option A": Case(
        OptionA,
        image(),
        {"stem": 8},
        {"conv": (4, "combines it with a tensor that is not prunable"), "head": (4, OUTPUT)},
    ),
    "layer scale": Case(LayerScale, image(), {"stem": 8}, {"head": (4, OUTPUT)}),
    "depthwise": Case(depthwise, image(), {"conv1": 8, "pw": 6}, {"head": (4, OUTPUT)}),
    "depthwise with multiplier": Case(lambda: depthwise(2), image(), {"conv1": 8, "pw": 6}, {"head": (4, OUTPUT)}),
    "grouped": Case(grouped, image(), {"conv1": 4}, {"head": (4, OUTPUT)}),
    "channel shuffle": Case(ChannelShuffle, image(), {"stem": 4}, {"head": (4, OUTPUT)}),
    "pixel shuffle": Case(PixelShuffle, image(), {"stem": 3}, {"head": (4, OUTPUT)}),
    "concat": Case(Concat, image(), {"left": 4, "right": 6}, {"head": (5, OUTPUT)}),
    "unet": Case(UNet, image(), {"down": 6, "middle": 8, "up": 5}, {"head": (4, OUTPUT)}),
    "erfnet downsampler": Case(erfnet_downsampler, image(), {"stem": 4, "down.conv": 6}, {"head": (4, OUTPUT)}),
    "chunk and cat": Case(ChunkAndCat, image(), {"stem": 4, "branch": 4}, {"head": (4, OUTPUT)}),
    "squeeze and excite": Case(SqueezeExcite, image(), {"stem": 8, "reduce": 3}, {"head": (4, OUTPUT)}),
    "spatial gate": Case(SpatialGate, image(), {"stem": 8}, {"gate": (1, "over other channels"), "head": (4, OUTPUT)}),
    "transformer block": Case(
        TransformerBlock,
        lambda: torch.randn(2, 6, 5),
        {"embed": 8, "value": 4, "fc1": 12},
        {
            "query": (4, "sums over it"),  # 4 units: the two heads are tied
            "key": (4, "sums over it"),
            "head": (3, OUTPUT),
        },
    ),
    "group norm": Case(
        group_norm, image(), {"conv2": 6}, {"conv1": (8, "`group_norm` in norm mixes channels"), "head": (4, OUTPUT)}
    ),
    "group norm of groups": Case(group_norm_of_groups, image(), {"conv1": 4, "conv2": 6}, {"head": (4, OUTPUT)}),
    "layer norm": Case(
        layer_norm,
        lambda: torch.randn(2, 5),
        {"fc1": 8, "fc2": 6},
        {"fc3": (4, OUTPUT)},
    ),
    "softmax": Case(
        softmax, image(), {"conv2": 6}, {"conv1": (8, "`softmax` in softmax mixes channels"), "head": (4, OUTPUT)}
    ),
    "instance norm": Case(instance_norm, image(), {"conv1": 8}, {"head": (4, OUTPUT)}),
    "shared module": Case(Shared, image(), {"stem": 8}, {"head": (4, OUTPUT)}),
    "tied weights": Case(Tied, lambda: torch.randn(2, 5), {"fc1": 8}, {"head": (4, OUTPUT)}),
    "two inputs": Case(
        TwoInputs,
        lambda: (torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)),
        {"left": 8},
        {"head": (4, OUTPUT)},
    ),
    "inputs by name": Case(
        TwoInputs,
        lambda: {"mask": torch.randn(2, 1, 8, 8), "x": torch.randn(2, 3, 8, 8)},
        {"left": 8},
        {"head": (4, OUTPUT)},
    ),
    "dict output": Case(DictOutput, image(), {"stem": 8}, {"features": (6, OUTPUT), "head": (4, OUTPUT)}),
    "unknown operator": Case(
        UnknownOperator,
        image(),
        {"body": 6},
        {"stem": (8, "operator `linalg_qr` is not supported"), "head": (4, OUTPUT)},
    ),
    "hard-coded view": Case(
        HardCodedView, image(), {"stem": 8}, {"body": (6, "has a hard-coded channel count"), "fc": (4, OUTPUT)}
    ),
    "squeeze": Case(Squeezes, image(), {"stem": 8}, {"fc": (4, OUTPUT)}),
    "value-dependent code": Case(
        ValueDependent, image(), {"conv1": 8, "conv2": 6}, {"head": (4, OUTPUT)}, notes=("real tensors",)
    ),
    "auxiliary head": Case(AuxiliaryHead, image(), {"stem": 8, "body": 6}, {"head": (4, OUTPUT), "aux": (4, OUTPUT)}),
}


def traced(name: str, **settings: Any) -> tuple[nn.Module, Inputs, ChannelGraph]:
    """A new network of a case, its input and its graph, by default without verification."""
    case = CASES[name]
    net, inputs = case.build(), case.inputs()
    return net, inputs, trace_channels(net, inputs, **{"verify": False, **settings})


@cache
def graph_of(name: str) -> ChannelGraph:
    """The graph of a case, traced once."""
    return traced(name)[2]
