"""`WeightCompression`: fine-grained pruning of a network, for devices that skip zeros.

    dense    train the dense network, if asked
    solve    remove single weights while training, until their energy is within the budget (`WeightSolver`)
    tune     train what is left; what is zero stays zero

The shapes of the network do not change. The energy is that of an analytic platform (`ecc.energy.nonzeros`), linear in
the nonzeros, so there is nothing to weigh on the way: the prediction is the estimate, and it is called that.
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

from ecc.energy.budget import Budget
from ecc.energy.nonzeros import nonzero_cost
from ecc.errors import BadBudget, BadMeasurement, BadTask, EccError
from ecc.files import write_text
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Source, find_meter
from ecc.measure.meters.platform import PLATFORMS, Platform
from ecc.task import Task, batch_of
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

from .ecc.limits import TOLERANCE
from .ecc.weights import WeightSolver, count_nonzeros, floor_counts
from .feasibility import Reach, reach, refuse_infeasible
from .settings import PHASES, CompressSettings

ASSUMES = "zeros cost neither a multiplication nor storage, places of nonzeros none either; no GPU works so"
"""What the estimate takes for granted; stands in every summary."""


def zero_skipping_platform(spec: str) -> Platform:
    """The platform that `--meter` names.

    Raises:
        BadMeasurement: If it is a meter, or a platform that does not skip zeros.
        NoMeter: If there is no such platform.
    """
    return _checked(find_meter(spec) if spec.startswith("platform:") else spec)


def _checked(source: Source | str) -> Platform:
    if isinstance(source, Platform) and source.constants.skips_zeros:
        return source
    name = repr(source) if isinstance(source, str) else source.describe().device
    known = ", ".join(f"platform:{key}" for key, constants in PLATFORMS.items() if constants.skips_zeros)
    raise BadMeasurement(
        f"pruning single weights needs an analytic platform that skips zeros, and {name} is none: GPUs and processors "
        f"save no energy on scattered zeros. Give {known}, or prune channels."
    )


@dataclass(frozen=True)
class Thinned:
    """What came out."""

    model: nn.Module
    """The network with its shapes as before, and zeros where weights were removed."""
    graph: ChannelGraph
    nonzeros: dict[str, int]
    """Weights left, by tensor."""
    summary: dict[str, Any]
    """As in the run's summary.json."""


