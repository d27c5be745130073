"""Pruning and int8 under the same latency budget, measured with onnxruntime on the CPU.

    OMP_NUM_THREADS=1 python3 benchmarks/precision.py --out results/precision.json

The dense digits network is trained once. For each budget, as a share of the latency of the dense fp32 network:

    prune       fp32, pruned until the measured latency meets the budget
    quantise    int8, not pruned; its latency is what it is
    both        int8, pruned until the measured latency meets the same budget in seconds

Latency is CPU time of one thread. The score is that of the file which was measured: the int8 network is evaluated by
onnxruntime.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from torch import nn

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.errors import EccError
from ecc.measure import PROFILE_SETTINGS, measure
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.runners import RunnerModule, prepare_runner
from ecc.profiling import calibration_inputs
from ecc.settings import MeasureSettings, make_settings
from ecc.task import Task, batch_size_of, with_batch_size
from ecc.zoo.registry import find_task

RUNNER = "onnxruntime:CPUExecutionProvider"


def evaluate(model: nn.Module, task: Task, example: Any, precision: Any) -> dict[str, float]:
    """Latency and score of a network in a precision."""
    settings = replace(
        MeasureSettings(), runner=RUNNER, precision=precision, window_seconds=PROFILE_SETTINGS.window_seconds
    )
    assert task.evaluate is not None
    calibration = calibration_inputs(task, batch_size_of(example), 8)
    with prepare_runner(model, example, settings, calibration=calibration) as ready:
        score = float(task.evaluate(RunnerModule(ready, model, example)))
        result = measure(ready.run, CpuTimeMeter(), settings, batch=ready.batch, is_asynchronous=False)
    return {"seconds": result.seconds, "relative_ci": result.relative_ci or 0.0, "score": score}


def compress(task: Task, budget: str, precision: str, folder: Path, steps: int, samples: int, batch: int) -> nn.Module:
    """Prune a trained network under a budget that is measured in a precision."""
    choices = {
        "runner": RUNNER, "inference_precision": precision, "prune_steps": steps, "finetune_steps": steps, "lr": 1e-3,
    }  # fmt: skip
    done = compress_task(
        task, parse_budgets(budget), folder=folder, meter="cputime", settings=make_settings("default", choices),
        samples=samples, batch=batch,
    )  # fmt: skip
    return done.model.cpu()


def train(task: Task, steps: int) -> None:
    """Train the dense network in place."""
    assert task.loss is not None
    optimizer, done, epoch = torch.optim.Adam(task.model.parameters(), lr=3e-3), 0, 0
    task.model.train()
    while done < steps:
        for inputs, targets in task.epoch_batches(epoch):
            optimizer.zero_grad()
            task.loss(task.model(inputs), targets).backward()
            optimizer.step()
            done += 1
        epoch += 1
    task.model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", default="70%,50%,35%")
    parser.add_argument("--train-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200, help="of pruning, and of finetuning")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    task = find_task("digits")
    train(task, options.train_steps)
    example = with_batch_size(task.example_input, options.batch)
    started = time.monotonic()
    dense = evaluate(task.model, task, example, "fp32")
    quantised = evaluate(task.model, task, example, "int8")
    rows: list[dict[str, Any]] = [
        {"budget": None, "way": "dense", **dense},
        {"budget": None, "way": "quantise", **quantised},
    ]
    record = {
        "what": "pruning and int8 at equal latency, onnxruntime on the CPU, digits",
        "environment": machine(),
        "label": "measured (CPU time)",
        "batch": options.batch,
        "rows": rows,
    }
    for row in rows:
        print(row, flush=True)
    for share in options.budgets.split(","):
        limit = float(share.strip().rstrip("%")) / 100 * dense["seconds"]
        for way, precision in (("prune", "fp32"), ("both", "int8")):
            with tempfile.TemporaryDirectory() as folder:
                row = {"budget": share, "limit_seconds": limit, "way": way}
                if way == "both" and quantised["seconds"] <= limit:
                    rows.append({**row, **quantised, "note": "int8 alone meets the budget"})
                    continue
                try:
                    slim = compress(
                        task, f"latency={limit * 1e3:.6g}ms", precision, Path(folder) / "run", options.steps,
                        options.samples, options.batch,
                    )  # fmt: skip
                    rows.append({**row, **evaluate(slim, task, example, precision)})
                except EccError as error:
                    rows.append({**row, "problem": str(error)})
                print(rows[-1], flush=True)
                write_record(record, options.out)
    print(f"{time.monotonic() - started:.0f} s")
    write_record(record, options.out)


if __name__ == "__main__":
    main()
