"""`Losses`: the losses of the last steps, which stay on the device until it is waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MOST = 1000
"""Losses that are kept on the device; then they are added up, however rarely somebody asks."""


class Losses:
    """Sums the losses of steps. To append one starts no kernel, and waits for nothing."""

    def __init__(self) -> None:
        self.total = 0.0
        """The sum of all that were added up since it was last set."""
        self.count = 0
        """How many they are."""
        self.first_bad = -1
        """The first step whose loss was not finite; -1 if there is none."""
        self._step = 0
        self._waiting: list[Tensor] = []

    def append(self, loss: Tensor, step: int) -> None:
        """Takes in the loss of a step, a tensor with one number. Steps come one after the other."""
        self._waiting.append(loss)
        self._step = step
        if len(self._waiting) >= MOST:
            self.add_up()

    def add_up(self) -> None:
        """Waits for the device, and adds to `total` what has come since the last time.

        One after the other and in float64: the sum does not depend on when it was asked for, nor on whether the run
        was interrupted in between.
        """
        if not self._waiting:
            return
        before = self._step - len(self._waiting)
        for number, loss in enumerate(torch.stack(self._waiting).tolist(), start=1):
            self.total += loss
            if self.first_bad < 0 and not math.isfinite(loss):
                self.first_bad = before + number
        self.count += len(self._waiting)
        self._waiting.clear()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity. Takes a few kernels for all of them, and waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    largest = [torch.stack(torch._foreach_norm(same, math.inf)) for same in alike.values()]
    return all(bool(norms.isfinite().all()) for norms in largest)
