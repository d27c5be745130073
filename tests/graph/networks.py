"""Random small networks: a drawn, printable plan, and the module that is built from it.

A plan is a list of steps, and a step is a `Block` with its options. Blocks adapt to the feature map they get (a
grouped convolution takes a number of groups that divides its channels), so any list of steps is a network, and
hypothesis can take steps away until the smallest failing plan is left.

Each block also says what a tracer must find in it: how many units of which parameters can be cut, or why none
can. A tracer that freezes everything is exact, and fails there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

Shape = tuple[int, ...]
"""Channels and spatial sizes of a feature map, without the batch."""

BATCH = 2
WIDTHS = st.integers(2, 8)
FLAG = st.booleans()


def one_of(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


# --- plans ------------------------------------------------------------------------------------------------------


class Printed:
    """Hypothesis shows it as its `repr`, not field by field."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@dataclass(frozen=True)
class Step(Printed):
    """A block of a plan: its class by name, and the options it is built with."""

    kind: str
    options: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    def build(self, shape: Shape) -> Block:
        return BLOCKS[self.kind](shape, **self.options)


@dataclass(frozen=True)
class Plan(Printed):
    """Everything that decides a network: print it, and you can build it again."""

    image: Shape
    steps: tuple[Step, ...]
    head: Step
    inputs: str = "one"
    outputs: str = "tensor"
    seed: int = 0

    def build(self) -> Network:
        return Network(self)


class Network(nn.Module):
    """The network of a plan, with weights that hide nothing."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        shape = plan.image
        self.blocks = nn.ModuleList()
        self.other = plan.steps[0].build(shape) if plan.inputs != "one" else None
        for number, step in enumerate(plan.steps):
            block = step.build(shape)
            self.blocks.append(block)
            shape = shape_after(block, shape)
            if number == 0 and "cat" in plan.inputs:
                shape = (2 * shape[0], *shape[1:])
        self.head = plan.head.build(shape)
        randomise_(self, plan.seed)

    def forward(self, image: Tensor, other: Tensor | None = None) -> Any:
        x = self.blocks[0](image)
        if self.other is not None and other is not None:
            x = self._merged(x, self.other(other))
        for block in list(self.blocks)[1:]:
            x = block(x)
        result = self.head(x)
        if self.plan.outputs == "tuple":
            return result, x.amax((-1, -2) if x.dim() > 3 else -1)
        if self.plan.outputs == "dict":
            return {"result": result, "more": [x.flatten(2).sum(2)], "nothing": None}
        return result

    def _merged(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.cat([other, x], 1) if "cat" in self.plan.inputs else x + other

    def example(self) -> Any:
        generator = torch.Generator().manual_seed(self.plan.seed + 1)
        image, other = torch.randn(2, BATCH, *self.plan.image, generator=generator)
        if self.plan.inputs == "one":
            return image
        return {"image": image, "other": other} if "by name" in self.plan.inputs else (image, other)

    @property
    def is_plain(self) -> bool:
        """Whether all its products are convolutions and linear layers, whose work torch counts as we do."""
        return all(block.is_plain for block in self.modules() if isinstance(block, Block))

    def __repr__(self) -> str:
        return repr(self.plan)


def shape_after(block: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        return tuple(block.eval()(torch.randn(BATCH, *shape)).shape[1:])


@torch.no_grad()
def randomise_(net: nn.Module, seed: int) -> None:
    """Weights, biases, scales and statistics of which none is zero, one, or equal to its neighbour."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            tensor.copy_(0.5 + noise.abs())
        elif tensor.dim() < 2:
            tensor.copy_(noise.sign() * (0.4 + 0.5 * noise.abs()))
        else:
            tensor.copy_(noise * 1.2 / math.sqrt(tensor[0].numel()))


