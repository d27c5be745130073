"""`WeightCompression`: fine-grained pruning of a network, for devices that skip zeros.

    dense    train the dense network, if asked
    solve    remove single weights while training, until their energy is within the budget (`WeightSolver`)
    tune     train what is left; what is zero stays zero

The shapes of the network do not change. The energy is that of an analytic platform (`ecc.energy.nonzeros`), linear in
the nonzeros, so there is nothing to weigh on the way: the prediction is the estimate, and it is called that.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ecc.energy.budget import Budget, dense_cost
from ecc.energy.nonzeros import nonzero_cost
from ecc.errors import BadBudget, BadMeasurement, EccError
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import EnergySource, find_meter
from ecc.measure.meters.platform import PLATFORMS, Platform
from ecc.records import to_builtins, write_record
from ecc.run_records import BatchCount, BudgetResult, RunSummary, SolverLine, SparseSummary
from ecc.task import Task, batch_size_of
from ecc.training import BatchStream, LRSchedule, RunDir, StepInfo, Teacher, load_state, save_state

from .ecc.constraints import TOLERANCE
from .ecc.weights import WeightSolver, count_nonzeros, floor_counts
from .feasibility import Feasibility, reach, refuse_infeasible
from .runner import CompressionRunner
from .settings import CompressSettings

ASSUMES = "zeros cost neither a multiplication nor storage, places of nonzeros none either; no GPU works so"
"""What the estimate takes for granted; stands in every summary."""


def zero_skipping_platform(spec: str) -> Platform:
    """The platform that `--meter` names.

    Raises:
        BadMeasurement: If it is a meter, or a platform that does not skip zeros.
        NoMeter: If there is no such platform.
    """
    return _checked(find_meter(spec) if spec.startswith("platform:") else spec)


def _checked(source: EnergySource | str) -> Platform:
    if isinstance(source, Platform) and source.constants.skips_zeros:
        return source
    name = repr(source) if isinstance(source, str) else source.describe().device
    known = ", ".join(f"platform:{key}" for key, constants in PLATFORMS.items() if constants.skips_zeros)
    raise BadMeasurement(
        f"pruning single weights needs an analytic platform that skips zeros, and {name} is none: GPUs and processors "
        f"save no energy on scattered zeros. Give {known}, or prune channels."
    )


@dataclass(frozen=True)
class SparseResult:
    """What came out."""

    model: nn.Module
    """The network with its shapes as before, and zeros where weights were removed."""
    graph: ChannelGraph
    nonzeros: dict[str, int]
    """Weights left, by tensor."""
    summary: RunSummary
    """As in the run's summary.json."""


