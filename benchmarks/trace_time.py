"""CPU time of traces by several versions of ECC and by Torch-Pruning, on the same machine.

    python3 benchmarks/trace_time.py --sources 0.1=../v0.1/src before=../before/src now=src --out results/trace_time.json

Each version runs in a process of its own with one thread. Networks have random weights and batch 1. Seconds are process time
of `trace_channels` without verification, the best of three after a trace of a tiny network.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = "torch_pruning"
NETWORKS = (
    *("timm/deit_tiny_patch16_224", "mobilenet_v3_small", "timm/pvt_v2_b0", "resnet50", "timm/gmlp_ti16_224"),
    *(
        "timm/mobileone_s1",
        "timm/mobilevit_xxs",
        "swin_t",
        "timm/crossvit_tiny_240",
        "timm/convnext_atto",
        "timm/coat_tiny",
    ),
)


def measure(names: list[str], tool: str) -> dict[str, float]:
    """CPU seconds of the fastest of three traces of each network."""
    import torch
    from coverage_networks import all_networks, build
    from torch import nn

    torch.set_num_threads(1)
    networks = {one.key.removeprefix("torchvision/"): one for one in all_networks()[0]}
    if tool == PEER:
        import torch_pruning

        def trace(net: nn.Module, inputs: Any) -> None:
            graph = torch_pruning.DependencyGraph().build_dependency(net, example_inputs=(inputs,))
            sum(1 for _ in graph.get_all_groups())

    else:
        import ecc

        parameters = inspect.signature(ecc.trace_channels).parameters
        options = {key: False for key, one in parameters.items() if one.default is True}  # verification, by any name

        def trace(net: nn.Module, inputs: Any) -> None:
            ecc.trace_channels(net, inputs, **options)  # type: ignore[arg-type]

    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    trace(tiny, torch.randn(1, 3, 8, 8))
    found = {}
    for name in names:
        model, example = build(networks[name])
        seconds = []
        with suppress(Exception):  # whatever a tool raises: it has no time for this network
            for _ in range(3):
                start = time.process_time()
                trace(model, example)
                seconds.append(time.process_time() - start)
            found[name] = min(seconds)
    return found


def run(names: list[str], tool: str, source: Path) -> dict[str, float]:
    """Measure in a process with the sources of a version."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(source)
    words = [sys.executable, "-W", "ignore", str(HERE / "trace_time.py"), "--measure", tool, "--only", *names]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(rows: list[dict[str, Any]], tools: list[str]) -> dict[str, Any]:
    """Median seconds, and the median ratio of each tool to the last version, over networks that both traced."""
    last = tools[-1] if tools[-1] != PEER else tools[-2]
    found: dict[str, Any] = {}
    for tool in tools:
        pairs = [(row[tool]["seconds"], row[last]["seconds"]) for row in rows if _has(row, tool) and _has(row, last)]
        if pairs:
            found[tool] = {
                "networks": len(pairs),
                "median_seconds": statistics.median(mine for mine, _ in pairs),
                f"median_{last}_over_this": statistics.median(other / mine for mine, other in pairs),
            }
    return found


def _has(row: dict[str, Any], tool: str) -> bool:
    return "seconds" in row.get(tool, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", nargs="+", help="NAME=FOLDER with the package ecc, the newest version last")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--only", nargs="+", default=list(NETWORKS), help="names of networks, timm/NAME for those of timm"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.only, args.measure)))
        return
    from machine import commit, machine, write_record

    sources = {name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in args.sources)}
    environment = machine(networks=len(args.only))
    environment["command"] = f"benchmarks/trace_time.py --sources {' '.join(f'{name}=FOLDER' for name in sources)}"
    environment["commits"] = {name: commit(folder) for name, folder in sources.items()}
    tools = [*sources, PEER]
    rows: list[dict[str, Any]] = [{"name": name} for name in args.only]
    for tool in tools:
        found = run(args.only, tool, sources.get(tool, next(reversed(sources.values()))))
        for row in rows:
            row[tool] = {"seconds": found[row["name"]]} if row["name"] in found else {}
        write_record({"environment": environment, "summary": summary(rows, tools), "rows": rows}, args.out)
        print(tool, {name: round(seconds, 3) for name, seconds in found.items()}, flush=True)
    print(json.dumps(summary(rows, tools), indent=1))


if __name__ == "__main__":
    main()
