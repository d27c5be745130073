"""What `ecc export` and `ecc report` read of a run of someone else's. As `loaders.py`, for `targets.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ecc.export import export_run, load_slim
from ecc.report.load import load_report
from ecc.report.page import page_content
from ecc.task import Task
from export.runs import SmallNet, finished_run, small_task
from faults import fuzz
from faults.loaders import signed_state
from faults.trying import Target
from report.folders import write_grid, write_run


@cache
def _task() -> Task:
    return small_task()


def _run(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        finished_run(folder / "run", _task())
        return folder / "run" / file

    return make


def _use_run(path: Path) -> None:
    export_run(path.parent, _task(), output="out")


def _export(folder: Path) -> Path:
    finished_run(folder / "run", _task())
    export_run(folder / "run", _task(), output=folder / "out")
    shutil.rmtree(folder / "run")
    return folder / "out" / "slim.safetensors"


def _load_export(path: Path) -> None:
    load_slim(SmallNet(), path.parent)(_task().example_input)


def _page(file: str, *, finished: bool = True) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        return write_run(folder / "run", finished=finished) / file

    return make


def _grid(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write_grid(folder / "grid")
        return folder / "grid" / file

    return make


def _draw(path: Path) -> None:
    """All but the library of figures, which is the same on every page."""
    root = next(parent for parent in path.parents if parent.name in ("run", "grid"))
    json.dumps(page_content(load_report(root)), allow_nan=False)


_RUN = ("config.json", "summary.json", "history.jsonl", "environment.json", "energy.json")
TARGETS = (
    *(
        Target(f"export: {file}", _run(file), _use_run, mutator, writes=True)
        for file in ("config.json", "summary.json", "widths.json", "slim.safetensors")
        for mutator in [signed_state if file.endswith("safetensors") else fuzz.json_changed]
    ),
    Target("exported weights", _export, _load_export, signed_state),
    *(Target(f"page: {file}", _page(file), _draw) for file in _RUN),
    Target("page of a grid: cell.json", _grid("seed-0/ecc-40/cell.json"), _draw),
    *(Target(f"page of a run at work: {file}", _page(file, finished=False), _draw) for file in _RUN[:3:2]),
)
