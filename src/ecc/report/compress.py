"""A compression: what can be reached, and what came out. How it goes is in `live_compress.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .fit import si


class Reachable(Protocol):
    """What a budget asks of a network; made by `ecc.methods.check_feasibility`."""

    @property
    def resource(self) -> str: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def dense(self) -> float: ...  # noqa: D102
    @property
    def min_cost(self) -> float: ...  # noqa: D102
    @property
    def limit(self) -> float: ...  # noqa: D102
    @property
    def uniform_ratio(self) -> float | None: ...  # noqa: D102


def feasibility_table(found: Sequence[Reachable]) -> Table:
    """What each budget asks of the network, before training."""
    table = Table(title="What the budgets ask for", title_justify="left", box=None, pad_edge=False)
    for name in ("", "dense", "least", "budget", "of dense", "even widths"):
        table.add_column(name, justify="left" if not name else "right")
    for one in found:
        share = "out of reach" if one.uniform_ratio is None else f"{one.uniform_ratio:.0%}"
        amounts = [si(amount, one.unit) for amount in (one.dense, one.min_cost, one.limit)]
        table.add_row(f"{one.resource} ({one.label})", *amounts, f"{one.limit / one.dense:.0%}", share)
    return table


def budget_table(title: Text, budgets: Mapping[str, Mapping[str, Any]]) -> Table:
    """What became of each budget; rows of other facts can follow."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "dense", "result", "budget", "of budget", ""):
        table.add_column(name, justify="left" if not name else "right")
    for resource, row in budgets.items():
        amounts = [si(row[name], row["unit"]) for name in ("dense", "result", "limit")]
        verdict = "met" if row["met"] else "NOT MET"
        table.add_row(f"{resource} ({row['label']})", *amounts, f"{row['result'] / row['limit']:.1%}", verdict)
    return table


def compress_view(summary: Mapping[str, Any], folder: str | Path) -> RenderableType:
    """What came out."""
    title = Text(
        f"{summary['task']} by {summary.get('method', 'ecc')} on {summary['device']}"
    )  # names and paths are no markup, here and below
    table = budget_table(title, summary["budgets"])
    for resource, budget in (("macs", "macs"), ("parameters", "params")):
        if budget not in summary["budgets"]:
            counts = summary[resource]
            table.add_row(f"{resource} (counted)", si(counts["dense"], ""), si(counts["result"], ""), "", "", "")
    scores = summary["scores"]
    if scores:
        final = scores.get("finetuned", scores.get("pruned"))
        score = [f"{scores['dense']:.4f}" if "dense" in scores else "", "" if final is None else f"{final:.4f}"]
        table.add_row("score", *score, "", "", "")
    lines: list[RenderableType] = [table, Text(_widths(summary))]
    if summary["max_relative_diff"] is not None:
        lines.append(f"Cut and masked networks agree to {summary['max_relative_diff']:.1g} of the largest output.")
    if summary["note"]:
        lines.append(Text(f"Note: {summary['note']}"))
    lines.append(Text(f"{Path(folder)}: slim.safetensors, widths.json, summary.json, history.jsonl"))
    return Group(*lines)


def _widths(summary: Mapping[str, Any]) -> str:
    full = summary["full_widths"]
    parts = [f"{name} {width}/{full[name]}" for name, width in summary["widths"].items() if width != full[name]]
    shown = ", ".join(parts[:12]) + (f" and {len(parts) - 12} more" if len(parts) > 12 else "")
    return f"Widths: {shown or 'all as before'}."
