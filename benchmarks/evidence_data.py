"""Records of benchmarks/evidence.py: runs, means over seeds, and whether the goals are met.

A goal is met, missed, or open; it is open if a run that it needs is missing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TITLES = {
    "e1": "E1: MobileNet v1 on Imagenette",
    "e2": "E2: ERFNet on CamVid",
    "e3": "E3: AlexNet on Imagenette",
    "e4": "E4: ResNet-56 on CIFAR-10",
}
RECIPES = {
    name: Path(__file__).resolve().parent.parent / "recipes" / f"{recipe}.toml"
    for name, recipe in zip(
        TITLES, ("mobilenet-imagenette", "erfnet-camvid", "alexnet-imagenette", "resnet56-cifar10"), strict=True
    )
}
SCORES = {"e2": "mean IoU"}  # top-1 for the others
BAND = (0.97, 1.0)  # fraction of the budget that a measured result should use
OVER = 1.03  # fraction of the budget above which a run is marked
OURS = "ecc"
AFTER, BEFORE = "finetuned", "pruned"
TITLES_OF_SCORES = {AFTER: "after fine-tuning", BEFORE: "before fine-tuning"}
SHORT = "short"
"""Folder of records of version 0.1, with a quarter of the batches and other baselines, where newer records exist."""
DENSE = "dense"
"""Variant of the dense network with the same training."""
PREDICTED, LOOP = "predicted", "loop"
"""Fields of the cost that a run ended with: predicted, or measured during the run."""
ALIKE = 1e-9  # rounding error of a mean
ALIKE_JOULES = 0.05  # runs whose energy differs by more are not compared


@dataclass(frozen=True)
class Cell:
    """One method at one budget with one seed."""

    method: str
    budget: str
    seed: int
    scores: dict[str, float] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    measured: dict[str, Any] | None = None
    row: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None

    @property
    def share(self) -> float | None:
        """Measured energy relative to the dense network."""
        return None if self.measured is None else self.measured["joules"] / self.measured["dense_joules"]

    @property
    def is_over(self) -> bool:
        """Whether it clearly exceeds its budget: as measured afterwards, or else in the run."""
        spent = self.of_budget if self.of_budget is not None else self.in_the_run
        return spent is not None and spent > OVER

    @property
    def in_the_run(self) -> float | None:
        """The cost that the run ended with, predicted or measured, relative to its budget."""
        reached = reached_of(self.row)
        return None if reached is None else float(reached["result"] / reached["limit"])

    @property
    def of_budget(self) -> float | None:
        """Measured energy relative to the budget."""
        return None if self.share is None else self.share / share_of(self.budget)


@dataclass(frozen=True)
class Experiment:
    """One network on one data set."""

    name: str
    path: Path
    """File of the record; its profile is in the same folder."""
    record: dict[str, Any]
    cells: tuple[Cell, ...]
    trained: tuple[Cell, ...] = ()
    """The dense network with the same training as the methods, by seed."""

    @property
    def title(self) -> str:
        """Number, network and data."""
        number, _, rest = TITLES[self.name].partition(": ")
        return f"{number}, short training: {rest}" if self.path.parent.name == SHORT else TITLES[self.name]

    @property
    def is_earlier(self) -> bool:
        """Whether it is a record of version 0.1."""
        return str(self.record["environment"].get("ecc", "")).startswith("0.1.")

    @property
    def batches(self) -> int:
        """Training batches of most runs; 0 if unknown."""
        return statistics.mode([int(one.row["batches"]["total"]) for one in self.cells if "batches" in one.row] or [0])

    @property
    def score_name(self) -> str:
        """Name of the score."""
        return SCORES.get(self.name, "top-1")

    @property
    def methods(self) -> list[str]:
        """In the order of the file; a variant of ECC is named "ecc (NAME)"."""
        return list(dict.fromkeys(cell.method for cell in self.cells))

    @property
    def baselines(self) -> list[str]:
        """All methods except ECC and its variants."""
        return [name for name in self.methods if name.split(" ")[0] != OURS]

    @property
    def budgets(self) -> list[str]:
        """From mild to tight."""
        return sorted({cell.budget for cell in self.cells}, key=share_of, reverse=True)

    @property
    def labels(self) -> str:
        """Labels of the energy values: measured, estimated."""
        return ", ".join(sorted({cell.measured["label"] for cell in self.cells if cell.measured})) or "not measured"

    def at(self, method: str, budget: str) -> list[Cell]:
        """Finished runs, by seed."""
        found = [cell for cell in self.cells if (cell.method, cell.budget) == (method, budget)]
        return sorted((cell for cell in found if cell.missing is None), key=lambda cell: cell.seed)

    def by_seed(self, method: str, budget: str, when: str) -> dict[int, float]:
        """Scores by seed."""
        return {cell.seed: cell.scores[when] for cell in self.at(method, budget) if when in cell.scores}

    def dense(self) -> list[float]:
        """Scores of the dense networks, one per seed."""
        return list({cell.seed: cell.scores["dense"] for cell in self.cells if "dense" in cell.scores}.values())

    def dense_trained(self) -> dict[int, float]:
        """Scores of the dense networks with the same training as the methods, by seed."""
        return {cell.seed: cell.scores[AFTER] for cell in self.trained if AFTER in cell.scores}


def share_of(budget: str) -> float:
    """Budget relative to dense: 0.5 for "50%"."""
    return float(budget.rstrip("% ")) / 100


def reached_of(row: Mapping[str, Any]) -> Any:
    """The cost that a run ended with, and its budget; None if unknown."""
    return row.get(PREDICTED, row.get(LOOP))


def all_budgets(found: list[Experiment]) -> list[str]:
    """Budgets of any of the experiments, largest first."""
    return sorted({budget for one in found for budget in one.budgets}, key=share_of, reverse=True)


def experiments(folder: Path) -> list[Experiment]:
    """The experiments that have a record."""
    found = []
    for name in TITLES:
        path = folder / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text(encoding="utf-8"))
            trained = [row for row in record["rows"] if row.get("variant") == DENSE]
            others = [row for row in record["rows"] if row.get("variant") != DENSE]
            found.append(Experiment(name, path, record, tuple(_cells(others)), tuple(_cells(trained))))
    return found


def _cells(rows: list[dict[str, Any]]) -> Iterator[Cell]:
    for row in rows:
        method = f"{row['method']} ({row['variant']})" if "variant" in row else row["method"]
        scores, widths = row.get("scores", {}), row.get("widths", {})
        yield Cell(
            method, row["budget"], row["seed"], scores, widths, row.get("measured"), row, missing=row.get("missing")
        )


def mean_and_spread(values: list[float]) -> tuple[float, float] | None:
    """Mean and standard deviation; the latter is 0 for one value."""
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


# ---------------------------------------------------------------- ECC and its best baseline


@dataclass(frozen=True)
class Match:
    """ECC and the best baseline at one budget, over the seeds that both have."""

    budget: str
    ours: float | None
    baseline: str | None
    theirs: float | None
    absent: tuple[str, ...]
    """Methods without a score here."""
    seeds: int = 0
    """Number of seeds that both have."""
    seed_points: tuple[float, ...] = ()
    """ECC minus baseline in points, for each seed."""

    @property
    def points(self) -> float | None:
        """ECC minus baseline, in points."""
        return None if self.ours is None or self.theirs is None else 100 * (self.ours - self.theirs)


def match(found: Experiment, budget: str, when: str) -> Match:
    """The baseline with the highest mean score relative to ECC."""
    ours, absent = found.by_seed(OURS, budget, when), []
    pairs: list[tuple[float, str, float, float, tuple[float, ...]]] = []
    for baseline in found.baselines:
        theirs = found.by_seed(baseline, budget, when)
        seeds = sorted(ours.keys() & theirs.keys())
        if seeds:
            mine, other = (statistics.fmean(one[seed] for seed in seeds) for one in (ours, theirs))
            points = tuple(100 * (ours[seed] - theirs[seed]) for seed in seeds)
            pairs.append((mine - other, baseline, mine, other, points))
        else:
            absent.append(baseline)
    if not ours:
        return Match(budget, None, None, None, (OURS,))
    if not pairs:
        return Match(budget, statistics.fmean(ours.values()), None, None, tuple(absent) or ("any baseline",))
    _, baseline, mine, other, points = min(pairs)
    return Match(budget, mine, baseline, other, tuple(absent), len(points), points)


def at_equal_joules(found: Experiment, budget: str) -> float | None:
    """ECC minus the best baseline after fine-tuning, in points, at the measured energy of ECC.

    The score of a baseline is interpolated linearly between its budgets and the dense network; below its smallest
    network the last score is used, in favour of the baseline.
    """
    dense, ours = found.dense(), _mean_point(found, OURS, budget)
    if not dense or ours is None:
        return None
    heights = []
    for baseline in found.baselines:
        points = [point for one in found.budgets if (point := _mean_point(found, baseline, one))]
        if points:
            shares, scores = zip(*sorted([*points, (1.0, statistics.fmean(dense))]), strict=True)
            heights.append(float(np.interp(ours[0], shares, scores)))
    return 100 * (ours[1] - max(heights)) if heights else None


def _mean_point(found: Experiment, method: str, budget: str) -> tuple[float, float] | None:
    cells = [(cell.share, cell.scores[AFTER]) for cell in found.at(method, budget) if AFTER in cell.scores]
    known = [(share, score) for share, score in cells if share is not None]
    return (statistics.fmean(a for a, _ in known), statistics.fmean(b for _, b in known)) if known else None


# ---------------------------------------------------------------- goals


@dataclass(frozen=True)
class Verdict:
    """A goal and its outcome."""

    goal: str
    where: str
    verdict: str
    numbers: str


def gains(found: Experiment, variant: str) -> dict[str, list[float]]:
    """ECC minus one of its variants after fine-tuning, in points, by budget, for each seed that both have.

    Runs whose energy differs by more than `ALIKE_JOULES` are not compared.
    """
    points: dict[str, list[float]] = {}
    for budget in found.budgets:
        ours, theirs = ({cell.seed: cell for cell in found.at(name, budget)} for name in (OURS, variant))
        pairs = [(ours[seed], theirs[seed]) for seed in sorted(set(ours) & set(theirs))]
        some = [
            100 * (one.scores[AFTER] - two.scores[AFTER])
            for one, two in pairs
            if one.share is None or two.share is None or abs(one.share / two.share - 1) <= ALIKE_JOULES
        ]
        points |= {budget: some} if some else {}
    return points


def ahead(one: Match, least: float) -> str:
    """Whether ECC leads the best baseline by `least` points."""
    if one.points is not None and one.points < least - ALIKE:
        return "missed"
    return "open" if one.points is None or one.absent else "met"


def describe(one: Match) -> str:
    """A match as text."""
    if one.points is None:
        return f"{one.budget}: no score of {', '.join(one.absent)}"
    without = f", without {', '.join(one.absent)}" if one.absent else ""
    over = f", {one.seeds} seed{'s' * (one.seeds > 1)}"
    ours, theirs = (f"{100 * score:.2f} %" for score in (one.ours or 0.0, one.theirs or 0.0))
    return f"{one.budget}: {one.points:+.2f} (ECC {ours}, {one.baseline} {theirs}{over}{without})"


def worst_of(verdicts: list[str]) -> str:
    """Outcome of a goal with several parts: missed if any part is, else open if any part is."""
    return next((word for word in ("missed", "open") if word in verdicts), "met")


def verdicts(found: list[Experiment]) -> list[Verdict]:
    """Every goal on every experiment that it applies to."""
    rows = []
    for one in found:
        matches = [match(one, budget, AFTER) for budget in one.budgets]
        behind = [row for row in matches if ahead(row, 0.0) != "met"]
        least = min((row for row in matches if row.points is not None), key=lambda row: row.points or 0.0, default=None)
        numbers = (
            "; ".join(describe(row) for row in behind)
            if behind
            else f"smallest lead at {describe(least)}"
            if least
            else "none"
        )
        word = worst_of([ahead(row, 0.0) for row in matches])
        rows.append(Verdict("at or above every baseline at every budget, after fine-tuning", one.title, word, numbers))
    rows += [_margin(one, "35%", AFTER, 1.0) for one in found if one.name in ("e1", "e2")]
    rows += [_margin(one, "50%", BEFORE, 5.0) for one in found]
    rows += [
        _near_dense(one, name, "50%", 0.3)
        for one in found
        if one.name == "e4"
        for name in (OURS, f"{OURS} (long)")
        if name in one.methods
    ]
    return rows


def _margin(found: Experiment, budget: str, when: str, least: float) -> Verdict:
    one, dense, numbers = match(found, budget, when), found.dense(), ""
    if dense:
        mean = statistics.fmean(dense)
        most = "" if one.theirs is None else f", {100 * (mean - one.theirs):+.2f} above the baseline"
        numbers = f"; dense: {100 * mean:.2f} %{most}"
    numbers = describe(one) + numbers
    return Verdict(
        f"{least:g} point{'s' * (least != 1)} ahead at {budget}, {TITLES_OF_SCORES[when]}",
        found.title,
        ahead(one, least),
        numbers,
    )


def _near_dense(found: Experiment, method: str, budget: str, most: float) -> Verdict:
    goal, cells = f"{method} within {most:g} points of dense at {budget}, after fine-tuning", found.at(method, budget)
    trained = found.dense_trained()
    dense = trained or {cell.seed: cell.scores["dense"] for cell in cells if "dense" in cell.scores}
    lost = [
        100 * (dense[cell.seed] - cell.scores[AFTER]) for cell in cells if AFTER in cell.scores and cell.seed in dense
    ]
    if not lost:
        return Verdict(goal, found.title, "open", f"no score of {method}")
    mean = statistics.fmean(lost)
    which = "dense with the same training" if trained else "dense"
    return Verdict(goal, found.title, "met" if mean <= most + ALIKE else "missed", f"{mean:.2f} points below {which}")
