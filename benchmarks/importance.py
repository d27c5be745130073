"""How well channel importance predicts the loss after channels are removed.

    PYTHONPATH=src python3 benchmarks/importance.py --out results/importance.json
    PYTHONPATH=src python3 benchmarks/importance.py --data DATA --tasks resnet20:cifar10 --out importance.json

For each network at three points of its training: the statistics of some training batches at fixed weights, then random
removals. A removal masks a random part (up to 60 %) of the channels of one random group, and the increase of the loss is
measured on held-out images, with the batch statistics of the network without these channels. A criterion predicts the
sum over the removed channels. Reported for each criterion:

- correlation: Spearman's rank correlation of predicted and measured increase over all removals;
- slopes: measured / predicted increase of each group (least squares through the origin), as the ratio of the largest to
  the smallest slope, and of the 90th to the 10th percentile.

"/ remaining share" divides the sum by the share of the channels of the group that remain: behind a batch norm, what
remains is scaled up, and the error with it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import commit, machine, write_record
from scipy.stats import spearmanr
from torch import Tensor, nn

from ecc.graph import ChannelGraph, trace_channels
from ecc.methods.ecc.importance import ConsumerSlices, adam_preconditioners
from ecc.task import Task, split_batch
from ecc.zoo.registry import find_task

REMOVALS = 200
POINTS = (0.1, 0.4, 1.0)
"""Fractions of the training."""


def batches_of(task: Task) -> Iterator[Any]:
    """Training batches, epoch after epoch."""
    epoch = 0
    while True:
        yield from task.epoch_batches(epoch)
        epoch += 1


class Measured:
    """Loss of a network with some channels masked, on fixed batches."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, task: Task, batches: list[Any], device: Any) -> None:
        assert task.loss is not None
        self._model, self._graph, self._loss, self._device = model, graph, task.loss, device
        self._batches = batches
        self.slices = ConsumerSlices(model, graph, device)
        self._saved = [tensor.detach().clone() for tensor in self.slices.tensors]

    @torch.no_grad()
    def loss(self, alive: Tensor | None = None) -> float:
        """Mean loss with batch statistics; the running statistics stay as they are."""
        if alive is not None:
            self.slices.set_mask(alive)
            self.slices.apply_mask_()
        norms = [layer for layer in self._model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
        momentum = [layer.momentum for layer in norms]
        for layer in norms:
            layer.momentum = 0.0
        total = 0.0
        for images, targets in map(split_batch, self._batches):
            total += float(self._loss(self._model(images.to(self._device)), targets.to(self._device)))
        for layer, value in zip(norms, momentum, strict=True):
            layer.momentum = value
        for tensor, saved in zip(self.slices.tensors, self._saved, strict=True):
            tensor.copy_(saved)
        return total / len(self._batches)


def statistics(
    model: nn.Module, graph: ChannelGraph, task: Task, batches: list[Any], optimizer: Any, device: Any
) -> dict[str, Tensor]:
    """Channel importance by every criterion, from gradients of some batches at fixed weights."""
    assert task.loss is not None
    slices = ConsumerSlices(model, graph, device)
    products = []
    for images, targets in map(split_batch, batches):
        model.zero_grad()
        task.loss(model(images.to(device)), targets.to(device)).backward()
        products.append(slices.products())
    model.zero_grad()
    stacked = torch.stack(products).double()
    mean, square = stacked.mean(0), stacked.square().mean(0)
    norms = slices.norms()
    adam = slices.norms(adam_preconditioners(optimizer, slices.tensors))
    return {
        "weight_norm": norms.double(),
        "adam_norm": adam.double(),
        "taylor": square,
        "taylor_mean": mean.abs(),
        "taylor_variance": (square - mean.square()).clamp(min=0),
    }


def random_removals(graph: ChannelGraph, count: int, rng: np.random.Generator) -> list[tuple[str, list[int]]]:
    """Groups and channels."""
    groups = [group for group in graph.prunable if group.width > 2]
    found = []
    for _ in range(count):
        group = groups[rng.integers(len(groups))]
        number = int(rng.integers(1, max(2, int(0.6 * group.width)) + 1))
        found.append((group.name, rng.choice(group.width, number, replace=False).tolist()))
    return found


def mask_of(graph: ChannelGraph, name: str, channels: list[int], device: Any) -> Tensor:
    alive = torch.ones(graph.num_channel_ids - 1, dtype=torch.bool)
    alive[graph.channel_ids(name)[0] - 1 + torch.tensor(channels)] = False
    return alive.to(device)


def judge(predicted: np.ndarray, increase: np.ndarray, names: list[str]) -> dict[str, float]:
    """Correlation over all removals, and how much slopes differ between groups."""
    slopes = []
    for name in sorted(set(names)):
        here = np.array([one == name for one in names])
        if here.sum() >= 3 and (predicted[here] ** 2).sum() > 0:
            slopes.append(float((predicted[here] * increase[here]).sum() / (predicted[here] ** 2).sum()))
    positive = np.array([max(slope, 1e-12) for slope in slopes])
    low, high = np.quantile(positive, [0.1, 0.9])
    return {
        "correlation": float(spearmanr(predicted, increase).statistic),
        "slope_ratio_p90_p10": float(high / low),
        "slope_ratio_max_min": float(positive.max() / positive.min()),
    }


# ---------------------------------------------------------------- one network


def with_remaining_share(graph: ChannelGraph, removal: tuple[str, list[int]], predicted: float) -> float:
    """Divided by the share of the channels that remain, as `WidthPlanner` does."""
    name, channels = removal
    return predicted / (1 - len(channels) / graph[name].width)


def study(
    task: Task, model: nn.Module, graph: ChannelGraph, optimizer: Any, batches: Iterator[Any], options: Any
) -> dict[str, Any]:
    """All criteria at the present weights."""
    device = next(model.parameters()).device
    importance = statistics(model, graph, task, [next(batches) for _ in range(options.batches)], optimizer, device)
    held_out = Measured(model, graph, task, [next(batches) for _ in range(options.evaluated)], device)
    base = held_out.loss()
    removals = random_removals(graph, options.removals, np.random.default_rng(0))
    increase = np.array([held_out.loss(mask_of(graph, *removal, device)) - base for removal in removals])
    names = [name for name, _ in removals]
    found: dict[str, Any] = {"loss": base, "median_increase": float(np.median(increase)), "criteria": {}}
    for criterion, values in importance.items():
        sums = np.array(
            [float(values[graph.channel_ids(name)[0] - 1 + torch.tensor(chosen)].sum()) for name, chosen in removals]
        )
        found["criteria"][criterion] = judge(sums, increase, names)
        pairs = zip(removals, sums.tolist(), strict=True)
        shared = np.array([with_remaining_share(graph, removal, one) for removal, one in pairs])
        found["criteria"][f"{criterion} / remaining share"] = judge(shared, increase, names)
    return found


def study_task(name: str, task: Task, options: Any) -> dict[str, Any]:
    """All criteria at three points of the training of one network."""
    assert task.loss is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    graph = trace_channels(task.model, task.example_input)
    model = task.model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    batches, done = batches_of(task), 0
    points = {}
    for fraction in POINTS:
        while done < fraction * options.steps:
            images, targets = split_batch(next(batches))
            optimizer.zero_grad()
            task.loss(model(images.to(device)), targets.to(device)).backward()
            optimizer.step()
            done += 1
        begin = time.perf_counter()
        points[f"{done} steps"] = study(task, model, graph, optimizer, batches, options)
        print(f"{name} after {done} steps ({time.perf_counter() - begin:.0f} s)")
        for criterion, row in points[f"{done} steps"]["criteria"].items():
            print(
                f"    {criterion:36} correlation {row['correlation']:6.3f}, slopes p90/p10 "
                f"{row['slope_ratio_p90_p10']:8.2f}, max/min {row['slope_ratio_max_min']:8.2f}",
                flush=True,
            )
    return {"groups": len(graph.prunable), "points": points}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="Folder with cifar10.npz, imagenette128.npz and camvid.npz.")
    parser.add_argument("--tasks", nargs="*", default=["digits"], help="digits, or NETWORK:DATA, as resnet20:cifar10.")
    parser.add_argument("--steps", type=int, default=300, help="Training steps to the last point.")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batches", type=int, default=50, help="Batches for the statistics.")
    parser.add_argument("--evaluated", type=int, default=8, help="Batches on which the increase is measured.")
    parser.add_argument("--removals", type=int, default=REMOVALS)
    parser.add_argument("--batch-size", type=int)

    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    found = {}
    for name in options.tasks:
        network, _, data = name.partition(":")
        if data:
            from packed import packed_task  # needs Pillow

            task = packed_task(network, data, options.data, batch=options.batch_size)
        else:
            task = find_task(network)
        found[name] = study_task(name, task, options)
    write_record(
        {
            "what": "rank correlation and slopes of predicted and measured increase of the loss over random removals",
            "environment": machine(commit=commit()),
            "steps": options.steps,
            "batches": options.batches,
            "removals": options.removals,
            "networks": found,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
