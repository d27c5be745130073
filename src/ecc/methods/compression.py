"""`Compression`: from a trained network to a small one that meets a budget on the scales.

    dense    train the dense network, if asked
    solve    prune while training, weighing on the way down (`EccSolver`, `Landing`)
    tune     cut the dead channels off, and train what is left

Each phase draws from one counted stream of batches and writes into one run folder; the same call goes on where the
last one ended, bit for bit on a CPU.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from ecc.energy import Budget, EnergyModel, dense_cost
from ecc.errors import BadBudget, BadTask, EccError, wrap_user_errors
from ecc.graph import ChannelGraph, max_relative_diff, trace_channels, verify_graph, with_widths
from ecc.graph.model_copy import load_whole_state_, whole_state
from ecc.graph.slimming import build_slim
from ecc.io import write_text
from ecc.measure import EnergySource
from ecc.records import to_builtins
from ecc.run_records import BatchCount, CostCheck, DenseAndResult, MethodLine, RunSummary
from ecc.task import Task, split_batch, with_batch_size
from ecc.training import (
    BatchStream,
    Interrupted,
    LRSchedule,
    RunDir,
    StepInfo,
    StopRequests,
    Teacher,
    load_state,
    save_state,
    to_device,
)

from .base import Method, PruningContext, check_needs_held_out
from .baselines.recalibration import BATCHES, recalibrate_, recalibrated
from .cost_evaluator import CostEvaluator, MeasuredCost, SharedCostEvaluator, check_source
from .driving import Drive, first_targets, trainer
from .ecc.solver import EccSolver
from .feasibility import check_feasibility, costs_of, refuse_infeasible
from .landing import BAND, Landing
from .runner import CompressionRunner
from .settings import CompressSettings
from .summary import budget_results, describe_check, measured_costs, solver_line


@dataclass(frozen=True)
class CompressedModel:
    """What came out."""

    model: nn.Module
    """The slim network."""
    graph: ChannelGraph
    """Of the dense network."""
    widths: dict[str, int]
    summary: RunSummary
    """As in the run's summary.json."""


