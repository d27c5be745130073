"""Every export of every network of the paper, read back and compared; onnxruntime's latency beside the dense network.

Each network is cut at random to about half its widths, in multiples of 8 and without rounding, with random weights:
what is shown is that files compute what the network computes, and what they take, not how good the network is.

    python3 benchmarks/export_roundtrip.py  # writes results/export_roundtrip.json
"""

from __future__ import annotations

import argparse
import os
import random
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from machine import machine, write_record
from torch import Tensor, nn

from ecc.export import TOLERANCE, compare_latency, export_model, load_slim
from ecc.export.formats import FORMATS, verify_export
from ecc.graph import ChannelGraph, trace_channels, with_widths
from ecc.graph.numerics import outputs_of
from ecc.training import save_state
from ecc.zoo import AlexNet, DigitsNet, ERFNet, MobileNetV1, resnet56

RESULT = Path(__file__).resolve().parent.parent / "results" / "export_roundtrip.json"
# ERFNet's images are a quarter as high and wide as the paper's: a CPU is to finish them.
NETWORKS: dict[str, tuple[type[nn.Module] | Any, tuple[int, ...], int]] = {
    "alexnet": (AlexNet, (3, 224, 224), 1),
    "mobilenet_v1": (MobileNetV1, (3, 224, 224), 1),
    "erfnet": (ERFNet, (3, 128, 256), 1),
    "resnet56": (resnet56, (3, 32, 32), 8),
    "digits": (DigitsNet, (1, 8, 8), 64),
}


def half(graph: ChannelGraph, multiple: int, seed: int) -> dict[str, int]:
    """Random widths between 40 and 60 %, in multiples where a group is wide enough for them."""
    draw = random.Random(seed)
    widths = {}
    for group in graph.prunable:
        step = multiple if group.width >= 2 * multiple else 1
        wanted = round(group.width * draw.uniform(0.4, 0.6) / step) * step
        widths[group.name] = min(max(wanted, group.min_width, 1), group.width)
    return widths


def safetensors(dense: nn.Module, slim: nn.Module, example: Tensor, folder: Path) -> dict[str, Any]:
    for name, model in (("slim", slim), ("dense", dense)):
        save_state(folder / f"{name}.safetensors", model.state_dict())
    again = load_slim(dense, folder / "slim.safetensors")
    check = verify_export(slim, lambda inputs: outputs_of(again, inputs), example)
    sizes = [(folder / f"{name}.safetensors").stat().st_size for name in ("dense", "slim")]
    return {"dense_bytes": sizes[0], "bytes": sizes[1], "error": check.error, "batches": check.batches}


def row(name: str) -> dict[str, Any]:
    build, shape, batch = NETWORKS[name]
    torch.manual_seed(0)
    dense, example = build().eval(), torch.randn(batch, *shape)
    graph = trace_channels(dense, example)
    found: dict[str, Any] = {"network": name, "input": [batch, *shape], "formats": {}, "latency": {}}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        export_model(dense, example, folder / "dense.onnx")
        for multiple in (8, 1):
            widths = half(graph, multiple, seed=0)
            slim = with_widths(dense, graph, widths)
            if multiple == 8:
                found["formats"]["safetensors"] = safetensors(dense, slim, example, folder)
                for kind in FORMATS:
                    made = export_model(slim, example, folder / f"slim.{kind}")
                    found["formats"][kind] = {"bytes": made.bytes, "error": made.error, "batches": made.batches}
                found["formats"]["onnx"]["dense_bytes"] = (folder / "dense.onnx").stat().st_size
            else:
                export_model(slim, example, folder / "slim.onnx", force=True)
            time = compare_latency(folder / "dense.onnx", folder / "slim.onnx", example)
            found["latency"][str(multiple)] = {
                "macs": float(graph.macs() / graph.macs(widths)),
                "dense_seconds": time.dense_seconds,
                "slim_seconds": time.slim_seconds,
                "ratio": time.ratio,
                "ratio_range": time.ratio_range,
                "clock": time.clock,
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS:
        found = row(name)
        rows.append(found)
        errors = ", ".join(f"{kind} {entry['error']:.1e}" for kind, entry in found["formats"].items())
        times = ", ".join(f"in {step}s {entry['ratio']:.2f}" for step, entry in found["latency"].items())
        print(f"{name}: {errors}; dense / slim {times}", flush=True)
    libraries = {name: version(name) for name in ("onnx", "onnxruntime", "onnxscript")}
    facts = {
        "environment": machine(**libraries, load_average=[round(load, 1) for load in os.getloadavg()]),
        "latency": "processor time of one thread, blocks in turns; "
        "median, second lowest and second highest of the pairs",
        "tolerance": TOLERANCE,
        "rows": rows,
    }
    write_record(facts, RESULT)


if __name__ == "__main__":
    main()
