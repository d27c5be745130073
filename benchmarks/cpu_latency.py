"""Latency budgets on a CPU with onnxruntime and OpenVINO: profile, fit, compress, and a fresh measurement.

    OMP_NUM_THREADS=1 python3 benchmarks/cpu_latency.py --out results/cpu_latency.json

The network is that of the task `digits`, four times as wide, trained on its images; one thread, batch 16. For each runner and clock:

noise       standard deviation / mean of the dense network, measured again and again, as seconds, and relative to the dense network
            that is measured in turns with it, which is what a profile does with clocks
error       cross-validated error of the latency model of the compression, whose profile has multiples of 8 channels and networks
            without some residual branches, down to a small part of the time of the dense network
aligned     the same for a profile of multiples of 16 channels, the block of both runtimes on AVX-512, with every branch
fresh       the result, loaded anew and measured in turns with the dense network, as a fraction of the budget, with its 95 %
            confidence interval; both are the fastest of their windows, as in a profile. Also the median of the
            ratios of single turns, which other programs disturb more
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from precision import train
from torch import nn

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.energy import fit
from ecc.errors import EccError
from ecc.measure import Measurement, Meter, Profile, find_meter, measure, profile
from ecc.measure.profiler import profile_settings
from ecc.measure.runners import PreparedRunner, prepare_runner
from ecc.measure.samplers import ratio_in_turns
from ecc.measure.window import probe_under_load
from ecc.methods.base import trace_task
from ecc.records import to_builtins
from ecc.settings import CLOCK_SETTINGS, make_settings
from ecc.task import Task, with_batch_size
from ecc.zoo.digits import DigitsNet
from ecc.zoo.registry import find_task

RUNNERS = ("onnxruntime:CPUExecutionProvider", "openvino:CPU")
WIDTHS = (64, 128, 192)
BATCH = 16


def measure_turns(
    dense: nn.Module, other: nn.Module, example: Any, meter: Meter, runner: str, turns: int
) -> tuple[list[Measurement], list[Measurement]]:
    """Measurements of two networks, alternately; one more of the first."""
    settings = replace(CLOCK_SETTINGS, runner=runner, min_repeats=4, max_repeats=4, probe_seconds=0.3)
    with prepare_runner(dense, example, settings) as first, prepare_runner(other, example, settings) as second:
        counter = probe_under_load(first.run, meter, settings, device="cpu", is_asynchronous=False)

        def one_turn(one: PreparedRunner) -> Measurement:
            return measure(
                one.run, meter, settings, device="cpu", batch=one.batch, is_asynchronous=False, counter=counter
            )

        pairs = [(one_turn(first), one_turn(second)) for _ in range(turns)]
        return [one for one, _ in pairs] + [one_turn(first)], [two for _, two in pairs]


def interval(values: list[float]) -> list[float]:
    """95 % confidence interval of the median, from the order statistics."""
    ordered, n = sorted(values), len(values)
    skip = max(0, round(0.5 * n - 0.98 * n**0.5))
    return [ordered[skip], ordered[n - 1 - skip]]


def spread(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


def run_noise(task: Task, runner: str, clock: str, options: argparse.Namespace) -> dict[str, Any]:
    """Repeated measurements of the dense network, alone and relative to another copy of it."""
    example, meter = with_batch_size(task.example_input, BATCH), find_meter(clock)
    assert isinstance(meter, Meter)
    firsts, seconds = measure_turns(task.model, task.model, example, meter, runner, options.turns)
    return {
        "runner": runner,
        "clock": clock,
        "budget": options.share,
        "noise": spread([one.seconds for one in firsts]),
        "noise_in_turns": spread([two.seconds / one.seconds for one, two in zip(firsts, seconds, strict=False)]),
        "dense_seconds": statistics.median(one.seconds for one in firsts),
    }


def run_case(task: Task, runner: str, clock: str, options: argparse.Namespace) -> dict[str, Any]:
    """One runner and clock."""
    found = run_noise(task, runner, clock, options)
    example, meter = with_batch_size(task.example_input, BATCH), find_meter(clock)
    assert isinstance(meter, Meter)
    choices = {
        "runner": runner, "prune_steps": options.steps, "finetune_steps": options.steps // 2, "lr": 1e-3, "width_multiple": 8,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        known = None if options.profiles is None else options.profiles / f"{runner.partition(':')[0]}-{clock}.profile"
        (Path(folder) / "run").mkdir()
        if known is not None and known.is_file():
            shutil.copy(known, Path(folder) / "run" / "network.profile")
        started = time.process_time()
        try:
            done = compress_task(
                task, parse_budgets(f"latency={options.share:.0%}"), folder=Path(folder) / "run", meter=clock,
                settings=make_settings("default", choices), samples=options.samples, batch=BATCH,
            )  # fmt: skip
        finally:
            path = Path(folder) / "run" / "network.profile"
            if path.is_file():
                made = Profile.load(path)
                found["samples"] = len(made.design_samples)
                found["reference_cv"] = None if made.drift is None else made.drift.cv
                errors = fit(made, resource="latency", allow_drift=True).errors
                found["errors"] = None if errors is None else to_builtins(errors)
        latency = done.summary.budgets["latency"]
        found["claimed"] = latency.result / (options.share * latency.dense)
        found["scores"] = to_builtins(done.summary.scores)
        found["cpu_seconds"] = time.process_time() - started
        dense, results = measure_turns(task.model, done.model.cpu().eval(), example, meter, runner, 2 * options.turns)
    ratio, ci = ratio_in_turns(results, dense, "seconds", meter.describe().provenance)
    assert ci is not None  # there are several turns
    share = ratio / options.share
    found["fresh"] = {"share": share, "interval": [share * (1 - ci), share * (1 + ci)], "turns": len(results)}
    shares = [two.seconds / one.seconds / options.share for one, two in zip(dense, results, strict=False)]
    found["fresh"] |= {"median_of_turns": statistics.median(shares), "median_interval": interval(shares)}
    return found


def run_aligned(task: Task, runner: str, clock: str, options: argparse.Namespace) -> dict[str, Any]:
    """Error of a latency model of networks whose widths are multiples of 16."""
    meter = find_meter(clock)
    graph, example = trace_task(task, BATCH, ())
    with tempfile.TemporaryDirectory() as folder:
        made = profile(
            task.model, graph, example, meter, Path(folder) / "network.profile", samples=options.samples,
            width_multiple=16, depth=False, settings=profile_settings(meter, runner=runner),
        )  # fmt: skip
    errors = fit(made, resource="latency", allow_drift=True).errors
    found = {"samples": len(made.design_samples), "reference_cv": None if made.drift is None else made.drift.cv}
    found |= {"errors": None if errors is None else to_builtins(errors)}
    return {"runner": runner, "clock": clock, "aligned": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.6, help="budget, of the latency of the dense network")
    parser.add_argument("--samples", type=int, default=90)
    parser.add_argument("--steps", type=int, default=80, help="of pruning; half as many of finetuning")
    parser.add_argument("--train-steps", type=int, default=120)
    parser.add_argument("--only", choices=["noise", "budget", "aligned"], help="a part; the rest of the file is kept")
    parser.add_argument("--profiles", type=Path, help="folder of profiles RUNNER-CLOCK.profile that are resumed")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--clocks", nargs="+", default=["cputime", "wall"])
    parser.add_argument("--runners", nargs="+", default=list(RUNNERS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    task = replace(find_task("digits"), model=DigitsNet(WIDTHS))
    train(task, options.train_steps)
    environment = machine()
    for clock in options.clocks:
        for runner in options.runners:
            row: dict[str, Any] = {}
            try:
                if options.only == "noise":
                    row |= run_noise(task, runner, clock, options)
                if options.only in (None, "budget"):
                    row |= run_case(task, runner, clock, options)
                if options.only in (None, "aligned"):
                    row |= run_aligned(task, runner, clock, options)
            except EccError as error:
                row |= {"runner": runner, "clock": clock, "budget": options.share, "problem": str(error)[:300]}
            row["origins"] = {
                options.only or "all": {name: environment[name] for name in ("commit", "command", "date")}
            }
            print(row, flush=True)
            # What other processes measured is kept: each may measure one runner.
            kept = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.is_file() else []
            rows = [one for one in kept if (one["runner"], one["clock"]) != (runner, clock)]
            old: dict[str, Any] = next((one for one in kept if one not in rows), {})
            if options.only in (None, "budget") and options.profiles is None:
                old.get("origins", {}).pop("profile", None)  # it was made anew
            rows.append({**old, **row, "origins": {**old.get("origins", {}), **row["origins"]}})
            record = {
                "what": "latency budgets on a CPU with onnxruntime and OpenVINO",
                "environment": environment,
                "network": "digits, four times as wide",
                "batch": BATCH,
                "rows": sorted(rows, key=lambda one: (one["clock"], one["runner"])),
            }
            write_record(record, options.out)


if __name__ == "__main__":
    main()
