"""The model card of a run: Markdown with front matter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ecc.formatting import si
from ecc.run_records import RunSummary

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&])")
_TAGS = ["pruning", "model-compression", "energy", "ecc"]
_CONFIG_KEYS = ("task", "method", "budgets", "width_multiple", "settings")


def model_card(
    summary: RunSummary,
    config: Mapping[str, Any],
    *,
    licence: str = "unknown",
    batches: str = "Each accepts any batch size.",
) -> str:
    """The card as text; `batches` says at which batch sizes the files can be used."""
    better = "lower" if summary.metric == "perplexity" else "higher"
    verdict = "meets its budget" if summary.met else "does NOT meet its budget"
    weights = "slim.safetensors" if summary.sparse is None else "sparse.safetensors"
    notes = [f"Note: {escape(summary.note)}"] if summary.note else []
    if summary.sparse is not None:
        notes.append(f"The estimate assumes: {escape(summary.sparse.assumes)}.")
    place = f" on {escape(summary.device)}" if summary.device else ""
    made = json.dumps({name: config[name] for name in _CONFIG_KEYS if name in config}, indent=2)
    parts = [
        # A JSON string is a valid YAML string, whatever it contains.
        f'---\nlicense: {json.dumps(licence)}\nlibrary_name: "pytorch"\ntags: {json.dumps(_TAGS)}\n---',
        f"# {escape(summary.task)}, compressed by {escape(summary.method)}",
        f"This network was pruned with ECC. It {verdict}{place}; costs are "
        f"**{escape(summary.label)}**, for one inference of a batch of {summary.batch}.",
        _results(summary),
        *notes,
        "*Measured*: read off a meter. *Estimated*: computed by an analytic model of the device. *Predicted*: computed "
        "by a model fitted to measurements. *Counted*: computed from the network itself. The "
        f"{escape(summary.metric)} is that of the task's own evaluation on its test split; {better} is better.",
        "## How to load",
        _loading(weights, batches),
        "## How it was made",
        # Indented code: JSON escapes everything that could end it.
        "Configuration of `ecc compress`:\n\n" + "\n".join("    " + line for line in made.splitlines()),
    ]
    return "\n\n".join(parts) + "\n"


def escape(text: object) -> str:
    """Untrusted text as plain Markdown on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def _results(summary: RunSummary) -> str:
    rows = []
    for resource, row in summary.budgets.items():
        per, amounts = summary.amounts(resource)
        name = f"{escape(resource)}{per} ({escape(row.label)})"
        rows.append([name, *map(escape, amounts), "met" if row.met else "NOT met"])
    for resource, name, count in (("macs", "MACs", summary.macs), ("params", "parameters", summary.parameters)):
        if count is not None and resource not in summary.budgets:
            rows.append([f"{name} (counted)", si(count.dense, ""), si(count.result, ""), "", ""])
    if summary.scores:
        rows.append([escape(summary.metric), *summary.score_texts(), "", ""])
    lines = [["", "before", "after", "budget", ""], ["---", "---:", "---:", "---:", "---"], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _loading(weights: str, batches: str) -> str:
    return f"""Every file that `ecc export` wrote was loaded by its own runtime and compared with the network:

    import ecc
    model = ecc.load_slim(YourNetwork(), "{weights}")  # weights only: no pickle, no code

    import onnxruntime
    session = onnxruntime.InferenceSession("slim.onnx")

    import torch
    program = torch.export.load("slim.pt2").module()  # torch may unpickle parts: load only files that you trust
    script = torch.jit.load("slim.torchscript")

{batches}"""
