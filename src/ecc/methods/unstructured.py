"""`WeightCompression`: unstructured pruning, for devices that skip zeros.

Single weights are set to zero, and the shapes of the network stay. The energy is that of an analytic platform
(`ecc.energy.counted`) and linear in the number of nonzero weights, so nothing is measured during pruning.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ecc.budget import Budget, dense_cost
from ecc.energy.counted import nonzero_cost
from ecc.errors import BadBudget, BadMeasurement, EccError, option_hint
from ecc.graph import trace_channels
from ecc.measure import EnergySource, find_meter
from ecc.measure.meters.platform import PLATFORMS, Platform
from ecc.records import to_builtins, write_record
from ecc.run_records import BatchCount, BudgetResult, Feasibility, RunSummary, SolverLine, SparseSummary
from ecc.settings import CompressSettings
from ecc.task import Task, batch_size_of
from ecc.training import Cosine, StepInfo, Teacher, load_state, save_state

from .ecc.constraints import TOLERANCE
from .ecc.weight_solver import WeightSolver, count_nonzeros, min_counts
from .feasibility import feasibility_of, raise_infeasible
from .runner import CompressedModel, CompressionRunner

ASSUMES = (
    "zero weights cost no multiplication and no storage, and their positions are stored for free; no GPU does this"
)
"""What the energy estimate assumes; part of every summary."""


def zero_skipping_platform(spec: str) -> Platform:
    """The platform that `--meter` names.

    Raises:
        BadMeasurement: If it is a meter, or a platform that does not skip zeros.
        NoMeter: If there is no such platform.
    """
    return _check_platform(find_meter(spec) if spec.startswith("platform:") else spec)


def _check_platform(source: EnergySource | str) -> Platform:
    if isinstance(source, Platform) and source.constants.skips_zeros:
        return source
    name = repr(source) if isinstance(source, str) else source.describe().device
    known = ", ".join(f"platform:{key}" for key, constants in PLATFORMS.items() if constants.skips_zeros)
    raise BadMeasurement(
        f"unstructured pruning needs an analytic platform that skips zeros, and {name} does not: GPUs and CPUs save no "
        f"energy on scattered zeros. Use {known}, or prune channels."
    )


class WeightCompression(CompressionRunner):
    """Unstructured compression of one network.

    Args:
        task: With `train_batches` and `loss`. It is not changed.
        budgets: From `parse_budgets`: one, of energy.
        platform: Such as `find_meter("platform:eyeriss")`.
        settings: Settings; `min_width_ratio` is the minimum fraction of nonzero weights in each tensor.
        device: Where to train.

    Raises:
        BadBudget: If there is another budget than one of energy.
        BadMeasurement: If the platform does not skip zeros.
        BadTask: If the task cannot be trained.
        BadWidths: If the network has no weights to prune.
        EccError: If a setting is for channels only.
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
            given = ", ".join(budget.resource for budget in budgets) or "none"
            raise BadBudget(f"unstructured pruning needs one energy budget; given: {given}.")
        for name in ("width_multiple", "uniform_floor", "solver", "importance", "depth"):
            if getattr(self.settings, name) != getattr(CompressSettings, name):
                raise EccError(f"{name} has no effect on unstructured pruning; leave it out.")
        if self.settings.prune_steps < 1:
            raise EccError("unstructured pruning needs prune_steps of at least 1.")
        self.platform = _check_platform(platform)
        self.graph = trace_channels(task.model, task.example_input, verify=False)  # for its layers only
        self.cost = nonzero_cost(self.graph, self.platform)
        (self.budget,) = budgets
        self.limit = self.budget.limit(self.cost, batch_size_of(task.example_input))

    def feasibility(self) -> list[Feasibility]:
        """What the budget asks of the network."""
        return [self._feasibility(self.settings.min_width_ratio)]

    def _feasibility(self, min_ratio: float) -> Feasibility:
        return feasibility_of(self.cost, self.limit, min_counts(self.cost.full_widths, min_ratio))

    # ------------------------------------------------------------ phases

    def _check(self) -> None:
        ratio, (found,) = self.settings.min_width_ratio, self.feasibility()
        if not found.is_feasible:
            options = {option_hint("min_width_ratio", ratio / 2): self._feasibility(ratio / 2).min_cost}
            raise_infeasible(found, ratio, options, parts="weights")

    def _run_phases(self) -> CompressedModel:
        model = copy.deepcopy(self.task.model).to(self.device)
        resumed_in = self._resume()
        teacher = self._pretrain(model, resumed_in)
        if resumed_in != "finetune":
            self._prune(model, teacher)
            self._score("pruned", model)
        steps = self.settings.finetune_steps
        if steps:
            self.report(f"finetuning the nonzero weights, {steps} steps")
            solver = WeightSolver(model, self.cost, None, steps, optimizer=self._optimizer(model, "prune"))
            self._train(model, solver, "finetune", steps, teacher, self._schedule("finetune"))
        self._score("finetuned", model)
        return self._finish(model)

    def _prune(self, model: nn.Module, teacher: Teacher | None) -> None:
        """Set weights of the network to zero in place."""
        settings = self.settings
        self.report(f"pruning single weights, {settings.prune_steps} steps")
        solver = WeightSolver(
            model,
            self.cost,
            self.limit,
            settings.prune_steps,
            optimizer=self._optimizer(model, "prune"),
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
                    total=self.stream.total,
                )
                self._log(line)

        self._train(model, solver, "prune", settings.prune_steps, teacher, self._schedule("prune"), on_step)

    def _schedule(self, phase: str) -> Cosine | None:
        return self.settings.joint_schedule(phase, max(0.0, 1 - self.limit / dense_cost(self.cost)))

    # ------------------------------------------------------------ state and result

    def _config(self) -> dict[str, Any]:
        return {
            "unstructured": True,
            "network": self.graph.fingerprint,
            "meter": self.platform.describe().device_id,
            "budgets": [str(self.budget)],
            "limits": [self.limit],
        }

    def _load_result(self, summary: RunSummary) -> CompressedModel:
        model = copy.deepcopy(self.task.model).to(self.device)
        model.load_state_dict(load_state(self.folder.path / "sparse.safetensors"))
        return CompressedModel(model, self.graph, summary)

    def _finish(self, model: nn.Module) -> CompressedModel:
        """Write the result."""
        nonzeros = count_nonzeros(model, self.cost)
        if self.distributed.is_main:
            save_state(self.folder.path / "sparse.safetensors", model.state_dict())
            write_record(self.folder.path / "nonzeros.json", nonzeros)
        summary = self._summary(nonzeros)
        self.folder.finish(to_builtins(summary))
        return CompressedModel(model, self.graph, summary)

    def _summary(self, nonzeros: dict[str, int]) -> RunSummary:
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
            batches=BatchCount(total=self.stream.total, lineage=self.stream.lineage),
            sparse=SparseSummary(
                assumes=ASSUMES,
                base=cost.base,
                coefficients=dict(zip(cost.groups, cost.coefficients, strict=True)),
                weights=dict(zip(cost.groups, cost.full_widths, strict=True)),
                nonzeros=nonzeros,
            ),
        )
