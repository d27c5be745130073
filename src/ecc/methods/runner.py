"""`CompressionRunner`: what structured and unstructured compression share.

A run has three phases (`ecc.run_records.PHASES`). Pretrain trains the dense network, prune removes channels or weights
while training continues, and finetune trains the result. All phases draw from one counted stream of batches and write
to one run folder. The same call resumes a run, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecc.errors import BadTask, wrap_user_errors
from ecc.formatting import score_text
from ecc.graph import ChannelGraph
from ecc.options import flat_values
from ecc.records import read_record, to_builtins
from ecc.run_records import PHASES, CostCheck, MethodLine, RunSummary, ScoreLine, SolverLine
from ecc.settings import CompressSettings
from ecc.task import Task
from ecc.torch_utils import eval_mode
from ecc.training import (
    BatchStream,
    Cosine,
    DistributedContext,
    Histories,
    History,
    Logger,
    Loggers,
    OnStep,
    Teacher,
    fused_on_gpu,
    load_state,
    open_run,
    save_state,
    train,
    weights_checksum,
)

from .base import check_trainable

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SLOW_DATA = 0.5
"""Fraction of the training time from which on slow batches are reported."""
MIN_SECONDS = 5.0
"""Shorter trainings are not reported."""


def result_settings(settings: CompressSettings) -> dict[str, Any]:
    """The settings that must stay the same when a run or a grid is resumed."""
    return flat_values(settings, only_result=True)


def initial_weights_checksum(task: Task, settings: CompressSettings) -> str | None:
    """Checksum of the given dense weights; None if the run trains them itself."""
    return None if settings.pretrain_steps else weights_checksum(task.model.state_dict())


def adam(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Adam:
    """Adam over the trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(trained, lr=lr, weight_decay=weight_decay, fused=fused_on_gpu(trained))


@dataclass(frozen=True)
class CompressedModel:
    """The result of a compression."""

    model: nn.Module
    """The slim network; with single weights pruned, the network with zeros in their place."""
    graph: ChannelGraph
    """Of the dense network."""
    summary: RunSummary

    @property
    def widths(self) -> dict[str, int]:
        """Channels that are left, by group."""
        return self.summary.widths


