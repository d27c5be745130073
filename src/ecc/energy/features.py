"""What the widths of a network can be charged for: `Term`s, counted from its structure.

Every count of the network (MACs, bytes) is a sum of products of extents. Sorted by what they depend on, these are

    a constant,
    one term a group, linear in its width: activations, biases and norms, depthwise convolutions;
    one term a layer that mixes channels, in * out: the paper's s_j * s_{j+1}.

A term knows the amounts it stands for. FittedModel by the joule a MAC and the joule a byte, it has a coefficient before anything
is learnt about it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ecc.graph import AffineSize, Layer, StructureSpec
from ecc.graph.structure import width_of

from .regression import Array

AMOUNTS = ("MACs", "grouped MACs", "activation bytes", "weight bytes")
"""What a term may stand for. Grouped convolutions reuse little of what they fetch, so their MACs have a coefficient of
their own."""

ONE = AffineSize(1)


@dataclass(frozen=True)
class Term:
    """left * right, and what one unit of it amounts to."""

    name: str
    """The group, or the path of the layer."""
    left: AffineSize
    right: AffineSize
    amounts: tuple[float, ...]
    """Of each of `AMOUNTS`, for each unit of left * right."""
    layers: tuple[tuple[int, tuple[float, ...]], ...]
    """The layers that make up the amounts: (position, amounts), for telling what each layer costs."""

    def at(self, widths: Array) -> Array:
        """left * right at each row of widths."""
        return extent_at(self.left, widths) * extent_at(self.right, widths)


def extent_at(extent: AffineSize, widths: Array) -> Array:
    """The size of an extent at each row of widths."""
    size = np.full(len(widths), float(extent.fixed))
    for group, multiple in extent.multiples:
        size += multiple * widths[:, group]
    return size


def bilinear_terms(structure: StructureSpec) -> tuple[Term, ...]:
    """One term a layer with MACs, in * out, which is the paper's family over a channel graph."""
    return tuple(
        Term(layer.path, layer.incoming, layer.outgoing, _macs(layer), ((number, _macs(layer)),))
        for number, layer in enumerate(structure.layers)
        if layer.macs
    )


def physical_terms(structure: StructureSpec) -> tuple[Term, ...]:
    """The constant, a linear term a group, and a product a layer that mixes channels."""
    table = _Table(structure)
    for number, layer in enumerate(structure.layers):
        table.add(number, layer.incoming, layer.outgoing, _macs(layer))
        moved = (0.0, 0.0, float(layer.item_bytes), 0.0)
        table.add(number, layer.reads, ONE, moved)
        table.add(number, layer.writes, ONE, moved)
        for name in layer.tensors:
            tensor = table.tensors[name]
            left, right, size = _factors(tensor.axes, structure.full_widths)
            table.add(number, left, right, (0.0, 0.0, 0.0, size * tensor.item_bytes))
    return table.terms()


def _macs(layer: Layer) -> tuple[float, ...]:
    grouped = layer.kind == "grouped conv"
    return (0.0 if grouped else float(layer.macs), float(layer.macs) if grouped else 0.0, 0.0, 0.0)


def _factors(axes: Sequence[AffineSize], full_widths: Sequence[int]) -> tuple[AffineSize, AffineSize, float]:
    """The size of a tensor as left * right * a number. A third axis that varies counts at its largest."""
    size = 1.0
    varying: list[AffineSize] = []
    for axis in axes:
        if axis.multiples and len(varying) < 2:
            varying.append(axis)
        else:
            size *= axis.at(full_widths)
    left, right = [*varying, ONE, ONE][:2]
    return left, right, size


@dataclass
class _Sum:
    """Amounts that depend on the widths in one way, and who brings them."""

    amounts: Array = field(default_factory=lambda: np.zeros(len(AMOUNTS)))
    layers: dict[int, Array] = field(default_factory=dict)

    def add(self, layer: int, amounts: Array) -> None:
        self.amounts = self.amounts + amounts
        self.layers[layer] = self.layers.get(layer, np.zeros(len(AMOUNTS))) + amounts

    def term(self, name: str, left: AffineSize, right: AffineSize) -> Term:
        layers = tuple((number, tuple(amounts.tolist())) for number, amounts in self.layers.items())
        return Term(name, left, right, tuple(self.amounts.tolist()), layers)


class _Table:
    """Collects amounts by what they depend on."""

    def __init__(self, structure: StructureSpec) -> None:
        self._skeleton = structure
        self.tensors = {tensor.name: tensor for tensor in structure.tensors}
        self._fixed_width = {
            position: full
            for position, (least, full) in enumerate(zip(structure.min_widths, structure.full_widths, strict=True))
            if least == full
        }
        self._constant = _Sum()
        self._linear: dict[int, _Sum] = {}
        self._products: dict[tuple[int, AffineSize, AffineSize], _Sum] = {}

    def add(self, layer: int, left: AffineSize, right: AffineSize, amounts: Sequence[float]) -> None:
        """Takes amounts * left * right into account."""
        amounts_ = np.asarray(amounts, dtype=np.float64)
        if not amounts_.any():
            return
        left, right = self._reduced(left), self._reduced(right)
        if not left.multiples:
            left, right = right, left
        if right.multiples:
            left, right, scale = _ordered(left, right)
            self._products.setdefault((layer, left, right), _Sum()).add(layer, amounts_ * scale)
            return
        if left.fixed:
            self._constant.add(layer, amounts_ * right.fixed * left.fixed)
        for group, multiple in left.multiples:
            self._linear.setdefault(group, _Sum()).add(layer, amounts_ * right.fixed * multiple)

    def terms(self) -> tuple[Term, ...]:
        """The constant first, then groups, then layers."""
        found = [self._constant.term("constant", ONE, ONE)]
        found += [self._linear[g].term(self._skeleton.groups[g], width_of(g), ONE) for g in sorted(self._linear)]
        found += [
            amounts.term(self._skeleton.layers[layer].path, left, right)
            for (layer, left, right), amounts in self._products.items()
        ]
        return tuple(found)

    def _reduced(self, extent: AffineSize) -> AffineSize:
        """The extent with groups that cannot be cut counted as fixed."""
        fixed, multiples = extent.fixed, []
        for group, multiple in extent.multiples:
            if group in self._fixed_width:
                fixed += multiple * self._fixed_width[group]
            else:
                multiples.append((group, multiple))
        return AffineSize(fixed, tuple(multiples))


def _ordered(left: AffineSize, right: AffineSize) -> tuple[AffineSize, AffineSize, float]:
    """Two extents in an order, and common factors taken out, so that in * out and out * in are one term."""
    scale = 1.0
    pair = []
    for extent in (left, right):
        factors = {multiple for _, multiple in extent.multiples}
        if len(factors) == 1 and extent.fixed % (factor := factors.pop()) == 0:
            scale *= factor
            extent = AffineSize(extent.fixed // factor, tuple((group, 1) for group, _ in extent.multiples))
        pair.append(extent)
    pair.sort(key=lambda extent: (extent.multiples, extent.fixed))
    return pair[0], pair[1], scale
