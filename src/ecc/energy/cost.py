"""`Cost`, what a network costs at any widths, and the two closed forms that costs are made of.

    BilinearForm   base + sum of coefficient * left * right          MACs, bytes, parameters, the paper's energy model
    StepTerms      sum of height * clip((size - level) / rise, 0, 1)  energy that jumps where a library changes kernels
                   sum of height * [size is not a multiple of m]      energy of sizes that no fast kernel fits

`left`, `right` and `size` are `AffineSize`s: affine in the widths, with multiples of at least 0. Coefficients and
heights are at least 0 too, so all forms are nonnegative. Only the last one may grow when a channel is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags
from torch import Tensor

from ecc.graph import AffineSize
from ecc.graph.structure import Switches

Array: TypeAlias = NDArray[np.float64]

ONE = AffineSize(1)

RISE = 8
"""Most channels over which a step rises. GPU kernels prefer multiples of 8, and most GPU profiles consist of them."""


class SwitchedTerms(NamedTuple):
    """Terms coefficient * left * right that are 0 if all widths of some groups are 0."""

    groups: tuple[int, ...]
    """Positions of these groups."""
    coefficients: Array
    left: csr_array
    left_fixed: Array
    right: csr_array
    right_fixed: Array

    def value(self, widths: Array) -> float:
        """The sum of the terms, whether they are switched off or not."""
        left, right = self.left @ widths + self.left_fixed, self.right @ widths + self.right_fixed
        return float((self.coefficients * left * right).sum())


class CostForm(NamedTuple):
    """A cost as arrays: constant + linear . s + s' quadratic s / 2 + sum of heights * risen(rows s - start).

    The sum is right as long as no branch is removed. Without a branch, the `switched` terms whose groups all have width
    0 are subtracted.
    """

    constant: float
    linear: Array
    """(groups,)"""
    quadratic: Array
    """(groups, groups), symmetric."""
    heights: Array
    """(steps,)"""
    rows: csr_array
    """(steps, groups)"""
    start: Array
    """(steps,)"""
    cap: Array
    """(steps,)"""
    multiple: Array
    """(steps,): 0, or m of a step that depends on whether the size is a multiple of m."""
    switched: tuple[SwitchedTerms, ...] = ()
    """Parts of the sum that are 0 without some branches."""

    def value(self, widths: Array) -> float:
        """The cost at one vector of widths."""
        steps = risen(self.rows @ widths - self.start, self.cap, self.multiple)
        square = 0.5 * widths @ self.quadratic @ widths
        off = sum(one.value(widths) for one in self.switched if not widths[list(one.groups)].any())
        return float(self.constant + self.linear @ widths + square + self.heights @ steps - off)

    def without(self, zero: Collection[int]) -> CostForm:
        """The form while these groups have width 0 and no others, without switched terms."""
        constant, linear, quadratic = self.constant, self.linear.copy(), self.quadratic.copy()
        for one in self.switched:
            if set(one.groups) <= set(zero):
                half = one.left.T @ (diags(one.coefficients) @ one.right)
                quadratic -= (half + half.T).toarray()
                linear -= one.left.T @ (one.coefficients * one.right_fixed)
                linear -= one.right.T @ (one.coefficients * one.left_fixed)
                constant -= float((one.coefficients * one.left_fixed * one.right_fixed).sum())
        return self._replace(constant=constant, linear=linear, quadratic=quadratic, switched=())


def risen(sizes: Array, cap: Array, multiple: Array) -> Array:
    """Height of steps: clip(size, 0, cap), or with a multiple 0 or 1."""
    clipped = np.clip(sizes, 0, cap)
    return (
        np.where(multiple > 0, np.round(sizes) % np.maximum(multiple, 1) != 0, clipped) if multiple.any() else clipped
    )


@runtime_checkable
class Cost(Protocol):
    """A nonnegative function of the widths of all channel groups.

    Widths are real numbers, one per group in the order of `ChannelGraph.groups`, frozen groups included. All groups of
    a removed branch have width 0.
    """

    @property
    def resource(self) -> str:
        """energy, latency, macs, params, weight_bytes, activation_bytes or peak_bytes."""

    @property
    def unit(self) -> str:
        """J, s, B, or empty for counts; for one inference of the whole example batch."""

    @property
    def label(self) -> str:
        """Source of the numbers: measured, estimated, declared or counted."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups, in the order of the graph."""

    @property
    def full_widths(self) -> tuple[int, ...]:
        """Widths of the dense network."""

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the branches whose removal the cost is known for."""

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix; differentiable."""

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths, in closed form, without a host synchronisation."""

    def to(self, device: torch.device | str) -> Cost:
        """The same cost, computed on a device."""

    def form(self, budget: float) -> CostForm:
        """A form that is at most `budget` where the cost is, and equal to the cost unless the cost is a maximum."""


@dataclass(frozen=True)
class BilinearForm:
    """base + sum of coefficient * left * right, on one device.

    The sum is a quadratic form in the widths and is computed as one: a gradient takes a single matrix-vector product,
    whatever the number of terms. Terms that are removed with a branch and do not vanish with its widths are computed
    one by one.

    Args:
        base: Cost that does not depend on the widths.
        coefficients: One per term, at least 0.
        lefts: One per term.
        rights: One per term; `ONE` for a term that is affine.
        num_groups: Length of the width vectors.
        switches: One per term: positions of groups. The term is 0 if all of them have width 0. An empty one has no
            effect.
    """

    base: float
    coefficients: tuple[float, ...]
    lefts: tuple[AffineSize, ...]
    rights: tuple[AffineSize, ...]
    num_groups: int
    device: torch.device | str = "cpu"
    switches: tuple[tuple[int, ...], ...] = ()
    _form: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    _switched: tuple[Switches, tuple[Tensor, ...]] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # With left = L s + l and right = R s + r, the sum is s' (L' C R) s + (C l R + C r L) s + l' C r + base.
        # L and R are sparse: a term depends on few groups, and dense matrices would dominate memory at 1,000 groups.
        switched = [n for n, switch in enumerate(self.switches) if switch and not self._vanishes(n)]
        always = sorted({*range(len(self.coefficients))} - {*switched})
        left, left_fixed = _matrix([self.lefts[n] for n in always], self.num_groups)
        right, right_fixed = _matrix([self.rights[n] for n in always], self.num_groups)
        coefficients = np.array(self.coefficients, dtype=np.float64)[always]
        with np.errstate(over="ignore", invalid="ignore"):  # a damaged file may overflow; `EnergyModel.load` checks
            half = (left.T @ (diags(coefficients) @ right)).toarray()
            linear = left.T @ (coefficients * right_fixed) + right.T @ (coefficients * left_fixed)
            constant = np.asarray((coefficients * left_fixed * right_fixed).sum() + self.base)
        form = (half + half.T, linear, constant)
        object.__setattr__(self, "_form", tuple(torch.from_numpy(part).to(self.device) for part in form))
        found = None
        if switched:
            on = Switches([self.switches[n] for n in switched], self.num_groups, self.device)
            found = (on, self._dense(switched))
        object.__setattr__(self, "_switched", found)

    def _vanishes(self, number: int) -> bool:
        """Whether a term is 0 without a switch when the widths of its switch are 0."""
        switch = set(self.switches[number])
        return any(
            not size.fixed and switch.issuperset(group for group, _ in size.multiples)
            for size in (self.lefts[number], self.rights[number])
        )

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """Coefficients, the matrix and the fixed part of `lefts`, and the same of `rights`, as dense tensors."""
        return self._dense(range(len(self.coefficients)))

    def _dense(self, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        left, left_fixed = _matrix([self.lefts[n] for n in numbers], self.num_groups)
        right, right_fixed = _matrix([self.rights[n] for n in numbers], self.num_groups)
        coefficients = np.array([self.coefficients[n] for n in numbers], dtype=np.float64)
        dense = (coefficients, left.toarray(), left_fixed, right.toarray(), right_fixed)
        return tuple(torch.from_numpy(part).to(self.device) for part in dense)

    @cached_property
    def _all_switches(self) -> Switches:
        return Switches(self.switches or [()] * len(self.coefficients), self.num_groups, self.device)

    def terms(self, widths: Tensor) -> Tensor:
        """coefficient * left * right of every term, along the last axis."""
        coefficients, left, left_fixed, right, right_fixed = self.parts
        widths = widths.to(torch.float64)
        found = coefficients * (widths @ left.T + left_fixed) * (widths @ right.T + right_fixed)
        return found * self._all_switches(widths) if self._all_switches.any else found

    def value(self, widths: Tensor) -> Tensor:
        """The sum at one vector of widths, or at each row of a matrix."""
        quadratic, linear, constant = self._form
        widths = widths.to(torch.float64)
        value = (widths * (0.5 * (widths @ quadratic) + linear)).sum(-1) + constant
        if self._switched is None:
            return value
        on, (coefficients, left, left_fixed, right, right_fixed) = self._switched
        terms = coefficients * (widths @ left.T + left_fixed) * (widths @ right.T + right_fixed)
        return value + (on(widths) * terms).sum(-1)

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths. Switches count as constant."""
        quadratic, linear, _ = self._form
        widths = widths.to(torch.float64)
        gradient = torch.addmv(linear, quadratic, widths)
        if self._switched is None:
            return gradient
        on, (coefficients, left, left_fixed, right, right_fixed) = self._switched
        scaled = on(widths) * coefficients
        gradient = gradient + (scaled * (widths @ right.T + right_fixed)) @ left
        return gradient + (scaled * (widths @ left.T + left_fixed)) @ right

    def form(self, steps: StepTerms | None = None) -> CostForm:
        """The sum as arrays, together with steps."""
        whole = replace(self, switches=()) if self._switched is not None else self
        quadratic, linear, constant = (part.cpu().numpy() for part in whole._form)
        none = csr_array((0, self.num_groups))
        nothing = np.zeros(0)
        parts = (nothing, none, nothing, nothing, nothing) if steps is None else steps.arrays()
        return CostForm(float(constant), linear, quadratic, *parts, self._switched_terms())

    def _switched_terms(self) -> tuple[SwitchedTerms, ...]:
        found: dict[tuple[int, ...], list[int]] = {}
        for number, switch in enumerate(self.switches):
            if switch and not self._vanishes(number):
                found.setdefault(switch, []).append(number)
        return tuple(
            SwitchedTerms(
                switch,
                np.array([self.coefficients[n] for n in numbers], dtype=np.float64),
                *_matrix([self.lefts[n] for n in numbers], self.num_groups),
                *_matrix([self.rights[n] for n in numbers], self.num_groups),
            )
            for switch, numbers in found.items()
        )


