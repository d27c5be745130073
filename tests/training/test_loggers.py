from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile, EccError
from ecc.training.loggers import Loggers, TensorBoardLogger, numbers_of


class Kept:
    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, Any], int]] = []

    def log(self, facts: Mapping[str, Any], step: int) -> None:
        self.lines.append((dict(facts), step))

    def close(self) -> None:
        self.lines.append(({}, -1))


def test_a_line_becomes_its_finite_numbers_by_place() -> None:
    line = {
        "phase": "solver",
        "step": 5,
        "total": 35,
        "wall": {"session_seconds": 1.5},
        "spent": {"energy": 0.5},
        "widths": {"a": 3},
        "list": [1, None, 2.5],
        "tensor": torch.tensor(0.25),
        "name": "x",
        "landed": True,
        "lr": None,
        "loss": float("nan"),
        "far": float("inf"),
    }
    assert numbers_of(line) == {
        "solver/spent/energy": 0.5,
        "solver/widths/a": 3,
        "solver/list/0": 1,
        "solver/list/2": 2.5,
        "solver/tensor": 0.25,
    }
    assert numbers_of({"loss": 1.0}) == {"train/loss": 1.0}


def test_all_are_told_the_numbers_at_the_batches_drawn() -> None:
    one, other = Kept(), Kept()
    history = Loggers(one, other)
    history.log({"phase": "dense", "step": 5, "total": 10, "loss": 0.5})
    history.log({"phase": "amc", "reward": 2.0})  # a line that tells no batches is where the last one was
    assert one.lines == other.lines == [({"dense/loss": 0.5}, 10), ({"amc/reward": 2.0}, 10)]


# ---------------------------------------------------------------- TensorBoard


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would show."""
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_reads_the_curves_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path / "deep" / "board")
    for step in (10, 20):
        logger.log({"solve/loss": 1 / step, "solve/lr": 0.5}, step)
    logger.close()
    logger.close()
    assert curves_in(tmp_path / "deep" / "board") == {
        "solve/loss": [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))],
        "solve/lr": [(10, 0.5), (20, 0.5)],
    }


def test_a_later_session_tells_all_anew_and_nothing_is_doubled(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for session, steps in enumerate([(0, 10, 20, 30), (0, 10, 20, 40)]):  # the first was cut back to step 20
        logger = TensorBoardLogger(tmp_path)
        for step in steps:
            logger.log({"loss": float(step + session)}, step)
        logger.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert curves_in(tmp_path) == {"loss": [(step, step + 1.0) for step in (0, 10, 20, 40)]}


def test_a_logger_that_is_told_nothing_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    TensorBoardLogger(tmp_path / "board").close()
    assert list((tmp_path / "board").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadFile, match=r"cannot make the folder .*file for TensorBoard"):
        TensorBoardLogger(tmp_path / "file")


def test_a_missing_tensorboard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EccError, match=r"cannot be imported .*; pip install tensorboard"):
        TensorBoardLogger(tmp_path / "board")
    assert not (tmp_path / "board").exists()
