"""The logger with Weights & Biases itself, offline, where it is installed; and what it is told, where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecc.integrations.wandb import WandbLogger


class Told:
    """Notes the calls of a run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.calls.append(("define", name, step_metric, hidden))

    def log(self, data: dict[str, Any]) -> None:
        self.calls.append(("log", data))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_steps_are_numbers_beside_the_others() -> None:
    run = Told()
    logger = WandbLogger(run)
    logger.log({"solve/loss": 0.5}, 64)
    logger.log({"solve/loss": 0.7}, 32)  # told anew after a resume
    logger.close()
    assert run.calls == [
        ("define", "batches", None, True),
        ("define", "*", "batches", None),
        ("log", {"solve/loss": 0.5, "batches": 64}),
        ("log", {"solve/loss": 0.7, "batches": 32}),
        ("finish",),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_the_real_library_takes_them_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="ecc", mode="offline", dir=str(tmp_path))
    logger = WandbLogger(run)
    for step in (1, 2, 1):
        logger.log({"solve/loss": 1 / step}, step)
    assert run.summary["solve/loss"] == 1.0
    assert run.summary["batches"] == 1
    logger.close()
    assert list(tmp_path.rglob("*.wandb"))
