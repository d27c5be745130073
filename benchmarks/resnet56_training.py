"""The training loop of `resnet56.py`, the same for all methods: data, augmentation, distillation, steps and scores.

All images stay on the device. The crops, flips and order of an epoch depend on the seed and the epoch only, so all
methods of a seed see the same batches, and the logits of the teacher are computed once for each seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cells import Pause
from resnet56_step import Forward, Sgd, WholeStep, narrow_, widened
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.graph.model_copy import whole_state
from ecc.methods.baselines.recalibration import recalibrate_
from ecc.torch_utils import eval_mode
from ecc.training.cuda_graph import CudaGraphPass
from ecc.training.distill import output_distance

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the published weights
PAD, SIZE = 4, 32
RECALIBRATION = 40
"""Batches of the statistics of batch norms, after one-shot pruning and before the final score."""
PRUNING, FINISHING = "pruning", "finishing"
CHECK_EVERY = 20
"""Steps from one look at the clock to the next."""
SAVE_EVERY = 60.0
"""Seconds from one saved state to the next, in case the process is killed."""


@dataclass(frozen=True)
class Recipe:
    """Settings of the training, equal for all methods."""

    epochs: int = 60
    batch: int = 256
    lr: float = 0.04
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    distill: float = 0.5
    """Weight of the distillation loss."""
    temperature: float = 4.0
    precision: str = "bf16"
    channels_last: bool = True
    cuda_graph: bool = True
    compile: bool = False
    """Whether norms, sums and ReLUs are compiled."""


class Images(NamedTuple):
    """A split: images (N, height, width, 3) in bytes, and labels."""

    images: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Images:
        """The split on a device."""
        return Images(self.images.to(device), self.labels.to(device))


def padded(images: Tensor) -> Tensor:
    """Images (N, 3, 32, 32) as (N, 40, 40, 3) with black borders, from which crops are taken."""
    return F.pad(images, (PAD, PAD, PAD, PAD)).permute(0, 2, 3, 1).contiguous()


def augmentation(count: int, seed: int, epoch: int) -> Tensor:
    """(count, 4) int64: for each training example of an epoch the image, top, left and whether it is flipped."""
    random = torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch)
    order = torch.randperm(count, generator=random)
    places = torch.randint(0, 2 * PAD + 1, (count, 2), generator=random)
    flips = torch.randint(0, 2, (count, 1), generator=random)
    return torch.cat([order[:, None], places, flips], 1)


def crops(images: Tensor, rows: Tensor) -> Tensor:
    """Normalised crops (B, 3, 32, 32), in channels-last memory, of padded images, as `augmentation` says."""
    number, top, left, flip = rows.unbind(1)
    line = torch.arange(SIZE, device=rows.device)
    across = torch.where(flip[:, None] == 1, SIZE - 1 - line, line)
    found = images[number[:, None, None], (top[:, None] + line)[:, :, None], (left[:, None] + across)[:, None, :]]
    return normalised(found)


def normalised(images: Tensor) -> Tensor:
    """Images (B, height, width, 3) in bytes as the network takes them."""
    scale, shift = _scale_and_shift(images.device)
    return torch.addcmul(shift, images.float(), scale).permute(0, 3, 1, 2)


@lru_cache(maxsize=4)
def _scale_and_shift(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept on the device, since a CUDA graph cannot copy them there."""
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return (1 / (255 * std)).to(device), (-mean / std).to(device)


