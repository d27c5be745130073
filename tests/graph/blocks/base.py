"""What all blocks have in common: the catalogue they enter, and the step that builds one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor, nn

Shape = tuple[int, ...]
"""Channels and spatial sizes of a feature map, without the batch."""
AnyConv = nn.Conv1d | nn.Conv2d | nn.Conv3d

BATCH = 2
WIDTHS = st.integers(2, 8)
FLAG = st.booleans()


def one_of(*values: Any) -> SearchStrategy[Any]:
    return st.sampled_from(values)


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


def shape_after(block: nn.Module, shape: Shape) -> Shape:
    with torch.no_grad():
        return tuple(block.eval()(torch.randn(BATCH, *shape)).shape[1:])


class Block(nn.Module):
    """A piece of a network, from feature map to feature map.

    `expects` says what must be found: for a parameter of the block (its axis 0, or `name:axis`), or for the
    channels that come in (`in`), the number of units that can be cut, or a word of the reason why none can.
    """

    options: ClassVar[dict[str, SearchStrategy[Any]]] = {}
    is_plain: bool = True
    """Whether all its products are convolutions and linear layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.channels, self.spatial = shape[0], shape[1:]
        self.dims = len(self.spatial)
        self.expects: dict[str, int | str] = {"in": self.channels}

    def of_dims(self, name: str) -> Any:
        """`nn.Conv2d` for `Conv` in a network over images, `nn.Conv1d` over sequences ..."""
        return getattr(nn, f"{name}{self.dims}d")

    def conv(self, incoming: int, outgoing: int, kernel: int = 1, dilation: int = 1, **more: Any) -> AnyConv:
        """A convolution that keeps the spatial size."""
        padding = dilation * (kernel // 2)
        return self.of_dims("Conv")(incoming, outgoing, kernel, padding=padding, dilation=dilation, **more)

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
NUMERIC: list[str] = []
"""Blocks that only a comparison of numbers shows to be wrong: a trace without it may prune them."""
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


def divisor(number: int, wanted: int) -> int:
    """The wanted number if it divides the other one, else the smallest larger than 1 that does."""
    return wanted if number % wanted == 0 else next(d for d in range(2, number + 1) if number % d == 0)
