"""`CompressSettings`: the settings of a compression, declared once for Python, TOML files and the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ecc.constants import MIN_WIDTH_RATIO
from ecc.errors import EccError
from ecc.options import check_options, option, settings_from
from ecc.run_records import PHASES
from ecc.training import Cosine, DistillSettings, TrainSettings

from .ecc.admm import AdmmSettings
from .ecc.importance import IMPORTANCES

SOLVERS = ("scheduled", "admm")
LR_SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """Settings of a compression.

    Raises:
        EccError: If a value is out of range, or two settings contradict each other.
    """

    pretrain_steps: int = option(
        0, "Training steps of the dense network before pruning; 0 if it is trained.", range=(0, None), common=True
    )
    prune_steps: int = option(2000, "Number of pruning steps.", range=(1, None), common=True)
    finetune_steps: int = option(1000, "Number of fine-tuning steps of the slim network.", range=(0, None), common=True)
    lr: float = option(1e-4, "Learning rate of pruning and fine-tuning (Adam).", above=0, range=(None, 1), common=True)
    finetune_lr: float | None = option(
        None, "Learning rate at the start of fine-tuning; --lr if not given.", above=0, range=(None, 1)
    )
    pretrain_lr: float = option(1e-3, "Learning rate at the start of pretraining.", above=0, range=(None, 1))
    lr_schedule: str = option(
        "constant",
        "Learning rate of ECC while it prunes: constant, with a new cosine for fine-tuning; or one cosine for both.",
        choices=LR_SCHEDULES,
    )
    importance: str = option(
        "taylor", "Channel importance: taylor, or adam_norm as in the paper.", choices=IMPORTANCES, common=True
    )
    min_width_ratio: float = option(
        MIN_WIDTH_RATIO, "Minimum fraction of channels kept in each group.", range=(0, 1), common=True
    )
    width_multiple: int | None = option(
        None, "Widths are multiples of this number; as in the profile if not given.", range=(1, None), common=True
    )
    uniform_floor: float = option(
        0.0, "Minimum width of a group, as a fraction of its width under uniform pruning.", range=(0, 0.999)
    )
    solver: str = option(
        "scheduled", "Solver of ECC: scheduled, or admm as published (use it with adam_norm).", choices=SOLVERS
    )
    admm: AdmmSettings = field(default_factory=AdmmSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)

    def __post_init__(self) -> None:
        check_options(self)
        if self.lr_schedule == "cosine" and self.finetune_lr is not None:
            raise EccError("lr_schedule 'cosine' has no separate finetune_lr; leave one of them out.")
        if self.solver == "admm":
            for name in ("uniform_floor", "lr_schedule"):
                if getattr(self, name) != getattr(CompressSettings, name):
                    raise EccError(f"{name} has no effect with solver 'admm'; leave it out.")

    @classmethod
    def paper(cls, **changes: Any) -> CompressSettings:
        """Settings of the paper: Algorithm 1, its importance, learning rates and gradient clipping, any width.

        The ADMM solver may not converge within `prune_steps`: its constants must suit the number of steps.

        Args:
            **changes: Options by their name on the command line, such as `kd_weight`.
        """
        published: dict[str, Any] = {
            "solver": "admm",
            "importance": "adam_norm",
            "min_width_ratio": 0.0,  # at least one channel
            "width_multiple": 1,
            "lr": 1e-5,
            "finetune_lr": 3e-5,
            "clip_norm": 1.0,
            "kd_temperature": None,  # compares logits
        }
        return settings_from(cls, published | changes)

    @property
    def phase_steps(self) -> dict[str, int]:
        """Steps of each phase, in order. Fine-tuning also gets the steps that pruning does not use."""
        return dict(zip(PHASES, (self.pretrain_steps, self.prune_steps, self.finetune_steps), strict=True))

    def schedule(self, phase: str) -> Cosine | None:
        """Learning rate of a phase; None for a constant one."""
        if phase == "prune":
            return None
        start = self.pretrain_lr if phase == "pretrain" else self.finetune_lr or self.lr
        return Cosine(start_lr=start)

    def joint_schedule(self, phase: str, reduction: float) -> Cosine | None:
        """Learning rate of ECC with `lr_schedule="cosine"`: constant at first, then one cosine until fine-tuning ends.

        The larger the reduction, the more the network has to learn again, and the longer the rate stays constant: for
        `reduction ** 2` of the steps, a quarter where the cost is halved.

        Args:
            phase: prune or finetune.
            reduction: 1 - budget / dense cost, of the tightest budget.

        Returns:
            None for `lr_schedule="constant"`.
        """
        if self.lr_schedule == "constant":
            return None
        hold = int(reduction**2 * (self.prune_steps + self.finetune_steps))
        before, after = (0, self.finetune_steps) if phase == "prune" else (self.prune_steps, 0)
        return Cosine(start_lr=self.lr, hold_steps=hold, steps_before=before, steps_after=after)
