"""`evidence.py --rerun`: fit the energy model again with the new measurements, and select runs to repeat."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence_grid import Grid, failure_of

from ecc.energy import fit
from ecc.measure import Profile, Sample
from ecc.methods.grid import GridRun

MISSED = 0.03
"""Runs with a larger relative prediction error are repeated."""


def refit_and_rerun(grids: list[Grid], root: Path) -> None:
    """Fit the energy model to the profile and all results that were measured since, and discard bad predictions.

    Runs with a large prediction error are moved aside, with those that depend on them, and repeated with the new model,
    once. Widths that are not multiples of those in the profile, as in the paper's variant, are ignored. Unfinished runs
    start again.
    """
    for grid in grids:
        for cell in grid.comparison.unfinished(grid.runs):
            shutil.rmtree(cell.folder(grid.runs), ignore_errors=True)
            failure_of(cell, grid.runs).unlink(missing_ok=True)
    grids = [grid for grid in grids if grid.comparison.settings.width_multiple is None]
    whole = Profile.load(root / "profile.gz")
    known = {row.widths for row in whole.samples}
    fresh: dict[tuple[float, float], dict[tuple[int, ...], dict[str, Any]]] = {}
    for grid in grids:
        for cell in grid.finished():
            measured, widths = grid.read(cell, "measured.json"), grid.read(cell, "widths.json")
            if measured is not None and widths is not None:
                kept = tuple(int(widths[name]) for name in whole.header.groups)
                if kept not in known:
                    fresh.setdefault((measured["dense_joules"], measured["dense_seconds"]), {})[kept] = measured
    whole = extended(whole, fresh)
    whole.save(root / "profile.gz")
    fit(whole).save(root / "energy.json")
    for grid in grids:
        again = [cell for cell in grid.finished() if abs(missed(grid, cell)) > MISSED]
        again += [cell for cell in grid.finished() if grid.comparison.prerequisite(cell) in again]
        for cell in dict.fromkeys(again):
            folder = cell.folder(grid.runs)
            aside = root / "first" / folder.relative_to(root)
            if not aside.exists():
                aside.parent.mkdir(parents=True, exist_ok=True)
                folder.rename(aside)


def missed(grid: Grid, cell: GridRun) -> float:
    """Relative prediction error of a run, relative to dense; 0 if it was not measured."""
    measured, summary = grid.read(cell, "measured.json"), grid.read(cell, "summary.json")
    if measured is None or summary is None:
        return 0.0
    aim, share = summary["budgets"]["energy"], float(cell.budget.rstrip("%")) / 100
    return float(measured["joules"] / measured["dense_joules"] / (share * aim["result"] / aim["limit"]) - 1)


def extended(
    profile: Profile, fresh: Mapping[tuple[float, float], Mapping[tuple[int, ...], Mapping[str, Any]]]
) -> Profile:
    """The profile with the new samples; each measurement of the dense network starts a session."""
    rows, reference = list(profile.samples), profile.references[0]
    session = max(row.session for row in rows)
    number = max(row.index for row in rows if row.index is not None)
    for (joules, seconds), networks in fresh.items():
        session += 1
        dense = replace(reference, session=session, joules=joules, seconds=seconds)
        rows.append(dense)
        for widths, measured in networks.items():
            number += 1
            rows.append(
                Sample(
                    index=number,
                    session=session,
                    widths=widths,
                    joules=measured["joules"],
                    seconds=measured["seconds"],
                    relative_ci=measured["relative_ci"],
                )
            )
        rows.append(dense)
    return Profile(profile.header, tuple(rows))
