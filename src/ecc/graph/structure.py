"""`StructureSpec`: what the costs of a network are counted from. A channel graph without its places in the weights.

It is small and plain, so that files about a network can carry it: a profile can be fitted where nobody has the
network any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadWidths

from .costs import AffineSize, CostTable, Layer, TensorShape


@dataclass(frozen=True)
class StructureSpec:
    """Groups by name and width, layers and tensors of one traced network."""

    fingerprint: str
    """Of the channel graph."""
    groups: tuple[str, ...]
    """Names of all groups, in the order of the graph."""
    full_widths: tuple[int, ...]
    """The paper's c."""
    least_widths: tuple[int, ...]
    """The smallest that each may have; its full width where a group is frozen."""
    layers: tuple[Layer, ...]
    tensors: tuple[TensorShape, ...]

    def __post_init__(self) -> None:
        count = len(self.groups)
        if len(self.full_widths) != count or len(self.least_widths) != count:
            raise BadWidths(f"{count} groups need as many full and least widths.")
        for name, least, full in zip(self.groups, self.least_widths, self.full_widths, strict=True):
            if not 1 <= least <= full:
                raise BadWidths(f"group {name!r} has the least width {least}, outside 1..{full}, its full width.")
        sizes = [size for layer in self.layers for size in (layer.incoming, layer.outgoing, layer.reads, layer.writes)]
        sizes += [axis for tensor in self.tensors for axis in tensor.axes]
        for size in sizes:
            if any(not 0 <= group < count for group, _ in size.multiples):
                raise BadWidths(f"a size names a group that is none of the {count}.")
            if size.fixed < 0 or any(multiple < 0 for _, multiple in size.multiples):
                raise BadWidths(f"a size is negative: {size}.")
        there = {tensor.name for tensor in self.tensors}
        for layer in self.layers:
            if not there.issuperset(layer.tensors) or layer.macs < 0:
                raise BadWidths(f"layer {layer.path!r} uses a tensor that is not there, or fewer than no MACs.")

    @cached_property
    def costs(self) -> CostTable:
        """Costs as differentiable functions of the widths vector."""
        return CostTable(self.layers, self.tensors)

    @cached_property
    def prunable(self) -> tuple[int, ...]:
        """Positions of the groups that can be cut."""
        pairs = enumerate(zip(self.least_widths, self.full_widths, strict=True))
        return tuple(position for position, (least, full) in pairs if least < full)

    def widths(self, widths: Mapping[str, float] | None = None) -> Tensor:
        """All widths in the order of `groups`, float64; groups not named keep their full width.

        Raises:
            BadWidths: An unknown group, or a width outside its range.
        """
        vector = torch.tensor(self.full_widths, dtype=torch.float64, device="cpu")
        for name, width in (widths or {}).items():
            if name not in self._positions:
                raise BadWidths(f"no channel group is called {name!r}.")
            position = self._positions[name]
            least, full = self.least_widths[position], self.full_widths[position]
            if not least <= width <= full:
                raise BadWidths(f"width {width} of group {name!r} is outside {least}..{full}.")
            vector[position] = width
        return vector

    def width_remainders(self, width_multiple: int) -> tuple[int, ...]:
        """For each group, what its widths leave over when divided, so that hardware meets multiples of a number.

        That is nothing, as a rule. But where a group is joined with other channels to a sum that is such a multiple (13
        and 3 make 16), cutting it to a multiple of its own would spoil the sum; such a group is cut in whole steps from
        its full width (13, 5).
        """
        left = [0] * len(self.groups)
        for layer in self.layers:
            for size in (layer.incoming, layer.outgoing):
                joined = len(size.multiples) > 1 or size.fixed > 0
                if not joined or round(size.at(self.full_widths)) % width_multiple:
                    continue
                for group, _ in size.multiples:
                    left[group] = self.full_widths[group] % width_multiple
        return tuple(left)

    def padded(self, widths: Sequence[int], width_multiple: int) -> list[int]:
        """The least widths on the width_remainders that hold so many channels; never below a group's least or above its full."""
        found = []
        groups = zip(widths, self.least_widths, self.full_widths, self.width_remainders(width_multiple), strict=True)
        for width, least, full, rest in groups:
            on_lattice = rest + max(0, -((rest - width) // width_multiple)) * width_multiple
            found.append(min(full, max(least, on_lattice)))
        return found

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.groups)}

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "fingerprint": self.fingerprint,
            "groups": list(self.groups),
            "full_widths": list(self.full_widths),
            "least_widths": list(self.least_widths),
            "layers": [layer.to_json() for layer in self.layers],
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StructureSpec:
        """From what `to_json` gave.

        Raises:
            BadWidths: If its parts do not fit together.
            KeyError, TypeError, ValueError: If it is damaged.
        """
        return cls(
            fingerprint=str(data["fingerprint"]),
            groups=tuple(str(name) for name in data["groups"]),
            full_widths=tuple(int(width) for width in data["full_widths"]),
            least_widths=tuple(int(width) for width in data["least_widths"]),
            layers=tuple(Layer.from_json(layer) for layer in data["layers"]),
            tensors=tuple(TensorShape.from_json(tensor) for tensor in data["tensors"]),
        )


def affine(group: int) -> AffineSize:
    """The width of one group, as an extent."""
    return AffineSize(0, ((group, 1),))
