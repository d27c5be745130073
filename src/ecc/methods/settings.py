"""How to compress: `CompressSettings`, with the paper's choices as defaults where a short run can have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ecc.errors import EccError
from ecc.training import Cosine, Distillation, TrainSettings

from .ecc.floors import MIN_SHARE
from .ecc.paper import PaperSettings

PHASES = ("dense", "solve", "tune")
"""The parts of a run, in their order."""

DYNAMICS = ("pace", "paper")
"""How ECC walks down to its budget."""


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How to compress.

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
    tune_lr: float | None = None
    """Where tuning starts; None for `lr`. It falls to 0 along a cosine. The paper took 3e-5 for MobileNet."""
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
    min_share: float = MIN_SHARE
    """No group falls below this share of its channels."""
    round_to: int | None = None
    """Widths become multiples of this; by default as in the profile."""
    dynamics: str = "pace"
    """How ECC walks: `pace` is on time; `paper` takes the paper's constants below, and arrives when it arrives."""
    penalty: float = 10.0
    """rho_1 and rho_2 of the paper: 10 on ImageNet, 1 on Cityscapes."""
    width_lr: float = 3.0
    """beta of the paper, which gives no number: 3 is that of the authors' published command."""
    precision: str = "fp32"
    """Of the forward pass in training: fp32, bf16 or fp16."""
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
        for name in ("lr", "tune_lr", "train_lr"):
            rate = getattr(self, name)
            if not (name == "tune_lr" and rate is None) and not 0 < rate < 1:
                raise EccError(f"{name}={rate} is outside 0..1.")
        if self.dynamics not in DYNAMICS:
            raise EccError(f"dynamics={self.dynamics!r} is unknown; there are {', '.join(DYNAMICS)}.")
        for name in ("penalty", "width_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise EccError(f"{name}={getattr(self, name)} is not a number above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise EccError(f"weight_decay={self.weight_decay} is not a number of at least 0.")
        if not 0 <= self.min_share <= 1:
            raise EccError(f"min_share={self.min_share} is a share of a group's channels, from 0 to 1.")
        if self.round_to is not None and self.round_to < 1:
            raise EccError(f"round_to={self.round_to} is below 1; 1 allows any width.")
        for phase in PHASES:
            self.training(phase)  # which checks the rest
        Distillation(weight=self.distill, temperature=self.temperature)

    def solver(self) -> dict[str, Any]:
        """What `EccSolver` is told of the way down. The paper's has no schedule: it may take all steps."""
        if self.dynamics == "pace":
            return {}
        constants = PaperSettings(width_lr=self.width_lr, width_penalty=self.penalty, energy_penalty=self.penalty)
        return {"dynamics": constants, "warm_up": 0.0, "ramp": 1.0}

    def training(self, phase: str) -> TrainSettings:
        """The settings of one phase."""
        steps = {"dense": self.train_steps, "solve": self.steps, "tune": self.tune_steps}[phase]
        start = self.train_lr if phase == "dense" else self.tune_lr or self.lr
        return TrainSettings(
            steps=steps,
            schedule=None if phase == "solve" else Cosine(start_lr=start),
            precision=self.precision,  # type: ignore[arg-type]  # checked there
            clip_norm=self.clip_norm,
            micro_batch=self.micro_batch,
            channels_last=self.channels_last,
            seed=self.seed,
            log_every=self.log_every,
            checkpoint_steps=self.checkpoint_steps,
            checkpoint_seconds=self.checkpoint_seconds,
        )
