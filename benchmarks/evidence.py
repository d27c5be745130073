"""Accuracy against measured energy on real data: all methods, budgets and seeds of one experiment, on one GPU.

    PYTHONPATH=src python3 benchmarks/evidence.py mobilenet-imagenette --data DATA --root WORK --out OUT.json

1. Profile the network on the meter of this machine and fit the energy model. `--profile` names a profile to take instead.
2. Run all runs of the comparison in parallel processes, as the recipe says. Variants of ECC, such as the paper's own form,
   are runs as well. With `--loop` every run meets its budget on the meter: this process measures while the others pause
   (`evidence_meter.py`). Without it, costs are predicted.
3. When the GPU is idle, measure every result, and from time to time the dense network. Results with equal widths are
   measured once.

OUT is results/evidence/e1.json to e4.json for the results pages; the profile is stored next to it.

Run the same command again to resume, as long as WORK exists, or with `--record`, a JSON that it wrote, if WORK is lost.
`--seconds` limits the time; the JSON lists finished, failed and missing runs. With `--rerun` the energy model is fitted
again with the new measurements, and runs with a large prediction error are repeated, so that methods meet their budgets
although none of them measures. One run is repeated by `--only method=ecc,budget=50%,seed=0 --again`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from cells import SAVING, device_name, is_selected, selection, shared_gpu
from evidence_grid import (
    CHECKPOINT,
    DATA,
    MEASURED_BATCH,
    MULTIPLE_OF,
    RECIPES,
    Grid,
    failure_of,
    fitted,
    for_all,
    the_grids,
    the_task,
    train_dense,
    variant_settings,
    variants_of,
)
from evidence_meter import MeasuringService, SharedMeter, cost_evaluator
from evidence_record import bring_cells, bring_model, dense_weights, rows_of, write_stamps
from evidence_rerun import refit_and_rerun
from machine import machine, write_record
from packed import packed_data

from ecc.constants import PROTOCOLS
from ecc.energy import EnergyModel
from ecc.errors import EccError
from ecc.graph import trace_channels
from ecc.measure import EnergySource, MeterInfo, close_meter, find_meter
from ecc.methods.baselines.recalibration import BATCHES
from ecc.methods.cost_evaluator import CostEvaluator
from ecc.methods.grid import GridRun
from ecc.options import flat_values
from ecc.records import to_builtins
from ecc.task import Task, with_batch_size
from ecc.training import Interrupted, load_state, save_state
from ecc.zoo.data import ImageData
from ecc.zoo.recipe import read_recipe

SECONDS_PER_MEASUREMENT = 1.5
"""Seconds for one measurement."""
DENSE_EVERY = 10
"""Number of results between two measurements of the dense network."""
LONGEST = "amc"
"""The method with the longest runs, which are started first."""
FIRST = ("ecc", "lcp", "netadapt")
"""Methods that are started next."""
START = "start.safetensors"
"""In the working folder: the weights before the dense network is trained, which take long to prepare for ERFNet."""
SAVE_EVERY = 30.0
"""Seconds between two records of the runs that are finished, in case that the call is killed."""


# ---------------------------------------------------------------- parallel runs


def worker(options: argparse.Namespace, data: ImageData, meter: SharedMeter | None = None) -> None:
    """Train dense networks and execute runs that no other worker has claimed, until none is left."""
    torch.set_num_threads(1)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    file = options.root / START
    task = the_task(options, recipe, data, load_state(file) if file.exists() else None)
    grids = the_grids(options, recipe, task if meter is None else meter.guarded(task), meter)
    with suppress(Interrupted):
        for seed in sorted({cell.seed for _, cell in unfinished(grids, options.only)}):
            if claimed(f"dense-{seed}", options.root):
                train_or_fail(grids, seed, options)
        while left := [one for one in unfinished(grids, options.only) if not is_claimed(name_of(*one), options.root)]:
            mine = next(
                (one for one in left if one[0].can_begin(one[1]) and claimed(name_of(*one), options.root)),
                None,
            )
            if mine is None:
                time.sleep(0.5)
                continue
            grid, cell = mine
            started = time.monotonic()
            try:
                failed = grid.comparison.run_one(cell, grid.runs)
                write_stamps(grid, cell, options.device)
                if failed is None:
                    (cell.folder(grid.runs) / CHECKPOINT).unlink(missing_ok=True)  # those of AlexNet would fill a disk
                reason = failed or "done"
            except Interrupted:
                raise
            except Exception as error:  # noqa: BLE001 - concerns this run only, and the others go on
                reason = described(error)
                grid.comparison.write_failure(cell, grid.runs, reason)
            seconds = time.monotonic() - started
            name = f"{cell.method} {grid.variant}".strip()
            print(f"{name} {cell.budget} seed {cell.seed}: {reason}, {seconds:.0f} s", flush=True)
            check_device(options.device)
            if meter is not None:
                meter.rest()


def train_or_fail(grids: list[Grid], seed: int, options: argparse.Namespace) -> None:
    """Train the dense network of a seed; if that fails, so do its runs, for which others would wait."""
    started = time.monotonic()
    try:
        train_dense(grids, seed)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - other seeds go on
        reason = f"dense network: {described(error)}"
        for grid, cell in unfinished(grids, options.only):
            if cell.seed == seed:
                grid.comparison.write_failure(cell, grid.runs, reason)
    print(f"dense seed {seed}: {time.monotonic() - started:.0f} s", flush=True)


def described(error: Exception) -> str:
    """An error for the record; the log has the rest if it is unexpected."""
    if isinstance(error, EccError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error)[:500]}"


def check_device(device: str) -> None:
    """Raise an error if this process cannot use its GPU any more: further runs would fail as well."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def unfinished(grids: list[Grid], only: Mapping[str, str]) -> list[tuple[Grid, GridRun]]:
    """Runs to do: by seed, so that a call without time for all has complete seeds, and then the longest first."""
    left = [
        (grid, cell)
        for grid in grids
        for cell in grid.comparison.unfinished(grid.runs)
        if grid.failure(cell) is None and is_selected(key_of(grid, cell), only)
    ]
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(
        left,
        key=lambda one: (
            one[1].seed,
            one[1].method != LONGEST,
            -one[0].comparison.settings.prune_steps,
            order.get(one[1].method, len(FIRST)),
        ),
    )


