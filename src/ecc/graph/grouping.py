"""From labels to groups: connected components of the unions are units, and interchangeable units form a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from ecc.graph.calls import OpRecord
from ecc.graph.channel_graph import ChannelGraph, ChannelGroup, ParamSlice, WidthScale
from ecc.graph.labels import FROZEN, ChannelLabels, Role, Scale
from ecc.graph.structure import AffineSize, Layer, TensorShape

_ROLE_ORDER = (Role.PRODUCER, Role.PER_CHANNEL, Role.CONSUMER)


class ChannelPartition:
    """Partition of all labels into units, and of all units into groups."""

    def __init__(self, channel_labels: ChannelLabels, *, freeze: Sequence[str] = ()) -> None:
        self.channel_labels = channel_labels
        self.unit = _components(channel_labels)  # by label
        self.count = int(self.unit.max()) + 1
        self.reasons: list[str] = []
        self.reason = np.zeros(self.count, dtype=np.int64)  # by unit: 0, or 1 + its position in `reasons`
        self._sizes: dict[tuple[int, int, int], tuple[int, np.ndarray, np.ndarray]] = {}
        self.zeroed = np.zeros(self.count, dtype=bool)  # by unit: masking sets all slices to zero
        for labels in channel_labels.zeroed:
            self.zeroed[self.unit[labels[labels != FROZEN].numpy()]] = True
        for labels, why in channel_labels.freezes():
            self._freeze(self.unit[labels.numpy()], why)
        self._freeze_unmaskable(freeze)
        self.needs_two = np.zeros(self.count, dtype=bool)  # by unit: the minimum width is 2
        for labels in channel_labels.needs_two:
            self.needs_two[self.unit[labels.numpy()]] = True
        self._make_groups()
        self._count_axes()

    @property
    def frozen(self) -> np.ndarray:
        """By unit: whether it is not prunable."""
        return self.reason > 0

    def frozen_mask(self) -> Tensor:
        """By label: whether it is not prunable."""
        stuck = self.frozen[self.unit]
        stuck[FROZEN] = True
        return torch.from_numpy(stuck)

    def repeated(self) -> Tensor:
        """By label: whether its unit has several indices on its axis."""
        found = torch.zeros(self.channel_labels.size, dtype=torch.bool)
        for key in self.channel_labels.axes:
            labels = self.channel_labels.vector(*key)
            _, groups, counts = self._sizes[_key(labels)]
            if any(count > len(self.groups[group]) for group, count in zip(groups, counts, strict=True)):
                found[labels] = True
        return found

    def why(self, unit: int) -> str | None:
        """Why a unit is not prunable; None if it is."""
        number = self.reason[unit]
        return self.reasons[number - 1] if number else None

    def _freeze(self, units: np.ndarray, why: str) -> None:
        fresh = units[self.reason[units] == 0]
        if len(fresh):
            self.reasons.append(why)
            self.reason[fresh] = len(self.reasons)

    def units_on(self, key: tuple[str, int]) -> np.ndarray:
        """The unit of each index of an axis."""
        axis = self.channel_labels.axes[key]
        return self.unit[axis.start : axis.start + axis.size]

    def _freeze_unmaskable(self, patterns: Sequence[str]) -> None:
        """Freeze what the user named, and channels without a consumer, which cannot be masked by a zero slice."""
        for key, roles in self.channel_labels.roles.items():
            names = _with_parents(key[0])
            if roles and Role.CONSUMER not in roles and any(fnmatch(name, p) for name in names for p in patterns):
                self._freeze(self.units_on(key), "frozen by the argument `freeze`")
        maskable = self._with(Role.CONSUMER) | self.zeroed
        for labels in self.channel_labels.factors:
            maskable[self.unit[labels.numpy()]] = True
        self._freeze(np.flatnonzero(~maskable), "no layer consumes it")

    def _with(self, role: Role) -> np.ndarray:
        """By unit: whether it is on an axis with this role."""
        found = np.zeros(self.count, dtype=bool)
        for key, roles in self.channel_labels.roles.items():
            if role in roles:
                found[self.units_on(key)] = True
        return found

    def _make_groups(self) -> None:
        """Group interchangeable units: equal numbers of indices on the same axes, and the same reason if frozen.

        Each axis gets a random 64-bit number. The sum of these numbers over the indices of a unit identifies the
        multiset of its axes, so that grouping is one `np.unique` instead of a comparison of all pairs of units.
        """
        sizes = [axis.size for axis in self.channel_labels.axes.values()]
        axis_of = np.repeat(np.arange(len(sizes)), sizes)  # labels are numbered axis by axis
        unit_of = self.unit[self.channel_labels.size - len(axis_of) :]
        axis_codes = np.random.default_rng(0).integers(1, 2**63, size=len(sizes), dtype=np.uint64)
        signature = np.zeros(self.count, dtype=np.uint64)  # one sum per unit
        np.add.at(signature, unit_of, axis_codes[axis_of])
        produced, per_channel, consumed = (
            self._with(role) for role in (Role.PRODUCER, Role.PER_CHANNEL, Role.CONSUMER)
        )
        produced |= per_channel & consumed
        # Channels without a producer (the network's input) form no group: they are the fixed part of sizes.
        units, first = np.unique(unit_of[produced[unit_of]], return_index=True)
        first = np.flatnonzero(produced[unit_of])[first]
        units = units[np.argsort(first, kind="stable")]  # in the order of the forward pass
        state = 2 * self.reason[units] + self.zeroed[units]
        keys = np.stack([signature[units], state.astype(np.uint64)])
        _, start, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        number = np.empty(len(start), dtype=np.int64)
        number[np.argsort(start, kind="stable")] = np.arange(len(start))
        group = number[group.reshape(-1)]
        order = np.argsort(group, kind="stable")
        bounds = np.flatnonzero(np.diff(group[order])) + 1
        self.groups = np.split(units[order], bounds) if len(units) else []
        self.group_of = np.full(self.count, -1)
        self.rank = np.zeros(self.count, dtype=np.int64)
        for number_, members in enumerate(self.groups):
            self.group_of[members] = number_
            self.rank[members] = np.arange(len(members))

    def _count_axes(self) -> None:
        """Count the indices of each axis that belong to each group, for all parameters at once."""
        if not self.channel_labels.axes:
            return
        axis_of = np.repeat(
            np.arange(len(self.channel_labels.axes)), [axis.size for axis in self.channel_labels.axes.values()]
        )
        group_of = self.group_of[self.unit[self.channel_labels.size - len(axis_of) :]] + 1  # 0: no group
        codes, counts = np.unique(axis_of * (len(self.groups) + 1) + group_of, return_counts=True)
        axis_of, group_of = np.divmod(codes, len(self.groups) + 1)
        parts = np.split(np.arange(len(codes)), np.flatnonzero(np.diff(axis_of)) + 1)
        for key, part in zip(self.channel_labels.axes, parts, strict=True):
            fixed = int(counts[part[0]]) if group_of[part[0]] == 0 else 0
            part = part[group_of[part] > 0]
            self._sizes[_key(self.channel_labels.vector(*key))] = (fixed, group_of[part] - 1, counts[part])

    def size_of(self, labels: Tensor, scale: int = 1) -> AffineSize:
        """The number of labels, times `scale`, as a function of the widths."""
        key = _key(labels)
        if key not in self._sizes:
            groups = self.group_of[self.unit[labels.reshape(-1).numpy()]]
            found, counts = np.unique(groups[groups >= 0], return_counts=True)
            self._sizes[key] = (int((groups < 0).sum()), found, counts)
        fixed, found, counts = self._sizes[key]
        multiples = []
        for group, n in zip(found.tolist(), counts.tolist(), strict=True):
            multiple, rest = divmod(n * scale, len(self.groups[group]))
            if rest:  # only some units of a group (a slice): the group is frozen
                fixed += n
            else:
                multiples.append((group, multiple))
        return AffineSize(fixed * scale, tuple(multiples))


def _key(labels: Tensor) -> tuple[int, int, int]:
    """Identifies a vector of labels during a trace."""
    return labels.data_ptr(), labels.numel(), labels.stride(0) if labels.dim() else 0


def _with_parents(name: str) -> list[str]:
    """The name of a tensor and of the modules around it: `a.b.weight`, `a.b`, `a`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _components(channel_labels: ChannelLabels) -> np.ndarray:
    left, right, _ = channel_labels.unions()
    ones = np.ones(len(left), dtype=np.int8)
    pairs = (
        left.int().numpy(),
        right.int().numpy(),
    )  # scipy 1.11 accepts only int32, and prints its error instead of raising it
    matrix = coo_array((ones, pairs), shape=(channel_labels.size, channel_labels.size))
    return np.asarray(connected_components(matrix, directed=False)[1], dtype=np.int64)


