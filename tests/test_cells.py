"""Cells of benchmarks: records that are kept, continued and checked."""

from __future__ import annotations

import importlib
import json
import math
import os
import queue
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecc.training import Interrupted

ROOT = Path(__file__).resolve().parent.parent
KEYS = [{"method": name, "seed": seed} for seed in (0, 1) for name in ("a", "b")]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", "x.json", "--seconds", "5", "--data", "/far/away/data"])
    return importlib.import_module("cells")


def opened(cells: Any, out: Path, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    return cells.Cells(out, {"what": "test", "settings": settings or {"epochs": 2}}, **more)


def test_every_finished_cell_is_in_the_file_and_is_not_repeated(cells: Any, tmp_path: Path) -> None:
    out, ran = tmp_path / "x.json", []

    def run(key: dict[str, Any]) -> dict[str, Any]:
        if len(ran) == 2:
            raise KeyboardInterrupt  # as a kill: what is done must be in the file
        ran.append(key)
        return {"score": len(ran), "batches": 3}

    with pytest.raises(KeyboardInterrupt):
        cells.run_in_turn(opened(cells, out), KEYS, run, cells.Deadline.after(60))
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert [cell["key"] for cell in kept["cells"]] == KEYS[:2]
    assert all(cells.problems(cell) == [] for cell in kept["cells"])
    again = opened(cells, out)
    assert again.wanted(KEYS) == KEYS[2:]
    ran.clear()
    cells.run_in_turn(again, KEYS, lambda key: ran.append(key) or {}, cells.Deadline.after(60))
    assert ran == KEYS[2:]
    assert opened(cells, out).wanted(KEYS) == []
    assert opened(cells, out, {"epochs": 3}).wanted(KEYS) == KEYS  # other settings
    assert opened(cells, tmp_path / "y.json", earlier=[out]).wanted(KEYS) == []
    assert opened(cells, out, again=True, only={"method": "b", "seed": "0+1"}).wanted(KEYS) == [KEYS[1], KEYS[3]]


def test_the_command_of_a_cell_runs_that_cell(cells: Any, tmp_path: Path) -> None:
    found = opened(cells, tmp_path / "x.json")
    cell = found.add(KEYS[1], {"joules": 2.0}, 1.0)
    assert cell["command"] == "benchmarks/bench.py --data data --only method=b,seed=0 --again"
    assert cells.selection("method=b,seed=0") == {"method": "b", "seed": "0"}
    assert cells.problems(cell) == ["joules without their interval"]
    assert cells.problems({**cell, "relative_ci": 0.01, "commit": ""}) == ["no commit"]
    with pytest.raises(Exception, match="KEY=VALUE"):
        cells.selection("method")


def test_failed_and_partial_cells_are_run_again(cells: Any, tmp_path: Path) -> None:
    out = tmp_path / "x.json"

    def run(key: dict[str, Any]) -> dict[str, Any]:
        if key["method"] == "a":
            raise RuntimeError("no memory")
        return {"is_partial": key["seed"] == 1}

    cells.run_in_turn(opened(cells, out), KEYS, run, cells.Deadline.after(60))
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [cell.get("error") for cell in record["cells"]] == ["RuntimeError: no memory", None] * 2
    assert opened(cells, out).wanted(KEYS) == [KEYS[0], KEYS[2], KEYS[3]]
    found = opened(cells, out)
    found.add(KEYS[1], {"error": "late"}, 1.0)  # a failure does not replace a result
    assert "error" not in next(cell for cell in found.cells if cell["key"] == KEYS[1])


def test_a_repeated_cell_shows_the_numbers_before(cells: Any, tmp_path: Path) -> None:
    found = opened(cells, tmp_path / "x.json")
    found.add(KEYS[0], {"accuracy": 0.93, "method_note": "a"}, 1.0)
    again = opened(cells, tmp_path / "x.json", again=True)
    cell = again.add(KEYS[0], {"accuracy": 0.94}, 2.0)
    assert cell["previous"] == {"commit": cell["commit"], "accuracy": 0.93, "seconds": 1.0}
    assert len(opened(cells, tmp_path / "x.json").cells) == 1


def test_no_cell_starts_that_would_end_too_late(cells: Any, tmp_path: Path) -> None:
    found, ran = opened(cells, tmp_path / "x.json"), []
    seconds = {"a": 100.0, "b": 1.0}
    cells.run_in_turn(
        found,
        KEYS,
        lambda key: ran.append(key) or {},
        cells.Deadline.after(50),
        estimate=lambda key: seconds[key["method"]],
    )
    assert ran == [KEYS[1], KEYS[3]]
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["skipped"] == ["a-0", "a-1"]


def test_a_signal_ends_the_call_and_is_no_failure_of_the_cell(cells: Any, tmp_path: Path) -> None:
    def run(key: dict[str, Any]) -> dict[str, Any]:
        if key == KEYS[1]:
            raise Interrupted("stopped by signal 15", 15)
        return {}

    found = opened(cells, tmp_path / "x.json")
    with pytest.raises(SystemExit, match="stopped by signal 15"):
        cells.run_in_turn(found, KEYS, run, cells.Deadline.after(50))
    assert [one["key"] for one in json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["cells"]] == [KEYS[0]]


def work(supply: Any) -> None:
    """Cells of a process: one ends, one fails, one dies with its process, one is continued from its state."""

    def run(key: dict[str, Any], pause: Any) -> dict[str, Any]:
        if key["method"] == "a" and key["seed"] == 0:
            return {"score": 1}
        if key["method"] == "b" and key["seed"] == 0:
            raise RuntimeError("failed")
        if key["method"] == "a":
            os._exit(1)
        step = (pause.load() or {"step": 0})["step"]
        while not pause.is_due:
            time.sleep(0.02)
            step += 1
            if step > 5:
                return {"score": step}
            if step == 3:
                pause.save({"step": step})
        pause.save({"step": step})
        return {}

    supply.run(run)


@pytest.mark.slow
def test_processes_hand_back_results_failures_and_states(cells: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))  # the processes import this file
    out = tmp_path / "x.json"
    found = opened(cells, out)
    cells.run_in_processes(found, KEYS, work, [(), ()], cells.Deadline.after(30))
    record = json.loads(out.read_text(encoding="utf-8"))
    by_name = {cells.name_of(cell["key"]): cell for cell in record["cells"]}
    assert by_name["a-0"]["score"] == 1
    assert by_name["b-0"]["error"] == "RuntimeError: failed"
    assert by_name["b-1"]["score"] == 6
    assert record["skipped"] == ["a-1"]
    assert opened(cells, out).wanted(KEYS) == [KEYS[1], KEYS[2]]