def key_of(grid: Grid, cell: GridRun) -> dict[str, Any]:
    """What identifies a run, for `--only`."""
    return {"method": cell.method, "variant": grid.variant, "budget": cell.budget, "seed": cell.seed}


def forget(grids: list[Grid], only: Mapping[str, str]) -> None:
    """Remove the selected runs, so that they are run again."""
    for grid in grids:
        for cell in [one for one in grid.comparison.runs if is_selected(key_of(grid, one), only)]:
            shutil.rmtree(cell.folder(grid.runs), ignore_errors=True)
            failure_of(cell, grid.runs).unlink(missing_ok=True)


def name_of(grid: Grid, cell: GridRun) -> str:
    return f"{cell.method}-{grid.variant}-{cell.budget}-{cell.seed}"


def claimed(name: str, root: Path) -> bool:
    """Claim a name for this worker; False if another worker has it."""
    try:
        (root / "claims" / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def is_claimed(name: str, root: Path) -> bool:
    """Whether a worker has claimed the name. Its run is finished, failed or running, or the worker was killed."""
    return (root / "claims" / name).exists()


def started_workers(
    options: argparse.Namespace, task: Task, data: ImageData, count: int, measure: CostEvaluator | None, info: MeterInfo
) -> tuple[list[Any], MeasuringService | None]:
    """Start worker processes for a number of runs, and what measures for them if `measure` is given."""
    save_state(options.root / START, task.model.state_dict())
    shutil.rmtree(options.root / "claims", ignore_errors=True)  # of earlier workers
    (options.root / "claims").mkdir()
    spawn = torch.multiprocessing.get_context("spawn")
    processes = min(options.processes, count)
    service = None if measure is None else MeasuringService(measure, info, spawn, processes)
    meters = [None] * processes if service is None else service.meters
    workers = [spawn.Process(target=worker, args=(options, data, meter)) for meter in meters]
    for process in workers:
        process.start()
    return workers, service


def finish(
    workers: list[Any],
    service: MeasuringService | None,
    end: float,
    reserved: Callable[[], float],
    save: Callable[[], None],
) -> None:
    """Wait for the workers, measure for them, and stop them in time for the measurements of the results.

    Args:
        workers: The processes.
        service: Measures for them; None if they do not measure.
        end: When the whole call ends.
        reserved: Seconds that are needed before the end, see `time_after`.
        save: Writes the record, called now and then.
    """
    saved = time.monotonic()
    while any(process.is_alive() for process in workers) and time.monotonic() < end - reserved():
        sentinels = [process.sentinel for process in workers if process.is_alive()]
        wait(sentinels, timeout=1.0 if service is None else 0.05)
        if service is not None:
            service.serve([process.is_alive() for process in workers], end - reserved())
        if time.monotonic() - saved > SAVE_EVERY:
            save()
            saved = time.monotonic()
    if service is not None:
        service.stop()
        print(f"{service.readings} measurements during the runs, {service.seconds:.0f} s", flush=True)
    for process in workers:
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGTERM)  # they save their state
    until = time.monotonic() + SAVING
    for process in workers:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def time_after(cells: int, seconds: float) -> float:
    """Seconds reserved for stopping and measuring; results that do not fit are measured in the next call."""
    return SAVING + 5 + min(SECONDS_PER_MEASUREMENT * cells, seconds / 5)


