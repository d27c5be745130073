"""Sums of products of widths: the form that MACs, bytes, parameters and the paper's energy model have in common.

    value(s) = base + sum over terms k of  price_k * left_k(s) * right_k(s)

where left and right are `AffineSize`s, affine in the widths with coefficients of at least 0. With coefficients of at least 0
such a sum is nonnegative, and it never grows when a channel is removed. It is a quadratic form in the widths, and is
computed as one: the gradient takes a single product of a matrix and a vector, whatever the number of terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, diags
from torch import Tensor

from ecc.graph.structure import AffineSize

from .regression import Array


@dataclass(frozen=True)
class BilinearForm:
    """base + sum of coefficient * left * right, on one device.

    Args:
        base: What is spent at any widths.
        coefficients: One a term, at least 0.
        lefts: One a term.
        rights: One a term; `AffineSize(1)` for a term that is affine.
        num_groups: Length of the vectors of widths.
    """

    base: float
    coefficients: tuple[float, ...]
    lefts: tuple[AffineSize, ...]
    rights: tuple[AffineSize, ...]
    num_groups: int
    device: torch.device | str = "cpu"
    _form: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Terms depend on few groups each: as dense matrices, those of a thousand groups would be most of the memory.
        left, left_fixed = _matrix(self.lefts, self.num_groups)
        right, right_fixed = _matrix(self.rights, self.num_groups)
        coefficients = np.array(self.coefficients, dtype=np.float64)
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # coefficients of a file may be any; who reads it looks at the sum
            half = (left.T @ (diags(coefficients) @ right)).toarray()
            linear = left.T @ (coefficients * right_fixed) + right.T @ (coefficients * left_fixed)
            constant = np.asarray((coefficients * left_fixed * right_fixed).sum() + self.base)
        form = (half + half.T, linear, constant)
        object.__setattr__(self, "_form", tuple(torch.from_numpy(part).to(self.device) for part in form))

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:
        """Coefficients, the left matrix and what is fixed in it, the right matrix and what is fixed in it; on the device."""
        left, left_fixed = _matrix(self.lefts, self.num_groups)
        right, right_fixed = _matrix(self.rights, self.num_groups)
        coefficients = np.array(self.coefficients, dtype=np.float64)
        dense = (coefficients, left.toarray(), left_fixed, right.toarray(), right_fixed)
        return tuple(torch.from_numpy(part).to(self.device) for part in dense)

    def terms(self, widths: Tensor) -> Tensor:
        """coefficient * left * right of every term, along the last axis."""
        coefficients, left, left_fixed, right, right_fixed = self.parts
        widths = widths.to(torch.float64)
        return coefficients * (widths @ left.T + left_fixed) * (widths @ right.T + right_fixed)

    def value(self, widths: Tensor) -> Tensor:
        """At one vector of widths, or at each row of a matrix."""
        quadratic, linear, constant = self._form
        widths = widths.to(torch.float64)
        return (widths * (0.5 * (widths @ quadratic) + linear)).sum(-1) + constant

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths."""
        quadratic, linear, _ = self._form
        return torch.addmv(linear, quadratic, widths.to(torch.float64))

    def to(self, device: torch.device | str) -> BilinearForm:
        """The same sum on another device."""
        return BilinearForm(self.base, self.coefficients, self.lefts, self.rights, self.num_groups, device)


def _matrix(extents: Sequence[AffineSize], num_groups: int) -> tuple[Any, Array]:
    """Extents as a sparse matrix to multiply widths with, and what is fixed in them."""
    entries = [(row, group, multiple) for row, extent in enumerate(extents) for group, multiple in extent.multiples]
    rows, groups, multiples = (np.array(column) for column in (zip(*entries, strict=True) if entries else ((), (), ())))
    shape = (len(extents), num_groups)
    matrix = csr_array((multiples.astype(np.float64), (rows.astype(np.int32), groups.astype(np.int32))), shape=shape)
    return matrix, np.array([float(extent.fixed) for extent in extents])
