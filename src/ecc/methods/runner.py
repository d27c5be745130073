"""`CompressionRunner`: what every compression shares. The run folder, the dense network before, training, scores.

    dense    train the dense network, if asked
    solve    bring it down to its budget: what a method is about
    tune     train what is left

Each phase draws from one counted stream of batches and writes into one run folder; the same call goes on where the
last one ended, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ecc.errors import BadTask, wrap_user_errors
from ecc.options import flat_values
from ecc.records import read_record, to_builtins
from ecc.run_records import PHASES, CostCheck, MethodLine, RunSummary, ScoreLine, SolverLine
from ecc.task import Task
from ecc.training import (
    BatchStream,
    DistributedContext,
    Histories,
    History,
    Logger,
    Loggers,
    LRSchedule,
    OnStep,
    RunDir,
    Teacher,
    fused_on_gpu,
    load_state,
    open_run,
    save_state,
    train,
    weights_checksum,
)

from .settings import CompressSettings

Result = TypeVar("Result")

SLOW_BATCHES = 0.5
"""Share of the time of a training from which on drawing batches is told to be slow."""
LEAST_SECONDS = 5.0
"""Of a training of which something is told."""


def result_settings(settings: CompressSettings) -> dict[str, Any]:
    """The settings that must stay the same when a run or a grid is resumed."""
    return flat_values(settings, only_result=True)


def weights_of(task: Task, settings: CompressSettings) -> str | None:
    """A checksum of the dense weights, which another file of them would change; None if the run trains them itself."""
    return None if settings.pretrain_steps else weights_checksum(task.model.state_dict())


class CompressionRunner(ABC, Generic[Result]):
    """A compression of one task, phase after phase.

    Args:
        task: With batches and a loss; it is left as it is.
        settings: How.
        device: Where to train.

    Raises:
        BadTask: If the task cannot be trained.
    """

    def __init__(self, task: Task, settings: CompressSettings | None, device: torch.device | str) -> None:
        if task.train_batches is None:
            raise BadTask(
                f"task {task.name!r} has no train_batches, which compressing needs. "
                "Bundled networks have them with --data FOLDER."
            )
        _check_weights(task)
        self.task, self.settings, self.device = task, settings or CompressSettings(), torch.device(device)
        self.scores: dict[str, float] = {}
        self.distributed = DistributedContext(self.device)
        self.history: History = Histories()
        self.stream: BatchStream | None = None
        self.tell: Callable[[str], None] = lambda _: None

    def run(
        self,
        run_dir: str | Path,
        *,
        distributed: DistributedContext | None = None,
        history: History | None = None,
        loggers: Sequence[Logger] = (),
        progress: Callable[[str], None] | None = None,
    ) -> Result:
        """Compresses, or goes on with a run that was begun in the folder.

        Args:
            run_dir: The folder of the run.
            distributed: The processes that train together; None for this one alone.
            history: Is told what the run's history is told in this session.
            loggers: Are told the numbers in the run's history, those of earlier sessions before. They stay open.
            progress: Is told each phase, in words.

        Raises:
            BadFile: If the folder holds another run, or something else.
            InfeasibleBudget: If a budget cannot be met.
        """
        self.distributed = distributed or self.distributed
        curves = Loggers(*loggers)
        self.history = Histories(curves) if history is None else Histories(history, curves)
        self.stream, self.tell = None, progress or self.tell
        self.scores = {}
        self._begin()
        with open_run(run_dir, self.config(), device_type=self.device.type, writes=self.distributed.is_main) as run:
            finished = (run.path / "summary.json").exists()
            for facts in run.history() if loggers and run.writes else ():
                curves.log(facts)
            if not finished:
                return self._go(run)
            with run.restoring("summary.json"):
                return self._as_it_was(run, read_record(run.path / "summary.json", RunSummary))

    def config(self) -> dict[str, Any]:
        """What makes this run this run; a run of another config is another run."""
        asked = {**self._asked(), "weights": weights_of(self.task, self.settings)}
        return {"verb": "compress", "task": self.task.name, **asked, "settings": result_settings(self.settings)}

    # ------------------------------------------------------------ what a compression adds

    @abstractmethod
    def _begin(self) -> None:
        """Forgets an earlier run, and refuses what cannot be done, before anything is written."""

    @abstractmethod
    def _asked(self) -> dict[str, Any]:
        """Its part of the config."""

    @abstractmethod
    def _go(self, run: RunDir) -> Result:
        """All phases."""

    @abstractmethod
    def _as_it_was(self, run: RunDir, summary: RunSummary) -> Result:
        """What an earlier session finished."""

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds beside network, optimizer and stream."""
        return {"scores": dict(self.scores)}

    def _restore(self, extra: Mapping[str, Any]) -> None:
        """The reverse."""
        self.scores = {name: float(score) for name, score in extra["scores"].items()}

    # ------------------------------------------------------------ what they share

    def _reached(self, run: RunDir) -> str:
        """Takes over what an earlier session found out; the phase that it was in."""
        saved = run.checkpoint()
        if saved is None:
            return PHASES[0]
        with run.restoring():
            self._restore(saved["extra"])
            return PHASES[PHASES.index(saved["phase"])]

    def _stream(self) -> BatchStream:
        distributed = self.distributed
        self.stream = BatchStream(
            self.task,
            device=self.device,
            seed=self.settings.train.seed,
            rank=distributed.rank,
            world_size=distributed.size,
        )
        return self.stream

    def _dense(self, run: RunDir, model: nn.Module, stream: BatchStream, reached: str) -> Teacher | None:
        """Trains the dense network, or takes what an earlier session trained; it is the teacher from then on."""
        file = run.path / "dense.safetensors"
        if self.settings.pretrain_steps and (reached == "pretrain" or not file.exists()):
            self.tell(f"training the dense network, {self.settings.pretrain_steps} steps")
            fused = fused_on_gpu(model.parameters())
            optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.pretrain_lr, fused=fused)
            self._train(run, model, optimizer, stream, "pretrain")
            if self.distributed.is_main:
                save_state(file, model.state_dict())
        elif self.settings.pretrain_steps:
            with run.restoring(file.name):
                model.load_state_dict(load_state(file))
        self._score(run, "dense", model)
        return None if self.settings.distill.is_off else Teacher(model, self.settings.distill)

    def _adam(self, model: nn.Module) -> torch.optim.Adam:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        lr, decay = self.settings.lr, self.settings.train.weight_decay
        return torch.optim.Adam(trained, lr=lr, weight_decay=decay, fused=fused_on_gpu(trained))

    def _train(
        self,
        run: RunDir,
        model: nn.Module,
        optimizer: Any,
        stream: BatchStream,
        phase: str,
        teacher: Teacher | None = None,
        on_step: OnStep | None = None,
        steps: int | None = None,
        schedule: LRSchedule | None = None,
    ) -> None:
        started, drawn = time.perf_counter(), stream.seconds
        train(
            model,
            optimizer,
            stream,
            steps=self.settings.phase_steps[phase] if steps is None else steps,
            loss=self.task.loss,
            settings=self.settings.train,
            schedule=self.settings.schedule(phase) if schedule is None else schedule,
            teacher=teacher,
            distributed=self.distributed,
            run=run,
            history=self.history,
            on_step=on_step,
            extra=self._extra,
            phase=phase,
        )
        if text := about_slow_batches(self.device, stream.seconds - drawn, time.perf_counter() - started):
            self.tell(text)

    def _score(self, run: RunDir, name: str, model: nn.Module) -> None:
        if name in self.scores or self.task.evaluate is None:
            return
        with wrap_user_errors(f"evaluate of task {self.task.name!r}"):
            score = float(self.task.evaluate(model))
        if not math.isfinite(score):
            raise BadTask(f"evaluate of task {self.task.name!r} gave {score}; give a finite number, higher for better.")
        self.scores[name] = score
        self._log(run, ScoreLine(name=name, score=score, total=self._total))
        self.tell(f"score {name}: {self.scores[name]:.4f}")

    @property
    def _total(self) -> int:
        """Batches drawn so far."""
        return 0 if self.stream is None else self.stream.total

    def _log(self, run: RunDir, line: SolverLine | CostCheck | ScoreLine | MethodLine) -> None:
        """Write a line of the history."""
        if self.distributed.is_main:
            values = to_builtins(line)
            run.log(values)
            self.history.log(values)


def about_slow_batches(device: torch.device, drawing: float, whole: float) -> str:
    """What to tell a user whose batches are made more slowly than the device uses them; nothing if they are not.

    Args:
        device: Which trains; on a CPU nothing can be gained, since data and network share it.
        drawing: Seconds that the host spent on drawing batches.
        whole: Seconds of the training.
    """
    if device.type == "cpu" or whole < LEAST_SECONDS or drawing < SLOW_BATCHES * whole:
        return ""
    return (
        f"{drawing / whole:.0%} of the time went into train_batches of the task, while the device waited: prepare "
        "batches in other processes, as torch.utils.data.DataLoader(num_workers=...) does, or on the device."
    )


def _check_weights(task: Task) -> None:
    """Refuses a network that cannot be trained, before anything is spent on it."""
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise BadTask(f"no parameter of task {task.name!r} can be trained; call model.requires_grad_(True) first.")
    for name, tensor in task.model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadTask(f"{name} of task {task.name!r} holds NaN or infinite numbers; give a sound network.")
