"""A small task and a finished run of it, made without training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph import trace_channels, with_widths
from ecc.records import write_record
from ecc.run_records import BudgetResult, DenseAndResult, RunSummary
from ecc.task import Task
from ecc.training import save_state

WIDTHS = {"conv1": 5, "conv2": 7}


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, padding=1)
        self.head = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.bn1(self.conv1(images)))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(3):
        yield torch.randn(6, 3, 8, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def evaluate(model: nn.Module) -> float:
    images, labels = next(iter(batches(99)))
    model.eval()
    return float((model(images).argmax(1) == labels).double().mean())


def small_task(**changes: Any) -> Task:
    torch.manual_seed(0)
    given = {
        "name": "small",
        "model": SmallNet(),
        "example_input": torch.randn(2, 3, 8, 8),
        "loss": F.cross_entropy,
        "train_batches": batches,
        "evaluate": evaluate,
    }
    return Task(**{**given, **changes})


def summary_of(task: Task, **changes: Any) -> RunSummary:
    energy = BudgetResult(
        budget="50%", limit=0.5, unit="J", dense=1.0, result=0.49, label="estimated", met=changes.get("met", True)
    )
    given: dict[str, Any] = {
        "task": task.name,
        "method": "ecc",
        "device": "NVIDIA Jetson TX2",
        "batch": 2,
        "label": "estimated",
        "budgets": {"energy": energy},
        "met": True,
        "widths": WIDTHS,
        "macs": DenseAndResult(dense=2e6, result=1e6),
        "parameters": DenseAndResult(dense=4e4, result=1e4),
        "scores": {"dense": 0.9, "finetuned": 0.875},
    }
    return RunSummary(**{**given, **changes})


def finished_run(folder: Path, task: Task, **changes: Any) -> nn.Module:
    """Write the files of a compression and return the slim network."""
    graph = trace_channels(task.model, task.example_input)
    slim = with_widths(task.model, graph, WIDTHS)
    folder.mkdir(parents=True)
    save_state(folder / "slim.safetensors", slim.state_dict())
    (folder / "widths.json").write_text(json.dumps(WIDTHS))
    write_record(folder / "summary.json", summary_of(task, **changes))
    config = {"task": task.name, "budgets": ["50%"], "settings": {"prune_steps": 10}}
    (folder / "config.json").write_text(json.dumps({"format": "ecc run", "version": 1, "config": config}))
    return slim
