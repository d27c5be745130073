"""Channel labels: which elements of which tensors belong to the same channel.

Every tensor of a traced forward pass has a *label tensor* of the same shape: for each element an integer that names
the channel it belongs to. Labels have stride 0 along every axis on which they do not change (batch, height, width), so
the labels of a 64 x 512 x 1024 activation take 64 numbers.

A label is the number of one index of one axis of one parameter or buffer (`ChannelLabels.axis`), or `FROZEN`.
The rules of operators *unite* labels that must be pruned together and *freeze* labels that cannot be pruned. Connected
components of the unions are the units that can be pruned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ecc.graph.calls import Call

FROZEN = 1
"""The label of positions that are never pruned, such as the network's input."""
_SAMPLE = 4096  # elements of a parameter that are looked at first

_FIRST_FREE = 2
_MIN_CONSTANT = 3

Labels = Tensor | None
"""Labels of one tensor; None for a value that is the same for all channels (a constant, a scalar)."""


Indices = tuple[tuple[str, int], Tensor]
"""((tensor, axis), indices along it)."""
Place = tuple[tuple[str, int], int]
"""((tensor, axis), index along it)."""


class Role(str, Enum):
    """What an axis of a parameter does to its channels."""

    CONSUMER = "consumer"
    """Takes the channel as input (input axis of a convolution). A zero slice masks the channel."""
    PRODUCER = "producer"
    """Computes the channel (output axis, bias)."""
    PER_CHANNEL = "per_channel"
    """Transforms each channel by itself (batch norm, depthwise convolution, layer scale)."""
    FACTOR = "factor"
    """Computes one factor of an inner product that sums over the channel (queries). A zero slice masks the channel."""


@dataclass(frozen=True)
class Axis:
    """One axis of one parameter or buffer whose indices are labelled `start .. start + size - 1`."""

    tensor: str
    axis: int
    start: int
    size: int


@dataclass(frozen=True)
class WidthPower:
    """A value that is `(d / d') ** power` times as large in a network with d' of the d channels."""

    labels: Tensor
    """The d channels."""
    power: float


@dataclass(frozen=True)
class Scale:
    """A parameter or a float attribute of a module that changes with a number of channels.

    With d' of the d channels it is `(value + offset) * (d / d') ** power - offset`.
    """

    target: str
    """Name of the parameter, or module path and attribute."""
    labels: Tensor
    """The d channels."""
    power: float
    offset: float
    slices: Tensor | None = None
    """Labels of the slices of the parameter that change; None for all of it."""


@dataclass(eq=False)
class InnerProduct:
    """A product of queries and keys that sums over channels. Its scale must stay that of the dense network."""

    labels: Tensor
    """The channels."""
    rows: Tensor | None
    """Labels of the slices of parameters in which queries and keys are linear; None if they are not known."""
    where: str
    powers: set[float] = field(default_factory=set)
    """How the scores are used: they are `(d / d') ** power` times as large with d' of d channels."""


