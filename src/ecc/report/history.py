"""The history of a run as curves, taken in line by line: a week of lines takes no more memory than an hour of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecc.io import read_lines

from .reading import number, parsed_line, positive, reading

MOST_POINTS = 240
"""Of one curve; more cannot be told apart on a page."""

MOST_RECTANGLES = 12_000
"""Of the picture that has a row a group: with more than 50 groups there are fewer points in each."""

Line = Mapping[str, Any]


def thinned(rows: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """Evenly chosen, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]


class Thinning:
    """Rows that come one after the other, of which every second is dropped when they become too many.

    Args:
        most: Up to twice as many are kept, so that as many are left to choose from.
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._every, self._count = most, 1, 0
        self._kept: list[Any] = []
        self._last: Any = None

    def add(self, row: Any) -> None:
        """Takes one in."""
        if self._count % self._every == 0 and len(self._kept) == 2 * self._most:
            self._kept, self._every = self._kept[::2], 2 * self._every
        if self._count % self._every == 0:
            self._kept.append(row)
        self._count, self._last = self._count + 1, row

    @property
    def rows(self) -> list[Any]:
        """Those that were kept, at even distances, and the last."""
        is_kept = self._count == 0 or (self._count - 1) % self._every == 0
        return self._kept if is_kept else [*self._kept, self._last]


class History:
    """What a page shows of the lines of a history, which are added one by one."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        """Of the last line that has any."""
        self.spent: dict[str, float] = {}
        """As told last: by the solver, or predicted by a weighing."""
        self.now: dict[str, Any] | None = None
        """Phase and step of the last line with a loss."""
        self._loss, self._descent, self._duals, self._width_duals = (Thinning() for _ in range(4))
        self._weighings: list[dict[str, Any]] = []
        self._phases: list[dict[str, Any]] = []
        self._solve: list[tuple[int, float]] = []  # (step, batches) of the first line of the solve, and of the last

    def add(self, line: Line) -> None:
        """Takes one line in.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: If it is damaged.
        """
        phase = line.get("phase")
        if "loss" in line:
            self.now = {"phase": str(line["phase"]), "step": int(line["step"])}
        if line.get("loss") is not None and "lineage" in line:
            self._add_loss(line)
        if phase == "prune":
            place = int(line["step"]), number(line["lineage"])
            self._solve = [self._solve[0] if self._solve else place, place]
        if phase in ("solver", "cost_check"):
            self.widths = line.get("widths") or line.get("nonzeros") or self.widths
            self.spent = line.get("cost", line.get("predicted", self.spent))
        if phase == "solver":
            self._add_solver(line)
        if phase == "cost_check" and "energy" in line["measured"] and "energy" in line["predicted"]:
            self._add_weighing(line)

    def _add_loss(self, line: Line) -> None:
        point: dict[str, Any] = {
            "batches": number(line["lineage"]),
            "phase": str(line["phase"]),
            "step": int(number(line["step"])),
            "loss": number(line["loss"]),
        }
        self._loss.add(point)
        phases = self._phases
        if not phases or phases[-1]["phase"] != point["phase"]:
            start = phases[-1]["end"] if phases else 0.0
            began = point["batches"] - point["step"]
            # Rivals of ECC log no loss while they solve.
            if point["phase"] == "finetune" and began > start and "prune" not in {phase["phase"] for phase in phases}:
                phases.append({"phase": "prune", "start": start, "end": began})
                start = began
            phases.append({"phase": point["phase"], "start": start, "end": start})
        phases[-1]["end"] = point["batches"]

    def _add_solver(self, line: Line) -> None:
        step, spent = number(line["step"]), line["cost"]
        if "energy" in spent:
            target = number(line["target"]) if len(spent) == 1 else None  # of several, it is no joules
            self._descent.add((step, {"spent": number(spent["energy"]), "target": target}))
        if line.get("energy_dual") is not None:
            self._duals.add((step, {"dual": number(line["energy_dual"])}))
        self._width_duals.add((step, dict(line.get("width_duals", {}))))

    def _add_weighing(self, line: Line) -> None:
        predicted, weighed = positive(line["predicted"]["energy"]), positive(line["measured"]["energy"])
        self._weighings.append(
            {
                "step": int(number(line["step"])),
                "predicted": predicted,
                "weighed": weighed,
                "error": predicted / weighed - 1,
                "label": str(line["label"]),
                "relative_ci": None if line.get("relative_ci") is None else number(line["relative_ci"]),
            }
        )

    def facts(self, dense: float | None) -> dict[str, Any]:
        """Curves over the batches that led to the result, so that phases lie one behind the other.

        Args:
            dense: What the dense network spends; None if that is not known.
        """
        weighings = [{**row, "batches": self._place(row["step"]) if self._solve else None} for row in self._weighings]
        descent = self._at_batches(self._descent)
        if descent and dense is not None:
            known = {row["batches"] for row in descent}
            # Nothing is removed before the first step.
            descent.append({"batches": self._place(0), "spent": dense, "target": dense})
            descent += [
                {"batches": row["batches"], "spent": row["predicted"], "target": None}
                for row in weighings
                if row["batches"] not in known
            ]
            descent.sort(key=lambda row: row["batches"])
        duals = self._width_duals.rows if self._solve else []
        most = MOST_RECTANGLES // max(1, *(len(found) for _, found in duals), MOST_RECTANGLES // MOST_POINTS)
        return {
            "loss": thinned(self._loss.rows),
            "descent": thinned(descent),
            "duals": thinned(self._at_batches(self._duals)),
            "width_duals": [
                {"batches": self._place(step), "group": str(name), "dual": number(value)}
                for step, found in thinned(duals, max(2, most))
                for name, value in found.items()
            ],
            "weighings": weighings,
            "phases": [dict(phase) for phase in self._phases],
        }

    def _at_batches(self, rows: Thinning) -> list[dict[str, Any]]:
        return [{"batches": self._place(step), **row} for step, row in rows.rows] if self._solve else []

    def _place(self, step: float) -> float:
        """Steps of the solve as batches: several processes draw several batches in one step."""
        (first, at_first), (last, at_last) = self._solve
        each = (at_last - at_first) / (last - first) if last != first else 1.0
        return at_first + (step - first) * each


@dataclass
class Followed:
    """How far a history was read."""

    history: History = field(default_factory=History)
    lines: int = 0
    end: int = 0
    last: bytes = b""
    """The line that ends there: a run that is taken up again may cut its history back and write other lines."""


MOST_FOLLOWED = 64
"""Histories of which a `Follower` remembers what it read; those of more runs are read anew each time."""


class Follower:
    """Reads histories that grow: of what was read before, nothing is read again."""

    def __init__(self) -> None:
        self._followed: dict[Path, Followed] = {}

    def read(self, path: Path) -> History:
        """The history as it is now; empty if there is no file yet.

        Raises:
            BadFile: If a line is damaged.
        """
        found = self._followed.pop(path, None)  # and is not put back if something is wrong
        if not path.exists():
            return History()
        if found is None or not _goes_on(path, found):
            found = Followed()
        with reading(path):
            for line in read_lines(path, found.end):
                found.lines += 1
                found.history.add(parsed_line(line, path, found.lines))
                found.last, found.end = line, found.end + len(line)
        if len(self._followed) < MOST_FOLLOWED:
            self._followed[path] = found
        return found.history


def _goes_on(path: Path, found: Followed) -> bool:
    start = found.end - len(found.last)
    return next(read_lines(path, start), b"") == found.last
