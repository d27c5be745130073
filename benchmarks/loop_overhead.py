"""A training step in the loop of `ecc compress` beside one of a plain PyTorch loop that does the same work.

    PYTHONPATH=src python3 benchmarks/loop_overhead.py --data FOLDER --out results/loop_overhead.json

For each network, with and without a CUDA graph, with and without distillation: `Compression` runs as in `ecc compress`,
in bf16 with channels last. Every few steps its loop stops while a plain loop (`loop_networks.py`) takes as many steps
on a copy of the network. In the phase *prune* channels are removed, in *finetune* the slim network is trained. A ratio
is that of five blocks of either loop, in which each looks at its loss once; the median is reported. In *own file* both
loops get their batches from a user's generator, which crops images on the host one by one. FOLDER may hold the packed
CIFAR-10; otherwise images are random bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loop_networks import DISTILL, LR, OWN_FILE, WEIGHT_DECAY, Batches, PlainLoop, tasks, wait
from machine import machine, write_record
from torch import Tensor, nn

from ecc.energy import EnergyModel, fit, parse_budgets
from ecc.graph import trace_channels
from ecc.measure import find_meter, profile
from ecc.methods import Compression, CompressSettings
from ecc.options import flat_values, settings_from
from ecc.task import Task, with_batch_size
from ecc.training import StepInfo, Teacher, loop

GOAL = 1.05
BLOCKS = 5  # of each loop for a ratio; with blocks of ten steps, the loss is looked at as often as by default
SOLVE_STEPS = 2_000  # the default of `ecc compress`: it decides how often channels are removed
NARROW = 0.25  # the budget is midway between the dense network and one of this share of its widths
PROFILED = 64  # images in a batch of the energy model
MEMORY = Path("/dev/shm")  # checkpoints are written between the blocks: not to a disk, which takes seconds
PHASES = ("prune", "finetune")
SHORT = 40  # pruning steps before fine-tuning is measured

Begin = Callable[[Compression, nn.Module, Teacher | None], Callable[[int], bool]]


class Enough(Exception):
    """Ends a run when everything is measured."""


def run_watched(compression: Compression, folder: Path, phase: str, begin: Begin) -> None:
    """Run a compression until `begin`'s function, called after each step of `phase`, returns True."""
    take_steps = loop.Training.each_step

    def watched_steps(this: loop.Training) -> Iterator[StepInfo]:
        watch = begin(compression, this.model, this.teacher) if this.phase == phase else None
        for info in take_steps(this):
            yield info  # the caller prunes here
            if watch is not None and watch(this.step):
                raise Enough

    with mock.patch.object(loop.Training, "each_step", watched_steps), suppress(Enough):
        compression.run(folder)


