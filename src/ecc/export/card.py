"""The model card of a run: Markdown with front matter, from what the run wrote down. Nothing in it is made up here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&])")


def model_card(summary: Mapping[str, Any], config: Mapping[str, Any], *, licence: str = "unknown") -> str:
    """The card.

    Args:
        summary: The run's summary.json.
        config: What the run was asked for, as in its config.json.
        licence: Of the network and its data; only its owner knows it.
    """
    task, device = escaped(summary.get("task", "")), escaped(summary.get("device", ""))
    method = escaped(summary.get("method", "ecc"))
    batch = _number(summary.get("batch"))
    label = escaped(summary.get("label", ""))
    verdict = "meets its budget" if summary.get("met") else "does NOT meet its budget"
    parts = [
        _front_matter(licence),
        f"# {task}, compressed by {method}",
        f"This network was pruned to an energy budget with ECC. It {verdict} on {device}; energy is **{label}**, for "
        f"one inference of a batch of {batch}.",
        _results(summary),
        *([f"Note: {escaped(summary['note'])}"] if summary.get("note") else []),
        *([f"The estimate assumes: {escaped(summary['sparse']['assumes'])}."] if summary.get("sparse") else []),
        "*Measured* is read off a meter, *estimated* comes from an analytic model of the device, *predicted* from a "
        "model fitted to measurements, *counted* from the network itself. A score is what the task's own evaluation "
        "gives on its test split, higher is better.",
        "## How to load",
        _loading(summary),
        "## How it was made",
        _made(config),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(text: object) -> str:
    """A string of someone else's as plain text in Markdown: on one line, without markup."""
    return _SPECIAL.sub(r"\\\1", " ".join(str(text).split()))


def _front_matter(licence: str) -> str:
    tags = ["pruning", "model-compression", "energy", "ecc"]
    # A JSON string is a YAML string, whatever is in it.
    lines = [f"license: {json.dumps(licence)}", 'library_name: "pytorch"', f"tags: {json.dumps(tags)}"]
    return "\n".join(["---", *lines, "---"])


def _results(summary: Mapping[str, Any]) -> str:
    rows = []
    for resource, row in summary.get("budgets", {}).items():
        unit = row.get("unit", "")
        amounts = [_amount(row.get(name), unit) for name in ("dense", "result", "limit")]
        met = "met" if row.get("met") else "NOT met"
        rows.append([f"{escaped(resource)} ({escaped(row.get('label', ''))})", *amounts, met])
    for name in ("macs", "parameters"):
        counts = summary.get(name)
        if counts:
            rows.append([f"{name} (counted)", _amount(counts["dense"], ""), _amount(counts["result"], ""), "", ""])
    scores = summary.get("scores") or {}
    final = scores.get("finetuned", scores.get("pruned"))
    if scores:
        rows.append(["score", _score(scores.get("dense")), _score(final), "", ""])
    lines = [["", "before", "after", "budget", ""], ["---", "---:", "---:", "---:", "---"], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _loading(summary: Mapping[str, Any]) -> str:
    file = "sparse" if summary.get("sparse") else "slim"
    return f"""What `ecc export` wrote beside this card was run by its own program and compared with the network before
it was kept. Of these, load what is there:

    import ecc
    model = ecc.load_slim(YourNetwork(), "{file}.safetensors")  # weights only: no pickle, no code in the file

    import onnxruntime
    session = onnxruntime.InferenceSession("slim.onnx")

    import torch
    program = torch.export.load("slim.pt2").module()  # torch may unpickle here: load what you trust
    script = torch.jit.load("slim.torchscript")

Each takes any batch size."""


def _made(config: Mapping[str, Any]) -> str:
    """What was asked for, as indented code: JSON escapes what could end it."""
    shown = {
        name: config[name] for name in ("task", "method", "budgets", "width_multiple", "settings") if name in config
    }
    text = json.dumps(shown, indent=2)
    return "\n".join(["`ecc compress` was asked for:", "", *("    " + line for line in text.splitlines())])


def _amount(value: Any, unit: str) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:.4g} {escaped(unit)}".rstrip()


def _score(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else "unknown size"
