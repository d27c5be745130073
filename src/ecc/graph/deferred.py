"""Parameters of several axes outside their layer: positional embeddings, scales, tables, moved weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.labels import ChannelLabels, Role, varying_axes

if TYPE_CHECKING:
    from ecc.graph.call import Call

PERMUTES = frozenset({"t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT"})
"""Operators that only put axes into another order."""


@dataclass(frozen=True)
class Deferred:
    """A parameter of several axes outside its layer: which axis carries channels shows when it meets them."""

    name: str
    shape: torch.Size
    order: tuple[int, ...]
    """The parameter's axes in the order in which they now stand, while it was only permuted."""
    index: Tensor | None = None
    """The element of the parameter at each position, once it was moved otherwise."""

    def elements(self) -> Tensor:
        """The number of the parameter's element at each position."""
        if self.index is not None:
            return self.index
        return torch.arange(math.prod(self.shape)).view(self.shape).permute(self.order)

    def move(self, call: Call, out: Tensor, index: Tensor) -> None:
        """The parameter was moved: `index` are its elements in their new places."""
        order: tuple[int, ...] = ()
        if self.index is None and call.name in PERMUTES:
            primes = torch.empty([2, 3, 5, 7, 11, 13][: len(self.shape)], device="meta")
            sizes = list(call.rerun(primes).shape)
            order = tuple(self.order[list(primes.shape).index(size)] for size in sizes)
        out._ecc_state = Deferred(self.name, self.shape, order, None if order else index)  # type: ignore[attr-defined]
        if order:
            out._ecc_name = self.name  # type: ignore[attr-defined]

    def scaled(self) -> Deferred:
        """The parameter was changed element by element: it can still be followed, but is no raw weight."""
        return replace(self, index=self.elements(), order=())

    def freeze(self, book: ChannelLabels, where: str) -> None:
        """The parameter's values are looked at as a whole (its mean, its norm): it must stay whole."""
        for axis, size in enumerate(self.shape):
            if size > 1:
                book.freeze(book.axis(self.name, axis, size, Role.PER_CHANNEL), f"{where} looks at all of {self.name}")

    def bind(self, book: ChannelLabels, labels: Tensor | None, where: str) -> None:
        """The parameter meets channels elementwise: the axis on which they depend carries them."""
        if labels is None or not varying_axes(labels):
            return
        elements, labels = torch.broadcast_tensors(self.elements(), labels)
        if not any(elements.stride(axis) for axis in varying_axes(labels)):
            return  # one value for all channels
        for axis in range(labels.dim()):
            if labels.stride(axis) == 0 and elements.stride(axis) == 0:
                elements, labels = elements.narrow(axis, 0, 1), labels.narrow(axis, 0, 1)
        flat, wanted = elements.reshape(-1), labels.reshape(-1)
        step = 1
        for axis in range(len(self.shape) - 1, -1, -1):
            size = self.shape[axis]
            place = flat // step % size
            step *= size
            first = torch.zeros(size, dtype=torch.long).scatter_(0, place, wanted)
            if size > 1 and bool((first[place] == wanted).all()) and bool((first > 0).all()):
                book.unite(book.axis(self.name, axis, size, Role.PER_CHANNEL), first, where)
                return
        book.freeze(labels, f"{where} meets {self.name} in a way that cannot be cut")
