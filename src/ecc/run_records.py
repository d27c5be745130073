"""What a run writes: `RunSummary` (summary.json) and the lines of its history (history.jsonl).

These records are written by `ecc.methods` and read by `ecc.report`, `ecc.export` and users. They are plain data, and
torch is not imported. Ranges are checked when a file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ecc.constants import PHASES as PHASES  # re-exported: part of the records
from ecc.formatting import score_text, si

Number = Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
"""A number that can be computed with. Files may hold larger ones; `ecc.records` refuses them when it reads."""
Positive = Annotated[float, msgspec.Meta(ge=1e-100, le=1e100)]
"""A number that can be divided by."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Width = Annotated[int, msgspec.Meta(ge=1, le=2**53)]

FRONT_FILE = "front.json"
"""The results of several budgets, a `Front`, in the folder of the run."""

SCORES = ("dense", "pruned", "finetuned")
"""Names of the scores in a summary: the dense network, the slim network before finetuning, and after it."""


@dataclass(frozen=True)
class Feasibility:
    """One budget, and what the network can reach; amounts in the unit of the cost."""

    resource: str
    unit: str
    label: str
    """Of the cost: measured, estimated, counted or declared."""
    dense: float
    min_cost: float
    """Cost with every group at its minimum width, and without the branches that can be removed."""
    limit: float
    uniform_ratio: float | None
    """Fraction of the channels that uniform pruning would keep; None if the budget is not reachable by that."""
    tokens: int | None = None
    """Tokens per run of a workload of a language model, whose costs are shown per token."""

    def text(self, cost: float) -> str:
        """A cost of the resource as text, per token where costs are."""
        return si(cost / (self.tokens or 1), self.unit)

    @property
    def per(self) -> str:
        """` per token` where costs are."""
        return "" if self.tokens is None else " per token"

    @property
    def is_feasible(self) -> bool:
        """Whether some widths meet the budget."""
        return self.min_cost <= self.limit


@dataclass(frozen=True, kw_only=True)
class BudgetResult:
    """One budget and what became of it."""

    budget: str
    """As the user wrote it."""
    limit: Positive
    """In units of the cost."""
    unit: str
    dense: Positive
    """Cost of the dense network."""
    result: Number
    """Cost of the slim network."""
    label: str
    """Where `result` comes from: measured, estimated, predicted, counted or declared."""
    met: bool


@dataclass(frozen=True, kw_only=True)
class DenseAndResult:
    """A number of the dense network and of the slim one."""

    dense: Number
    result: Number


@dataclass(frozen=True, kw_only=True)
class BatchCount:
    """Training batches of a run."""

    total: Count
    """All batches that were drawn, those of abandoned candidates included."""
    lineage: Count
    """Batches that the resulting network was trained on."""


@dataclass(frozen=True, kw_only=True)
class SparseSummary:
    """What unstructured pruning adds: single weights are set to zero, and the shape of the network stays."""

    assumes: str
    """What the energy estimate assumes of the hardware."""
    base: Number
    coefficients: dict[str, Number]
    """Joules per nonzero weight of each tensor."""
    weights: dict[str, Width]
    nonzeros: dict[str, Count]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The result of a run, as in its summary.json."""

    task: str
    method: str
    device: str
    """Device that the cost refers to."""
    batch: Width
    """Items per inference."""
    label: str
    """Of the main cost: measured, estimated, predicted, counted or declared."""
    budgets: dict[str, BudgetResult]
    """By resource, as in `ecc.budget`: energy, latency, macs, decode and so on."""
    met: bool
    """Whether every budget is met."""
    note: str = ""
    """Why a budget is not met, or what else should be known."""
    within_band: bool = False
    """Whether the measured cost is within `band` of the tightest budget."""
    band: tuple[Number, Number] = (0.0, 1.0)
    measured: dict[str, DenseAndResult] = field(default_factory=dict)
    """Measured (or estimated) costs by resource; empty if nothing was measured."""
    relative_ci: Number | None = None
    """Half width of the 95 % confidence interval of the last measurement, relative to its mean."""
    cost_checks: int = 0
    """How many times the network was measured during pruning."""
    widths: dict[str, Count] = field(default_factory=dict)
    full_widths: dict[str, Width] = field(default_factory=dict)
    macs: DenseAndResult | None = None
    parameters: DenseAndResult | None = None
    weight_bytes: DenseAndResult | None = None
    """Bytes of all parameters and buffers."""
    unit_channels: dict[str, Width] = field(default_factory=dict)
    """Channels of one unit of a group, where it is more than one: those of an attention head, or tied channels."""
    branches: dict[str, bool] = field(default_factory=dict)
    """The residual branches that can be removed, and whether each was."""
    follows: dict[str, str] = field(default_factory=dict)
    """Layers without MACs (norms, activations, sums), and the layer with MACs that each comes after."""
    scores: dict[str, Number] = field(default_factory=dict)
    """By the names of `SCORES`."""
    max_relative_diff: Number | None = None
    """Largest difference between the outputs of the masked and the slim network, relative to the largest output."""
    width_multiple: int = 1
    tokens: dict[str, Width] = field(default_factory=dict)
    """Tokens per run, for resources of the workloads of a language model; their amounts are for one run."""
    metric: str = "score"
    """What `scores` are: `score`, or `perplexity`, whose scores are the mean log-likelihood of a token."""
    batches: BatchCount | None = None
    sparse: SparseSummary | None = None
    runner: str = ""
    """Runner, precision and memory format of the measurements; empty if nothing was run."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the software of the measurements."""

    @property
    def score(self) -> float | None:
        """Score of the slim network; None if the task has none."""
        return self.scores.get("finetuned", self.scores.get("pruned"))

    def amounts(self, resource: str) -> tuple[str, list[str]]:
        """` per token` where costs are, and the costs of a budget as text: dense, result and limit."""
        row, tokens = self.budgets[resource], self.tokens.get(resource)
        costs = [si(cost / (tokens or 1), row.unit) for cost in (row.dense, row.result, row.limit)]
        return ("" if tokens is None else " per token"), costs

    def score_texts(self) -> list[str]:
        """Scores of the dense and of the slim network; empty where there is none."""
        return ["" if one is None else score_text(one, self.metric) for one in (self.scores.get("dense"), self.score)]


