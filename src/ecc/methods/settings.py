"""How to compress: `CompressSettings`, with the paper's choices as defaults where a short run can have them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ecc.constants import MIN_WIDTH_RATIO
from ecc.errors import EccError
from ecc.training import Cosine, DistillSettings, LRSchedule, TrainSettings

from .ecc.admm import AdmmSettings
from .ecc.importance import IMPORTANCES

PHASES = ("dense", "solve", "tune")
"""The parts of a run, in their order."""

SOLVERS = ("scheduled", "admm")
"""How ECC walks down to its budget."""


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How to compress. What has no words here is explained in `TrainSettings`, and the same in all phases.

    Raises:
        EccError: If a value is out of its range.
    """

    pretrain_steps: int = 0
    """Steps of the dense network before anything else, for tasks that come untrained."""
    steps: int = 2000
    """Steps of the solve; the budget is met after about 60 % of them."""
    finetune_steps: int = 1000
    """Steps of the slim network after it was cut."""
    lr: float = 1e-4
    """Of Adam in the solve, and where tuning starts. The paper took 1e-5 over 300,000 steps."""
    finetune_lr: float | None = None
    """Where tuning starts; None for `lr`. It falls to 0 along a cosine. The paper took 3e-5 for MobileNet."""
    falling: bool = False
    """Whether the rate of ECC falls once, over solve and tuning together, as that of a rival does; see `fall`."""
    pretrain_lr: float = 1e-3
    """Of Adam while the dense network is trained; falls to 0 along a cosine."""
    weight_decay: float = 1e-4
    """As the paper's, coupled to the gradient as Adam's is."""
    distill: float = 0.5
    """Share of the teacher, the dense network, in the loss; 0 for none."""
    temperature: float | None = None
    """None compares logits, as the paper's code; a number compares probabilities softened by it."""
    ignore_index: int | None = None
    """A label of which the teacher says nothing."""
    importance: str | None = None
    """What a channel counts for when ECC chooses: taylor, or adam_norm, as in the paper; see `EccSolver`."""
    min_width_ratio: float = MIN_WIDTH_RATIO
    """No group falls below this share of its channels."""
    uniform_floor: float = 0.0
    """ECC cuts no group below this share of what cutting all groups evenly would leave of it; see `ScheduledPruner.bound`."""
    width_multiple: int | None = None
    """Widths become multiples of this; by default as in the profile."""
    solver: str = "scheduled"
    """How ECC walks: `scheduled` is on time; `admm` takes the paper's constants below, and arrives when it arrives."""
    penalty: float = 10.0
    """rho_1 and rho_2 of the paper: 10 on ImageNet, 1 on Cityscapes."""
    width_lr: float = 3.0
    """beta of the paper, which gives no number: 3 is that of the authors' published command."""
    precision: str = "fp32"
    clip_norm: float | None = None
    micro_batch: int | None = None
    channels_last: bool = False
    cuda_graph: bool = False
    seed: int = 0
    log_every: int = 50
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 300.0

    def __post_init__(self) -> None:
        for name, least_steps in (("pretrain_steps", 0), ("steps", 1), ("finetune_steps", 0)):
            if getattr(self, name) < least_steps:
                raise EccError(f"{name}={getattr(self, name)} is below {least_steps}, the least it may be.")
        for name, rate in (("lr", self.lr), ("finetune_lr", self.first_finetune_lr), ("pretrain_lr", self.pretrain_lr)):
            if not 0 < rate < 1:
                raise EccError(f"{name}={rate} is outside 0..1, of which 0 and 1 are no part.")
        is_one = self.finetune_lr is None and self.solver == "scheduled"
        for name, holds, what in (
            ("falling", is_one or not self.falling, "for a tuning with a rate of its own, nor for solver='admm'"),
            ("penalty", 0 < self.penalty < math.inf, "a number above 0"),
            ("width_lr", 0 < self.width_lr < math.inf, "a number above 0"),
            ("uniform_floor", 0 <= self.uniform_floor < 1, "a share from 0 to below 1"),
            ("uniform_floor", self.solver == "scheduled" or not self.uniform_floor, "for solver='admm', which does not plan"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a number of at least 0"),
        ):
            if not holds:
                raise EccError(f"{name}={getattr(self, name)} is not {what}.")
        for name, known in (("solver", SOLVERS), ("importance", IMPORTANCES)):
            if getattr(self, name) not in (None, *known):
                raise EccError(f"{name}={getattr(self, name)!r} is unknown; there are {', '.join(known)}.")
        if not 0 <= self.min_width_ratio <= 1:
            raise EccError(f"min_width_ratio={self.min_width_ratio} is a share of a group's channels, from 0 to 1.")
        if self.width_multiple is not None and self.width_multiple < 1:
            raise EccError(f"width_multiple={self.width_multiple} is below 1; 1 allows any width.")
        self.train  # noqa: B018 - which checks the rest
        DistillSettings(weight=self.distill, temperature=self.temperature)

    @classmethod
    def paper(cls, **changes: Any) -> CompressSettings:
        """Algorithm 1 to the letter, with the paper's rates, its metric, any width, and a teacher by its logits.

        It arrives when it arrives: `width_lr` and `penalty` (beta and rho) must suit the number of steps.
        """
        own: dict[str, Any] = {
            "solver": "admm",
            "importance": "adam_norm",
            "width_multiple": 1,
            "lr": 1e-5,
            "finetune_lr": 3e-5,
            "temperature": None,
        }
        return cls(**own | changes)

    @property
    def first_finetune_lr(self) -> float:
        """Where tuning starts."""
        return self.lr if self.finetune_lr is None else self.finetune_lr

    @property
    def phase_steps(self) -> dict[str, int]:
        """Steps of each phase, in their order. Steps that a solve leaves over go to the tuning: the sum stays."""
        return dict(zip(PHASES, (self.pretrain_steps, self.steps, self.finetune_steps), strict=True))

    def solver_options(self) -> dict[str, Any]:
        """What `EccSolver` is told of the way down. The paper's has no schedule: it may take all steps."""
        if self.solver == "scheduled":
            return {"importance": self.importance, "uniform_floor": self.uniform_floor}
        constants = AdmmSettings(width_lr=self.width_lr, width_penalty=self.penalty, energy_penalty=self.penalty)
        return {"importance": self.importance, "solver": constants, "warm_up": 0.0, "ramp": 1.0}

    def fall(self, phase: str, cut: float) -> Cosine | None:
        """The learning rate of a solve and a tuning that are one training: steady, then along a cosine to 0.

        The more of the network goes, the more has to be learned anew, and the longer the rate stays: for the square of
        what goes, a quarter of all steps where half goes. A network that loses a fifth settles from the start.

        Args:
            phase: solve or tune.
            cut: The share of its cost that the network loses; of several costs the largest.

        Returns:
            None if it is not `falling`: then the solve has a steady rate, and tuning starts anew.
        """
        if not self.falling:
            return None
        hold = int(cut**2 * (self.steps + self.finetune_steps))
        if phase == "solve":
            return Cosine(start_lr=self.lr, hold_steps=hold, steps_after=self.finetune_steps)
        return Cosine(start_lr=self.lr, hold_steps=hold, steps_before=self.steps)

    def schedule(self, phase: str) -> LRSchedule | None:
        """Learning rate of one phase; where ECC is `falling`, it is that of `fall`."""
        start = self.pretrain_lr if phase == "dense" else self.first_finetune_lr
        return None if phase == "solve" else Cosine(start_lr=start)

    @property
    def train(self) -> TrainSettings:
        """Settings of the training loop, the same in all phases."""
        return TrainSettings(
            precision=self.precision,
            weight_decay=self.weight_decay,
            clip_norm=self.clip_norm,
            micro_batch=self.micro_batch,
            channels_last=self.channels_last,
            cuda_graph=self.cuda_graph,
            seed=self.seed,
            log_every=self.log_every,
            checkpoint_steps=self.checkpoint_steps,
            checkpoint_seconds=self.checkpoint_seconds,
        )
