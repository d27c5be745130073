"""`Compression`: from a trained network to a slim one whose measured cost meets the budget.

pretrain    train the dense network, if asked
prune       a `Method` masks channels; `BudgetController` measures and corrects its targets
finetune    remove the masked channels and train the slim network
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from ecc.energy import Budget, Cost, EnergyModel, budgets_of_workloads, dense_cost
from ecc.errors import BadBudget, BadTask, EccError, wrap_user_errors
from ecc.formatting import si
from ecc.graph import ChannelGraph, max_relative_diff, with_widths
from ecc.graph.model_copy import load_whole_state_, whole_state
from ecc.graph.slimming import build_slim
from ecc.measure import EnergySource
from ecc.measure.tokens import workload_graph, workload_input, workload_model
from ecc.records import from_builtins, to_builtins, write_record
from ecc.run_records import (
    BatchCount,
    BudgetResult,
    CostCheck,
    DenseAndResult,
    Feasibility,
    MethodLine,
    RunSummary,
    SolverLine,
)
from ecc.settings import CompressSettings, deployment
from ecc.task import Task, TokenWorkload, batch_size_of, model_inputs_of
from ecc.training import (
    BatchStream,
    Cosine,
    Interrupted,
    OptimizerLike,
    StopRequests,
    Teacher,
    Training,
    load_state,
    save_state,
    to_device,
    train,
    weights_checksum,
)

from .base import (
    MaskedAdam,
    Method,
    PruningContext,
    can_remove_branches,
    check_method,
    has_schedule,
    keep_masks,
    trace_task,
)
from .baselines.recalibration import BATCHES, recalibrate_, recalibrated
from .budget_controller import TOLERANCE_BAND, BudgetController, initial_targets
from .cost_evaluator import CostEvaluator, MeasuredCost, WorkloadEvaluator, check_meter
from .feasibility import check_feasibility, refuse_infeasible, resolve_budgets
from .registry import find_method
from .runner import CompressedModel, CompressionRunner, OptimizerFactory

PRUNED_FILE = "pruned.safetensors"
"""Weights of the masked network at the end of pruning, for a run that prunes it further."""


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """The result of the pruning phase."""

    widths: dict[str, int]
    checks: list[CostCheck]
    is_met: bool
    note: str
    unused_steps: int
    """Pruning steps that the method did not use. Finetuning uses them, so that methods compare at equal steps."""


class Compression(CompressionRunner):
    """Structured compression of one network.

    Args:
        task: With `train_batches` and `loss`. It is not changed.
        budgets: From `parse_budgets`, each on another resource.
        energy_models: Models of energy and latency, as far as the budgets need them. Budgets on counted costs (macs,
            params, bytes) need none.
        meter: Meter or platform that the models were fitted on. None predicts costs with the models.
        settings: Settings; the defaults if None.
        device: Where to train.
        freeze: Modules whose output channels are not pruned, as for `trace_channels`.
        method: Name of a method, or a `Method`.
        optimizer: Function from parameters to an optimizer; None for Adam. See `CompressionRunner`.
        start_weights: Weights of the network with masked channels from which pruning starts; those of the task, which
            are the dense ones, if None.

    Raises:
        BadBudget: If a budget needs a model that was not given.
        BadFile: If a model belongs to another network.
        BadMeasurement: If the meter reads another device than that of a model.
        BadTask: If the task cannot be trained.
        EccError: If the method is unknown, or a model was measured with a runner in a Python file that is not that of
            the settings.
    """

    def __init__(
        self,
        task: Task,
        budgets: Sequence[Budget],
        energy_models: EnergyModel | Sequence[EnergyModel] = (),
        *,
        meter: EnergySource | None = None,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
        freeze: Sequence[str] = (),
        method: str | Method = "ecc",
        optimizer: OptimizerFactory | None = None,
        start_weights: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(task, settings, device, optimizer)
        self._start_weights = start_weights
        self.keeps_pruned = False
        """Whether to write `PRUNED_FILE`."""
        self.finetunes_unused = True
        """Whether fine-tuning gets the pruning steps that the method does not use."""
        self.known_checks: Sequence[tuple[Mapping[str, float], CostCheck]] = ()
        """Measurements of other runs with the same network, energy models and meter, each with the costs of the dense
        network in that run."""
        self.method = find_method(method) if isinstance(method, str) else method
        models = [energy_models] if isinstance(energy_models, EnergyModel) else list(energy_models)
        self.energy_models = {model.resource: model for model in models}
        if len(self.energy_models) < len(models):
            raise BadBudget("two models are given for the same resource; give one of each.")
        check_meter(meter, models, self.settings.runner)
        self.meter = meter if models else None
        batch = models[0].origin.batch if models and not task.workloads else None
        self.graph, self.example_input = trace_task(task, batch, freeze, self.settings.trace.attention)
        self.batch = batch_size_of(self.example_input)
        removes = can_remove_branches(self.method, self.settings)
        could = can_remove_branches(self.method, replace(self.settings, depth=True))
        self._with_branches = self.graph if could and not removes else None
        if not removes:
            self.graph = self.graph.without_branches()
        self.budgets = budgets_of_workloads(budgets, [one.name for one in task.workloads])
        self.workload_graphs: dict[TokenWorkload, ChannelGraph] = {}
        for model in models:
            model.check(self._graph_of(model.resource))
        self.tokens = {name: one.tokens for one in task.workloads for name in one.resources.values()}
        self.costs, self.limits = self._resolve_budgets()
        self.width_multiple = self.settings.width_multiple or (models[0].origin.width_multiple if models else None) or 1
        if self.settings.solver == "paper" and (self.width_multiple > 1 or len(self.costs) > 1):
            raise EccError(
                "solver 'paper' supports one budget and any width; give one budget and width_multiple=1, or use "
                "solver 'admm'."
            )

    def _graph_of(self, resource: str) -> ChannelGraph:
        """The channel graph with the layers that a resource is spent in."""
        workload = self.task.workload_of(resource)
        if workload is None:
            return self.graph
        if workload not in self.workload_graphs:
            attention = self.settings.trace.attention
            self.workload_graphs[workload] = workload_graph(self.task.model, self.graph, workload, attention)
        return self.workload_graphs[workload]

    def _resolve_budgets(self) -> tuple[list[Cost], list[float]]:
        return resolve_budgets(self.graph, self.budgets, self.energy_models, self.batch, self.tokens)

    def feasibility(self) -> list[Feasibility]:
        """What each budget asks of the network."""
        ratio, multiple = self.settings.min_width_ratio, self.width_multiple
        found = check_feasibility(self.graph, self.costs, self.limits, min_width_ratio=ratio, width_multiple=multiple)
        return [replace(one, tokens=self.tokens.get(one.resource)) for one in found]

    def check_feasible(self) -> None:
        """Refuse budgets that cannot be met.

        Raises:
            InfeasibleBudget: If no widths meet one of them.
        """
        ratio, multiple = self.settings.min_width_ratio, self.width_multiple
        refuse_infeasible(self.graph, self.costs, self.feasibility(), ratio, multiple, self._with_branches)

    # ------------------------------------------------------------ phases

    def _check(self) -> None:
        if self.distributed.size > 1 and not has_schedule(self.method):
            raise EccError(
                f"method {self.method.name!r} does not support distributed training; start it without torchrun. "
                "Method ecc supports it."
            )
        check_method(self.method, self.task, self.settings)
        self.costs, self.limits = self._resolve_budgets()
        self.check_feasible()
        self._dense: MeasuredCost | None = None
        self._pruned: PruneResult | None = None
        self._controller: BudgetController | None = None
        self._max_relative_diff: float | None = None
        self._calibration: list[Any] = []
        self._prune_start: dict[str, int] | None = None

    def _run_phases(self) -> CompressedModel:
        if self.distributed.is_main:
            for resource, energy_model in self.energy_models.items():
                energy_model.save(self.folder.path / f"{resource}.json")  # a report needs the run's folder only
        model = copy.deepcopy(self.task.model).to(self.device)
        resumed_in = self._resume()
        teacher = self._pretrain(model, resumed_in)
        measure = self._measure_dense()
        if self._pruned is None:
            if self._start_weights is not None:
                model.load_state_dict(self._start_weights)
            self._pruned = self._prune(model, teacher, measure, resumed_in)
            if self.keeps_pruned and self.distributed.is_main:
                save_state(self.folder.path / PRUNED_FILE, model.state_dict())
        small = self._finetune(model, teacher, self._pruned, resumed_in)
        self._score("finetuned", small)
        return self._finish(small, self._pruned)

    def _make_evaluator(self) -> CostEvaluator | WorkloadEvaluator:
        """Measures the dense network at given widths; the pruned one would not do: zeros take less energy."""
        model, models = self.task.model, self.energy_models
        options: dict[str, Any] = {"distributed": self.distributed, "runner": self.settings.runner}
        used = [one for one in self.task.workloads if any(name in models for name in one.resources.values())]
        if not used:
            return CostEvaluator(model, self.graph, self.example_input, models, self.meter, **options)
        found = {}
        for workload in used:
            own = {name: models[resource] for name, resource in workload.resources.items() if resource in models}
            found[workload] = CostEvaluator(
                workload_model(model, workload),
                self.workload_graphs[workload],
                workload_input(model, workload),
                own,
                self.meter,
                **options,
            )
        return WorkloadEvaluator(found)

    def _measure_dense(self) -> CostEvaluator | WorkloadEvaluator:
        """Measure the dense network. Budgets in percent refer to its measured cost."""
        measure = self._make_evaluator()
        if self._dense is not None and isinstance(measure, CostEvaluator):
            measure.refer_to(self._dense)
        dense = self._dense = self._dense or measure({})
        for number, budget in enumerate(self.budgets):
            if budget.is_relative and budget.resource in dense.amounts:
                self.limits[number] = budget.amount * dense.amounts[budget.resource]
        return measure

    def _prune(
        self, model: nn.Module, teacher: Teacher | None, measure: CostEvaluator | WorkloadEvaluator, resumed_in: str
    ) -> PruneResult:
        """Mask channels of the network in place until its measured cost meets the budgets."""
        assert self._dense is not None
        method, started = self.method, list[_TrainingSteps]()
        stop: StopRequests | None = None  # of a method without a schedule, which may train with checkpoints in a step

        def start_training(optimizer: OptimizerLike, steps: int) -> Iterator[int]:
            options = self._train_options("prune", steps, teacher, self._schedule("prune"))
            started.append(_TrainingSteps(Training(model, optimizer, stop=stop, **options)))
            return started[0]

        context = PruningContext(
            model=model,
            graph=self.graph,
            costs=tuple(self.costs),
            targets=initial_targets(self.costs, self.limits, self._dense),
            settings=self.settings,
            width_multiple=self.width_multiple,
            stream=self.stream,
            teacher=teacher,
            held_out=self._held_out_score,
            train=lambda *args: self._train_candidate(teacher, *args),
            log=self._log_method,
            loss=self.task.loss,
            make_optimizer=lambda: self._optimizer(model, "prune"),
            log_solver=self._log_solver,
            training=start_training,
        )
        if resumed_in == "prune" and self._prune_start is not None:
            self.stream.restore(self._prune_start)  # `start` draws the batches of the first session
        self._prune_start = self.stream.state()
        method.start(context)
        known = [_known_check(check, then, self._dense.amounts, context) for then, check in self.known_checks]
        controller = self._controller = BudgetController(method, context, self.limits, measure, known)
        if resumed_in == "prune":
            self._resume_pruning(controller, context)
        steps = f", {self.settings.prune_steps} steps" if has_schedule(method) else ""
        self.report(f"pruning with {method.name}{steps}")
        try:
            # A method with a schedule is saved by its training loop, which also handles signals.
            with nullcontext() if has_schedule(method) else StopRequests() as stop:
                saver = None if stop is None else _Saver(self, context, controller, stop)

                def after_step(checks: list[CostCheck]) -> None:
                    for check in checks:
                        self._log(replace(check, total=self.stream.total))
                    if checks:
                        self.report(self._describe(checks[-1]))
                    if saver is not None:
                        saver.after_step(is_measured=bool(checks))

                controller.run(after_step)
            for training in started:
                training.finish()
        finally:
            for training in started:
                training.close()
        self._controller = None
        used = self.stream.total // self.distributed.size - self.settings.pretrain_steps
        return PruneResult(
            widths=controller.checks[-1].widths,
            checks=controller.checks,
            is_met=controller.is_met,
            note=controller.note,
            unused_steps=max(0, self.settings.prune_steps - used),
        )

    def _resume_pruning(self, controller: BudgetController, context: PruningContext) -> None:
        saved = self.folder.checkpoint()
        assert saved is not None  # resumed in this phase
        with self.folder.restoring():
            controller.load_state_dict(saved["extra"]["controller"])
            if not has_schedule(self.method):
                load_whole_state_(context.model, saved["model"])
                self.stream.restore(saved["stream"])

    def _finetune(self, model: nn.Module, teacher: Teacher | None, pruned: PruneResult, resumed_in: str) -> nn.Module:
        """Remove the masked channels and train the slim network."""
        if resumed_in == "finetune":
            with self.folder.restoring():
                small = self._empty_slim(model, pruned.widths)
        else:
            small = build_slim(model, self.graph, self.width_multiple)
            inputs = to_device(self.task.example_input, self.device)
            self._max_relative_diff = max_relative_diff(model, small, inputs)
            self.report(f"slimmed; max relative difference to the masked network {self._max_relative_diff:.1g}")
            if not has_schedule(self.method):  # its batch norms are up to date
                recalibrate_(small, self._calibration_inputs(small))
            self._score("pruned", small)
        steps = self.settings.finetune_steps + (pruned.unused_steps if self.finetunes_unused else 0)
        if steps:
            self.report(f"finetuning the slim network, {steps} steps")
            self._train(
                small, self._optimizer(small, "finetune"), "finetune", steps, teacher, self._schedule("finetune")
            )
        return small

    def _schedule(self, phase: str) -> Cosine | None:
        """A learning rate that pruning and finetuning share, for a method that prunes while it trains."""
        if not has_schedule(self.method):
            return None
        assert self._dense is not None
        dense = [self._dense.amounts.get(cost.resource, dense_cost(cost)) for cost in self.costs]
        tightest = min(limit / full for limit, full in zip(self.limits, dense, strict=True))
        return self.settings.joint_schedule(phase, max(0.0, 1 - tightest))

    def _empty_slim(self, model: nn.Module, widths: Mapping[str, int]) -> nn.Module:
        """A network of these widths, whose weights are still to be loaded."""
        return with_widths(model, self.graph, {group.name: widths[group.name] for group in self.graph.variable})

    # ------------------------------------------------------------ tools of a method

    def _train_candidate(
        self, teacher: Teacher | None, model: nn.Module, steps: int, lr: float, stream: BatchStream
    ) -> None:
        """A short training that is not checkpointed; an optimizer of the user has its own learning rate."""
        settings = self.settings.train
        optimizer: torch.optim.Optimizer
        if self._make_optimizer is None:
            optimizer = MaskedAdam(model, self.graph, lr, settings.weight_decay)
        else:
            optimizer = keep_masks(self._optimizer(model, "prune"), model, self.graph)
        train(
            model,
            optimizer,
            stream,
            steps=steps,
            loss=self.task.loss,
            settings=replace(
                settings, seed=settings.seed + stream.lineage, checkpoint_steps=None, checkpoint_seconds=None
            ),
            teacher=teacher,
            distributed=self.distributed,
        )

    def _held_out_score(self, model: nn.Module) -> float:
        """Held-out score in the precision of training, with recalibrated batch norms."""
        if self.task.evaluate_held_out is None:
            raise BadTask(f"method {self.method.name!r} uses held-out data; its needs_held_out must be True.")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.train.precision)
        with (
            torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None),
            recalibrated(model, self._calibration_inputs(model)),
            wrap_user_errors(f"evaluate_held_out of task {self.task.name!r}"),
        ):
            return float(self.task.evaluate_held_out(model))

    def _calibration_inputs(self, model: nn.Module) -> list[Any]:
        """The first inputs of the task, for batch norms of pruned networks; the same for all methods."""
        if not self._calibration:
            stream = BatchStream(self.task, device=self.device, seed=self.settings.train.seed)
            self._calibration = [model_inputs_of(model, one, self.task.loss) for one in islice(stream, BATCHES)]
        return self._calibration

    def _log_method(self, values: Mapping[str, Any]) -> None:
        own = {name: value for name, value in values.items() if name != "phase"}
        self._log(MethodLine(phase=self.method.name, values=own, total=self.stream.total))

    def _log_solver(self, line: SolverLine) -> None:
        self._log(replace(line, total=self.stream.total))

    # ------------------------------------------------------------ state and result

    def _config(self) -> dict[str, Any]:
        return {
            "network": self.graph.fingerprint,
            "budgets": [str(budget) for budget in self.budgets],
            "limits": list(self.limits),
            "energy": {name: [model.kind, model.dense] for name, model in self.energy_models.items()},
            "meter": None if self.meter is None else self.meter.describe().device,
            "width_multiple": self.width_multiple,
            "method": {"name": self.method.name, **self.method.config()},
            **({} if self._start_weights is None else {"start_weights": weights_checksum(self._start_weights)}),
        }

    def _state(self) -> dict[str, Any]:
        return {
            **super()._state(),
            "dense": None if self._dense is None else asdict(self._dense),
            "controller": None if self._controller is None else self._controller.state_dict(),
            "pruned": None if self._pruned is None else to_builtins(self._pruned),
            "max_relative_diff": self._max_relative_diff,
            "prune_start": self._prune_start,
        }

    def _load_state(self, state: Mapping[str, Any]) -> None:
        super()._load_state(state)
        where = self.folder.checkpoint_path
        self._dense = None if state["dense"] is None else from_builtins(state["dense"], MeasuredCost, where)
        self._pruned = None if state["pruned"] is None else from_builtins(state["pruned"], PruneResult, where)
        self._max_relative_diff = state["max_relative_diff"]
        self._prune_start = state.get("prune_start")  # None in checkpoints of earlier versions

    def _load_result(self, summary: RunSummary) -> CompressedModel:
        small = self._empty_slim(copy.deepcopy(self.task.model).to(self.device), summary.widths)
        load_whole_state_(small, load_state(self.folder.path / "slim.safetensors"))
        return CompressedModel(small, self.graph, summary)

    def _finish(self, small: nn.Module, pruned: PruneResult) -> CompressedModel:
        """Write the result."""
        summary = self._summary(pruned)
        if self.distributed.is_main:
            save_state(self.folder.path / "slim.safetensors", whole_state(small))
            write_record(self.folder.path / "widths.json", pruned.widths)
        self.folder.finish(to_builtins(summary))
        return CompressedModel(small, self.graph, summary)

    def _summary(self, pruned: PruneResult) -> RunSummary:
        assert self._dense is not None
        graph, widths, last, dense = self.graph, pruned.widths, pruned.checks[-1], self._dense
        budgets = self._budget_results(last)
        ratio = max(row.result / row.limit for row in budgets.values())
        first = next(iter(self.energy_models.values()), None)
        return RunSummary(
            task=self.task.name,
            method=self.method.name,
            device="" if first is None else first.origin.meter.device,
            batch=self.batch,
            label=last.label,
            budgets=budgets,
            met=all(row.met for row in budgets.values()),
            note=pruned.note,
            within_band=TOLERANCE_BAND[0] <= ratio <= TOLERANCE_BAND[1],
            band=TOLERANCE_BAND,
            measured={
                name: DenseAndResult(dense=dense.amounts[name], result=amount) for name, amount in last.measured.items()
            },
            relative_ci=last.relative_ci,
            cost_checks=len(pruned.checks),
            widths=widths,
            full_widths=dict(graph.full_widths),
            macs=DenseAndResult(dense=float(graph.macs()), result=float(graph.macs(widths))),
            parameters=DenseAndResult(dense=float(graph.parameters()), result=float(graph.parameters(widths))),
            weight_bytes=DenseAndResult(dense=float(graph.weight_bytes()), result=float(graph.weight_bytes(widths))),
            unit_channels=graph.unit_channels,
            branches={one.name: all(widths[name] == 0 for name in one.groups) for one in graph.branches},
            follows=graph.follows,
            scores=dict(self.scores),
            max_relative_diff=self._max_relative_diff,
            width_multiple=self.width_multiple,
            tokens={name: many for name, many in self.tokens.items() if name in last.measured or name in budgets},
            metric=self.task.metric,
            batches=BatchCount(total=self.stream.total, lineage=self.stream.lineage),
            runner="" if first is None or first.origin.settings is None else deployment(first.origin.settings),
            versions={} if first is None else first.origin.environment,
        )

    def _budget_results(self, last: CostCheck) -> dict[str, BudgetResult]:
        assert self._dense is not None
        found = {}
        for budget, cost, limit in zip(self.budgets, self.costs, self.limits, strict=True):
            result = last.measured.get(cost.resource, last.predicted[cost.resource])
            found[cost.resource] = BudgetResult(
                budget=str(budget),
                limit=limit,
                unit=cost.unit,
                dense=self._dense.amounts.get(cost.resource, dense_cost(cost)),
                result=result,
                label=last.label if cost.resource in last.measured else cost.label,
                met=result <= limit,
            )
        return found

    def _describe(self, check: CostCheck) -> str:
        """One line for the terminal."""
        parts = []
        for name, row in self._budget_results(check).items():
            tokens = self.tokens.get(name)
            cost = si(row.result / (tokens or 1), row.unit) + ("" if tokens is None else " per token")
            parts.append(f"{name} {cost} ({row.label}), {row.result / row.limit:.1%} of the budget")
        return f"step {check.step}: {'; '.join(parts)}"


def _known_check(
    check: CostCheck, dense: Mapping[str, float], now: Mapping[str, float], context: PruningContext
) -> CostCheck:
    """A measurement of another run as it would be in this one: relative to the dense network it stays the same."""
    measured = {name: amount * now[name] / dense[name] for name, amount in check.measured.items()}
    return replace(check, measured=measured, predicted=context.predicted(check.widths))


class _TrainingSteps(Iterator[int]):
    """The training loop of a method that prunes while it trains: each `next` takes one step and gives its number."""

    def __init__(self, training: Training) -> None:
        self._training, self._taken, self._has_begun = training, training.each_step(), False

    def __next__(self) -> int:
        self._has_begun = True
        next(self._taken)
        return self._training.step

    def finish(self) -> None:
        """Log and save the last step."""
        with suppress(StopIteration):
            if not self._has_begun:
                next(self)  # resumed after the last step: only the weights are loaded
            self._training.stopped = True
            next(self)

    def close(self) -> None:
        """End the loop, also after an error."""
        self._taken.close()


class _Saver:
    """Checkpoints of a method that takes its own steps: after a measurement, when one is due, and before a stop."""

    def __init__(
        self, job: Compression, context: PruningContext, controller: BudgetController, stop: StopRequests
    ) -> None:
        self._job, self._context, self._controller, self._stop = job, context, controller, stop
        self._saved_at = time.monotonic()

    def after_step(self, *, is_measured: bool) -> None:
        settings, folder = self._job.settings.train, self._job.folder
        age, stop, every = time.monotonic() - self._saved_at, self._stop.signum, settings.checkpoint_steps
        is_old = (settings.checkpoint_seconds or math.inf) <= age
        is_due = is_old or (every is not None and self._controller.steps % every == 0)
        if is_measured or is_due or stop:
            self._saved_at = time.monotonic()
            model, stream = self._context.model.state_dict(), self._context.stream.state()
            folder.save({"phase": "prune", "model": model, "stream": stream, "extra": self._job._state()})
        if stop:
            raise Interrupted(
                f"stopped by signal {stop} after step {self._controller.steps} of {self._job.method.name}; the "
                f"state is in {folder.checkpoint_path}. Run the same command again to resume.",
                stop,
            )
