"""From labels to groups: connected components of the unions, sorted into groups of interchangeable units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from ecc.graph.call import Record
from ecc.graph.channel_graph import ChannelGraph, ChannelGroup, ParamSlice
from ecc.graph.labels import FROZEN, ChannelLabels, Role
from ecc.graph.structure import AffineSize, Layer, TensorShape

_ROLE_ORDER = (Role.PRODUCER, Role.PER_CHANNEL, Role.CONSUMER)


class ChannelPartition:
    """The units of a label book: for each label its unit, for each unit its group."""

    def __init__(self, book: ChannelLabels, *, freeze: Sequence[str] = ()) -> None:
        self.book = book
        self.unit = _components(book)  # by label
        self.count = int(self.unit.max()) + 1
        self.reasons: list[str] = []
        self.reason = np.zeros(self.count, dtype=np.int64)  # by unit: 0, or 1 + its place in `reasons`
        self._extents: dict[tuple[int, int, int], tuple[int, np.ndarray, np.ndarray]] = {}
        for labels, why in book.freezes():
            self._freeze(self.unit[labels.numpy()], why)
        self._freeze_unreadable(freeze)
        self.paired = np.zeros(self.count, dtype=bool)  # by unit: two must stay
        for labels in book.paired:
            self.paired[self.unit[labels.numpy()]] = True
        self._make_groups()
        self._count_axes()

    @property
    def frozen(self) -> np.ndarray:
        """By unit: whether it can never be cut."""
        return self.reason > 0

    def immovable(self) -> Tensor:
        """By label: whether it can never be cut."""
        stuck = self.frozen[self.unit]
        stuck[FROZEN] = True
        return torch.from_numpy(stuck)

    def manifold(self) -> Tensor:
        """By label: whether its unit stands more than once on its axis."""
        found = torch.zeros(self.book.size, dtype=torch.bool)
        for key in self.book.axes:
            labels = self.book.vector(*key)
            _, groups, counts = self._extents[_key(labels)]
            if any(count > len(self.groups[group]) for group, count in zip(groups, counts, strict=True)):
                found[labels] = True
        return found

    def why(self, unit: int) -> str | None:
        """Why a unit cannot be cut."""
        number = self.reason[unit]
        return self.reasons[number - 1] if number else None

    def _freeze(self, units: np.ndarray, why: str) -> None:
        fresh = units[self.reason[units] == 0]
        if len(fresh):
            self.reasons.append(why)
            self.reason[fresh] = len(self.reasons)

    def units_on(self, key: tuple[str, int]) -> np.ndarray:
        """The unit of each index of an axis."""
        axis = self.book.axes[key]
        return self.unit[axis.start : axis.start + axis.size]

    def _freeze_unreadable(self, patterns: Sequence[str]) -> None:
        """A channel that nothing reads can have no zero slice; a user may also ask for layers to stay whole."""
        for key, roles in self.book.roles.items():
            names = _with_parents(key[0])
            if Role.CONSUMER not in roles and any(fnmatch(name, p) for name in names for p in patterns):
                self._freeze(self.units_on(key), "frozen on request")
        self._freeze(np.flatnonzero(~self._with(Role.CONSUMER)), "no layer reads it")

    def _with(self, role: Role) -> np.ndarray:
        """By unit: whether some axis has it in this role."""
        found = np.zeros(self.count, dtype=bool)
        for key, roles in self.book.roles.items():
            if role in roles:
                found[self.units_on(key)] = True
        return found

    def _make_groups(self) -> None:
        """Units with the same number of indices on the same axes, and the same fate, are interchangeable."""
        sizes = [axis.size for axis in self.book.axes.values()]
        axis_of = np.repeat(np.arange(len(sizes)), sizes)  # labels are numbered axis by axis
        unit_of = self.unit[self.book.size - len(axis_of) :]
        marks = np.random.default_rng(0).integers(1, 2**63, size=len(sizes), dtype=np.uint64)
        signature = np.zeros(self.count, dtype=np.uint64)  # the sum of its marks identifies a multiset of axes
        np.add.at(signature, unit_of, marks[axis_of])
        made, carried, read = (self._with(role) for role in (Role.PRODUCER, Role.PER_CHANNEL, Role.CONSUMER))
        made |= carried & read
        # What no layer makes (the network's input) is no group: it is a fixed part of every size.
        units, first = np.unique(unit_of[made[unit_of]], return_index=True)
        first = np.flatnonzero(made[unit_of])[first]
        units = units[np.argsort(first, kind="stable")]  # in the order of the forward pass
        keys = np.stack([signature[units], self.reason[units].astype(np.uint64)])
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
        """How many indices of each axis belong to each group: the extents of all parameters at once."""
        if not self.book.axes:
            return
        axis_of = np.repeat(np.arange(len(self.book.axes)), [axis.size for axis in self.book.axes.values()])
        group_of = self.group_of[self.unit[self.book.size - len(axis_of) :]] + 1  # 0: no group
        codes, counts = np.unique(axis_of * (len(self.groups) + 1) + group_of, return_counts=True)
        axis_of, group_of = np.divmod(codes, len(self.groups) + 1)
        parts = np.split(np.arange(len(codes)), np.flatnonzero(np.diff(axis_of)) + 1)
        for key, part in zip(self.book.axes, parts, strict=True):
            fixed = int(counts[part[0]]) if group_of[part[0]] == 0 else 0
            part = part[group_of[part] > 0]
            self._extents[_key(self.book.vector(*key))] = (fixed, group_of[part] - 1, counts[part])

    def extent(self, labels: Tensor, scale: int = 1) -> AffineSize:
        """The size of a set of labels (repeated `scale` times) as a function of the widths."""
        key = _key(labels)
        if key not in self._extents:
            groups = self.group_of[self.unit[labels.reshape(-1).numpy()]]
            found, counts = np.unique(groups[groups >= 0], return_counts=True)
            self._extents[key] = (int((groups < 0).sum()), found, counts)
        fixed, found, counts = self._extents[key]
        multiples = []
        for group, n in zip(found.tolist(), counts.tolist(), strict=True):
            multiple, rest = divmod(n * scale, len(self.groups[group]))
            if rest:  # only some units of a group appear (a slice): then the whole group is frozen
                fixed += n
            else:
                multiples.append((group, multiple))
        return AffineSize(fixed * scale, tuple(multiples))


def _key(labels: Tensor) -> tuple[int, int, int]:
    """Identifies a vector of labels that lives as long as its trace."""
    return labels.data_ptr(), labels.numel(), labels.stride(0) if labels.dim() else 0


def _with_parents(name: str) -> list[str]:
    """A tensor's name, and those of the modules around it: `a.b.weight`, `a.b`, `a`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _components(book: ChannelLabels) -> np.ndarray:
    left, right, _ = book.unions()
    ones = np.ones(len(left), dtype=np.int8)
    pairs = (left.int().numpy(), right.int().numpy())  # scipy 1.11 takes no other; its error is printed, not raised
    matrix = coo_array((ones, pairs), shape=(book.size, book.size))
    return np.asarray(connected_components(matrix, directed=False)[1], dtype=np.int64)


