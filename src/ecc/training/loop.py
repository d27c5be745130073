"""`Training` and `train`: the training loop of every phase and every method.

    batch ─► forward (autocast) ─► loss, distillation ─► backward ─► clip ─► optimizer.step ─► on_step
                                                                               │
                every log_every steps: wait for the device, log the loss, stop if it is not finite
                every checkpoint: network, optimizer, position in the batches, random states, in one file

On a CPU, a run that was interrupted and resumed equals one that was not, bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import BadFile, BadTask, EccError, OutOfMemory, describe_error, is_out_of_memory, wrap_user_errors
from ecc.graph.model_copy import load_whole_state_, whole_state
from ecc.records import to_builtins
from ecc.run_records import TrainLine
from ecc.settings import Cosine, TrainSettings
from ecc.task import Batch, takes_model
from ecc.torch_utils import preserve_modes

from .batches import BatchStream, micro_batches
from .cuda_graph import MIN_STEPS, CudaGraphPass
from .distill import Teacher, training_loss
from .distributed import DistributedContext
from .history import History
from .rng import derived_seed, fork_rng, rng_state, set_rng_state
from .run_dir import RunDir
from .signals import Interrupted, StopRequests

MAX_PENDING_LOSSES = 1000
"""Losses that stay on the device before they are summed."""


class Diverged(EccError):
    """Raised when the loss or a weight is not finite."""


class OptimizerLike(Protocol):
    """What the loop needs of an optimizer: torch's optimizers and the solvers of methods have it.

    If there is a method `skip_step`, it is called in place of `step` where gradients overflow in fp16.
    """

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Update the parameters from their gradients."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state of `state_dict`."""


@dataclass(frozen=True)
class StepInfo:
    """A step that was taken."""

    loss: Tensor
    """On the device; reading it waits for the device."""
    lr: float | None
    total: int
    """See `BatchStream.total`."""
    lineage: int


OnStep = Callable[[int, StepInfo], object]
"""Called after every step, with its number. If it returns True, training ends; all processes must return the same."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training went."""

    steps: int
    """Steps taken, those of earlier sessions included."""
    resumed_at: int
    """Steps of earlier sessions."""
    stopped: bool
    """Whether `on_step` ended it."""
    loss: float | None
    """Mean loss since the last but one line of the history, in this session."""


