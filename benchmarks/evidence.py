"""Accuracy against measured joules on real data: all methods, budgets and seeds of one experiment, on one GPU.

    PYTHONPATH=src python3 benchmarks/evidence.py mobilenet-imagenette --data DATA --root WORK --out OUT.json

1. The network is profiled on this machine's meter, and the energy model fitted.
2. The cells of the grid run side by side in processes, as the recipe says, aiming by the energy model: nobody may
   measure while others use the card.
3. When the card is quiet, every final network, and the dense one between them, is put on the scales.

OUT is results/evidence/e1.json to e4.json for the pages of results; e1-paper.json beside e1.json adds a form of ECC.

The same command goes on where the last one ended, as long as WORK is there. `--seconds` ends it in time; the JSON tells
what is finished, with the cells that failed and those that are missing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import machine
from packed import packed_task

from ecc.energy import EnergyModel, fit
from ecc.errors import BadFile
from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, Analytic, Source, close_meter, find_meter, profile
from ecc.methods.compare import Cell, Comparison
from ecc.methods.weighing import Scales
from ecc.task import Task, with_batch
from ecc.training import Interrupted
from ecc.zoo.recipe import Recipe, read_recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
DATA = {"mobilenet-imagenette": "imagenette", "alexnet-imagenette": "imagenette", "erfnet-camvid": "camvid",
        "resnet56-cifar10": "cifar10"}  # fmt: skip
MEASURED_BATCH = {"mobilenet-imagenette": 64, "alexnet-imagenette": 128, "erfnet-camvid": 4, "resnet56-cifar10": 256}
"""Items of one measured inference: large enough that the floor of the device is below a quarter of the dense joules."""


def the_task(name: str, recipe: Recipe, data: Path, device: str, limit: int | None) -> Task:
    height, width = recipe.size or (None, None)
    size = None if height is None or width is None else (height, width)
    return packed_task(recipe.task, DATA[name], data, device=device, size=size, batch=recipe.batch_size, limit=limit)


def profiled(task: Task, batch: int, source: Source, root: Path, rows: int, device: str) -> EnergyModel:
    """The energy model of this machine, fitted once."""
    file = root / "energy.json"
    if not file.exists():
        example = with_batch(task.example_input, batch)
        graph = trace_channels(task.model, example, proven=False)
        settings = None
        if not isinstance(source, Analytic):
            quick = {"window_seconds": 0.3, "min_ticks": 3, "cudnn_autotune": False}
            settings = replace(PROFILE_SETTINGS, mode="graph", precision="tf32", **quick)  # type: ignore[arg-type]
        found = profile(
            task.model, graph, example, source, root / "network.profile", rows=rows, multiple_of=8, reference_every=20,
            **({} if settings is None else {"settings": settings, "device": device}),  # type: ignore[arg-type]
        )  # fmt: skip
        fit(found).save(file)
    return EnergyModel.load(file)


def the_grid(options: argparse.Namespace, recipe: Recipe, task: Task) -> Comparison:
    settings = replace(recipe.settings, **json.loads(options.settings))
    return Comparison(
        task,
        EnergyModel.load(options.root / "energy.json"),
        methods=options.methods or recipe.methods or [],
        budgets=options.budgets or recipe.budgets or [],
        seeds=options.seeds or recipe.seeds or 1,
        settings=settings,
        device=options.device,
    )


# ---------------------------------------------------------------- cells, side by side


def worker(options: argparse.Namespace, number: int) -> None:
    """Takes cells that nobody has, until there are none."""
    torch.set_num_threads(2)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    grid = the_grid(options, recipe, the_task(options.name, recipe, options.data, options.device, options.limit))
    runs = options.root / "runs"
    with suppress(Interrupted):
        while left := [cell for cell in grid.missing(runs) if failure(grid, cell, runs) is None]:
            ready = [cell for cell in left if can_begin(grid, cell, runs)]
            turned = ready[number % len(ready) :] + ready[: number % len(ready)] if ready else []
            if not any(took(grid, cell, runs) for cell in turned):
                time.sleep(1.0)


def took(grid: Comparison, cell: Cell, runs: Path) -> bool:
    """Runs a cell, unless another worker has it."""
    if cell not in grid.missing(runs):
        return False
    try:
        reason = grid.run_cell(cell, runs)
    except BadFile:
        return False
    print(f"{cell.method} {cell.budget} seed {cell.seed}: {reason or 'done'}", flush=True)
    return True


def failure_of(cell: Cell, runs: Path) -> Path:
    folder = cell.folder(runs)
    return folder.with_name(f"{folder.name}.failed.json")


def failure(grid: Comparison, cell: Cell, runs: Path) -> str | None:
    """Why a cell will never be finished, if so: it failed, or that which it builds on."""
    first = grid.built_on(cell)
    for one in (cell, first):
        if one is not None and (file := failure_of(one, runs)).exists():
            reason = str(json.loads(file.read_text(encoding="utf-8"))["error"])
            return reason if one is cell else f"builds on {one.method}, which failed: {reason}"
    return None


def can_begin(grid: Comparison, cell: Cell, runs: Path) -> bool:
    first = grid.built_on(cell)
    return first is None or first not in grid.missing(runs)


def run_cells(options: argparse.Namespace, until: float) -> None:
    """All workers until they are done, or asked to stop in time for the scales."""
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(options, number)) for number in range(options.processes)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(max(0.0, until - time.monotonic()))
    for process in workers:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGTERM)  # they save their state
    for process in workers:
        process.join(20.0)
        if process.is_alive():
            process.kill()


# ---------------------------------------------------------------- the scales


def weigh(grid: Comparison, task: Task, batch: int, source: Source, runs: Path, until: float) -> None:
    """Every finished network that has not been weighed, each beside the dense one, in the cell's weighed.json."""
    energy = grid.energy if isinstance(grid.energy, EnergyModel) else grid.energy[0]
    example = with_batch(task.example_input, batch)
    graph = trace_channels(task.model, example, proven=False)
    scales = Scales(task.model, graph, example, {energy.resource: energy}, source)
    missing = grid.missing(runs)
    for cell in grid.cells:
        file = cell.folder(runs) / "weighed.json"
        if cell in missing or file.exists() or time.monotonic() > until:
            continue
        widths = json.loads((cell.folder(runs) / "widths.json").read_text(encoding="utf-8"))
        dense, found = scales({}), scales(widths)
        facts = {
            "joules": found.amounts["energy"],
            "dense_joules": dense.amounts["energy"],
            "seconds": found.amounts["latency"],
            "dense_seconds": dense.amounts["latency"],
            "relative_ci": found.relative_ci,
            "label": found.label,
        }
        file.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def rows_of(grid: Comparison, runs: Path) -> list[dict[str, Any]]:
    """What became of every cell."""
    rows = []
    for cell in grid.cells:
        folder = cell.folder(runs)
        row: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "seed": cell.seed}
        if cell not in grid.missing(runs):
            summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            facts = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
            keys = ("scores", "widths", "batches", "parameters", "macs")
            row |= {key: summary[key] for key in keys if key in summary}
            row |= {"predicted": summary["budgets"]["energy"], "cell_seconds": facts["seconds"]}
            if (folder / "weighed.json").exists():
                row["weighed"] = json.loads((folder / "weighed.json").read_text(encoding="utf-8"))
        else:
            row["missing"] = failure(grid, cell, runs) or "not finished"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(DATA))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True, help="where runs grow; keep it to go on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=540.0, help="in which this call ends")
    parser.add_argument("--rows", type=int, default=100, help="networks in the profile")
    parser.add_argument("--limit", type=int, help="images of each split; all by default")
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--budgets", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--settings", default="{}", help="JSON over the recipe's settings")
    options = parser.parse_args()
    started = time.monotonic()
    options.root.mkdir(parents=True, exist_ok=True)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    task = the_task(options.name, recipe, options.data, options.device, options.limit)
    batch, runs = MEASURED_BATCH[options.name], options.root / "runs"
    source = find_meter(options.meter, runs_on=options.device)
    try:
        energy = profiled(task, batch, source, options.root, options.rows, options.device)
        print(f"{time.monotonic() - started:.0f} s: energy model, error {energy.quality['mean']:.2%}", flush=True)
        grid = the_grid(options, recipe, task)
        grid.begin(runs)
        for seed in range(grid.seeds):
            grid.train_dense(seed, runs)
        print(f"{time.monotonic() - started:.0f} s: dense networks", flush=True)
        # One weighing takes about two seconds with that of the dense network beside it.
        run_cells(options, started + options.seconds - 30 - 2.0 * min(len(grid.cells), options.seconds / 10))
        print(f"{time.monotonic() - started:.0f} s: {len(grid.missing(runs))} cells missing", flush=True)
        weigh(grid, task, batch, source, runs, started + options.seconds - 5)
    finally:
        close_meter(source)
    record = {
        "what": f"accuracy against joules: {options.name}, packed copy of {DATA[options.name]}",
        "environment": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "measured_batch": batch,
        "meter": source.describe().to_dict(),
        "settings": {key: value for key, value in vars(grid.settings).items() if key != "seed"},
        "full_widths": trace_channels(task.model, task.example_input, proven=False).full_widths,
        "fit": {key: value for key, value in energy.quality.items() if key != "families"},
        "rows": rows_of(grid, runs),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - started:.0f} s: written", flush=True)


if __name__ == "__main__":
    sys.exit(main())
