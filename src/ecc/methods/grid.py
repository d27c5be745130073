"""`Comparison`: methods, budgets and seeds in one grid of run folders, at equal batches.

    RUNS/seed-0/dense/            the dense network of each seed, trained once and given to all methods
    RUNS/seed-0/ecc-50/           one cell: the run folder of a compression
    RUNS/grid.json                what was asked

A cell that is finished is not run again, one that was interrupted goes on, and one that failed is written down with its
reason, never left out. Tables and figures are made from the folders alone (`ecc.report.compare`).
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ecc.constants import RUN_PROFILE, SCRATCH
from ecc.energy import EnergyModel
from ecc.energy.budget import parse_budget
from ecc.errors import BadFile, EccError
from ecc.io import read_text, write_text
from ecc.measure import EnergySource
from ecc.task import Task
from ecc.training import BatchStream, Interrupted, fused_on_gpu, load_state, open_run, save_state, train

from .base import Method, check_needs_held_out
from .baselines.scratch import Scratch
from .compression import Compression
from .registry import METHODS, find_method
from .runner import result_settings, weights_of
from .settings import CompressSettings

_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class GridRun:
    """One method, one budget, one seed."""

    method: str
    budget: str
    seed: int

    def folder(self, root: Path) -> Path:
        """Where its run is."""
        budget = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.budget.rstrip("%"))
        return root / f"seed-{self.seed}" / f"{self.method}-{budget}"


class Comparison:
    """A grid of compressions of one task.

    Args:
        task: With batches, a loss, and scores on test and held-out data.
        energy: Models of the costs that budgets are about.
        methods: Names, see `METHODS`; and `scratch`, which trains the widths that `ecc` found from random weights.
        budgets: As for `parse_budget`.
        seeds: How many; from 0 on.
        source: Weighs every result; None trusts the models, and says so.
        settings: The same for all cells, but for the seed.
        device: Where to train.
        freeze: Modules whose outputs are kept whole, as for `trace_channels`.
        quick: Whether methods search for a tenth of their time: to see it work, not to compare.

    Raises:
        BadTask: If a method needs held-out data, and the task has none.
        EccError: If a method or a budget is unknown, or there is none.
    """

    def __init__(
        self,
        task: Task,
        energy: EnergyModel | Sequence[EnergyModel],
        *,
        methods: Sequence[str],
        budgets: Sequence[str],
        seeds: int = 3,
        source: EnergySource | None = None,
        settings: CompressSettings | None = None,
        device: torch.device | str = "cpu",
        freeze: Sequence[str] = (),
        quick: bool = False,
    ) -> None:
        if not methods or not budgets or seeds < 1:
            raise EccError("a comparison needs at least one method, one budget and one seed.")
        for name in methods:
            if name not in METHODS and name != SCRATCH:
                raise EccError(f"there is no method {name!r}; there are {', '.join((*METHODS, SCRATCH))}.")
        if SCRATCH in methods and "ecc" not in methods:
            raise EccError("scratch trains the widths that ecc found; compare ecc as well.")
        for name in methods:
            check_needs_held_out(None if name == SCRATCH else find_method(name), task)
        folders: dict[Path, str] = {}
        for text in budgets:
            parse_budget(text)
            first = folders.setdefault(GridRun("", text, 0).folder(Path()), text)
            if first != text:
                raise EccError(f"budgets {first!r} and {text!r} would share a folder; compare them in two grids.")
        self.task, self.energy, self.source, self.device = task, energy, source, torch.device(device)
        self.settings = settings or CompressSettings()
        # What others build on comes first.
        self.methods = tuple(sorted(dict.fromkeys(methods), key=lambda name: name == SCRATCH))
        self.budgets, self.seeds, self.quick, self.freeze = tuple(dict.fromkeys(budgets)), seeds, quick, tuple(freeze)

    @property
    def cells(self) -> list[GridRun]:
        """All of them, seed by seed, so that an interrupted grid has whole seeds."""
        return [
            GridRun(method, budget, seed)
            for seed in range(self.seeds)
            for budget in self.budgets
            for method in self.methods
        ]

    def run(self, root: str | Path, progress: Callable[[str], None] | None = None) -> list[GridRun]:
        """Runs the cells that are not finished.

        Args:
            root: The folder of the grid.
            progress: Is told about each cell.

        Returns:
            The cells that failed; their folders hold the reason.

        Raises:
            BadFile: If the folder holds another grid.
            Interrupted: If it was asked to stop; the same call goes on.
        """
        root, tell = Path(root), progress or (lambda _: None)
        self.begin(root)
        failed = []
        for cell in self.missing(root):
            reason = self.run_cell(cell, root)
            tell(told(cell, reason))
            if reason is not None:
                failed.append(cell)
        return failed

    # ------------------------------------------------------------ one by one, as on several machines

    def missing(self, root: Path) -> list[GridRun]:
        """The cells that are not finished; those that failed among them."""
        return [
            cell
            for cell in self.cells
            if not all((cell.folder(root) / name).exists() for name in ("summary.json", "cell.json"))
        ]

    def run_cell(self, cell: GridRun, root: Path) -> str | None:
        """Runs one cell, and the dense network of its seed if that is not trained yet.

        Returns:
            Why it failed, which is written down; None if it is done.

        Raises:
            BadFile: If its folder holds another run, or another process works in it.
            Interrupted: If it was asked to stop; the same call goes on.
        """
        try:
            self._run(cell, root)
        except (BadFile, Interrupted):
            raise
        except EccError as error:
            self.note_failure(cell, root, str(error))
            return str(error)
        return None

    def note_failure(self, cell: GridRun, root: Path, reason: str) -> None:
        """Writes down why a cell has no result."""
        file = _failure(cell.folder(root))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps({**asdict(cell), "error": reason}) + "\n")

    def built_on(self, cell: GridRun) -> GridRun | None:
        """The cell that must come first: `scratch` takes its widths from `ecc`."""
        return replace(cell, method="ecc") if cell.method == SCRATCH else None

    def needs_dense(self, seed: int, root: Path) -> bool:
        """Whether the dense network of a seed is still to be trained."""
        return self.settings.pretrain_steps > 0 and not (_dense_folder(seed, root) / "summary.json").exists()

    def train_dense(self, seed: int, root: Path) -> None:
        """Trains the dense network of a seed, which all its cells start from."""
        self._trained(seed, root)

    # ------------------------------------------------------------ a cell

    def _run(self, cell: GridRun, root: Path) -> None:
        task = self._trained(cell.seed, root)
        started = time.monotonic()
        self._forget_peak()
        job = Compression(
            task,
            [parse_budget(cell.budget)],
            self.energy,
            source=self.source,
            settings=replace(self.settings, pretrain_steps=0, train=replace(self.settings.train, seed=cell.seed)),
            device=self.device,
            freeze=self.freeze,
            method=self._method(cell, root),
        )
        folder = cell.folder(root)
        job.run(folder)
        facts = {
            **asdict(cell),
            "seconds": round(time.monotonic() - started, 3),  # of this session
            "sessions": len(json.loads((folder / "environment.json").read_text(encoding="utf-8"))["sessions"]),
            "peak_bytes": self._peak_bytes(),
        }
        _failure(folder).unlink(missing_ok=True)  # before the cell counts as finished, and is not come back to
        write_text(folder / "cell.json", json.dumps(facts) + "\n")

    def _method(self, cell: GridRun, root: Path) -> Method | None:
        foundation = self.built_on(cell)
        if foundation is None:
            return find_method(cell.method, quick=self.quick)
        file = foundation.folder(root) / "widths.json"
        if not file.exists():
            raise EccError(f"ecc found no widths for {cell.budget} of seed {cell.seed}, so there is nothing to train.")
        return Scratch(_widths(file))

    def _trained(self, seed: int, root: Path) -> Task:
        """The task with the dense network of a seed, which all methods start from."""
        model = copy.deepcopy(self.task.model)
        if self.settings.pretrain_steps:
            folder = _dense_folder(seed, root)
            if self.needs_dense(seed, root):
                self._train_dense(model.to(self.device), seed, folder)
            model.load_state_dict(load_state(folder / "dense.safetensors"))
        return replace(self.task, model=model.cpu())

    def _train_dense(self, model: torch.nn.Module, seed: int, folder: Path) -> None:
        settings = replace(self.settings, train=replace(self.settings.train, seed=seed))
        with open_run(folder, {"verb": "dense", "task": self.task.name, "settings": result_settings(settings)}) as run:
            fused = fused_on_gpu(model.parameters())
            optimizer = torch.optim.Adam(model.parameters(), lr=settings.pretrain_lr, fused=fused)
            stream = BatchStream(self.task, device=self.device, seed=seed)
            train(
                model,
                optimizer,
                stream,
                loss=self.task.loss,
                steps=settings.pretrain_steps,
                settings=settings.train,
                schedule=settings.schedule("pretrain"),
                run=run,
                phase="pretrain",
            )
            save_state(folder / "dense.safetensors", model.cpu().state_dict())
            run.finish({"batches": stream.total})

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):
                _CLEAR.write_text("5", encoding="ascii")  # resets VmHWM of this process, see proc(5)

    def _peak_bytes(self) -> int | None:
        """The most memory since `_forget_peak`: of the GPU, or of the process; None where the system does not tell."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if not os.access(_CLEAR, os.W_OK):
            return None
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

    @property
    def _device_name(self) -> str:
        """The device that joules are about; a better model of the same one may take over."""
        first = self.energy if isinstance(self.energy, EnergyModel) else self.energy[0]
        return first.origin.meter.device

    def begin(self, root: Path) -> None:
        """Writes down what is asked, or compares it with what was asked before: only more cells may be asked for.

        Raises:
            BadFile: If the folder holds another grid, or something else.
        """
        asked: dict[str, Any] = {
            "task": self.task.name,
            "quick": self.quick,
            "freeze": list(self.freeze),
            "device": self._device_name,
            "weights": weights_of(self.task, self.settings),
            "settings": {name: value for name, value in result_settings(self.settings).items() if name != "seed"},
        }
        file = root / "grid.json"
        if not file.exists():
            check_grid_folder(root)
            try:
                root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadFile(f"cannot make the folder {root}: {error.strerror}.") from None
            write_text(file, json.dumps(asked, indent=1) + "\n")
            return
        try:
            before = json.loads(read_text(file))
        except (ValueError, RecursionError):
            raise BadFile(f"{file} cannot be read; restore it from a copy or start anew.") from None
        names = [name for name in asked if name != "settings"]
        for name in (*names, *(f"settings.{key}" for key in asked["settings"])):
            then, now = _at(before, name), _at(asked, name)
            if then != now:
                raise BadFile(f"{root} was begun with {name} = {then}, and now it is {now}. Give another folder.")