def build_graph(
    resolved: ChannelPartition, tensors: Mapping[str, Tensor], attributes: Mapping[str, Tensor] | None = None
) -> ChannelGraph:
    """The channel graph of resolved labels, still without layers."""
    places = _places(resolved)
    groups: list[ChannelGroup] = []
    taken: dict[str, int] = {}
    for number, units in enumerate(resolved.groups):
        reason = resolved.why(units[0])
        name = _name(places[number])
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name = f"{name}#{taken[name]}"
        least = min(2, len(units)) if resolved.paired[units].any() else 1
        if reason is None and len(units) == least:
            reason = "it cannot be any smaller"
        groups.append(ChannelGroup(name, len(units), places[number], reason, least))
    shapes = tuple(_tensor_shape(resolved, name, tensor) for name, tensor in tensors.items())
    features = tuple((path, resolved.extent(labels)) for path, labels in (attributes or {}).items())
    return ChannelGraph(tuple(groups), (), shapes, features)


def build_layers(resolved: ChannelPartition, records: Sequence[Record]) -> tuple[Layer, ...]:
    """The layers of a recorded pass, their sizes as functions of the widths."""
    return tuple(_layer(resolved, record) for record in records)


def _places(resolved: ChannelPartition) -> list[tuple[ParamSlice, ...]]:
    """For each group, the axes its units stand on, writers first."""
    found: list[list[tuple[int, ParamSlice]]] = [[] for _ in resolved.groups]
    for key, axis in resolved.book.axes.items():
        units = resolved.unit[axis.start : axis.start + axis.size]
        roles = tuple(role for role in _ROLE_ORDER if role in resolved.book.roles[key])
        groups, ranks = resolved.group_of[units], resolved.rank[units]
        alone = bool((groups == groups[0]).all())
        for group in groups[:1] if alone else np.unique(groups):
            if group < 0:
                continue
            where = np.arange(axis.size) if alone else np.flatnonzero(groups == group)
            mine = ranks if alone else ranks[where]
            if bool((mine[1:] < mine[:-1]).any()):
                where = where[np.argsort(mine, kind="stable")]
            index = torch.from_numpy(where.reshape(len(resolved.groups[group]), -1))
            found[group].append((_ROLE_ORDER.index(roles[0]), ParamSlice(axis.tensor, axis.axis, roles, index)))
    return [tuple(place for _, place in sorted(group, key=lambda item: item[0])) for group in found]


def _name(places: tuple[ParamSlice, ...]) -> str:
    """The first module that makes the channels."""
    return places[0].tensor.rpartition(".")[0] or places[0].tensor


def _layer(resolved: ChannelPartition, record: Record) -> Layer:
    one = AffineSize(1)
    extents = [resolved.extent(factor) for factor in record.factors]
    incoming, outgoing = [*extents, one, one][:2] if len(extents) != 1 else (one, extents[0])
    return Layer(
        path=record.path,
        kind=record.kind,
        macs=record.macs,
        incoming=incoming,
        outgoing=outgoing,
        reads=_total(resolved, record.reads),
        writes=_total(resolved, record.writes),
        item_bytes=record.item_bytes,
        tensors=tuple(record.tensors),
    )


def _total(resolved: ChannelPartition, amounts: Sequence[tuple[Tensor, int]]) -> AffineSize:
    fixed = 0
    multiples: dict[int, int] = defaultdict(int)
    for labels, scale in amounts:
        extent = resolved.extent(labels, scale)
        fixed += extent.fixed
        for group, multiple in extent.multiples:
            multiples[group] += multiple
    return AffineSize(fixed, tuple(sorted(multiples.items())))


def _tensor_shape(resolved: ChannelPartition, name: str, tensor: Tensor) -> TensorShape:
    axes = tuple(
        resolved.extent(resolved.book.vector(name, number))
        if (name, number) in resolved.book.axes
        else AffineSize(size)
        for number, size in enumerate(tensor.shape)
    )
    return TensorShape(name, axes, tensor.element_size(), isinstance(tensor, nn.Parameter))
