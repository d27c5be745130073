"""Accuracy against measured joules on real data: all methods, budgets and seeds of one experiment, on one GPU.

    PYTHONPATH=src python3 benchmarks/evidence.py mobilenet-imagenette --data DATA --root WORK --out OUT.json

1. The network is profiled on this machine's meter, and the energy model fitted.
2. The cells of the grid run side by side in processes, as the recipe says, aiming by the energy model: nobody may
   measure while others use the card. Forms of ECC, such as the paper's own, are cells as well.
3. When the card is quiet, every final network, and now and then the dense one, is put on the scales; networks of the
   same widths once.

OUT is results/evidence/e1.json to e4.json for the pages of results; the profile is kept beside it.

The same command goes on where the last one ended, as long as WORK is there. `--seconds` ends it in time; the JSON tells
what is finished, with the cells that failed and those that are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from machine import machine, write_record
from packed import packed_data, packed_task
from profile_networks import profiled

from ecc.energy import EnergyModel, fit
from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, Source, close_meter, find_meter
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
MEASURED_BATCH = {"mobilenet-imagenette": 64, "alexnet-imagenette": 128, "erfnet-camvid": 32, "resnet56-cifar10": 1024}
"""Items of one measured inference: many, so that the floor of the device lies low."""
MULTIPLE_OF = {"resnet56-cifar10": 4}
"""Of which widths are multiples; 8 for the others, with which ResNet-56 cannot go down to half of its joules."""
DENSE_EVERY = 10
"""Networks on the scales until the dense one comes again."""
JUDGED = {"imagenette": 512, "cifar10": 2048, "camvid": 24}
"""Held-out images, evenly spread, by which all methods judge candidates: searches judge hundreds of these."""

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
WEIGHING: dict[str, Any] = {"repeats": (3, 3), "target_ci": PROFILE_SETTINGS.target_relative_ci}
"""Three windows as short as those of the profile: there are hundreds of networks to weigh."""
FIRST = ("ecc", "amc", "lcp", "netadapt")
"""Methods whose cells are begun first."""


@dataclass(frozen=True)
class Form:
    """ECC with other settings than the recipe's, from the same dense networks."""

    settings: dict[str, Any]
    budgets: tuple[str, ...] | None = None
    """Of the recipe's; None for all."""


def paper(width_lr: float, penalty: float) -> Form:
    """Algorithm 1 with its own metric, and a teacher by its logits; beta and rho let it arrive within so few steps."""
    settings = {"dynamics": "paper", "round_to": 1, "temperature": None, "width_lr": width_lr, "penalty": penalty}
    return Form(settings, ("65%", "50%", "35%"))


FORMS = {
    "mobilenet-imagenette": {"paper": paper(30.0, 5000.0)},
    "alexnet-imagenette": {"paper": paper(60.0, 30000.0)},
    "erfnet-camvid": {"paper": paper(0.5, 300.0)},
    "resnet56-cifar10": {"paper": paper(3.0, 100.0), "long": Form({"steps": 2500, "tune_steps": 2000}, ("50%",))},
}


def the_task(options: argparse.Namespace, recipe: Recipe, data: ImageData) -> Task:
    height, width = recipe.size or (None, None)
    size = None if height is None or width is None else (height, width)
    return packed_task(
        recipe.task, DATA[options.name], options.data, device=options.device, size=size, batch=recipe.batch_size,
        data=data, tell=lambda _: None,
    )  # fmt: skip


def for_all(data: ImageData) -> ImageData:
    """The same in memory that processes share, with as much held out as is judged by."""
    splits = {name: getattr(data, name) for name in ("train", "held_out", "test")}
    held, judged = splits["held_out"], JUDGED[data.name]
    if len(held) > judged:
        rows = torch.linspace(0, len(held) - 1, judged).long()
        splits["held_out"] = Packed(held.images[rows], held.labels[rows])
    return replace(data, **{name: Packed(s.images.share_memory_(), s.labels) for name, s in splits.items()})


def fitted(task: Task, source: Source, options: argparse.Namespace) -> EnergyModel:
    """The energy model of this machine, fitted once."""
    file, batch, step = options.root / "energy.json", MEASURED_BATCH[options.name], MULTIPLE_OF.get(options.name, 8)
    if not file.exists():
        path = options.root / "network.profile"
        found = profiled(task, batch, source, path, options.rows, options.device, step)
        found.save(options.root / "profile.gz")
        fit(found).save(file)
    if (options.root / "profile.gz").exists():  # not where the model was brought along
        shutil.copy(options.root / "profile.gz", options.out.with_suffix(".profile.gz"))
    return EnergyModel.load(file)