# --- blocks -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A piece of a network, from feature map to feature map.

    `expects` says what must be found: for a parameter of the block (its axis 0, or `name:axis`), or for the
    channels that come in (`in`), the number of units that can be cut, or a word of the reason why none can.
    """

    options: ClassVar[dict[str, SearchStrategy[Any]]] = {}
    is_plain: bool = True

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels, self.spatial = shape[0], shape[1:]
        self.dims = len(self.spatial)
        self.expects: dict[str, int | str] = {"in": self.channels}

    def of_dims(self, name: str) -> Any:
        """`nn.Conv2d` for `Conv` in a network over images, `nn.Conv1d` over sequences ..."""
        return getattr(nn, f"{name}{self.dims}d")

    def conv(self, incoming: int, outgoing: int, kernel: int = 1, dilation: int = 1, **more: Any) -> nn.Module:
        """A convolution that keeps the spatial size."""
        padding = dilation * (kernel // 2)
        return self.of_dims("Conv")(incoming, outgoing, kernel, padding=padding, dilation=dilation, **more)  # type: ignore[no-any-return]

    def over_space(self, vector: Tensor) -> Tensor:
        """(..., C) as (..., C, 1, 1)."""
        return vector.view(*vector.shape, *[1] * self.dims)


BLOCKS: dict[str, type[Block]] = {}
LEAVES: list[str] = []
"""Blocks that keep the spatial size and may stand inside others."""
LEAKS: list[str] = []
"""Blocks that freeze the channels that reach them."""
HARD: list[str] = []
"""Blocks whose code treats channels by their number."""
HEADS: list[str] = []


def block(*lists: list[str], **options: SearchStrategy[Any]) -> Callable[[type[Block]], type[Block]]:
    def register(cls: type[Block]) -> type[Block]:
        cls.options = options
        BLOCKS[cls.__name__] = cls
        for names in lists:
            names.append(cls.__name__)
        return cls

    return register


def steps_of(kinds: Sequence[str]) -> SearchStrategy[Step]:
    return st.sampled_from(kinds).flatmap(step_of)


def step_of(kind: str) -> SearchStrategy[Step]:
    return st.fixed_dictionaries(BLOCKS[kind].options).map(lambda options: Step(kind, options))


LEAF = st.deferred(lambda: steps_of(LEAVES))
BODY = st.lists(LEAF, min_size=1, max_size=3)


class Body(nn.Sequential):
    """The steps inside another block."""

    def __init__(self, shape: Shape, steps: Sequence[Step], out: int | None = None) -> None:
        super().__init__()
        for number, step in enumerate(steps):
            inner = step.build(shape)
            self.add_module(str(number), inner)
            shape = shape_after(inner, shape)
        if out is not None and shape[0] != out:
            self.add_module("match", Conv(shape, out=out, kernel=1, dilation=1, bias=True))
            shape = (out, *shape[1:])
        self.out = shape[0]


def divisor(number: int, wanted: int) -> int:
    """The wanted number if it divides the other one, else the smallest larger than 1 that does."""
    return wanted if number % wanted == 0 else next(d for d in range(2, number + 1) if number % d == 0)


# --- blocks: convolutions ---------------------------------------------------------------------------------------


@block(LEAVES, out=WIDTHS, kernel=one_of(1, 3), dilation=one_of(1, 2), bias=FLAG)
class Conv(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, dilation: int, bias: bool) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, out, kernel, dilation, bias=bias)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS, kernel=one_of(1, 3), act=one_of("relu", "silu"))
class ConvNormAct(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, act: str) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, out, kernel, bias=False)
        self.norm = self.of_dims("BatchNorm")(out)
        self.act = getattr(F, act)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.layer(x)), inplace=True)


@block(out=WIDTHS, kernel=one_of(2, 3), stride=one_of(1, 2), padding=one_of(0, 1), dilation=one_of(1, 2))
class ValidConv(Block):
    def __init__(self, shape: Shape, out: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
        super().__init__(shape)
        if min(self.spatial) < 6:
            kernel, stride, padding, dilation = 1, 1, 0, 1
        self.layer = self.of_dims("Conv")(
            self.channels, out, kernel, stride=stride, padding=padding, dilation=min(dilation, kernel - 1) or 1
        )
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS, bias=FLAG)
class FunctionalConv(Block):
    def __init__(self, shape: Shape, out: int, bias: bool) -> None:
        super().__init__(shape)
        self.kernel = nn.Parameter(torch.empty(out, self.channels, *[1] * self.dims))
        self.shift = nn.Parameter(torch.empty(out)) if bias else None
        self.expects["kernel"] = out

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, f"conv{self.dims}d")(x, self.kernel, self.shift)


@block(LEAVES, source=one_of("parameter", "buffer"))
class FunctionalDepthwise(Block):
    """As many groups as there are channels, whatever their number; a buffer as in anti-aliased pooling."""

    def __init__(self, shape: Shape, source: str) -> None:
        super().__init__(shape)
        kernel = torch.empty(self.channels, 1, *[3] * self.dims)
        if source == "buffer":
            self.register_buffer("kernel", kernel)
        else:
            self.kernel = nn.Parameter(kernel)

    def forward(self, x: Tensor) -> Tensor:
        return getattr(F, f"conv{self.dims}d")(x, self.kernel, padding=1, groups=x.shape[1])


@block(LEAVES, multiplier=one_of(1, 2), kernel=one_of(1, 3), bias=FLAG)
class Depthwise(Block):
    def __init__(self, shape: Shape, multiplier: int, kernel: int, bias: bool) -> None:
        super().__init__(shape)
        c = self.channels
        self.layer = self.conv(c, c * multiplier, kernel, groups=c, bias=bias)
        self.expects["layer.weight"] = c

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, groups=one_of(2, 3, 4), out=one_of(1, 2, 3), kernel=one_of(1, 3), bias=FLAG)
class Grouped(Block):
    def __init__(self, shape: Shape, groups: int, out: int, kernel: int, bias: bool) -> None:
        super().__init__(shape)
        groups = divisor(self.channels, groups)
        self.layer = self.conv(self.channels, out * groups, kernel, groups=groups, bias=bias)
        self.expects.update({"in": groups, "layer.weight": groups})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(out=one_of(1, 2, 3), groups=one_of(1, 2, 3), kernel=one_of(2, 3), stride=one_of(1, 2), bias=FLAG)
class Transposed(Block):
    def __init__(self, shape: Shape, out: int, groups: int, kernel: int, stride: int, bias: bool) -> None:
        super().__init__(shape)
        if groups > 1:
            groups = divisor(self.channels, groups)
        if max(self.spatial) > 8:
            stride = 1
        out = max(out * groups, 2)
        self.layer = self.of_dims("ConvTranspose")(
            self.channels, out, kernel, stride=stride, padding=(kernel - 1) // 2, groups=groups, bias=bias
        )
        self.expects.update({"in": groups} if groups > 1 else {"layer.weight:1": out})

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block(LEAVES, out=WIDTHS)
class ChannelLinear(Block):
    """A linear layer on the last axis, as ConvNeXt has it."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, out)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


