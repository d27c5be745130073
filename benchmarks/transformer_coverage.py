"""How much of Hugging Face's models can be pruned: writes results/transformer_coverage.json.

    PYTHONPATH=src python3 benchmarks/transformer_coverage.py --out results/transformer_coverage.json

For each tiny model of `transformer_models.py`, with one thread:

- `prunable_share`: share of the parameters that lie on at least one prunable axis;
- `removable_share`: share that is gone with all prunable groups at their minimum width;
- `trace_seconds`: CPU seconds of `trace_channels` with verification, in a process that has traced another model before;
- `relative_difference`: between the masked and the slim network after a random cut of 40 % of every group, in float64,
  or in float32 (`difference_dtype`) where the model cannot run in float64. Models that compute their norms in float32
  have rounding errors of float32 in either case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import machine, write_record
from transformer_models import MODELS

from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels, with_widths

CUT = 0.4


def cut_difference(
    model: torch.nn.Module, graph: ChannelGraph, inputs: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[float, str]:
    """Difference between the masked and the slim network after a random cut, and the type it was computed in."""
    network = with_widths(model, graph, {}).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    for group in graph.prunable:
        gone = torch.randperm(group.width, generator=generator)[: int(CUT * group.width)]
        mask_channels_(network, graph, {group.name: gone[: group.width - group.min_width]})
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    try:
        return max_relative_diff(network, slim(network, graph), given), str(dtype).removeprefix("torch.")
    except RuntimeError:
        if dtype == torch.float32:
            raise
        return cut_difference(model, graph, inputs, torch.float32)


def measured(name: str) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    model, inputs = build().eval(), make_inputs()
    started = time.process_time()
    graph = trace_channels(model, inputs)
    seconds = time.process_time() - started
    least = graph.parameters({group.name: group.min_width for group in graph.prunable})
    heads = [g for g in graph.prunable if any("att" in one.tensor.lower() for one in g.slices) and not g.zeroed]
    reasons = Counter(g.frozen for g in graph.groups if g.frozen is not None)
    difference, dtype = cut_difference(model, graph, inputs)
    return {
        "model": name,
        "parameters": int(graph.parameters()),
        "prunable_share": round(graph.prunable_share, 4),
        "removable_share": round(1 - float(least / graph.parameters()), 4),
        "residual_width": any(group.zeroed for group in graph.prunable),
        "prunable_groups": len(graph.prunable),
        "attention_groups": len(heads),
        "relative_difference": difference,
        "difference_dtype": dtype,
        "trace_seconds": round(seconds, 2),
        "frozen": [reason for reason, _ in reasons.most_common(6)],
    }


def commit() -> str:
    """The commit that is measured; empty outside a checkout."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    """Measure the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names; all by default")
    parser.add_argument("--out", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    trace_channels(torch.nn.Linear(2, 2), torch.randn(1, 2))
    measured("ViT")  # imports what the first trace imports
    rows = []
    for name in args.models or MODELS:
        rows.append(measured(name))
        print(json.dumps(rows[-1]), flush=True)
    if args.out is not None:
        about = machine(commit=commit(), transformers=transformers.__version__, cut=CUT)
        write_record({"environment": about, "models": rows}, args.out)


if __name__ == "__main__":
    main()
