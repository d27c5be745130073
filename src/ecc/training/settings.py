"""Settings of training, declared once for Python, TOML files and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from ecc.errors import EccError
from ecc.options import check_options, option

PRECISIONS = ("fp32", "bf16", "fp16")

AUTO_DISTILL_WEIGHT = 0.5
"""Weight of the distillation loss by default, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of the training loop. The number of steps and the learning-rate schedule are arguments of `train`.

    Raises:
        EccError: If a value is out of its range.
    """

    precision: str = option(
        "fp32",
        "Precision of forward and backward pass (autocast); weights stay fp32. fp16 scales the loss.",
        choices=PRECISIONS,
        common=True,
    )
    clip_norm: float | None = option(None, "Largest norm of the gradient; larger ones are scaled down.", above=0)
    weight_decay: float = option(1e-4, "Weight decay of Adam (L2 penalty, as in the paper).", range=(0, None))
    micro_batch: int | None = option(
        None, "Micro-batch size (gradient accumulation); batch norm sees micro-batches.", range=(1, None),
        changes_result=False,
    )  # fmt: skip
    channels_last: bool = option(False, "Use the channels-last memory format; faster on GPUs.")
    cuda_graph: bool = option(
        False,
        "Run forward and backward pass as one CUDA graph; faster for small networks on large GPUs.",
        changes_result=False,
    )
    seed: int = option(0, "Random seed.", range=(0, None), common=True)
    log_every: int = option(50, "Steps between two lines of the history.", range=(1, None), changes_result=False)
    checkpoint_steps: int | None = option(None, "Steps between two checkpoints.", range=(1, None), changes_result=False)
    checkpoint_seconds: float | None = option(300.0, "Seconds between two checkpoints.", above=0, changes_result=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.cuda_graph and self.precision == "fp16":
            raise EccError("cuda_graph does not support precision fp16, which rescales the loss; use bf16.")


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Settings of distillation: the loss is `weight * distance(outputs, teacher) + (1 - weight) * task loss`.

    Raises:
        EccError: If a value is out of its range.
    """

    weight: float | None = option(
        None,
        "Weight of the distillation loss (0: off). Default: 0.5 if the outputs can be compared.",
        range=(0, 1),
        flag="kd_weight",
        common=True,
    )
    temperature: float | None = option(
        None,
        "Softmax temperature of distillation. Default: mean squared error of the logits.",
        above=0,
        flag="kd_temperature",
    )
    ignore_index: int | None = option(None, "Label of targets that distillation ignores, such as 255 on Cityscapes.")

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def is_off(self) -> bool:
        """Whether there is no distillation."""
        return self.weight == 0

    @property
    def is_auto(self) -> bool:
        """Whether distillation is left out where the outputs of student and teacher cannot be compared."""
        return self.weight is None

    @property
    def used_weight(self) -> float:
        """The weight, or the default one."""
        return AUTO_DISTILL_WEIGHT if self.weight is None else self.weight