class Misaligned(Exception):
    """A pruned network does not run, or its channels do not line up as in the dense network."""

    def __init__(
        self,
        labels: Tensor,
        why: str,
        *,
        line: str | None = None,
        path: str = "",
        confused: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__(why)
        self.labels = labels
        """The affected channels, as far as they are known."""
        self.line = line
        """The operator and line of code that could not run, if any."""
        self.path = path
        """The module that was running."""
        self.position: tuple[bool, int] | None = None
        """Whether this was in train mode, and the number of operators that ran before."""
        self.number_power: float | None = None
        """A number in this line may follow the number of channels d: it is proportional to `d ** -number_power`."""
        self.confused = confused
        """Channels whose number the code takes from others, and these others, as labels of the dense network."""


@dataclass
class ChannelLabels:
    """All labels of one trace, their unions, and the reasons why some are frozen."""

    axes: dict[tuple[str, int], Axis] = field(default_factory=dict)
    roles: dict[tuple[str, int], set[Role]] = field(default_factory=dict)
    pairs: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)
    """(labels, labels, where): equal positions are pruned together. `FROZEN` on one side freezes the other."""
    frozen: list[tuple[Tensor, str]] = field(default_factory=list)
    """(labels, reason): units that contain these labels are not prunable."""
    needs_two: list[Tensor] = field(default_factory=list)
    """Labels of channels of which two must stay, such as where code squeezes axes of size one."""
    attributes: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """Labels of the channels whose number is an attribute of a module, by module path and attribute."""
    layer_norms: dict[str, Tensor] = field(default_factory=dict)
    """Channels of layer norms, by path of the module."""
    zeroed: list[Tensor] = field(default_factory=list)
    """Labels of channels that an operator sums over: all slices of a masked unit must be zero."""
    scales: list[Scale] = field(default_factory=list)
    """Parameters and attributes that change with a number of channels."""
    used: set[str] = field(default_factory=set)
    """Names of parameters that are used in another way than a `Scale` allows for."""
    inner_products: list[InnerProduct] = field(default_factory=list)
    """Products of queries and keys that sum over the width of heads."""
    factors: list[Tensor] = field(default_factory=list)
    """Labels of slices of parameters that compute one factor of such a product."""
    used_rows: list[Tensor] = field(default_factory=list)
    """Labels of slices of parameters that are used in another way than for such a product."""
    size: int = _FIRST_FREE
    _vectors: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _cache: tuple[int, tuple[Tensor, Tensor, Tensor]] | None = None

    def axis(self, tensor: str, axis: int, size: int, role: Role) -> Tensor:
        """Labels of one axis of a parameter or buffer, created on first use. Shape (size,)."""
        key = (tensor, axis)
        if key not in self.axes:
            self.axes[key] = Axis(tensor, axis, self.size, size)
            self._vectors[key] = torch.arange(self.size, self.size + size)
            self.size += size
        self.roles.setdefault(key, set()).add(role)
        return self._vectors[key]

    def constant(self, name: str, size: int, why: str) -> Tensor:  # noqa: ARG002 - `why` is for the override
        """Labels of the positions of a constant beside channels, such as padding. Shape (size,).

        They tie the channels that the constant is combined with to its size, which a pruned network must change
        accordingly. No tensor has these positions, so they have no role. Up to two positions are frozen, since pruning
        so few would not show whether their number is hard-coded.
        """
        key = (name, 0)
        other_size = key in self.axes and self.axes[key].size != size  # in train mode
        if size < _MIN_CONSTANT or other_size:
            return torch.tensor(FROZEN).expand(size)
        self.axis(name, 0, size, Role.PER_CHANNEL)
        self.roles[key] = set()
        return self._vectors[key]

    def vector(self, tensor: str, axis: int) -> Tensor:
        """Labels of an axis that exists already."""
        return self._vectors[tensor, axis]

    def is_grouped(self, tensor: str) -> bool:  # noqa: ARG002 - overridden
        """Whether a weight is known to belong to a grouped convolution, even if one group is left."""
        return False

    def unite(self, left: Tensor, right: Tensor, why: str) -> None:
        """Prune labels at equal positions together."""
        try:
            left, right = torch.broadcast_tensors(left, right)
        except RuntimeError:
            raise Misaligned(torch.cat([left.reshape(-1), right.reshape(-1)]), f"sizes do not match in {why}") from None
        self.pairs.append((left.reshape(-1), right.reshape(-1), why))

    def size_attribute(self, path: str, name: str, labels: Tensor) -> None:
        """Let an attribute of a module follow the number of these channels. Used twice, it unites both."""
        known = self.attributes.setdefault((path, name), labels)
        if known is not labels:
            self.unite(known, labels, f"the attribute `{name}` of {path or 'the network'}")

    def freeze(self, labels: Tensor, why: str) -> None:
        """Make the units of these labels not prunable."""
        self.frozen.append((compact(labels).reshape(-1), why))

    def freeze_unscalable(self) -> None:
        """Freeze channels whose `Scale`s contradict each other or other uses of the same parameter."""
        first: dict[str, Scale] = {}
        for scale in self.scales:
            known = first.setdefault(scale.target, scale)
            same = (known.power, known.offset) == (scale.power, scale.offset) and torch.equal(
                known.labels, scale.labels
            )
            if not same or scale.target in self.used:
                why = f"{scale.target} would have to change with its width, but is used in several ways"
                self.freeze(known.labels, why)
                self.freeze(scale.labels, why)

    def fold_scores(self) -> None:
        """Let the slices of parameters before products of queries and keys take up the factors of their scores.

        Queries and keys take up one half each, so that it does not matter whether a slice computes one or both. Freeze
        channels where that is not possible.
        """
        changed = [one for one in self.inner_products if one.powers - {0.0}]
        fixed = [one.rows for one in self.inner_products if not one.powers - {0.0} and one.rows is not None]
        if not changed:
            return
        used = torch.zeros(self.size, dtype=torch.bool)
        used[torch.cat([*self.used_rows, *fixed, torch.empty(0, dtype=torch.long)])] = True
        power_of: dict[int, float] = {}
        for product in changed:
            power = next(iter(product.powers))
            rows = () if product.rows is None else product.rows.tolist()
            same = all(power_of.setdefault(row, power) == power for row in rows)
            if product.rows is None:
                why = "its queries or keys are not computed by a layer that could take up the difference"
            elif len(product.powers) > 1 or not same or bool(used[product.rows].any()):
                why = "what computes its queries or keys is used in another way too"
            else:
                self._fold(product, power)
                continue
            self.freeze(product.labels, f"the scale of {product.where} follows the width of heads, but {why}")

    def _fold(self, product: InnerProduct, power: float) -> None:
        assert product.rows is not None, "checked before"
        for key, axis in self.axes.items():
            mine = product.rows[(product.rows >= axis.start) & (product.rows < axis.start + axis.size)].unique()
            if mine.numel():
                self.scales.append(Scale(key[0], product.labels, -power / 2, 0.0, mine))

    def indices(self, labels: Tensor) -> list[Indices]:
        """Labels as indices of axes, which are the same in another trace of the same network."""
        found = []
        for key, axis in self.axes.items():
            here = (labels >= axis.start) & (labels < axis.start + axis.size)
            if bool(here.any()):
                found.append((key, labels[here] - axis.start))
        return found

    def freeze_indices(self, indices: list[Indices], why: str) -> None:
        """Freeze indices from `indices`, for the axes that this trace knows."""
        for key, index in indices:
            if key in self.axes:
                self.freeze(self._vectors[key][index], why)

    def places(self, labels: Tensor) -> list[Place | None]:
        """Labels as places on axes, which are the same in another trace of the same network; None if frozen."""
        keys = list(self.axes)
        starts = torch.tensor([self.axes[key].start for key in keys])
        number = torch.searchsorted(starts, labels, right=True) - 1
        pairs = zip(labels.tolist(), number.tolist(), strict=True)
        return [None if n < 0 else (keys[n], label - self.axes[keys[n]].start) for label, n in pairs]

    def unite_places(self, left: list[Place | None], right: list[Place | None], why: str) -> None:
        """Prune places from `places` together, if this trace knows their axes."""
        many = [[FROZEN if place is None else self._label(place) for place in side] for side in (left, right)]
        if None not in many[0] and None not in many[1]:
            self.unite(torch.tensor(many[0]), torch.tensor(many[1]), why)

    def _label(self, place: Place) -> int | None:
        key, index = place
        return self.axes[key].start + index if key in self.axes else None

    def unions(self) -> tuple[Tensor, Tensor, Tensor]:
        """All unions of two channels: labels, labels, and the position in `pairs` that they come from."""
        left, right, entry = self._flat()
        free = (left != FROZEN) & (right != FROZEN)
        return left[free], right[free], entry[free]

    def freezes(self) -> list[tuple[Tensor, str]]:
        """(labels, reason) of everything frozen: directly, or by a union with `FROZEN`."""
        left, right, entry = self._flat()
        frozen = (left == FROZEN) ^ (right == FROZEN)
        labels, entry = torch.maximum(left, right)[frozen], entry[frozen]
        number, counts = entry.unique_consecutive(return_counts=True)
        united = zip(labels.split(counts.tolist()), number.tolist(), strict=True)
        outright = [(labels[labels != FROZEN], why) for labels, why in self.frozen]
        why = "{} combines it with a tensor that is not prunable"
        return outright + [(part, why.format(self.pairs[n][2])) for part, n in united]

    def _flat(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.pairs:
            empty = torch.empty(0, dtype=torch.long)
            return empty, empty, empty
        if self._cache is None or self._cache[0] != len(self.pairs):
            left, right = torch.cat([p[0] for p in self.pairs]), torch.cat([p[1] for p in self.pairs])
            sizes = torch.tensor([p[0].numel() for p in self.pairs])
            self._cache = (len(self.pairs), (left, right, torch.arange(len(sizes)).repeat_interleave(sizes)))
        return self._cache[1]


class PrunedLabels(ChannelLabels):
    """The labels of a pruned network, compared with those of the dense network.

    Axes have the labels of the indices that were kept. If the network's code handles the new sizes, its operators make
    only unions that the dense network made too. Any other union, or a new freeze, shows code with hard-coded sizes.
    """

    def __init__(
        self, dense: ChannelLabels, alive: Tensor, unit: Tensor, frozen_mask: Tensor, repeated: Tensor
    ) -> None:
        super().__init__(axes=dense.axes, roles=dense.roles, size=dense.size)
        self._dense = dense
        self.alive = alive  # by label: kept in the pruned network
        self._unit = unit  # by label
        self._frozen_mask = frozen_mask  # by label: frozen in the dense trace
        self._repeated = repeated  # by label: its unit has several indices on its axis

    def axis(self, tensor: str, axis: int, size: int, role: Role) -> Tensor:
        """Labels of the indices that an axis kept."""
        key = (tensor, axis)
        if role not in self.roles.get(key, ()):
            nothing = torch.empty(0, dtype=torch.long)
            raise Misaligned(nothing, f"{tensor} is used differently after pruning")
        if key not in self._vectors:
            dense = self._dense.vector(tensor, axis)
            self._vectors[key] = dense[self.alive[dense]]
        labels = self._vectors[key]
        if labels.numel() != size:
            raise Misaligned(labels, f"axis {axis} of {tensor} has {size} entries, not {labels.numel()}")
        return labels

    def are_prunable(self, dense: Tensor) -> bool:
        """Whether all of these channels of the dense network are prunable."""
        return not bool(self._frozen_mask[dense].any())

    def are_frozen(self, dense: Tensor) -> bool:
        """Whether none of these channels of the dense network is prunable."""
        return bool(self._frozen_mask[dense].all())

    def constant(self, name: str, size: int, why: str) -> Tensor:
        """Labels of the positions that a constant kept."""
        if (name, 0) not in self.axes:  # too few to be pruned
            return torch.tensor(FROZEN).expand(size)
        dense = self._dense.vector(name, 0)
        labels = dense[self.alive[dense]]
        if labels.numel() != size:
            raise Misaligned(dense, why)
        return labels

    def is_grouped(self, tensor: str) -> bool:
        """Whether it belongs to a grouped convolution in the dense network."""
        return self.roles.get((tensor, 0)) == {Role.PER_CHANNEL}

    def check(self) -> None:
        """Compare all unions and freezes so far with those of the dense network.

        Raises:
            Misaligned: If there is one that the dense network does not have.
        """
        left, right, entry = self.unions()
        free = ~self._frozen_mask[left]
        left, right, entry = left[free], right[free], entry[free]
        extra = self._unit[left] != self._unit[right]
        # A unit may have several indices on one axis (36 columns of a flattened channel). They could be permuted
        # within the unit, so these unions must be exactly ones of the dense network.
        check = ~extra & (left != right) & (self._repeated[left] | self._repeated[right])
        if bool(check.any()):
            known = _pair_codes(*self._dense.unions()[:2], self.size)
            extra[check] = ~torch.isin(_pair_codes(left[check], right[check], self.size), known)
        if bool(extra.any()):
            why = self.pairs[int(entry[extra][0])][2]
            raise Misaligned(
                torch.cat([left[extra], right[extra]]),
                f"{why} combines other channels after pruning: a channel count or index before it is hard-coded",
            )
        for labels, why in self.freezes():
            free = labels[~self._frozen_mask[labels]]
            if free.numel():
                raise Misaligned(free, why)


def _pair_codes(left: Tensor, right: Tensor, size: int) -> Tensor:
    """One number for an unordered pair of labels."""
    return torch.minimum(left, right) * size + torch.maximum(left, right)


def frozen_labels(shape: torch.Size) -> Tensor:
    """A label tensor of positions that are never pruned."""
    return torch.tensor(FROZEN).expand(shape)


def varies(labels: Tensor, axis: int) -> bool:
    """Whether labels change along an axis."""
    return labels.shape[axis] > 1 and labels.stride(axis) != 0


def varying_axes(labels: Tensor) -> list[int]:
    """The axes along which labels change."""
    return [a for a, (n, step) in enumerate(zip(labels.shape, labels.stride(), strict=True)) if n > 1 and step != 0]


def first_on(labels: Tensor, axis: int) -> Tensor:
    """Labels at the first position of an axis, which becomes an axis of size one. The axis may be empty."""
    if labels.shape[axis]:
        return labels.narrow(axis, 0, 1)
    shape = [1 if a == axis else size for a, size in enumerate(labels.shape)]
    return labels.as_strided(shape, labels.stride()) if labels.stride(axis) == 0 else frozen_labels(torch.Size(shape))


def compact(labels: Tensor) -> Tensor:
    """The same labels, narrowed to one element on every axis on which they do not change."""
    shape, steps = labels.shape, labels.stride()
    small = [1 if step == 0 else size for size, step in zip(shape, steps, strict=True)]
    return labels if small == list(shape) else labels.as_strided(small, steps)


def collapse(labels: Tensor) -> Tensor:
    """The same labels with stride 0 on every axis on which they are equal; a copy may have stored them in full."""
    full = labels.shape
    labels = compact(labels)
    for axis in varying_axes(labels):
        first = labels.narrow(axis, 0, 1)
        if torch.equal(labels, first.expand_as(labels)):
            labels = first
    return labels.expand(full)


def channel_vector(labels: Tensor | None, axis: int, size: int) -> Tensor:
    """Labels along one axis, shape (size,); positions without a channel count as `FROZEN`."""
    if labels is not None and labels.numel() == 0:
        labels = compact(labels)
    if labels is None or labels.numel() == 0:
        return torch.tensor(FROZEN).expand(size)
    axis %= labels.dim()
    for other in range(labels.dim() - 1, -1, -1):
        if other != axis:
            labels = labels.select(other, 0)
    return labels.expand(size)


def unfrozen(labels: Labels) -> Labels:
    """The labels, or None if all of them are `FROZEN`."""
    return None if labels is None or bool((compact(labels) == FROZEN).all()) else labels


def _label_at(elements: Tensor, labels: Tensor, step: int, size: int) -> Tensor | None:
    """The label of each position along one axis of a parameter; None if elements of a position have several labels.

    Args:
        elements: Numbers of elements of the parameter.
        labels: Their labels.
        step: Distance of neighbouring elements along the axis.
        size: Size of the axis.
    """
    position = (elements if step == 1 else elements // step) % size
    found = torch.zeros(size, dtype=torch.long).scatter_(0, position, labels)
    return found if torch.equal(found[position], labels) else None


# --- parameters whose channel axis is not known yet -----------------------------------------------

PERMUTES = frozenset({"t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "numpy_T", "mT"})
"""Operators that only permute axes."""


@dataclass(frozen=True)
class Deferred:
    """A parameter with several axes that is used outside a layer: positional embedding, scale, table, moved weight.

    Which of its axes has channels is known when it is combined with an activation.
    """

    name: str
    shape: torch.Size
    order: tuple[int, ...]
    """The current order of the parameter's axes, as long as it was only permuted."""
    index: Tensor | None = None
    """The element of the parameter at each position, after any other movement."""

    def places(self) -> list[tuple[int, Tensor]] | None:
        """For each axis here, an axis of the parameter and the index along it of each position; None if there is none.

        Covers permutations, `weight[number]` (an expert of a mixture), `weight.chunk(3)`, and the additional and merged
        axes of einsum. Of merged axes it is the first, such as that of the heads.
        """
        here = self.elements()
        if 0 in here.shape:
            return None
        first = here[(0,) * here.dim()]
        found, wanted = [], first
        for axis, size in enumerate(here.shape):
            line = here
            for other in range(here.dim() - 1, -1, -1):
                line = line if other == axis else line.select(other, 0)
            step, place = 1, (-1, torch.zeros(size, dtype=torch.long))
            for own in range(len(self.shape) - 1, -1, -1):
                index = line // step % self.shape[own]
                step *= self.shape[own]
                if bool((index != index[0]).any()):
                    place = (own, index)
            found.append(place)
            wanted = wanted + (line - first).view([-1 if other == axis else 1 for other in range(here.dim())])
        return found if torch.equal(wanted.expand(here.shape), here) else None

    def elements(self) -> Tensor:
        """The number of the parameter's element at each position."""
        if self.index is not None:
            return self.index
        return torch.arange(math.prod(self.shape)).view(self.shape).permute(self.order)

    def move(self, call: Call, out: Tensor, index: Tensor) -> None:
        """Follow a movement of the parameter to `out`; `index` holds its elements at the new positions."""
        order: tuple[int, ...] = ()
        if self.index is None and call.name in PERMUTES:
            primes = torch.empty([2, 3, 5, 7, 11, 13][: len(self.shape)], device="meta")
            sizes = list(call.rerun(primes).shape)
            order = tuple(self.order[list(primes.shape).index(size)] for size in sizes)
        out._ecc_state = Deferred(self.name, self.shape, order, None if order else index)  # type: ignore[attr-defined]
        if order:
            out._ecc_name = self.name  # type: ignore[attr-defined]

    def scaled(self) -> Deferred:
        """The parameter after an elementwise change: it can still be followed, but is not the weight itself."""
        return replace(self, index=self.elements(), order=())

    def freeze(self, channel_labels: ChannelLabels, why: str) -> None:
        """Freeze the parameter on all axes."""
        for axis, size in enumerate(self.shape):
            if size > 1:
                own = channel_labels.axis(self.name, axis, size, Role.PER_CHANNEL)
                channel_labels.freeze(own, why)

    def bind(self, channel_labels: ChannelLabels, labels: Tensor | None, where: str) -> bool:
        """Combine the parameter with channels elementwise, and find the axis that has these channels.

        Returns:
            Whether there is such an axis.
        """
        if labels is None or not varying_axes(labels):
            return False
        elements, labels = torch.broadcast_tensors(self.elements(), labels)
        if not any(elements.stride(axis) for axis in varying_axes(labels)):
            return False  # one value for all channels
        for axis in range(labels.dim()):
            if labels.stride(axis) == 0 and elements.stride(axis) == 0:
                elements, labels = elements.narrow(axis, 0, 1), labels.narrow(axis, 0, 1)
        flat, wanted = elements.reshape(-1), labels.reshape(-1)
        step, every = 1, flat.numel() // _SAMPLE + 1  # some elements first, since most axes do not match
        for axis in range(len(self.shape) - 1, -1, -1):
            size = self.shape[axis]
            matches = size > 1 and _label_at(flat[::every], wanted[::every], step, size) is not None
            first = _label_at(flat, wanted, step, size) if matches else None
            step *= size
            if first is not None and bool((first > 0).all()):
                channel_labels.unite(channel_labels.axis(self.name, axis, size, Role.PER_CHANNEL), first, where)
                return True
        why = f"{where} combines it with {self.name}, of which no single axis matches the channels"
        channel_labels.freeze(labels, why)
        return False
