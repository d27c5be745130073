"""`train`: the one loop in which every method and every fine-tuning spends its batches.

    batch ─► forward (autocast) ─► loss, distilled ─► backward ─► clip ─► optimizer.step ─► on_step
                                                                               │
                every log_every steps: wait for the device, note the loss, stop if it is not finite
                every checkpoint: network, optimizer, place in the stream, random states, in one file

On a CPU, a run that was stopped anywhere and taken up again equals one that was not, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ecc.errors import BadFile, BadTask, EccError
from ecc.graph.model_copy import load_whole_state_, whole_state

from .batches import Batch, BatchStream, mapped, micro_batches
from .cuda_graph import WORTH_IT, CudaGraphPass
from .distill import Teacher, call_model
from .distributed import DistributedContext
from .losses import Losses, all_finite
from .progress import History
from .random_state import derived_seed, fork_rng, rng_state, set_rng_state
from .run_dir import RunDir
from .schedules import LRSchedule
from .settings import TrainSettings
from .signals import Interrupted, StopRequests
from .user_errors import OutOfMemory, describe, is_out_of_memory, wrap_user_errors


class Diverged(EccError):
    """Raised when the loss or the weights are no longer finite numbers."""


class OptimizerLike(Protocol):
    """What the loop asks of an optimizer; torch's have it, and a method's solver takes their place with it."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """One update from the gradients that are there."""

    def zero_grad(self) -> None:
        """Forgets the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""

    def load_state_dict(self, state: Any) -> Any:
        """The reverse."""


OnStep = Callable[[int, Mapping[str, Any]], object]
"""Called after every step with its number and facts (`loss`, a tensor on the device, `lr`, `total`, `lineage`).
To return True ends the training; with several processes, all must return the same."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a training went."""

    steps: int
    """Steps taken, those of earlier sessions included."""
    resumed_at: int
    """Steps that earlier sessions had taken."""
    stopped: bool
    """Whether `on_step` ended it."""
    loss: float | None
    """Mean over the last steps that were noted in this session."""


def train(
    model: nn.Module,
    optimizer: OptimizerLike,
    stream: BatchStream,
    *,
    steps: int,
    loss: Callable[[Any, Any], Tensor],
    settings: TrainSettings | None = None,
    schedule: LRSchedule | None = None,
    teacher: Teacher | None = None,
    distributed: DistributedContext | None = None,
    run: RunDir | None = None,
    history: History | None = None,
    on_step: OnStep | None = None,
    extra: Callable[[], Any] | None = None,
    phase: str = "train",
) -> TrainResult:
    """Trains a network in place, from where the checkpoint of the run left it.

    Args:
        model: On its device. It is in train mode meanwhile, and its modes are put back after.
        optimizer: Of the model's parameters.
        stream: Gives the batches, on the same device.
        steps: Number of optimizer steps; each takes one batch of every process.
        loss: Called as `loss(outputs, targets)`: a mean over the items of a batch.
        settings: How; the defaults if None.
        schedule: Learning rate of every step; None keeps that of the optimizer.
        teacher: Adds its term to the loss.
        distributed: The processes that train together; None for this one alone.
        run: Where checkpoints and history go. None keeps nothing.
        history: Is told the same lines as the run.
        on_step: See `OnStep`.
        extra: Gives a method's own state at each checkpoint, which finds it there under `extra`.
        phase: Names this training within the run. A checkpoint of another phase is not taken up; which phase a run
            has reached stands in `run.checkpoint()["phase"]`.

    Raises:
        Diverged: If the loss is not finite; the message names the step and the last good checkpoint.
        OutOfMemory: If a batch does not fit into the device; with a smaller `micro_batch` it goes on.
        BadTask: If the network, its loss or its batches raise something.
        Interrupted: If SIGTERM or Ctrl-C came; the state was saved before.
        BadFile: If the checkpoint does not fit.
    """
    loop = _Loop(model, optimizer, stream, steps, loss, settings, schedule, teacher, distributed, run, history, extra)
    loop.phase = phase
    with closing(loop.run_steps()) as taken:
        for facts in taken:
            loop.stopped = on_step is not None and on_step(loop.step, facts) is True
    return TrainResult(steps=loop.step, resumed_at=loop.resumed_at, stopped=loop.stopped, loss=loop.last_loss)