@dataclass(eq=False)
class Training:
    """A training of a network in place. If the run has a checkpoint of this phase, it resumes from it.

    Raises:
        Diverged: If the loss or a weight is not finite; the message names the last good checkpoint.
        OutOfMemory: If a batch does not fit into the device; it can resume with a smaller `micro_batch`.
        BadTask: If the network, its loss or its batches raise an exception.
        Interrupted: If SIGTERM or Ctrl-C came, after the state was saved.
        BadFile: If the checkpoint does not fit.
    """

    model: nn.Module
    """On the device of the stream. It is in train mode during training; its modes are restored afterwards."""
    optimizer: OptimizerLike
    """Of the model's parameters."""
    stream: BatchStream
    """The batches."""
    _: KW_ONLY
    steps: int
    """Number of optimizer steps; each takes one batch of every process."""
    loss: Callable[..., Tensor] | None
    """See `Task.loss`."""
    settings: TrainSettings = field(default_factory=TrainSettings)
    schedule: Cosine | None = None
    """Learning rate of every step; None keeps that of the optimizer."""
    teacher: Teacher | None = None
    """Adds distillation."""
    distributed: DistributedContext | None = None
    """Processes that train together; None for a single one."""
    run: RunDir | None = None
    """Folder for checkpoints and history; None keeps nothing."""
    history: History | None = None
    """Gets the same lines as the run."""
    extra: Callable[[], Any] | None = None
    """Returns the state of a method, which is saved with each checkpoint under `extra`."""
    phase: str = "train"
    """Name of this training within the run. A checkpoint of another phase is ignored."""
    stop: StopRequests | None = None
    """An outer block, whose signals end this training; None for a block of its own."""

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise EccError(f"steps is {self.steps!r}; give a whole number of at least 0.")
        self.device = self.stream.device
        self.processes = self.distributed or DistributedContext(self.device)
        _check_devices(self.model, self.stream, self.settings, self.processes)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.base_lrs = [float(group["lr"]) if "lr" in group else None for group in self.optimizer.param_groups]
        self.step = self.resumed_at = 0
        self.stopped = False
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        self.position: dict[str, int] | None = None  # in the stream before this step; None while weights change
        self.losses = _LossSum()
        self.last_loss: float | None = None
        self.graph_pass: CudaGraphPass | None = None

    # ---------------------------------------------------------------- steps

    def each_step(self) -> Generator[StepInfo, None, None]:
        """Take one step after another. Exhaust the generator, or close it.

        The loss is logged and a checkpoint is written when the generator continues, so the caller can still change the
        optimizer after a step and have the change saved with it. Set `stopped` to end the training after the step.
        """
        seed = derived_seed(self.settings.seed, f"{self.phase} of process {self.processes.rank}")
        requests: AbstractContextManager[StopRequests] = StopRequests() if self.stop is None else nullcontext(self.stop)
        with preserve_modes(self.model), fork_rng(seed, self.device), requests as self.requests:
            yield from self._each_step()

    def _each_step(self) -> Generator[StepInfo, None, None]:
        if self.settings.channels_last:
            for model in [self.model, *([] if self.teacher is None else [self.teacher.model])]:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        self._restore()
        self.model.train()
        net = self.processes.wrap_model(self.model)
        if self.settings.cuda_graph and self.device.type == "cuda" and self.steps - self.step >= MIN_STEPS:
            self.graph_pass = CudaGraphPass(self.model, partial(self._compute_gradients, net))
        while self.step < self.steps and not self.stopped:
            try:
                loss, lr = self._update(net)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.optimizer.zero_grad()  # frees memory
                with suppress(RuntimeError):  # saving may run out of memory, too
                    self._save_before_step()
                raise OutOfMemory(self._out_of_memory_message(error)) from error
            self.step += 1
            self.losses.append(loss, self.step)
            yield StepInfo(loss, lr, self.stream.total, self.stream.lineage)
            self._after_step(lr)
        self.processes.broadcast_buffers_(self.model)

    def _update(self, net: nn.Module) -> tuple[Tensor, float | None]:
        """One optimizer step; returns the loss, still on the device, and the learning rate."""
        lr = self._set_lr()
        batch = self._next_batch()
        with wrap_user_errors(f"at step {self.step + 1} the network or its loss"):
            loss = self._compute_gradients(net, batch) if self.graph_pass is None else self.graph_pass(batch)
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]  # it needs param_groups only
            torch.nn.utils.clip_grad_norm_(self._parameters(), self.settings.clip_norm)
        self.position = None  # from here on the weights belong to neither step
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)  # type: ignore[arg-type]  # as above
        self.scaler.update()
        if self.scaler.get_scale() < scale and hasattr(self.optimizer, "skip_step"):  # the gradients were not finite
            self.optimizer.skip_step()
        return loss, lr

    def _compute_gradients(self, net: nn.Module, batch: Batch) -> Tensor:
        """Gradients of one batch, in micro-batches if there are any; returns the loss."""
        self.optimizer.zero_grad()
        if self.settings.micro_batch is None:
            loss = self._forward(net, batch)
            self.scaler.scale(loss).backward()
            return loss.detach().float().reshape(())
        parts = list(micro_batches(batch, self.settings.micro_batch))
        total = torch.zeros((), device=self.device)
        for number, (part, fraction) in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.processes.no_sync(net):
                loss = self._forward(net, part)
                self.scaler.scale(loss * fraction).backward()
            total += loss.detach() * fraction
        return total

    def _forward(self, net: nn.Module, batch: Batch) -> Tensor:
        if self.settings.channels_last:
            if isinstance(batch, tuple | list) and len(batch) == 2 and not takes_model(self.loss):
                batch = tree_map_only(Tensor, _channels_last, batch[0]), batch[1]
            else:
                batch = tree_map_only(Tensor, _channels_last, batch)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return training_loss(net, batch, self.loss, self.teacher)

    def _next_batch(self) -> Batch:
        """The next batch. If the task's code fails, the state before the step is saved."""
        self.position = self.stream.state()
        try:
            return next(self.stream)
        except BadTask as error:
            self._save_before_step()
            raise BadTask(f"{error} It is step {self.step + 1}; {self._last_checkpoint()}.") from error

    def _set_lr(self) -> float | None:
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if self.schedule is not None and base is not None:
                group["lr"] = self.schedule.lr(base, self.step, self.steps)
        lr = self.optimizer.param_groups[0].get("lr")
        return None if lr is None else float(lr)

    def _after_step(self, lr: float | None) -> None:
        """Log, save and stop if it is time to."""
        settings = self.settings
        is_last = self.step == self.steps or self.stopped
        is_logged = is_last or self.step % settings.log_every == 0
        if is_logged:
            self._check_divergence()
            self._log(lr)
        signum, is_due = 0, 0
        if is_logged or self.processes.size == 1:  # several processes must agree, which takes time
            age = time.monotonic() - self.saved_at
            is_old = settings.checkpoint_seconds is not None and age >= settings.checkpoint_seconds
            signum, is_due = self.processes.max([self.requests.signum, int(is_old)])
        every = settings.checkpoint_steps
        if is_last or signum or is_due or (every is not None and self.step % every == 0):
            self._save()
        if signum:
            raise Interrupted(self._interrupted_message(signum), signum)

    def _log(self, lr: float | None) -> None:
        self.last_loss = float(self._loss_sums().mean()) / self.losses.count
        self.losses.total, self.losses.count = 0.0, 0
        line = TrainLine(
            phase=self.phase,
            step=self.step,
            loss=self.last_loss,
            lr=lr,
            total=self.stream.total,
            lineage=self.stream.lineage,
            micro_batch=self.settings.micro_batch,  # it may change within a run, and batch norm depends on it
        )
        for history in (self.run, self.history):
            if history is not None and self.processes.is_main:
                history.log(to_builtins(line))

    # ---------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        self._check_divergence()
        if self.run is None:
            return
        self.processes.broadcast_buffers_(self.model)
        random_states = self.processes.gather_object(rng_state(self.device))
        loss_sums = self._loss_sums().cpu()  # every process has seen other batches
        if self.processes.is_main:
            self.run.save(
                {
                    "phase": self.phase,
                    "step": self.step,
                    "stopped": self.stopped,
                    "world_size": self.processes.size,
                    "model": whole_state(self.model),
                    "optimizer": self.optimizer.state_dict(),
                    "base_lrs": self.base_lrs,
                    "scaler": self.scaler.state_dict(),
                    "stream": self.stream.state(),
                    "random": random_states,
                    "loss_sums": loss_sums,
                    "loss_count": self.losses.count,
                    "extra": None if self.extra is None else self.extra(),
                }
            )
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def _save_before_step(self) -> None:
        """Save the state before a step that failed, if the weights have not changed yet.

        After a pass that ran out of memory, batch norm has seen a part of the batch once more than it should.
        """
        if self.position is not None and self.processes.size == 1 and self.step > (self.saved_step or 0):
            self.stream.restore(self.position)  # several processes would have to agree
            self._save()

    def _restore(self) -> None:
        state = None if self.run is None else self.run.checkpoint()
        if self.run is None or state is None or state.get("phase") != self.phase:
            return
        if state.get("world_size") != self.processes.size:
            raise BadFile(
                f"{self.run.checkpoint_path} was written by {state.get('world_size')} processes, and now there are "
                f"{self.processes.size}; resume with the same number, or start a new run."
            )
        with self.run.restoring():
            load_whole_state_(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            _match_strides_(self.optimizer)
            self.scaler.load_state_dict(state["scaler"])
            self.base_lrs = list(state["base_lrs"])
            self.losses.total = float(state["loss_sums"][self.processes.rank])
            self.losses.count, self.stopped = int(state["loss_count"]), bool(state["stopped"])
            self.step = self.resumed_at = self.saved_step = int(state["step"])
            self.stream.restore(state["stream"])
            set_rng_state(state["random"][self.processes.rank], self.device)

    def _check_divergence(self) -> None:
        """Wait for the device. Called before every checkpoint, so that the last one is good."""
        self.losses.sum_up()
        bad = self.losses.first_bad
        if bad < 0 and not all_finite(self._parameters()):
            bad = self.step
        (bad,) = self.processes.max([bad])
        if bad >= 0:
            raise Diverged(
                f"the loss or a weight is not finite at step {bad}; {self._last_checkpoint()}. "
                "Lower the learning rate, limit gradients by clip_norm, or use bf16 or fp32 instead of fp16."
            )

    def _loss_sums(self) -> Tensor:
        """Sums of the losses of all processes."""
        device = "cpu" if self.processes.size == 1 else self.device
        return self.processes.gather(torch.tensor(self.losses.total, dtype=torch.float64, device=device))

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # ---------------------------------------------------------------- messages

    def _last_checkpoint(self) -> str:
        if self.run is None or self.saved_step is None:
            return "there is no checkpoint"
        return f"the last good checkpoint is {self.run.checkpoint_path}, at step {self.saved_step}"

    def _out_of_memory_message(self, error: Exception) -> str:
        size = self.settings.micro_batch
        option = "--micro-batch N (micro_batch=N)" if size is None else f"a --micro-batch (micro_batch) below {size}"
        cause = error.__cause__ if isinstance(error, OutOfMemory) and error.__cause__ is not None else error
        return (
            f"step {self.step + 1} ran out of memory on {self.device} ({describe_error(cause)}); "
            f"{self._last_checkpoint()}. Resume with {option}."
        )

    def _interrupted_message(self, signum: int) -> str:
        if self.run is None:
            return f"stopped by signal {signum} after step {self.step}; nothing was saved, as there is no run folder."
        return (
            f"stopped by signal {signum} after step {self.step}, saved in {self.run.checkpoint_path}. Run the same "
            "command again to resume."
        )


def train(
    model: nn.Module, optimizer: OptimizerLike, stream: BatchStream, *, on_step: OnStep | None = None, **options: Any
) -> TrainResult:
    """Train a network in place, and call `on_step` after every step."""
    training = Training(model, optimizer, stream, **options)
    with closing(training.each_step()) as taken:
        for info in taken:
            training.stopped = on_step is not None and on_step(training.step, info) is True
    return TrainResult(
        steps=training.step, resumed_at=training.resumed_at, stopped=training.stopped, loss=training.last_loss
    )


class _LossSum:
    """Sum of the losses of several steps. Appending a loss neither launches a kernel nor waits for the device."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.first_bad = -1
        """First step whose loss was not finite; -1 if there is none."""
        self._step = 0
        self._pending: list[Tensor] = []

    def append(self, loss: Tensor, step: int) -> None:
        """Add the loss of the next step, a tensor with one number."""
        self._pending.append(loss)
        self._step = step
        if len(self._pending) >= MAX_PENDING_LOSSES:
            self.sum_up()

    def sum_up(self) -> None:
        """Wait for the device, and add pending losses to `total`.

        They are added one by one in float64, so the sum does not depend on when this is called.
        """
        if not self._pending:
            return
        first = self._step - len(self._pending) + 1
        for step, loss in enumerate(torch.stack(self._pending).tolist(), start=first):
            self.total += loss
            if self.first_bad < 0 and not math.isfinite(loss):
                self.first_bad = step
        self.count += len(self._pending)
        self._pending.clear()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity. Takes a few kernels for all of them, and waits for the device."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    largest = [torch.stack(torch._foreach_norm(same, math.inf)) for same in alike.values()]
    return all(bool(norms.isfinite().all()) for norms in largest)


def fused_on_gpu(parameters: Iterable[Tensor]) -> bool | None:
    """The argument `fused` of torch's optimizers: True if all parameters are on a GPU, otherwise None (torch's choice).

    A fused step launches a few kernels instead of many. On a CPU the result of torch's default is kept bit for bit.
    """
    found = list(parameters)
    return True if found and all(tensor.is_cuda and tensor.is_floating_point() for tensor in found) else None


def _match_strides_(optimizer: OptimizerLike) -> None:
    """Give tensors of the optimizer's state the strides of their parameters, which files do not keep.

    Fused optimizers need equal strides, so that they fail after a resume with channels_last otherwise.
    """
    states = getattr(optimizer, "state", {})
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        for name, value in states.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                states[parameter][name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _check_devices(
    model: nn.Module, stream: BatchStream, settings: TrainSettings, distributed: DistributedContext
) -> None:
    if settings.cuda_graph and distributed.size > 1:
        raise EccError(f"cuda_graph works with one process, and there are {distributed.size}; leave it out.")
    if (stream.rank, stream.world_size) != (distributed.rank, distributed.size):
        raise EccError(
            f"the stream is that of process {stream.rank} of {stream.world_size}, and this is {distributed.rank} of "
            f"{distributed.size}; make it with rank=distributed.rank, world_size=distributed.size."
        )
    for name, parameter in model.named_parameters():
        ours, theirs = parameter.device, stream.device
        if ours.type != theirs.type or (theirs.index is not None and ours.index != theirs.index):
            raise EccError(f"{name} is on {ours} and the batches are on {theirs}; move the network or the stream.")
