"""The facts of a page: one run, or a grid of runs, as one plain dict. A run is a grid of one cell.

Everything on the page, its figures and its numbers, comes from here; the dict goes into the page as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecc.errors import BadFile

from .cell import cell_facts, is_run
from .compare import grid_facts, load_grid
from .history import Follower
from .reading import read_json, reading

_SHARE = re.compile(r"^(\w+) ([0-9.e+-]+) of dense$")
_ENVIRONMENT = ("device", "ecc", "python", "torch", "system", "threads", "cuda", "cudnn", "driver")

NO_CURVES: dict[str, list[Any]] = {"loss": [], "descent": [], "duals": []}
"""Of seeds other than the first, which is the one that figures over time show."""


def page_facts(folder: str | Path, follower: Follower | None = None) -> dict[str, Any]:
    """What a page shows of a run or a grid of runs.

    Args:
        folder: Of the run, or of the grid.
        follower: Reads histories; one that is kept from call to call reads only what is new.

    Raises:
        BadFile: If the folder is neither, or a file in it is damaged; the file is named.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadFile(f"{folder} is no folder; give that of `ecc compress` or `ecc compare`.")
    if (folder / "grid.json").is_file():
        return _grid(folder, follower)
    if not is_run(folder):
        raise BadFile(f"{folder} holds neither a run nor a grid; give the folder of `ecc compress` or `ecc compare`.")
    return _page("run", folder, [cell_facts(folder, follower)])


def _grid(folder: Path, follower: Follower | None) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    has_model = False
    for path in sorted(folder.glob("seed-*/*")):
        if path.name == "dense" or not is_run(path):
            continue
        cell = cell_facts(path, follower)
        cell["width_duals"] = []  # of some dozen runs the groups' duals cannot be told apart
        if has_model:  # all have the same one, which would be most of a large page
            cell["model"] = None
        has_model = has_model or cell["model"] is not None
        if cells and cell["seed"] > cells[0]["seed"]:
            cell |= NO_CURVES
        cell["name"] = f"{path.parent.name}/{path.name}"
        if (file := path / "cell.json").exists():
            found = read_json(file)
            with reading(file):
                cell["budget"] = str(found["budget"])  # as it was asked for
        cells.append(cell)
    failed = []
    for file in sorted(folder.glob("seed-*/*.failed.json")):
        found = read_json(file)
        with reading(file):
            failed.append({key: str(found[key]) for key in ("method", "budget", "seed", "error")})
    if not cells and not failed:
        raise BadFile(f"{folder} is a grid without any run yet; wait for the first.")
    with reading(folder / "grid.json"):
        rows = grid_facts(load_grid(folder))
    return {**_page("grid", folder, cells), "rows": rows, "failed": failed}


def _page(kind: str, folder: Path, cells: list[dict[str, Any]]) -> dict[str, Any]:
    seeds = sorted({cell["seed"] for cell in cells})
    model = next((cell["model"] for cell in cells if cell["model"]), None)
    for cell in cells:
        cell["budget"] = ", ".join(short_budget(text) for text in cell["budget"].split(", "))
        del cell["model"]
        if cell["seed"] != seeds[0]:
            cell |= NO_CURVES
    known = [cell for cell in cells if cell["status"] == "finished"] or cells
    return {
        "kind": kind,
        "folder": folder.name or str(folder),
        "task": cells[0]["task"] if cells else "",
        "device": known[0]["device"] if known else "",
        "batch": next((cell["batch"] for cell in known if cell["batch"]), None),
        "labels": sorted({cell["label"] for cell in known}),
        "running": sum(cell["status"] == "running" for cell in cells),
        "methods": ordered(cell["method"] for cell in cells),
        "budgets": sorted({cell["budget"] for cell in cells}, key=_size, reverse=True),
        "seeds": seeds,
        "cells": cells,
        "rows": [],
        "failed": [],
        "model": model,
        "commands": _distinct(
            session["command"] for cell in cells for session in cell["sessions"] if "command" in session
        ),
        "environments": _environments(cells),
        "missing": {name: why for cell in cells for name, why in cell["missing"].items()},
    }


def first_budget(facts: Mapping[str, Any]) -> str | None:
    """The budget that is shown first: the middle one; None where there is no choice."""
    budgets: list[str] = facts["budgets"]
    return budgets[len(budgets) // 2] if len(budgets) > 1 else None


def energy_row(cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of its resources the energy, or what was asked for instead."""
    rows: list[dict[str, Any]] = cell["resources"]
    return next((row for row in rows if row["resource"] == "energy"), rows[0] if rows else None)


def ordered(methods: Any) -> list[str]:
    """ECC first, the others by name."""
    return sorted(set(methods), key=lambda name: (name != "ecc", name))


def short_budget(text: str) -> str:
    """`energy 0.5 of dense` as 50%; other budgets as they are."""
    found = _SHARE.match(text)
    if not found:
        return text
    try:
        share = f"{100 * float(found[2]):.4g}%"
    except ValueError:
        return text
    return share if found[1] == "energy" else f"{found[1]} {share}"


def _size(budget: str) -> tuple[float, str]:
    """Budgets in percent by their size, others by name."""
    number = budget.removesuffix("%")
    try:
        return float(number), budget
    except ValueError:
        return 0.0, budget


def _environments(cells: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The software of all sessions, each combination once."""
    return _distinct(
        {name: session[name] for name in _ENVIRONMENT if name in session}
        for cell in cells
        for session in cell["sessions"]
    )


def _distinct(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
