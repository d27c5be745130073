"""How well channel importance predicts the loss after channels are removed.

    PYTHONPATH=src python3 benchmarks/importance.py --out results/importance.json
    PYTHONPATH=src python3 benchmarks/importance.py --data DATA --tasks resnet8 resnet20:cifar10 --out importance.json

For each network at three points of its training: the statistics of some training batches at fixed weights, then random
removals. A removal masks a random part (up to 60 %) of the channels of one random group, and the increase of the loss is
measured on held-out images, with the batch statistics of the network without these channels. A criterion predicts the
sum over the removed channels. Reported for each criterion:

- correlation: Spearman's rank correlation of predicted and measured increase over all removals;
- slopes: measured / predicted increase of each group (least squares through the origin), as the ratio of the largest to
  the smallest slope, and of the 90th to the 10th percentile.

Criteria: count (share of the channels of the group, the same for all channels: what the number alone predicts), weight_norm
(plain norm), lamp (squared norm / sum of all that are at least as large in the group: Lee et al., ICLR 2021), batch_norm (scale of
the batch norm: Liu et al., ICCV 2017; only where every group has one), activation (share of the squared
outputs of the consumers: squared weights times the mean square of their inputs, as Wanda: Sun et al., ICLR 2024), adam_norm (the paper's),
taylor (mean square of the sum of w g), taylor_mean (absolute mean), taylor_variance (variance over batches, as
`TaylorImportance`), and

- corrected: taylor_variance, divided by the square root of the share of the channels of the group that remain, as
  `WidthPlanner` does. Behind a batch norm, what remains is scaled up, and the error with it;
- by_share: taylor_variance, divided by that share itself, as `WidthPlanner` did in earlier versions;
- joint: the variance of the sum over all removed channels at once, which has the covariances, divided by that share;
- calibrated: corrected, times a factor of each group: measured / predicted increase of some other random removals of that
  group on other batches, shrunk to the factor of all groups where it is uncertain.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ablation import batches_of, small_resnet
from machine import commit, machine, write_record
from scipy.stats import spearmanr
from torch import Tensor, nn

from ecc.graph import ChannelGraph, ChannelGroup, trace_channels
from ecc.methods.ecc.importance import ConsumerSlices, adam_preconditioners
from ecc.task import Task, split_batch
from ecc.zoo.registry import find_task

REMOVALS = 200
POINTS = (0.1, 0.4, 1.0)
"""Fractions of the training."""


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


def equal_shares(graph: ChannelGraph) -> Tensor:
    """1 / width of the group for each channel."""
    found = torch.zeros(graph.num_channel_ids - 1, dtype=torch.float64)
    for group in graph.prunable:
        found[all_of(graph, group)] = 1 / group.width
    return found


def all_of(graph: ChannelGraph, group: ChannelGroup) -> Tensor:
    """Positions of the channels of a group among all channels."""
    return indices(graph, (group.name, list(range(group.width))))


def lamp(graph: ChannelGraph, norms: Tensor) -> Tensor:
    """Squared norm of each channel / sum of those in its group that are at least as large."""
    found = torch.zeros_like(norms)
    for group in graph.prunable:
        places = all_of(graph, group)
        ordered, order = norms[places].sort(descending=True)
        found[places[order]] = ordered / ordered.cumsum(0).clamp(min=1e-300)
    return found


def batch_norm_scales(model: nn.Module, graph: ChannelGraph) -> Tensor | None:
    """Mean absolute scale of the batch norms of each channel; None if a group has no batch norm."""
    norms = {
        f"{path}.weight": module.weight.detach().abs().double().cpu()
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
    }
    found = torch.zeros(graph.num_channel_ids - 1, dtype=torch.float64)
    for group in graph.prunable:
        scales = [norms[one.tensor][one.index.cpu()].mean(1) for one in group.slices if one.tensor in norms]
        if not scales:
            return None
        found[all_of(graph, group)] = torch.stack(scales).mean(0)
    return found


class OutputShares:
    """Share of the squared outputs of its consumers that each channel contributes, as if inputs were uncorrelated.

    It observes the forward passes from its creation on.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self._graph = graph
        self._layers = {
            f"{path}.weight": module
            for path, module in model.named_modules()
            if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        }
        self._squares: dict[str, Tensor] = {}
        self._handles = [one.register_forward_pre_hook(self._hook(name)) for name, one in self._layers.items()]

    def _hook(self, name: str) -> Any:
        def add_squares(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().double()
            channels = 1 if isinstance(module, nn.Conv2d) else x.ndim - 1
            mean = x.square().mean([axis for axis in range(x.ndim) if axis != channels])
            self._squares[name] = self._squares.get(name, 0.0) + mean.cpu()

        return add_squares

    def finish(self) -> Tensor:
        """The shares, summed over the consumers of each channel; nothing is observed afterwards."""
        for handle in self._handles:
            handle.remove()
        found = torch.zeros(self._graph.num_channel_ids - 1, dtype=torch.float64)
        for group in self._graph.prunable:
            places = all_of(self._graph, group)
            for one in group.slices:
                if one.is_consumer and one.axis == 1 and one.tensor in self._squares:
                    weight = self._layers[one.tensor].weight.detach().double().cpu()
                    squares = self._squares[one.tensor] * weight.square().transpose(0, 1).flatten(1).sum(1)
                    found[places] += squares[one.index.cpu()].sum(1) / squares.sum().clamp(min=1e-300)
        return found


def statistics(
    model: nn.Module, graph: ChannelGraph, task: Task, batches: list[Any], optimizer: Any, device: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """(batches, channels) sums of w g, and channel importance by every criterion, at fixed weights."""
    assert task.loss is not None
    slices, output_shares = ConsumerSlices(model, graph, device), OutputShares(model, graph)
    products = []
    for images, targets in map(split_batch, batches):
        model.zero_grad()
        task.loss(model(images.to(device)), targets.to(device)).backward()
        products.append(slices.products())
    model.zero_grad()
    stacked = torch.stack(products).double()
    mean, square = stacked.mean(0), stacked.square().mean(0)
    norms, scales = slices.norms().double(), batch_norm_scales(model, graph)
    found = {
        "count": equal_shares(graph),
        "weight_norm": norms,
        "lamp": lamp(graph, norms.cpu()),
        "batch_norm": scales,
        "activation": output_shares.finish(),
        "adam_norm": slices.norms(adam_preconditioners(optimizer, slices.tensors)).double(),
        "taylor": square,
        "taylor_mean": mean.abs(),
        "taylor_variance": (square - mean.square()).clamp(min=0),
    }
    return stacked, {name: values for name, values in found.items() if values is not None}


def random_removals(
    graph: ChannelGraph, count: int, rng: np.random.Generator, *, each: bool = False
) -> list[tuple[str, list[int]]]:
    """Groups and channels; as many removals of each group, or of random groups."""
    groups = [group for group in graph.prunable if group.width > 2]
    found = []
    for number in range(count * len(groups) if each else count):
        group = groups[number % len(groups) if each else rng.integers(len(groups))]
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


Removal = tuple[str, list[int]]
"""A group, and channels of it."""


def indices(graph: ChannelGraph, removal: Removal) -> Tensor:
    """Positions of the removed channels among all channels."""
    name, channels = removal
    return graph.channel_ids(name)[0] - 1 + torch.tensor(channels)


def remaining_shares(graph: ChannelGraph, removals: list[Removal]) -> np.ndarray:
    """Share of the channels of the group that remain after each removal."""
    return np.array([1 - len(channels) / graph[name].width for name, channels in removals])


def corrected(graph: ChannelGraph, removals: list[Removal], values: Tensor, power: float = 0.5) -> np.ndarray:
    """Sums over the removed channels, divided by a power of the share that remains."""
    sums = np.array([float(values[indices(graph, removal)].sum()) for removal in removals])
    divided: np.ndarray = sums / remaining_shares(graph, removals) ** power
    return divided


def calibration_factors(removals: list[Removal], predicted: np.ndarray, increase: np.ndarray) -> dict[str, float]:
    """Measured / predicted increase of each group: least squares through the origin, shrunk to that of all groups.

    The less certain the factor of a group is compared with how much factors differ, the closer it is to the common one.
    """
    slopes, errors = {}, {}
    for name in sorted({name for name, _ in removals}):
        here = np.array([one == name for one, _ in removals])
        squares = max(float((predicted[here] ** 2).sum()), 1e-300)
        slopes[name] = float((predicted[here] * increase[here]).sum()) / squares
        residual = increase[here] - slopes[name] * predicted[here]
        errors[name] = float((residual**2).sum()) / max(int(here.sum()) - 1, 1) / squares
    common = float((predicted * increase).sum() / max((predicted**2).sum(), 1e-300))
    spread = max(float(np.var(list(slopes.values()))) - float(np.mean(list(errors.values()))), 0.0)
    shrunk = {
        name: common + (slope - common) * spread / max(spread + errors[name], 1e-300) for name, slope in slopes.items()
    }
    return {name: max(factor, 0.01 * abs(common)) for name, factor in shrunk.items()}


def study(
    task: Task, model: nn.Module, graph: ChannelGraph, optimizer: Any, batches: Iterator[Any], options: Any
) -> dict[str, Any]:
    """All criteria at the present weights."""
    device = next(model.parameters()).device
    products, importance = statistics(
        model, graph, task, [next(batches) for _ in range(options.batches)], optimizer, device
    )
    rng = np.random.default_rng(0)
    removals = random_removals(graph, options.removals, rng)
    others = random_removals(graph, options.calibration, rng, each=True)
    increases = []
    for some in (removals, others):
        measured = Measured(model, graph, task, [next(batches) for _ in range(options.evaluated)], device)
        base = measured.loss()
        increases.append(np.array([measured.loss(mask_of(graph, *removal, device)) - base for removal in some]))
    names = [name for name, _ in removals]
    predicted = {
        criterion: np.array([float(values[indices(graph, removal)].sum()) for removal in removals])
        for criterion, values in importance.items()
    }
    predicted["corrected"] = corrected(graph, removals, importance["taylor_variance"])
    predicted["by_share"] = corrected(graph, removals, importance["taylor_variance"], 1.0)
    joint = [float(products[:, indices(graph, removal)].sum(1).var(correction=0)) for removal in removals]
    predicted["joint"] = np.array(joint) / remaining_shares(graph, removals)
    factors = calibration_factors(others, corrected(graph, others, importance["taylor_variance"]), increases[1])
    predicted["calibrated"] = predicted["corrected"] * np.array([factors[name] for name in names])
    return {
        "loss": base,
        "median_increase": float(np.median(increases[0])),
        "criteria": {criterion: judge(one, increases[0], names) for criterion, one in predicted.items()},
    }


def study_task(name: str, task: Task, options: Any) -> dict[str, Any]:
    """All criteria at three points of the training of one network."""
    assert task.loss is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    graph = trace_channels(task.model, task.example_input)
    model = task.model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    batches, done = batches_of(task, 0), 0
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
    names = ("steps", "batches", "evaluated", "removals", "calibration", "lr", "batch_size", "image_size")
    settings = {name: getattr(options, name) for name in names}
    return {"commit": commit(), "groups": len(graph.prunable), **settings, "points": points}


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
    parser.add_argument("--calibration", type=int, default=8, help="Removals of each group for calibration.")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--image-size", type=int, help="Side of square images; by default that of the network.")
    parser.add_argument("--add", action="store_true", help="Keep the other networks of the output file.")

    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    found, old = {}, json.loads(options.out.read_text())["networks"] if options.add else {}
    for name in options.tasks:
        network, _, data = name.partition(":")
        if name == "resnet8":
            torch.manual_seed(0)
            task = small_resnet(options.data, 3000)
        elif data:
            from packed import packed_task  # needs Pillow

            side = options.image_size
            size = None if side is None else (side, side)
            task = packed_task(network, data, options.data, size=size, batch=options.batch_size)
        else:
            task = find_task(network)
        found[name] = study_task(name, task, options)
    write_record(
        {
            "what": "rank correlation and slopes of predicted and measured increase of the loss over random removals",
            "environment": machine(commit=commit()),
            "networks": {**old, **found},
        },
        options.out,
    )


if __name__ == "__main__":
    main()
