"""Sizes and costs of a network as functions of its widths.

Every size in a network is an `AffineSize`: a fixed part plus a multiple of the width of each group. The
multiply-accumulates (MACs) of a layer are a constant times its input size times its output size, which is the paper's
s_j * s_{j+1}. Parameters, activations and their bytes are such products too.

A residual branch can be removed entirely (`Branch`). All groups inside it then have width 0, and the layers and tensors
that are removed with it cost nothing.

`StructureSpec` collects what the costs are computed from. It is a channel graph without the parameter slices, small
enough to be stored in a profile, so that a profile can be fitted without the network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from ecc.errors import BadWidths


class AffineSize(msgspec.Struct, frozen=True, array_like=True):
    """fixed + sum of multiple * width over some groups. In JSON `[fixed, [[group, multiple], ...]]`."""

    fixed: int
    multiples: tuple[tuple[int, int], ...] = ()
    """Pairs of the position of a group in the graph and a multiple of its width."""

    def at(self, widths: Sequence[float]) -> float:
        """The size at these widths, one per group of the graph."""
        return self.fixed + sum(multiple * widths[group] for group, multiple in self.multiples)


def width_of(group: int) -> AffineSize:
    """The width of one group, by its position in the graph."""
    return AffineSize(0, ((group, 1),))


@dataclass(frozen=True)
class Layer:
    """One operator of the forward pass that does work, for the shapes of the example input."""

    path: str
    """The module that runs it."""
    kind: str
    """conv, grouped conv, linear, matmul, norm, elementwise, reduction, pool, move or other."""
    macs: int
    """Multiply-accumulates for each pair of an input and an output channel."""
    incoming: AffineSize
    """Number of input channels."""
    outgoing: AffineSize
    """Number of output channels."""
    reads: AffineSize
    """Number of activation elements read."""
    writes: AffineSize
    """Number of activation elements written."""
    item_bytes: int
    tensors: tuple[str, ...]
    """Names of the parameters and buffers that it uses."""

    def depends_on(self, group: int) -> bool:
        """Whether its multiply-accumulates depend on the width of a group."""
        return any(group == g for size in (self.incoming, self.outgoing) for g, _ in size.multiples)


@dataclass(frozen=True)
class TensorShape:
    """Shape of a parameter or buffer as a function of the widths."""

    name: str
    axes: tuple[AffineSize, ...]
    item_bytes: int
    is_parameter: bool


@dataclass(frozen=True)
class Branch:
    """A residual branch that can be removed: a part of the network whose only output is added to another tensor.

    The branch is *masked* if it adds exactly zero: the consumer slices of all its groups are zero, and so are its
    `exits`. It is *removed* if all its groups have width 0. Groups of a branch that are not prunable have either width
    0 or their full width.
    """

    name: str
    """The module that contains the branch, or the first one of several."""
    groups: tuple[str, ...]
    """Names of the groups that lie entirely inside the branch. No group is in two branches."""
    exits: tuple[str, ...]
    """Names of the last parameters before the sum. The branch adds exactly zero if they are zero."""


@dataclass(frozen=True)
class SizeRule:
    """Size of one axis of a zero tensor: that of an axis of the input, or a function of the widths."""

    axis: int | None = None
    """Axis of the input; None for a size that does not depend on the input."""
    size: AffineSize | None = None
    window: tuple[int, int, int] | None = None
    """(size, padding in total, stride) of a window that slides over the input axis."""


@dataclass(frozen=True)
class OutputValue:
    """One value that a replaced module returns."""

    kind: str
    """input: one of its arguments; zero: a tensor of zeros; none: None."""
    source: str = ""
    """Position or keyword of the argument that is returned, or from which type, device and shape of zeros are taken."""
    sizes: tuple[SizeRule, ...] | None = None
    """Shape of zeros; None for a zero without axes, which broadcasts."""


@dataclass(frozen=True)
class Replacement:
    """A module that is replaced by one without parameters when some branches are removed."""

    path: str
    """The module."""
    branches: tuple[int, ...]
    """Positions of the branches. It is replaced when all of them are removed."""
    container: str
    """What it returns: tensor, tuple or list."""
    values: tuple[OutputValue, ...]
    """The value or values that it returns."""


@dataclass(frozen=True)
class StructureSpec:
    """Groups by name and width, layers and tensors of one traced network."""

    fingerprint: str
    """Fingerprint of the channel graph."""
    groups: tuple[str, ...]
    """Names of all groups, in the order of the graph."""
    full_widths: tuple[int, ...]
    """Widths of the dense network, the paper's c."""
    min_widths: tuple[int, ...]
    """Smallest allowed widths; the full width for a group that is not prunable."""
    layers: tuple[Layer, ...]
    tensors: tuple[TensorShape, ...]
    branches: tuple[Branch, ...] = ()
    """The branches that can be removed."""
    replacements: tuple[Replacement, ...] = ()
    """The modules that are replaced when branches are removed."""

    def __post_init__(self) -> None:
        count = len(self.groups)
        if len(self.full_widths) != count or len(self.min_widths) != count:
            raise BadWidths(f"{count} groups need {count} full widths and {count} minimum widths.")
        for name, least, full in zip(self.groups, self.min_widths, self.full_widths, strict=True):
            if not 1 <= least <= full:
                raise BadWidths(f"the minimum width {least} of group {name!r} is outside 1..{full} (its full width).")
        sizes = [size for layer in self.layers for size in (layer.incoming, layer.outgoing, layer.reads, layer.writes)]
        sizes += [axis for tensor in self.tensors for axis in tensor.axes]
        for size in sizes:
            if any(not 0 <= group < count for group, _ in size.multiples):
                raise BadWidths(f"{size} refers to a group outside 0..{count - 1}.")
            if size.fixed < 0 or any(multiple < 0 for _, multiple in size.multiples):
                raise BadWidths(f"{size} is negative.")
        names = {tensor.name for tensor in self.tensors}
        for layer in self.layers:
            if not names.issuperset(layer.tensors) or layer.macs < 0:
                raise BadWidths(f"layer {layer.path!r} uses an unknown tensor or has negative MACs.")
        self._check_branches(names)

    def _check_branches(self, tensors: Collection[str]) -> None:
        inside = [name for branch in self.branches for name in branch.groups]
        if len(set(inside)) != len(inside) or not set(self.groups).issuperset(inside):
            raise BadWidths("a branch has an unknown group, or a group is in two branches.")
        if len({branch.name for branch in self.branches}) != len(self.branches):
            raise BadWidths("two branches have the same name.")
        for branch in self.branches:
            if not branch.groups or not branch.exits or not set(tensors).issuperset(branch.exits):
                raise BadWidths(f"branch {branch.name!r} has no groups or no exits, or an unknown one.")
        for one in self.replacements:
            if not one.branches or any(not 0 <= number < len(self.branches) for number in one.branches):
                raise BadWidths(f"the replacement of {one.path!r} refers to an unknown branch.")

    @cached_property
    def costs(self) -> CostTable:
        """Costs as differentiable functions of the vector of widths."""
        count = len(self.groups)
        layers_on, tensors_on = (Switches(one, count) for one in (self.layer_switches, self.tensor_switches))
        return CostTable(self.layers, self.tensors, layers_on, tensors_on)

    # --- branches --------------------------------------------------------------------------------

    @cached_property
    def branch_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each branch, the positions of its groups."""
        return tuple(tuple(self._positions[name] for name in branch.groups) for branch in self.branches)

    @cached_property
    def layer_switches(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, positions of groups. The layer is removed if all of them have width 0; empty: never."""
        return tuple(self._switch(layer.path) for layer in self.layers)

    @cached_property
    def tensor_switches(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, positions of groups. The tensor is removed if all of them have width 0; empty: never."""
        return tuple(self._switch(tensor.name.rpartition(".")[0]) for tensor in self.tensors)

    def _switch(self, path: str) -> tuple[int, ...]:
        """Groups of the smallest set of branches without which a module does not run."""
        parts = path.split(".")
        around = [
            self._replaced[key] for n in range(1, len(parts) + 1) if (key := ".".join(parts[:n])) in self._replaced
        ]
        branches = min(around, key=len, default=())
        return tuple(sorted(group for number in branches for group in self.branch_groups[number]))

    @cached_property
    def _replaced(self) -> dict[str, tuple[int, ...]]:
        return {one.path: one.branches for one in self.replacements}

    def removed(self, widths: Sequence[float]) -> tuple[int, ...]:
        """Positions of the branches that are removed at these widths: all groups of the branch have width 0."""
        return tuple(
            number for number, groups in enumerate(self.branch_groups) if all(widths[group] == 0 for group in groups)
        )

    # --- widths ----------------------------------------------------------------------------------

    @cached_property
    def prunable(self) -> tuple[int, ...]:
        """Positions of the prunable groups."""
        pairs = enumerate(zip(self.min_widths, self.full_widths, strict=True))
        return tuple(position for position, (least, full) in pairs if least < full)

    def widths(self, widths: Mapping[str, float] | None = None) -> Tensor:
        """All widths in the order of `groups`, float64. Groups that are not named keep their full width.

        Width 0 removes a branch and must be given for all its groups.

        Raises:
            BadWidths: If a group is unknown or a width is outside its range.
        """
        vector = torch.tensor(self.full_widths, dtype=torch.float64, device="cpu")
        for name, width in (widths or {}).items():
            if name not in self._positions:
                raise BadWidths(f"no channel group is called {name!r}.")
            position = self._positions[name]
            least, full = self.min_widths[position], self.full_widths[position]
            if not (least <= width <= full or (width == 0 and position in self._branch_of)):
                raise BadWidths(f"width {width} of group {name!r} is outside {least}..{full}.")
            vector[position] = width
        self._check_removal(vector)
        return vector

    def _check_removal(self, widths: Tensor) -> None:
        empty = (widths == 0).nonzero().flatten().tolist()
        for number in dict.fromkeys(self._branch_of[position] for position in empty):
            branch = self.branches[number]
            if any(widths[position] != 0 for position in self.branch_groups[number]):
                raise BadWidths(
                    f"width 0 removes branch {branch.name!r}, so all its groups must have width 0: "
                    f"{', '.join(branch.groups)}."
                )

    @cached_property
    def _branch_of(self) -> dict[int, int]:
        """Position of a group -> number of its branch."""
        return {group: number for number, groups in enumerate(self.branch_groups) for group in groups}

    def width_steps(self, width_multiple: int) -> tuple[int, ...]:
        """For each group, the number of units whose channels are a multiple of `width_multiple`.

        It is `width_multiple` itself for units of one channel. The unit of an attention head of 64 channels, or of a
        block of a grouped convolution, has several channels in every layer with weights: with a multiple of 8, any
        number of such heads is allowed.
        """
        channels = [0] * len(self.groups)
        for layer in self.layers:
            if layer.macs and layer.tensors:
                for group, multiple in (*layer.incoming.multiples, *layer.outgoing.multiples):
                    channels[group] = math.gcd(channels[group], multiple)
        return tuple(width_multiple // math.gcd(width_multiple, max(1, count)) for count in channels)

    def width_remainders(self, width_multiple: int) -> tuple[int, ...]:
        """For each group, the remainder of its allowed widths modulo its step, see `width_steps`.

        The goal is that the *layers* have sizes that are multiples. Usually that means remainder 0 for every group.
        If a group is concatenated with other channels to a size that is a multiple (13 + 3 = 16), pruning the group to
        a multiple of its own would spoil the sum. Such a group is pruned in steps of `width_multiple` from its full
        width (13, 5).
        """
        steps, remainders = self.width_steps(width_multiple), [0] * len(self.groups)
        for layer in self.layers:
            for size in (layer.incoming, layer.outgoing):
                is_sum = len(size.multiples) > 1 or size.fixed > 0
                if not is_sum or round(size.at(self.full_widths)) % width_multiple:
                    continue
                for group, _ in size.multiples:
                    remainders[group] = self.full_widths[group] % steps[group]
        return tuple(remainders)

    def padded(self, widths: Sequence[int], width_multiple: int, removed: Collection[str] | None = None) -> list[int]:
        """Widths rounded up to allowed ones, between minimum and full width.

        Args:
            widths: One per group.
            width_multiple: Layers have multiples of so many channels; see `width_steps` and `width_remainders`.
            removed: Names of the removed branches, whose groups have width 0. By default those with widths 0.
        """
        found = []
        numbers = [number for number, branch in enumerate(self.branches) if branch.name in (removed or ())]
        gone = self.removed(widths) if removed is None else numbers
        without = {group for number in gone for group in self.branch_groups[number]}
        allowed = zip(self.width_steps(width_multiple), self.width_remainders(width_multiple), strict=True)
        groups = zip(widths, self.min_widths, self.full_widths, allowed, strict=True)
        for position, (width, least, full, (step, rest)) in enumerate(groups):
            rounded = rest + max(0, -((rest - width) // step)) * step
            found.append(0 if position in without else min(full, max(least, rounded)))
        return found

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.groups)}


class _Sizes:
    """Many `AffineSize` evaluated at once, in time linear in the number of their terms."""

    def __init__(self, sizes: Sequence[AffineSize]) -> None:
        self._fixed = _vector(size.fixed for size in sizes)
        self._row = _indices(row for row, size in enumerate(sizes) for _ in size.multiples)
        self._group = _indices(group for size in sizes for group, _ in size.multiples)
        self._multiple = _vector(multiple for size in sizes for _, multiple in size.multiples)

    def __call__(self, widths: Tensor) -> Tensor:
        terms = self._multiple * widths.to(torch.float64)[self._group]
        return self._fixed.index_add(0, self._row, terms)


class Switches:
    """For each of several costs 1, or 0 if the widths of all groups in its switch are 0.

    Args:
        switches: Positions of groups for each cost; empty for a cost that is always 1.
        num_groups: Length of the width vectors.
        device: Where it computes.
    """

    def __init__(
        self, switches: Sequence[tuple[int, ...]], num_groups: int, device: torch.device | str = "cpu"
    ) -> None:
        distinct = sorted(set(switches) - {()})
        number = {switch: row for row, switch in enumerate(distinct, 1)}
        members = torch.zeros(len(distinct), num_groups, dtype=torch.float64, device="cpu")
        for row, switch in enumerate(distinct):
            members[row, list(switch)] = 1.0
        self.any = bool(distinct)
        """Whether any cost can be switched off."""
        self._members = members.to(device)
        self._of_cost = _indices(number.get(switch, 0) for switch in switches).to(device)

    def __call__(self, widths: Tensor) -> Tensor:
        """0 or 1 for each cost along the last axis, at one vector of widths or at each row of a matrix."""
        always = torch.ones((*widths.shape[:-1], 1), dtype=torch.float64, device=self._of_cost.device)
        if not self.any:
            return always[..., self._of_cost]
        on = (widths.to(torch.float64) @ self._members.T > 0).to(torch.float64)
        return torch.cat([always, on], -1)[..., self._of_cost]


class CostTable:
    """Costs of layers and tensors as differentiable functions of the vector of widths.

    Layers and tensors that are removed with a branch cost nothing.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[TensorShape],
        layers_on: Switches | None = None,
        tensors_on: Switches | None = None,
    ) -> None:
        self._layer_on = layers_on or Switches([()] * len(layers), 0)
        self._tensor_on = tensors_on or Switches([()] * len(tensors), 0)
        self._macs = _vector(layer.macs for layer in layers)
        self._incoming = _Sizes([layer.incoming for layer in layers])
        self._outgoing = _Sizes([layer.outgoing for layer in layers])
        self._reads = _Sizes([layer.reads for layer in layers])
        self._writes = _Sizes([layer.writes for layer in layers])
        self._item = _vector(layer.item_bytes for layer in layers)
        rank = max([len(tensor.axes) for tensor in tensors], default=0)
        padded = [(*tensor.axes, *[AffineSize(1)] * (rank - len(tensor.axes))) for tensor in tensors]
        self._axes = [_Sizes([axes[k] for axes in padded]) for k in range(rank)]
        self._tensor_bytes = _vector(tensor.item_bytes for tensor in tensors)
        self._is_parameter = _vector(tensor.is_parameter for tensor in tensors)
        position = {tensor.name: number for number, tensor in enumerate(tensors)}
        used = [(row, position[name]) for row, layer in enumerate(layers) for name in layer.tensors]
        self._using_layer = _indices(row for row, _ in used)
        self._used_tensor = _indices(tensor for _, tensor in used)

    def layers_on(self, widths: Tensor) -> Tensor:
        """1 for each layer that runs, 0 for each that is removed with a branch."""
        return self._layer_on(widths)

    def macs_per_layer(self, widths: Tensor) -> Tensor:
        """Multiply-accumulates of each layer."""
        return self._layer_on(widths) * self._macs * self._incoming(widths) * self._outgoing(widths)

    def macs(self, widths: Tensor) -> Tensor:
        """Multiply-accumulates of all layers."""
        return self.macs_per_layer(widths).sum()

    def activation_bytes_per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of activations that each layer reads and writes."""
        return self._layer_on(widths) * self._item * (self._reads(widths) + self._writes(widths))

    def activation_bytes(self, widths: Tensor) -> Tensor:
        """Bytes of activations that all layers read and write."""
        return self.activation_bytes_per_layer(widths).sum()

    def elements_per_tensor(self, widths: Tensor) -> Tensor:
        """Number of elements of each parameter and buffer."""
        sizes = self._tensor_on(widths)
        for axis in self._axes:
            sizes = sizes * axis(widths)
        return sizes

    def parameters(self, widths: Tensor) -> Tensor:
        """Number of parameters."""
        return (self.elements_per_tensor(widths) * self._is_parameter).sum()

    def weight_bytes_per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of the parameters and buffers that each layer uses. A shared tensor counts once per layer."""
        bytes_per_tensor = self.elements_per_tensor(widths) * self._tensor_bytes
        total = torch.zeros_like(self._macs).index_add(0, self._using_layer, bytes_per_tensor[self._used_tensor])
        return self._layer_on(widths) * total

    def weight_bytes(self, widths: Tensor) -> Tensor:
        """Bytes of parameters and buffers."""
        return (self.elements_per_tensor(widths) * self._tensor_bytes).sum()


def _vector(values: Iterable[float]) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")


def _indices(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long, device="cpu")