class Compression(CompressionRunner[CompressedModel]):
    """One network, its budgets, and how they are to be met.

    Args:
        task: With batches and a loss; it is left as it is.
        budgets: From `parse_budgets`; each is about another resource.
        energy: Model of the energy, and of the latency if that has a budget; the first tells how to weigh.
        source: The meter or platform that the models were fitted on; None trusts the models, and says so.
        settings: How.
        device: Where to train.
        freeze: Modules whose outputs are kept whole, as for `trace_channels`.
        method: A rival to ECC, which solves in its place; everything else stays the same.

    Raises:
        BadBudget: If a budget has no energy model.
        BadFile: If the energy model belongs to another network.
        BadMeasurement: If the source is another device than that of an energy model.
        BadTask: If the task cannot be trained.
    """

    def __init__(
        self,
        task: Task,
        budgets: Sequence[Budget],
        energy: EnergyModel | Sequence[EnergyModel],
        *,
        source: EnergySource | None = None,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
        freeze: Sequence[str] = (),
        method: Method | None = None,
    ) -> None:
        super().__init__(task, settings, device)
        self.method = method
        models = [energy] if isinstance(energy, EnergyModel) else list(energy)
        if not models:
            raise BadBudget("no energy model was given; fit one with `ecc fit PROFILE -o energy.json`.")
        self.energies = {model.resource: model for model in models}
        if len(self.energies) < len(models):
            raise BadBudget("two of the energy models are about the same resource; give one of each.")
        check_source(source, self.energies.values())
        self.source = source
        self.example_input = with_batch_size(task.example_input, models[0].origin.batch)
        graph = trace_channels(task.model, self.example_input, freeze=freeze, verify=False)
        self.graph = verify_graph(task.model, graph, task.example_input)
        for model in models:
            model.check(self.graph)
        self.budgets = tuple(budgets)
        self.costs, self.limits = costs_of(self.graph, budgets, self.energies)
        self.width_multiple = self.settings.width_multiple or models[0].origin.width_multiple or 1
        if self.settings.solver == "admm" and method is None and (self.width_multiple > 1 or len(self.costs) > 1):
            raise EccError(
                "the paper's dynamics know one budget and no rounding; give one budget and width_multiple=1, or leave out "
                "solver='admm'."
            )
        self.weighed_dense: MeasuredCost | None = None
        self.max_relative_diff: float | None = None
        self.landing: Landing | Drive | None = None
        self._calibrating: list[Any] | None = None
        self.left_over = 0
        """Steps that the solve was given and did not take; tuning takes them, so that methods compare at equal ones."""

    # ------------------------------------------------------------ phases

    def _begin(self) -> None:
        if self.method is not None and self.distributed.size > 1:
            raise EccError(
                f"{self.method.name} chooses in one process, and this is one of {self.distributed.size}: they would choose "
                "differently. Start it without torchrun; ecc itself runs in several."
            )
        check_needs_held_out(self.method, self.task)
        self.weighed_dense = self.max_relative_diff = self.landing = None
        self.left_over = 0
        self.costs, self.limits = costs_of(self.graph, self.budgets, self.energies)  # an earlier run weighed its own
        least, multiple = self.settings.min_width_ratio, self.width_multiple
        refuse_infeasible(
            check_feasibility(self.graph, self.costs, self.limits, min_width_ratio=least, width_multiple=multiple)
        )

    def _asked(self) -> dict[str, Any]:
        return {
            "network": self.graph.fingerprint,
            "budgets": [str(budget) for budget in self.budgets],
            "limits": list(self.limits),
            "energy": {name: [model.kind, model.dense] for name, model in self.energies.items()},
            "meter": None if self.source is None else self.source.describe().device,
            "width_multiple": self.width_multiple,
            "method": None if self.method is None else {"name": self.method.name, **self.method.config()},
        }

    def _as_it_was(self, run: RunDir, summary: RunSummary) -> CompressedModel:
        widths = summary.widths
        small = self._hollow(copy.deepcopy(self.task.model).to(self.device), widths)
        load_whole_state_(small, load_state(run.path / "slim.safetensors"))
        return CompressedModel(small, self.graph, widths, summary)

    def _extra(self) -> dict[str, Any]:
        return {
            **super()._extra(),
            "weighed_dense": None if self.weighed_dense is None else asdict(self.weighed_dense),
            "landing": None if self.landing is None else self.landing.state(),
            "max_relative_diff": self.max_relative_diff,
            "left_over": self.left_over,
        }

    def _restore(self, extra: Mapping[str, Any]) -> None:
        super()._restore(extra)
        self.max_relative_diff, self.left_over = extra["max_relative_diff"], int(extra["left_over"])
        if extra["weighed_dense"] is not None:
            self.weighed_dense = MeasuredCost.restored(extra["weighed_dense"])

    def _go(self, run: RunDir) -> CompressedModel:
        if self.distributed.is_main:
            for resource, energy in self.energies.items():
                energy.save(run.path / f"{resource}.json")  # so that a report needs the run's folder alone
        model = copy.deepcopy(self.task.model).to(self.device)
        reached, stream = self._reached(run), self._stream()
        teacher = self._dense(run, model, stream, reached)
        solve = self._solved if self.method is None else self._driven
        widths, landing = solve(run, model, stream, teacher, reached)
        if reached != "finetune":
            taken = stream.total // self.distributed.size - self.settings.pretrain_steps
            self.left_over = max(0, self.settings.prune_steps - taken)
        small = self._tuned(run, model, stream, teacher, widths)
        return self._finished(run, small, widths, landing, stream)

    def _solved(
        self, run: RunDir, model: nn.Module, stream: BatchStream, teacher: Teacher | None, reached: str
    ) -> tuple[dict[str, int], Landing]:
        """Prunes the network in place, by ECC; the widths that are left."""
        settings, scales = self.settings, self._ready_scales()
        solver = EccSolver(
            model,
            self.graph,
            self.costs,
            list(self.limits),
            settings.prune_steps,
            optimizer=self._adam(model),
            min_width_ratio=settings.min_width_ratio,
            width_multiple=self.width_multiple,
            **_solver_options(settings),
        )
        landing = self.landing = Landing(solver, self.costs, self.limits, scales, settings.prune_steps)
        _take_up(run, landing)
        if reached == "finetune":
            with run.restoring():
                return landing.weighings[-1].widths, landing
        self.tell(f"solving for the budget, {settings.prune_steps} steps")

        def on_step(step: int, info: StepInfo) -> None:
            del info
            weighing = landing.after_step(step)
            if weighing is not None:
                self._log_check(run, weighing)
            elif step % settings.train.log_every == 0:
                self._log(run, solver_line(solver, self.costs, step, self._total))

        self._train(run, model, solver, stream, "prune", teacher, on_step, schedule=self._fall("prune"))
        return solver.widths, landing

    def _driven(
        self, run: RunDir, model: nn.Module, stream: BatchStream, teacher: Teacher | None, reached: str
    ) -> tuple[dict[str, int], Drive]:
        """Prunes the network in place, by another method; the widths that are left."""
        method, scales = self.method, self._ready_scales()
        assert method is not None  # or ECC would solve
        assert self.weighed_dense is not None  # by the scales
        work = PruningContext(
            model=model,
            graph=self.graph,
            costs=tuple(self.costs),
            targets=first_targets(self.costs, self.limits, self.weighed_dense),
            settings=self.settings,
            width_multiple=self.width_multiple,
            stream=stream,
            teacher=teacher,
            held_out=self._held_out,
            train=trainer(self.graph, self.task.loss, teacher, self.settings, self.distributed),
            log=lambda values: self._log(run, MethodLine(phase=method.name, values=dict(values), total=self._total)),
        )
        method.start(work)
        drive = self.landing = Drive(method, work, self.limits, scales)
        saved = _take_up(run, drive)
        if reached == "finetune":
            with run.restoring():
                return drive.weighings[-1].widths, drive
        if reached == "prune" and saved is not None:
            with run.restoring():
                model.load_state_dict(saved["model"])
                stream.restore(saved["stream"])
        self.tell(f"solving for the budget by {method.name}")

        saved_at, weighed = time.monotonic(), len(drive.weighings)

        def save() -> None:
            nonlocal saved_at, weighed
            how, age = self.settings.train, time.monotonic() - saved_at
            old = how.checkpoint_steps is not None or (how.checkpoint_seconds or math.inf) <= age
            if self.distributed.is_main and (old or stop.signum or len(drive.weighings) > weighed):
                saved_at, weighed = time.monotonic(), len(drive.weighings)
                state = {"phase": "prune", "model": model.state_dict(), "stream": stream.state()}
                run.save({**state, "extra": self._extra()})
            if stop.signum:
                raise Interrupted(
                    f"stopped by signal {stop.signum} after step {drive.steps} of {method.name}, which "
                    f"{run.checkpoint_path} holds. Give the same command again to go on.",
                    stop.signum,
                )

        with StopRequests() as stop:
            drive.go(save)
        for weighing in drive.weighings:
            self._log_check(run, weighing)
        return drive.weighings[-1].widths, drive

    def _tuned(
        self,
        run: RunDir,
        model: nn.Module,
        stream: BatchStream,
        teacher: Teacher | None,
        widths: dict[str, int],
    ) -> nn.Module:
        """Cuts the dead channels off and trains what is left."""
        saved = run.checkpoint()
        if saved is not None and saved["phase"] == "finetune":
            with run.restoring():
                small = self._hollow(model, widths)
        else:
            small = build_slim(model, self.graph, self.width_multiple)  # the summary tells whether the budget is met
            self.max_relative_diff = max_relative_diff(model, small, to_device(self.task.example_input, self.device))
            self.tell(f"cut and masked networks agree to {self.max_relative_diff:.1g} of the largest output")
            if self.method is not None:
                recalibrate_(small, self._calibration())
            self._score(run, "pruned", small)
        steps = self.settings.finetune_steps + self.left_over
        if steps:
            self.tell(f"tuning the slim network, {steps} steps")
            adam, fall = self._adam(small), self._fall("finetune")
            self._train(run, small, adam, stream, "finetune", teacher, steps=steps, schedule=fall)
        return small

    def _fall(self, phase: str) -> LRSchedule | None:
        """The learning rate of ECC; None for rivals, who cut at once and then tune."""
        if self.method is not None:
            return None
        assert self.weighed_dense is not None  # by the scales, before the solve
        full = [self.weighed_dense.amounts.get(cost.resource, dense_cost(cost)) for cost in self.costs]
        least = min(limit / dense for limit, dense in zip(self.limits, full, strict=True))
        return self.settings.joint_schedule(phase, max(0.0, 1 - least))

    def _hollow(self, model: nn.Module, widths: Mapping[str, int]) -> nn.Module:
        """A network of these widths, whose weights are to be loaded."""
        return with_widths(model, self.graph, {group.name: widths[group.name] for group in self.graph.prunable})

    # ------------------------------------------------------------ numbers

    def _held_out(self, model: nn.Module) -> float:
        """What a search goes by: in the precision of training, for there are hundreds of candidates."""
        if self.task.evaluate_held_out is None:
            raise BadTask("the method judges by held-out data and does not say so: its needs_held_out must be True.")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.train.precision)
        with (
            torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None),
            recalibrated(model, self._calibration()),
            wrap_user_errors(f"evaluate_held_out of task {self.task.name!r}"),
        ):
            return float(self.task.evaluate_held_out(model))

    def _calibration(self) -> list[Any]:
        """The first inputs of the task, for batch norms of networks that were cut; the same for all methods."""
        if self._calibrating is None:
            stream = BatchStream(self.task, device=self.device, seed=self.settings.train.seed)
            self._calibrating = [split_batch(batch)[0] for batch in islice(stream, BATCHES)]
        return self._calibrating

    def _ready_scales(self) -> SharedCostEvaluator:
        """CostEvaluator on which the dense network was weighed, so that shares of it are amounts."""
        scales = SharedCostEvaluator(self._scales(), self.distributed)
        if self.weighed_dense is None:
            self.weighed_dense = scales({})
        self._resolve_shares()
        return scales

    def _scales(self) -> CostEvaluator:
        source = (
            self.source if self.distributed.is_main else None
        )  # the task's network: zeros of a pruned one draw less
        return CostEvaluator(self.task.model, self.graph, self.example_input, self.energies, source)

    def _resolve_shares(self) -> None:
        """Budgets in percent are shares of what the dense network weighs here and now."""
        assert self.weighed_dense is not None
        for number, budget in enumerate(self.budgets):
            if budget.is_relative and budget.resource in self.weighed_dense.amounts:
                self.limits[number] = budget.amount * self.weighed_dense.amounts[budget.resource]

    def _log_check(self, run: RunDir, check: CostCheck) -> None:
        self._log(run, replace(check, total=self._total))
        self.tell(describe_check(check, self.limits, self.costs))

    def _finished(
        self, run: RunDir, small: nn.Module, widths: dict[str, int], landing: Landing | Drive, stream: BatchStream
    ) -> CompressedModel:
        self._score(run, "finetuned", small)
        assert self.weighed_dense is not None
        last = landing.weighings[-1] if landing.weighings else None
        budgets = budget_results(self.graph, self.budgets, self.costs, self.limits, widths, self.weighed_dense, last)
        graph, origin = self.graph, next(iter(self.energies.values())).origin
        summary = RunSummary(
            task=self.task.name,
            method="ecc" if self.method is None else self.method.name,
            device=origin.meter.device,
            batch=origin.batch,
            label="predicted" if last is None else last.label,
            budgets=budgets,
            met=all(row.met for row in budgets.values()),
            note=landing.note,
            within_band=landing.landed,
            band=BAND,
            measured=measured_costs(self.weighed_dense, last),
            relative_ci=None if last is None else last.relative_ci,
            cost_checks=len(landing.weighings),
            widths=widths,
            full_widths=dict(graph.full_widths),
            macs=DenseAndResult(dense=float(graph.macs()), result=float(graph.macs(widths))),
            parameters=DenseAndResult(dense=float(graph.parameters()), result=float(graph.parameters(widths))),
            scores=dict(self.scores),
            max_relative_diff=self.max_relative_diff,
            width_multiple=self.width_multiple,
            batches=BatchCount(total=stream.total, lineage=stream.lineage),
        )
        if self.distributed.is_main:
            save_state(run.path / "slim.safetensors", whole_state(small))
            write_text(run.path / "widths.json", json.dumps(widths, indent=1) + "\n")
        run.finish(to_builtins(summary))
        return CompressedModel(small, self.graph, widths, summary)


def _take_up(run: RunDir, landing: Landing | Drive) -> dict[str, Any] | None:
    """What the run has saved, if anything; what had been weighed is in `landing` again."""
    saved = run.checkpoint()
    if saved is not None and saved["extra"]["landing"] is not None:
        with run.restoring():
            landing.restore(saved["extra"]["landing"])
    return saved


def _solver_options(settings: CompressSettings) -> dict[str, Any]:
    """Arguments of `EccSolver`. The ADMM solver has no schedule and may use all steps."""
    if settings.solver == "scheduled":
        return {"importance": settings.importance, "uniform_floor": settings.uniform_floor}
    return {"importance": settings.importance, "solver": settings.admm, "warm_up": 0.0, "ramp": 1.0}
