"""The channel graph: what may be cut from a network, and what everything costs at any widths.

A *unit* is the smallest thing that can be cut: channels of several layers that live and die together. A
`ChannelGroup` is a run of interchangeable units: they stand in the same places of the same tensors. The
widths of the groups are the paper's s; a plain chain of layers has one group between each two layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadFile, BadWidths
from ecc.graph.costs import AffineSize, CostTable, Layer, TensorShape
from ecc.graph.labels import Role
from ecc.graph.structure import StructureSpec
from ecc.io import read_text, write_text

FORMAT = "ecc channel graph, version 1"
MOST_INDICES = 1 << 24
"""Of all places together, when a graph is read: many times those of the largest networks, and 128 MiB."""


@dataclass(frozen=True)
class ParamSlice:
    """Where the units of a group stand in one axis of one parameter or buffer."""

    tensor: str
    axis: int
    roles: tuple[Role, ...]
    index: Tensor
    """Indices along the axis, shape (units, indices of one unit)."""

    @property
    def reads(self) -> bool:
        """Whether a zero slice here silences the channel."""
        return Role.READ in self.roles


@dataclass(frozen=True)
class ChannelGroup:
    """Units that stand in the same places: the thing that has a width."""

    name: str
    width: int
    """Number of units."""
    places: tuple[ParamSlice, ...]
    frozen: str | None = None
    """Why it cannot be cut; None if it can."""
    least: int = 1
    """The smallest width it may have: 2 where code drops axes of size one."""

    def layers(self, role: Role) -> tuple[str, ...]:
        """Paths of the modules that read, write or carry the group, in the order of the forward pass."""
        paths = [p.tensor.rpartition(".")[0] or p.tensor for p in self.places if role in p.roles]
        return tuple(dict.fromkeys(paths))


@dataclass(frozen=True, repr=False)
class ChannelGraph:
    """Groups, layers and tensors of one traced network. Widths go by group name or in the order of `groups`."""

    groups: tuple[ChannelGroup, ...]
    layers: tuple[Layer, ...]
    tensors: tuple[TensorShape, ...]
    features: tuple[tuple[str, AffineSize], ...] = ()
    """Paths of norm modules without tensors, whose `num_features` follows the widths all the same."""
    notes: tuple[str, ...] = ()
    """What a user should know about this trace, such as parameters that no pass reached."""
    proof: float | None = None
    """Largest relative difference between the masked and the cut network's outputs; None if not run."""
    _by_name: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {g.name: i for i, g in enumerate(self.groups)})

    def __getitem__(self, name: str) -> ChannelGroup:
        try:
            return self.groups[self._by_name[name]]
        except KeyError:
            raise BadWidths(f"no channel group is called {name!r}. Groups: {_some(list(self._by_name))}.") from None

    @cached_property
    def prunable(self) -> tuple[ChannelGroup, ...]:
        """The groups that can be cut."""
        return tuple(g for g in self.groups if g.frozen is None)

    @property
    def full_widths(self) -> dict[str, int]:
        """The paper's c: every group at the width it was traced with."""
        return {g.name: g.width for g in self.groups}

    def widths(self, widths: Mapping[str, float] | None = None) -> Tensor:
        """All widths in the order of `groups`, float64; groups not named keep their full width.

        Raises:
            BadWidths: an unknown group, a frozen group changed, or a width outside its range.
        """
        vector = torch.tensor([float(g.width) for g in self.groups], dtype=torch.float64, device="cpu")
        for name, width in (widths or {}).items():
            group = self[name]
            if not group.least <= width <= group.width:
                raise BadWidths(f"width {width} of group {name!r} is outside {group.least}..{group.width}.")
            if group.frozen is not None and width != group.width:
                raise BadWidths(f"group {name!r} cannot be cut: {group.frozen}.")
            vector[self._by_name[name]] = width
        return vector

    # --- places ----------------------------------------------------------------------------------

    @cached_property
    def full_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters and buffers as they were traced."""
        full = [group.width for group in self.groups]
        return {t.name: torch.Size([round(axis.at(full)) for axis in t.axes]) for t in self.tensors}

    @cached_property
    def _slot_starts(self) -> list[int]:
        return list(accumulate((group.width for group in self.groups), initial=1))

    @property
    def num_channel_ids(self) -> int:
        """One slot for each unit of each group, and slot 0 for what belongs to none."""
        return self._slot_starts[-1]

    def slots(self, name: str) -> tuple[int, int]:
        """The slots of a group's units: first, and one past the last."""
        number = self._by_name[name]
        return self._slot_starts[number], self._slot_starts[number + 1]

    @cached_property
    def axis_spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """For each cuttable (tensor, axis), where its indices lie in `channel_id_of_index`: start and size."""
        keys = dict.fromkeys((place.tensor, place.axis) for group in self.groups for place in group.places)
        sizes = [self.full_shapes[tensor][axis] for tensor, axis in keys]
        return dict(zip(keys, zip(accumulate(sizes, initial=0), sizes, strict=False), strict=True))

    @cached_property
    def channel_id_of_index(self) -> Tensor:
        """The slot that each index of each cuttable axis belongs to, axis behind axis (see `axis_spans`)."""
        table = torch.zeros(sum(size for _, size in self.axis_spans.values()), dtype=torch.long, device="cpu")
        for group, first in zip(self.groups, self._slot_starts[:-1], strict=True):
            for place in group.places:
                start, _ = self.axis_spans[place.tensor, place.axis]
                table[start + place.index] = first + torch.arange(group.width, device="cpu")[:, None]
        return table

    # --- costs -----------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> CostTable:
        """Costs as differentiable functions of the widths vector."""
        return CostTable(self.layers, self.tensors)

    @cached_property
    def structure(self) -> StructureSpec:
        """What its costs are counted from, without the weights' places."""
        return StructureSpec(
            fingerprint=self.fingerprint,
            groups=tuple(group.name for group in self.groups),
            full_widths=tuple(group.width for group in self.groups),
            least_widths=tuple(group.width if group.frozen is not None else group.least for group in self.groups),
            layers=self.layers,
            tensors=self.tensors,
        )

    def macs(self, widths: Tensor | Mapping[str, float] | None = None) -> Tensor:
        """Multiply-accumulates of one forward pass of the example input."""
        return self.costs.macs(self._vector(widths))

    def parameters(self, widths: Tensor | Mapping[str, float] | None = None) -> Tensor:
        """Number of parameters (buffers are not counted)."""
        return self.costs.parameters(self._vector(widths))

    def weight_bytes(self, widths: Tensor | Mapping[str, float] | None = None) -> Tensor:
        """Bytes of parameters and buffers."""
        return self.costs.weight_bytes(self._vector(widths))

    def activation_bytes(self, widths: Tensor | Mapping[str, float] | None = None) -> Tensor:
        """Bytes that all operators together read and write of activations."""
        return self.costs.activation_bytes(self._vector(widths))

    def _vector(self, widths: Tensor | Mapping[str, float] | None) -> Tensor:
        if isinstance(widths, Tensor):
            if widths.shape != (len(self.groups),):
                raise BadWidths(f"widths has shape {tuple(widths.shape)}, expected ({len(self.groups)},).")
            return widths
        return self.widths(widths)

    def share_of_macs(self, group: ChannelGroup) -> float:
        """The part of all multiply-accumulates done by layers that read, write or carry a group."""
        position = self._by_name[group.name]
        per_layer = self.costs.macs_per_layer(self.widths())
        touched = torch.tensor([layer.touches(position) for layer in self.layers], dtype=torch.bool, device="cpu")
        return float(per_layer[touched].sum() / per_layer.sum().clamp(min=1))

    # --- files -----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the structure: equal for equal networks traced with equal input shapes."""
        return self.fingerprint_if([group.name for group in self.groups if group.frozen is not None])

    def fingerprint_if(self, frozen: Collection[str]) -> str:
        """What the fingerprint would be, were these groups frozen and no others."""
        data = self._to_json()
        structure = {key: data[key] for key in ("groups", "layers", "tensors")}
        for group in structure["groups"]:
            group["frozen"] = group["name"] in frozen  # the wording of a reason is not structure
        return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON.

        Raises:
            BadFile: the file cannot be written.
        """
        data = {"format": FORMAT, "fingerprint": self.fingerprint, **self._to_json()}
        write_text(path, json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> ChannelGraph:
        """Read a graph that `save` wrote.

        Raises:
            BadFile: not a channel graph, another version, or changed since it was written.
        """
        try:
            data = json.loads(read_text(path))
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise BadFile(f"{path} is not a channel graph of this version ({FORMAT!r}).")
            graph = cls._from_json(data)
            graph._check()
        except BadFile:
            raise
        except (BadWidths, ValueError, KeyError, TypeError, IndexError, RuntimeError, OverflowError) as error:
            raise BadFile(f"{path} is damaged ({type(error).__name__}). Trace the network again.") from None
        if graph.fingerprint != data.get("fingerprint"):
            raise BadFile(f"{path} was changed after it was written. Trace the network again.")
        return graph

    def _to_json(self) -> dict[str, Any]:
        return {
            "groups": [
                {
                    "name": g.name,
                    "width": g.width,
                    "frozen": g.frozen,
                    "least": g.least,
                    "places": [
                        {
                            "tensor": p.tensor,
                            "axis": p.axis,
                            "roles": [r.value for r in p.roles],
                            **_pack(p.index),
                        }
                        for p in g.places
                    ],
                }
                for g in self.groups
            ],
            "layers": [layer.to_json() for layer in self.layers],
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "features": [[path, extent.to_json()] for path, extent in self.features],
            "notes": list(self.notes),
            "proof": self.proof,
        }

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> ChannelGraph:
        sizes = [int(g["width"]) * _size(p) for g in data["groups"] for p in g["places"]]
        if min(sizes, default=1) < 1 or sum(sizes) > MOST_INDICES:
            raise ValueError("impossible size")
        groups = tuple(
            ChannelGroup(
                name=str(g["name"]),
                width=int(g["width"]),
                frozen=None if g["frozen"] is None else _text(g["frozen"]),
                least=int(g["least"]),
                places=tuple(
                    ParamSlice(
                        str(p["tensor"]),
                        int(p["axis"]),
                        tuple(Role(r) for r in p["roles"]),
                        _unpack(p, g["width"]),
                    )
                    for p in g["places"]
                ),
            )
            for g in data["groups"]
        )
        layers = tuple(Layer.from_json(item) for item in data["layers"])
        tensors = tuple(TensorShape.from_json(item) for item in data["tensors"])
        features = tuple((str(path), AffineSize.from_json(extent)) for path, extent in data["features"])
        proof = None if data["proof"] is None else float(data["proof"])
        return cls(groups, layers, tensors, features, tuple(_text(note) for note in data["notes"]), proof)

    def _check(self) -> None:
        """Refuses parts that do not fit together, as only a file can hold them."""
        if len(self._by_name) != len(self.groups) or len(self.full_shapes) != len(self.tensors):
            raise ValueError("a name stands there twice")
        if not all(axis < 1 << 60 for shape in self.full_shapes.values() for axis in shape):
            raise ValueError("a size is beyond counting")
        for group in self.groups:
            for place in group.places:
                end = self.full_shapes[place.tensor][place.axis]
                if place.axis < 0 or int(place.index.min()) < 0 or int(place.index.max()) >= end:
                    raise IndexError(place.tensor)
        _ = self.structure  # which refuses sizes that are negative, or of no group

    def __repr__(self) -> str:
        cut = f"{len(self.prunable)} of {len(self.groups)} groups prunable"
        size = f"{int(self.parameters()):,} parameters, {int(self.macs()):,} MACs"
        return f"<ChannelGraph {self.fingerprint}: {cut}, {size}>"

    def __str__(self) -> str:
        cut = f"{len(self.prunable)} of {len(self.groups)} channel groups can be cut"
        size = f"{int(self.parameters()):,} parameters, {int(self.macs()):,} MACs"
        lines = [f"ChannelGraph {self.fingerprint}: {cut}; {size}"]
        for group in self.groups:
            state = f"frozen: {group.frozen}" if group.frozen else f"read by {_some(list(group.layers(Role.READ)))}"
            lines.append(f"  {group.name}: {group.width} units, {state}")
        return "\n".join(lines)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _pack(index: Tensor) -> dict[str, Any]:
    """An index matrix as (offset, unit step, size, inner step) where it is regular, else in full."""
    units, size = index.shape
    offset = int(index[0, 0])
    step = int(index[1, 0]) - offset if units > 1 else 0
    inner = int(index[0, 1]) - offset if size > 1 else 0
    if torch.equal(index, _regular(offset, step, units, size, inner)):
        return {"regular": [offset, step, size, inner]}
    return {"index": index.tolist()}


def _regular(offset: int, step: int, units: int, size: int, inner: int) -> Tensor:
    return (
        offset + step * torch.arange(units, device="cpu")[:, None] + inner * torch.arange(size, device="cpu")[None, :]
    )


def _size(place: Mapping[str, Any]) -> int:
    """Indices of one unit."""
    return int(place["regular"][2]) if "regular" in place else 1  # in full, they are as long as the file


def _unpack(place: Mapping[str, Any], units: int) -> Tensor:
    if "regular" in place:
        offset, step, size, inner = (int(v) for v in place["regular"])
        return _regular(offset, step, units, size, inner)
    return torch.tensor(place["index"], dtype=torch.long, device="cpu").view(units, -1)


def _some(names: list[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit]) or "none"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


__all__ = ["AffineSize", "ChannelGraph", "ChannelGroup", "Layer", "ParamSlice", "Role", "TensorShape"]
