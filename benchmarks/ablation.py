"""Ablation of ECC at equal numbers of batches: one cell for each variant, budget and seed.

    PYTHONPATH=src python3 benchmarks/ablation.py --out results/ablation.json
    PYTHONPATH=src python3 benchmarks/ablation.py --task resnet20:cifar10 --data DATA --limit 5000 --out ablation.json

One training loop serves all cells: the dense network is trained for `--pretrain` batches (or has published weights), then
`EccSolver` prunes and trains it to a budget in MACs for `--prune` batches, and the slim network is trained for
`--finetune` batches. The learning rate is constant while pruning and falls along a cosine while fine-tuning. Each cell
names its commit, seed and batches. Cells that the output file has already are kept, so that cells of other commits can be
added by running the script with another tree in PYTHONPATH: `--label` names such variants.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine, write_record
from torch import nn

from ecc.energy import counted_cost
from ecc.graph import slim, trace_channels
from ecc.methods import EccSolver
from ecc.task import Task, split_batch
from ecc.zoo.registry import find_task

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "adam_norm": {"importance": "adam_norm"},
    "early": {"ramp": 0.2},
    "late": {"ramp": 0.9},
    "uniform_floor": {"uniform_floor": 0.8},
    "admm": {"solver": "admm"},
    "admm taylor": {"solver": "admm", "importance": "taylor"},
}


def batches_of(task: Task, first_epoch: int) -> Iterator[Any]:
    """Training batches, epoch after epoch."""
    epoch = first_epoch
    while True:
        yield from task.epoch_batches(epoch)
        epoch += 1


def train(
    model: nn.Module, task: Task, optimizer: Any, batches: Iterator[Any], steps: int, lr: float, *, cosine: bool
) -> None:
    """Some steps at a constant learning rate, or along a cosine to zero."""
    assert task.loss is not None
    device = next(model.parameters()).device
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (0.5 + 0.5 * math.cos(math.pi * step / steps)) if cosine else lr
        inputs, targets = split_batch(next(batches))
        optimizer.zero_grad()
        task.loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()


def build(options: Any, seed: int) -> Task:
    """The task, with other initial weights for each seed."""
    network, _, data = options.task.partition(":")
    if data:
        from packed import packed_task  # needs Pillow

        return packed_task(network, data, options.data, limit=options.limit)
    task = find_task(network)
    torch.manual_seed(seed)
    for layer in task.model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    return task


def run_cell(
    task: Task, dense: nn.Module, graph: Any, options: Any, variant: str, budget: str, seed: int
) -> dict[str, Any]:
    """Prune, slim, fine-tune and evaluate."""
    begin = time.perf_counter()
    model = copy.deepcopy(dense)
    cost = counted_cost(graph, "macs")
    batches = batches_of(task, 1000 * (seed + 1))
    settings = {**VARIANTS[variant]}
    solver = EccSolver(
        model,
        graph,
        cost,
        budget,
        options.prune,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        width_multiple=1 if settings.get("solver") == "admm" else options.width_multiple,
        **settings,
    )
    train(model, task, solver, batches, options.prune, options.lr, cosine=False)
    is_met = solver.is_met
    small = slim(model, graph, width_multiple=options.width_multiple)
    optimizer = torch.optim.Adam(small.parameters(), lr=options.lr)
    train(small, task, optimizer, batches, options.finetune, options.lr, cosine=True)
    assert task.evaluate is not None
    return {
        "task": options.task,
        "variant": options.label or variant,
        "budget": budget,
        "seed": seed,
        "batches": options.prune + options.finetune,
        "commit": options.commit or commit(),
        "score": float(task.evaluate(small.eval())),
        "cost": float(solver.cost[0]) / cost.dense,
        "is_met": is_met,
        "widths": solver.widths,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", type=Path, help="Folder with cifar10.npz, imagenette128.npz and camvid.npz.")
    parser.add_argument("--limit", type=int, help="Number of training images.")
    parser.add_argument("--variants", nargs="*", default=["default"], choices=VARIANTS)
    parser.add_argument("--budgets", nargs="*", default=["80%", "50%", "25%", "12%"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pretrain", type=int, default=250)
    parser.add_argument("--prune", type=int, default=200)
    parser.add_argument("--finetune", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width-multiple", type=int, default=4)
    parser.add_argument("--label", help="Name of the variant in the table, for a tree other than this one.")
    parser.add_argument("--commit", help="Commit of that tree.")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    cells = json.loads(options.out.read_text())["cells"] if options.out.exists() else []
    for seed in range(options.seeds):
        task = build(options, seed)
        graph = trace_channels(task.model, task.example_input)
        dense = task.model.to("cuda" if torch.cuda.is_available() else "cpu")
        optimizer = torch.optim.Adam(dense.parameters(), lr=options.lr)
        train(dense, task, optimizer, batches_of(task, 1000 * seed), options.pretrain, options.lr, cosine=False)
        for variant in options.variants:
            for budget in options.budgets:
                cells.append(run_cell(task, dense, graph, options, variant, budget, seed))
                print(
                    {key: cells[-1][key] for key in ("variant", "budget", "seed", "score", "cost", "seconds")},
                    flush=True,
                )
    table: dict[str, dict[str, list[float]]] = {}
    for cell in cells:
        table.setdefault(f"{cell['task']} {cell['budget']}", {}).setdefault(cell["variant"], []).append(cell["score"])
    means = {
        row: {
            variant: {"mean": statistics.fmean(found), "std": statistics.pstdev(found), "seeds": len(found)}
            for variant, found in columns.items()
        }
        for row, columns in table.items()
    }
    for row, columns in means.items():
        print(row, {variant: f"{100 * one['mean']:.2f} +- {100 * one['std']:.2f}" for variant, one in columns.items()})
    write_record(
        {
            "what": "test score by variant, budget and seed, at equal numbers of batches",
            "environment": machine(),
            "means": means,
            "cells": cells,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
