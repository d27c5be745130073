"""CPU time of traces by several versions of ECC and by Torch-Pruning, on the same machine in turns.

    python3 benchmarks/trace_time.py --sources 0.1=../v0.1/src before=../before/src now=src --out results/trace_time.json

Each pair of a network and a version runs in a process of its own with one thread. The network has random weights, batch 1.
Seconds are process time of `trace_channels` without verification, the best of three after a trace of a tiny network. The
versions take turns, so that what else runs on the machine affects them alike.
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


def measure(name: str, tool: str) -> float:
    """CPU seconds of the fastest of three traces of one network."""
    import torch
    from coverage_networks import all_networks, build
    from torch import nn

    torch.set_num_threads(1)
    network = next(one for one in all_networks()[0] if one.key.removeprefix("torchvision/") == name)
    model, example = build(network)
    if tool == PEER:
        import torch_pruning

        def trace(net: nn.Module, inputs: Any) -> None:
            graph = torch_pruning.DependencyGraph().build_dependency(net, example_inputs=(inputs,))
            sum(1 for _ in graph.get_all_groups())

    else:
        import ecc

        names = inspect.signature(ecc.trace_channels).parameters
        options = {key: False for key, one in names.items() if one.default is True}  # verification, by any name

        def trace(net: nn.Module, inputs: Any) -> None:
            ecc.trace_channels(net, inputs, **options)  # type: ignore[arg-type]

    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    trace(tiny, torch.randn(1, 3, 8, 8))
    seconds = []
    for _ in range(3):
        start = time.process_time()
        trace(model, example)
        seconds.append(time.process_time() - start)
    return min(seconds)


def run(name: str, tool: str, source: Path | None) -> dict[str, Any]:
    """Measure in a process with the sources of a version; seconds, or the last line of its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    words = [sys.executable, "-W", "ignore", str(HERE / "trace_time.py"), "--measure", name, tool]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return {"seconds": float(done.stdout.split()[-1])}


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
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure(*args.measure))
        return
    from machine import commit, machine, write_record

    sources = {name: Path(folder).resolve() for name, folder in (one.split("=", 1) for one in args.sources)}
    environment = machine(networks=len(args.only))
    environment["command"] = f"benchmarks/trace_time.py --sources {' '.join(f'{name}=FOLDER' for name in sources)}"
    environment["commits"] = {name: commit(folder) for name, folder in sources.items()}
    rows: list[dict[str, Any]] = []
    if args.out.exists():  # continue
        rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    tools = [*sources, PEER]
    for name in args.only:
        if name in {row["name"] for row in rows}:
            continue
        row: dict[str, Any] = {"name": name}
        for tool in tools:
            row[tool] = run(name, tool, sources.get(tool, next(reversed(sources.values()))))
        rows.append(row)
        write_record({"environment": environment, "summary": summary(rows, tools), "rows": rows}, args.out)
        cells = [f"{tool} {row[tool].get('seconds', float('nan')):.3f}" for tool in tools]
        print(f"{name:34} {'  '.join(cells)}", flush=True)
    print(json.dumps(summary(rows, tools), indent=1))


if __name__ == "__main__":
    main()