def build_graph(partition: ChannelPartition, tensors: Mapping[str, Tensor]) -> ChannelGraph:
    """The channel graph of a partition, without layers."""
    slices = _slices_by_group(partition)
    groups: list[ChannelGroup] = []
    taken: dict[str, int] = {}
    for number, units in enumerate(partition.groups):
        reason = partition.why(units[0])
        name = _name(slices[number])
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
        min_width = min(2, len(units)) if partition.needs_two[units].any() else 1
        if reason is None and len(units) == min_width:
            reason = "it already has its minimum width"
        zeroed = bool(partition.zeroed[units[0]])
        groups.append(ChannelGroup(name, len(units), slices[number], reason, min_width, zeroed))
    shapes = tuple(_tensor_shape(partition, name, tensor) for name, tensor in tensors.items())
    attributes = partition.channel_labels.attributes.items()
    sizes = [(path, name, partition.size_of(labels)) for (path, name), labels in attributes]
    following = tuple(one for one in sizes if any(groups[group].frozen is None for group, _ in one[2].multiples))
    scales = dict.fromkeys(_width_scale(partition, scale) for scale in partition.channel_labels.scales)
    changing = tuple(
        scale for scale in scales if any(groups[group].frozen is None for group, _ in scale.size.multiples)
    )
    norms = tuple(
        path
        for path, labels in partition.channel_labels.layer_norms.items()
        if any(groups[group].frozen is None for group, _ in partition.size_of(labels).multiples)
    )
    return ChannelGraph(tuple(groups), (), shapes, following, scales=changing, layer_norms=norms)


