"""Measured energy of uniformly pruned networks in several execution modes, with and without their residual branches.

    PYTHONPATH=src python3 benchmarks/floors.py resnet56:1024:32x32 vit_tiny:256:32x32 --out results/floors.json

Each word is NETWORK:BATCH:HEIGHTxWIDTH. Widths are the given fraction of the full widths, rounded to multiples of 8 or 4.
The smallest networks keep one multiple in every group. No weights and no data are needed. `vit_tiny` is the network of
`depth.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from depth import ViT
from machine import machine, write_record
from profile_networks import settings_of

from ecc.graph import ChannelGraph, trace_channels, verify_graph
from ecc.measure import Clock, DeviceProfiler, close_meter, find_meter
from ecc.records import to_builtins
from ecc.zoo import find_task

WAYS: dict[str, dict[str, object]] = {
    "tf32": {"precision": "tf32"},
    "tf32, channels last": {"precision": "tf32", "channels_last": True},
    "bf16, channels last": {"precision": "bf16", "channels_last": True},
}
CUTS = {"dense": (1.0, 8), "3/4 in fours": (0.75, 4), "3/4": (0.75, 8), "1/2": (0.5, 8), "least in eights": (0.0, 8),
        "least in fours": (0.0, 4)}  # fmt: skip
DEEP_CUTS = {"half of the branches": (1.0, 8, 0.5), "no branches": (1.0, 8, 1.0), "least, no branches": (0.0, 8, 1.0)}
"""Share of the widths, multiple, and share of the branches that are removed, every second one first."""


def cut(graph: ChannelGraph, share: float, multiple: int) -> dict[str, int]:
    """Widths on the width_remainders, at least one multiple; a group that is no wider stays."""
    return {
        group.name: min(group.width, max(multiple, round(share * group.width / multiple) * multiple))
        for group in graph.prunable
    }


def without_branches(graph: ChannelGraph, share: float) -> dict[str, int]:
    """Width 0 for the groups of a share of the branches."""
    order = [*graph.branches[::2], *graph.branches[1::2]]
    return {group: 0 for branch in order[: round(share * len(order))] for group in branch.groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    meter, found = find_meter(options.meter, device_type=options.device), []
    for word in options.networks:
        name, batch, size = word.split(":")
        model = ViT().eval() if name == "vit_tiny" else find_task(name).model
        example = torch.randn(int(batch), 3, *(int(side) for side in size.split("x")))
        graph = verify_graph(model, trace_channels(model, example, verify=False), example[:2])
        counter = None
        full = {group.name: group.width for group in graph.variable}
        for way, how in WAYS.items():
            settings = settings_of(3, autotune=False, **how)
            bench = DeviceProfiler(model, graph, example, meter, settings, options.device, Clock())
            counter = bench.prepare(counter)
            joules = {}
            for what, (share, multiple) in CUTS.items():
                joules[what] = bench.sample(None, 0, 0, full | cut(graph, share, multiple)).joules
            for what, (share, multiple, removed) in DEEP_CUTS.items() if graph.branches else ():
                widths = full | cut(graph, share, multiple) | without_branches(graph, removed)
                joules[what] = bench.sample(None, 0, 0, widths).joules
            row: dict[str, Any] = {"network": name, "batch": int(batch), "size": size, "way": way, "joules": joules,
                                   "branches": len(graph.branches)}  # fmt: skip
            found.append(row)
            shares = ", ".join(f"{what} {amount / joules['dense']:.1%}" for what, amount in joules.items())
            print(f"{name} {way}: {joules['dense']:.4g} J; {shares}", flush=True)
    record = {
        "what": "energy of uniformly pruned networks, with and without residual branches, by execution mode",
        "environment": machine(),
        "meter": to_builtins(meter.describe()),
        "rows": found,
    }
    close_meter(meter)
    write_record(record, options.out)


if __name__ == "__main__":
    main()