@block(LEAVES, by=one_of("matmul", "transposed weight"))
class BareLinear(Block):
    """A product with a parameter that belongs to no layer."""

    def __init__(self, shape: Shape, by: str) -> None:
        super().__init__(shape)
        self.by = by
        self.matrix = nn.Parameter(torch.empty(self.channels, 4))
        self.expects["matrix:1"] = 4

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(1, -1)
        if self.by == "matmul":
            return (rows @ self.matrix).movedim(-1, 1)
        return F.linear(rows, self.matrix.t()).movedim(-1, 1)


@block(LEAVES, way=one_of("linear", "convolution"), hidden=st.integers(2, 5))
class TiedAutoencoder(Block):
    """One weight that reads on the way in and writes on the way out."""

    def __init__(self, shape: Shape, way: str, hidden: int) -> None:
        super().__init__(shape)
        self.way = way
        ones = [1] * self.dims if way == "convolution" else []
        self.kernel = nn.Parameter(torch.empty(hidden, self.channels, *ones))
        self.expects["kernel"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "linear":
            hidden = F.relu(F.linear(x.movedim(1, -1), self.kernel))
            return F.linear(hidden, self.kernel.t()).movedim(-1, 1)
        hidden = F.relu(getattr(F, f"conv{self.dims}d")(x, self.kernel))
        return getattr(F, f"conv_transpose{self.dims}d")(hidden, self.kernel)


@block(out=st.integers(2, 4), written=FLAG)
class Decoder(Block):
    """A linear layer whose features are folded into channels and positions."""

    def __init__(self, shape: Shape, out: int, written: bool) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, out * 2**self.dims)
        self.count = out if written else -1
        self.expects = {"layer.weight": ""} if written else {**self.expects, "layer.weight": out}

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(x.flatten(2).mean(2))
        return features.view(x.shape[0], self.count, *[2] * self.dims)


@block(LEAVES)
class Windows(Block):
    """Swin's windows: a linear layer inside tiles of two by two."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = nn.Linear(self.channels, self.channels)
        self.tile = 2 if all(size % 2 == 0 for size in self.spatial) else 1
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        n, c, *spatial = x.shape
        rows = x.movedim(1, -1)
        tiled = [part for size in spatial for part in (size // self.tile, self.tile)]
        order = [0, *range(1, 2 * self.dims, 2), *range(2, 2 * self.dims + 1, 2), 2 * self.dims + 1]
        tiles = rows.reshape(n, *tiled, c).permute(order)
        made = self.layer(tiles.reshape(-1, self.tile**self.dims, c)).view(tiles.shape)
        back = [order.index(axis) for axis in range(len(order))]
        return (rows + made.permute(back).reshape(rows.shape)).movedim(-1, 1)


@block(LEAVES)
class TokenMixing(Block):
    """A linear layer along the positions: the channels pass beside it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        positions = math.prod(self.spatial)
        self.layer = nn.Linear(positions, positions)
        self.expects["layer.weight"] = "another axis"

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2)).view(x.shape)


@block(LEAVES, between=one_of("relu", "norm", "nothing"))
class UsedTwice(Block):
    def __init__(self, shape: Shape, between: str) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, self.channels, 3)
        self.norm = self.of_dims("BatchNorm")(self.channels)
        self.between = between
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.between != "nothing":
            x = self.norm(x) if self.between == "norm" else F.relu(x)
        return self.layer(x)


@block(LEAVES, out=WIDTHS, chained=FLAG)
class TiedWeights(Block):
    """Two layers with one weight and biases of their own."""

    def __init__(self, shape: Shape, out: int, chained: bool) -> None:
        super().__init__(shape)
        out = self.channels if chained else out
        self.first = self.conv(self.channels, out)
        self.second = self.conv(self.channels, out)
        self.second.weight = self.first.weight
        self.chained = chained
        self.expects["first.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        if self.chained:
            return self.second(F.relu(self.first(x)))
        return torch.cat([self.first(x), self.second(-x)], 1)


# --- blocks: elementwise ----------------------------------------------------------------------------------------

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
        return getattr(torch, self.kind, getattr(F, self.kind, None))(x)


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


# --- blocks: sums -----------------------------------------------------------------------------------------------


@block(body=BODY, before=one_of("nothing", "relu in place", "norm", "relu"), assigned=FLAG)
class Residual(Block):
    """x + body(x), with a projection where the widths differ, also behind a shared pre-activation."""

    def __init__(self, shape: Shape, body: Sequence[Step], before: str, assigned: bool) -> None:
        super().__init__(shape)
        self.before = {"norm": self.of_dims("BatchNorm"), "nothing": lambda _: nn.Identity()}.get(
            before, ACTIVATIONS.get(before)
        )(self.channels)
        self.body = Body(shape, body)
        out = self.body.out
        self.project = nn.Identity() if out == self.channels else self.conv(self.channels, out)
        self.assigned = assigned
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.before(x))
        if self.assigned:
            y += self.project(x)
            return y
        return self.project(x) + y


