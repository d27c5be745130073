"""Random small networks: a drawn, printable plan, and the module that is built from it.

A plan is a list of steps, and a step is a `Block` with its options. Blocks adapt to the feature map they get (a
grouped convolution takes a number of groups that divides its channels), so any list of steps is a network, and
hypothesis can take steps away until the smallest failing plan is left.

Each block also says what a tracer must find in it: how many units of which parameters can be cut, or why none
can. A tracer that freezes everything is exact, and fails there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

from graph.blocks.base import (
    BATCH,
    BLOCKS,
    FLAG,
    HEADS,
    WIDTHS,
    Block,
    Printed,
    Shape,
    Step,
    one_of,
    shape_after,
    step_of,
    steps_of,
)

# --- plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan(Printed):
    """Everything that determines a network."""

    image: Shape
    steps: tuple[Step, ...]
    head: Step
    inputs: str = "one"
    outputs: str = "tensor"
    seed: int = 0

    def build(self) -> Network:
        return Network(self)


class Network(nn.Module):
    """The network of a plan, with random weights."""

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
        randomize_(self, plan.seed)

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

    def example(self, number: int = 1) -> Any:
        """An input; another number gives another one."""
        generator = torch.Generator().manual_seed(self.plan.seed + number)
        image, other = torch.randn(2, BATCH, *self.plan.image, generator=generator)
        if self.plan.inputs == "one":
            return image
        return {"image": image, "other": other} if "by name" in self.plan.inputs else (image, other)

    @property
    def is_plain(self) -> bool:
        """Whether all its products are convolutions and linear layers, which torch counts as ECC does."""
        return all(block.is_plain for block in self.modules() if isinstance(block, Block))

    def __repr__(self) -> str:
        return repr(self.plan)


@torch.no_grad()
def randomize_(net: nn.Module, seed: int) -> None:
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


# --- strategies -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn(Printed):
    """A network and its input; prints as its plan."""

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
