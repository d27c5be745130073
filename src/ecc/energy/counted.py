"""Costs that need no profile: exact counts of the graph, and joules per nonzero weight on an analytic platform."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from ecc.budget import COUNTED_UNITS
from ecc.errors import BadWidths
from ecc.graph import AffineSize, ChannelGraph, StructureSpec
from ecc.measure.meters.platform import Platform

from .cost import ONE, BilinearForm, CostForm


@dataclass(frozen=True)
class CountedCost:
    """An exact `Cost`."""

    structure: StructureSpec
    resource: str
    device: torch.device | str = "cpu"
    label: str = field(default="counted", init=False)

    def __post_init__(self) -> None:
        if self.resource not in COUNTED_UNITS:
            raise BadWidths(f"{self.resource!r} cannot be counted; choose one of {', '.join(COUNTED_UNITS)}.")

    @property
    def unit(self) -> str:
        """B for bytes; empty for counts."""
        return COUNTED_UNITS[self.resource]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups, in the order of the graph."""
        return self.structure.groups

    @property
    def full_widths(self) -> tuple[int, ...]:
        """Widths of the dense network."""
        return self.structure.full_widths

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of all branches that can be removed."""
        return tuple(branch.name for branch in self.structure.branches)

    @property
    def dense(self) -> float:
        """Cost of the dense network, as for an energy model."""
        return float(self.to("cpu").value(torch.tensor(self.full_widths, dtype=torch.float64)))

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix."""
        if self.resource == "peak_bytes":
            return self._form.terms(widths).amax(-1)
        return self._form.value(widths)

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; for peak_bytes, that of the largest layers."""
        if self.resource == "peak_bytes":
            terms = self._form.terms(widths)
            coefficients, left, *_ = self._form.parts
            largest = (terms == terms.amax()).to(torch.float64)
            return (coefficients * largest / largest.sum()) @ left
        return self._form.gradient(widths)

    def form(self, budget: float) -> CostForm:
        """The cost as arrays. For peak_bytes, the budget plus the excess of each layer over it."""
        if self.resource != "peak_bytes":
            return self._form.form()
        coefficients, left, fixed, *_ = (part.cpu().numpy() for part in self._form.parts)
        count, groups = left.shape
        rows, ones = csr_array(coefficients[:, None] * left), np.ones(count)
        flat = (np.zeros(groups), np.zeros((groups, groups)))
        return CostForm(budget, *flat, ones, rows, budget - coefficients * fixed, np.inf * ones, 0 * ones)

    def to(self, device: torch.device | str) -> CountedCost:
        """The same cost, computed on a device."""
        # The same object keeps its tensors, which take a while to build.
        return self if torch.device(device) == torch.device(self.device) else replace(self, device=device)

    @cached_property
    def _form(self) -> BilinearForm:
        terms = _terms(self.structure, self.resource)
        coefficients, lefts, rights, switches = (
            (tuple(column) for column in zip(*terms, strict=True)) if terms else ((), (), (), ())
        )
        return BilinearForm(0.0, coefficients, lefts, rights, len(self.groups), self.device, switches)


def counted_cost(graph: ChannelGraph, resource: str) -> CountedCost:
    """Exact cost of a network at any widths. It needs no profile and no meter.

    Args:
        graph: The traced network.
        resource: macs, params, weight_bytes, activation_bytes or peak_bytes.

    Raises:
        BadWidths: If the resource cannot be counted.
    """
    return CountedCost(graph.structure, resource)


_CountedTerm: TypeAlias = tuple[float, AffineSize, AffineSize, tuple[int, ...]]


def _terms(structure: StructureSpec, resource: str) -> list[_CountedTerm]:
    """(coefficient, left, right, switch) of every product."""
    layers = list(zip(structure.layers, structure.layer_switches, strict=True))
    if resource == "macs":
        return [(float(layer.macs), layer.incoming, layer.outgoing, switch) for layer, switch in layers if layer.macs]
    if resource == "activation_bytes":
        return [
            (float(layer.item_bytes), size, ONE, switch)
            for layer, switch in layers
            for size in (layer.reads, layer.writes)
        ]
    if resource == "peak_bytes":
        return [(float(layer.item_bytes), _sum(layer.reads, layer.writes), ONE, switch) for layer, switch in layers]
    terms: list[_CountedTerm] = []
    for tensor, switch in zip(structure.tensors, structure.tensor_switches, strict=True):
        if resource == "params" and not tensor.is_parameter:
            continue
        size = 1.0 if resource == "params" else float(tensor.item_bytes)
        varying = [axis for axis in tensor.axes if axis.multiples]
        for axis in tensor.axes:
            size *= 1 if axis.multiples else axis.fixed
        if len(varying) > 2:
            raise BadWidths(f"tensor {tensor.name} has {len(varying)} prunable axes; at most two can be counted.")
        left, right = [*varying, ONE, ONE][:2]
        terms.append((size, left, right, switch))
    return terms


def _sum(one: AffineSize, other: AffineSize) -> AffineSize:
    return AffineSize(one.fixed + other.fixed, (*one.multiples, *other.multiples))


# ---------------------------------------------------------------- nonzero weights on an analytic platform

PRUNABLE_KINDS = ("conv", "grouped conv", "linear")
"""Kinds of layers whose single weights can be pruned."""


@dataclass(frozen=True)
class NonzeroCost:
    """Estimated joules of a network whose single weights are pruned (unstructured), on an analytic platform.

        joules = base + sum over weight tensors of coefficient * nonzeros
        coefficient = joules per MAC * MACs per weight + joules per weight byte * bytes per value

    A weight of a convolution is used once per output position, so weights of early layers cost more. The base is
    everything else at full widths: activations, biases, norms, kernel launches and static power.

    The estimate assumes a device that skips MACs with a zero weight and stores no zeros and no indices. Activations
    stay dense, and the time, which static power depends on, stays that of the dense network. No GPU does this;
    `ecc.methods.unstructured` accepts only platforms that declare it.

    As a `Cost`, its groups are weight tensors and a width is the number of nonzero weights in one.
    """

    network: str
    """Fingerprint of the channel graph."""
    base: float
    """Joules that do not depend on the weights."""
    groups: tuple[str, ...]
    """Names of the weight tensors, as in `named_parameters`."""
    full_widths: tuple[int, ...]
    """Number of weights in each tensor."""
    coefficients: tuple[float, ...]
    """Joules per weight of each tensor."""
    device: torch.device | str = "cpu"
    resource: str = field(default="energy", init=False)
    unit: str = field(default="J", init=False)
    """Of one inference of the whole example batch."""
    label: str = field(default="estimated", init=False)
    branches: tuple[str, ...] = field(default=(), init=False)
    _coefficients: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadWidths("the network has no convolution or linear layer with prunable weights.")
        if not len(self.groups) == len(self.full_widths) == len(self.coefficients):
            raise BadWidths(f"{len(self.groups)} weight tensors need as many sizes and coefficients.")
        tensor = torch.tensor(self.coefficients, dtype=torch.float64, device=self.device)
        object.__setattr__(self, "_coefficients", tensor)

    @property
    def dense(self) -> float:
        """Joules of the dense network."""
        return math.fsum([self.base, *(p * n for p, n in zip(self.coefficients, self.full_widths, strict=True))])

    def value(self, widths: Tensor) -> Tensor:
        """Joules at one vector of nonzero counts, or at each row of a matrix."""
        return (widths.to(torch.float64) * self._coefficients).sum(-1) + self.base

    def gradient(self, widths: Tensor) -> Tensor:
        """The coefficients, whatever the counts."""
        del widths
        return self._coefficients

    def form(self, budget: float) -> CostForm:
        """The cost as arrays."""
        del budget
        count, none = len(self.groups), np.zeros(0)
        linear = np.array(self.coefficients)
        return CostForm(self.base, linear, np.zeros((count, count)), none, csr_array((0, count)), none, none, none)

    def to(self, device: torch.device | str) -> NonzeroCost:
        """The same cost, computed on a device."""
        return self if torch.device(device) == torch.device(self.device) else replace(self, device=device)


def nonzero_cost(graph: ChannelGraph, platform: Platform) -> NonzeroCost:
    """Estimated joules of a network at any number of nonzero weights.

    Args:
        graph: The network at full widths.
        platform: The analytic platform; its artificial noise is left out.

    Raises:
        BadWidths: If the network has no prunable weights.
    """
    constants, structure = platform.constants, graph.structure
    shapes = {tensor.name: tensor for tensor in structure.tensors}
    macs = structure.costs.macs_per_layer(structure.widths()).tolist()
    sizes: dict[str, int] = {}
    coefficients: dict[str, float] = {}
    for layer, work in zip(structure.layers, macs, strict=True):
        matrices = [name for name in layer.tensors if shapes[name].is_parameter and len(shapes[name].axes) > 1]
        if layer.kind not in PRUNABLE_KINDS or layer.kind in constants.folded or not work or len(matrices) != 1:
            continue  # part of the base
        (name,) = matrices
        size = sizes[name] = math.prod(round(axis.at(structure.full_widths)) for axis in shapes[name].axes)
        value_bytes = shapes[name].item_bytes * (constants.value_bytes or layer.item_bytes) / layer.item_bytes
        joules = constants.joules_per_mac * work / size + constants.joules_per_weight_byte * value_bytes
        coefficients[name] = coefficients.get(name, 0.0) + joules  # a tensor shared by two layers is fetched twice
    pruned = math.fsum(coefficients[name] * size for name, size in sizes.items())
    base = max(0.0, platform.truth(graph, {}).joules - pruned)
    return NonzeroCost(graph.fingerprint, base, tuple(sizes), tuple(sizes.values()), tuple(coefficients.values()))
