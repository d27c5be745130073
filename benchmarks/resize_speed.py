"""How long it takes to build a network of other widths: `ecc.with_widths` beside copying and plain allocation.

    PYTHONPATH=src python3 benchmarks/resize_speed.py --out resize_speed.json

Networks of `ecc.zoo` at half widths (every group that can be cut at half its units), one thread, CPU milliseconds,
the median of 20 calls after two that are not counted:

    structure       with_widths(..., device="meta"): a network that can be counted and shaped, no memory for weights
    allocate meta   torch.empty on meta for each of its parameters and buffers: what `structure` cannot go below
    with weights    with_widths(...): the first slices of the weights copied
    allocate        torch.empty for each of its parameters and buffers: what `with weights` cannot go below
    copy            clone of each of its parameters and buffers: allocation and the copying of as many bytes
    deepcopy        copy.deepcopy of the dense network, the usual first step of a pruning tool
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from torch import nn

import ecc
from ecc import zoo

REPEATS = 20
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MobileNet v1": (zoo.MobileNetV1, (1, 3, 224, 224)),
    "AlexNet": (zoo.AlexNet, (1, 3, 224, 224)),
    "ERFNet": (zoo.ERFNet, (1, 3, 256, 512)),
    "ResNet-56": (zoo.resnet56, (1, 3, 32, 32)),
}


def median_ms(function: Callable[[], Any], repeats: int) -> float:
    """CPU milliseconds of a call."""
    times = []
    for _ in range(repeats + 2):
        start = time.process_time()
        result = function()
        times.append(1e3 * (time.process_time() - start))
        del result  # freeing is not counted
    return statistics.median(times[2:])


def measure(name: str, repeats: int) -> dict[str, Any]:
    """All numbers of one network."""
    build, shape = NETWORKS[name]
    model = build().eval()
    graph = ecc.trace_channels(model, torch.randn(shape), verify=False)
    half = {group.name: max(1, group.width // 2) for group in graph.prunable}
    small = ecc.with_widths(model, graph, half)
    tensors = [*small.parameters(), *small.buffers()]
    row = {
        "network": name,
        "groups": len(graph.prunable),
        "tensors": len(tensors),
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_at_half": sum(p.numel() for p in small.parameters()),
    }
    calls: dict[str, Callable[[], Any]] = {
        "structure": lambda: ecc.with_widths(model, graph, half, device="meta"),
        "allocate meta": lambda: [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors],
        "with weights": lambda: ecc.with_widths(model, graph, half),
        "allocate": lambda: [torch.empty(t.shape, dtype=t.dtype) for t in tensors],
        "copy": lambda: [t.detach().clone() for t in tensors],
        "deepcopy": lambda: copy.deepcopy(model),
    }
    milliseconds = {what: median_ms(call, repeats) for what, call in calls.items()}
    beyond = {"beyond_allocation": milliseconds["structure"] - milliseconds["allocate meta"]}
    return {**row, "milliseconds": milliseconds, **beyond}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="calls of which the median is taken")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(name, args.repeats) for name in NETWORKS]
    data = {
        "environment": machine(repeats=args.repeats),
        "rows": rows,
    }
    write_record(data, args.out)
    titles = list(rows[0]["milliseconds"])
    print(f"{'CPU ms, half widths':22}" + "".join(f"{title:>15}" for title in titles))
    for row in rows:
        print(f"{row['network']:22}" + "".join(f"{row['milliseconds'][title]:>15.2f}" for title in titles))


if __name__ == "__main__":
    main()
