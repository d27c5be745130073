"""Accuracy against measured joules on real data: all methods, budgets and seeds of one experiment, on one GPU.

    PYTHONPATH=src python3 benchmarks/evidence.py mobilenet-imagenette --data DATA --root WORK --out OUT.json

1. The network is profiled on this machine's meter, and the energy model fitted.
2. The cells of the grid run side by side in processes, as the recipe says, aiming by the energy model: nobody may
   measure while others use the card. Forms of ECC, such as the paper's own, are cells as well.
3. When the card is quiet, every final network, and now and then the dense one, is put on the scales; networks of the
   same widths once.

OUT is results/evidence/e1.json to e4.json for the pages of results; the profile is kept beside it.

The same command goes on where the last one ended, as long as WORK is there; with `--record`, a JSON that it wrote, also
where WORK is lost. `--seconds` ends it in time; the JSON tells what is finished, with the cells that failed and those
that are missing. With `--again` it first learns from what was measured, and runs again what had been predicted badly: so
methods meet their budgets although none of them measures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from evidence_rerun import learn_again
from evidence_grid import (
    DATA,
    FORMS,
    MEASURED_BATCH,
    MULTIPLE_OF,
    RECIPES,
    Grid,
    fitted,
    for_all,
    form_facts,
    the_grids,
    the_task,
    train_dense,
)
from evidence_record import bring_cells, bring_model, dense_weights, rows_of
from machine import machine, write_record
from packed import packed_data

from ecc.energy import EnergyModel
from ecc.errors import BadFile
from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, EnergySource, close_meter, find_meter
from ecc.methods.baselines.recalibration import BATCHES
from ecc.methods.cost_evaluator import CostEvaluator
from ecc.methods.grid import Cell
from ecc.task import Task, with_batch_size
from ecc.training import Interrupted
from ecc.zoo.data import ImageData
from ecc.zoo.recipe import read_recipe

SAVING = 15.0
"""Seconds in which workers that are asked to stop have done so."""
WEIGHING_TAKES = 1.5
"""Seconds; one to two."""
DENSE_EVERY = 10
"""Networks on the scales until the dense one comes again."""
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
WEIGHING: dict[str, Any] = {"repeats": (3, 3), "target_ci": PROFILE_SETTINGS.target_relative_ci}
"""Three windows as short as those of the profile: there are hundreds of networks to weigh."""
LONGEST = "amc"
"""A method whose cells take so long, mostly on the processor, that they are begun before all others."""
FIRST = ("ecc", "lcp", "netadapt")
"""Methods whose cells are begun first of the rest."""


# ---------------------------------------------------------------- cells, side by side


def worker(options: argparse.Namespace, data: ImageData) -> None:
    """Trains dense networks that nobody has, then takes cells that nobody has, until there are none."""
    torch.set_num_threads(1)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    grids = the_grids(options, recipe, the_task(options, recipe, data))
    with suppress(Interrupted):
        for seed in sorted({cell.seed for _, cell in unfinished(grids)}):
            if claimed(f"dense-{seed}", options.root):
                train_dense(grids, seed)
        while left := unfinished(grids):
            mine = next(
                (one for one in left if one[0].can_begin(one[1]) and claimed(name_of(*one), options.root)),
                None,
            )
            if mine is None:
                time.sleep(1.0)
                continue
            grid, cell = mine
            started = time.monotonic()
            try:
                reason = grid.asked.run_cell(cell, grid.runs) or "done"
            except BadFile as error:  # of this cell; the others go on, and nobody waits for it
                reason = str(error)
                grid.asked.note_failure(cell, grid.runs, reason)
            seconds = time.monotonic() - started
            name = f"{cell.method} {grid.variant}".strip()
            print(f"{name} {cell.budget} seed {cell.seed}: {reason}, {seconds:.0f} s", flush=True)


def unfinished(grids: list[Grid]) -> list[tuple[Grid, Cell]]:
    """The longest first, then seed by seed over all grids; within a seed, first those that others build on."""
    left = [(grid, cell) for grid in grids for cell in grid.asked.missing(grid.runs) if grid.failure(cell) is None]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(
        left,
        key=lambda one: (
            one[1].method != LONGEST,
            one[1].seed,
            -one[0].asked.settings.steps,
            order.get(one[1].method, len(FIRST)),
        ),
    )


def name_of(grid: Grid, cell: Cell) -> str:
    return f"{cell.method}-{grid.variant}-{cell.budget}-{cell.seed}"


def claimed(name: str, root: Path) -> bool:
    """Whether what has this name is ours from now on; it is another worker's if the file is there."""
    try:
        (root / "claims" / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def started_workers(options: argparse.Namespace, data: ImageData) -> list[Any]:
    """They train the dense networks first."""
    shutil.rmtree(options.root / "claims", ignore_errors=True)  # of workers that are no more
    (options.root / "claims").mkdir()
    spawn = torch.multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(options, data)) for _ in range(options.processes)]
    if options.mps:
        os.environ[PIPES] = str(options.root / "mps")  # theirs: this process has its context already
    for process in workers:
        process.start()
    os.environ.pop(PIPES, None)
    return workers


