"""What the page, the charts and the tables show of runs, grids and profiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ecc.energy.model import Origin
from ecc.energy.quality import FitQuality
from ecc.run_records import Front, GridFailure, RunSummary

from .history import Curves

_TITLES = {"macs": "MACs", "params": "parameters", "weight_bytes": "model size", "throughput": "items per second"}


def mean_of(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else None


@dataclass(frozen=True)
class Resource:
    """A cost of the network before and after; limit and met are None where there was no budget."""

    resource: str
    unit: str
    label: str
    dense: float
    result: float | None
    limit: float | None = None
    met: bool | None = None

    @property
    def title(self) -> str:
        """The name in text."""
        return _TITLES.get(self.resource, self.resource.replace("_", " "))

    @property
    def change(self) -> float | None:
        """Relative to dense."""
        return None if self.result is None or not self.dense else self.result / self.dense - 1

    @property
    def of_budget(self) -> float | None:
        """Result divided by limit."""
        return None if self.result is None or not self.limit else self.result / self.limit


@dataclass(frozen=True)
class GroupWidth:
    """Channels of a group (or weights of a tensor) before and after pruning."""

    group: str
    full: int
    kept: int
    channels: int = 1
    """Of one unit: those of an attention head, or channels that are tied."""


@dataclass(frozen=True)
class LayerCost:
    """Joules of a layer before and after, for the whole batch."""

    layer: str
    dense: float
    result: float
    parts: tuple[LayerCost, ...] = ()
    """The layer by itself and the norms, activations and sums after it; empty for a layer without any."""


@dataclass(kw_only=True)
class Run:
    """One run folder."""

    name: str
    task: str
    method: str
    budget: str
    seed: int
    settings: dict[str, Any]
    is_unstructured: bool
    device: str
    batch: int | None
    label: str
    summary: RunSummary | None
    """None while the run is not finished."""
    now: tuple[str, int] | None
    """Phase and step of the last line of the history."""
    resources: list[Resource]
    widths: list[GroupWidth]
    layers: list[LayerCost]
    curves: Curves
    sessions: list[dict[str, str]]
    export_command: str | None
    """Writes the slim network for deployment; None if the run was not started with `ecc compress`."""

    @property
    def removed_branches(self) -> list[str]:
        """Residual branches that were removed."""
        return (
            [] if self.summary is None else [name for name, is_removed in self.summary.branches.items() if is_removed]
        )

    @property
    def gained(self) -> bool:
        """Whether the score is higher than that of the dense network."""
        final = None if self.summary is None else self.summary.score
        return final is not None and final > self.scores.get("dense", final)

    @property
    def metric(self) -> str:
        """What the scores are."""
        return "score" if self.summary is None else self.summary.metric

    @property
    def main(self) -> Resource | None:
        """The energy, or the first resource with a budget."""
        return next((row for row in self.resources if row.resource == "energy"), next(iter(self.resources), None))

    @property
    def scores(self) -> dict[str, float]:
        """By name, of a finished run."""
        return {} if self.summary is None else self.summary.scores

    @property
    def counted_things(self) -> str:
        """What is pruned."""
        return "weights" if self.is_unstructured else "channels"


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The energy model of a run, and how well it predicts."""

    kind: str
    label: str
    origin: Origin
    quality: FitQuality
    """With at most `MAX_HELD_OUT` samples."""
    advice: str


@dataclass(frozen=True)
class MeanStd:
    """Over seeds."""

    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """One method at one budget, over its seeds."""

    method: str
    budget: str
    seeds: int
    failures: list[str]
    labels: list[str]
    pruned: MeanStd | None
    """Score before finetuning."""
    finetuned: MeanStd | None
    cost_ratio: MeanStd | None
    """Cost relative to the dense network."""
    met: bool | None
    batches_total: float | None
    batches_lineage: float | None
    seconds: float | None
    """Mean of the runs that ran in one session; of an interrupted run only the last session is known."""
    peak_bytes: int | None
    p_value: float | None
    """Of a paired t-test of the scores over seeds, against ecc."""
    metric: str = "score"
    """What the scores are, as in `Task`."""


@dataclass(kw_only=True)
class Report:
    """Everything on a page. A single run is a report with one run."""

    kind: str
    """run or grid"""
    folder: str
    task: str
    device: str
    batch: int | None
    labels: list[str]
    running: int
    methods: list[str]
    budgets: list[str]
    seeds: list[int]
    runs: list[Run]
    rows: list[GridRow]
    failures: list[GridFailure]
    model: ModelInfo | None
    front: Front | None
    """The results of several budgets of one run; a report with it has a run for each budget."""
    commands: list[str]
    environments: list[dict[str, str]]

    @property
    def first_budget(self) -> str | None:
        """The budget that is selected first: the middle one. None where there is no choice."""
        return self.budgets[len(self.budgets) // 2] if len(self.budgets) > 1 else None

    @property
    def metric(self) -> str:
        """What the scores are."""
        return next((run.metric for run in self.finished), "score")

    @property
    def dense_score(self) -> float | None:
        """Mean score of the dense network over the runs that have one."""
        return mean_of(run.scores["dense"] for run in self.finished if "dense" in run.scores)

    @property
    def finished(self) -> list[Run]:
        """Runs with a result."""
        return [run for run in self.runs if run.summary is not None]
