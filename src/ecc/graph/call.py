"""One operator call of a trace, and what is noted about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ecc.graph.labels import compact, frozen_labels


@dataclass
class Record:
    """One operator that does work: what it multiplies, what it reads and what it writes, in labels."""

    path: str
    kind: str
    macs: int
    factors: list[Tensor]
    reads: list[tuple[Tensor, int]]
    writes: list[tuple[Tensor, int]]
    tensors: list[str]
    item_bytes: int


@dataclass
class Call:
    """One operator call, with its arguments by their schema names."""

    func: OpOverload
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    here: str
    in_place: bool

    def __getitem__(self, key: str) -> Any:
        position, default = _parameters(self.func)[key]
        if position is not None and position < len(self.args):
            return self.args[position]
        return self.kwargs.get(key, default)

    def get(self, key: str, default: Any) -> Any:
        """An argument, or `default` where the operator has no such parameter."""
        return self[key] if key in _parameters(self.func) else default

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments in order, those inside lists too."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(v for v in value if isinstance(v, Tensor))
        return found

    @cached_property
    def outs(self) -> list[Tensor]:
        """The tensors it returned."""
        many = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        return [t for t in many if isinstance(t, Tensor)]

    @property
    def out(self) -> Tensor:
        """Its first result."""
        return self.outs[0]

    def rerun(self, first: Tensor) -> Any:
        """The same call with another first tensor argument."""
        return self.func(first, *self.args[1:], **self.kwargs)


@cache
def _parameters(func: OpOverload) -> dict[str, tuple[int | None, Any]]:
    """Name -> (position or None if keyword-only, default) from the operator's schema."""
    table: dict[str, tuple[int | None, Any]] = {}
    for position, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        table[argument.name] = (None if argument.kwarg_only else position, default)
    return table


def amount(tensor: Tensor, labels: Tensor | None) -> tuple[Tensor, int]:
    """(labels of one slice, how often it repeats): together the tensor's elements."""
    if labels is None:
        return frozen_labels(torch.Size([1])), tensor.numel()
    small = compact(labels).reshape(-1)
    return small, tensor.numel() // max(small.numel(), 1)
