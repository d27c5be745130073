"""`evidence.py --again`: a better energy model from what was measured, and which cells are to be run again by it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evidence_grid import Grid, failure_of

from ecc.energy import fit
from ecc.measure import Profile, Sample
from ecc.methods.grid import Cell

MISSED = 0.03
"""Cells whose joules were predicted worse than this are run again."""


def learn_again(grids: list[Grid], root: Path) -> None:
    """Fits the energy model anew, to the profile and all networks that were measured since, and forgets what it missed.

    Cells whose joules were not what had been predicted are put aside, with those that build on them, and run again by
    the better model. Once: what is there a second time stays. Widths that are no multiples of those in the profile, as
    in the paper's variant, are none of its business. What the old model began, and did
    not finish or could not, begins anew.
    """
    for grid in grids:
        for cell in grid.asked.missing(grid.runs):
            shutil.rmtree(cell.folder(grid.runs), ignore_errors=True)
            failure_of(cell, grid.runs).unlink(missing_ok=True)
    grids = [grid for grid in grids if grid.asked.settings.width_multiple is None]
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
        again += [cell for cell in grid.finished() if grid.asked.built_on(cell) in again]
        for cell in dict.fromkeys(again):
            folder = cell.folder(grid.runs)
            aside = root / "first" / folder.relative_to(root)
            if not aside.exists():
                aside.parent.mkdir(parents=True, exist_ok=True)
                folder.rename(aside)


def missed(grid: Grid, cell: Cell) -> float:
    """By which share a network weighs more than was predicted, as shares of the dense one; 0 if it was not measured."""
    measured, summary = grid.read(cell, "measured.json"), grid.read(cell, "summary.json")
    if measured is None or summary is None:
        return 0.0
    aim, share = summary["budgets"]["energy"], float(cell.budget.rstrip("%")) / 100
    return float(measured["joules"] / measured["dense_joules"] / (share * aim["result"] / aim["limit"]) - 1)


def extended(
    profile: Profile, fresh: Mapping[tuple[float, float], Mapping[tuple[int, ...], Mapping[str, Any]]]
) -> Profile:
    """A profile with more networks: each dense weighing, with those that were measured beside it, is a session."""
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
