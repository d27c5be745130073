"""A small task with all that makes resuming hard: dropout, batch norm, shuffled and augmented batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.task import Task
from ecc.training import BatchStream, DistributedContext, TrainResult, TrainSettings, train

ITEMS, BATCH = 28, 4  # 7 batches per epoch


class Net(nn.Module):
    def __init__(self, *, norm: bool = True, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.norm(self.conv(images))).mean(dim=(2, 3))
        scores: Tensor = self.head(self.dropout(features))
        return scores


def plain_net() -> Net:
    torch.manual_seed(0)
    return Net(norm=False, dropout=0.0)


def two_convs() -> nn.Module:
    """The weight of the second layer is not contiguous in channels-last format, unlike that of `Net`."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ITEMS, 1, 6, 6, generator=generator)
    return images, torch.randint(0, 3, (ITEMS,), generator=generator)


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled and augmented with the global generators, as many users do."""
    images, labels = data()
    order = torch.randperm(ITEMS)
    for start in range(0, ITEMS, BATCH):
        part = order[start : start + BATCH]
        noisy = images[part] + 0.1 * random.random() + 0.1 * torch.randn(BATCH, 1, 6, 6)
        yield noisy, labels[part]


def toy_task(**fields: Any) -> Task:
    torch.manual_seed(0)
    usual: dict[str, Any] = {"model": Net(), "train_batches": batches, "loss": F.cross_entropy}
    return Task(name="toy", example_input=torch.zeros(1, 1, 6, 6), **usual | fields)


TRAIN_ARGUMENTS = ("teacher", "history", "on_step", "extra", "phase", "schedule", "run", "distributed")


def fit(steps: int, *, task: Task | None = None, lr: float = 0.01, **options: Any) -> tuple[nn.Module, TrainResult]:
    """Train the toy; `options` are arguments of `train` and settings."""
    task = task or toy_task()
    arguments = {name: options.pop(name) for name in TRAIN_ARGUMENTS if name in options}
    distributed = arguments.get("distributed") or DistributedContext("cpu")
    result = train(
        task.model,
        torch.optim.Adam(task.model.parameters(), lr=lr),
        BatchStream(task, seed=3, rank=distributed.rank, world_size=distributed.size),
        steps=steps,
        loss=task.loss,
        settings=TrainSettings(**{"log_every": 3, **options}),
        **arguments,
    )
    return task.model, result


def without_wall(history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "wall"} for line in history]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


class KeptLines:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, line: Any) -> None:
        self.lines.append(line)
