"""How to compress: `CompressSettings`, with the paper's choices as defaults where a short run can have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ecc.errors import EccError
from ecc.training import Cosine, Distillation, TrainSettings

from .ecc.floors import MIN_SHARE
from .ecc.scores import METRICS

PHASES = ("dense", "solve", "tune")
"""The parts of a run, in their order."""


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How to compress. What has no words here is explained in `TrainSettings`, and the same in all phases.

    Raises:
        EccError: If a value is out of its range.
    """

    train_steps: int = 0
    """Steps of the dense network before anything else, for tasks that come untrained."""
    steps: int = 2000
    """Steps of the solve; the budget is met after about 60 % of them."""
    tune_steps: int = 1000
    """Steps of the slim network after it was cut."""
    lr: float = 1e-4
    """Of Adam in the solve, and where tuning starts. The paper took 1e-5 over 300,000 steps."""
    train_lr: float = 1e-3
    """Of Adam while the dense network is trained; falls to 0 along a cosine."""
    weight_decay: float = 1e-4
    """As the paper's, coupled to the gradient as Adam's is."""
    distill: float = 0.5
    """Share of the teacher, the dense network, in the loss; 0 for none."""
    temperature: float | None = None
    """None compares logits, as the paper's code; a number compares probabilities softened by it."""
    ignore_index: int | None = None
    """A label of which the teacher says nothing."""
    metric: str | None = None
    """What a channel counts for when ECC chooses: taylor, or adam, as in the paper; see `EccSolver`."""
    min_share: float = MIN_SHARE
    """No group falls below this share of its channels."""
    round_to: int | None = None
    """Widths become multiples of this; by default as in the profile."""
    precision: str = "fp32"
    clip_norm: float | None = None
    micro_batch: int | None = None
    channels_last: bool = False
    seed: int = 0
    log_every: int = 50
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 300.0

    def __post_init__(self) -> None:
        for name, least_steps in (("train_steps", 0), ("steps", 1), ("tune_steps", 0)):
            if getattr(self, name) < least_steps:
                raise EccError(f"{name}={getattr(self, name)} is below {least_steps}, the least it may be.")
        for name in ("lr", "train_lr"):
            if not 0 < getattr(self, name) < 1:
                raise EccError(f"{name}={getattr(self, name)} is outside 0..1.")
        if not 0 <= self.weight_decay < math.inf:
            raise EccError(f"weight_decay={self.weight_decay} is not a number of at least 0.")
        if self.metric not in (None, *METRICS):
            raise EccError(f"there is no metric {self.metric!r}; there are {', '.join(METRICS)}.")
        if not 0 <= self.min_share <= 1:
            raise EccError(f"min_share={self.min_share} is a share of a group's channels, from 0 to 1.")
        if self.round_to is not None and self.round_to < 1:
            raise EccError(f"round_to={self.round_to} is below 1; 1 allows any width.")
        for phase in PHASES:
            self.training(phase)  # which checks the rest
        Distillation(weight=self.distill, temperature=self.temperature)

    @property
    def phase_steps(self) -> dict[str, int]:
        """Steps of each phase, in their order. Steps that a solve leaves over go to the tuning: the sum stays."""
        return dict(zip(PHASES, (self.train_steps, self.steps, self.tune_steps), strict=True))

    def training(self, phase: str) -> TrainSettings:
        """The settings of one phase."""
        return TrainSettings(
            steps=self.phase_steps[phase],
            schedule=None if phase == "solve" else Cosine(start_lr=self.train_lr if phase == "dense" else self.lr),
            precision=self.precision,  # type: ignore[arg-type]  # checked there
            clip_norm=self.clip_norm,
            micro_batch=self.micro_batch,
            channels_last=self.channels_last,
            seed=self.seed,
            log_every=self.log_every,
            checkpoint_steps=self.checkpoint_steps,
            checkpoint_seconds=self.checkpoint_seconds,
        )
