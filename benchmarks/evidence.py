"""Accuracy against measured joules on real data: all methods, budgets and seeds of one experiment, on one GPU.

    PYTHONPATH=src python3 benchmarks/evidence.py mobilenet-imagenette --data DATA --root WORK --out OUT.json

1. The network is profiled on this machine's meter, and the energy model fitted.
2. The cells of the grid run side by side in processes, as the recipe says, aiming by the energy model: nobody may
   measure while others use the card.
3. When the card is quiet, every final network, and now and then the dense one, is put on the scales.

OUT is results/evidence/e1.json to e4.json for the pages of results; e1-paper.json beside e1.json adds a form of ECC.

The same command goes on where the last one ended, as long as WORK is there. `--seconds` ends it in time; the JSON tells
what is finished, with the cells that failed and those that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from machine import machine, write_record
from packed import packed_data, packed_task
from profile_networks import profiled

from ecc.energy import EnergyModel, fit
from ecc.graph import trace_channels
from ecc.measure import Source, close_meter, find_meter
from ecc.methods.compare import Cell, Comparison
from ecc.methods.recalibration import BATCHES
from ecc.methods.weighing import Scales
from ecc.task import Task, with_batch
from ecc.training import Interrupted
from ecc.zoo.data import ImageData, Packed
from ecc.zoo.recipe import Recipe, read_recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
DATA = {"mobilenet-imagenette": "imagenette", "alexnet-imagenette": "imagenette", "erfnet-camvid": "camvid",
        "resnet56-cifar10": "cifar10"}  # fmt: skip
MEASURED_BATCH = {"mobilenet-imagenette": 64, "alexnet-imagenette": 128, "erfnet-camvid": 16, "resnet56-cifar10": 1024}
"""Items of one measured inference: many, so that the floor of the device lies low."""
DENSE_EVERY = 10
"""Networks on the scales until the dense one comes again."""


def the_task(options: argparse.Namespace, recipe: Recipe, data: ImageData) -> Task:
    height, width = recipe.size or (None, None)
    size = None if height is None or width is None else (height, width)
    return packed_task(
        recipe.task, DATA[options.name], options.data, device=options.device, size=size, batch=recipe.batch_size,
        data=data, tell=lambda _: None,
    )  # fmt: skip


def for_all(data: ImageData) -> ImageData:
    """The same in memory that processes share."""
    splits = {name: getattr(data, name) for name in ("train", "held_out", "test")}
    return replace(data, **{name: Packed(s.images.share_memory_(), s.labels) for name, s in splits.items()})


def fitted(task: Task, batch: int, source: Source, root: Path, rows: int, device: str) -> EnergyModel:
    """The energy model of this machine, fitted once."""
    file = root / "energy.json"
    if not file.exists():
        fit(profiled(task, batch, source, root / "network.profile", rows, device)).save(file)
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


def worker(options: argparse.Namespace, data: ImageData) -> None:
    """Takes cells that nobody has, until there are none."""
    torch.set_num_threads(1)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    grid = the_grid(options, recipe, the_task(options, recipe, data))
    runs = options.root / "runs"
    with suppress(Interrupted):
        while left := [cell for cell in grid.missing(runs) if failure(grid, cell, runs) is None]:
            mine = next((cell for cell in left if can_begin(grid, cell, runs) and claimed(cell, options.root)), None)
            if mine is None:
                time.sleep(1.0)
                continue
            started = time.monotonic()
            reason = grid.run_cell(mine, runs) or "done"
            seconds = time.monotonic() - started
            print(f"{mine.method} {mine.budget} seed {mine.seed}: {reason}, {seconds:.0f} s", flush=True)


def claimed(cell: Cell, root: Path) -> bool:
    """Whether the cell is ours from now on; it is another worker's if the file is there."""
    try:
        (root / "claims" / f"{cell.method}-{cell.budget}-{cell.seed}").touch(exist_ok=False)
    except FileExistsError:
        return False
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


def run_cells(options: argparse.Namespace, data: ImageData, until: float) -> None:
    """All workers until they are done, or asked to stop in time for the scales."""
    shutil.rmtree(options.root / "claims", ignore_errors=True)  # of workers that are no more
    (options.root / "claims").mkdir()
    spawn = torch.multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(options, data)) for _ in range(options.processes)]
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
    """Every finished network that has not been weighed, and the dense one among them, in the cell's weighed.json."""
    energy = grid.energy if isinstance(grid.energy, EnergyModel) else grid.energy[0]
    example = with_batch(task.example_input, batch)
    graph = trace_channels(task.model, example, proven=False)
    scales = Scales(task.model, graph, example, {energy.resource: energy}, source)
    missing = grid.missing(runs)
    cells = [cell for cell in grid.cells if cell not in missing and not (cell.folder(runs) / "weighed.json").exists()]
    dense = scales({})
    for number, cell in enumerate(cells, start=1):
        if time.monotonic() > until:
            break
        if number % DENSE_EVERY == 0:
            dense = scales({})
        file = cell.folder(runs) / "weighed.json"
        found = scales(json.loads((cell.folder(runs) / "widths.json").read_text(encoding="utf-8")))
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
    data = for_all(packed_data(DATA[options.name], options.data, options.limit))
    task = the_task(options, recipe, for_all(data))  # its copies on the GPU are not for the workers
    batch, runs = MEASURED_BATCH[options.name], options.root / "runs"
    source = find_meter(options.meter, runs_on=options.device)
    try:
        energy = fitted(task, batch, source, options.root, options.rows, options.device)
        print(f"{time.monotonic() - started:.0f} s: energy model, error {energy.quality['mean']:.2%}", flush=True)
        grid = the_grid(options, recipe, task)
        grid.begin(runs)
        for seed in range(grid.seeds):
            grid.train_dense(seed, runs)
        print(f"{time.monotonic() - started:.0f} s: dense networks", flush=True)
        # One weighing takes about a second.
        run_cells(options, data, started + options.seconds - 20 - 1.2 * min(len(grid.cells), options.seconds / 8))
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
        "recalibration_batches": BATCHES,
        "settings": {key: value for key, value in vars(grid.settings).items() if key != "seed"},
        "full_widths": trace_channels(task.model, task.example_input, proven=False).full_widths,
        "fit": {key: value for key, value in energy.quality.items() if key != "families"},
        "rows": rows_of(grid, runs),
    }
    write_record(record, options.out)
    print(f"{time.monotonic() - started:.0f} s: written", flush=True)


if __name__ == "__main__":
    sys.exit(main())