@dataclass(frozen=True)
class StepTerms:
    """Sum of height * clip((size - level) / rise, 0, 1), and of height * [size is not a multiple], on one device.

    Between two steps the cost is flat: removing channels there saves nothing, as on the device.
    Step k has a multiple of 0 if it rises at its level.
    """

    heights: tuple[float, ...]
    sizes: tuple[AffineSize, ...]
    levels: tuple[int, ...]
    rises: tuple[int, ...]
    multiples: tuple[int, ...]
    num_groups: int
    device: torch.device | str = "cpu"
    _parts: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        matrix, fixed = _matrix(self.sizes, self.num_groups)
        multiple = np.array(self.multiples, dtype=np.float64)
        scale = np.where(multiple > 0, 1.0, 1 / np.array(self.rises, dtype=np.float64))
        start = np.where(multiple > 0, 0.0, np.array(self.levels, dtype=np.float64)) - fixed
        parts = (np.array(self.heights, dtype=np.float64), matrix.toarray() * scale[:, None], start * scale, multiple)
        object.__setattr__(self, "_parts", tuple(torch.from_numpy(part).to(self.device) for part in parts))

    def terms(self, widths: Tensor) -> Tensor:
        """Cost of each step, along the last axis."""
        heights, rows, start, multiple = self._parts
        sizes = widths.to(torch.float64) @ rows.T - start
        misaligned = (sizes.round() % multiple.clamp(min=1) != 0).to(torch.float64)
        return heights * torch.where(multiple > 0, misaligned, sizes.clamp(0, 1))

    def value(self, widths: Tensor) -> Tensor:
        """The sum at one vector of widths, or at each row of a matrix."""
        return self.terms(widths).sum(-1)

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; at a kink, the derivative towards smaller widths."""
        heights, rows, start, multiple = self._parts
        sizes = torch.addmv(start, rows, widths.to(torch.float64), beta=-1)
        return (heights * ((sizes > 0) & (sizes <= 1) & (multiple == 0))) @ rows

    def arrays(self) -> tuple[Array, csr_array, Array, Array, Array]:
        """The fields of `CostForm` from `heights` on."""
        heights, rows, start, multiple = (part.cpu().numpy() for part in self._parts)
        return heights, csr_array(rows), start, np.ones(len(heights)), multiple


def size_at(size: AffineSize, widths: Array) -> Array:
    """An affine size at each row of widths."""
    total = np.full(len(widths), float(size.fixed))
    for group, multiple in size.multiples:
        total += multiple * widths[:, group]
    return total


def _matrix(sizes: Sequence[AffineSize], num_groups: int) -> tuple[Any, Array]:
    """Sizes as a sparse matrix to multiply widths with, and their fixed parts."""
    entries = [(row, group, multiple) for row, size in enumerate(sizes) for group, multiple in size.multiples]
    rows, groups, multiples = (np.array(column) for column in (zip(*entries, strict=True) if entries else ((), (), ())))
    shape = (len(sizes), num_groups)
    matrix = csr_array((multiples.astype(np.float64), (rows.astype(np.int32), groups.astype(np.int32))), shape=shape)
    return matrix, np.array([float(size.fixed) for size in sizes])
