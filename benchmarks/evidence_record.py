"""The record of `evidence.py`: the outcome of every run, and how to restore finished runs from a record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import command_of, device_name
from evidence_data import LOOP, PREDICTED, reached_of
from evidence_grid import Grid, failure_of
from machine import commit

from ecc.energy import fit
from ecc.errors import BadFile
from ecc.graph import ChannelGraph
from ecc.io import write_text
from ecc.measure import Profile
from ecc.methods.grid import GridRun
from ecc.options import flat_values

FACTS = ("scores", "widths", "batches", "parameters", "macs")
"""Fields of summary.json that the record keeps."""
STAMPS = "stamps.json"
"""In the folder of a run: commit, device and command."""
FREE = ("checkpoint_steps", "checkpoint_seconds", "log_every")
"""Settings that do not change the result."""


def write_stamps(grid: Grid, cell: GridRun, device: str) -> None:
    """Note with which code, device and command a finished run was made, in its folder."""
    key = {"method": cell.method, "variant": grid.variant, "budget": cell.budget, "seed": cell.seed}
    facts = {"commit": commit(), "device": device_name(device), "command": command_of(key)}
    if (folder := cell.folder(grid.runs)).is_dir():
        write_text(folder / STAMPS, json.dumps(facts) + "\n")  # at once: the record is written meanwhile


def rows_of(grids: list[Grid]) -> list[dict[str, Any]]:
    """The outcome of every run."""
    rows = []
    for grid in grids:
        done = grid.finished()
        for cell in grid.comparison.runs:
            row: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "seed": cell.seed}
            row |= {"variant": grid.variant} if grid.variant else {}
            if cell in done:
                summary, facts, where = (
                    grid.read(cell, name) or {} for name in ("summary.json", "cell.json", "environment.json")
                )
                row |= {key: summary[key] for key in FACTS if key in summary}
                reached = summary["budgets"]["energy"]
                row |= {PREDICTED if reached["label"] == PREDICTED else LOOP: reached, "cell_seconds": facts["seconds"]}
                row |= {"date": where["sessions"][-1]["started"][:10], **(grid.read(cell, STAMPS) or {})}
                measured = grid.read(cell, "measured.json")
                row |= {} if measured is None else {"measured": measured}
            else:
                row["missing"] = grid.failure(cell) or "not finished"
            rows.append(row)
    return rows


def dense_weights(grid: Grid) -> dict[str, str]:
    """Hash of the dense weights by seed, to compare sessions."""
    files = {str(seed): grid.runs / f"seed-{seed}/dense/dense.safetensors" for seed in range(grid.comparison.seeds)}
    return {seed: hashlib.sha256(file.read_bytes()).hexdigest() for seed, file in files.items() if file.exists()}


def bring_model(file: Path, root: Path, graph: ChannelGraph) -> None:
    """Copy a profile of this network and fit the energy model, unless there is one already.

    Version 0.1 described layers with other fields, so a graph that it traced has another fingerprint. Its measurements of
    a network with the same groups and widths are taken, with the description of this version.

    Raises:
        BadFile: If the profile is of another network.
    """
    if (root / "energy.json").exists():
        return
    profile = Profile.load(file)
    measured = dict(zip(profile.header.groups, profile.header.full_widths, strict=True))
    if measured != {group.name: group.width for group in graph.variable}:
        raise BadFile(f"{file} is a profile of another network: its groups or widths differ.")
    if profile.header.fingerprint != graph.fingerprint:
        profile = replace(profile, header=replace(profile.header, structure=graph.structure))
    profile.save(root / "profile.gz")
    fit(profile).save(root / "energy.json")


def bring_cells(record: Path, grids: Sequence[Grid], without: Sequence[str] = ()) -> int:
    """Restore finished runs from a record, without their weights.

    Args:
        record: Record of the same experiment.
        grids: What is requested for; begun. A cell that is neither requested for nor new is left as it is.
        without: Variants to repeat.

    Returns:
        Number of restored runs.

    Raises:
        BadFile: If it was made with other settings.
    """
    before = json.loads(record.read_text(encoding="utf-8"))
    now = flat_values(grids[0].comparison.settings)
    for name, then in before["settings"].items():
        if name not in FREE and name in now and then != now[name]:
            raise BadFile(f"{record} was made with {name} = {then}, and now it is {now[name]}. Start without it.")
    variants, brought = {grid.variant: grid for grid in grids}, 0
    for row in before["rows"]:
        grid = variants.get(row.get("variant", ""))
        cell = GridRun(row["method"], row["budget"], row["seed"])
        if (
            grid is None
            or "missing" in row
            or grid.variant in without
            or cell not in grid.comparison.unfinished(grid.runs)
        ):
            continue
        folder = cell.folder(grid.runs)
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "summary.json": {key: row[key] for key in FACTS if key in row} | {"budgets": {"energy": reached_of(row)}},
            "widths.json": row["widths"],
            "environment.json": {"sessions": [{"started": row["date"]}]},
            "measured.json": row.get("measured"),
            STAMPS: {key: row[key] for key in ("commit", "device", "command") if key in row},
            "cell.json": {"seconds": row["cell_seconds"]},  # last: marks the run as finished
        }
        for name, facts in files.items():
            if facts is not None:
                (folder / name).write_text(json.dumps(facts) + "\n", encoding="utf-8")
        failure_of(cell, grid.runs).unlink(missing_ok=True)
        brought += 1
    return brought
