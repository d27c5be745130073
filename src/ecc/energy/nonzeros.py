"""`NonzeroCost`: joules of a network whose weights are pruned one by one, on an analytic platform.

    joules = base + sum over weight tensors of  coefficient * nonzeros
    coefficient  = joules per MAC * MACs that use one weight  +  joules per weight byte * bytes of one value

A weight of a convolution is used once for each position of its output, so that the same number of weights saves the
more the earlier they are removed. The base is what the platform spends at full widths on all else: activations,
biases and norms, kernels, and static power.

What this takes for granted, and no GPU does: a MAC whose weight is zero is skipped and costs nothing; zeros are not
stored, and where the others belong costs nothing to store; activations are as dense as before; and the time, which
static power is drawn for, stays that of the dense network. So it is a lower bound on what such a device would spend,
and for a platform that does not skip zeros it is fiction: `ecc.methods.unstructured` refuses those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ecc.errors import BadWidths
from ecc.graph import ChannelGraph
from ecc.measure.meters.platform import Platform

KINDS = ("conv", "grouped conv", "linear")
"""Kinds of layers whose weights can be pruned."""


@dataclass(frozen=True)
class NonzeroCost:
    """A `Cost` of nonzero weights: its groups are weight tensors, and a width is how many weights are left there.

    Raises:
        BadWidths: If there is nothing to prune, or the parts do not fit together.
    """

    network: str
    """Fingerprint of the channel graph."""
    base: float
    """Joules that no weight decides about."""
    groups: tuple[str, ...]
    """Names of the weight tensors, as in the network's `named_parameters`."""
    full_widths: tuple[int, ...]
    """Weights in each."""
    coefficients: tuple[float, ...]
    """Joules of one weight in each."""
    device: torch.device | str = "cpu"
    _coefficient_tensor: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadWidths("the network has no convolution or linear layer with weights of its own to prune.")
        if not len(self.groups) == len(self.full_widths) == len(self.coefficients):
            raise BadWidths(f"{len(self.groups)} weight tensors need as many sizes and coefficients.")
        object.__setattr__(
            self, "_coefficient_tensor", torch.tensor(self.coefficients, dtype=torch.float64, device=self.device)
        )

    @property
    def resource(self) -> str:
        """Energy."""
        return "energy"

    @property
    def unit(self) -> str:
        """Joules, of one inference of the whole example batch."""
        return "J"

    @property
    def label(self) -> str:
        """Computed from published constants, never measured."""
        return "estimated"

    @property
    def dense(self) -> float:
        """Joules with every weight in place: what the platform says of the dense network."""
        return math.fsum([self.base, *(p * n for p, n in zip(self.coefficients, self.full_widths, strict=True))])

    def value(self, widths: Tensor) -> Tensor:
        """Joules at one vector of nonzero counts, or at each row of a matrix."""
        return (widths.to(torch.float64) * self._coefficient_tensor).sum(-1) + self.base

    def gradient(self, widths: Tensor) -> Tensor:
        """The coefficients, whatever the counts."""
        del widths
        return self._coefficient_tensor

    def to(self, device: torch.device | str) -> NonzeroCost:
        """The same cost, computing on a device."""
        is_there = torch.device(device) == torch.device(self.device)
        return self if is_there else replace(self, device=device)  # with its tensors, which took a while to make


def nonzero_cost(graph: ChannelGraph, platform: Platform) -> NonzeroCost:
    """What a network costs on a platform at any number of nonzero weights.

    Args:
        graph: The network at full widths; its weights decide about nothing.
        platform: Its constants; artificial noise is left out.

    Raises:
        BadWidths: If the network has no weights that could be pruned.
    """
    constants, structure = platform.constants, graph.structure
    shapes = {tensor.name: tensor for tensor in structure.tensors}
    macs = structure.costs.macs_per_layer(structure.widths()).tolist()
    sizes: dict[str, int] = {}
    coefficients: dict[str, float] = {}
    for layer, work in zip(structure.layers, macs, strict=True):
        matrices = [name for name in layer.tensors if shapes[name].is_parameter and len(shapes[name].axes) > 1]
        if layer.kind not in KINDS or layer.kind in constants.folded or not work or len(matrices) != 1:
            continue  # part of the base
        (name,) = matrices
        size = sizes[name] = math.prod(round(axis.at(structure.full_widths)) for axis in shapes[name].axes)
        value_bytes = shapes[name].item_bytes * (constants.value_bytes or layer.item_bytes) / layer.item_bytes
        coefficient = constants.joules_per_mac * work / size + constants.joules_per_weight_byte * value_bytes
        coefficients[name] = (
            coefficients.get(name, 0.0) + coefficient
        )  # a tensor that two layers use is fetched by both
    pruned = math.fsum(coefficients[name] * size for name, size in sizes.items())
    base = max(0.0, platform.truth(graph, {}).joules - pruned)
    return NonzeroCost(graph.fingerprint, base, tuple(sizes), tuple(sizes.values()), tuple(coefficients.values()))