# ---------------------------------------------------------------- measurements


def measure_results(grids: list[Grid], evaluate_cost: CostEvaluator, until: float) -> None:
    """Measure every result that has not been measured, and the dense network, into measured.json of the run.

    A network that cannot be measured is left out.
    """
    known: dict[str, str] = {}
    waiting = []
    for grid, cell, file in results_of(grids):
        if file.exists():
            known[widths_of(grid, cell)] = file.read_text(encoding="utf-8")
        else:
            waiting.append((grid, cell, file))
    if not waiting:
        return
    waiting.sort(key=lambda one: (one[1].seed, one[1].method != "ecc"))  # in case time runs out
    dense, measured_count = evaluate_cost({}), 0
    for grid, cell, file in waiting:
        widths = widths_of(grid, cell)
        if widths not in known:
            if time.monotonic() > until:
                continue
            measured_count += 1
            try:
                if measured_count % DENSE_EVERY == 0:
                    dense = evaluate_cost({})
                found = evaluate_cost(json.loads(widths))
            except (EccError, RuntimeError, MemoryError) as error:
                print(f"{name_of(grid, cell)} was not measured: {error}", flush=True)
                continue
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


def results_of(grids: list[Grid]) -> list[tuple[Grid, GridRun, Path]]:
    """Finished runs and the file of the measurement, which may not exist yet."""
    return [(grid, cell, cell.folder(grid.runs) / "measured.json") for grid in grids for cell in grid.finished()]


def unmeasured(grids: list[Grid]) -> int:
    """Number of results that have not been measured."""
    return sum(not file.exists() for _, _, file in results_of(grids))