@dataclass(frozen=True, kw_only=True)
class FrontRow(BudgetResult):
    """The result of one of several budgets."""

    folder: str
    """Name of its folder in the run folder."""
    score: Number | None = None
    macs: DenseAndResult | None = None
    parameters: DenseAndResult | None = None
    batches: Count = 0
    """Training batches of this budget alone."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """The results of a run with several budgets, as in its front.json."""

    task: str
    resource: str
    metric: str
    dense_score: Number | None
    batches: Count
    """Training batches of all budgets together."""
    rows: list[FrontRow]
    """From the mildest budget to the tightest."""


@dataclass(frozen=True, kw_only=True)
class TrainLine:
    """A line of the history: the mean loss since the last such line."""

    phase: str
    """One of `PHASES`."""
    step: Count
    loss: Number | None
    """None where it was not finite."""
    lr: Number | None
    total: Count
    lineage: Count = 0
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class SolverLine:
    """A line of the history: the state of the solver."""

    step: Count
    cost: dict[str, Number]
    """Predicted cost by resource."""
    target: Number | None
    """Cost that the schedule allows at this step, of the first resource."""
    energy_dual: Number | None
    """z of the paper."""
    width_duals: dict[str, Number | None] = field(default_factory=dict)
    """y of the paper, by group; None where it is not finite, as for a group of a removed branch."""
    widths: dict[str, Count] = field(default_factory=dict)
    nonzeros: dict[str, Count] = field(default_factory=dict)
    total: Count = 0
    phase: str = "solver"


@dataclass(frozen=True, kw_only=True)
class CostCheck:
    """A line of the history: one measurement during pruning, which corrects the target."""

    step: Count
    progress: Number
    """Fraction of the pruning schedule that was done."""
    widths: dict[str, Count]
    predicted: dict[str, Positive]
    measured: dict[str, Positive]
    label: str
    relative_ci: Number | None
    targets: dict[str, Number]
    """Predicted cost that the method aims at from here on, by resource."""
    total: Count = 0
    phase: str = "cost_check"


@dataclass(frozen=True, kw_only=True)
class ScoreLine:
    """A line of the history: a score of the network."""

    name: str
    """One of `SCORES`."""
    score: Number
    total: Count = 0
    phase: str = "score"


@dataclass(frozen=True, kw_only=True)
class MethodLine:
    """A line of the history: what a method says of one of its steps."""

    phase: str
    """Name of the method."""
    values: dict[str, Any]
    total: Count = 0


@dataclass(frozen=True, kw_only=True)
class GridRunInfo:
    """What a comparison writes beside each finished run."""

    method: str
    budget: str
    """As the user wrote it."""
    seed: Count
    seconds: Number
    """Duration of the last session."""
    sessions: Count = 1
    peak_bytes: Count | None = None
    """Peak memory; None where the system does not report it."""


@dataclass(frozen=True, kw_only=True)
class GridFailure:
    """Why a run of a comparison has no result."""

    method: str
    budget: str
    seed: Count
    error: str
