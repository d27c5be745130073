"""The history of a run as curves, read line by line.

`Follower` reads files that grow, for the live page. `History` keeps at most a few hundred points of each curve, so that
memory does not grow with the length of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from ecc.io import read_lines
from ecc.records import from_json
from ecc.run_records import PHASES, CostCheck, ScoreLine, SolverLine, TrainLine

T = TypeVar("T")

MAX_POINTS = 240
"""Points of one curve. More cannot be distinguished on a page."""

MAX_HEATMAP_CELLS = 12_000
"""Cells of the chart that has one row per group: with more than 50 groups each row has fewer points."""


# ---------------------------------------------------------------- curves


@dataclass(frozen=True)
class LossPoint:
    """The mean training loss since the point before."""

    batches: float
    phase: str
    step: int
    loss: float


@dataclass(frozen=True)
class CostPoint:
    """The predicted cost during pruning and what the schedule allows."""

    batches: float
    cost: float
    target: float | None


@dataclass(frozen=True)
class DualPoint:
    """A dual variable during pruning; `group` is empty for that of the energy."""

    batches: float
    dual: float
    group: str = ""


@dataclass(frozen=True)
class CheckPoint:
    """A measurement during pruning."""

    step: int
    batches: float | None
    predicted: float
    measured: float
    error: float
    label: str
    relative_ci: float | None


@dataclass
class PhaseSpan:
    """A phase of the run, in batches."""

    phase: str
    start: float
    end: float


@dataclass
class Curves:
    """A run over time. The x axis is the number of batches that led to the result, so that phases follow each other."""

    loss: list[LossPoint] = field(default_factory=list)
    cost: list[CostPoint] = field(default_factory=list)
    dual: list[DualPoint] = field(default_factory=list)
    width_duals: list[DualPoint] = field(default_factory=list)
    checks: list[CheckPoint] = field(default_factory=list)
    phases: list[PhaseSpan] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _AnyLine:
    phase: str


_LINES: dict[str, type[TrainLine | SolverLine | CostCheck | ScoreLine]] = {
    "solver": SolverLine,
    "cost_check": CostCheck,
    "score": ScoreLine,
    **dict.fromkeys(PHASES, TrainLine),
}


# ---------------------------------------------------------------- reading


def thinned(rows: Sequence[T], count: int = MAX_POINTS) -> list[T]:
    """At most `count` rows at even distances, with the first and the last."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


class Thinning(Generic[T]):
    """Collects rows of a stream of unknown length in bounded memory.

    Whenever twice `count` rows are held, every second one is dropped, and from then on only every second row is taken.
    """

    def __init__(self, count: int = MAX_POINTS) -> None:
        self._max, self._every, self._seen = count, 1, 0
        self._kept: list[T] = []
        self._last: list[T] = []

    def add(self, row: T) -> None:
        """Add the next row."""
        if self._seen % self._every == 0 and len(self._kept) == 2 * self._max:
            self._kept, self._every = self._kept[::2], 2 * self._every
        if self._seen % self._every == 0:
            self._kept.append(row)
        self._seen, self._last = self._seen + 1, [row]

    @property
    def rows(self) -> list[T]:
        """The rows that were kept, and the last one."""
        last_is_kept = self._seen == 0 or (self._seen - 1) % self._every == 0
        return self._kept if last_is_kept else self._kept + self._last