def widths_of(grid: Grid, cell: GridRun) -> str:
    """As JSON, the same for equal widths."""
    return json.dumps(grid.read(cell, "widths.json"), sort_keys=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(DATA))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True, help="working folder; keep it to resume")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--mps", action="store_true", help="let kernels of several processes run concurrently (CUDA MPS)"
    )
    parser.add_argument("--loop", action="store_true", help="measure during the runs, so that they meet their budgets")
    parser.add_argument(
        "--rerun", action="store_true", help="fit the energy model again and repeat runs with a large prediction error"
    )
    parser.add_argument("--record", type=Path, help="JSON of an earlier call; its runs are not repeated")
    parser.add_argument(
        "--without", type=lambda text: text.split(","), default=[], help="variants of the record to repeat"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="time limit of this call")
    parser.add_argument("--samples", type=int, default=100, help="samples of the profile")
    parser.add_argument(
        "--profile", type=Path, help="profile of an earlier call on such a device, instead of a new one"
    )
    parser.add_argument("--limit", type=int, help="images of each split (default: all)")
    parser.add_argument("--methods", type=lambda text: text.split(","))
    parser.add_argument("--budgets", type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--variants", choices=("recipe", "solvers", "depth", "none"), default="recipe", help="of ECC")
    parser.add_argument("--protocol", choices=PROTOCOLS, default=PROTOCOLS[0], help="what is equal for all methods")
    parser.add_argument("--only", type=selection, default={}, metavar="KEY=VALUE,...", help="some of the runs")
    parser.add_argument("--again", action="store_true", help="repeat the runs of --only")
    parser.add_argument("--settings", default="{}", help="JSON that overrides settings of the recipe")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    started = time.monotonic()
    options.root.mkdir(parents=True, exist_ok=True)
    recipe = read_recipe(RECIPES / f"{options.name}.toml")
    data = for_all(packed_data(DATA[options.name], options.data, options.limit))
    task = the_task(options, recipe, for_all(data))  # its copies on the GPU are not shared with the workers
    batch = MEASURED_BATCH[options.name]
    source = find_meter(options.meter, device_type=options.device)
    try:
        stored = options.profile if options.record is None else options.record.with_suffix(".profile.gz")
        if stored is not None:
            bring_model(stored, options.root, trace_channels(task.model, with_batch_size(task.example_input, batch)))
        energy = fitted(task, source, options)
        error = float("nan") if energy.errors is None else energy.errors.mean
        print(f"{time.monotonic() - started:.0f} s: energy model, error {error:.2%}", flush=True)
        grids = the_grids(options, recipe, task)
        for grid in grids:
            grid.comparison.open(grid.runs)
        if options.record is not None:
            print(f"{bring_cells(options.record, grids, options.without)} runs from {options.record}", flush=True)
        if options.again:
            forget(grids, options.only)
        if options.rerun:
            refit_and_rerun(grids, options.root)
            energy, grids = fitted(task, source, options), the_grids(options, recipe, task)
        header = header_of(options, grids, task, data, energy, source)

        def save() -> None:
            hashes = {"dense_sha256": dense_weights(grids[0])}
            write_record({**header, **hashes, "rows": rows_of(grids)}, options.out)

        measure = cost_evaluator(task, batch, energy, source)
        end, left = started + options.seconds, unfinished(grids, options.only)
        if left:
            with shared_gpu(options.mps, options.root):
                during, info = measure if options.loop else None, source.describe()
                workers, service = started_workers(options, task, data, len(left), during, info)
                finish(workers, service, end, lambda: time_after(unmeasured(grids), options.seconds), save)
        print(f"{time.monotonic() - started:.0f} s: {len(unfinished(grids, options.only))} runs missing", flush=True)
        save()  # in case that measuring fails
        measure_results(grids, measure, end - 5)
        save()
    finally:
        close_meter(source)
    print(f"{time.monotonic() - started:.0f} s: written", flush=True)


def header_of(
    options: argparse.Namespace,
    grids: list[Grid],
    task: Task,
    data: ImageData,
    energy: EnergyModel,
    source: EnergySource,
) -> dict[str, Any]:
    """The record without its runs."""
    return {
        "what": f"accuracy against measured energy: {options.name}, packed copy of {DATA[options.name]}",
        "environment": machine(),
        "device": device_name(options.device),
        "protocol": options.protocol,
        "measured_batch": MEASURED_BATCH[options.name],
        "width_multiple": MULTIPLE_OF.get(options.name, 8),
        "meter": to_builtins(source.describe()),
        "recalibration_batches": BATCHES,
        "held_out_images": len(data.held_out),
        "test_images": len(data.test),
        "settings": {key: value for key, value in flat_values(grids[0].comparison.settings).items() if key != "seed"},
        "variants": {grid.variant: variant_settings(variants_of(options)[grid.variant]) for grid in grids[1:]},
        "full_widths": trace_channels(task.model, task.example_input, verify=False).full_widths,
        "fit": {"chosen": energy.kind, **to_builtins(energy.errors), "noise": energy.quality.noise},
    }


if __name__ == "__main__":
    main()