@block(out=WIDTHS, stride=one_of(1, 2), shortcut=one_of("projection", "identity", "zero padding"), written=FLAG)
class BasicBlock(Block):
    """ResNet's block; option A pads the shortcut with zero channels on both sides, or at the end."""

    def __init__(self, shape: Shape, out: int, stride: int, shortcut: str, written: bool) -> None:
        super().__init__(shape)
        c = self.channels
        stride = stride if min(self.spatial) >= 4 else 1
        if shortcut == "identity":
            out, stride = c, 1
        if shortcut == "zero padding":
            out = max(out, c)
        self.stride, self.shortcut = stride, shortcut
        self.padding = ((out - c) // 2, out - c - (out - c) // 2) if written else (0, out - c)
        self.first = self.of_dims("Conv")(c, 4, 3, stride=stride, padding=1, bias=False)
        self.first_norm = self.of_dims("BatchNorm")(4)
        self.second = self.conv(4, out, 3, bias=False)
        self.second_norm = self.of_dims("BatchNorm")(out)
        self.project = self.of_dims("Conv")(c, out, 1, stride=stride) if shortcut == "projection" else None
        self.expects.update({"first.weight": 4, "second.weight": out if self.project is not None else c})

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        if self.project is not None:
            x = self.project(x)
        elif self.shortcut == "zero padding":
            x = x[(slice(None), slice(None), *[slice(None, None, self.stride)] * self.dims)]
            x = F.pad(x, (0, 0) * self.dims + self.padding)
        return F.relu(x + y)


@block(LEAVES)
class InPlaceSum(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, self.channels)
        self.expects["layer.weight"] = self.channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y += x
        y *= 0.7
        return y.relu_()


@block(LEAVES, way=one_of("sum", "amax", "mean"))
class Stacked(Block):
    """Branches stacked on a new axis and summed over it."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.first = self.conv(self.channels, 5)
        self.second = self.conv(self.channels, 5, 3)
        self.way = way
        self.expects["first.weight"] = self.expects["second.weight"] = 5

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch.stack([self.first(x), self.second(x)], 1), self.way)(1)


@block(LEAVES, out=WIDTHS)
class Buffer(Block):
    """Branches written side by side into one new tensor."""

    def __init__(self, shape: Shape, out: int) -> None:
        super().__init__(shape)
        self.first = self.conv(self.channels, out)
        self.second = self.conv(self.channels, 3)
        self.expects.update({"first.weight": "copy", "second.weight": "copy"})

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        both = x.new_zeros(x.shape[0], first.shape[1] + second.shape[1], *x.shape[2:])
        both[:, : first.shape[1]] = first
        both[:, first.shape[1] :] = second
        return both


# --- blocks: concatenation, parts and shuffles ------------------------------------------------------------------


@block(body=BODY)
class DenseCat(Block):
    """DenseNet: what comes in beside what was made of it."""

    def __init__(self, shape: Shape, body: Sequence[Step]) -> None:
        super().__init__(shape)
        self.body = Body(shape, body)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


@block(bodies=st.lists(BODY, min_size=1, max_size=3), pool=FLAG)
class Inception(Block):
    def __init__(self, shape: Shape, bodies: Sequence[Sequence[Step]], pool: bool) -> None:
        super().__init__(shape)
        self.bodies = nn.ModuleList(Body(shape, body) for body in bodies)
        self.pooled = self.of_dims("MaxPool")(3, stride=1, padding=1) if pool else None
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        branches = [body(x) for body in self.bodies]
        if self.pooled is not None:
            branches.insert(0, self.pooled(x))
        return torch.cat(branches, 1)


@block(body=BODY, up=one_of("nearest", "transposed"), merge=one_of("cat", "add"))
class UNet(Block):
    """Down, body, up again, and together with what came in."""

    def __init__(self, shape: Shape, body: Sequence[Step], up: str, merge: str) -> None:
        super().__init__(shape)
        c = self.channels
        self.down = self.of_dims("Conv")(c, 4, 3, stride=2, padding=1)
        self.body = Body(shape_after(self.down, shape), body)
        inside = self.body.out
        self.up = self.of_dims("ConvTranspose")(inside, inside, 2, stride=2) if up == "transposed" else None
        self.match = self.conv(inside, c) if merge == "add" else None
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.down(x))
        if self.up is not None:
            y = self.up(y)
        y = F.interpolate(y, size=x.shape[2:], mode="nearest")
        return x + self.match(y) if self.match is not None else torch.cat([y, x], 1)


@block(out=WIDTHS, norm=FLAG)
class ErfDown(Block):
    """ERFNet's downsampler: a convolution beside a pooling of what comes in, be it the image."""

    def __init__(self, shape: Shape, out: int, norm: bool) -> None:
        super().__init__(shape)
        stride = 2 if min(self.spatial) >= 4 else 1
        self.layer = self.of_dims("Conv")(self.channels, out, 3, stride=stride, padding=1)
        self.pool = self.of_dims("MaxPool")(stride, stride=stride, ceil_mode=True)
        self.norm = self.of_dims("BatchNorm")(out + self.channels) if norm else nn.Identity()
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(torch.cat([self.layer(x), self.pool(x)], 1)))


