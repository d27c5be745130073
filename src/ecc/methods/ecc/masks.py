"""`SliceMasks`: keeps slices of tensors at zero with few kernels, and with little work for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL = 2**22
"""Elements up to which starting a kernel costs more than reading a mask of full size."""


class SliceMasks:
    """Masks of slices along axes of tensors, all of which are set from one vector.

    Masks of small tensors have their full shape, so that one kernel multiplies many tensors. Those of large tensors are
    broadcast. Memory and views are made once, and again if a tensor has changed its strides, as by channels_last.

    Args:
        tensors: One for each axis; a tensor that is masked along two axes comes twice.
        axes: Of each.
        device: Where the vector lies.
    """

    def __init__(self, tensors: Sequence[Tensor], axes: Sequence[int], device: torch.device) -> None:
        self._tensors, self._axes = list(tensors), list(axes)
        self._sizes = [tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=True)]
        self._vector = torch.ones(sum(self._sizes), device=device)
        self._layout: list[tuple[int, ...]] | None = None
        self._small: list[Tensor] = []
        self._full: list[Tensor] = []  # a mask for each small tensor
        self._views: list[list[Tensor]] = []  # of the vector, what each full mask is the product of
        self._large: list[tuple[Tensor, list[Tensor]]] = []

    def set(self, kept: Tensor) -> None:
        """Says which slices stay.

        Args:
            kept: 1 or True for those that stay, the axes of all tensors one behind the other.
        """
        self.arrange()
        self.write(kept)

    def arrange(self) -> bool:
        """Makes memory and views where there are none that fit; whether it did."""
        layout = [tensor.stride() for tensor in self._tensors]
        if layout == self._layout:
            return False
        self._arrange()
        self._layout = layout
        return True

    @torch.no_grad()
    def write(self, kept: Tensor) -> None:
        """As `set`, into memory that fits; it is always the same operations on the same memory."""
        self._vector.copy_(kept)
        if self._small:
            torch._foreach_copy_(self._full, [views[0] for views in self._views])
        for full, views in zip(self._full, self._views, strict=True):
            for view in views[1:]:
                full.mul_(view)

    @torch.no_grad()
    def apply_(self) -> None:
        """Zeroes the slices that do not stay."""
        if self._small:
            torch._foreach_mul_(self._small, self._full)
        for tensor, views in self._large:  # apart: beside masks of other shapes, all would be multiplied one by one
            for view in views:
                tensor.mul_(view.to(tensor.device, tensor.dtype))

    def _arrange(self) -> None:
        views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for tensor, axis, part in zip(self._tensors, self._axes, self._vector.split(self._sizes), strict=True):
            view = part.view([-1 if k == axis else 1 for k in range(tensor.dim())])
            views.setdefault(id(tensor), (tensor, []))[1].append(view)
        small = [pair for pair in views.values() if pair[0].numel() <= _SMALL]
        self._large = [pair for pair in views.values() if pair[0].numel() > _SMALL]
        self._small = [tensor for tensor, _ in small]
        self._full = [torch.empty_like(tensor, requires_grad=False) for tensor in self._small]
        self._views = [found for _, found in small]
