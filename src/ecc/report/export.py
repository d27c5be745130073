"""An export: which files there are, how far their outputs are from the network's, and what onnxruntime takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .fit import si


def export_view(facts: Mapping[str, Any]) -> RenderableType:
    """The table, from the facts that `--json` prints."""
    proofs = _table("file", "bytes", "before", "max relative error", "allowed")
    times = _table("onnxruntime", "before", "after", "before / after")
    notes: dict[str, None] = {}  # each once, in order
    for file in facts["files"]:
        allowed = "none claimed" if file["tolerance"] is None else f"{file['tolerance']:g}"
        before = "" if file["beside_bytes"] is None else f"{file['beside_bytes']:,}"
        proofs.add_row(Text(file["file"]), f"{file['bytes']:,}", before, f"{file['error']:.2g}", allowed)
        latency = file["latency"]
        if latency is not None:
            low, high = latency["ratio_range"]
            seconds = [si(latency[name], "s") for name in ("dense_seconds", "slim_seconds")]
            times.add_row(Text(file["file"]), *seconds, f"{latency['ratio']:.2f} ({low:.2f} to {high:.2f})")
            threads = f"{latency['threads']} thread" + ("s" if latency["threads"] > 1 else "")
            notes[f"Latency is {latency['label']}, batch {latency['batch']}, {threads}, {latency['clock']}."] = None
    for file in facts["files"]:
        if file["tolerance"] is None:
            score = "the task could not judge it" if file["score"] is None else f"score {file['score']:.4f}"
            score += "" if facts["score"] is None else f", with floats {facts['score']:.4f}"
            notes[
                f"Before of {file['file']} is the same network with floats. Its outputs differ from those: {score}."
            ] = None
    batches = ", ".join(map(str, facts["files"][0]["batches"])) if facts["files"] else ""
    lines: list[RenderableType] = [
        proofs,
        Text(
            "Error: the largest difference from the slim network's outputs, over the largest output. "
            f"Each file was run by its own program, at batches of {batches}."
        ),
        *([times] if times.row_count else []),
        *(Text(note) for note in (*notes, *facts["notes"])),
        Text(f"{facts['folder']}: {', '.join([file['file'] for file in facts['files']])}, model_card.md"),
    ]
    return Group(*lines)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right", no_wrap=True)
    return table
