"""What `loop_overhead.py` trains: networks, their data, and the hand-written loop that ECC is compared with."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.task import Task
from ecc.training import Teacher
from ecc.zoo.data import Packed
from ecc.zoo.data.batches import ImageFormat, epoch_batches
from ecc.zoo.data.images import MAX_ZOOM
from ecc.zoo.erfnet import ERFNet
from ecc.zoo.image_task import IMAGENET_MEAN, IMAGENET_STD, PixelLoss
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.registry import find_task

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]
LR, WEIGHT_DECAY, DISTILL = 1e-4, 1e-4, 0.5
OWN_FILE = "ResNet-18, own file"
FORM_MEAN, FORM_STD = IMAGENET_MEAN, IMAGENET_STD


# ---------------------------------------------------------------- networks


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The features of the next block."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32x32 pixels: a 3x3 stem without pooling."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential(
            *(
                BasicBlock(inputs if first else outputs, outputs, stride if first else 1)
                for (inputs, outputs), stride in zip(itertools.pairwise(sizes), (1, 2, 2, 2), strict=True)
                for first in (True, False)
            )
        )
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class VitBlock(nn.Module):
    """Attention and a feed-forward part, each behind its layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens of the next block."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class VitTiny(nn.Module):
    """ViT-Tiny: 12 blocks of width 192 on patches of 16 pixels, mean over the tokens."""

    def __init__(self, size: int = 224, depth: int = 12, width: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2, width))
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


# ---------------------------------------------------------------- tasks

FILE = """
import torch
import torch.nn.functional as F
from ecc import Task
from loop_networks import ResNet18

packed = torch.load({data!r}, weights_only=True)
images, labels = packed["images"], packed["labels"]
mean = torch.tensor({mean!r}).view(1, 3, 1, 1)
std = torch.tensor({std!r}).view(1, 3, 1, 1)


def batches(epoch):
    draw = torch.Generator().manual_seed(epoch)
    for rows in torch.randperm(len(images), generator=draw).split({batch})[:-1]:
        padded = F.pad(images[rows].float().div_(255).sub_(mean).div_(std), (4, 4, 4, 4))
        crops = []
        for image, (x, y, flip) in zip(padded, torch.randint(9, (len(rows), 3), generator=draw).tolist()):
            crop = image[:, y : y + 32, x : x + 32]
            crops.append(crop.flip(2) if flip % 2 else crop)
        yield torch.stack(crops), labels[rows]


def build():
    return Task(
        name="own", model=ResNet18({width}), example_input=torch.randn(2, 3, 32, 32), loss=F.cross_entropy,
        train_batches=batches,
    )
"""
"""A user's file: images in host memory, crops and flips one by one, as many write it."""


def own_file(folder: Path, split: Packed, batch: int, width: int) -> Task:
    """A task as `ecc compress FILE:build` reads it."""
    data, path = folder / "images.pt", folder / "own_file.py"
    torch.save({"images": split.images, "labels": split.labels}, data)
    path.write_text(
        FILE.format(data=str(data), mean=FORM_MEAN, std=FORM_STD, batch=batch, width=width), encoding="utf-8"
    )
    return find_task(f"{path}:build")


def cifar10(folder: Path | None, count: int) -> tuple[Packed, str]:
    """CIFAR-10 if the folder has the packed file, random bytes otherwise; and which it is."""
    if folder is not None and (folder / "cifar10.npz").exists():
        from packed import as_packed, packed_data  # needs Pillow

        return as_packed(packed_data("cifar10", folder).train), "CIFAR-10"
    return images_of(count, (32, 32)), "random images"


