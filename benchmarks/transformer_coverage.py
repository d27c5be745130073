"""How much of Hugging Face's models can be pruned: writes results/transformer_coverage.json.

    python benchmarks/transformer_coverage.py

For each tiny model of `transformer_models.py`: the share of parameters that can be removed (all prunable groups at their
minimum width), the CPU seconds of the second trace (the first one imports), and the difference between the masked and the
slim network after a random cut of 40 % of every group, in float64.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformer_models import MODELS

from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels, with_widths
from ecc.torch_utils import tensors_in

RESULT = Path(__file__).parents[1] / "results" / "transformer_coverage.json"
CUT = 0.4


def cut_difference(model: torch.nn.Module, graph: ChannelGraph, inputs: dict[str, Any], seed: int = 0) -> float:
    """Difference between the masked and the slim network after a random cut, in float64."""
    network = with_widths(model, graph, {}).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for group in graph.prunable:
        gone = torch.randperm(group.width, generator=generator)[: int(CUT * group.width)]
        mask_channels_(network, graph, {group.name: gone[: group.width - group.min_width]})
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    return max_relative_diff(network, slim(network, graph), doubled)


def measured(name: str) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    model, inputs = build().eval(), make_inputs()
    assert any(True for _ in tensors_in(inputs))
    trace_channels(model, inputs)
    started = time.process_time()
    graph = trace_channels(model, inputs)
    seconds = time.process_time() - started
    least = graph.parameters({group.name: group.min_width for group in graph.prunable})
    heads = [g for g in graph.prunable if any("att" in one.tensor.lower() for one in g.slices)]
    reasons = Counter(g.frozen for g in graph.groups if g.frozen is not None)
    return {
        "model": name,
        "parameters": int(graph.parameters()),
        "prunable_share": round(1 - float(least / graph.parameters()), 4),
        "prunable_groups": len(graph.prunable),
        "attention_groups": len(heads),
        "relative_difference": cut_difference(model, graph, inputs),
        "trace_seconds": round(seconds, 2),
        "frozen": [reason for reason, _ in reasons.most_common(6)],
    }


def main() -> None:
    """Measure the models named on the command line, or all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    for name in sys.argv[1:] or MODELS:
        try:
            rows.append(measured(name))
        except Exception as error:  # noqa: BLE001 - a row says what failed
            rows.append({"model": name, "error": f"{type(error).__name__}: {error}"[:300]})
        print(json.dumps(rows[-1]), flush=True)
    if not sys.argv[1:]:
        about = {"torch": torch.__version__, "transformers": transformers.__version__, "cut": CUT}
        RESULT.write_text(json.dumps({**about, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
