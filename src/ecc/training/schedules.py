"""Learning rates as functions of the step, so that nothing about them has to be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ecc.errors import EccError

PAPER_FINE_TUNING_LR = 3e-5  # Sec. 4.1: "cosine decay from 3e-5", 300,000 iterations on MobileNet


class LRSchedule(Protocol):
    """Says the learning rate of each step."""

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """The rate of step `step` of 0..steps-1.

        Args:
            base_lr: What the optimizer was made with.
            step: Steps taken before this one.
            steps: Of the whole training.
        """


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The optimizer's own rate, after an optional linear warm-up."""

    warmup_steps: int = 0
    """Steps in which the rate rises from near 0."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)

    def lr(self, base_lr: float, step: int, steps: int) -> float:  # noqa: ARG002 - the same however long it takes
        """See `LRSchedule`."""
        return base_lr * _warmth(step, self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Half a cosine from the start rate down to `final_ratio` of it, after an optional warm-up and a steady part.

    `Cosine(start_lr=PAPER_FINE_TUNING_LR)` is the paper's fine-tuning of MobileNet.

    Raises:
        EccError: If a value is out of its range.
    """

    start_lr: float | None = None
    """None for the optimizer's own."""
    final_ratio: float = 0.0
    """Of the start rate, at the end."""
    warmup_steps: int = 0
    """Steps in which the rate rises from near 0."""
    hold_steps: int = 0
    """Steps after these in which it stays."""
    steps_before: int = 0
    """Steps that another training took before this one, along the same curve."""
    steps_after: int = 0
    """Steps of the curve that are left to a training after this one."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_steps)
        for name in ("hold_steps", "steps_before", "steps_after"):
            if getattr(self, name) < 0:
                raise EccError(f"{name} is {getattr(self, name)}; it counts steps, and cannot be below 0.")
        if self.start_lr is not None and not 0 < self.start_lr < math.inf:
            raise EccError(f"start_lr is {self.start_lr}; give a number above 0, or None for the optimizer's rate.")
        if not 0 <= self.final_ratio <= 1:
            raise EccError(f"final_ratio is {self.final_ratio}; it is a share in 0..1.")

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """See `LRSchedule`."""
        start = base_lr if self.start_lr is None else self.start_lr
        step, steps = self.steps_before + step, self.steps_before + steps + self.steps_after
        first = self.warmup_steps + self.hold_steps
        done = max(step - first, 0) / max(steps - first, 1)
        cosine = (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return start * (self.final_ratio + (1 - self.final_ratio) * cosine) * _warmth(step, self.warmup_steps)


def _warmth(step: int, warmup_steps: int) -> float:
    return min((step + 1) / (warmup_steps + 1), 1.0)


def _check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise EccError(f"warmup_steps is {warmup_steps}; it cannot be below 0.")
