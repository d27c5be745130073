from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ecc.training import Histories, Loggers, TensorBoardLogger
from ecc.training.history import curve_values
from training.toys import KeptLines


class KeptPoints:
    def __init__(self) -> None:
        self.points: list[tuple[dict[str, float], int]] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.points.append((dict(values), step))

    def close(self) -> None: ...


def test_a_line_becomes_its_finite_numbers_by_name() -> None:
    line = {
        "phase": "solver",
        "step": 5,
        "total": 35,
        "wall": {"session_seconds": 1.5},
        "cost": {"energy": 0.5},
        "widths": {"a": 3},
        "list": [1, None, 2.5],
        "name": "x",
        "met": True,
        "lr": None,
        "loss": float("nan"),
    }
    expected = {"solver/cost/energy": 0.5, "solver/widths/a": 3, "solver/list/0": 1, "solver/list/2": 2.5}
    assert curve_values(line) == expected
    assert curve_values({"loss": 1.0}) == {"train/loss": 1.0}


def test_loggers_get_the_numbers_at_the_batches_drawn() -> None:
    one, other, lines = KeptPoints(), KeptPoints(), KeptLines()
    history = Histories(Loggers(one, other), lines)
    history.log({"phase": "prune", "step": 5, "loss": 0.5, "total": 10})
    history.log({"phase": "amc", "reward": 2.0})  # a line without batches belongs to the last ones
    assert one.points == other.points == [({"prune/loss": 0.5}, 10), ({"amc/reward": 2.0}, 10)]
    assert len(lines.lines) == 2


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = loading.EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_shows_the_last_session_and_nothing_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "deep" / "board"
    TensorBoardLogger(folder).close()
    assert list(folder.iterdir()) == []
    for session, steps in enumerate([(0, 10, 20, 30), (0, 10, 20, 40)]):  # the first was cut back to step 20
        logger = TensorBoardLogger(folder)
        for step in steps:
            logger.log({"loss": float(step + session)}, step)
        logger.close()
    assert curves_in(folder) == {"loss": [(step, step + 1.0) for step in (0, 10, 20, 40)]}
