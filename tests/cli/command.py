"""The command line in this process, and files to try it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ecc.cli.app import app

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from ecc import Task


def build():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 4)
    )
    def batches(epoch):
        draw = torch.Generator().manual_seed(epoch)
        for _ in range(8):
            labels = torch.randint(4, (8,), generator=draw)
            yield torch.randn(8, 3, 12, 12, generator=draw) + labels[:, None, None, None], labels
    score = lambda model: 0.5
    return Task(name="net", model=net, example_input=torch.randn(16, 3, 12, 12), loss=F.cross_entropy,
                train_batches=batches, evaluate=score, evaluate_held_out=score)


def plain():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1)), (
        torch.randn(1, 3, 6, 6))
"""
"""A task file: `build` can be trained, `plain` only traced and profiled."""

PLATFORM = ("--meter", "platform:jetson-tx2")
SHORT = ("--pretrain-steps", "3", "--prune-steps", "12", "--finetune-steps", "2", "--lr", "1e-3", "--device", "cpu")


def ecc(*words: str, columns: int = 160) -> Result:
    """Run a command; `exit_code`, `stdout` and `stderr` are what a shell would see."""
    result = CliRunner().invoke(app, list(words), prog_name="ecc", env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run_ok(*words: str) -> Result:
    """Run a command that has to succeed."""
    result = ecc(*words)
    assert result.exit_code == 0, result.output
    return result


def from_json(result: Result) -> Any:
    """The JSON that a command printed, and nothing beside it."""
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def summary_of(folder: Path) -> Any:
    """The summary of a run."""
    return json.loads((folder / "summary.json").read_text())
