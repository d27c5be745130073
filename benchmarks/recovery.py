"""Loss after the least important channels of a group, or a whole residual branch, are removed: at once and after training.

    PYTHONPATH=src python3 benchmarks/recovery.py --data DATA --out results/recovery.json

Channel importance should predict what a removal costs in the end, not only before the network is trained again, and the
same unit has to hold for channels and for branches, since a plan chooses between them. For each CIFAR ResNet, a trained
network loses the least important third, two thirds or 90 % of the channels of one group, or one branch. The increase of
the training loss is measured, with batch statistics, at once and after a short training of both networks on equal batches.

An estimate consists of two rules. Channels: the sum of `TaylorImportance` over the removed channels, divided by the share
of the channels that remain (*share*), by its square root (*root*, as `WidthPlanner` does), or by nothing (*sum*).
Branches: the importance of its last parameters (*exits*), or the larger one of that and of what its channels lose at
their minimum widths (*larger*); both are divided by the share of the terms of the residual stream that remain. Reported are
the rank correlation with the measured increase over all removals, and the ratio of the 90th to the 10th percentile of
measured / predicted: 1 if the estimate is right up to a common factor.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation import batches_of, small_resnet, train
from importance import mask_of
from machine import commit, machine, write_record
from scipy.stats import spearmanr
from torch import nn

from ecc.constants import MIN_WIDTH_RATIO
from ecc.graph import ChannelGraph, mask_branches_, trace_channels
from ecc.methods.ecc.importance import BranchExits, ConsumerSlices
from ecc.task import Task, split_batch

SHARES = (1 / 3, 2 / 3, 0.9)
CHANNEL_RULES = {"sum": 0.0, "root": 0.5, "share": 1.0}
"""Power of the remaining share that the sum is divided by."""
BRANCH_RULES = ("exits", "larger")
LEAST = 1e-4
"""Increases of the loss are at least this, so that ratios are defined; training may even decrease it."""
CPU = torch.device("cpu")

Mask = Callable[[nn.Module], None]


def importance_of(model: nn.Module, graph: ChannelGraph, task: Task, batches: Iterator[Any], count: int) -> Any:
    """Variance over batches of the sum of w g of each channel, then of each branch, at fixed weights."""
    assert task.loss is not None
    slices, exits = ConsumerSlices(model, graph, CPU), BranchExits(model, graph.branches, CPU)
    products = []
    for images, targets in map(split_batch, [next(batches) for _ in range(count)]):
        model.zero_grad()
        task.loss(model(images), targets).backward()
        products.append(torch.cat([slices.products(), exits.products()]))
    model.zero_grad(set_to_none=True)
    return torch.stack(products).double().var(0, correction=0).numpy()


def removals(graph: ChannelGraph, values: Any) -> Iterator[tuple[dict[str, Any], Mask]]:
    """What is removed with its predictions, and a function that masks it in a copy of the network."""

    def lost(name: str, number: int) -> dict[str, float]:
        """What the least important channels of a group lose, by each rule."""
        first, stop = graph.channel_ids(name)
        share = 1 - number / graph[name].width
        total = float(np.sort(values[first - 1 : stop - 1])[:number].sum())
        return {rule: total / share**power for rule, power in CHANNEL_RULES.items()}

    for group in graph.prunable:
        first, stop = graph.channel_ids(group.name)
        order = np.argsort(values[first - 1 : stop - 1], kind="stable").tolist()
        for part in SHARES:
            number = int(part * group.width)
            alive = mask_of(graph, group.name, order[:number], CPU)
            about = {"removed": f"{part:.0%} of {group.name}", "is_branch": False}
            yield about | lost(group.name, number), partial(mask_slices_, graph=graph, alive=alive)
    axes = {tensor.name: tensor.axes for tensor in graph.tensors}
    streams = [frozenset(axes[name][0] for name in branch.exits) for branch in graph.branches]
    terms = {stream: count + 1 for stream, count in Counter(streams).items()}  # and what enters the stream
    for number, (branch, stream) in enumerate(zip(graph.branches, streams, strict=True)):
        own, scale = float(values[graph.num_channel_ids - 1 + number]), terms[stream] / (terms[stream] - 1)
        inner = [
            lost(name, graph[name].width - max(1, int(MIN_WIDTH_RATIO * graph[name].width))) for name in branch.groups
        ]
        predicted = {"exits": scale * own, "larger": scale * max([own, *(one["share"] for one in inner)])}
        about = {"removed": f"branch {branch.name}", "is_branch": True}
        yield about | predicted, partial(mask_branches_, graph=graph, names=[branch.name])


def mask_slices_(model: nn.Module, graph: ChannelGraph, alive: torch.Tensor) -> None:
    """Set the slices of dead channels to zero."""
    slices = ConsumerSlices(model, graph, CPU)
    slices.set_mask(alive)
    slices.apply_mask_()


@torch.no_grad()
def loss_of(model: nn.Module, task: Task, batches: list[Any]) -> float:
    """Mean loss with batch statistics; the network stays as it is."""
    assert task.loss is not None
    model = copy.deepcopy(model).train()
    return float(np.mean([float(task.loss(model(images), targets)) for images, targets in map(split_batch, batches)]))


def study(name: str, blocks: int, seed: int, options: Any) -> dict[str, Any]:
    """All removals of one network."""
    torch.manual_seed(seed)
    task = small_resnet(options.data, options.images, blocks)
    model, graph = task.model, trace_channels(task.model, task.example_input)
    train(
        model, task, torch.optim.Adam(model.parameters(), lr=options.lr), batches_of(task, 1000 * (seed + 1)),
        options.steps, options.lr, cosine=True,
    )  # fmt: skip
    values = importance_of(model, graph, task, batches_of(task, 0), options.batches)
    evaluated = [one for one, _ in zip(batches_of(task, 500), range(options.evaluated), strict=False)]

    def losses(mask: Mask | None) -> tuple[float, float]:
        """At once, and after a short training in which the mask holds."""
        copied = copy.deepcopy(model)
        if mask is not None:
            mask(copied)
        before = loss_of(copied, task, evaluated)
        after = (lambda: mask(copied)) if mask is not None else (lambda: None)
        adam = torch.optim.Adam(copied.parameters(), lr=options.recovery_lr)
        train(
            copied, task, adam, batches_of(task, 5000), options.recovery, options.recovery_lr, cosine=True, after=after
        )
        return before, loss_of(copied, task, evaluated)

    base, rows = losses(None), []
    for about, mask in removals(graph, values):
        found = losses(mask)
        rows.append({**about, "at_once": found[0] - base[0], "trained": found[1] - base[1]})
        print(
            name,
            seed,
            {key: one if isinstance(one, str) else round(one, 5) for key, one in rows[-1].items()},
            flush=True,
        )
    return {"network": name, "seed": seed, "commit": commit(), "loss": base[0], "loss_trained": base[1], "rows": rows}


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How well each estimate predicts the increases of one network."""
    found = []
    for channels in CHANNEL_RULES:
        for branches in BRANCH_RULES:
            predicted = np.array([row[branches if row["is_branch"] else channels] for row in rows])
            entry: dict[str, Any] = {"channels": channels, "branches": branches}
            for when in ("at_once", "trained"):
                measured = np.array([max(row[when], LEAST) for row in rows])
                low, high = np.quantile(measured / predicted, [0.1, 0.9])
                entry[when] = {
                    "correlation": float(spearmanr(predicted, measured).statistic),
                    "spread": float(high / low),
                }
            found.append(entry)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz")
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 2], help="of each of the three stages, by network")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--images", type=int, default=12_000, help="of training, at 16x16 pixels")
    parser.add_argument("--steps", type=int, default=600, help="of the dense network")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--recovery", type=int, default=60, help="steps after a removal")
    parser.add_argument("--recovery-lr", type=float, default=1e-3)
    parser.add_argument("--batches", type=int, default=100, help="for the importance")
    parser.add_argument("--evaluated", type=int, default=60, help="batches on which losses are measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    networks: list[dict[str, Any]] = []
    for seed in options.seeds:
        for blocks in options.blocks:
            found = study(f"resnet{6 * blocks + 2}", blocks, seed, options)
            networks.append({**found, "estimates": judge(found["rows"])})
            names = ("images", "steps", "lr", "recovery", "recovery_lr", "batches", "evaluated")
            record = {
                "what": "increase of the loss after removals of channels and branches, and its estimates",
                "environment": machine(commit=commit()),
                "settings": {name: getattr(options, name) for name in names},
                "networks": networks,
            }
            write_record(record, options.out)
            for entry in networks[-1]["estimates"]:
                print(networks[-1]["network"], seed, entry, flush=True)


if __name__ == "__main__":
    main()