class History:
    """Curves of a run, built line by line: memory does not grow with the length of the run."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        """Of the last line that has widths (or nonzeros)."""
        self.cost: dict[str, float] = {}
        """Predicted cost by resource, of the last line that has it."""
        self.now: tuple[str, int] | None = None
        self._loss: Thinning[LossPoint] = Thinning()
        self._solver: Thinning[SolverLine] = Thinning()
        self._checks: list[CostCheck] = []
        self._phases: list[PhaseSpan] = []
        self._prune: list[tuple[int, float]] = []  # (step, batches) of the first and the last prune line

    def add(self, line: bytes, where: str) -> None:
        """Add one line of history.jsonl."""
        kind = _LINES.get(from_json(line, _AnyLine, where).phase)
        if kind is None:  # a line of a baseline
            return
        record = from_json(line, kind, where)
        if isinstance(record, TrainLine):
            self._add_training(record)
        elif isinstance(record, SolverLine):
            self.widths, self.cost = record.widths or record.nonzeros, record.cost
            self._solver.add(record)
        elif isinstance(record, CostCheck):
            self.widths, self.cost = record.widths, dict(record.predicted)
            self._checks.append(record)

    def _add_training(self, line: TrainLine) -> None:
        self.now = line.phase, line.step
        if line.phase == "prune":
            self._prune = [*self._prune[:1], (line.step, float(line.lineage))]
        phases = self._phases
        if not phases or phases[-1].phase != line.phase:
            start = phases[-1].end if phases else 0.0
            began = float(line.lineage - line.step)
            # Baselines log no loss while they prune: what lies between pretraining and finetuning is their pruning.
            if line.phase == "finetune" and began > start and "prune" not in {phase.phase for phase in phases}:
                phases.append(PhaseSpan("prune", start, began))
                start = began
            phases.append(PhaseSpan(line.phase, start, start))
        phases[-1].end = float(line.lineage)
        if line.loss is not None:
            self._loss.add(LossPoint(float(line.lineage), line.phase, line.step, line.loss))

    def curves(self, resource: str, dense: float | None) -> Curves:
        """What a page draws."""
        checks = [
            CheckPoint(
                line.step,
                self._batches_at(line.step) if self._prune else None,
                line.predicted[resource],
                line.measured[resource],
                line.predicted[resource] / line.measured[resource] - 1,
                line.label,
                line.relative_ci,
            )
            for line in self._checks
            if resource in line.predicted and resource in line.measured
        ]
        found = Curves(loss=thinned(self._loss.rows), checks=checks, phases=[replace(one) for one in self._phases])
        solver = self._solver.rows if self._prune else []
        found.cost = thinned(self._cost_points(solver, resource, dense))
        found.dual = thinned(
            [
                DualPoint(self._batches_at(line.step), line.energy_dual)
                for line in solver
                if line.energy_dual is not None
            ]
        )
        groups = max((len(line.width_duals) for line in solver), default=0)
        found.width_duals = [
            DualPoint(self._batches_at(line.step), value, group)
            for line in thinned(solver, max(2, min(MAX_POINTS, MAX_HEATMAP_CELLS // max(1, groups))))
            for group, value in line.width_duals.items()
            if value is not None
        ]
        return found

    def _cost_points(self, solver: Sequence[SolverLine], resource: str, dense: float | None) -> list[CostPoint]:
        points = [
            CostPoint(
                self._batches_at(line.step),
                line.cost[resource],
                line.target if next(iter(line.cost)) == resource else None,
            )
            for line in solver
            if resource in line.cost
        ]
        if not points or dense is None:
            return points
        points.append(CostPoint(self._batches_at(0), dense, dense))  # nothing is pruned before the first step
        return sorted(points, key=lambda point: point.batches)

    def _batches_at(self, step: float) -> float:
        """Batches at a step of pruning: several processes draw several batches in one step."""
        (first, at_first), (last, at_last) = self._prune[0], self._prune[-1]
        each = (at_last - at_first) / (last - first) if last != first else 1.0
        return at_first + (step - first) * each


@dataclass
class _Progress:
    """How far a history was read."""

    history: History = field(default_factory=History)
    lines: int = 0
    end: int = 0
    last: bytes = b""
    """The line that ends there. A resumed run may truncate its history and write other lines."""


class Follower:
    """Reads histories that grow: lines that were read before are not read again."""

    MAX_FOLLOWED = 64
    """Histories that are remembered; those of further runs are read anew each time."""

    def __init__(self) -> None:
        self._progress: dict[Path, _Progress] = {}

    def read(self, path: Path) -> History:
        """The history as it is now; empty if there is no file yet."""
        found = self._progress.pop(path, None)  # not put back if an error is raised below
        if not path.exists():
            return History()
        if found is not None and next(read_lines(path, found.end - len(found.last)), b"") != found.last:
            found = None
        found = found or _Progress()
        for line in read_lines(path, found.end):
            found.lines += 1
            found.history.add(line, f"{path}:{found.lines}")
            found.last, found.end = line, found.end + len(line)
        if len(self._progress) < self.MAX_FOLLOWED:
            self._progress[path] = found
        return found.history