def images_of(count: int, size: tuple[int, int], *, scenes: bool = False) -> Packed:
    """Random bytes; with one label for a pixel if they are scenes."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=draw)
    shape = (count, *size) if scenes else (count,)
    labels = torch.randint(0, 10, shape, generator=draw)
    return Packed(images, labels.to(torch.uint8) if scenes else labels)


def tasks(
    device: torch.device, folder: Path | None, temporary: Path, *, quick: bool
) -> dict[str, tuple[Callable[[], Task], Batches, str]]:
    """Name -> the task as ECC gets it, the batches of the plain loop, and which data they are made of."""
    found: dict[str, tuple[Callable[[], Task], Batches, str]] = {}
    small, about = cifar10(folder, 128 if quick else 20_000)
    made = "random images"
    rows: tuple[tuple[str, Callable[[], nn.Module], Packed, int, str], ...]
    if quick:
        rows = (
            ("ResNet-18", partial(ResNet18, 8), small, 16, about),
            ("MobileNet v1", partial(MobileNetV1, 10), images_of(32, (32, 32)), 4, made),
            ("ERFNet", partial(ERFNet, 10), images_of(8, (32, 64), scenes=True), 2, made),
            ("ViT-Tiny", partial(VitTiny, 32, 2, 48), images_of(64, (32, 32)), 8, made),
        )
    else:
        rows = (
            ("ResNet-18", ResNet18, small, 256, about),
            ("MobileNet v1", partial(MobileNetV1, 10), images_of(4_096, (128, 128)), 128, made),
            ("ERFNet", partial(ERFNet, 10), images_of(128, (256, 512), scenes=True), 4, made),
            ("ViT-Tiny", VitTiny, images_of(1_024, (224, 224)), 128, made),
        )
    for name, build, split, batch, data in rows:
        found[name] = (
            partial(_task, name, build, split, batch, device),
            partial(plain_batches, split, batch, device),
            data,
        )
    width, batch = (8, 16) if quick else (64, 256)
    own = partial(own_file, temporary, small, batch, width)
    found[OWN_FILE] = (own, partial(own_batches, own, device), about)
    return found


def _task(name: str, build: Callable[[], nn.Module], split: Packed, batch: int, device: torch.device) -> Task:
    size = (split.images.shape[2], split.images.shape[3])
    form = ImageFormat(size, FORM_MEAN, FORM_STD)
    torch.manual_seed(0)
    return Task(
        name=name,
        model=build(),
        example_input=torch.randn(2, 3, *size),
        loss=F.cross_entropy if split.labels.dim() == 1 else PixelLoss(split, 10),
        train_batches=partial(epoch_batches, split, form, batch, str(device)),
    )


# ---------------------------------------------------------------- the plain loop


def plain_batches(split: Packed, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The augmentation of the zoo, written by hand: bytes and random numbers on the device."""
    images, labels = split.images.to(device), split.labels.to(device)
    mean, std = (torch.tensor(value, device=device).view(1, 3, 1, 1) for value in (FORM_MEAN, FORM_STD))
    height, width = images.shape[2:]
    sides = torch.tensor([width, height], device=device)
    most = (sides / 8).round()
    while True:
        for rows in torch.randperm(len(images), device=device).split(batch)[:-1]:
            x, y = (images[rows].float() / 255 - mean) / std, labels[rows]
            uniform = torch.rand(len(rows), 4, device=device)
            mirror = torch.where(uniform[:, 3] < 0.5, -1.0, 1.0)
            where = torch.zeros(len(rows), 2, 3, device=device)
            if y.dim() > 1:
                zoom = 1 + (MAX_ZOOM - 1) * uniform[:, :1]
                where[:, 0, 0], where[:, 1, 1] = mirror / zoom[:, 0], 1 / zoom[:, 0]
                where[:, :, 2] = (2 * uniform[:, 1:3] - 1) * (1 - 1 / zoom)
            else:
                where[:, 0, 0], where[:, 1, 1] = mirror, 1.0
                where[:, :, 2] = 2 * ((uniform[:, 1:3] * (2 * most + 1)).floor() - most) / sides
            grid = F.affine_grid(where, list(x.shape), align_corners=False)
            x = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
            if y.dim() > 1:
                y = F.grid_sample(y[:, None].float(), grid, mode="nearest", padding_mode="border", align_corners=False)[
                    :, 0
                ]
            yield x, y.long()


def own_batches(build: Callable[[], Task], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The user's generator in the user's own loop."""
    task = build()
    for epoch in itertools.count():
        for images, labels in task.epoch_batches(epoch):
            if device.type == "cuda":
                images, labels = images.pin_memory(), labels.pin_memory()
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class PlainLoop:
    """The training step that a user writes by hand, as fast as it gets without ECC.

    Args:
        model: Is copied.
        teacher: ECC's; its network is copied. None for no distillation.
        batches: Endless.
        loss: Of the task.
        precision: `bf16` or `fp32`.
        cuda_graph: Whether forward and backward are one CUDA graph.
        log_every: Steps between two looks at the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: Teacher | None,
        batches: Iterator[tuple[Tensor, Tensor]],
        loss: Callable[[Any, Any], Tensor],
        *,
        precision: str,
        cuda_graph: bool,
        log_every: int,
    ) -> None:
        self.model = channels_last(copy.deepcopy(model)).train()
        self.teacher = None if teacher is None else channels_last(copy.deepcopy(teacher.model))
        self.batches, self.loss = batches, loss
        self.device = next(model.parameters()).device
        self.dtype = torch.bfloat16 if precision == "bf16" else None
        self.log_every, self.step = log_every, 0
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(
            trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=self.device.type == "cuda" or None
        )
        self.replay: Callable[[Tensor, Tensor], Tensor] | None = None
        if cuda_graph and self.device.type == "cuda":
            self.replay = self._captured()

    def run(self, steps: int) -> float:
        """Seconds of one step."""
        wait(self.device)
        started = time.perf_counter()
        for _ in range(steps):
            images, labels = next(self.batches)
            loss = self._pass(images, labels) if self.replay is None else self.replay(images, labels)
            self.optimizer.step()
            self.step += 1
            if self.step % self.log_every == 0 and not torch.isfinite(loss).item():
                raise SystemExit("the plain loop diverged")
        wait(self.device)
        return (time.perf_counter() - started) / steps

    def _pass(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            outputs = self.model(images)
            loss = self.loss(outputs, labels)
            if self.teacher is not None:
                with torch.no_grad():
                    goal = self.teacher(images)
                loss = DISTILL * F.mse_loss(outputs.float(), goal.float()) + (1 - DISTILL) * loss
        loss.backward()
        return loss.detach()

    def _captured(self) -> Callable[[Tensor, Tensor], Tensor]:
        images, labels = (tensor.clone() for tensor in next(self.batches))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._pass(images, labels)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._pass(images, labels)

        def replay(new_images: Tensor, new_labels: Tensor) -> Tensor:
            images.copy_(new_images)
            labels.copy_(new_labels)
            graph.replay()
            return loss

        return replay


def channels_last(model: nn.Module) -> nn.Module:
    """The same network, its weights in the other memory format."""
    found: nn.Module = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in the stubs
    return found


def wait(device: torch.device) -> None:
    """Wait until the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