@dataclass(frozen=True)
class Grid:
    """The comparison, or a form of ECC beside it."""

    form: str
    """Empty for the comparison itself."""
    asked: Comparison
    runs: Path

    def failure(self, cell: Cell) -> str | None:
        """Why a cell will never be finished, if so: it failed, or that which it builds on."""
        first = self.asked.built_on(cell)
        for one in (cell, first):
            if one is not None and (file := failure_of(one, self.runs)).exists():
                reason = str(json.loads(file.read_text(encoding="utf-8"))["error"])
                return reason if one is cell else f"builds on {one.method}, which failed: {reason}"
        return None

    def can_begin(self, cell: Cell) -> bool:
        """Whether there is what it builds on."""
        first = self.asked.built_on(cell)
        ready = first is None or first not in self.asked.missing(self.runs)
        return ready and not self.asked.needs_dense(cell.seed, self.runs)


def the_grids(options: argparse.Namespace, recipe: Recipe, task: Task) -> list[Grid]:
    """The forms come after the comparison."""
    energy = EnergyModel.load(options.root / "energy.json")
    settings = replace(recipe.settings, **json.loads(options.settings))
    methods, budgets = options.methods or recipe.methods or [], options.budgets or recipe.budgets or []
    asked = {"": (methods, budgets, settings)}
    for name, form in FORMS[options.name].items():
        some = [budget for budget in budgets if form.budgets is None or budget in form.budgets]
        if some and "ecc" in methods:
            asked[name] = (["ecc"], some, replace(settings, **form.settings))
    return [
        Grid(
            form,
            Comparison(
                task,
                energy,
                methods=methods,
                budgets=budgets,
                seeds=options.seeds or recipe.seeds or 1,
                settings=settings,
                device=options.device,
            ),
            options.root / (f"runs-{form}" if form else "runs"),
        )
        for form, (methods, budgets, settings) in asked.items()
    ]


def failure_of(cell: Cell, runs: Path) -> Path:
    folder = cell.folder(runs)
    return folder.with_name(f"{folder.name}.failed.json")


def train_dense(grids: list[Grid]) -> None:
    """The dense network of each seed, once for all grids."""
    first = grids[0]
    for seed in range(first.asked.seeds):
        first.asked.train_dense(seed, first.runs)
        for grid in grids[1:]:
            if grid.asked.needs_dense(seed, grid.runs):
                folder = grid.runs / f"seed-{seed}"
                shutil.copytree(first.runs / folder.name / "dense", folder / "copy", dirs_exist_ok=True)
                (folder / "copy").rename(folder / "dense")  # whole, or not there: workers wait for it


# ---------------------------------------------------------------- cells, side by side


def worker(options: argparse.Namespace, data: ImageData) -> None:
    """Takes cells that nobody has, until there are none."""
    torch.set_num_threads(1)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    grids = the_grids(options, recipe, the_task(options, recipe, data))
    with suppress(Interrupted):
        while left := unfinished(grids):
            mine = next(
                (one for one in left if one[0].can_begin(one[1]) and claimed(*one, options.root)),
                None,
            )
            if mine is None:
                time.sleep(1.0)
                continue
            grid, cell = mine
            started = time.monotonic()
            reason = grid.asked.run_cell(cell, grid.runs) or "done"
            seconds = time.monotonic() - started
            name = f"{cell.method} {grid.form}".strip()
            print(f"{name} {cell.budget} seed {cell.seed}: {reason}, {seconds:.0f} s", flush=True)


def unfinished(grids: list[Grid]) -> list[tuple[Grid, Cell]]:
    """Seed by seed over all grids, and within a seed first those that others build on, or that take long."""
    left = [(grid, cell) for grid in grids for cell in grid.asked.missing(grid.runs) if grid.failure(cell) is None]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(
        left, key=lambda one: (one[1].seed, -one[0].asked.settings.steps, order.get(one[1].method, len(FIRST)))
    )


def claimed(grid: Grid, cell: Cell, root: Path) -> bool:
    """Whether the cell is ours from now on; it is another worker's if the file is there."""
    try:
        (root / "claims" / f"{cell.method}-{grid.form}-{cell.budget}-{cell.seed}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def started_workers(options: argparse.Namespace, data: ImageData) -> list[Any]:
    """They take seconds to start, and wait for the dense networks."""
    shutil.rmtree(options.root / "claims", ignore_errors=True)  # of workers that are no more
    (options.root / "claims").mkdir()
    spawn = torch.multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(options, data)) for _ in range(options.processes)]
    if options.mps:
        mps(options.root, "-d")
        os.environ[PIPES] = str(options.root / "mps")  # theirs: this process has its context already
    for process in workers:
        process.start()
    os.environ.pop(PIPES, None)
    return workers


