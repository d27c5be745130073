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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecc.energy import Budget, Cost, EnergyModel
from ecc.errors import BadBudget, BadTask
from ecc.files import write_text
from ecc.graph import ChannelGraph, gap, prove, resized, slim, trace_channels
from ecc.measure import Source
from ecc.task import Task, with_batch
from ecc.training import (
    BatchStream,
    Distillation,
    History,
    RunDir,
    Teacher,
    World,
    load_state,
    open_run,
    save_state,
    train,
)
from ecc.training.batches import moved

from .ecc.solver import EccSolver
from .feasibility import costs_of, reaches, refuse_infeasible
from .landing import Landing, Weighing
from .settings import PHASES, CompressSettings
from .summary import summary_of
from .weighing import Scales, SharedScales, Weighed, check_source


@dataclass(frozen=True)
class Compressed:
    """What came out."""

    model: nn.Module
    """The slim network."""
    graph: ChannelGraph
    """Of the dense network."""
    widths: dict[str, int]
    summary: dict[str, Any]
    """As in the run's summary.json."""


class Compression:
    """One network, its budgets, and how they are to be met.

    Args:
        task: With batches and a loss; it is left as it is.
        budgets: From `parse_budgets`; each is about another resource.
        energy: Model of the energy, and of the latency if that has a budget; the first tells how to weigh.
        source: The meter or platform that the models were fitted on; None trusts the models, and says so.
        settings: How.
        device: Where to train.
        freeze: Modules whose outputs are kept whole, as for `trace_channels`.

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
        source: Source | None = None,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
        freeze: Sequence[str] = (),
    ) -> None:
        if task.train_batches is None or task.loss is None:
            raise BadTask(f"task {task.name!r} has no train_batches and loss; compressing needs both.")
        models = [energy] if isinstance(energy, EnergyModel) else list(energy)
        if not models:
            raise BadBudget("no energy model was given; fit one with `ecc fit PROFILE -o energy.json`.")
        self.energies = {model.resource: model for model in models}
        if len(self.energies) < len(models):
            raise BadBudget("two of the energy models are about the same resource; give one of each.")
        check_source(source, self.energies.values())
        self.task, self.source, self.device = task, source, torch.device(device)
        self.settings = settings = settings or CompressSettings()
        self.example_input = with_batch(task.example_input, models[0].origin.batch)
        graph = trace_channels(task.model, self.example_input, freeze=freeze, proven=False)
        self.graph = prove(task.model, graph, task.example_input)
        for model in models:
            model.check(self.graph)
        self.budgets = tuple(budgets)
        self.costs, self.limits = costs_of(self.graph, budgets, self.energies)
        self.round_to = settings.round_to or models[0].origin.multiple_of or 1
        self.scores: dict[str, float] = {}
        self.weighed_dense: Weighed | None = None
        self.slim_gap: float | None = None
        self.world = World(self.device)
        self.history: History | None = None
        self.tell: Callable[[str], None] = lambda _: None

    def run(
        self,
        run_dir: str | Path,
        *,
        world: World | None = None,
        history: History | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Compressed:
        """Compresses, or goes on with a run that was begun in the folder.

        Args:
            run_dir: The folder of the run.
            world: The processes that train together; None for this one alone.
            history: Is told what the run's history is told.
            progress: Is told each phase, in words.

        Raises:
            BadFile: If the folder holds another run, or something else.
            InfeasibleBudget: If no widths meet a budget.
        """
        self.world = world or self.world
        self.history, self.tell = history, progress or self.tell
        self.scores, self.weighed_dense, self.slim_gap = {}, None, None
        self.costs, self.limits = costs_of(self.graph, self.budgets, self.energies)  # an earlier run weighed its own
        least, multiple = self.settings.min_share, self.round_to
        refuse_infeasible(reaches(self.graph, self.costs, self.limits, min_share=least, round_to=multiple))
        with open_run(run_dir, self.config(), device_type=self.device.type, writes=self.world.is_main) as run:
            return self._go(run)

    def config(self) -> dict[str, Any]:
        """What makes this run this run; a run of another config is another run."""
        run_only = ("log_every", "checkpoint_steps", "checkpoint_seconds")
        return {
            "verb": "compress",
            "task": self.task.name,
            "network": self.graph.fingerprint,
            "budgets": [str(budget) for budget in self.budgets],
            "limits": list(self.limits),
            "energy": {name: [model.kind, model.dense] for name, model in self.energies.items()},
            "meter": None if self.source is None else self.source.describe().device,
            "round_to": self.round_to,
            "settings": {name: value for name, value in asdict(self.settings).items() if name not in run_only},
        }

    # ------------------------------------------------------------ phases

    def _go(self, run: RunDir) -> Compressed:
        model = copy.deepcopy(self.task.model).to(self.device)
        finished = run.summary()
        if finished is not None:
            return self._as_it_was(run, model, finished)
        reached = self._restored(run)
        stream = BatchStream(
            self.task, device=self.device, seed=self.settings.seed, rank=self.world.rank, world_size=self.world.size
        )
        self._dense(run, model, stream, reached)
        teacher = self._teacher(model)
        self._score("dense", model)
        widths, landing = self._solved(run, model, stream, teacher, reached)
        small = self._tuned(run, model, stream, teacher, widths, landing)
        return self._finished(run, small, widths, landing, stream)

    def _as_it_was(self, run: RunDir, model: nn.Module, summary: dict[str, Any]) -> Compressed:
        """What an earlier session finished."""
        widths = {name: int(width) for name, width in summary["widths"].items()}
        small = resized(model, self.graph, {group.name: widths[group.name] for group in self.graph.prunable})
        small.load_state_dict(load_state(run.path / "slim.safetensors"))
        return Compressed(small, self.graph, widths, summary)

    def _restored(self, run: RunDir) -> str:
        """What an earlier session found out; the phase that it was in."""
        saved = run.checkpoint()
        if saved is None:
            return PHASES[0]
        extra = saved["extra"]
        self.scores = {name: float(score) for name, score in extra["scores"].items()}
        self.slim_gap = extra["slim_gap"]
        if extra["weighed_dense"] is not None:
            self.weighed_dense = Weighed(**extra["weighed_dense"])
        return str(saved["phase"])

    def _extra(self, landing: Landing | None) -> dict[str, Any]:
        return {
            "scores": dict(self.scores),
            "weighed_dense": None if self.weighed_dense is None else asdict(self.weighed_dense),
            "landing": None if landing is None else landing.state(),
            "slim_gap": self.slim_gap,
        }

    def _dense(self, run: RunDir, model: nn.Module, stream: BatchStream, reached: str) -> None:
        """Trains the dense network, or takes what an earlier session trained."""
        file = run.path / "dense.safetensors"
        if self.settings.train_steps == 0:
            return
        if reached == "dense" or not file.exists():
            self.tell(f"training the dense network, {self.settings.train_steps} steps")
            optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.train_lr)
            self._train(run, model, optimizer, stream, "dense", None, None)
            if self.world.is_main:
                save_state(file, model.state_dict())
        else:
            model.load_state_dict(load_state(file))

    def _teacher(self, model: nn.Module) -> Teacher | None:
        settings = self.settings
        if settings.distill == 0:
            return None
        return Teacher(
            model,
            Distillation(weight=settings.distill, temperature=settings.temperature, ignore_index=settings.ignore_index),
        )

    def _solved(
        self, run: RunDir, model: nn.Module, stream: BatchStream, teacher: Teacher | None, reached: str
    ) -> tuple[dict[str, int], Landing]:
        """Prunes the network in place; the widths that are left."""
        settings = self.settings
        scales = SharedScales(self._scales(), self.world)
        if self.weighed_dense is None:
            self.weighed_dense = scales({})
        self._resolve_shares()
        inner = torch.optim.Adam(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )
        solver = EccSolver(
            model,
            self.graph,
            self.costs,
            list(self.limits),
            settings.steps,
            optimizer=inner,
            min_share=settings.min_share,
            round_to=self.round_to,
        )
        landing = Landing(solver, self.costs, self.limits, scales, settings.steps)
        saved = run.checkpoint()
        if saved is not None and saved["extra"]["landing"] is not None:
            landing.restore(saved["extra"]["landing"])
        if reached == "tune":
            return landing.weighings[-1].widths, landing
        self.tell(f"solving for the budget, {settings.steps} steps")

        def on_step(step: int, facts: Mapping[str, Any]) -> None:
            del facts
            weighing = landing.after_step(step)
            if weighing is not None:
                self._log(run, {"phase": "weighing", **asdict(weighing)})
                self.tell(_told(weighing, self.limits, self.costs))
            elif step % settings.log_every == 0:
                self._log(run, _solver_facts(solver, self.costs, step))

        self._train(run, model, solver, stream, "solve", teacher, landing, on_step)
        return solver.widths, landing

    def _tuned(
        self,
        run: RunDir,
        model: nn.Module,
        stream: BatchStream,
        teacher: Teacher | None,
        widths: dict[str, int],
        landing: Landing,
    ) -> nn.Module:
        """Cuts the dead channels off and trains what is left."""
        saved = run.checkpoint()
        if saved is not None and saved["phase"] == "tune":
            small = resized(model, self.graph, {group.name: widths[group.name] for group in self.graph.prunable})
        else:
            small = slim(model, self.graph)
            self.slim_gap = gap(model, small, moved(self.task.example_input, self.device))
            self.tell(f"cut and masked networks agree to {self.slim_gap:.1g} of the largest output")
            self._score("before tuning", small)
        if self.settings.tune_steps:
            self.tell(f"tuning the slim network, {self.settings.tune_steps} steps")
            optimizer = torch.optim.Adam(
                small.parameters(), lr=self.settings.lr, weight_decay=self.settings.weight_decay
            )
            self._train(run, small, optimizer, stream, "tune", teacher, landing)
        return small

    def _train(
        self,
        run: RunDir,
        model: nn.Module,
        optimizer: Any,
        stream: BatchStream,
        phase: str,
        teacher: Teacher | None,
        landing: Landing | None,
        on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
    ) -> None:
        assert self.task.loss is not None  # checked at the start
        train(
            model,
            optimizer,
            stream,
            loss=self.task.loss,
            settings=self.settings.training(phase),
            teacher=teacher,
            world=self.world,
            run=run,
            history=self.history,
            on_step=on_step,
            extra=lambda: self._extra(landing),
            phase=phase,
        )

    # ------------------------------------------------------------ numbers

    def _scales(self) -> Scales:
        source = self.source if self.world.is_main else None  # the task's network: zeros of a pruned one draw less
        return Scales(self.task.model, self.graph, self.example_input, self.energies, source)

    def _resolve_shares(self) -> None:
        """Budgets in percent are shares of what the dense network weighs here and now."""
        assert self.weighed_dense is not None
        for number, budget in enumerate(self.budgets):
            if budget.is_share and budget.resource in self.weighed_dense.amounts:
                self.limits[number] = budget.amount * self.weighed_dense.amounts[budget.resource]

    def _score(self, name: str, model: nn.Module) -> None:
        if name in self.scores or self.task.evaluate is None:
            return
        self.scores[name] = float(self.task.evaluate(model))
        self.tell(f"score {name}: {self.scores[name]:.4f}")

    def _log(self, run: RunDir, facts: Mapping[str, Any]) -> None:
        if self.world.is_main:
            run.log(facts)
            if self.history is not None:
                self.history.log(facts)

    def _finished(
        self, run: RunDir, small: nn.Module, widths: dict[str, int], landing: Landing, stream: BatchStream
    ) -> Compressed:
        self._score("after tuning", small)
        assert self.weighed_dense is not None
        summary = {
            "task": self.task.name,
            "device": next(iter(self.energies.values())).origin.meter.device,
            "batch": next(iter(self.energies.values())).origin.batch,
            **summary_of(self.graph, self.budgets, self.costs, self.limits, widths, self.weighed_dense, landing),
            "scores": self.scores,
            "slim_gap": self.slim_gap,
            "round_to": self.round_to,
            "batches": {"total": stream.total, "lineage": stream.lineage},
        }
        if self.world.is_main:
            save_state(run.path / "slim.safetensors", small.state_dict())
            write_text(run.path / "widths.json", json.dumps(widths, indent=1) + "\n")
        run.finish(summary)
        return Compressed(small, self.graph, widths, summary)


def _solver_facts(solver: EccSolver, costs: Sequence[Cost], step: int) -> dict[str, Any]:
    spent = {cost.resource: float(amount) for cost, amount in zip(costs, solver.spent, strict=True)}
    return {
        "phase": "solver",
        "step": step,
        "spent": spent,
        "target": solver.target,
        "energy_dual": solver.duals.energy,
        "widths": solver.widths,
    }


def _told(weighing: Weighing, limits: Sequence[float], costs: Sequence[Cost]) -> str:
    parts = []
    for cost, limit in zip(costs, limits, strict=True):
        amount = weighing.weighed.get(cost.resource, weighing.predicted[cost.resource])
        parts.append(f"{cost.resource} {amount:.4g} {cost.unit}, {amount / limit:.1%} of the budget".replace(" ,", ","))
    return f"step {weighing.step}, {weighing.label}: {'; '.join(parts)}"