class WeightCompression:
    """One network, its budget of energy, and a platform that skips zeros.

    Args:
        task: With batches and a loss; it is left as it is.
        budgets: From `parse_budgets`; one, of energy.
        platform: Such as `find_meter("platform:eyeriss")`.
        settings: How; `min_share` is of the weights of each tensor, and there is nothing to round.
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
        platform: Source,
        *,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if task.train_batches is None or task.loss is None:
            raise BadTask(f"task {task.name!r} has no train_batches and loss; compressing needs both.")
        if [budget.resource for budget in budgets] != ["energy"]:
            asked = ", ".join(budget.resource for budget in budgets) or "nothing"
            raise BadBudget(f"single weights are pruned to one budget of energy, and this is about {asked}.")
        self.settings = settings or CompressSettings()
        if self.settings.round_to is not None:
            raise EccError(f"round_to={self.settings.round_to} is for widths; single weights are not rounded.")
        self.task, self.platform, self.device = task, _checked(platform), torch.device(device)
        self.graph = trace_channels(task.model, task.example_input, proven=False)  # counted by, not cut by
        self.cost = nonzero_cost(self.graph, self.platform)
        (self.budget,) = budgets
        self.limit = self.budget.limit(self.cost, batch_of(task.example_input))
        self.scores: dict[str, float] = {}
        self.world = World(self.device)
        self.history: History | None = None
        self.tell: Callable[[str], None] = lambda _: None

    def reach(self) -> Reach:
        """What the budget asks of the network."""
        return reach(self.cost, self.limit, floor_counts(self.cost.full_widths, self.settings.min_share))

    def run(
        self,
        run_dir: str | Path,
        *,
        world: World | None = None,
        history: History | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Thinned:
        """Compresses, or goes on with a run that was begun in the folder.

        Args:
            run_dir: The folder of the run.
            world: The processes that train together; None for this one alone.
            history: Is told what the run's history is told.
            progress: Is told each phase, in words.

        Raises:
            BadFile: If the folder holds another run, or something else.
            InfeasibleBudget: If the budget cannot be met.
        """
        self.world = world or self.world
        self.history, self.tell = history, progress or self.tell
        self.scores = {}
        refuse_infeasible([self.reach()])
        with open_run(run_dir, self.config(), device_type=self.device.type, writes=self.world.is_main) as run:
            return self._go(run)

    def config(self) -> dict[str, Any]:
        """What makes this run this run; a run of another config is another run."""
        run_only = ("log_every", "checkpoint_steps", "checkpoint_seconds")
        return {
            "verb": "compress",
            "granularity": "weight",
            "task": self.task.name,
            "network": self.graph.fingerprint,
            "meter": self.platform.describe().device_id,
            "budgets": [str(self.budget)],
            "limits": [self.limit],
            "settings": {name: value for name, value in asdict(self.settings).items() if name not in run_only},
        }

    # ------------------------------------------------------------ phases

    def _go(self, run: RunDir) -> Thinned:
        model = copy.deepcopy(self.task.model).to(self.device)
        finished = run.summary()
        if finished is not None:
            model.load_state_dict(load_state(run.path / "sparse.safetensors"))
            return Thinned(model, self.graph, finished["nonzeros"], finished)
        saved = run.checkpoint()
        reached = PHASES[0] if saved is None else str(saved["phase"])
        self.scores = {} if saved is None else {name: float(score) for name, score in saved["extra"]["scores"].items()}
        stream = BatchStream(
            self.task, device=self.device, seed=self.settings.seed, rank=self.world.rank, world_size=self.world.size
        )
        self._dense(run, model, stream, reached)
        teacher = self._teacher(model)
        self._score("dense", model)
        if reached != "tune":
            self._solve(run, model, stream, teacher)
            self._score("before tuning", model)
        if self.settings.tune_steps:
            self.tell(f"tuning the nonzero weights, {self.settings.tune_steps} steps")
            solver = WeightSolver(model, self.cost, None, self.settings.tune_steps, optimizer=self._adam(model))
            self._train(run, model, solver, stream, "tune", teacher)
        return self._finished(run, model, stream)

    def _dense(self, run: RunDir, model: nn.Module, stream: BatchStream, reached: str) -> None:
        """Trains the dense network, or takes what an earlier session trained."""
        file = run.path / "dense.safetensors"
        if self.settings.train_steps == 0:
            return
        if reached == "dense" or not file.exists():
            self.tell(f"training the dense network, {self.settings.train_steps} steps")
            optimizer = torch.optim.Adam(model.parameters(), lr=self.settings.train_lr)
            self._train(run, model, optimizer, stream, "dense")
            if self.world.is_main:
                save_state(file, model.state_dict())
        else:
            model.load_state_dict(load_state(file))

    def _teacher(self, model: nn.Module) -> Teacher | None:
        how = self.settings
        if how.distill == 0:
            return None
        return Teacher(
            model, Distillation(weight=how.distill, temperature=how.temperature, ignore_index=how.ignore_index)
        )

    def _solve(self, run: RunDir, model: nn.Module, stream: BatchStream, teacher: Teacher | None) -> None:
        """Removes weights of the network in place."""
        settings = self.settings
        self.tell(f"solving for the budget, {settings.steps} steps")
        solver = WeightSolver(
            model,
            self.cost,
            self.limit,
            settings.steps,
            optimizer=self._adam(model),
            min_share=settings.min_share,
        )

        def on_step(step: int, facts: Mapping[str, Any]) -> None:
            del facts
            if step % settings.log_every == 0 and self.world.is_main:
                line = {
                    "phase": "solver",
                    "step": step,
                    "spent": {"energy": float(solver.energy)},
                    "target": solver.target,
                    "energy_dual": solver.duals.energy,
                    "nonzeros": solver.counts,
                }
                run.log(line)
                if self.history is not None:
                    self.history.log(line)

        self._train(run, model, solver, stream, "solve", teacher, on_step)

    def _adam(self, model: nn.Module) -> torch.optim.Adam:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trained, lr=self.settings.lr, weight_decay=self.settings.weight_decay)

    def _train(
        self,
        run: RunDir,
        model: nn.Module,
        optimizer: Any,
        stream: BatchStream,
        phase: str,
        teacher: Teacher | None = None,
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
            extra=lambda: {"scores": dict(self.scores)},
            phase=phase,
        )

    # ------------------------------------------------------------ numbers

    def _score(self, name: str, model: nn.Module) -> None:
        if name in self.scores or self.task.evaluate is None:
            return
        self.scores[name] = float(self.task.evaluate(model))
        self.tell(f"score {name}: {self.scores[name]:.4f}")

    def _finished(self, run: RunDir, model: nn.Module, stream: BatchStream) -> Thinned:
        self._score("after tuning", model)
        nonzeros = count_nonzeros(model, self.cost)
        if self.world.is_main:
            save_state(run.path / "sparse.safetensors", model.state_dict())
            write_text(run.path / "nonzeros.json", json.dumps(nonzeros, indent=1) + "\n")
        summary = self._summary(nonzeros) | {"batches": {"total": stream.total, "lineage": stream.lineage}}
        run.finish(summary)
        return Thinned(model, self.graph, nonzeros, summary)

    def _summary(self, nonzeros: dict[str, int]) -> dict[str, Any]:
        cost = self.cost
        full = dict(zip(cost.groups, cost.full_widths, strict=True))
        joules = float(cost.to("cpu").value(torch.tensor(list(nonzeros.values()))))
        met = joules <= self.limit * (1 + TOLERANCE)
        energy = {
            "budget": str(self.budget),
            "limit": self.limit,
            "unit": cost.unit,
            "dense": cost.dense,
            "result": joules,
            "label": cost.label,
            "met": met,
        }
        return {
            "task": self.task.name,
            "device": self.platform.constants.device,
            "batch": batch_of(self.task.example_input),
            "granularity": "weight",
            "label": cost.label,
            "assumes": ASSUMES,
            "budgets": {"energy": energy},
            "met": met,
            "base": cost.base,
            "weights": full,
            "nonzeros": nonzeros,
            "sparsity": 1 - sum(nonzeros.values()) / sum(full.values()),
            "sparsities": {name: 1 - nonzeros[name] / size for name, size in full.items()},
            "scores": self.scores,
        }