class Trainer:
    """Trains networks on the batches of one seed, along one cosine of the learning rate over all epochs.

    Args:
        train: Padded training images on the device.
        recipe: The settings.
        seed: Of order and augmentation.
        logits: (epochs, steps of an epoch * batch, classes): outputs of the teacher; None to train on labels alone.
        steps: Steps in all; those of all epochs by default.
        pause: When the cell has to save its state, and where; None for never.
    """

    def __init__(
        self,
        train: Images,
        recipe: Recipe,
        seed: int,
        logits: Tensor | None = None,
        steps: int | None = None,
        pause: Pause | None = None,
    ) -> None:
        self.train_set, self.recipe, self.seed, self.logits = train, recipe, seed, logits
        self.epoch_steps = len(train.images) // recipe.batch
        self.steps = recipe.epochs * self.epoch_steps if steps is None else steps
        self.step = 0
        """Batches that were used, calibration included."""
        self.device = train.images.device
        self.notes: dict[str, Any] = {}
        """What the cell records besides its score; saved with its state."""
        self._pause, self._saved = pause, None if pause is None else pause.load()
        self._begin = self._last_save = time.monotonic()
        self._epoch = -1
        self._rows = torch.empty(0)
        self._forward = Forward(is_compiled=recipe.compile)
        self.losses: list[Tensor] = []
        if self._saved is not None:
            self.step, self.notes = self._saved["step"], self._saved["notes"]
        self._seconds_before = float(self.notes.get("seconds_before", 0.0))

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self.steps - self.step

    def saved(self, phase: str) -> Any:
        """The state that a phase saved in an earlier call; None if there is none."""
        return None if self._saved is None or self._saved["phase"] != phase else self._saved

    def _save_if_due(self, phase: str, state: Callable[[], dict[str, Any]]) -> None:
        if self._pause is None or self.step % CHECK_EVERY:
            return
        late = time.monotonic() - self._last_save > SAVE_EVERY
        if late or self._pause.is_due:
            self._last_save = time.monotonic()
            notes = {**self.notes, "seconds_before": self._seconds_before + time.monotonic() - self._begin}
            self._pause.save({"phase": phase, "step": self.step, "notes": notes, **state()})

    def optimizer(self, model: nn.Module) -> torch.optim.SGD:
        """SGD with the settings of the recipe."""
        one = self.recipe
        return torch.optim.SGD(
            model.parameters(),
            lr=one.lr,
            momentum=one.momentum,
            nesterov=one.nesterov,
            weight_decay=one.weight_decay,
            foreach=True,
        )

    def prepared(self, model: nn.Module) -> nn.Module:
        """The model on the device, in the memory format of the recipe."""
        if self.recipe.channels_last:
            return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
        return model.to(self.device)

    def rate(self) -> float:
        """Learning rate of the next step."""
        return self.recipe.lr * (0.5 + 0.5 * math.cos(math.pi * self.step / self.steps))

    def next_batch(self) -> tuple[Tensor, ...]:
        """Rows of the augmentation, and logits of the teacher if there is one. Counts as a step."""
        epoch, number = divmod(self.step, self.epoch_steps)
        epoch %= self.recipe.epochs  # more only for a search that is not counted
        if epoch != self._epoch:
            self._epoch = epoch
            self._rows = augmentation(len(self.train_set.images), self.seed, epoch).to(self.device)
        part = slice(number * self.recipe.batch, (number + 1) * self.recipe.batch)
        self.step += 1
        return (self._rows[part],) if self.logits is None else (self._rows[part], self.logits[epoch, part])

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """Cross entropy and, with a teacher, the divergence of softened probabilities."""
        rows, *teacher = batch
        images = crops(self.train_set.images, rows)
        labels = self.train_set.labels[rows[:, 0]]
        if not self.recipe.channels_last:
            images = images.contiguous()
        is_bf16 = self.recipe.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False):
            outputs = self._forward(model, images).float()
        loss = F.cross_entropy(outputs, labels)
        if not teacher:
            return loss
        weight = self.recipe.distill
        distance = output_distance(outputs, teacher[0].float(), temperature=self.recipe.temperature)
        return (1 - weight) * loss + weight * distance

    def backward(self, model: nn.Module) -> Callable[[tuple[Tensor, ...]], Tensor]:
        """A function of a batch that computes new gradients and returns the loss; a CUDA graph where possible."""
        parameters = list(model.parameters())

        def run(batch: Any) -> Tensor:
            for parameter in parameters:
                parameter.grad = None
            loss = self.loss(model, batch)
            loss.backward()
            return loss.detach()

        return GraphOrEager(model, run) if self.device.type == "cuda" and self.recipe.cuda_graph else run

    def train(
        self, model: nn.Module, optimizer: Any, steps: int, *, before_step: Callable[[int], None] | None = None
    ) -> None:
        """Train on the next batches while a method prunes or makes the network sparse.

        Args:
            model: In place.
            optimizer: Its learning rate follows the cosine.
            steps: Number of them, from the first step of the cell.
            before_step: Called with the number of the step between the backward pass and the step of the optimizer.
        """
        saved = self.saved(PRUNING)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        model.train()
        backward = self.backward(model)
        while self.step < steps:
            self._save_if_due(PRUNING, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            number, rate = self.step, self.rate()
            loss = backward(self.next_batch())
            if before_step is not None:
                before_step(number)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            if number % 200 == 0:
                self.losses.append(loss)

    def train_to_end(self, model: nn.Module, momentum: Mapping[str, Tensor] | None = None) -> None:
        """Train on all batches that are left, with the whole step as a CUDA graph.

        Args:
            model: In place; its widths are aligned while it trains.
            momentum: Of its parameters, by name.
        """
        step, wide, sgd = self.whole_step(model, momentum)

        def state() -> dict[str, Any]:
            narrow_(model, wide)
            sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
            buffers = {
                name: one[tuple(slice(size) for size in sizes[name])].contiguous() for name, one in sgd.buffers.items()
            }
            return {"slim": whole_state(model), "momentum": buffers}

        while self.left:
            self._save_if_due(FINISHING, state)
            rate = self.rate()
            loss = step(self.next_batch(), rate)
            if self.step % 200 == 1:
                self.losses.append(loss.clone())
        narrow_(model, wide)

    def whole_step(
        self, model: nn.Module, momentum: Mapping[str, Tensor] | None = None
    ) -> tuple[WholeStep, nn.Module, Sgd]:
        """A training step of an aligned copy of the network, the copy, and its optimizer."""
        wide = self.prepared(widened(model))
        wide.train()
        sgd = Sgd(wide, self.recipe.momentum, self.recipe.weight_decay, momentum)
        return WholeStep(wide, sgd, lambda batch: self.loss(wide, batch)), wide, sgd

    def accumulate(self, model: nn.Module, batches: int, optimizer: Any) -> None:
        """Gradients of the next batches at constant weights; `optimizer.step()` sees each of them.

        Args:
            model: Its batch norms use the statistics of the batches, and their running statistics stay.
            batches: Number of them.
            optimizer: With a learning rate of 0, such as a solver that computes importance.
        """
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        model.train()
        backward = self.backward(model)
        for _ in range(batches):
            backward(self.next_batch())
            optimizer.step()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def recalibrate(self, model: nn.Module) -> None:
        """Statistics of the batch norms over some training crops, the same ones for all methods of a seed."""
        count = min(RECALIBRATION, self.epoch_steps) * self.recipe.batch
        rows = augmentation(len(self.train_set.images), self.seed, -1)[:count].to(self.device)
        with torch.no_grad():
            recalibrate_(model, [crops(self.train_set.images, part) for part in rows.split(self.recipe.batch)])


class GraphOrEager:
    """A training pass as a CUDA graph, or without one if it cannot be captured."""

    def __init__(self, model: nn.Module, run: Callable[[Any], Tensor]) -> None:
        self._run, self._graph = run, CudaGraphPass(model, run)
        self._is_captured = True

    def __call__(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Compute gradients and return the loss."""
        if self._is_captured:
            try:
                return self._graph(batch)
            except EccError as error:
                print(f"no CUDA graph: {error}", flush=True)
                self._is_captured = False
        return self._run(batch)


@torch.no_grad()
def accuracy(model: nn.Module, split: Images, batch: int = 1000) -> float:
    """Top-1 accuracy on images (N, 32, 32, 3) in bytes, in float32."""
    right = torch.zeros((), dtype=torch.long, device=split.images.device)
    with eval_mode(model):
        for images, labels in zip(split.images.split(batch), split.labels.split(batch), strict=True):
            right += (model(normalised(images)).argmax(1) == labels).sum()
    return int(right) / len(split.labels)


@torch.no_grad()
def teacher_logits(model: nn.Module, train: Images, recipe: Recipe, seed: int, first: int = 0) -> Tensor:
    """Outputs of the teacher for all batches of a seed, in half precision; zeros before the first epoch that is needed."""
    count = len(train.images) // recipe.batch * recipe.batch
    found = []
    with eval_mode(model), torch.autocast(train.images.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
        for epoch in range(first, recipe.epochs):
            rows = augmentation(len(train.images), seed, epoch)[:count].to(train.images.device)
            outputs = [model(crops(train.images, part)) for part in rows.split(16 * recipe.batch)]
            found.append(torch.cat(outputs).half())
    missing = torch.zeros(first, count, 10, dtype=torch.half, device=train.images.device)
    return torch.cat([missing, torch.stack(found)]) if found else missing