def train_steps(
    model: nn.Module,
    optimizer: OptimizerLike,
    stream: BatchStream,
    *,
    steps: int,
    loss: Callable[[Any, Any], Tensor],
    settings: TrainSettings | None = None,
    schedule: LRSchedule | None = None,
    teacher: Teacher | None = None,
    distributed: DistributedContext | None = None,
    run: RunDir | None = None,
    history: History | None = None,
    extra: Callable[[], Any] | None = None,
    phase: str = "train",
) -> Generator[int, None, None]:
    """`train` as a generator: each `next` takes one step and gives its number.

    The loss is logged and a checkpoint is written when the generator continues, so a caller can still change the
    optimizer after a step and have the change saved with it. Exhaust the generator, or close it.

    Args and errors: See `train`.
    """
    loop = _Loop(model, optimizer, stream, steps, loss, settings, schedule, teacher, distributed, run, history, extra)
    loop.phase = phase
    with closing(loop.run_steps()) as taken:
        for _ in taken:
            yield loop.step


class _Loop:
    phase: str

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerLike,
        stream: BatchStream,
        steps: int,
        loss: Callable[[Any, Any], Tensor],
        settings: TrainSettings | None,
        schedule: LRSchedule | None,
        teacher: Teacher | None,
        distributed: DistributedContext | None,
        run: RunDir | None,
        history: History | None,
        extra: Callable[[], Any] | None,
    ) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise EccError(f"steps is {steps!r}; give a whole number of at least 0.")
        self.settings, self.distributed = settings or TrainSettings(), distributed or DistributedContext(stream.device)
        _check_places(model, stream, self.settings, self.distributed)
        self.model, self.optimizer, self.stream, self.loss = model, optimizer, stream, loss
        self.steps, self.schedule, self.teacher = steps, schedule, teacher
        self.run, self.history, self.extra = run, history, extra
        self.device = stream.device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")
        self.base_lrs = [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]
        self.step = self.resumed_at = 0
        self.stopped = False
        self.saved_step: int | None = None
        self.place: dict[str, int] | None = None  # of the stream before this step; None while weights change
        self.saved_at = time.monotonic()
        self.losses = Losses()
        self.last_loss: float | None = None
        self.graphed: CudaGraphPass | None = None

    # ---------------------------------------------------------------- the loop

    def run_steps(self) -> Generator[Mapping[str, Any], None, None]:
        """Take one step after another. After each one, the caller may set `stopped`."""
        modes = [(module, module.training) for module in self.model.modules()]
        seed = derived_seed(self.settings.seed, f"{self.phase} of process {self.distributed.rank}")
        try:
            with fork_rng(seed, self.device), StopRequests() as self.requests:
                yield from self._run_steps()
        finally:
            for module, mode in modes:
                module.training = mode

    def _run_steps(self) -> Generator[Mapping[str, Any], None, None]:
        if self.settings.channels_last:
            for model in [self.model, *([] if self.teacher is None else [self.teacher.model])]:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        self._restore()
        self.model.train()
        net = self.distributed.wrap_model(self.model)
        if self.settings.cuda_graph and self.device.type == "cuda" and self.steps - self.step >= WORTH_IT:
            self.graphed = CudaGraphPass(self.model, partial(self._pass, net))
        while self.step < self.steps and not self.stopped:
            try:
                loss, lr = self._update(net)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.optimizer.zero_grad()  # which makes room
                with suppress(RuntimeError):  # there may be too little for that, too
                    self._keep()
                raise OutOfMemory(self._too_large(error)) from error
            self.step += 1
            self.losses.append(loss, self.step)
            yield {"loss": loss, "lr": lr, "total": self.stream.total, "lineage": self.stream.lineage}
            self._after_step(lr)
        self.distributed.broadcast_buffers_(self.model)

    def _update(self, net: nn.Module) -> tuple[Tensor, float | None]:
        """One step of the optimizer; the loss, still on the device, and the learning rate."""
        lr = self._set_lr()
        batch = self._next_batch()
        with wrap_user_errors(f"at step {self.step + 1} the network or its loss"):
            total = self._pass(net, batch) if self.graphed is None else self.graphed(batch)
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)  # type: ignore[arg-type]  # it asks for param_groups only
            torch.nn.utils.clip_grad_norm_(self._parameters(), self.settings.clip_norm)
        self.place = None  # from here on, the weights are neither old nor new
        self.scaler.step(self.optimizer)  # type: ignore[arg-type]  # as above
        self.scaler.update()
        return total, lr

    def _pass(self, net: nn.Module, batch: Batch) -> Tensor:
        """New gradients from one batch, and its loss."""
        self.optimizer.zero_grad()
        if self.settings.micro_batch is None:
            loss = self._forward(net, *batch)
            self.scaler.scale(loss).backward()
            return loss.detach().float().reshape(())
        parts = list(micro_batches(batch, self.settings.micro_batch))
        total = torch.zeros((), device=self.device)
        for number, ((inputs, targets), share) in enumerate(parts, start=1):
            with nullcontext() if number == len(parts) else self.distributed.no_sync(net):
                loss = self._forward(net, inputs, targets)
                self.scaler.scale(loss * share).backward()
            total += loss.detach() * share
        return total

    def _next_batch(self) -> Batch:
        """Where the task's own code fails, nothing has been changed yet, and the state is kept."""
        self.place = self.stream.state()
        try:
            return next(self.stream)
        except BadTask as error:
            self._keep()
            raise BadTask(f"{error} It is step {self.step + 1}; {self._last_checkpoint()}.") from error

    def _keep(self) -> None:
        """Saves the state before a step that failed, if its weights are whole.

        After a pass that ran out of memory, batch norm has seen a part of the batch once more than it should.
        """
        if self.place is not None and self.distributed.size == 1 and self.step > (self.saved_step or 0):
            self.stream.restore(self.place)  # several processes would have to agree
            self._save()

    def _forward(self, net: nn.Module, inputs: Any, targets: Any) -> Tensor:
        if self.settings.channels_last:
            inputs = mapped(inputs, _channels_last)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.precision)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            outputs = call_model(net, inputs)
            loss = self.loss(outputs, targets)
            return loss if self.teacher is None else self.teacher.loss(outputs, inputs, targets, loss)

    def _set_lr(self) -> float | None:
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if self.schedule is not None and base is not None:
                group["lr"] = self.schedule.lr(base, self.step, self.steps)
        lr = self.optimizer.param_groups[0].get("lr")
        return None if lr is None else float(lr)

    def _after_step(self, lr: float | None) -> None:
        """Looks, notes, saves and stops, where it is time to."""
        settings = self.settings
        ended = self.step == self.steps or self.stopped
        looks = ended or self.step % settings.log_every == 0
        if looks:
            self._refuse_divergence()
            self._log(lr)
        number, due = 0, 0
        if looks or self.distributed.size == 1:  # several must agree, which takes time
            old = settings.checkpoint_seconds is not None and self._age() >= settings.checkpoint_seconds
            number, due = self.distributed.max([self.requests.signum, int(old)])
        every = settings.checkpoint_steps
        if ended or number or due or (every is not None and self.step % every == 0):
            self._save()
        if number:
            raise Interrupted(self._farewell(number), number)

    def _log(self, lr: float | None) -> None:
        self.last_loss = float(self._loss_sums().mean()) / self.losses.count
        self.losses.total, self.losses.count = 0.0, 0
        facts = {"phase": self.phase, "step": self.step, "loss": self.last_loss, "lr": lr}
        facts |= {"total": self.stream.total, "lineage": self.stream.lineage}
        if self.settings.micro_batch is not None:
            facts["micro_batch"] = self.settings.micro_batch  # it may change within a run, and batch norm sees it
        for history in (self.run, self.history):
            if history is not None and self.distributed.is_main:
                history.log(facts)

    # ---------------------------------------------------------------- states

    def _save(self) -> None:
        self._refuse_divergence()
        if self.run is None:
            return
        self.distributed.broadcast_buffers_(self.model)
        random = {name: self.distributed.gather(state).cpu() for name, state in rng_state(self.device).items()}
        losses = self._loss_sums().cpu()  # each process has seen other batches
        if self.distributed.is_main:
            self.run.save(
                {
                    "phase": self.phase,
                    "step": self.step,
                    "stopped": self.stopped,
                    "world_size": self.distributed.size,
                    "model": whole_state(self.model),
                    "optimizer": self.optimizer.state_dict(),
                    "base_lrs": self.base_lrs,
                    "scaler": self.scaler.state_dict(),
                    "stream": self.stream.state(),
                    "random": random,
                    "loss_sums": losses,
                    "loss_count": self.losses.count,
                    "extra": None if self.extra is None else self.extra(),
                }
            )
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def _restore(self) -> None:
        state = None if self.run is None else self.run.checkpoint()
        if self.run is None or state is None or state.get("phase") != self.phase:
            return
        where = self.run.checkpoint_path
        if state.get("world_size") != self.distributed.size:
            raise BadFile(
                f"{where} was written by {state.get('world_size')} processes, and this is one of {self.distributed.size}; "
                "go on with as many as before, or start anew."
            )
        with self.run.restoring():
            load_whole_state_(self.model, state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scaler.load_state_dict(state["scaler"])
            self.base_lrs = list(state["base_lrs"])
            self.losses.total = float(state["loss_sums"][self.distributed.rank])
            self.losses.count, self.stopped = int(state["loss_count"]), bool(state["stopped"])
            self.step = self.resumed_at = self.saved_step = int(state["step"])
            self.stream.restore(state["stream"])
            random = {name: states[self.distributed.rank] for name, states in state["random"].items()}
            set_rng_state(random, self.device)

    def _refuse_divergence(self) -> None:
        """Waits for the device. A checkpoint is written only after this, so that the last one is good."""
        self.losses.add_up()
        bad = self.losses.first_bad
        if bad < 0 and not all_finite(self._parameters()):
            bad = self.step
        (bad,) = self.distributed.max([bad])
        if bad >= 0:
            raise Diverged(
                f"the loss or a weight is not finite at step {bad}; {self._last_checkpoint()}. "
                "Lower the learning rate, limit gradients by clip_norm, or use bf16 or fp32 in place of fp16."
            )

    def _last_checkpoint(self) -> str:
        if self.run is None or self.saved_step is None:
            return "there is no checkpoint before it"
        return f"the last good checkpoint is {self.run.checkpoint_path}, at step {self.saved_step}"

    def _too_large(self, error: Exception) -> str:
        now = self.settings.micro_batch
        less = "--micro-batch N, N items at once" if now is None else f"a --micro-batch below {now}"
        reason = describe(error.__cause__ or error) if isinstance(error, OutOfMemory) else describe(error)
        return (
            f"step {self.step + 1} ran out of memory on {self.device} ({reason}); {self._last_checkpoint()}. "
            f"Give the same command with {less} (micro_batch), and it goes on from there."
        )

    def _farewell(self, number: int) -> str:
        if self.run is None:
            return f"stopped by signal {number} after step {self.step}; without a run folder nothing was saved."
        return (
            f"stopped by signal {number} after step {self.step}, which {self.run.checkpoint_path} holds. "
            "Give the same command again to go on."
        )

    def _loss_sums(self) -> Tensor:
        """Of all processes."""
        where = "cpu" if self.distributed.size == 1 else self.device
        return self.distributed.gather(torch.tensor(self.losses.total, dtype=torch.float64, device=where))

    def _age(self) -> float:
        return time.monotonic() - self.saved_at

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _check_places(
    model: nn.Module, stream: BatchStream, settings: TrainSettings, distributed: DistributedContext
) -> None:
    if settings.cuda_graph and distributed.size > 1:
        raise EccError(f"cuda_graph is for one process, and this is one of {distributed.size}; leave it out.")
    if (stream.rank, stream.world_size) != (distributed.rank, distributed.size):
        raise EccError(
            f"the stream is that of process {stream.rank} of {stream.world_size}, and this is {distributed.rank} of "
            f"{distributed.size}; make it with rank=distributed.rank, world_size=distributed.size."
        )
    for name, parameter in model.named_parameters():
        here, there = parameter.device, stream.device
        if here.type != there.type or (there.index is not None and here.index != there.index):
            raise EccError(f"{name} is on {here} and the batches come on {there}; move the network, or the stream.")