class Answers:
    """What the first process does for others that wait; the time is over when there is a result."""

    def __init__(self, found: Any) -> None:
        self.wanted, self.given, self.stopped = (torch.multiprocessing.get_context("spawn").Event() for _ in range(3))
        self.found, self.alive = found, list[list[bool]]()
        self.deadline = SimpleNamespace(end=math.inf, left=1.0)  # the processes have copies

    def serve(self, alive: list[bool], end: float) -> None:
        assert end == math.inf
        self.alive.append(list(alive))
        if self.wanted.is_set():
            self.given.set()
        if self.found.cells:
            self.deadline.left = -0.1
            self.over = time.monotonic()

    def stop(self) -> None:
        self.stopped.set()


def wait_for_answers(supply: Any, wanted: Any, given: Any, stopped: Any) -> None:
    """The first cell waits for an answer, and the others until they are stopped."""

    def run(key: dict[str, Any], pause: Any) -> dict[str, Any]:
        del pause
        is_first = key == KEYS[0]
        if is_first:
            wanted.set()
        while not (is_first and given.is_set()):
            time.sleep(0.02)
            if stopped.is_set():
                raise Interrupted("stopped", 15)
        return {"score": 1}

    supply.run(run)


@pytest.mark.slow
def test_processes_are_served_and_stopped_at_the_deadline(cells: Any, tmp_path: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    found = opened(cells, tmp_path / "x.json")
    service = Answers(found)
    own = (service.wanted, service.given, service.stopped)
    cells.run_in_processes(found, KEYS, wait_for_answers, [own, own], service.deadline, service=service, saving=0.0)
    assert time.monotonic() - service.over < cells.STOPPING
    assert service.stopped.is_set()
    assert service.alive[0] == [True, True]
    assert [cell["key"] for cell in found.cells] == [KEYS[0]]  # neither the interrupted cell nor one that did not start
    assert found.skipped == sorted(cells.name_of(key) for key in KEYS[1:])


def test_no_cell_is_given_without_the_time_for_it(cells: Any) -> None:
    waiting: Any = queue.Queue()
    waiting.put((KEYS[0], None))
    expected = SimpleNamespace(value=20.0)
    supply = cells.Supply(waiting, None, cells.Deadline.after(10), expected)
    assert supply() is None
    expected.value = 5.0
    assert supply() == (KEYS[0], None)
    assert cells.Supply(waiting, None, cells.Deadline.after(0), SimpleNamespace(value=0.0))() is None
