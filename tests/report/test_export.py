"""The table of an export, from plain facts."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from ecc.report.export import export_view

LATENCY = {
    "dense_seconds": 0.02,
    "slim_seconds": 0.01,
    "ratio": 2.0,
    "ratio_range": [1.9, 2.1],
    "batch": 64,
    "threads": 1,
    "clock": "processor time",
    "label": "measured here, on this CPU, by onnxruntime",
}


def file(name: str, **changes: Any) -> dict[str, Any]:
    given = {"format": "x", "file": name, "bytes": 1234, "error": 2.2e-7, "batches": [1, 4], "tolerance": 1e-4}
    return {**given, "beside_bytes": None, "latency": None, "score": None, **changes}


def shown(facts: dict[str, Any]) -> str:
    console = Console(width=80, record=True, file=StringIO())
    console.print(export_view({"folder": "run/export", "score": 0.9, "notes": [], **facts}))
    return console.export_text()


def test_errors_and_times_are_shown_with_what_they_mean() -> None:
    files = [file("slim.pt2"), file("slim.onnx", beside_bytes=5678, latency=LATENCY)]
    text = shown({"files": files, "notes": ["[kept]"]})
    assert "slim.pt2   1,234" in text
    assert "5,678             2.2e-07   0.0001" in text
    assert "20 ms  10 ms  2.00 (1.90 to 2.10)" in text
    assert "measured here, on this CPU, by onnxruntime, batch 64, 1 thread" in text
    assert "processor time." in text
    assert "at batches of 1, 4" in " ".join(text.split())
    assert "[kept]" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_without_a_time_there_is_no_table_of_times() -> None:
    assert "onnxruntime" not in shown({"files": [file("slim.pt2")]})


def test_integers_claim_nothing() -> None:
    integers = file("slim.int8-static.onnx", tolerance=None, score=0.85, error=0.01, latency=LATENCY)
    text = " ".join(shown({"files": [integers]}).split())
    assert "none claimed" in text
    assert "Its outputs differ from those: score 0.8500, with floats 0.9000." in text
    unjudged = shown({"files": [{**integers, "score": None}], "score": None})
    assert "the task could not judge it." in " ".join(unjudged.split())
