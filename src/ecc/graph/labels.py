"""Channel labels: which elements of which tensors live and die together.

Every tensor of a traced forward carries a *label tensor* of its own shape: an integer for each element, naming
the channel that element belongs to. Labels are stride 0 along every axis on which they do not change (batch,
height, width), so a label tensor of a 64 x 512 x 1024 activation holds 64 numbers.

A label is the number of one index of one axis of one parameter or buffer (`ChannelLabels.axis`), or `FROZEN`.
Rules *unite* labels that must be cut together and *freeze* labels that cannot be cut; connected components of
the unions are the removable units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

FROZEN = 1
"""The label of positions that can never be cut, such as the network's input."""

_FIRST_FREE = 2

Labels = Tensor | None
"""Labels of one tensor; None for a value that belongs to no channel and no position (a constant, a scalar)."""


Indices = tuple[tuple[str, int], Tensor]
"""((tensor, axis), indices along it)."""


class Role(str, Enum):
    """What a parameter axis does to the channels it is labelled with."""

    CONSUMER = "consumer"
    """Mixes the channel into others (input axis of a convolution): a zero slice makes the channel dead."""
    PRODUCER = "producer"
    """Makes the channel (output axis, bias)."""
    PER_CHANNEL = "per_channel"
    """Transforms the channel into itself (batch norm, depthwise convolution, layer scale)."""


@dataclass(frozen=True)
class Axis:
    """One axis of one parameter or buffer whose indices are labelled `start .. start + size - 1`."""

    tensor: str
    axis: int
    start: int
    size: int


class Misaligned(Exception):
    """A cut network does not run or does not line up as the dense one did."""

    def __init__(self, labels: Tensor, why: str, *, line: str | None = None, path: str = "") -> None:
        super().__init__(why)
        self.labels = labels
        """The channels at fault, as far as they are known."""
        self.line = line
        """The operator and line of code that could not run, if one could not."""
        self.path = path
        """The module that was running."""


@dataclass
class ChannelLabels:
    """All labels of one trace, with their unions and the reasons for freezing."""

    axes: dict[tuple[str, int], Axis] = field(default_factory=dict)
    roles: dict[tuple[str, int], set[Role]] = field(default_factory=dict)
    pairs: list[tuple[Tensor, Tensor, str]] = field(default_factory=list)
    """(labels, labels, where): equal positions live and die together; `FROZEN` on one side freezes the other."""
    frozen: list[tuple[Tensor, str]] = field(default_factory=list)
    """(labels, why): what shares a unit with these labels is never cut."""
    paired: list[Tensor] = field(default_factory=list)
    """Labels of channels of which two must stay, because code drops axes of size one."""
    size: int = _FIRST_FREE
    _vectors: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _cache: tuple[int, tuple[Tensor, Tensor, Tensor]] | None = None

    def axis(self, tensor: str, axis: int, size: int, role: Role) -> Tensor:
        """Labels of one axis of a parameter or buffer, made on first use. Shape (size,)."""
        key = (tensor, axis)
        if key not in self.axes:
            self.axes[key] = Axis(tensor, axis, self.size, size)
            self._vectors[key] = torch.arange(self.size, self.size + size)
            self.size += size
        self.roles.setdefault(key, set()).add(role)
        return self._vectors[key]

    def vector(self, tensor: str, axis: int) -> Tensor:
        """Labels of an axis that is known already."""
        return self._vectors[tensor, axis]

    def is_grouped(self, tensor: str) -> bool:  # noqa: ARG002 - the cut network knows better
        """Whether a weight is known as one of a grouped convolution, whatever number of groups is left."""
        return False

    def unite(self, left: Tensor, right: Tensor, why: str) -> None:
        """Labels at equal positions live and die together."""
        try:
            left, right = torch.broadcast_tensors(left, right)
        except RuntimeError:
            raise Misaligned(torch.cat([left.reshape(-1), right.reshape(-1)]), f"sizes differ in {why}") from None
        self.pairs.append((left.reshape(-1), right.reshape(-1), why))

    def freeze(self, labels: Tensor, why: str) -> None:
        """Whatever shares a unit with these labels is never cut."""
        self.frozen.append((compact(labels).reshape(-1), why))

    def indices(self, labels: Tensor) -> list[Indices]:
        """Labels as indices of axes, which mean the same in another trace of the same network."""
        found = []
        for key, axis in self.axes.items():
            here = (labels >= axis.start) & (labels < axis.start + axis.size)
            if bool(here.any()):
                found.append((key, labels[here] - axis.start))
        return found

    def freeze_indices(self, indices: list[Indices], why: str) -> None:
        """Freeze what `indices` gave, as far as this trace knows those axes."""
        for key, index in indices:
            if key in self.axes:
                self.freeze(self._vectors[key][index], why)

    def unions(self) -> tuple[Tensor, Tensor, Tensor]:
        """All unions of two channels: labels, labels, and the number of the entry of `pairs` they come from."""
        left, right, entry = self._flat()
        loose = (left != FROZEN) & (right != FROZEN)
        return left[loose], right[loose], entry[loose]

    def freezes(self) -> list[tuple[Tensor, str]]:
        """(labels, why) of everything frozen: outright, or by meeting something that cannot be cut."""
        left, right, entry = self._flat()
        stuck = (left == FROZEN) ^ (right == FROZEN)
        labels, entry = torch.maximum(left, right)[stuck], entry[stuck]
        number, counts = entry.unique_consecutive(return_counts=True)
        met = zip(labels.split(counts.tolist()), number.tolist(), strict=True)
        outright = [(labels[labels != FROZEN], why) for labels, why in self.frozen]
        return outright + [(part, f"it meets something that cannot be cut in {self.pairs[n][2]}") for part, n in met]

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
    """The labels of a cut network, to be checked against those of the dense one.

    Axes carry the labels of the indices that were kept. A union that the dense network did not make, or a
    freeze of something that was cut, shows that the network's code does not follow the cut.
    """

    def __init__(self, dense: ChannelLabels, alive: Tensor, unit: Tensor, immovable: Tensor, manifold: Tensor) -> None:
        super().__init__(axes=dense.axes, roles=dense.roles, size=dense.size)
        self._dense = dense
        self.alive = alive  # by label: kept in the cut network
        self._unit = unit  # by label
        self._immovable = immovable  # by label: frozen in the dense trace
        self._manifold = manifold  # by label: its unit stands more than once on its axis

    def axis(self, tensor: str, axis: int, size: int, role: Role) -> Tensor:
        """Labels of the indices that an axis kept."""
        key = (tensor, axis)
        if role not in self.roles.get(key, ()):
            nothing = torch.empty(0, dtype=torch.long)
            raise Misaligned(nothing, f"{tensor} is used in another way than in the dense network")
        if key not in self._vectors:
            dense = self._dense.vector(tensor, axis)
            self._vectors[key] = dense[self.alive[dense]]
        labels = self._vectors[key]
        if labels.numel() != size:
            raise Misaligned(labels, f"axis {axis} of {tensor} has {size} entries, not {labels.numel()}")
        return labels

    def is_grouped(self, tensor: str) -> bool:
        """Whether it was one in the dense network."""
        return self.roles.get((tensor, 0)) == {Role.PER_CHANNEL}

    def check(self) -> None:
        """Compare everything seen so far with the dense network.

        Raises:
            Misaligned: there are unions or a freeze that the dense network does not have.
        """
        left, right, entry = self.unions()
        loose = ~self._immovable[left]
        left, right, entry = left[loose], right[loose], entry[loose]
        stray = self._unit[left] != self._unit[right]
        # Where a unit stands several times on one axis (36 columns of a flattened channel), its indices may still
        # be shuffled among themselves: those unions must be ones that the dense network made.
        check = ~stray & (left != right) & (self._manifold[left] | self._manifold[right])
        if bool(check.any()):
            known = _pair_codes(*self._dense.unions()[:2], self.size)
            stray[check] = ~torch.isin(_pair_codes(left[check], right[check], self.size), known)
        if bool(stray.any()):
            why = self.pairs[int(entry[stray][0])][2]
            raise Misaligned(torch.cat([left[stray], right[stray]]), f"channels slide past each other in {why}")
        for labels, why in self.freezes():
            loose = labels[~self._immovable[labels]]
            if loose.numel():
                raise Misaligned(loose, why)