@block(LEAVES, way=one_of("chunk", "split", "shape", "literal", "sizes"), out=WIDTHS)
class Halves(Block):
    """CSP: a layer on one half of the channels, the other half beside it."""

    def __init__(self, shape: Shape, way: str, out: int) -> None:
        super().__init__(shape)
        self.way, self.half = way, max(self.channels // 2, 1)
        first = (self.channels + 1) // 2 if way == "chunk" else self.half
        self.layer = self.conv(first, out)
        self.expects = {"in": self.half, "layer.weight": out}
        if way in ("literal", "sizes", "split") or self.channels % 2:
            self.expects = {}  # sizes that are written in the code, or unequal parts: may freeze

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "chunk":
            first, second = x.chunk(2, 1)
        elif self.way == "split":
            first, *rest = x.split(self.half, 1)
            second = torch.cat(rest, 1)
        elif self.way == "sizes":
            first, second = x.split([self.half, self.channels - self.half], 1)
        elif self.way == "shape":
            first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        else:
            first, second = x[:, : self.half], x[:, self.half :]
        return torch.cat([second, F.relu(self.layer(first))], 1)


@block(LEAVES, by_hand=FLAG)
class GatedHalves(Block):
    """A gated linear unit: one half of the channels gates the other."""

    def __init__(self, shape: Shape, by_hand: bool) -> None:
        super().__init__(shape)
        self.by_hand = by_hand
        self.layer = self.conv(self.channels, 6)
        if by_hand:
            self.expects["layer.weight"] = 3

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.glu(self.layer(x), 1)
        value, gate = self.layer(x).chunk(2, dim=1)
        return value * torch.sigmoid(gate)


@block(LEAVES, parts=one_of(2, 3), written=FLAG)
class Hierarchy(Block):
    """Res2Net: equal parts of the channels, each with a layer that also sees the part before."""

    def __init__(self, shape: Shape, parts: int, written: bool) -> None:
        super().__init__(shape)
        self.part = self.channels // divisor(self.channels, parts)
        self.written = written
        layers = [self.conv(self.part, self.part) for _ in range(self.channels // self.part - 1)]
        self.layers = nn.ModuleList(layers)
        self.expects = {} if written else {"in": self.part}

    def forward(self, x: Tensor) -> Tensor:
        size = self.part if self.written else x.shape[1] // (len(self.layers) + 1)
        first, *rest = x.split(size, 1)
        made = [first]
        for layer, part in zip(self.layers, rest, strict=False):
            made.append(F.relu(layer(part + made[-1])))
        return torch.cat(made, 1)


@block(LEAVES, way=one_of("module", "view", "literal view"), groups=one_of(2, 3))
class Shuffle(Block):
    def __init__(self, shape: Shape, way: str, groups: int) -> None:
        super().__init__(shape)
        self.groups = divisor(self.channels, groups)
        self.way = way
        self.module = nn.ChannelShuffle(self.groups)
        self.expects["in"] = "" if way == "literal view" else self.channels // self.groups

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "module":
            return self.module(x)
        n, c = x.shape[:2]
        c = self.channels if self.way == "literal view" else c
        x = x.view(n, self.groups, c // self.groups, *x.shape[2:])
        return x.transpose(1, 2).reshape(n, c, *x.shape[3:])


@block(way=one_of("module", "functional", "view", "view with -1"), out=one_of(2, 3))
class PixelShuffle(Block):
    def __init__(self, shape: Shape, way: str, out: int) -> None:
        super().__init__(shape)
        self.way = way if self.dims == 2 else "view"
        self.layer = self.conv(self.channels, out * 2**self.dims)
        self.module = nn.PixelShuffle(2)
        self.expects["layer.weight"] = out

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.way == "module":
            return self.module(x)
        if self.way == "functional":
            return F.pixel_shuffle(x, 2)
        n, c, *spatial = x.shape
        count = -1 if "-1" in self.way else c // 2**self.dims
        x = x.view(n, count, *[2] * self.dims, *spatial)
        # (n, c, 2, 2, h, w) -> (n, c, h, 2, w, 2)
        order = [0, 1] + [axis for d in range(self.dims) for axis in (2 + self.dims + d, 2 + d)]
        return x.permute(order).reshape(n, -1, *[2 * size for size in spatial])


@block(way=one_of("module", "view", "slices"))
class PixelUnshuffle(Block):
    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way if self.dims == 2 else "view"
        self.module = nn.PixelUnshuffle(2)
        self.fits = min(self.spatial) >= 4 and self.channels <= 16

    def forward(self, x: Tensor) -> Tensor:
        if not self.fits:
            return x
        x = x[(..., *[slice(0, size - size % 2) for size in x.shape[2:]])]
        n, c, *spatial = x.shape
        if self.way == "module":
            return self.module(x)
        if self.way == "slices":  # Swin's patch merging, YOLO's focus layer
            corners = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
            return torch.cat(corners, 1)
        x = x.reshape(n, c, *[part for size in spatial for part in (size // 2, 2)])
        order = [0, 1, *range(3, x.dim(), 2), *range(2, x.dim(), 2)]
        return x.permute(order).reshape(n, c * 2**self.dims, *[size // 2 for size in spatial])


@block(LEAVES, way=one_of("flip", "repeat", "repeat_interleave", "cat with itself"))
class Rearranged(Block):
    """Channels in another order or several times, at any width."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "flip":
            return x.flip(1)
        if self.way == "repeat":
            return x.repeat(1, 2, *[1] * self.dims)
        if self.way == "repeat_interleave":
            return x.repeat_interleave(2, 1)
        return torch.cat([x, F.relu(x)], 1)


@block(LEAVES)
class Maxout(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 6)
        self.expects["layer.weight"] = 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x.view(x.shape[0], -1, 2, *x.shape[2:]).amax(2)


# --- blocks: space ----------------------------------------------------------------------------------------------


@block(kind=one_of("max", "avg", "adaptive", "stride"))
class Pool(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        size = 2 if min(self.spatial) >= 4 else 1
        self.kind, self.size = kind, size
        self.layer = {
            "max": self.of_dims("MaxPool")(size),
            "avg": self.of_dims("AvgPool")(size),
            "adaptive": self.of_dims("AdaptiveAvgPool")(max(min(self.spatial) // size, 1)),
        }.get(kind)

    def forward(self, x: Tensor) -> Tensor:
        if self.layer is None:
            return x[(..., *[slice(None, None, self.size)] * self.dims)]
        return self.layer(x)


@block(mode=one_of("nearest", "linear", "repeat"))
class Upsample(Block):
    def __init__(self, shape: Shape, mode: str) -> None:
        super().__init__(shape)
        self.mode = mode if max(self.spatial) <= 8 else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "none":
            return x
        if self.mode == "repeat":
            return x.repeat_interleave(2, -1).repeat_interleave(2, -2 if self.dims > 1 else -1)
        mode = self.mode if self.mode == "nearest" else ["linear", "bilinear", "trilinear"][self.dims - 1]
        return F.interpolate(x, scale_factor=2, mode=mode)


@block(LEAVES, mode=one_of("constant", "reflect", "replicate", "circular"), kernel=one_of(2, 3))
class Padded(Block):
    def __init__(self, shape: Shape, mode: str, kernel: int) -> None:
        super().__init__(shape)
        mode = mode if min(self.spatial) > kernel // 2 else "constant"
        self.before = [kernel // 2, (kernel - 1) // 2] * self.dims
        self.mode = mode
        self.layer = self.of_dims("Conv")(self.channels, 4, kernel)
        self.expects["layer.weight"] = 4
        if mode == "circular":
            del self.expects["in"]  # torch writes it piece by piece into a new tensor: may freeze

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, self.before, mode=self.mode))


# --- blocks: control flow ---------------------------------------------------------------------------------------


@block(LEAVES, limit=one_of(1, 5))
class BranchOnSize(Block):
    def __init__(self, shape: Shape, limit: int) -> None:
        super().__init__(shape)
        self.limit = limit
        self.small = self.conv(self.channels, 4)
        self.large = self.conv(self.channels, 4, 3)
        self.expects["large.weight" if self.spatial[-1] > limit else "small.weight"] = 4

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > self.limit:
            return self.large(x)
        return self.small(x)


@block(LEAKS)
class BranchOnValue(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4)
        self.expects.update({"in": "sum", "layer.weight": 4})

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


# --- blocks: transformers ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, style: str) -> None:
        super().__init__()
        self.heads, self.style = heads, style
        self.scale = (width // heads) ** -0.5
        if style == "module":
            self.whole = nn.MultiheadAttention(width, heads, batch_first=True)
            return
        if "fused" in style:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, c = x.shape
        if self.style == "module":
            return self.whole(x, x, x, need_weights=False)[0]
        if "fused" in self.style:
            qkv = self.qkv(x).reshape(n, length, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
        else:
            q, k, v = (layer(x).view(n, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if "sdpa" in self.style:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(n, length, -1))


@block(
    LEAVES,
    style=one_of("fused", "fused sdpa", "separate", "separate sdpa", "module"),
    heads=one_of(1, 2),
    hidden=st.integers(2, 6),
    norm=FLAG,
    scale=FLAG,
    position=FLAG,
)
class Transformer(Block):
    """A block of a vision transformer, between flattening and folding back."""

    is_plain = False

    def __init__(
        self, shape: Shape, style: str, heads: int, hidden: int, norm: bool, scale: bool, position: bool
    ) -> None:
        super().__init__(shape)
        width = 4
        self.patches = self.conv(self.channels, width)
        self.place = nn.Parameter(torch.empty(1, math.prod(self.spatial), width)) if position else None
        self.norm1 = nn.LayerNorm(width) if norm else nn.Identity()
        self.attention = Attention(width, heads, style)
        self.norm2 = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.empty(width)) if scale else None
        self.expects["up.weight"] = hidden
        if norm:
            self.expects["patches.weight"] = "norm"

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.place is not None:
            tokens = tokens + self.place
        tokens = tokens + self.attention(self.norm1(tokens))
        made = self.down(F.gelu(self.up(self.norm2(tokens))))
        tokens = tokens + (made if self.scale is None else self.scale * made)
        return tokens.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])


# --- blocks: leaks ----------------------------------------------------------------------------------------------

LEAKING: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "softmax": ("softmax", lambda x: x.softmax(1)),
    "log softmax": ("log_softmax", lambda x: F.log_softmax(x, 1)),
    "mean": ("mean", lambda x: x - x.mean(1, keepdim=True)),
    "largest": ("max", lambda x: x * x.max(1, keepdim=True).values),
    "norm": ("blocks.1", lambda x: F.normalize(x, dim=1)),
    "cumsum": ("cumsum", lambda x: x.cumsum(1)),
    "sort": ("sort", lambda x: x.sort(1).values),
    "whole sum": ("sum", lambda x: x / (1 + x.abs().sum())),
    "fft": ("fft", lambda x: torch.fft.fft(x, dim=1).real),
    "cdist": ("dist", lambda x: torch.cdist(x.flatten(2).mT, x.flatten(2).mT)),
    "gram": ("matmul", lambda x: x.flatten(2).mT @ x.flatten(2)),
    "local response": ("blocks.1", lambda x: F.local_response_norm(x, 3)),
}


@block(LEAKS, kind=st.sampled_from(sorted(LEAKING)))
class Leak(Block):
    """An operator in which a dead channel would still be heard."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        word, self.does = LEAKING[kind]
        self.expects["in"] = word

    def forward(self, x: Tensor) -> Tensor:
        y = self.does(x)
        return y if y.shape == x.shape else x * y.mean((1, 2)).view(-1, 1, *[1] * self.dims)


@block(LEAKS, kind=one_of("layer", "layer over all", "group"))
class LeakyNorm(Block):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__(shape)
        self.kind = kind
        if kind == "group":
            self.layer = nn.GroupNorm(divisor(self.channels, 2), self.channels)
        else:
            self.layer = nn.LayerNorm(self.channels if kind == "layer" else shape)
        self.expects["in"] = "group_norm" if kind == "group" else "layer_norm"

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return self.layer(x.movedim(1, -1)).movedim(-1, 1)
        return self.layer(x)


@block(LEAKS)
class ComputedWeight(Block):
    """A convolution with standardised weights: what it reads and writes stays whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = self.conv(self.channels, 4, 3)
        self.expects["in"] = "computed"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        weight = weight - weight.mean(list(range(1, weight.dim())), keepdim=True)
        return getattr(F, f"conv{self.dims}d")(x, weight, self.layer.bias, padding=1)


# --- blocks: code that treats channels by number ----------------------------------------------------------------
#
# What such code computes depends on how many channels there are, or on which one comes first. Whether it can be cut
# is for the tracer to decide; if it says so, the cut must be exact.


@block(HARD, way=one_of("zero", "scale", "relu", "one of them", "half"))
class PartInPlace(Block):
    """Some channels are changed in place, through a view."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if self.way == "zero":
            x[:, : self.part] = 0
        elif self.way == "scale":
            x[:, : self.part] *= 0.5
        elif self.way == "relu":
            F.relu(x[:, : self.part], inplace=True)
        elif self.way == "half":
            x[:, : x.shape[1] // 2].mul_(0.5)
        else:
            x[:, self.part - 1] += 1
        return x


@block(HARD, way=one_of("first", "last", "third", "each"))
class PartActivated(Block):
    """An activation on some channels, the others beside them."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "each":
            return torch.cat([x[:, i : i + 1] * (i + 1) for i in range(x.shape[1])], 1)
        if self.way == "last":
            return torch.cat([x[:, :-1], F.relu(x[:, -1:])], 1)
        part = self.part if self.way == "first" else x.shape[1] // 3
        return torch.cat([F.relu(x[:, :part]), x[:, part:]], 1)


@block(HARD)
class Interleaved(Block):
    """One layer for the even channels, one for the odd ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.even = self.conv((self.channels + 1) // 2, 3)
        self.odd = self.conv(self.channels // 2, 3)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.even(x[:, ::2]) - self.odd(x[:, 1::2])


@block(HARD, by=one_of("roll", "cat"), steps=one_of(1, 2))
class Rotated(Block):
    def __init__(self, shape: Shape, by: str, steps: int) -> None:
        super().__init__(shape)
        self.by, self.steps = by, steps
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "roll":
            return x.roll(self.steps, 1)
        return torch.cat([x[:, self.steps :], x[:, : self.steps]], 1)


@block(HARD, way=one_of("item", "branch", "gather", "sort", "sample", "embedding"))
class ByOneChannel(Block):
    """The values of one channel decide what happens to all."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = "gather" if way == "sample" and self.dims != 2 else way
        self.table = nn.Embedding(2, self.channels)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, 0]
        if self.way == "item":
            return x * first.mean().item()
        if self.way == "branch":
            return x if first.mean() > 0 else -x
        if self.way == "embedding":
            return x + self.table((first > 0).long()).movedim(-1, 1)
        if self.way == "sample":
            grid = torch.tanh(first)[..., None].expand(*first.shape, 2)
            return F.grid_sample(x, grid, align_corners=False)
        flat = x.flatten(2)
        if self.way == "sort":
            return flat[:, :, first[0].flatten().argsort()].view(x.shape)
        order = first.flatten(1).argsort(1)[:, None].expand(flat.shape)
        return flat.gather(2, order).view(x.shape)


@block(HARD, way=one_of("power", "tensor", "count", "branch", "sum of ones"))
class ByWidth(Block):
    """The number of channels is a number in the arithmetic."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "power":
            return x * x.shape[1] ** -0.5
        if self.way == "tensor":
            return x * torch.tensor(1 / x.shape[1])
        if self.way == "count":
            return x / x[0].numel()
        if self.way == "sum of ones":
            return x / torch.ones_like(x).sum(1, keepdim=True)
        return F.relu(x) if x.shape[1] == self.channels else x


@block(HARD, way=one_of("cumsum", "cat", "pad", "set", "arange"))
class BuiltMask(Block):
    """A constant made for the number of channels, of which not all entries are equal."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(x.shape[1])
        if self.way == "cumsum":
            mask = ones.cumsum(0)
        elif self.way == "cat":
            mask = torch.cat([0.5 * ones[:1], ones[1:]])
        elif self.way == "pad":
            mask = F.pad(ones[1:], (1, 0), value=0.5)
        elif self.way == "arange":
            mask = torch.arange(1, 1 + x.shape[1], dtype=x.dtype)
        else:
            mask = ones
            mask[:1] = 0.5
        return x * self.over_space(mask)


@block(HARD, way=one_of("norm", "mean of a filter"))
class WeightStatistics(Block):
    """A layer's output is scaled by a statistic of its weight."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.layer = self.conv(self.channels, 4)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "norm":
            return self.layer(x) / self.layer.weight.norm()
        return self.layer(x) * self.over_space(self.layer.weight.flatten(1).mean(1))


@block(HARD, residual=FLAG)
class TransposedKernel(Block):
    def __init__(self, shape: Shape, residual: bool) -> None:
        super().__init__(shape)
        self.residual = residual
        self.kernel = nn.Parameter(torch.empty(self.channels, self.channels, *[1] * self.dims))
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(F, f"conv{self.dims}d")(x, self.kernel.transpose(0, 1))
        return x + y if self.residual else y


@block(HARD, way=one_of("narrow", "add", "assign"))
class BufferLike(Block):
    """A few channels are written into zeros that are as wide as others, and added to those."""

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way, self.part = way, max(self.channels // 2, 1)
        self.layer = self.conv(self.channels, self.part)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        zeros, y = torch.zeros_like(x), self.layer(x)
        if self.way == "narrow":
            zeros.narrow(1, 0, self.part).copy_(y)
        elif self.way == "add":
            view = zeros[:, : self.part]
            view += y
        else:
            zeros[:, : self.part] = y
        return x + zeros


@block(HARD)
class Squeezed(Block):
    """`squeeze` without an axis drops the channels too, once there is only one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.pool = self.of_dims("AdaptiveAvgPool")(1)
        self.layer = nn.Linear(self.channels, 4)
        self.up = self.conv(self.channels, 4)
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x).squeeze() if x.shape[1] > 1 or self.channels > 1 else self.pool(x).flatten(1)
        return self.up(x) * self.over_space(self.layer(pooled))


# --- heads ------------------------------------------------------------------------------------------------------


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


# --- strategies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn(Printed):
    """A network and what to run it on; prints as its plan."""

    plan: Plan
    net: Network
    example: Any

    def __repr__(self) -> str:
        return repr(self.plan)


@st.composite
def images(draw: Callable[..., Any], dims: int | None = None) -> Shape:
    dims = draw(one_of(2, 2, 2, 1, 3)) if dims is None else dims
    channels = draw(st.integers(1, 3))
    sizes = {1: st.integers(6, 9), 2: st.integers(6, 8), 3: st.integers(4, 5)}[dims]
    return (channels, *[draw(sizes)] * dims)


STEMS = ("Conv", "ConvNormAct", "ErfDown", "ValidConv")
SEEDS = st.integers(0, 2**16)


def _drawn(plan: Plan) -> Drawn:
    net = plan.build()
    return Drawn(plan, net, net.example())


@st.composite
def networks(draw: Callable[..., Any], max_steps: int = 5, without: Sequence[str] = ()) -> Drawn:
    """A network of up to `max_steps` blocks of all kinds but some, with its example input."""
    kinds = sorted(set(BLOCKS) - {*HEADS, *without})
    steps = [draw(steps_of(STEMS)), *draw(st.lists(steps_of(kinds), min_size=1, max_size=max_steps))]
    plan = Plan(
        image=draw(images()),
        steps=tuple(steps),
        head=draw(steps_of(HEADS)),
        inputs=draw(one_of("one", "two, added", "two, cat", "two by name, added", "two by name, cat")),
        outputs=draw(one_of("tensor", "tuple", "dict")),
        seed=draw(SEEDS),
    )
    return _drawn(plan)


@st.composite
def networks_with(draw: Callable[..., Any], kind: str, width: SearchStrategy[int] = WIDTHS) -> Drawn:
    """A convolution, a block of one kind, a convolution and a head: the block by itself, as `block_of` gives it."""
    stem = Step("Conv", {"out": draw(width), "kernel": draw(one_of(1, 3)), "dilation": 1, "bias": draw(FLAG)})
    tail = Step("Conv", {"out": 3, "kernel": 1, "dilation": 1, "bias": True})
    is_head = kind in HEADS
    plan = Plan(
        image=draw(images()),
        steps=(stem,) if is_head else (stem, draw(step_of(kind)), tail),
        head=draw(step_of(kind)) if is_head else Step("DensePrediction", {"transposed": False}),
        seed=draw(SEEDS),
    )
    return _drawn(plan)


def block_of(net: Network) -> tuple[str, Block]:
    """The block that `networks_with` is about, and its path."""
    return ("head", net.head) if len(net.blocks) == 1 else ("blocks.1", net.blocks[1])  # type: ignore[return-value]