def mps(root: Path, *words: str, told: str = "") -> None:
    """Calls CUDA's multi-process service, by which kernels of several processes run side by side."""
    (root / "mps").mkdir(exist_ok=True)
    places = {PIPES: str(root / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(root / "mps")}
    subprocess.run(["nvidia-cuda-mps-control", *words], input=told, text=True, env=os.environ | places, check=True)


def finish(workers: list[Any], until: float) -> None:
    """Waits until they are done, or asks them to stop in time for the scales."""
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


def weigh(grids: list[Grid], task: Task, batch: int, source: Source, until: float) -> None:
    """Every finished network that has not been weighed, and the dense one among them, in the cell's weighed.json."""
    energy = grids[0].asked.energy
    assert isinstance(energy, EnergyModel)
    example = with_batch(task.example_input, batch)
    graph = trace_channels(task.model, example, proven=False)
    scales = Scales(task.model, graph, example, {energy.resource: energy}, source, **WEIGHING)
    known: dict[str, str] = {}
    waiting = []
    for grid, cell in finished(grids):
        file = cell.folder(grid.runs) / "weighed.json"
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
    text = (cell.folder(grid.runs) / "widths.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), sort_keys=True)


def finished(grids: list[Grid]) -> list[tuple[Grid, Cell]]:
    missing = {grid.form: grid.asked.missing(grid.runs) for grid in grids}
    return [(grid, cell) for grid in grids for cell in grid.asked.cells if cell not in missing[grid.form]]


def rows_of(grids: list[Grid]) -> list[dict[str, Any]]:
    """What became of every cell."""
    rows, done = [], finished(grids)
    for grid in grids:
        for cell in grid.asked.cells:
            folder = cell.folder(grid.runs)
            row: dict[str, Any] = {"method": cell.method, "budget": cell.budget, "seed": cell.seed}
            row |= {"form": grid.form} if grid.form else {}
            if (grid, cell) in done:
                summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
                facts = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
                keys = ("scores", "widths", "batches", "parameters", "macs")
                row |= {key: summary[key] for key in keys if key in summary}
                sessions = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["sessions"]
                row |= {"predicted": summary["budgets"]["energy"], "cell_seconds": facts["seconds"]}
                row |= {"date": sessions[-1]["started"][:10]}
                if (folder / "weighed.json").exists():
                    row["weighed"] = json.loads((folder / "weighed.json").read_text(encoding="utf-8"))
            else:
                row["missing"] = grid.failure(cell) or "not finished"
            rows.append(row)
    return rows


def dense_weights(grid: Grid) -> dict[str, str]:
    """By seed: whether cells of several sessions started from the same networks can be seen by this."""
    files = {str(seed): grid.runs / f"seed-{seed}/dense/dense.safetensors" for seed in range(grid.asked.seeds)}
    return {seed: hashlib.sha256(file.read_bytes()).hexdigest() for seed, file in files.items() if file.exists()}


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
    batch = MEASURED_BATCH[options.name]
    source = find_meter(options.meter, runs_on=options.device)
    try:
        energy = fitted(task, source, options)
        print(f"{time.monotonic() - started:.0f} s: energy model, error {energy.quality['mean']:.2%}", flush=True)
        grids = the_grids(options, recipe, task)
        for grid in grids:
            grid.asked.begin(grid.runs)
        workers = started_workers(options, data)
        train_dense(grids)
        print(f"{time.monotonic() - started:.0f} s: dense networks", flush=True)
        # One weighing takes about a second.
        finish(workers, started + options.seconds - 20 - 1.2 * min(len(unfinished(grids)), options.seconds / 8))
        print(f"{time.monotonic() - started:.0f} s: {len(unfinished(grids))} cells missing", flush=True)
        if options.mps:
            mps(options.root, told="quit")  # the scales refuse to share the card
        weigh(grids, task, batch, source, started + options.seconds - 5)
    finally:
        close_meter(source)
    record = {
        "what": f"accuracy against joules: {options.name}, packed copy of {DATA[options.name]}",
        "environment": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "measured_batch": batch,
        "multiple_of": MULTIPLE_OF.get(options.name, 8),
        "meter": source.describe().to_dict(),
        "recalibration_batches": BATCHES,
        "plans": True,  # as the solver does since pace.py has them
        "judged_on": len(data.held_out),
        "settings": {key: value for key, value in vars(grids[0].asked.settings).items() if key != "seed"},
        "forms": {grid.form: FORMS[options.name][grid.form].settings for grid in grids[1:]},
        "full_widths": trace_channels(task.model, task.example_input, proven=False).full_widths,
        "fit": {key: value for key, value in energy.quality.items() if key != "families"},
        "dense_sha256": dense_weights(grids[0]),
        "rows": rows_of(grids),
    }
    write_record(record, options.out)
    print(f"{time.monotonic() - started:.0f} s: written", flush=True)


if __name__ == "__main__":
    sys.exit(main())