class CompressionRunner(ABC):
    """Runs the phases of a compression.

    Args:
        task: With `train_batches` and `loss`. It is not changed.
        settings: Settings; the defaults if None.
        device: Where to train.
        optimizer: Function from parameters to an optimizer, whose learning rate is used in all phases; None for Adam
            with the learning rates of the settings.

    Raises:
        BadTask: If the task cannot be trained.
    """

    def __init__(
        self,
        task: Task,
        settings: CompressSettings | None,
        device: torch.device | str,
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        check_trainable(task)
        self._make_optimizer = optimizer
        self.task, self.settings, self.device = task, settings or CompressSettings(), torch.device(device)
        self.distributed = DistributedContext(self.device)

    def run(
        self,
        folder: str | Path,
        *,
        distributed: DistributedContext | None = None,
        history: History | None = None,
        loggers: Sequence[Logger] = (),
        progress: Callable[[str], None] | None = None,
    ) -> CompressedModel:
        """Compress the network, or resume a run.

        Args:
            folder: Of the run.
            distributed: The processes that train together; None for this one alone.
            history: Gets the lines that this session writes to the history.
            loggers: Get the numbers of the whole history, those of earlier sessions first. They are not closed.
            progress: Gets one line of text per event.

        Raises:
            BadFile: If the folder holds another run or other files.
            InfeasibleBudget: If a budget cannot be met.
        """
        self.distributed = distributed or self.distributed
        curves = Loggers(*loggers)
        self.history: History = Histories(curves) if history is None else Histories(history, curves)
        self.report: Callable[[str], None] = progress or (lambda _: None)
        self.scores: dict[str, float] = {}
        self.stream = BatchStream(
            self.task,
            device=self.device,
            seed=self.settings.train.seed,
            rank=self.distributed.rank,
            world_size=self.distributed.size,
        )
        self._check()
        with open_run(folder, self.config(), device_type=self.device.type, writes=self.distributed.is_main) as run:
            self.folder = run
            for line in run.history() if loggers and run.writes else ():
                curves.log(line)
            if (run.path / "summary.json").exists():
                with run.restoring("summary.json"):
                    return self._load_result(read_record(run.path / "summary.json", RunSummary))
            return self._run_phases()

    def config(self) -> dict[str, Any]:
        """What identifies the run: a run with another config is another run."""
        weights = initial_weights_checksum(self.task, self.settings)
        own = {"verb": "compress", "task": self.task.name, **self._config(), "weights": weights}
        if self._make_optimizer is not None:
            own["optimizer"] = repr(self._make_optimizer([nn.Parameter(torch.zeros(1))]))
        return {**own, "settings": result_settings(self.settings)}

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def _check(self) -> None:
        """Forget an earlier run, and refuse what is not possible before anything is written."""

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """Entries of the config."""

    @abstractmethod
    def _run_phases(self) -> CompressedModel:
        """All phases, from where the checkpoint is."""

    @abstractmethod
    def _load_result(self, summary: RunSummary) -> CompressedModel:
        """The result of a finished run."""

    def _state(self) -> dict[str, Any]:
        """Entries of a checkpoint besides network, optimizer and stream."""
        return {"scores": dict(self.scores)}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.scores = {name: float(score) for name, score in state["scores"].items()}

    # ------------------------------------------------------------ steps that both share

    def _resume(self) -> str:
        """Restore what the last session found out; the phase that it was in."""
        saved = self.folder.checkpoint()
        if saved is None:
            return PHASES[0]
        with self.folder.restoring():
            self._load_state(saved["extra"])
            return PHASES[PHASES.index(saved["phase"])]

    def _pretrain(self, model: nn.Module, resumed_in: str) -> Teacher | None:
        """Train the dense network, or load what an earlier session trained; the teacher from then on."""
        file, steps = self.folder.path / "dense.safetensors", self.settings.pretrain_steps
        if steps and (resumed_in == "pretrain" or not file.exists()):
            self.report(f"pretraining the dense network, {steps} steps")
            self._train(model, self._optimizer(model, "pretrain"), "pretrain", steps)
            if self.distributed.is_main:
                save_state(file, model.state_dict())
        elif steps:
            with self.folder.restoring(file.name):
                model.load_state_dict(load_state(file))
        self._score("dense", model)
        return None if self.settings.distill.is_off else Teacher(model, self.settings.distill)

    def _optimizer(self, model: nn.Module, phase: str) -> torch.optim.Optimizer:
        """A new optimizer for the trainable parameters."""
        if self._make_optimizer is not None:
            return self._make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
        if phase == "pretrain":
            return adam(model, self.settings.pretrain_lr, 0.0)
        return adam(model, self.settings.lr, self.settings.train.weight_decay)

    def _train(
        self,
        model: nn.Module,
        optimizer: Any,
        phase: str,
        steps: int,
        teacher: Teacher | None = None,
        schedule: Cosine | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        """Train through one phase; the learning rate is that of the phase unless there is another schedule."""
        started, drawing = time.perf_counter(), self.stream.seconds
        train(model, optimizer, on_step=on_step, **self._train_options(phase, steps, teacher, schedule))
        seconds = time.perf_counter() - started
        if text := describe_slow_data(self.device, self.stream.seconds - drawing, seconds):
            self.report(text)

    def _train_options(
        self, phase: str, steps: int, teacher: Teacher | None, schedule: Cosine | None
    ) -> dict[str, Any]:
        """Fields of `Training`."""
        schedule = schedule or self.settings.schedule(phase)
        if schedule is not None and self._make_optimizer is not None:
            schedule = replace(schedule, start_lr=None)  # the learning rate is that of the optimizer
        return {
            "stream": self.stream,
            "steps": steps,
            "loss": self.task.loss,
            "settings": self.settings.train,
            "schedule": schedule,
            "teacher": teacher,
            "distributed": self.distributed,
            "run": self.folder,
            "history": self.history,
            "extra": self._state,
            "phase": phase,
        }

    def _score(self, name: str, model: nn.Module) -> None:
        """Evaluate the network, once for each of `SCORES`."""
        if self.task.evaluate is None and name == "dense":
            self.report("no score: no evaluate= given")
        if name in self.scores or self.task.evaluate is None:
            return
        with wrap_user_errors(f"evaluate of task {self.task.name!r}"), eval_mode(model):
            found = self.task.evaluate(model)
        try:
            score = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise BadTask(
                f"evaluate of task {self.task.name!r} returned {type(found).__name__}; return one number (higher is "
                "better)."
            ) from None
        if not math.isfinite(score):
            raise BadTask(f"evaluate of task {self.task.name!r} returned {score}; return a finite number.")
        self.scores[name] = score
        self._log(ScoreLine(name=name, score=score, total=self.stream.total))
        self.report(f"{self.task.metric} ({name}): {score_text(score, self.task.metric)}")

    def _log(self, line: SolverLine | CostCheck | ScoreLine | MethodLine) -> None:
        """Write a line of the history."""
        if self.distributed.is_main:
            values = to_builtins(line)
            self.folder.log(values)
            self.history.log(values)


def describe_slow_data(device: torch.device, drawing: float, seconds: float) -> str:
    """A message if most of the training time was spent on drawing batches; otherwise empty.

    Args:
        device: Where the network is trained. On a CPU nothing can be gained: data and network share it.
        drawing: Seconds spent on drawing batches.
        seconds: Of the training.
    """
    if device.type == "cpu" or seconds < MIN_SECONDS or drawing < SLOW_DATA * seconds:
        return ""
    return (
        f"{drawing / seconds:.0%} of the training time was spent in train_batches. Prepare batches in worker processes "
        "(torch.utils.data.DataLoader(num_workers=...)) or on the device."
    )
