"""A compression: what can be reached, how it goes, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from .fit import si

BARS = "▁▂▃▄▅▆▇█"


class Reachable(Protocol):
    """What a budget asks of a network; made by `ecc.methods.reaches`."""

    @property
    def resource(self) -> str: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def dense(self) -> float: ...  # noqa: D102
    @property
    def least(self) -> float: ...  # noqa: D102
    @property
    def limit(self) -> float: ...  # noqa: D102
    @property
    def even_share(self) -> float | None: ...  # noqa: D102


def feasibility_table(found: Sequence[Reachable]) -> Table:
    """What each budget asks of the network, before training."""
    table = Table(title="What the budgets ask for", title_justify="left", box=None, pad_edge=False)
    for name in ("", "dense", "least", "budget", "of dense", "even widths"):
        table.add_column(name, justify="left" if not name else "right")
    for one in found:
        share = "out of reach" if one.even_share is None else f"{one.even_share:.0%}"
        amounts = [si(amount, one.unit) for amount in (one.dense, one.least, one.limit)]
        table.add_row(f"{one.resource} ({one.label})", *amounts, f"{one.limit / one.dense:.0%}", share)
    return table


class CompressView:
    """Says what a run does: a live line in a terminal, plain lines elsewhere. It is a `History`, too.

    Args:
        console: Where to; nothing is shown without one.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._status: Status | None = None
        if console is not None and console.is_terminal:
            self._status = console.status("")
        self._spent = ""

    def __enter__(self) -> CompressView:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, what: RenderableType) -> None:
        """Prints something."""
        if self._console is not None:
            self._console.print(what)

    def tell(self, sentence: str) -> None:
        """Prints a line."""
        if self._console is not None:
            self._console.print(sentence, markup=False, highlight=False)

    def log(self, facts: Mapping[str, Any]) -> None:
        """Shows the last line of the history."""
        if facts.get("phase") == "solver":
            self._spent = f", {', '.join(f'{name} {value:.4g}' for name, value in facts['spent'].items())}"
            left = facts["widths"] if "widths" in facts else facts["nonzeros"]  # channels, or single weights
            self._spent += f" (schedule {facts['target']:.4g}) {sparkline(left.values())}"
        elif "loss" in facts and self._status is not None:
            self._status.update(f"{facts['phase']} step {facts['step']}, loss {facts['loss']:.4f}{self._spent}")


def sparkline(values: Any) -> str:
    """Small bars, as high as the values are to the largest."""
    numbers = [float(value) for value in values]
    top = max(numbers, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(number / top * len(BARS)))] for number in numbers)


def compress_view(summary: Mapping[str, Any], folder: str | Path) -> RenderableType:
    """What came out."""
    title = Text(
        f"{summary['task']} by {summary.get('method', 'ecc')} on {summary['device']}"
    )  # names and paths are no markup, here and below
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("", "dense", "result", "budget", "of budget", ""):
        table.add_column(name, justify="left" if not name else "right")
    for resource, row in summary["budgets"].items():
        amounts = [si(row[name], row["unit"]) for name in ("dense", "result", "limit")]
        verdict = "met" if row["met"] else "NOT MET"
        table.add_row(f"{resource} ({row['label']})", *amounts, f"{row['result'] / row['limit']:.1%}", verdict)
    for resource, budget in (("macs", "macs"), ("parameters", "params")):
        if budget not in summary["budgets"]:
            counts = summary[resource]
            table.add_row(f"{resource} (counted)", si(counts["dense"], ""), si(counts["result"], ""), "", "", "")
    scores = summary["scores"]
    if scores:
        final = scores.get("after tuning", scores.get("before tuning"))
        score = [f"{scores['dense']:.4f}" if "dense" in scores else "", "" if final is None else f"{final:.4f}"]
        table.add_row("score", *score, "", "", "")
    lines: list[RenderableType] = [table, Text(_widths(summary))]
    if summary["slim_gap"] is not None:
        lines.append(f"Cut and masked networks agree to {summary['slim_gap']:.1g} of the largest output.")
    if summary["note"]:
        lines.append(Text(f"Note: {summary['note']}"))
    lines.append(Text(f"{Path(folder)}: slim.safetensors, widths.json, summary.json, history.jsonl"))
    return Group(*lines)


def _widths(summary: Mapping[str, Any]) -> str:
    full = summary["full_widths"]
    parts = [f"{name} {width}/{full[name]}" for name, width in summary["widths"].items() if width != full[name]]
    shown = ", ".join(parts[:12]) + (f" and {len(parts) - 12} more" if len(parts) > 12 else "")
    return f"Widths: {shown or 'all as before'}."
