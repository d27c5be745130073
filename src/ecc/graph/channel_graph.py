"""The channel graph: which channels of a network must be pruned together, and its costs at any widths.

A *unit* is the smallest thing that can be pruned: channels of one or more layers that must be pruned together. A
`ChannelGroup` is a set of interchangeable units: they occupy the same axes of the same tensors. The widths of the
groups are the paper's s. A plain chain of layers has one group between each two layers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecc.errors import BadFile, BadWidths
from ecc.graph.labels import Role
from ecc.graph.structure import AffineSize, Branch, CostTable, Layer, Replacement, StructureSpec, TensorShape
from ecc.records import read_record, to_json, write_record

FORMAT = "ecc channel graph, version 4"
MAX_SHOWN = 40
"""Groups that `str(graph)` lists."""
MAX_INDICES = 1 << 24
"""Limit on the number of indices in a file (128 MiB), far above the largest networks."""
MAX_SIZE = 1 << 60
"""Limit on any size in a file, so that products do not overflow."""


@dataclass(frozen=True)
class ParamSlice:
    """Indices of one axis of a parameter or buffer that belong to the units of a group."""

    tensor: str
    axis: int
    roles: tuple[Role, ...]
    index: Tensor
    """Indices along the axis, shape (units, indices per unit)."""

    @property
    def is_consumer(self) -> bool:
        """Whether a layer takes the channel as input here."""
        return Role.CONSUMER in self.roles

    @property
    def masks(self) -> bool:
        """Whether it has to be zero for the channel to be masked."""
        return Role.CONSUMER in self.roles or Role.FACTOR in self.roles


@dataclass(frozen=True)
class ChannelGroup:
    """Interchangeable units, whose number is the width of the group."""

    name: str
    width: int
    """Number of units."""
    slices: tuple[ParamSlice, ...]
    frozen: str | None = None
    """Why the group is not prunable; None if it is."""
    min_width: int = 1
    """Smallest allowed width. It is 2 where code squeezes axes of size one, and under LayerNorm."""
    zeroed: bool = False
    """Whether masking a unit sets all of its slices to zero, since code sums over the channels (RMSNorm, LayerNorm)."""

    @property
    def masked_slices(self) -> tuple[ParamSlice, ...]:
        """The slices that are zero if a unit is masked: those of consumers and factors, or all if `zeroed`."""
        return self.slices if self.zeroed else tuple(one for one in self.slices if one.masks)

    @property
    def ranked_slices(self) -> tuple[ParamSlice, ...]:
        """The slices from which the importance of a unit is computed: those of consumers and factors, else all."""
        return tuple(one for one in self.slices if one.masks) or self.masked_slices

    def layers(self, role: Role) -> tuple[str, ...]:
        """Paths of the modules that have this role for the group, in the order of the forward pass."""
        paths = [one.tensor.rpartition(".")[0] or one.tensor for one in self.slices if role in one.roles]
        return tuple(dict.fromkeys(paths))

    def __repr__(self) -> str:
        state = "prunable" if self.frozen is None else f"frozen: {self.frozen}"
        return f"<ChannelGroup {self.name}: {self.width} units in {len(self.slices)} tensors, {state}>"


@dataclass(frozen=True)
class WidthScale:
    """A parameter or attribute that changes with the number of channels of a mean, such as weight and eps of RMSNorm.

    In a smaller network it is `(value + offset) * (full size / size) ** power - offset`.
    """

    target: str
    """Name of the parameter, or module path and attribute."""
    size: AffineSize
    """Number of channels of the mean."""
    power: float
    offset: float = 0.0
    axis: int = 0
    """The axis of `ranges`."""
    ranges: tuple[tuple[int, int], ...] = ()
    """First index and end of the slices of the parameter that change; empty for all of it."""

    def factor(self, full_widths: Sequence[float], widths: Sequence[float]) -> float:
        """The factor at these widths, one per group of the graph."""
        size = self.size.at(widths)
        return (self.size.at(full_widths) / size) ** self.power if size else 1.0


@dataclass(frozen=True, repr=False)
class ChannelGraph:
    """Groups, layers and tensors of one traced network.

    Widths are given by group name, or as a vector in the order of `groups`.
    """

    groups: tuple[ChannelGroup, ...]
    layers: tuple[Layer, ...]
    tensors: tuple[TensorShape, ...]
    features: tuple[tuple[str, str, AffineSize], ...] = ()
    """Attributes of modules that follow the widths (`num_heads`): module path, attribute and size."""
    branches: tuple[Branch, ...] = ()
    """Residual branches that can be removed entirely."""
    replacements: tuple[Replacement, ...] = ()
    """The modules that are replaced when branches are removed."""
    kept_branches: tuple[tuple[str, str], ...] = ()
    """Residual branches that cannot be removed, and why."""
    scales: tuple[WidthScale, ...] = ()
    """Parameters and attributes that are scaled in a smaller network."""
    layer_norms: tuple[str, ...] = ()
    """Paths of the modules with a layer norm over prunable channels, which leaves out masked ones."""
    notes: tuple[str, ...] = ()
    """What a user should know about this trace, such as parameters that the example input did not use."""
    max_relative_diff: float | None = None
    """Largest relative difference between the outputs of masked and slim networks; None if not verified."""
    input_shapes: dict[str, tuple[int, ...]] | None = field(default=None, compare=False)
    """Shapes of the example input, by position or name; sizes and MACs of layers are for these. None if unknown."""
    _by_name: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {g.name: i for i, g in enumerate(self.groups)})

    def __getitem__(self, name: str) -> ChannelGroup:
        try:
            return self.groups[self._by_name[name]]
        except KeyError:
            raise BadWidths(f"no channel group is called {name!r}. Groups: {_some(self._by_name)}.") from None

    @cached_property
    def prunable(self) -> tuple[ChannelGroup, ...]:
        """The groups that can be pruned."""
        return tuple(g for g in self.groups if g.frozen is None)

    @cached_property
    def variable(self) -> tuple[ChannelGroup, ...]:
        """The groups whose width can vary: those that can be pruned, and those inside a branch that can be removed."""
        inside = {name for branch in self.branches for name in branch.groups}
        return tuple(g for g in self.groups if g.frozen is None or g.name in inside)

    @property
    def full_widths(self) -> dict[str, int]:
        """Widths of the dense network, the paper's c."""
        return {g.name: g.width for g in self.groups}

    @property
    def unit_channels(self) -> dict[str, int]:
        """Channels of one unit of a group, where it is more than one: those of an attention head, or tied channels."""
        found = {g.name: g.slices[0].index.numel() // g.width for g in self.groups}
        return {name: count for name, count in found.items() if count > 1}

    @property
    def follows(self) -> dict[str, str]:
        """Layers without MACs (norms, activations, sums), and the layer with MACs that each comes after.

        Layers before the first one with MACs come before it.
        """
        paths = list(dict.fromkeys(layer.path for layer in self.layers if layer.macs and layer.path))
        found: dict[str, str] = {}
        last = paths[0] if paths else ""
        for layer in self.layers:
            if layer.path in paths:
                last = layer.path
            elif layer.path and last:
                found.setdefault(layer.path, last)
        return found

    def widths(self, widths: Mapping[str, float] | None = None) -> Tensor:
        """All widths in the order of `groups`, float64; groups that are not named keep their full width.

        Width 0 removes a branch and must be given for all its groups.

        Raises:
            BadWidths: If a group is unknown, is not prunable, or a width is outside its range.
        """
        inside = {name for branch in self.branches for name in branch.groups}
        for name, width in (widths or {}).items():
            group = self[name]
            if group.frozen is not None and width != group.width and not (width == 0 and name in inside):
                reason = group.frozen.removeprefix("not prunable: ").rstrip(".")
                raise BadWidths(f"group {name!r} is not prunable: {reason}.")
        return self._sizes.widths(widths)

    # --- slices ----------------------------------------------------------------------------------

    @cached_property
    def full_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the parameters and buffers of the dense network."""
        full = [group.width for group in self.groups]
        return {t.name: torch.Size([round(axis.at(full)) for axis in t.axes]) for t in self.tensors}

    @cached_property
    def _first_ids(self) -> list[int]:
        return list(accumulate((group.width for group in self.groups), initial=1))

    @property
    def num_channel_ids(self) -> int:
        """Number of channel ids: one for each unit of each group, and id 0 for indices that belong to no group."""
        return self._first_ids[-1]

    def channel_ids(self, name: str) -> tuple[int, int]:
        """Range of the ids of a group's units: the first, and one past the last."""
        number = self._by_name[name]
        return self._first_ids[number], self._first_ids[number + 1]

    @cached_property
    def axis_spans(self) -> dict[tuple[str, int], tuple[int, int]]:
        """For each prunable (tensor, axis), start and size of its part of `channel_id_of_index`."""
        keys = dict.fromkeys((one.tensor, one.axis) for group in self.groups for one in group.slices)
        sizes = [self.full_shapes[tensor][axis] for tensor, axis in keys]
        return dict(zip(keys, zip(accumulate(sizes, initial=0), sizes, strict=False), strict=True))

    @cached_property
    def channel_id_of_index(self) -> Tensor:
        """Channel id of each index of each prunable axis, all axes concatenated (see `axis_spans`)."""
        table = np.zeros(sum(size for _, size in self.axis_spans.values()), dtype=np.int64)
        for group, first in zip(self.groups, self._first_ids[:-1], strict=True):
            ids = first + np.arange(group.width)[:, None]
            for one in group.slices:
                start, _ = self.axis_spans[one.tensor, one.axis]
                table[start + one.index.numpy()] = ids
        return torch.from_numpy(table)

    # --- costs -----------------------------------------------------------------------------------

    @cached_property
    def costs(self) -> CostTable:
        """Costs as differentiable functions of the vector of widths."""
        return self.structure.costs

    @cached_property
    def structure(self) -> StructureSpec:
        """The graph without its parameter slices, from which costs are computed."""
        return replace(self._sizes, fingerprint=self.fingerprint)

    @cached_property
    def _sizes(self) -> StructureSpec:
        """The structure without its fingerprint, which would take most of the time of a resize."""
        return StructureSpec(
            fingerprint="",
            groups=tuple(group.name for group in self.groups),
            full_widths=tuple(group.width for group in self.groups),
            min_widths=tuple(group.width if group.frozen is not None else group.min_width for group in self.groups),
            layers=self.layers,
            tensors=self.tensors,
            branches=self.branches,
            replacements=self.replacements,
        )

    def without_branches(self) -> ChannelGraph:
        """The same graph with no branch that can be removed."""
        return replace(self, branches=(), replacements=())

    def branch(self, name: str) -> Branch:
        """The branch with this name.

        Raises:
            BadWidths: If there is none.
        """
        found = next((branch for branch in self.branches if branch.name == name), None)
        if found is None:
            raise BadWidths(f"no branch is called {name!r}. Branches: {_some([b.name for b in self.branches])}.")
        return found

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
        """Bytes of activations that all layers read and write."""
        return self.costs.activation_bytes(self._vector(widths))

    def _vector(self, widths: Tensor | Mapping[str, float] | None) -> Tensor:
        if isinstance(widths, Tensor):
            if widths.shape != (len(self.groups),):
                raise BadWidths(f"widths has shape {tuple(widths.shape)}, expected ({len(self.groups)},).")
            return widths
        return self.widths(widths)

    def share_of_macs(self, group: ChannelGroup) -> float:
        """Share of the multiply-accumulates of layers that depend on the width of a group."""
        position = self._by_name[group.name]
        per_layer = self.costs.macs_per_layer(self.widths())
        touched = torch.tensor([layer.depends_on(position) for layer in self.layers], dtype=torch.bool, device="cpu")
        return float(per_layer[touched].sum() / per_layer.sum().clamp(min=1))

    @property
    def prunable_share(self) -> float:
        """Share of the parameters that lie on an axis of a prunable group, so that some width changes their number."""
        full = [group.width for group in self.groups]
        fixed = [0 if group.frozen is None else group.width for group in self.groups]
        total = left = 0.0
        for tensor in self.tensors:
            if tensor.is_parameter:
                total += math.prod(axis.at(full) for axis in tensor.axes)
                left += math.prod(axis.at(fixed) for axis in tensor.axes)
        return 1 - left / total if total else 0.0

    # --- files -----------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the structure, equal for equal networks traced with equal input shapes."""
        return self.fingerprint_if([group.name for group in self.groups if group.frozen is not None])

    def fingerprint_if(self, frozen: Collection[str]) -> str:
        """The fingerprint that the graph would have if exactly these groups were frozen."""
        groups = [
            (record.name, record.width, record.name in frozen, record.min_width, record.slices)
            for record in map(_GroupRecord.of, self.groups)
        ]
        return hashlib.sha256(to_json((groups, self.layers, self.tensors))).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON.

        Raises:
            BadFile: If the file cannot be written.
        """
        record = ChannelGraphFile(
            format=FORMAT,
            fingerprint=self.fingerprint,
            groups=tuple(map(_GroupRecord.of, self.groups)),
            layers=self.layers,
            tensors=self.tensors,
            features=self.features,
            branches=self.branches,
            replacements=self.replacements,
            kept_branches=self.kept_branches,
            scales=self.scales,
            layer_norms=self.layer_norms,
            notes=self.notes,
            max_relative_diff=self.max_relative_diff,
            input_shapes=self.input_shapes,
        )
        write_record(path, record)

    @classmethod
    def load(cls, path: str | Path) -> ChannelGraph:
        """Read a graph that `save` wrote.

        Raises:
            BadFile: If the file is not a channel graph of this version, or was changed since it was written.
        """
        record = read_record(path, ChannelGraphFile)
        if record.format != FORMAT:
            raise BadFile(
                f"{path} has format {record.format!r}; this version reads {FORMAT!r}. Trace the network again."
            )
        try:
            record.check_size()
            graph = cls(
                groups=tuple(group.unpack() for group in record.groups),
                layers=record.layers,
                tensors=record.tensors,
                features=record.features,
                branches=record.branches,
                replacements=record.replacements,
                kept_branches=record.kept_branches,
                scales=record.scales,
                layer_norms=record.layer_norms,
                notes=record.notes,
                max_relative_diff=record.max_relative_diff,
                input_shapes=record.input_shapes,
            )
            graph._check()
        except (BadWidths, ValueError, KeyError, IndexError, RuntimeError, OverflowError) as error:
            raise BadFile(f"{path} is damaged ({type(error).__name__}). Trace the network again.") from None
        if graph.fingerprint != record.fingerprint:
            raise BadFile(f"{path} was changed after it was written. Trace the network again.")
        return graph

    def _check(self) -> None:
        """Check that the parts of a graph from a file fit together."""
        if len(self._by_name) != len(self.groups) or len(self.full_shapes) != len(self.tensors):
            raise ValueError("a name occurs twice")
        if not all(axis < MAX_SIZE for shape in self.full_shapes.values() for axis in shape):
            raise ValueError("a size is too large")
        for group in self.groups:
            for one in group.slices:
                end = self.full_shapes[one.tensor][one.axis]
                if one.axis < 0 or int(one.index.min()) < 0 or int(one.index.max()) >= end:
                    raise IndexError(one.tensor)
        _ = self.structure  # checks all sizes

    def __repr__(self) -> str:
        prunable = f"{len(self.prunable)} of {len(self.groups)} groups prunable"
        size = f"{int(self.parameters()):,} parameters, {int(self.macs()):,} MACs"
        return f"<ChannelGraph {self.fingerprint}: {prunable}, {size}>"

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        for group in self.groups[:MAX_SHOWN]:
            state = f"frozen: {group.frozen}" if group.frozen else f"consumers {_some(group.layers(Role.CONSUMER))}"
            lines.append(f"  {group.name}: {group.width} units, {state}")
        if len(self.groups) > MAX_SHOWN:
            lines.append(f"  ... and {len(self.groups) - MAX_SHOWN} more groups (see `groups`)")
        return "\n".join(lines)


@dataclass(frozen=True)
class _SliceRecord:
    """A `ParamSlice` in a file. Its indices are `regular`, or listed in `index`."""

    tensor: str
    axis: int
    roles: tuple[Role, ...]
    regular: tuple[int, int, int, int] | None = None
    """(offset, step between units, indices per unit, step between the indices of a unit)."""
    index: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of(cls, one: ParamSlice) -> _SliceRecord:
        index = one.index.numpy()
        units, size = index.shape
        offset = int(index[0, 0])
        step = int(index[1, 0]) - offset if units > 1 else 0
        inner = int(index[0, 1]) - offset if size > 1 else 0
        if np.array_equal(index, offset + step * np.arange(units)[:, None] + inner * np.arange(size)):
            return cls(one.tensor, one.axis, one.roles, regular=(offset, step, size, inner))
        return cls(one.tensor, one.axis, one.roles, index=tuple(map(tuple, one.index.tolist())))

    def unpack(self, units: int) -> ParamSlice:
        if self.regular is not None:
            index = _regular_index(units, *self.regular)
        else:
            index = torch.tensor(self.index or (), dtype=torch.long, device="cpu").view(units, -1)
        return ParamSlice(self.tensor, self.axis, self.roles, index)


@dataclass(frozen=True)
class _GroupRecord:
    """A `ChannelGroup` in a file."""

    name: str
    width: int
    frozen: str | None
    min_width: int
    slices: tuple[_SliceRecord, ...]
    zeroed: bool = False

    @classmethod
    def of(cls, group: ChannelGroup) -> _GroupRecord:
        slices = tuple(map(_SliceRecord.of, group.slices))
        return cls(group.name, group.width, group.frozen, group.min_width, slices, group.zeroed)

    def unpack(self) -> ChannelGroup:
        slices = tuple(one.unpack(self.width) for one in self.slices)
        return ChannelGroup(self.name, self.width, slices, self.frozen, self.min_width, self.zeroed)


@dataclass(frozen=True)
class ChannelGraphFile:
    """A `ChannelGraph` in a file."""

    format: str
    fingerprint: str
    groups: tuple[_GroupRecord, ...]
    layers: tuple[Layer, ...]
    tensors: tuple[TensorShape, ...]
    features: tuple[tuple[str, str, AffineSize], ...]
    scales: tuple[WidthScale, ...]
    notes: tuple[str, ...]
    max_relative_diff: float | None
    branches: tuple[Branch, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    kept_branches: tuple[tuple[str, str], ...] = ()
    layer_norms: tuple[str, ...] = ()
    input_shapes: dict[str, tuple[int, ...]] | None = None

    def check_size(self) -> None:
        """Refuse a small file that would unpack to huge tensors."""
        sizes = [group.width * (one.regular[2] if one.regular else 1) for group in self.groups for one in group.slices]
        if min(sizes, default=1) < 1 or sum(sizes) > MAX_INDICES:
            raise ValueError("impossible size")


def _regular_index(units: int, offset: int, step: int, size: int, inner: int) -> Tensor:
    rows, columns = torch.arange(units, device="cpu")[:, None], torch.arange(size, device="cpu")[None, :]
    return offset + step * rows + inner * columns


def _some(names: Collection[str], limit: int = 6) -> str:
    shown = ", ".join(list(names)[:limit]) or "none"
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
