"""`Comparison`: several methods, budgets and seeds, each in a run folder, at equal batches.

    RUNS/grid.json              settings of the comparison
    RUNS/seed-0/dense/          the dense network of each seed, trained once for all methods
    RUNS/seed-0/ecc-50/         one run

Finished runs are skipped, interrupted ones are resumed, and failed ones leave a file with the reason. Tables and
figures are made from the folders alone (`ecc.report.load`).
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ecc.budget import MEASURED_UNITS, parse_budget
from ecc.constants import PROTOCOLS, RUN_PROFILE, SCRATCH, WORKLOAD_PROFILES
from ecc.energy import EnergyModel
from ecc.errors import BadFile, EccError
from ecc.measure import EnergySource
from ecc.records import from_builtins, read_record, write_record
from ecc.run_records import CostCheck, GridFailure, GridRunInfo, RunSummary
from ecc.settings import CompressSettings
from ecc.task import Task
from ecc.training import BatchStream, Interrupted, history_lines, load_state, open_run, save_state, train

from .base import Method, check_needs_held_out
from .baselines.scratch import Scratch
from .compression import Compression
from .cost_evaluator import check_meter
from .registry import METHODS, find_method
from .runner import adam, initial_weights_checksum, result_settings

_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class GridRun:
    """One method, one budget, one seed."""

    method: str
    budget: str
    seed: int

    def folder(self, root: Path) -> Path:
        """Its run folder."""
        budget = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.budget.rstrip("%"))
        return root / f"seed-{self.seed}" / f"{self.method}-{budget}"

    def failure_file(self, root: Path) -> Path:
        """Next to the run folder, which may not exist yet."""
        folder = self.folder(root)
        return folder.with_name(f"{folder.name}.failed.json")

    def describe(self, error: str | None) -> str:
        """One line about the end of the run."""
        name = f"{self.method} {self.budget} seed {self.seed}"
        return f"{name}: done" if error is None else f"{name}: failed: {error}"


@dataclass(frozen=True, kw_only=True)
class _GridConfig:
    """What must stay the same when a comparison is resumed; methods, budgets and seeds can be added."""

    task: str
    quick: bool
    protocol: str = PROTOCOLS[0]
    freeze: list[str] = field(default_factory=list)
    device: str = ""
    """Device that the costs refer to."""
    weights: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class Comparison:
    """A grid of compressions of one task.

    Args:
        task: With batches, a loss, and scores on test and held-out data.
        energy_models: Models of energy and latency, as far as the budgets need them.
        methods: Names in `METHODS`; and `scratch`, which trains the widths of `ecc` from random weights.
        budgets: As for `parse_budget`.
        seeds: Number of seeds, counted from 0.
        meter: Measures every result; None predicts costs with the models.
        settings: The same for all runs, except for the seed.
        device: Where to train.
        freeze: Modules whose output channels are not pruned, as for `trace_channels`.
        quick: Methods search for a tenth of their time: for a demonstration, not for a comparison.
        protocol: `equal` gives every method the same number of batches in all: what its search does not use is added to
            its fine-tuning. `published` lets it search as its paper does, and all have the same fine-tuning.
    """

    def __init__(
        self,
        task: Task,
        energy_models: EnergyModel | Sequence[EnergyModel] = (),
        *,
        methods: Sequence[str],
        budgets: Sequence[str],
        seeds: int = 3,
        meter: EnergySource | None = None,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
        freeze: Sequence[str] = (),
        quick: bool = False,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        if protocol not in PROTOCOLS:
            raise EccError(f"protocol {protocol!r} is unknown; choose one of {', '.join(PROTOCOLS)}.")
        if not methods or not budgets or seeds < 1:
            raise EccError("a comparison needs at least one method, one budget and one seed.")
        for name in methods:
            if name not in METHODS and name != SCRATCH:
                raise EccError(f"unknown method {name!r}; choose from {', '.join((*METHODS, SCRATCH))}.")
            if name != SCRATCH:
                check_needs_held_out(find_method(name), task)
        if SCRATCH in methods and "ecc" not in methods:
            raise EccError("method scratch trains the widths of ecc; compare ecc as well.")
        folders: dict[Path, str] = {}
        for text in budgets:
            parse_budget(text)
            first = folders.setdefault(GridRun("", text, 0).folder(Path()), text)
            if first != text:
                raise EccError(f"budgets {first!r} and {text!r} would share a folder; compare them separately.")
        self.task, self.meter, self.device = task, meter, torch.device(device)
        self.energy_models = [energy_models] if isinstance(energy_models, EnergyModel) else list(energy_models)
        self.settings, self.protocol = settings or CompressSettings(), protocol
        check_meter(meter, self.energy_models, self.settings.runner)
        self.methods = tuple(sorted(dict.fromkeys(methods), key=lambda name: name == SCRATCH))  # after ecc
        self.budgets, self.seeds, self.quick, self.freeze = tuple(dict.fromkeys(budgets)), seeds, quick, tuple(freeze)

    @property
    def runs(self) -> list[GridRun]:
        """All runs, seed by seed, so that an interrupted comparison has complete seeds."""
        seeds = range(self.seeds)
        return [GridRun(method, text, seed) for seed in seeds for text in self.budgets for method in self.methods]

    def run(self, root: str | Path, progress: Callable[[str], None] | None = None) -> list[GridRun]:
        """Run what is not finished.

        Returns:
            The runs that failed.
        """
        root, failed = Path(root), []
        self.open(root)
        for one in self.unfinished(root):
            error = self.run_one(one, root)
            if progress is not None:
                progress(one.describe(error))
            if error is not None:
                failed.append(one)
        return failed

    # ------------------------------------------------------------ single steps, as on several machines

    def open(self, root: Path) -> None:
        """Write the config, or compare it with that of the folder."""
        config = _GridConfig(
            task=self.task.name,
            quick=self.quick,
            protocol=self.protocol,
            freeze=list(self.freeze),
            device=self.energy_models[0].origin.meter.device if self.energy_models else "",
            weights=initial_weights_checksum(self.task, self.settings),
            settings={name: value for name, value in result_settings(self.settings).items() if name != "seed"},
        )
        file = root / "grid.json"
        if not file.exists():
            check_grid_folder(root)
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadFile(f"cannot create the folder {root}: {error.strerror}.") from None
            write_record(file, config)
            return
        before, now = (_flat(one) for one in (read_record(file, _GridConfig), config))
        for name in now:
            if before.get(name) != now[name]:
                raise BadFile(
                    f"{root} was started with {name} = {before.get(name)}, and now it is {now[name]}. "
                    "Use another folder, or the same settings."
                )

    def unfinished(self, root: Path) -> list[GridRun]:
        """Runs that are not finished, failed ones included."""
        files = ("summary.json", "cell.json")
        return [one for one in self.runs if not all((one.folder(root) / name).exists() for name in files)]

    def run_one(self, one: GridRun, root: Path) -> str | None:
        """One run, and the dense network of its seed if that is not trained yet.

        Returns:
            The reason if it failed, which is also written to a file; otherwise None.
        """
        try:
            self._compress(one, root)
        except (BadFile, Interrupted):
            raise
        except EccError as error:
            self.write_failure(one, root, str(error))
            return str(error)
        return None

    def write_failure(self, one: GridRun, root: Path, error: str) -> None:
        """Write why a run has no result."""
        file = one.failure_file(root)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_record(file, GridFailure(**asdict(one), error=error))

    def prerequisite(self, one: GridRun) -> GridRun | None:
        """The run that must come first: `scratch` needs the widths of `ecc`."""
        return replace(one, method="ecc") if one.method == SCRATCH else None

    def needs_pretraining(self, seed: int, root: Path) -> bool:
        """Whether the dense network of a seed is not trained yet."""
        return self.settings.pretrain_steps > 0 and not (_dense_folder(seed, root) / "summary.json").exists()

    def pretrain(self, seed: int, root: Path) -> Task:
        """The task with the dense network of a seed, which all methods start from; it is trained if it is not yet."""
        model = copy.deepcopy(self.task.model)
        if self.settings.pretrain_steps:
            folder = _dense_folder(seed, root)
            if self.needs_pretraining(seed, root):
                self._pretrain(model.to(self.device), seed, folder)
            model.load_state_dict(load_state(folder / "dense.safetensors"))
        return replace(self.task, model=model.cpu())

    # ------------------------------------------------------------ one run

    def _compress(self, one: GridRun, root: Path) -> None:
        task, folder = self.pretrain(one.seed, root), one.folder(root)
        started = time.monotonic()
        self._reset_peak_memory()
        job = Compression(
            task,
            [parse_budget(one.budget)],
            self.energy_models,
            meter=self.meter,
            settings=replace(self._seeded(one.seed), pretrain_steps=0),
            device=self.device,
            freeze=self.freeze,
            method=self._method(one, root),
        )
        job.finetunes_unused = self.protocol == "equal"
        job.known_checks = self._known_checks(root)
        job.run(folder)
        result = GridRunInfo(
            **asdict(one),
            seconds=round(time.monotonic() - started, 3),
            sessions=len(read_record(folder / "environment.json", dict[str, list[Any]])["sessions"]),
            peak_bytes=self._peak_memory(),
        )
        one.failure_file(root).unlink(missing_ok=True)  # before the run counts as finished
        write_record(folder / "cell.json", result)

    def _known_checks(self, root: Path) -> list[tuple[dict[str, float], CostCheck]]:
        """All measurements of the finished runs, each with the costs of the dense network in its run.

        Only those of a meter or a clock: an analytic platform takes no time, and its results depend on no other run.
        """
        found = []
        unfinished = self.unfinished(root)
        for folder in (one.folder(root) for one in self.runs if one not in unfinished):
            summary = read_record(folder / "summary.json", RunSummary)
            if summary.label.startswith("measured") and "replayed from" not in summary.label:
                dense = {name: pair.dense for name, pair in summary.measured.items()}
                checks = (line for line in history_lines(folder) if line["phase"] == CostCheck.phase)
                found += [(dense, from_builtins(line, CostCheck, folder / "history.jsonl")) for line in checks]
        return found

    def _method(self, one: GridRun, root: Path) -> Method:
        first = self.prerequisite(one)
        if first is None:
            return find_method(one.method, quick=self.quick, published=self.protocol == "published")
        file = first.folder(root) / "widths.json"
        if not file.exists():
            raise EccError(
                f"ecc has no result for {one.budget} and seed {one.seed}, so scratch has no widths to train."
            )
        return Scratch(read_record(file, dict[str, int]))

    def _pretrain(self, model: torch.nn.Module, seed: int, folder: Path) -> None:
        settings = self._seeded(seed)
        with open_run(
            folder, {"verb": "pretrain", "task": self.task.name, "settings": result_settings(settings)}
        ) as run:
            stream = BatchStream(self.task, device=self.device, seed=seed)
            train(
                model,
                adam(model, settings.pretrain_lr, 0.0),
                stream,
                steps=settings.pretrain_steps,
                loss=self.task.loss,
                settings=settings.train,
                schedule=settings.schedule("pretrain"),
                run=run,
                phase="pretrain",
            )
            save_state(folder / "dense.safetensors", model.cpu().state_dict())
            run.finish({"batches": stream.total})

    def _seeded(self, seed: int) -> CompressSettings:
        return replace(self.settings, train=replace(self.settings.train, seed=seed))

    def _reset_peak_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                _CLEAR_REFS.write_text("5", encoding="ascii")  # resets VmHWM of this process, see proc(5)

    def _peak_memory(self) -> int | None:
        """Peak memory of the GPU or the process since `_reset_peak_memory`; None if the system does not tell."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if not os.access(_CLEAR_REFS, os.W_OK):
            return None
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def check_grid_folder(root: Path) -> None:
    """Check that a folder holds nothing but a comparison, or the profile and energy models of one."""
    if not root.exists() or (root / "grid.json").exists():
        return
    own = list(root.glob(".grid.json.*.tmp"))  # of a process that was killed at the start
    own += [root / name for name in (RUN_PROFILE, *WORKLOAD_PROFILES)]
    own += [root / f"{resource}.json" for resource in MEASURED_UNITS]  # energy models
    if root.is_file() or any(entry not in own for entry in root.iterdir()):
        raise BadFile(f"{root} holds files that do not belong to a comparison; use an empty or a new folder.")


def _dense_folder(seed: int, root: Path) -> Path:
    return root / f"seed-{seed}" / "dense"


def _flat(config: _GridConfig) -> dict[str, Any]:
    """Values by name, those of settings as `settings.NAME`."""
    values = asdict(config)
    settings = values.pop("settings")
    return values | {f"settings.{name}": value for name, value in settings.items()}