@contextmanager
def side_by_side(options: argparse.Namespace) -> Iterator[None]:
    """Runs CUDA's multi-process service if asked for; after it the card is free for the scales, which do not share."""
    if not options.mps:
        yield
        return
    folder = options.root / "mps"
    folder.mkdir(exist_ok=True)
    places = os.environ | {PIPES: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=places, check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, env=places, check=True)


def finish(workers: list[Any], until: float) -> None:
    """Waits until they are done, or asks them to stop in time for the scales."""
    for process in workers:
        process.join(max(0.0, until - time.monotonic()))
    for process in workers:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGTERM)  # they save their state
    until = max(until, time.monotonic()) + SAVING
    for process in workers:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()


def time_after(cells: int, seconds: float) -> float:
    """What stopping and weighing take of a call; where there are too many cells, some are measured in the next."""
    return SAVING + 5 + min(WEIGHING_TAKES * cells, seconds / 5)


# ---------------------------------------------------------------- the scales


def weigh(grids: list[Grid], task: Task, batch: int, source: EnergySource, until: float) -> None:
    """Every finished network that has not been measured, and the dense one among them, in the cell's measured.json."""
    energy = grids[0].asked.energy
    assert isinstance(energy, EnergyModel)
    example = with_batch_size(task.example_input, batch)
    graph = trace_channels(task.model, example, verify=False)
    scales = CostEvaluator(task.model, graph, example, {energy.resource: energy}, source, **WEIGHING)
    known: dict[str, str] = {}
    waiting = []
    for grid, cell in [(one, cell) for one in grids for cell in one.finished()]:
        file = cell.folder(grid.runs) / "measured.json"
        if file.exists():
            known[widths_of(grid, cell)] = file.read_text(encoding="utf-8")
        else:
            waiting.append((grid, cell, file))
    waiting.sort(key=lambda one: (one[1].seed, one[1].method != "ecc"))  # should time run out
    dense, weighings = scales({}), 0
    for grid, cell, file in waiting:
        widths = widths_of(grid, cell)
        if widths not in known:
            if time.monotonic() > until:
                continue
            weighings += 1
            if weighings % DENSE_EVERY == 0:
                dense = scales({})
            found = scales(json.loads(widths))
            facts = {
                "joules": found.amounts["energy"],
                "dense_joules": dense.amounts["energy"],
                "seconds": found.amounts["latency"],
                "dense_seconds": dense.amounts["latency"],
                "relative_ci": found.relative_ci,
                "label": found.label,
            }
            known[widths] = json.dumps(facts) + "\n"
        file.write_text(known[widths], encoding="utf-8")


def widths_of(grid: Grid, cell: Cell) -> str:
    """As JSON, the same for equal widths."""
    return json.dumps(grid.read(cell, "widths.json"), sort_keys=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(DATA))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True, help="where runs grow; keep it to go on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--mps", action="store_true", help="kernels of the processes run side by side, by CUDA's MPS")
    parser.add_argument(
        "--again", action="store_true", help="learn from what was measured, and run again what had been predicted badly"
    )
    parser.add_argument("--record", type=Path, help="of an earlier run, whose cells are not run again")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="variants in it that are")
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="in which this call ends; cells are stopped earlier"
    )
    parser.add_argument("--samples", type=int, default=100, help="networks in the profile")
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
    batch = MEASURED_BATCH[options.name]
    source = find_meter(options.meter, device_type=options.device)
    try:
        if options.record is not None:
            bring_model(options.record, options.root)
        energy = fitted(task, source, options)
        print(f"{time.monotonic() - started:.0f} s: energy model, error {energy.quality['mean']:.2%}", flush=True)
        grids = the_grids(options, recipe, task)
        for grid in grids:
            grid.asked.begin(grid.runs)
        if options.record is not None:
            print(f"{bring_cells(options.record, grids, options.without)} cells of {options.record}", flush=True)
        if options.again:
            learn_again(grids, options.root)
            energy, grids = fitted(task, source, options), the_grids(options, recipe, task)
        with side_by_side(options):
            workers = started_workers(options, data)
            finish(workers, started + options.seconds - time_after(len(unfinished(grids)), options.seconds))
        print(f"{time.monotonic() - started:.0f} s: {len(unfinished(grids))} cells missing", flush=True)
        weigh(grids, task, batch, source, started + options.seconds - 5)
    finally:
        close_meter(source)
    record = {
        "what": f"accuracy against joules: {options.name}, packed copy of {DATA[options.name]}",
        "environment": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "measured_batch": batch,
        "width_multiple": MULTIPLE_OF.get(options.name, 8),
        "meter": source.describe().to_dict(),
        "recalibration_batches": BATCHES,
        "judged_on": len(data.held_out),
        "tested_on": len(data.test),
        "settings": {key: value for key, value in vars(grids[0].asked.settings).items() if key != "seed"},
        "variants": {grid.variant: form_facts(FORMS[options.name][grid.variant]) for grid in grids[1:]},
        "full_widths": trace_channels(task.model, task.example_input, verify=False).full_widths,
        "fit": {key: value for key, value in energy.quality.items() if key != "families"},
        "dense_sha256": dense_weights(grids[0]),
        "rows": rows_of(grids),
    }
    write_record(record, options.out)
    print(f"{time.monotonic() - started:.0f} s: written", flush=True)


if __name__ == "__main__":
    main()
