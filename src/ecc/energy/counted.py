"""Costs that need no profile: multiply-accumulates, parameters and bytes, counted from the graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ecc.errors import BadWidths
from ecc.graph import AffineSize, ChannelGraph, StructureSpec

from .bilinear_form import BilinearForm
from .features import ONE

UNITS = {"macs": "", "params": "", "weight_bytes": "B", "activation_bytes": "B", "peak_bytes": "B"}
"""What can be counted, and in which unit."""

MEANINGS = {
    "macs": "multiply-accumulates of one inference of the whole batch",
    "params": "parameters",
    "weight_bytes": "bytes of parameters and buffers",
    "activation_bytes": "bytes of activations that all layers together read and write",
    "peak_bytes": "bytes of activations that the largest layer reads and writes: the least memory to run it in",
}


@dataclass(frozen=True)
class CountedCost:
    """A `Cost` that is exact.

    Raises:
        BadWidths: If there is no such resource.
    """

    structure: StructureSpec
    resource: str
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.resource not in UNITS:
            raise BadWidths(f"{self.resource!r} cannot be counted; these can: {', '.join(UNITS)}.")

    @property
    def unit(self) -> str:
        """B for bytes; counts have none."""
        return UNITS[self.resource]

    @property
    def label(self) -> str:
        """Neither measured nor estimated."""
        return "counted"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups, in the order of the graph."""
        return self.structure.groups

    @property
    def full_widths(self) -> tuple[int, ...]:
        """Of the dense network."""
        return self.structure.full_widths

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix."""
        if self.resource == "peak_bytes":
            return self._products.terms(widths).amax(-1)
        return self._products.value(widths)

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; of the largest layer where the largest counts."""
        if self.resource == "peak_bytes":
            terms = self._products.terms(widths)
            coefficients, left, *_ = self._products.parts
            largest = (terms == terms.amax()).to(torch.float64)
            return (coefficients * largest / largest.sum()) @ left
        return self._products.gradient(widths)

    def to(self, device: torch.device | str) -> CountedCost:
        """The same cost, computing on a device."""
        is_there = torch.device(device) == torch.device(self.device)
        return self if is_there else replace(self, device=device)  # with its tensors, which took a while to make

    @cached_property
    def _products(self) -> BilinearForm:
        rows = _rows(self.structure, self.resource)
        coefficients, lefts, rights = (tuple(column) for column in zip(*rows, strict=True)) if rows else ((), (), ())
        return BilinearForm(0.0, coefficients, lefts, rights, len(self.groups), self.device)


def counted_cost(graph: ChannelGraph, resource: str) -> CountedCost:
    """The exact cost of a network: macs, params, weight_bytes, activation_bytes or peak_bytes.

    Raises:
        BadWidths: If there is no such resource.
    """
    return CountedCost(graph.structure, resource)


def _rows(structure: StructureSpec, resource: str) -> list[tuple[float, AffineSize, AffineSize]]:
    if resource == "macs":
        return [(float(layer.macs), layer.incoming, layer.outgoing) for layer in structure.layers if layer.macs]
    if resource == "activation_bytes":
        sizes = [(layer.item_bytes, size) for layer in structure.layers for size in (layer.reads, layer.writes)]
        return [(float(item), size, ONE) for item, size in sizes]
    if resource == "peak_bytes":
        return [(float(layer.item_bytes), _sum(layer.reads, layer.writes), ONE) for layer in structure.layers]
    rows = []
    for tensor in structure.tensors:
        if resource == "params" and not tensor.is_parameter:
            continue
        size = 1.0 if resource == "params" else float(tensor.item_bytes)
        varying = [axis for axis in tensor.axes if axis.multiples]
        for axis in tensor.axes:
            size *= 1 if axis.multiples else axis.fixed
        if len(varying) > 2:
            raise BadWidths(f"tensor {tensor.name} has {len(varying)} axes that can be cut; two are the most counted.")
        left, right = [*varying, ONE, ONE][:2]
        rows.append((size, left, right))
    return rows


def _sum(one: AffineSize, other: AffineSize) -> AffineSize:
    return AffineSize(one.fixed + other.fixed, (*one.multiples, *other.multiples))