def check_grid_folder(root: Path) -> None:
    """Refuse a folder that holds something else than a comparison, or the profile and energy models of one.

    Raises:
        BadFile: If it does, or is a file.
    """
    if not root.exists() or (root / "grid.json").exists():
        return
    own = list(root.glob(".grid.json.*.tmp"))  # of a grid that was killed before it had begun
    own += [root / name for name in (RUN_PROFILE, "energy.json", "latency.json")]
    if root.is_file() or any(entry not in own for entry in root.iterdir()):
        raise BadFile(f"{root} holds other files than a comparison and is left as it is. Give an empty or a new folder.")


def told(cell: GridRun, reason: str | None) -> str:
    """What became of a cell, in words."""
    name = f"{cell.method} {cell.budget} seed {cell.seed}"
    return f"{name}: done" if reason is None else f"{name}: failed: {reason}"


def _dense_folder(seed: int, root: Path) -> Path:
    return root / f"seed-{seed}" / "dense"


def _failure(folder: Path) -> Path:
    """Beside the run's folder, which may not even have been made."""
    return folder.with_name(f"{folder.name}.failed.json")


def _widths(file: Path) -> dict[str, int]:
    try:
        found = json.loads(read_text(file))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(type(width) is int for width in found.values()):
        raise BadFile(f"{file} holds no widths; restore it from a copy, or run its cell again.")
    return found


def _at(data: Any, name: str) -> Any:
    for key in name.split("."):
        data = data.get(key) if isinstance(data, dict) else None
    return data
