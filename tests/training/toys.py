"""A small task with everything that makes resuming hard: dropout, batch norm, shuffled and augmented batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.task import Task
from ecc.training.batches import BatchStream
from ecc.training.distributed import DistributedContext
from ecc.training.loop import TrainResult, train
from ecc.training.run_dir import RunDir
from ecc.training.settings import TrainSettings

ITEMS, BATCH = 28, 4  # 7 batches an epoch


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


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ITEMS, 1, 6, 6, generator=generator)
    return images, torch.randint(0, 3, (ITEMS,), generator=generator)


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled and augmented by the global generators, as careless users do."""
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


def fit(
    steps: int,
    *,
    run: RunDir | None = None,
    task: Task | None = None,
    distributed: DistributedContext | None = None,
    lr: float = 0.01,
    weights_to: Path | None = None,
    **options: Any,
) -> tuple[nn.Module, TrainResult]:
    """Trains the toy; settings and arguments of `train` by name."""
    task = task or toy_task()
    distributed = distributed or DistributedContext("cpu")
    arguments = {
        name: options.pop(name)
        for name in ("teacher", "history", "on_step", "extra", "phase", "schedule")
        if name in options
    }
    optimizer = torch.optim.Adam(task.model.parameters(), lr=lr)
    stream = BatchStream(task, seed=3, rank=distributed.rank, world_size=distributed.size)
    assert task.loss is not None
    settings = TrainSettings(**{"log_every": 3, **options})
    trained = train(
        task.model,
        optimizer,
        stream,
        steps=steps,
        loss=task.loss,
        settings=settings,
        distributed=distributed,
        run=run,
        **arguments,
    )
    return task.model, trained


def without_wall(history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in facts.items() if name != "wall"} for facts in history]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


class Kept:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, facts: Any) -> None:
        self.lines.append(facts)