def _pair_codes(left: Tensor, right: Tensor, size: int) -> Tensor:
    """One number for an unordered pair of labels."""
    return torch.minimum(left, right) * size + torch.maximum(left, right)


def frozen_labels(shape: torch.Size) -> Tensor:
    """A label tensor of positions that can never be cut."""
    return torch.tensor(FROZEN).expand(shape)


def varies(labels: Tensor, axis: int) -> bool:
    """Whether labels change along an axis."""
    return labels.shape[axis] > 1 and labels.stride(axis) != 0


def varying_axes(labels: Tensor) -> list[int]:
    """The axes along which labels change."""
    return [a for a, (n, step) in enumerate(zip(labels.shape, labels.stride(), strict=True)) if n > 1 and step != 0]


def compact(labels: Tensor) -> Tensor:
    """The same labels with every axis on which they do not change narrowed to one element."""
    shape, steps = labels.shape, labels.stride()
    small = [1 if step == 0 else size for size, step in zip(shape, steps, strict=True)]
    return labels if small == list(shape) else labels.as_strided(small, steps)


def settled(labels: Tensor) -> Tensor:
    """The same labels, stride 0 again on the axes where a copy made equal labels distinct in memory."""
    full = labels.shape
    labels = compact(labels)
    for axis in varying_axes(labels):
        first = labels.narrow(axis, 0, 1)
        if torch.equal(labels, first.expand_as(labels)):
            labels = first
    return labels.expand(full)


def channel_vector(labels: Tensor | None, axis: int, size: int) -> Tensor:
    """Labels along one axis, shape (size,); positions without a channel count as `FROZEN`."""
    if labels is None:
        return torch.tensor(FROZEN).expand(size)
    axis %= labels.dim()
    for other in range(labels.dim() - 1, -1, -1):
        if other != axis:
            labels = labels.select(other, 0)
    return labels.expand(size)


def loose(labels: Labels) -> Labels:
    """Labels that may still be cut; None for positions that cannot."""
    return None if labels is None or bool((compact(labels) == FROZEN).all()) else labels