class WeightCompression(CompressionRunner[SparseResult]):
    """One network, its budget of energy, and a platform that skips zeros.

    Args:
        task: With batches and a loss; it is left as it is.
        budgets: From `parse_budgets`; one, of energy.
        platform: Such as `find_meter("platform:eyeriss")`.
        settings: How; `min_width_ratio` is of the weights of each tensor, and there is nothing to round.
        device: Where to train.

    Raises:
        BadBudget: If there is another budget than one of energy.
        BadMeasurement: If the platform does not skip zeros.
        BadTask: If the task cannot be trained.
        BadWidths: If the network has no weights to prune.
    """

    def __init__(
        self,
        task: Task,
        budgets: Sequence[Budget],
        platform: EnergySource,
        *,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(task, settings, device)
        if [budget.resource for budget in budgets] != ["energy"]:
            asked = ", ".join(budget.resource for budget in budgets) or "nothing"
            raise BadBudget(f"single weights are pruned to one budget of energy, and this is about {asked}.")
        if self.settings.width_multiple is not None:
            raise EccError(
                f"width_multiple={self.settings.width_multiple} is for widths; single weights are not rounded."
            )
        if self.settings.uniform_floor:
            raise EccError(f"uniform_floor={self.settings.uniform_floor} is for widths; weights are chosen one by one.")
        self.platform = _checked(platform)
        self.graph = trace_channels(task.model, task.example_input, verify=False)  # counted by, not cut by
        self.cost = nonzero_cost(self.graph, self.platform)
        (self.budget,) = budgets
        self.limit = self.budget.limit(self.cost, batch_size_of(task.example_input))

    def reach(self) -> Feasibility:
        """What the budget asks of the network."""
        return reach(self.cost, self.limit, floor_counts(self.cost.full_widths, self.settings.min_width_ratio))

    # ------------------------------------------------------------ phases

    def _begin(self) -> None:
        refuse_infeasible([self.reach()], "lower min_width_ratio (--min-width-ratio), or shrink the input")

    def _asked(self) -> dict[str, Any]:
        return {
            "unstructured": True,
            "network": self.graph.fingerprint,
            "meter": self.platform.describe().device_id,
            "budgets": [str(self.budget)],
            "limits": [self.limit],
        }

    def _as_it_was(self, run: RunDir, summary: RunSummary) -> SparseResult:
        model = copy.deepcopy(self.task.model).to(self.device)
        model.load_state_dict(load_state(run.path / "sparse.safetensors"))
        assert summary.sparse is not None  # written by `_finished`
        return SparseResult(model, self.graph, summary.sparse.nonzeros, summary)

    def _go(self, run: RunDir) -> SparseResult:
        model = copy.deepcopy(self.task.model).to(self.device)
        reached, stream = self._reached(run), self._stream()
        teacher = self._dense(run, model, stream, reached)
        if reached != "finetune":
            self._prune(run, model, stream, teacher)
            self._score(run, "pruned", model)
        steps = self.settings.finetune_steps
        if steps:
            self.tell(f"finetuning the nonzero weights, {steps} steps")
            solver = WeightSolver(model, self.cost, None, steps, optimizer=self._adam(model))
            self._train(run, model, solver, stream, "finetune", teacher, schedule=self._schedule("finetune"))
        return self._finished(run, model, stream)

    def _prune(self, run: RunDir, model: nn.Module, stream: BatchStream, teacher: Teacher | None) -> None:
        """Remove weights of the network in place."""
        settings = self.settings
        self.tell(f"pruning, {settings.prune_steps} steps")
        solver = WeightSolver(
            model,
            self.cost,
            self.limit,
            settings.prune_steps,
            optimizer=self._adam(model),
            min_width_ratio=settings.min_width_ratio,
        )

        def on_step(step: int, info: StepInfo) -> None:
            del info
            if step % settings.train.log_every == 0:
                line = SolverLine(
                    step=step,
                    cost={"energy": float(solver.energy)},
                    target=solver.target,
                    energy_dual=solver.duals.energy,
                    nonzeros=solver.counts,
                    total=self._total,
                )
                self._log(run, line)

        self._train(run, model, solver, stream, "prune", teacher, on_step, schedule=self._schedule("prune"))

    def _schedule(self, phase: str) -> LRSchedule | None:
        return self.settings.joint_schedule(phase, max(0.0, 1 - self.limit / dense_cost(self.cost)))

    # ------------------------------------------------------------ results

    def _finished(self, run: RunDir, model: nn.Module, stream: BatchStream) -> SparseResult:
        self._score(run, "finetuned", model)
        nonzeros = count_nonzeros(model, self.cost)
        if self.distributed.is_main:
            save_state(run.path / "sparse.safetensors", model.state_dict())
            write_record(run.path / "nonzeros.json", nonzeros)
        summary = self._summary(nonzeros, stream)
        run.finish(to_builtins(summary))
        return SparseResult(model, self.graph, nonzeros, summary)

    def _summary(self, nonzeros: dict[str, int], stream: BatchStream) -> RunSummary:
        cost = self.cost
        joules = float(cost.to("cpu").value(torch.tensor(list(nonzeros.values()))))
        energy = BudgetResult(
            budget=str(self.budget),
            limit=self.limit,
            unit=cost.unit,
            dense=cost.dense,
            result=joules,
            label=cost.label,
            met=joules <= self.limit * (1 + TOLERANCE),
        )
        return RunSummary(
            task=self.task.name,
            method="ecc",
            device=self.platform.constants.device,
            batch=batch_size_of(self.task.example_input),
            label=cost.label,
            budgets={"energy": energy},
            met=energy.met,
            note="" if energy.met else f"the estimated energy is {joules / self.limit:.1%} of the budget.",
            scores=dict(self.scores),
            batches=BatchCount(total=stream.total, lineage=stream.lineage),
            sparse=SparseSummary(
                assumes=ASSUMES,
                base=cost.base,
                coefficients=dict(zip(cost.groups, cost.coefficients, strict=True)),
                weights=dict(zip(cost.groups, cost.full_widths, strict=True)),
                nonzeros=nonzeros,
            ),
        )
