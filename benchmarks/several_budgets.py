"""One run with several budgets against one run for each budget: batches and scores on the embedded digits.

    PYTHONPATH=src python3 benchmarks/several_budgets.py --out results/several_budgets.json

The dense network is trained once for each seed; its batches are not counted, because both ways start from it. The energy is
that of an analytic platform, so it is estimated. `own` is `ecc.compress(budget=...)` for each budget, `several` is one
`ecc.compress(budgets=[...])`; both have the same settings.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from ablation import batches_of, build, train
from machine import commit, machine, write_record

import ecc
from ecc.task import Task


def trained(options: Any, seed: int) -> Task:
    """The task with a trained dense network."""
    task = build(argparse.Namespace(task="digits"), seed)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=options.lr)
    train(task.model, task, optimizer, batches_of(task, 1000 * (seed + 1)), options.pretrain, options.lr, cosine=True)
    task.model.eval()
    return task


def compress(task: Task, folder: Path, options: Any, seed: int, **budget: Any) -> ecc.CompressResult:
    """One run."""
    assert task.loss is not None
    return ecc.compress(
        task.model,
        task.epoch_batches,
        loss=task.loss,
        evaluate=task.evaluate,
        example_input=task.example_input,
        meter=options.meter,
        folder=folder,
        name="digits",
        progress=False,
        samples=options.samples,
        lr=options.lr,
        prune_steps=options.prune,
        finetune_steps=options.finetune,
        seed=100 * seed,
        **budget,
    )


def cell(result: ecc.CompressResult) -> dict[str, Any]:
    """What is recorded of a result."""
    (row,) = result.summary.budgets.values()
    assert result.summary.batches is not None
    return {
        "score": result.score,
        "of_budget": row.result / row.limit,
        "met": row.met,
        "batches": result.summary.batches.total,
        "cost_checks": result.summary.cost_checks,
    }


def run_seed(options: Any, seed: int) -> list[dict[str, Any]]:
    """The cells of one dense network."""
    task = trained(options, seed)
    assert task.evaluate is not None
    dense = float(task.evaluate(task.model))
    results: list[tuple[str, str, ecc.CompressResult]] = []
    with tempfile.TemporaryDirectory() as folder:
        if "several" in options.ways:
            front = compress(task, Path(folder) / "several", options, seed, budgets=options.budgets).front
            results += [("several", budget, one) for budget, one in zip(options.budgets, front, strict=True)]
        for number, budget in enumerate(options.budgets if "own" in options.ways else ()):
            results.append(("own", budget, compress(task, Path(folder) / str(number), options, seed, budget=budget)))
    facts = {"seed": seed, "dense": dense, "commit": options.commit}
    return [{"way": way, "budget": budget, **facts, **cell(one)} for way, budget, one in results]


def summary(cells: list[dict[str, Any]], budgets: list[str]) -> dict[str, Any]:
    """Means over the seeds."""

    def values(name: str, way: str, budget: str | None = None) -> list[float]:
        chosen = [one for one in cells if one["way"] == way and budget in (None, one["budget"])]
        return [float(one[name]) for one in sorted(chosen, key=lambda one: int(one["seed"]))]

    rows = {}
    for budget in budgets:
        own, several = values("score", "own", budget), values("score", "several", budget)
        rows[budget] = {
            "own": statistics.fmean(own),
            "several": statistics.fmean(several),
            "points": 100 * statistics.fmean(two - one for one, two in zip(own, several, strict=True)),
        }
    one_run, several_runs = values("batches", "own"), values("batches", "several")
    together = len(budgets) * statistics.fmean(several_runs)
    return {
        "budgets": rows,
        "batches_of_one_run": statistics.fmean(one_run),
        "batches_of_several": together,
        "ratio": together / statistics.fmean(one_run),
        "within_98_to_100": statistics.fmean(0.98 <= one <= 1.0 for one in values("of_budget", "several")),
        "worst_points": min(row["points"] for row in rows.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", nargs="*", default=["80%", "65%", "50%", "35%", "25%"], help="Mildest first.")
    parser.add_argument(
        "--ways", nargs="*", default=["own", "several"], help="Other cells of the output file are kept."
    )
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="Records whose cells are added.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretrain", type=int, default=600)
    parser.add_argument("--prune", type=int, default=300)
    parser.add_argument("--finetune", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--meter", default="platform:jetson-tx2")
    parser.add_argument("--samples", type=int, default=50)
    options = parser.parse_args()
    options.commit = commit()
    files = [file for file in (options.out, *options.add) if file.exists()]
    old = [one for file in files for one in json.loads(file.read_text(encoding="utf-8"))["cells"]]
    cells = [one for one in old if one["way"] not in options.ways]
    workers = min(options.seeds, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for some in pool.map(partial(run_seed, options), range(options.seeds) if options.ways else ()):
            cells += some
            print(some, flush=True)
    record = {
        "what": "scores and training batches of one run with several budgets, and of one run for each budget",
        "environment": machine(commit=options.commit),
        "steps": {"pretrain": options.pretrain, "prune": options.prune, "finetune": options.finetune},
        "platform": options.meter,
        "seeds": options.seeds,
        "cells": cells,
    }
    if {one["way"] for one in cells} == {"own", "several"}:
        record["summary"] = summary(cells, options.budgets)
        print(record["summary"])
    write_record(record, options.out)


if __name__ == "__main__":
    main()
