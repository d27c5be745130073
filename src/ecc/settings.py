"""Settings of measurements, profiles, training, distillation, the solvers and a compression.

Each setting is declared once: these classes are the Python API, the keys of TOML files, and the options of the command
line (see `ecc.options`). The module does not import torch, so that the help of the command line is fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ecc.constants import ATTENTION_UNITS, MIN_WIDTH_RATIO, PHASES, PRESETS
from ecc.errors import BadMeasurement, EccError, closest, option_hint
from ecc.options import check_options, option, settings_from


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Cosine decay of the learning rate to 0, after an optional constant part.

    It is a function of the step, so that a checkpoint need not save it. A curve that several trainings share has
    `steps_before` and `steps_after`.
    """

    start_lr: float | None = option(None, "Learning rate at the start. Default: that of the optimizer.", above=0)
    hold_steps: int = option(0, "Steps in which it stays constant.", range=(0, None))
    steps_before: int = option(0, "Steps of an earlier training on the same curve.", range=(0, None))
    steps_after: int = option(0, "Steps of a later training on the same curve.", range=(0, None))

    def __post_init__(self) -> None:
        check_options(self)

    def lr(self, base_lr: float, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, of a training; `base_lr` is that of the optimizer."""
        start = base_lr if self.start_lr is None else self.start_lr
        step, steps = self.steps_before + step, self.steps_before + steps + self.steps_after
        progress = min(max(step - self.hold_steps, 0) / max(steps - self.hold_steps, 1), 1.0)
        return start * (1 + math.cos(math.pi * progress)) / 2


PRECISIONS = ("fp32", "bf16", "fp16")

RUNNERS = ("eager", "cuda-graph", "compile", "onnxruntime", "openvino")
"""Built-in runners; see `ecc.measure.runners`."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
Precision = Literal["fp32", "tf32", "bf16", "fp16", "int8"]

AUTO_DISTILL_WEIGHT = 0.5
"""Weight of the distillation loss by default, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of the training loop. The number of steps and the learning-rate schedule are arguments of `train`."""

    precision: str = option(
        "fp32",
        "Precision of forward and backward pass (autocast); weights stay fp32. fp16 scales the loss.",
        choices=PRECISIONS,
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
    seed: int = option(0, "Random seed.", range=(0, None))
    log_every: int = option(50, "Steps between two lines of the history.", range=(1, None), changes_result=False)
    checkpoint_steps: int | None = option(None, "Steps between two checkpoints.", range=(1, None), changes_result=False)
    checkpoint_seconds: float | None = option(
        300.0, "Seconds between two checkpoints.", above=0, flag="checkpoint_every", changes_result=False
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.cuda_graph and self.precision == "fp16":
            raise EccError("cuda_graph does not support precision fp16, which rescales the loss; use bf16.")


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of `trace_channels`."""

    attention: str = option(
        "heads",
        "What is pruned of attention layers: whole heads, or the width inside them (the same columns of all heads).",
        choices=ATTENTION_UNITS,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Settings of distillation: the loss is `weight * distance(outputs, teacher) + (1 - weight) * task loss`."""

    weight: float | None = option(
        None,
        "Weight of the distillation loss (0: off). Default: 0.5 if the outputs can be compared.",
        range=(0, 1),
        flag="kd_weight",
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


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """Constants of Algorithm 1. The defaults are those of the authors' published command."""

    width_lr: float = option(3.0, "Step size of the widths (beta).", above=0, flag="paper_width_lr")
    width_penalty: float = option(10.0, "Penalty of the widths (rho_1).", above=0, flag="paper_width_penalty")
    energy_penalty: float = option(10.0, "Penalty of the energy (rho_2).", above=0, flag="paper_energy_penalty")
    min_energy_slope: float = option(
        1e-3, "Smallest gradient after projecting z (epsilon).", above=0, flag="paper_min_energy_slope"
    )
    max_norm: float | None = option(1.0, "Maximum norm of the gradient of s.", above=0, flag="paper_max_norm")
    floor_width_dual: bool = option(
        True, "Use floor(s) in Eq. (11), as the authors' code.", flag="paper_floor_width_dual"
    )
    project_energy_dual: bool = option(
        True, "Project z (Sec. 3.3.3). Without it the solver stalls.", flag="paper_project_energy_dual"
    )

    def __post_init__(self) -> None:
        check_options(self)


IMPORTANCES = ("taylor", "adam_norm")
"""Criteria of channel importance: the Fisher/Taylor criterion, or the paper's Adam-weighted norm of the weights."""
SOLVERS = ("scheduled", "admm", "paper")
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
    prune_steps: int = option(2000, "Number of pruning steps.", range=(0, None), common=True)
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
    importance: str | None = option(
        None, "Channel importance. By default taylor with solver scheduled, else adam_norm.", choices=IMPORTANCES
    )
    min_width_ratio: float = option(MIN_WIDTH_RATIO, "Minimum fraction of channels kept in each group.", range=(0, 1))
    width_multiple: int | None = option(
        None, "Prune layers to multiples of this number of channels. Default: that of the profile.", range=(1, None)
    )
    uniform_floor: float = option(
        0.0, "Minimum width of a group, as a fraction of its width under uniform pruning.", range=(0, 0.999)
    )
    depth: bool = option(
        True,
        "Allow that residual branches are removed entirely, by methods that can: ecc with solver scheduled, one_shot, "
        "shortgpt, 2ssp.",
    )
    solver: str = option(
        "scheduled",
        "Solver of ECC: scheduled; admm, the paper's algorithm in relative units; or paper, as published.",
        choices=SOLVERS,
    )
    runner: str | None = option(
        None,
        "Runner of the measurements: eager, cuda-graph, compile, onnxruntime, openvino, or auto, as in ecc profile.",
        metavar="RUNNER",
    )
    inference_precision: Precision | None = option(
        None,
        "Precision of the measurements. Default: that of the energy model, bf16 for language models on a GPU, else "
        "fp32.",
        choices=get_args(Precision),
    )
    inference_channels_last: bool = option(False, "Use the channels-last memory format in the measurements.")
    paper_constants: PaperSettings = field(default_factory=PaperSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)

    def __post_init__(self) -> None:
        check_options(self)
        check_runner(self.runner)
        if self.lr_schedule == "cosine" and self.finetune_lr is not None:
            raise EccError("lr_schedule 'cosine' has no separate finetune_lr; leave one of them out.")
        if self.solver != "paper" and self.paper_constants != PaperSettings():
            raise EccError("the options --paper-* are constants of solver 'paper'; leave them out.")
        without = {"scheduled": (), "admm": ("uniform_floor",), "paper": ("uniform_floor", "lr_schedule")}
        for name in without[self.solver]:
            if getattr(self, name) != getattr(CompressSettings, name):
                raise EccError(f"{name} has no effect with solver {self.solver!r}; leave it out.")

    @classmethod
    def paper(cls, **changes: Any) -> CompressSettings:
        """Settings of the paper: Algorithm 1, its importance, learning rates and gradient clipping, any width.

        The solver may not converge within `prune_steps`: its constants must suit the number of steps.

        Args:
            **changes: Options by their name on the command line, such as `kd_weight`.
        """
        published: dict[str, Any] = {
            "solver": "paper",
            "importance": "adam_norm",
            "min_width_ratio": 0.0,  # at least one channel
            "depth": False,
            "width_multiple": 1,
            "lr": 1e-5,
            "finetune_lr": 3e-5,
            "clip_norm": 1.0,
            "kd_temperature": None,  # compares logits
        }
        return settings_from(cls, published | changes)

    @property
    def inference(self) -> dict[str, Any]:
        """Runner, precision and memory format of the measurements, as far as they were chosen."""
        chosen = {"runner": self.runner, "precision": self.inference_precision}
        found = {name: value for name, value in chosen.items() if value is not None}
        return {**found, "channels_last": True} if self.inference_channels_last else found

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


def make_settings(preset: str, values: Mapping[str, Any]) -> CompressSettings:
    """Settings of a preset with some of them changed."""
    if preset not in PRESETS:
        raise EccError(f"preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}.")
    made = CompressSettings.paper(**values) if preset == "paper" else settings_from(CompressSettings, values)
    if "log_every" in values:
        return made
    log_every = max(1, min(50, made.prune_steps // 50))  # a short run is drawn as finely as a long one
    return replace(made, train=replace(made.train, log_every=log_every))


# --- measurements and profiles ---------------------------------------------------------------------

InputData = Literal["random", "example"]

MAX_WINDOW_SECONDS = 3600.0
"""Longest window that a user may set."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a network is run, and how long it is measured.

    Raises:
        EccError: If a value is out of its range.
    """

    runner: str | None = option(
        None,
        "Runner: eager, cuda-graph, compile[:MODE], onnxruntime[:PROVIDER], openvino[:DEVICE], file.py:MyRunner, or "
        "auto (the cheapest runner, precision and format that keeps the outputs). Default: cuda-graph on CUDA devices "
        "if the network can be captured, because it repeats better; else eager.",
        metavar="RUNNER",
        common=True,
    )
    precision: Precision = option(
        "fp32",
        "Numerical precision: fp32 (no TF32), tf32, bf16, fp16, or int8 (onnxruntime and openvino).",
        choices=get_args(Precision),
        common=True,
    )
    channels_last: bool = option(False, "Use the channels-last memory format for weights and inputs.", common=True)
    cudnn_autotune: bool = option(
        True, "Let cuDNN choose its algorithms by measuring them during the warm-up.", flag="autotune"
    )
    input_data: InputData = option(
        "random",
        "Input data: random (normal random numbers) or example (the example input itself).",
        choices=get_args(InputData),
    )
    window_seconds: float = option(
        0.5,
        "Minimum length of a window in seconds.",
        range=(0.001, MAX_WINDOW_SECONDS),
        flag="window",
        metavar="SECONDS",
    )
    min_ticks: int = option(10, "Minimum number of counter ticks in a window.", range=(1, None), metavar="N")
    max_window_seconds: float = option(
        30.0, "Longest window. A counter that needs more time for min_ticks is refused.", above=0, metavar="SECONDS"
    )
    target_relative_ci: float = option(
        0.015, "Repeat windows until the 95 % CI of the mean is below this fraction.", range=(1e-6, None)
    )
    min_repeats: int = option(3, "Minimum number of windows.", range=(1, None), metavar="N")
    max_repeats: int = option(8, "Maximum number of windows.", range=(1, None), metavar="N")
    warmup_seconds: float = option(
        0.3, "Time under load before the first window; at least the meter's settling time.", range=(0, None)
    )
    warmup_runs: int = option(10, "Inferences before anything is timed.", range=(1, None), metavar="N")
    probe_seconds: float = option(
        2.0, "How long the counter is observed, idle and busy, before measuring.", range=(0.001, None)
    )
    in_turns: bool = option(
        False,
        "Measure every network in turns with the dense network, and correct for the speed of the machine at that time. "
        "Takes twice as long. Default: for the clocks cputime and wall, since other programs slow both networks.",
    )
    allow_shared: bool = option(False, "Measure although other processes use the device.")
    allow_throttling: bool = option(False, "Measure although the device throttles.")

    def __post_init__(self) -> None:
        check_options(self)
        check_runner(self.runner)
        if self.max_window_seconds < self.window_seconds:
            raise BadMeasurement(
                f"max_window_seconds is {self.max_window_seconds:g}; it must not be below "
                f"window_seconds={self.window_seconds:g}."
            )
        if self.max_repeats < self.min_repeats:
            raise BadMeasurement(f"max_repeats is {self.max_repeats}; give at least min_repeats={self.min_repeats}.")


def deployment(settings: MeasureSettings) -> str:
    """Runner, precision and memory format in words."""
    last = ", channels last" if settings.channels_last else ""
    return f"{settings.runner or 'default'}, {settings.precision}{last}"


def is_own_runner(spec: str) -> bool:
    """Whether a spec names a class in a file of the user."""
    return ".py:" in spec


def refuse_runner_of_file(found: str | None, chosen: str | None, source: str) -> None:
    """Refuse a runner in a Python file that only a profile or an energy model names, as these may come from others.

    Args:
        found: Runner of the profile or the energy model.
        chosen: Runner that the user chose.
        source: The profile or the energy model, for the message.
    """
    if found is not None and is_own_runner(found) and found != chosen:
        raise EccError(
            f"{source} was measured with the runner {found!r}, which would be executed. If you trust it, give "
            f"{option_hint('runner', found)}."
        )


def check_runner(spec: str | None) -> None:
    """Check the name of a runner."""
    if spec is None or spec == "auto" or is_own_runner(spec):
        return
    name, colon, argument = spec.partition(":")
    if name not in RUNNERS or (colon and not argument):
        close = closest(name, RUNNERS)
        hint = f"did you mean {close!r}?" if close and close != name else ""
        known = f"choose one of auto, {', '.join(RUNNERS)}, or file.py:MyRunner."
        raise EccError(f"runner is {spec!r}; {hint or known}")
    if colon and name in ("eager", "cuda-graph"):
        raise EccError(f"runner is {spec!r}; {name} has no argument.")


PROFILE_SETTINGS = MeasureSettings(
    window_seconds=0.4, min_ticks=4, min_repeats=1, max_repeats=1, warmup_seconds=0.03, warmup_runs=3
)
"""One short window per sample, below a second on a counter with a period of 100 ms.

Repeats are better made in other rounds, where the noise is independent. The device is still warm from the previous
sample, and energy before the first tick of a window is not counted, so the warm-up can be short. cuDNN autotuning takes
about as long as the window. Limiting it to three algorithms instead of torch's ten saves two thirds of that, but
networks then use several percent more energy on an H200 than users would see.
"""

CLOCK_SETTINGS = replace(PROFILE_SETTINGS, window_seconds=0.02, min_repeats=16, max_repeats=32, in_turns=True)
"""For clocks: many short windows in turns with the dense network, since other programs slow some of them.

Other programs slow both networks, but not in every window: the fastest of many windows is close to the cost on a
machine without them.
"""

DESIGNS = ("mixed", "uniform")

Shard = tuple[int, int]
"""(k, n): the samples whose index is k modulo n, with k from 1 to n."""

MAX_SAMPLES = 1_000_000
"""Largest design; it is created in memory before the first measurement."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """Which widths are measured, how often, and in which order."""

    kind: str = option("mixed", "Design: mixed or uniform.", choices=DESIGNS, flag="design")
    samples: int = option(
        250,
        "Number of width configurations; a larger one extends a profile.",
        range=(1, MAX_SAMPLES),
        metavar="N",
        common=True,
        changes_result=False,
    )
    seed: int = option(0, "Random seed of the design.", range=(0, 2**32 - 1), metavar="N")
    width_multiple: int | None = option(None, "Use layers with multiples of N channels.", range=(1, None), metavar="N")
    depth: bool = option(True, "Include networks with removed residual branches (design mixed).")
    rounds: int = option(
        1, "How often each configuration is measured.", range=(1, None), metavar="N", changes_result=False
    )
    reference_every: int = option(
        10, "Samples between two measurements of the dense reference, which show drift.", range=(1, None), metavar="N"
    )
    shard: Shard | None = None
    """Part of the design for one of several equal devices; None for all."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.rounds * self.samples > MAX_SAMPLES:
            raise BadMeasurement(
                f"{self.rounds} rounds of {self.samples} samples are more than {MAX_SAMPLES} measurements; "
                "use fewer rounds or samples."
            )
        if self.shard is not None:
            number, count = self.shard
            if not 1 <= number <= count:
                raise BadMeasurement(f"shard {number}/{count} does not exist; give 1/N to N/N.")
            if not self.indices():
                raise BadMeasurement(f"shard {number}/{count} of {self.samples} samples is empty; use more samples.")

    @property
    def removes_branches(self) -> bool:
        """Whether some configurations have removed branches."""
        return self.depth and self.kind == "mixed"

    def indices(self) -> tuple[int, ...]:
        """Indices of the samples to measure: those of the shard, or all."""
        number, count = self.shard or (0, 1)
        return tuple(index for index in range(self.samples) if index % count == number % count)
