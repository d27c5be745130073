"""Ablation of ECC at equal numbers of batches: one cell for each task, variant, budget and seed.

    PYTHONPATH=src python3 benchmarks/ablation.py --out results/ablation.json
    PYTHONPATH=src python3 benchmarks/ablation.py --task resnet8 --data DATA --budgets 70% 30% --out results/ablation.json

One training loop serves all cells. The dense network is trained for `--pretrain` batches (or has published weights), then
a solver prunes and trains it to a budget in MACs for `--prune` batches, and the slim network is trained for `--finetune`
batches; whatever a variant computes on training batches is taken from these. Each cell names its commit, seed, batches and
seconds, and has two scores: on held-out training data, by which variants are chosen, and on test data, which is reported.
Cells that the output file has already are kept, so that the script can be stopped and run again, and cells of other
commits can be added by running it with another tree in PYTHONPATH.

Tasks: digits; resnet8 is the CIFAR ResNet with one block in each stage on 16x16 pixels (means of 2x2) of a subset of
CIFAR-10, and vit a ViT with four blocks of 64 channels on the same images; NETWORK:DATA is a network of the zoo on a packed data set.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ablation_variants import VARIANTS, Variant, make_solver
from depth import ViT
from machine import commit, machine, write_record
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ecc.energy import counted_cost
from ecc.graph import ChannelGraph, slim, trace_channels
from ecc.settings import CompressSettings
from ecc.task import Task, split_batch
from ecc.zoo.digits import Split, accuracy, shuffled_batches
from ecc.zoo.registry import find_task
from ecc.zoo.resnet_cifar import CifarResNet

EMA_DECAY = 0.98
SMALL_IMAGES = 3000
"""Training images of resnet8 and vit, without --limit."""


def batches_of(task: Task, first_epoch: int) -> Iterator[Any]:
    """Training batches, epoch after epoch."""
    epoch = first_epoch
    while True:
        yield from task.epoch_batches(epoch)
        epoch += 1


def train(
    model: nn.Module,
    task: Task,
    optimizer: Any,
    batches: Iterator[Any],
    steps: int,
    lr: float | Callable[[int], float],
    *,
    cosine: bool = False,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Some steps at a constant learning rate, along a cosine to zero, or with a rate for each step."""
    assert task.loss is not None
    device = next(model.parameters()).device
    model.train()
    for step in range(steps):
        rate = lr if isinstance(lr, float | int) else lr(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * (0.5 + 0.5 * math.cos(math.pi * step / steps)) if cosine else rate
        inputs, targets = split_batch(next(batches))
        optimizer.zero_grad()
        task.loss(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        after()


# ---------------------------------------------------------------- tasks


def build(options: Any, seed: int) -> Task:
    """The task, with other initial weights for each seed."""
    network, _, data = options.task.partition(":")
    if data:
        from packed import packed_task  # needs Pillow

        return packed_task(network, data, options.data, limit=options.limit)
    torch.manual_seed(seed)
    if network == "resnet8":
        return small_resnet(options.data, options.limit or SMALL_IMAGES)
    if network == "vit":
        vit = ViT(width=64, depth=4, heads=4, patch=4, size=16)
        return small_images("vit", vit, options.data, options.limit or SMALL_IMAGES)
    task = find_task(network)
    for layer in task.model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.reset_parameters()
    return task


def small_resnet(folder: Path, limit: int, blocks: int = 1) -> Task:
    """A ResNet with three stages of some blocks on small images of CIFAR-10."""
    return small_images(f"resnet{6 * blocks + 2}", CifarResNet(blocks), folder, limit)


def small_images(name: str, model: nn.Module, folder: Path, limit: int) -> Task:
    """A network on images of CIFAR-10 with 16x16 pixels, which are means of 2x2."""
    from packed import as_packed, packed_data  # needs Pillow

    data = packed_data("cifar10", folder)
    splits = []
    for found, count in ((data.train, limit), (data.held_out, 1000), (data.test, 2000)):
        packed = as_packed(found)
        images = F.avg_pool2d(packed.images[:count].float() / 127.5 - 1, 2)
        splits.append(Split(images, packed.labels[:count]))
    return Task(
        name=name,
        model=model,
        example_input=splits[0].images[:2].clone(),
        loss=F.cross_entropy,
        train_batches=partial(shuffled_batches, splits[0]),
        evaluate=partial(accuracy, splits[2]),
        evaluate_held_out=partial(accuracy, splits[1]),
    )


# ---------------------------------------------------------------- one cell


def run_cell(
    task: Task, dense: nn.Module, graph: ChannelGraph, options: Any, name: str, budget: str, seed: int
) -> dict[str, Any]:
    """Prune, slim, fine-tune and evaluate."""
    begin = time.process_time()
    assert task.evaluate is not None
    assert task.evaluate_held_out is not None
    variant = VARIANTS[name]
    model, cost = copy.deepcopy(dense), counted_cost(graph, "macs")
    batches = batches_of(task, 1000 * (seed + 1))
    counted = Counted(batches)
    solver, steps = make_solver(variant, model, task, graph, cost, budget, options, counted, train)
    rates = learning_rates(variant, options, 1 - float(budget.rstrip("%")) / 100)
    used = options.prune - steps
    train(model, task, solver, counted, steps, lambda step: rates("prune", used + step))
    is_met = solver.is_met
    small = slim(model, graph, width_multiple=options.width_multiple)
    optimizer = torch.optim.Adam(small.parameters(), lr=options.lr)
    averaged = AveragedModel(small, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)
    after = partial(averaged.update_parameters, small) if variant.ema else lambda: None
    train(small, task, optimizer, counted, options.finetune, lambda step: rates("finetune", step), after=after)
    result = (averaged.module if variant.ema else small).eval()
    assert counted.count == options.prune + options.finetune
    return {
        "task": options.task,
        "variant": name,
        "budget": budget,
        "seed": seed,
        "batches": counted.count,
        "commit": options.commit,
        "held_out": float(task.evaluate_held_out(result)),
        "test": float(task.evaluate(result)),
        "cost": float(solver.cost[0]) / cost.dense,
        "is_met": is_met,
        "widths": list(solver.widths.values()),
        "seconds": time.process_time() - begin,
    }


class Counted:
    """Counts the batches that are taken."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.count += 1
        return next(self._batches)


def learning_rates(variant: Variant, options: Any, reduction: float) -> Callable[[str, int], float]:
    """Learning rate of a phase and step: constant, then a cosine; or one cosine over both phases."""
    settings = CompressSettings(
        prune_steps=options.prune, finetune_steps=options.finetune, lr=options.lr, lr_schedule=variant.lr_schedule
    )

    def rate(phase: str, step: int) -> float:
        schedule = settings.joint_schedule(phase, reduction) or settings.schedule(phase)
        steps = options.prune if phase == "prune" else options.finetune
        return float(options.lr) if schedule is None else schedule.lr(options.lr, step, steps)

    return rate


# ---------------------------------------------------------------- all cells


def merge(records: list[dict[str, Any]], out: Path) -> None:
    """One record with the cells of several, which ran in parallel."""
    first, *others = records
    for other in others:
        first["cells"] += other["cells"]
        first["dense"] |= other["dense"]
        first["steps"] |= other["steps"]
    first["cells"].sort(key=lambda cell: (cell["task"], cell["variant"], cell["budget"], cell["seed"]))
    write_record(first, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--merge", type=Path, nargs="*", default=[], help="Records whose cells are added; runs nothing."
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", type=Path, help="Folder with cifar10.npz, imagenette128.npz and camvid.npz.")
    parser.add_argument("--limit", type=int, help="Number of training images.")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--budgets", nargs="*", default=["60%", "15%"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--pretrain", type=int, default=250)
    parser.add_argument("--prune", type=int, default=200)
    parser.add_argument("--finetune", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width-multiple", type=int, default=4)
    parser.add_argument("--commit", help="Commit of the tree, if it has no .git.")
    options = parser.parse_args()
    options.commit = options.commit or commit()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    record = json.loads(options.out.read_text()) if options.out.exists() else {"cells": [], "steps": {}}
    cells, dense_scores = record["cells"], record.setdefault("dense", {})
    if options.merge:
        merge([json.loads(file.read_text()) for file in options.merge], options.out)
        return
    have = {(cell["task"], cell["variant"], cell["budget"], cell["seed"]) for cell in cells}
    for seed in options.seeds:
        wanted = [
            (variant, budget)
            for budget in options.budgets
            for variant in options.variants
            if (options.task, variant, budget, seed) not in have
        ]
        if not wanted:
            continue
        task = build(options, seed)
        graph = trace_channels(task.model, task.example_input)
        dense = task.model.to("cuda" if torch.cuda.is_available() else "cpu")
        optimizer = torch.optim.Adam(dense.parameters(), lr=options.lr)
        train(dense, task, optimizer, batches_of(task, 1000 * seed), options.pretrain, options.lr)
        assert task.evaluate is not None
        dense_scores[f"{options.task} {seed}"] = float(task.evaluate(dense.eval()))
        for variant, budget in wanted:
            cells.append(run_cell(task, dense, graph, options, variant, budget, seed))
            shown = ("variant", "budget", "seed", "held_out", "test", "cost", "seconds")
            print({key: cells[-1][key] for key in shown}, flush=True)
            steps = {name: getattr(options, name) for name in ("pretrain", "prune", "finetune", "width_multiple")}
            if options.task in ("resnet8", "vit"):
                steps["images"] = options.limit or SMALL_IMAGES
            write_record(
                {
                    "what": "scores by task, variant, budget and seed, at equal numbers of batches",
                    "environment": machine(),
                    "steps": {**record["steps"], options.task: steps},
                    "dense": dense_scores,
                    "cells": cells,
                },
                options.out,
            )


if __name__ == "__main__":
    main()