def _width_scale(partition: ChannelPartition, scale: Scale) -> WidthScale:
    size = partition.size_of(scale.labels)
    if scale.slices is None:
        return WidthScale(scale.target, size, scale.power, scale.offset)
    ((_, axis), index), *_ = partition.channel_labels.indices(scale.slices)
    full = partition.channel_labels.axes[scale.target, axis].size
    bounds = np.flatnonzero(np.diff(index.numpy()) > 1) + 1
    parts = np.split(index.numpy(), bounds)
    ranges = tuple((int(part[0]), int(part[-1]) + 1) for part in parts)
    return WidthScale(scale.target, size, scale.power, scale.offset, axis, () if ranges == ((0, full),) else ranges)


def build_layers(partition: ChannelPartition, records: Sequence[OpRecord]) -> tuple[Layer, ...]:
    """The layers of a recorded pass, with sizes as functions of the widths."""
    return tuple(_layer(partition, record) for record in records)


def _slices_by_group(partition: ChannelPartition) -> list[tuple[ParamSlice, ...]]:
    """For each group, the slices of its units, producers first."""
    found: list[list[tuple[int, ParamSlice]]] = [[] for _ in partition.groups]
    factors = partition.channel_labels.factors
    is_factor = np.zeros(partition.channel_labels.size if factors else 0, dtype=bool)
    for labels in factors:
        is_factor[labels.numpy()] = True
    for key, axis in partition.channel_labels.axes.items():
        units = partition.unit[axis.start : axis.start + axis.size]
        roles = tuple(role for role in _ROLE_ORDER if role in partition.channel_labels.roles[key])
        if not roles:  # a constant, which no tensor holds
            continue
        groups, ranks = partition.group_of[units], partition.rank[units]
        alone = bool((groups == groups[0]).all())
        for group in groups[:1] if alone else np.unique(groups):
            if group < 0:
                continue
            where = np.arange(axis.size) if alone else np.flatnonzero(groups == group)
            mine = ranks if alone else ranks[where]
            if bool((mine[1:] < mine[:-1]).any()):
                where = where[np.argsort(mine, kind="stable")]
            index = torch.from_numpy(where.reshape(len(partition.groups[group]), -1))
            own = (*roles, Role.FACTOR) if factors and bool(is_factor[axis.start + where].any()) else roles
            found[group].append((_ROLE_ORDER.index(roles[0]), ParamSlice(axis.tensor, axis.axis, own, index)))
    return [tuple(one for _, one in sorted(group, key=lambda item: item[0])) for group in found]


def _name(slices: tuple[ParamSlice, ...]) -> str:
    """The first module that produces the channels."""
    return slices[0].tensor.rpartition(".")[0] or slices[0].tensor


def _layer(partition: ChannelPartition, record: OpRecord) -> Layer:
    one = AffineSize(1)
    sizes = [partition.size_of(factor) for factor in record.factors]
    incoming, outgoing = [*sizes, one, one][:2] if len(sizes) != 1 else (one, sizes[0])
    return Layer(
        path=record.path,
        kind=record.kind,
        macs=record.macs,
        incoming=incoming,
        outgoing=outgoing,
        reads=_total(partition, record.reads),
        writes=_total(partition, record.writes),
        item_bytes=record.item_bytes,
        tensors=tuple(record.tensors),
    )


def _total(partition: ChannelPartition, amounts: Sequence[tuple[Tensor, int]]) -> AffineSize:
    fixed = 0
    multiples: dict[int, int] = defaultdict(int)
    for labels, scale in amounts:
        size = partition.size_of(labels, scale)
        fixed += size.fixed
        for group, multiple in size.multiples:
            multiples[group] += multiple
    return AffineSize(fixed, tuple(sorted(multiples.items())))


def _tensor_shape(partition: ChannelPartition, name: str, tensor: Tensor) -> TensorShape:
    axes = tuple(
        partition.size_of(partition.channel_labels.vector(name, number))
        if (name, number) in partition.channel_labels.axes
        else AffineSize(size)
        for number, size in enumerate(tensor.shape)
    )
    return TensorShape(name, axes, tensor.element_size(), isinstance(tensor, nn.Parameter))