class Plan:
    """Which steps are timed.

    Args:
        batches: Of the plain loop.
        warm_up: Steps of ECC before the first block.
        steps: Of a block.
        ratios: That are measured in each phase.
        most_seconds: After which a phase ends, once it has two ratios.
    """

    def __init__(self, batches: Batches, warm_up: int, steps: int, ratios: int, most_seconds: float) -> None:
        self.batches, self.warm_up, self.steps = batches, warm_up, steps
        self.ratios, self.most_seconds = ratios, most_seconds
        self.found: dict[str, dict[str, list[float]]] = {}

    def begin(
        self, phase: str, compression: Compression, model: nn.Module, teacher: Teacher | None
    ) -> Callable[[int], bool]:
        """A function to call after each step of ECC; it returns True when everything is measured."""
        settings, device = compression.settings.train, compression.device
        assert compression.task.loss is not None
        plain = PlainLoop(
            model,
            teacher,
            self.batches(),
            compression.task.loss,
            precision=settings.precision,
            cuda_graph=settings.cuda_graph,
            log_every=settings.log_every,
        )
        plain.run(max(2, self.warm_up // 2))
        times: dict[str, list[float]] = {"ecc": [], "plain": []}
        self.found[phase] = times
        started, began = 0.0, time.perf_counter()

        def watch(step: int) -> bool:
            nonlocal started, began
            if step < self.warm_up or (step - self.warm_up) % self.steps:
                return False
            wait(device)
            now = time.perf_counter()
            if step == self.warm_up:
                began = now
            else:
                times["ecc"].append((now - started) / self.steps)
                times["plain"].append(plain.run(self.steps))
            done, rest = divmod(len(times["ecc"]), BLOCKS)
            is_over = rest == 0 and (done >= self.ratios or (done >= 2 and now - began > self.most_seconds))
            started = time.perf_counter()
            return is_over

        return watch


def compression_of(
    task: Task, device: torch.device, folder: Path, settings: CompressSettings, *, quick: bool
) -> Compression:
    """The task with an energy model of the default family, fitted to an analytic platform."""
    example = with_batch_size(task.example_input, PROFILED)
    graph = trace_channels(task.model, example, verify=False)
    meter, step = find_meter("platform:jetson-tx2"), 1 if quick else 8
    rows = profile(task.model, graph, example, meter, folder / "rows.profile", samples=40, width_multiple=step)
    energy: EnergyModel = fit(rows, "physical")
    full = torch.tensor(energy.full_widths, dtype=torch.float64)
    share = (1 + float(energy.value((NARROW * full).ceil())) / float(energy.value(full))) / 2
    budgets = parse_budgets([f"{100 * share:.1f}%"])
    return Compression(task, budgets, energy, settings=settings, device=device)


def measured(
    name: str, build: Callable[[], Task], batches: Batches, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One row for each way to train."""
    ways = (True, False) if device.type == "cuda" else (False,)
    if device.type == "cuda" and name == OWN_FILE:
        ways = (True,)  # the host makes the batches, and starts the kernels all the same
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as temporary:
        folder = Path(temporary)
        settings = settings_of(device, BLOCKS * options.steps)
        compression = compression_of(build(), device, folder, settings, quick=options.quick)
        for cuda_graph in (way for way in ways if options.way is None or way == (options.way == "graph")):
            for distill in (0.0, DISTILL):
                plan = Plan(batches, options.warm_up, options.steps, options.ratios, options.seconds)
                for phase, steps in (("prune", SOLVE_STEPS), ("finetune", SHORT)):
                    changed = {"cuda_graph": cuda_graph, "kd_weight": distill, "prune_steps": steps}
                    compression.settings = settings_from(CompressSettings, {**flat_values(settings), **changed})
                    run_watched(
                        compression, folder / f"{phase}-{cuda_graph}-{distill}", phase, partial(plan.begin, phase)
                    )
                row = {"cuda_graph": cuda_graph, "distillation": distill > 0, **summarised(plan.found)}
                print(f"{shown(name, row)}   ({time.perf_counter() - started:.0f} s)", flush=True)
                yield row
                wait(device)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def settings_of(device: torch.device, log_every: int) -> CompressSettings:
    return settings_from(
        CompressSettings,
        {
            "prune_steps": SOLVE_STEPS,
            "finetune_steps": SOLVE_STEPS,
            "lr": LR,
            "weight_decay": WEIGHT_DECAY,
            "precision": "bf16" if device.type == "cuda" else "fp32",
            "channels_last": True,
            "log_every": log_every,
        },
    )


def summarised(found: Mapping[str, Mapping[str, list[float]]]) -> dict[str, Any]:
    """Ratios of `BLOCKS` blocks each, in which either loop looks at its loss once, and their median."""
    summary = {}
    for phase, times in found.items():
        sums = {loop: [sum(some) / BLOCKS for some in batched(blocks)] for loop, blocks in times.items()}
        ratios = [ecc / plain for ecc, plain in zip(sums["ecc"], sums["plain"], strict=True)]
        summary[phase] = {
            "plain_ms": 1e3 * statistics.median(sums["plain"]),
            "ecc_ms": 1e3 * statistics.median(sums["ecc"]),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return summary


def batched(blocks: list[float]) -> list[list[float]]:
    return [blocks[first : first + BLOCKS] for first in range(0, len(blocks), BLOCKS)]


def shown(name: str, row: Mapping[str, Any]) -> str:
    how = f"{'graph' if row['cuda_graph'] else 'eager'}{', distilled' if row['distillation'] else ''}"
    cells = [
        f"{phase} {row[phase]['plain_ms']:7.2f} -> {row[phase]['ecc_ms']:7.2f} ms {row[phase]['ratio']:5.3f}x"
        for phase in PHASES
        if phase in row
    ]
    return f"{name:20} {how:17} " + "   ".join(cells)


def begun(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The record that rows are added to: a new one, or that of an earlier run on the same device with `--merge`."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    record: dict[str, Any] = {
        "what": "milliseconds of a training step in the loop of ecc compress, and in a plain PyTorch loop",
        "environment": machine(threads=torch.get_num_threads()),
        "device": name,
        "precision": settings_of(device, options.steps).train.precision,
        "log_every": BLOCKS * options.steps,
        "goal": GOAL,
        "steps_of_a_block": options.steps,
        "networks": {},
    }
    if options.merge is None or not options.merge.exists():
        return record
    old: dict[str, Any] = json.loads(options.merge.read_text(encoding="utf-8"))
    same = ("device", "precision", "log_every", "steps_of_a_block")
    if differing := [key for key in same if old[key] != record[key]]:
        raise SystemExit(f"{options.merge} was measured with another {', '.join(differing)}; leave out --merge.")
    return old


def add_row(record: dict[str, Any], name: str, data: str, row: dict[str, Any], commit: str | None) -> None:
    """Adds a row, in place of an earlier one of the same way to train."""
    one = record["networks"].setdefault(name, {"data": data, "rows": []})
    way = ("cuda_graph", "distillation")
    one["rows"] = [old for old in one["rows"] if any(old[key] != row[key] for key in way)]
    one["rows"].append({**row, "date": datetime.now(timezone.utc).date().isoformat(), "commit": commit})


def drawn(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, count: int) -> float:
    """Seconds of a batch."""
    next(batches)
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)
    wait(device)
    return (time.perf_counter() - started) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, help="folder with cifar10.npz")
    parser.add_argument("--only", action="append", help="one network; repeatable")
    parser.add_argument("--ratios", type=int, default=4, help=f"of {BLOCKS} blocks each, in each phase")
    parser.add_argument("--steps", type=int, default=10, help=f"of a block; {BLOCKS} times as many from log to log")
    parser.add_argument("--warm-up", type=int, default=60, help="steps before the first block: captures are in them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a phase, after two ratios")
    parser.add_argument("--way", choices=["graph", "eager"], help="with a CUDA graph, or without; both by default")
    parser.add_argument("--merge", type=Path, help="a JSON of an earlier run, whose other rows are kept")
    parser.add_argument("--commit", help="noted with each row")
    parser.add_argument("--quick", action="store_true", help="tiny networks: does it run?")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    with tempfile.TemporaryDirectory() as temporary:
        sys.path.insert(0, str(Path(__file__).parent))  # the user's file imports its network from here
        known = tasks(device, options.data, Path(temporary), quick=options.quick)
        record = begun(options, device)
        for name, (build, batches, data) in known.items():
            if options.only is None or name in options.only:
                for row in measured(name, build, batches, device, options):
                    add_row(record, name, data, row, options.commit)
                    if options.out is not None:
                        write_record(record, options.out)  # after each row, so that nothing is lost


if __name__ == "__main__":
    main()
