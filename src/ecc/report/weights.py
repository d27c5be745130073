"""What came out of a compression of single weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from .compress import budget_table
from .fit import si

_SHOWN = 12  # tensors in the terminal; the file has all of them


def weights_view(summary: Mapping[str, Any], folder: str | Path) -> RenderableType:
    """Energy, weights and score before and after, and how many weights each tensor has left."""
    title = Text(f"{summary['task']} on {summary['device']}, single weights")  # names are no markup, here and below
    table = budget_table(title, summary["budgets"])
    full, left = summary["sparse"]["weights"], summary["sparse"]["nonzeros"]
    counts = [si(float(sum(numbers.values())), "") for numbers in (full, left)]
    table.add_row("weights that can go (counted)", *counts, "", "", "")
    scores = summary["scores"]
    if scores:
        table.add_row("score", f"{scores['dense']:.4f}", f"{scores['finetuned']:.4f}", "", "", "")
    parts = [f"{name} {count}/{full[name]}" for name, count in left.items() if count != full[name]]
    shown = ", ".join(parts[:_SHOWN]) + (f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")
    lines: list[RenderableType] = [
        table,
        Text(
            f"Nonzero weights: {shown or 'all as before'}. {1 - sum(left.values()) / sum(full.values()):.1%} are zero."
        ),
        Text(f"The estimate assumes: {summary['sparse']['assumes']}."),
        Text(f"{Path(folder)}: sparse.safetensors, nonzeros.json, summary.json, history.jsonl"),
    ]
    return Group(*lines)
