from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from ecc.errors import EccError
from ecc.training.progress import Histories, TensorBoard


class Kept:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, facts: Any) -> None:
        self.lines.append(facts)


def test_several_histories_hear_the_same() -> None:
    one, other = Kept(), Kept()
    Histories(one, other).log({"step": 1})
    assert one.lines == other.lines == [{"step": 1}]


class FakeWriter:
    made: ClassVar[list[FakeWriter]] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, [], False  # type: ignore[var-annotated]
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.closed = True


def test_numbers_go_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with TensorBoard(tmp_path) as board:
        board.log({"phase": "solve", "step": 5, "loss": 0.5, "total": 7, "done": True, "lr": None, "name": "x"})
    (writer,) = FakeWriter.made
    assert writer.folder == str(tmp_path)
    assert writer.scalars == [("solve/loss", 0.5, 5), ("solve/total", 7, 5)]
    assert writer.closed


def test_a_missing_tensorboard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(EccError, match=r"cannot be imported .*; pip install tensorboard"):
        TensorBoard(tmp_path)
