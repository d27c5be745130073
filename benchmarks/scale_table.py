"""The section of the results page about load and scale, made from the record of `scale.py` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]

WORDS = {
    "rows": ("samples in a profile", "{:,}"),
    "groups": ("groups in a network", "{:,}"),
    "cells": ("runs in a grid", "{:,}"),
    "lines": ("lines in a history", "{:,}"),
    "parameters": ("parameters on the meta device", "{:,}"),
}
BASE_SECONDS, BASE_BYTES = 1e-3, 1e6
"""Below these, growth is not reported: it would be noise."""


def scale_section(record: Record) -> str:
    """The section: a table of the largest sizes, and the numbers that do not fit into it."""
    cases = record["cases"]
    lines = [
        "## Scalability",
        "",
        _opening(cases),
        "",
        "| size | operation | time | growth | memory | growth |",
        "|---|---|---|---|---|---|",
    ]
    for name, (words, shape) in WORDS.items():
        if name in cases:
            lines += _rows(cases[name], f"{shape.format(cases[name]['points'][-1]['size'])} {words}")
    found = [_pages(cases), _meta(cases), *(_leak(cases, name) for name in ("steps", "windows"))]
    environment = next(iter(cases.values()))["environment"]  # a case may have been measured again by itself
    where = f"{environment['cpu']}, one thread, Python {environment['python']}, torch {environment['torch']}"
    return "\n".join(
        [
            *lines,
            "",
            " ".join(sentence for sentence in found if sentence),
            "",
            f"{where}; `{environment['command']}`.",
            "",
        ]
    )


def _opening(cases: Record) -> str:
    worst = max(
        (
            (found["seconds"], part, WORDS[name][0])
            for name in WORDS
            if name in cases
            for part, found in cases[name]["exponents"].items()
            if found["seconds"] is not None and cases[name]["points"][-1]["parts"][part]["seconds"] >= BASE_SECONDS
        ),
        default=None,
    )
    words = "CPU seconds and additional memory at the largest size that was tested. "
    words += "The exponent is that of the last factor of ten; 1 is linear"
    return words + (f". The largest is {worst[0]:.1f} ({worst[1]}, {worst[2]})." if worst else ".")


def _rows(case: Record, words: str) -> list[str]:
    lines = []
    least, largest = case["points"][0]["parts"], case["points"][-1]["parts"]
    for number, (part, found) in enumerate(largest.items()):
        grows = case["exponents"][part]
        is_reported = found["seconds"] >= BASE_SECONDS
        cells = [
            words if number == 0 else "",
            part,
            _seconds(found["seconds"]),
            _power(grows["seconds"]) if is_reported else "",
            _bytes(found.get("peak_bytes")),
            _power(grows["peak_bytes"]) if least.get(part, {}).get("peak_bytes", 0) >= BASE_BYTES else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _pages(cases: Record) -> str:
    found = []
    for name in ("cells", "lines", "groups"):
        if name in cases:
            point = cases[name]["points"][-1]
            found.append(f"{point['page_bytes'] / 1e6:.1f} MB for {point['size']:,} {WORDS[name][0].split()[0]}")
    return f"Size of a report page, plotting library included: {_joined(found)}." if found else ""


def _meta(cases: Record) -> str:
    if "parameters" not in cases:
        return ""
    point = cases["parameters"]["points"][-1]
    peak, weights = point["parts"]["trace"].get("peak_bytes"), point["weight_bytes"]
    if peak is None:
        return ""
    return (
        f"Tracing a network with {weights / 1e9:.1f} GB of weights takes {_bytes(peak)}, {peak / weights:.1%} of that."
    )


def _leak(cases: Record, name: str) -> str:
    if name not in cases:
        return ""
    point = cases[name]["points"][-1]
    words = {"steps": "steps of a solver", "windows": "measured windows"}[name]
    first = next(look for look in point["looks"] if look["steps"] >= point["size"] / 5)
    last = point["looks"][-1]
    files = (
        "the number of open files stays the same"
        if point["more_files"] == 0
        else f"{point['more_files']} more files are open"
    )
    return (
        f"From {first['steps']:,} to {last['steps']:,} {words}, memory grows by "
        f"{point['bytes_per_1000_steps'] / 1e3:.1f} kB per 1,000, and {files}."
    )


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.2g} ms"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e6:,.0f} MB" if value >= 1e6 else "below 1 MB"


def _power(value: float | None) -> str:
    return "" if value is None else f"n^{round(value, 1) + 0.0:.1f}"  # and no -0.0


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
