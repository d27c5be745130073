"""Measured energy of uniformly pruned networks in several execution modes.

    PYTHONPATH=src python3 benchmarks/floors.py resnet56:1024:32x32 alexnet:128:128x128 --out results/floors.json

Each word is NETWORK:BATCH:HEIGHTxWIDTH. Widths are the given fraction of the full widths, rounded to multiples of 8 or 4.
The smallest networks keep one multiple in every group. No weights and no data are needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from profile_networks import settings_of

from ecc.graph import ChannelGraph, trace_channels
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


def cut(graph: ChannelGraph, share: float, multiple: int) -> dict[str, int]:
    """Widths on the width_remainders, at least one multiple; a group that is no wider stays."""
    return {
        group.name: min(group.width, max(multiple, round(share * group.width / multiple) * multiple))
        for group in graph.prunable
    }


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
        model = find_task(name).model
        example = torch.randn(int(batch), 3, *(int(side) for side in size.split("x")))
        graph = trace_channels(model, example, verify=False)
        counter = None
        for way, how in WAYS.items():
            settings = settings_of(3, autotune=False, **how)
            bench = DeviceProfiler(model, graph, example, meter, settings, options.device, Clock())
            counter = bench.prepare(counter)
            joules = {}
            for what, (share, multiple) in CUTS.items():
                joules[what] = bench.sample(None, 0, 0, cut(graph, share, multiple)).joules
            row: dict[str, Any] = {"network": name, "batch": int(batch), "size": size, "way": way, "joules": joules}
            found.append(row)
            shares = ", ".join(f"{what} {amount / joules['dense']:.1%}" for what, amount in joules.items())
            print(f"{name} {way}: {joules['dense']:.4g} J; {shares}", flush=True)
    record = {
        "what": "energy of uniformly pruned networks, by execution mode",
        "environment": machine(),
        "meter": to_builtins(meter.describe()),
        "rows": found,
    }
    close_meter(meter)
    write_record(record, options.out)


if __name__ == "__main__":
    main()
