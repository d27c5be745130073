"""What a network costs at any widths, as differentiable functions.

Every size in a network is an `AffineSize`: a fixed part plus a multiple of each group's width. A layer's
multiply-accumulates are a constant times its incoming extent times its outgoing extent, which is the paper's
s_j * s_{j+1}; its parameters, its activations and their bytes are such products too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AffineSize:
    """fixed + sum of (units of a group) * multiple."""

    fixed: int
    multiples: tuple[tuple[int, int], ...] = ()
    """(position of the group in the graph, multiple) pairs."""

    def at(self, widths: Sequence[float]) -> float:
        """Its size at given widths."""
        return self.fixed + sum(multiple * widths[group] for group, multiple in self.multiples)

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        return [self.fixed, [list(pair) for pair in self.multiples]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> AffineSize:
        """From what `to_json` gave."""
        fixed, pairs = data
        return cls(int(fixed), tuple((int(g), int(m)) for g, m in pairs))


@dataclass(frozen=True)
class Layer:
    """One operator of the forward pass that does work, on the example input."""

    path: str
    """The module it runs in."""
    kind: str
    """conv, grouped conv, linear, matmul, norm, elementwise, reduction, pool, move or other."""
    macs: int
    """Multiply-accumulates for each pair of an incoming and an outgoing channel."""
    incoming: AffineSize
    outgoing: AffineSize
    reads: AffineSize
    """Activation elements read."""
    writes: AffineSize
    """Activation elements written."""
    item_bytes: int
    tensors: tuple[str, ...]
    """Parameters and buffers it uses."""

    def touches(self, group: int) -> bool:
        """Whether its multiply-accumulates depend on the width of a group."""
        return any(group == g for extent in (self.incoming, self.outgoing) for g, _ in extent.multiples)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "path": self.path,
            "kind": self.kind,
            "macs": self.macs,
            "incoming": self.incoming.to_json(),
            "outgoing": self.outgoing.to_json(),
            "reads": self.reads.to_json(),
            "writes": self.writes.to_json(),
            "item_bytes": self.item_bytes,
            "tensors": list(self.tensors),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layer:
        """From what `to_json` gave."""
        extents = {key: AffineSize.from_json(data[key]) for key in ("incoming", "outgoing", "reads", "writes")}
        return cls(
            path=str(data["path"]),
            kind=str(data["kind"]),
            macs=int(data["macs"]),
            item_bytes=int(data["item_bytes"]),
            tensors=tuple(str(t) for t in data["tensors"]),
            **extents,
        )


@dataclass(frozen=True)
class TensorShape:
    """A parameter or buffer, its axes as extents."""

    name: str
    axes: tuple[AffineSize, ...]
    item_bytes: int
    is_parameter: bool

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        axes = [axis.to_json() for axis in self.axes]
        return {
            "name": self.name,
            "axes": axes,
            "item_bytes": self.item_bytes,
            "is_parameter": self.is_parameter,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorShape:
        """From what `to_json` gave."""
        axes = tuple(AffineSize.from_json(axis) for axis in data["axes"])
        return cls(str(data["name"]), axes, int(data["item_bytes"]), bool(data["is_parameter"]))


class _Extents:
    """Many extents evaluated at once, in time linear in the number of their terms."""

    def __init__(self, extents: Sequence[AffineSize]) -> None:
        self._fixed = torch.tensor([float(e.fixed) for e in extents], dtype=torch.float64, device="cpu")
        self._rows = torch.tensor(
            [i for i, e in enumerate(extents) for _ in e.multiples], dtype=torch.long, device="cpu"
        )
        self._groups = torch.tensor([g for e in extents for g, _ in e.multiples], dtype=torch.long, device="cpu")
        self._multiples = torch.tensor(
            [float(m) for e in extents for _, m in e.multiples], dtype=torch.float64, device="cpu"
        )

    def __call__(self, widths: Tensor) -> Tensor:
        parts = self._multiples * widths.to(torch.float64)[self._groups]
        return self._fixed.index_add(0, self._rows, parts)


class CostTable:
    """The costs of a channel graph as functions of the vector of widths."""

    def __init__(self, layers: Sequence[Layer], tensors: Sequence[TensorShape]) -> None:
        self._macs = torch.tensor([float(layer.macs) for layer in layers], dtype=torch.float64, device="cpu")
        self._incoming = _Extents([layer.incoming for layer in layers])
        self._outgoing = _Extents([layer.outgoing for layer in layers])
        self._reads = _Extents([layer.reads for layer in layers])
        self._writes = _Extents([layer.writes for layer in layers])
        self._item = torch.tensor([float(layer.item_bytes) for layer in layers], dtype=torch.float64, device="cpu")
        rank = max([len(t.axes) for t in tensors], default=0)
        padded = [(*t.axes, *[AffineSize(1)] * (rank - len(t.axes))) for t in tensors]
        self._axes = [_Extents([axes[k] for axes in padded]) for k in range(rank)]
        self._tensor_bytes = torch.tensor([float(t.item_bytes) for t in tensors], dtype=torch.float64, device="cpu")
        self._is_parameter = torch.tensor([float(t.is_parameter) for t in tensors], dtype=torch.float64, device="cpu")
        position = {t.name: i for i, t in enumerate(tensors)}
        used = [(row, position[name]) for row, layer in enumerate(layers) for name in layer.tensors]
        self._using_layer = torch.tensor([row for row, _ in used], dtype=torch.long, device="cpu")
        self._used_tensor = torch.tensor([tensor for _, tensor in used], dtype=torch.long, device="cpu")

    def macs_per_layer(self, widths: Tensor) -> Tensor:
        """Multiply-accumulates of each layer."""
        return self._macs * self._incoming(widths) * self._outgoing(widths)

    def macs(self, widths: Tensor) -> Tensor:
        """Multiply-accumulates of all layers."""
        return self.macs_per_layer(widths).sum()

    def activation_bytes_per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of activations that each layer reads and writes."""
        return self._item * (self._reads(widths) + self._writes(widths))

    def activation_bytes(self, widths: Tensor) -> Tensor:
        """Bytes of activations that all layers read and write."""
        return self.activation_bytes_per_layer(widths).sum()

    def elements_per_tensor(self, widths: Tensor) -> Tensor:
        """Size of each parameter and buffer."""
        sizes = torch.ones_like(self._tensor_bytes)
        for axis in self._axes:
            sizes = sizes * axis(widths)
        return sizes

    def parameters(self, widths: Tensor) -> Tensor:
        """Number of parameters."""
        return (self.elements_per_tensor(widths) * self._is_parameter).sum()

    def weight_bytes_per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of the parameters and buffers that each layer uses; a shared one counts for each that uses it."""
        bytes_per_tensor = self.elements_per_tensor(widths) * self._tensor_bytes
        return torch.zeros_like(self._macs).index_add(0, self._using_layer, bytes_per_tensor[self._used_tensor])

    def weight_bytes(self, widths: Tensor) -> Tensor:
        """Bytes of parameters and buffers."""
        return (self.elements_per_tensor(widths) * self._tensor_bytes).sum()
