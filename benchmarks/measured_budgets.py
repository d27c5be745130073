"""Latency budgets on a CPU, measured, with the measured loop and with predictions alone.

    OMP_NUM_THREADS=1 PYTHONPATH=src python3 benchmarks/measured_budgets.py --data DATA --out results/measured_budgets.json

Networks: that of the task `digits`, four times as wide, and ResNet-20 with its published weights on CIFAR-10 (a lossy copy).
They run in onnxruntime or OpenVINO with one thread, and latency is processor time. Each network and runtime is
profiled once, and its latency model fitted once. A cell is one compression, either with the loop (`measured`) or with
the predictions of that model alone (`predicted`). Afterwards the result is measured anew in turns with the dense network, for
longer: `fresh` is that latency as a fraction of the budget, with its 95 % confidence interval.

A machine that other programs use has more noise than the energy counter of a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cells import Cells, Deadline, Key, add_options, facts_of, print_cells, run_in_turn
from cpu_latency import WIDTHS, measure_turns
from packed import packed_data, packed_task
from precision import train

from ecc.budget import parse_budgets
from ecc.energy import EnergyModel, fit
from ecc.measure import Meter, Profile, find_meter, profile
from ecc.measure.profiler import profile_settings
from ecc.measure.samplers import ratio_in_turns
from ecc.methods import Compression
from ecc.methods.base import trace_task
from ecc.settings import make_settings
from ecc.task import Task, with_batch_size
from ecc.zoo.data import Packed
from ecc.zoo.digits import DigitsNet
from ecc.zoo.registry import find_task

CASES = {
    "digits-onnxruntime": "onnxruntime:CPUExecutionProvider",
    "digits-openvino": "openvino:CPU",
    "resnet20-onnxruntime": "onnxruntime:CPUExecutionProvider",
}
BATCH = {"digits": 16, "resnet20": 4}
"""Images of an inference."""
LOOPS = ("measured", "predicted")
CLOCK = "cputime"
TEST_IMAGES = 2000


@cache
def dense_task(name: str, data: Path, train_steps: int) -> Task:
    """The task with its trained dense network."""
    if name == "digits":
        torch.manual_seed(0)
        task = replace(find_task("digits"), model=DigitsNet(WIDTHS))
        train(task, train_steps)
        return task
    images = packed_data("cifar10", data)
    assert isinstance(images.test, Packed)
    few = Packed(images.test.images[:TEST_IMAGES], images.test.labels[:TEST_IMAGES])
    return packed_task("resnet20", "cifar10", data, data=replace(images, test=few), batch=64)


def profile_of(case: str, options: argparse.Namespace) -> Profile:
    """The profile beside the record; measured if there is none, and continued if it is not complete."""
    name, runner = case.partition("-")[0], CASES[case]
    task, meter = dense_task(name, options.data, options.train_steps), find_meter(CLOCK)
    graph, example = trace_task(task, BATCH[name], ())
    path = options.profiles / f"{case}.profile"
    if path.with_suffix(".profile.gz").is_file():
        return Profile.load(path.with_suffix(".profile.gz"))
    path.parent.mkdir(parents=True, exist_ok=True)
    return profile(
        task.model, graph, example, meter, path, samples=options.samples, width_multiple=8,
        settings=profile_settings(meter, runner=runner),
    )  # fmt: skip


def fresh_share(task: Task, result: torch.nn.Module, case: str, share: float, turns: int) -> dict[str, Any]:
    """Latency of the result in turns with the dense network, as a fraction of the budget."""
    name, meter = case.partition("-")[0], find_meter(CLOCK)
    assert isinstance(meter, Meter)
    example = with_batch_size(task.example_input, BATCH[name])
    dense, results = measure_turns(task.model, result.cpu().eval(), example, meter, CASES[case], turns)
    ratio, ci = ratio_in_turns(results, dense, "seconds", meter.describe().provenance)
    assert ci is not None  # there are several turns
    return {"fresh": ratio / share, "fresh_relative_ci": ci}


def run(options: argparse.Namespace, model: EnergyModel, key: Key) -> dict[str, Any]:
    """One compression with a latency model."""
    case, steps = key["case"], options.steps
    task = dense_task(case.partition("-")[0], options.data, options.train_steps)
    choices = {
        "runner": CASES[case], "prune_steps": steps, "finetune_steps": steps // 2, "lr": 1e-3, "width_multiple": 8,
        "checkpoint_every": None, "seed": key["seed"],
    }  # fmt: skip
    meter = find_meter(CLOCK) if key["loop"] == "measured" else None
    job = Compression(
        task,
        parse_budgets(f"latency={key['budget']}"),
        [model],
        meter=meter,
        settings=make_settings("default", choices),
    )
    with tempfile.TemporaryDirectory() as folder:
        done = job.run(Path(folder) / "run")
    found = facts_of(done.summary) | {"note": done.summary.note, "cost_checks": done.summary.cost_checks}
    found["latency"] = found.pop("joules")
    share = float(key["budget"].rstrip("%")) / 100
    return found | fresh_share(task, done.model, case, share, options.turns)


def keys_of(options: argparse.Namespace) -> list[Key]:
    """All cells; every network and budget comes before the next seed."""
    return [
        {"case": case, "budget": budget, "loop": loop, "seed": seed}
        for seed in range(options.seeds)
        for case in options.cases
        for budget in options.budgets
        for loop in LOOPS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=float("inf"))
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz and the weights of ResNet-20")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=["80%", "65%", "50%", "35%"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=80, help="of a profile")
    parser.add_argument("--steps", type=int, default=80, help="of pruning; half as many of fine-tuning")
    parser.add_argument("--train-steps", type=int, default=120, help="of the dense network of digits")
    parser.add_argument("--turns", type=int, default=20, help="windows of the measurement afterwards")
    parser.add_argument("--profiles", type=Path, default=Path("results/measured_budgets"), help="their folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    free = ["out", "earlier", "seconds", "only", "again", "list", "data", "cases", "budgets", "seeds", "profiles"]
    settings = {name: value for name, value in vars(options).items() if name not in free} | {"batch": BATCH}
    header = {"what": "latency budgets on the clock of a CPU, with and without the measured loop", "settings": settings}
    cells, keys = Cells(options.out, header, options.earlier, options.again, options.only), keys_of(options)
    if options.list:
        print_cells(cells, keys)
        return
    models = {case: fit(profile_of(case, options), resource="latency", allow_drift=True) for case in options.cases}
    errors = {case: model.errors for case, model in models.items()}
    cells.header["errors"] = {case: {"mean": one.mean, "samples": one.samples} for case, one in errors.items() if one}
    run_in_turn(
        cells, keys, lambda key: run(options, models[key["case"]], key), Deadline.after(options.seconds),
        show=("of_budget", "fresh", "fresh_relative_ci", "cost_checks", "scores"),
    )  # fmt: skip


if __name__ == "__main__":
    main()
