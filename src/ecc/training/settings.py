"""How to train: the settings of the loop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ecc.errors import EccError

from .schedules import Schedule

Precision = Literal["fp32", "bf16", "fp16"]
"""fp16 scales the loss, so that small gradients do not vanish."""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long, how exactly, and how often to look.

    Raises:
        EccError: If a value is out of its range.
    """

    steps: int
    """Updates of the weights; each takes one batch of every process."""

    schedule: Schedule | None = None
    """Of the learning rate; None leaves it to the optimizer."""

    precision: Precision = "fp32"
    """Of the forward pass; weights and their updates stay fp32."""

    clip_norm: float | None = None
    """The largest norm of the gradient; None for no limit."""

    micro_batch: int | None = None
    """Items that go through the network at once, where a whole batch does not fit; batch norm sees only these."""

    channels_last: bool = False
    """Images with their channels innermost: faster on GPUs."""

    cuda_graph: bool = False
    """Forward and backward as one CUDA graph, for small networks on large GPUs, which would wait for the host. Not for
    networks that look at values, such as those that choose their way by them. On other devices it changes nothing."""

    seed: int = 0
    """Of dropout and whatever else the network draws."""

    log_every: int = 50
    """Steps between two looks at the loss. Only then the device is waited for, and a loss that is not finite seen."""

    checkpoint_steps: int | None = None
    """Steps between two checkpoints; None for none by steps."""

    checkpoint_seconds: float | None = 300.0
    """Seconds between two checkpoints, whatever the steps; None for none by time."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise EccError(f"precision is {self.precision!r}; choose one of {', '.join(PRECISIONS)}.")
        if self.cuda_graph and self.precision == "fp16":
            raise EccError("cuda_graph does not go with precision fp16, whose loss is scaled anew; take bf16.")
        for name, least in (("steps", 0), ("log_every", 1), ("micro_batch", 1), ("checkpoint_steps", 1)):
            number = getattr(self, name)
            optional = name in ("micro_batch", "checkpoint_steps")
            if number is None and optional:
                continue
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                ways = ", or leave it out" if optional else ""
                raise EccError(f"{name} is {number!r}; give a whole number of at least {least}{ways}.")
        for name in ("clip_norm", "checkpoint_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise EccError(f"{name} is {value!r}; give a number above 0, or leave it out.")
