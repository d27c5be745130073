"""Learning-rate schedules as functions of the step, so that a checkpoint need not save them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ecc.options import check_options, option

PAPER_FINETUNE_LR = 3e-5
"""Sec. 4.1 of the paper: "cosine decay from 3e-5", 300,000 iterations on MobileNet."""


class LRSchedule(Protocol):
    """The learning rate of each step."""

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """The learning rate of a step."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The learning rate of the optimizer, after an optional linear warm-up."""

    warmup_steps: int = option(0, "Steps in which the learning rate rises from near 0.", range=(0, None))

    def __post_init__(self) -> None:
        check_options(self)

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """See `LRSchedule`."""
        del steps
        return base_lr * _warmup(step, self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Cosine decay from `start_lr` to `final_ratio * start_lr`, after an optional warm-up and constant part.

    `Cosine(start_lr=PAPER_FINETUNE_LR)` is the paper's fine-tuning of MobileNet. A curve that several trainings share
    has `steps_before` and `steps_after`.
    """

    start_lr: float | None = option(None, "Learning rate at the start. Default: that of the optimizer.", above=0)
    final_ratio: float = option(0.0, "Final learning rate divided by the first one.", range=(0, 1))
    warmup_steps: int = option(0, "Steps in which the learning rate rises from near 0.", range=(0, None))
    hold_steps: int = option(0, "Steps after the warm-up in which it stays constant.", range=(0, None))
    steps_before: int = option(0, "Steps of an earlier training on the same curve.", range=(0, None))
    steps_after: int = option(0, "Steps of a later training on the same curve.", range=(0, None))

    def __post_init__(self) -> None:
        check_options(self)

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """See `LRSchedule`."""
        start = base_lr if self.start_lr is None else self.start_lr
        step, steps = self.steps_before + step, self.steps_before + steps + self.steps_after
        first = self.warmup_steps + self.hold_steps
        progress = min(max(step - first, 0) / max(steps - first, 1), 1.0)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return start * (self.final_ratio + (1 - self.final_ratio) * cosine) * _warmup(step, self.warmup_steps)


def _warmup(step: int, warmup_steps: int) -> float:
    return min((step + 1) / (warmup_steps + 1), 1.0)
