"""Steps: energy that comes in jumps, where a library picks another kernel or a tile more is needed.

    value(s) = sum over steps k of  height_k * clip((size_k(s) - level_k) / rise, 0, 1)

A size is a channel count that some layer reads or writes. Heights are at least 0, so the sum only rises. Between two
steps it is flat: cutting there saves nothing, as on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ecc.graph import AffineSize, StructureSpec

from .features import extent_at
from .regression import Array

RISE = 8
"""Channels over which a step rises: hardware likes multiples of 8, and profiles of GPUs are made of them."""

MAX_LEVELS = 16
"""Steps of one size; their distance is `RISE` times a power of two, as tiles are."""


@dataclass(frozen=True)
class Step:
    """Rises from 0 to 1 over `RISE` channels of a size, from a level on."""

    name: str
    """Of the groups that make up the size."""
    size: AffineSize
    level: int
    layers: tuple[int, ...]
    """Positions of the layers that read or write the size."""

    def at(self, widths: Array) -> Array:
        """Its height, from 0 to 1, at each row of widths."""
        return np.clip((extent_at(self.size, widths) - self.level) / RISE, 0.0, 1.0)


def steps_of(structure: StructureSpec) -> tuple[Step, ...]:
    """All steps that a network could have: on every channel count that a layer with dense MACs reads or writes.

    Sizes that are multiples of one group's width count once; a sum of groups, where branches are joined, is a size of
    its own.
    """
    sizes: dict[AffineSize, list[int]] = {}
    for number, layer in enumerate(structure.layers):
        if not layer.macs or layer.kind == "grouped conv":
            continue
        for extent in (layer.incoming, layer.outgoing):
            size = _reduced(extent, structure)
            if size.multiples and number not in sizes.setdefault(size, []):
                sizes[size].append(number)
    found = []
    for size, layers in sizes.items():
        full = round(size.at(structure.full_widths))
        name = " + ".join(structure.groups[group] for group, _ in size.multiples)
        found += [Step(name, size, level, tuple(layers)) for level in levels_of(full)]
    return tuple(found)


def levels_of(full: int) -> tuple[int, ...]:
    """Where the steps of a size begin, counted down from its full one."""
    distance = RISE
    while full / distance > MAX_LEVELS:
        distance *= 2
    return tuple(range(full - distance, 0, -distance))[::-1]


def _reduced(extent: AffineSize, structure: StructureSpec) -> AffineSize:
    """The extent with groups that cannot be cut counted as fixed; one group alone stands for its multiples."""
    fixed, multiples = extent.fixed, []
    for group, multiple in extent.multiples:
        if structure.min_widths[group] == structure.full_widths[group]:
            fixed += multiple * structure.full_widths[group]
        else:
            multiples.append((group, multiple))
    if len(multiples) == 1:
        return AffineSize(0, ((multiples[0][0], 1),))
    return AffineSize(fixed, tuple(multiples))


@dataclass(frozen=True)
class StepTerms:
    """Steps with their heights, on one device.

    Args:
        heights: One a step, at least 0.
        sizes: One a step.
        levels: One a step.
        num_groups: Length of the vectors of widths.
    """

    heights: tuple[float, ...]
    sizes: tuple[AffineSize, ...]
    levels: tuple[int, ...]
    num_groups: int
    device: torch.device | str = "cpu"
    _parts: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = torch.zeros(len(self.sizes), self.num_groups, dtype=torch.float64, device="cpu")
        for number, size in enumerate(self.sizes):
            for group, multiple in size.multiples:
                rows[number, group] += multiple
        start = _tensor([level - size.fixed for level, size in zip(self.levels, self.sizes, strict=True)])
        parts = (_tensor(self.heights), rows / RISE, start / RISE)
        object.__setattr__(self, "_parts", tuple(part.to(self.device) for part in parts))

    def terms(self, widths: Tensor) -> Tensor:
        """What each step adds, along the last axis."""
        heights, rows, start = self._parts
        return heights * (widths.to(torch.float64) @ rows.T - start).clamp(0, 1)

    def value(self, widths: Tensor) -> Tensor:
        """At one vector of widths, or at each row of a matrix."""
        return self.terms(widths).sum(-1)

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; at the foot and the top of a step that of cutting."""
        heights, rows, start = self._parts
        risen = torch.addmv(start, rows, widths.to(torch.float64), beta=-1)
        return (heights * ((risen > 0) & (risen <= 1))) @ rows

    def to(self, device: torch.device | str) -> StepTerms:
        """The same steps on another device."""
        return StepTerms(self.heights, self.sizes, self.levels, self.num_groups, device)


def _tensor(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
