"""The section of RESULTS.md on real networks with this version: coverage, shares and trace times."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from result_tables import coverage, load, origin, table

COVERAGE = "trace_coverage_cpu.json"
EARLIER = "trace_coverage_0.2.json"
TIMES = "trace_time.json"
PEER = "torch_pruning"
TIMM_GOAL = 150  # networks of timm
ABOUT_ONE = 1.05  # ratios of times up to this count as equal
VERSIONS = {"before": "0.2, before", "now": "0.2, now", PEER: "Torch-Pruning"}
"""Titles of the columns of trace times."""


def coverage_now() -> str:
    """The run with this version: what is exact, frozen, too slow or wrong, and how it compares."""
    found = load(COVERAGE)
    parts = [_conditions(found), _outcome(found), _shares(found), coverage(COVERAGE), origin(COVERAGE)]
    return "\n\n".join([*parts, trace_times(), coverage_before()])


def coverage_before() -> str:
    """The earlier run on the machine with a GPU, in which each stage had less time and images were larger."""
    found = load(EARLIER)
    ours, where = found["totals"]["all"]["ecc"], found["environment"]
    again = {row["name"]: row["ecc"]["status"] for row in load(COVERAGE)["rows"]}
    text = (
        f"An earlier run of {found['totals']['all']['networks']} networks, those of detection and video first, then the small ones, with "
        f"{where['jobs']} processes on {where['cores']} cores and {where['limit_seconds']:g} s for each stage: {ours.get('exact', 0)} "
        f"are exact and {ours.get('time limit', 0)} reached that limit."
    )
    for row in found["rows"]:
        if row["ecc"]["status"] == "WRONG":
            text += (
                f" {row['name']} is recorded as WRONG: the outputs were compared in float32, and the order of equal scores depends "
                f"on rounding errors. In the run above it is {again.get(row['name'], 'not measured')}."
            )
    missed = [row["name"] for row in found["rows"] if row["ecc"]["status"] == "time limit"]
    exact = [name for name in missed if again.get(name) == "exact"]
    text += f" Of those that reached the limit, {len(exact)} are exact in the run above: {', '.join(exact)}."
    return f"{text}\n\n{coverage(EARLIER)}\n\n{origin(EARLIER)}"


def _conditions(found: dict[str, Any]) -> str:
    where, totals = found["environment"], found["totals"]
    timm = totals["timm"]["networks"]
    both = {row["name"] for file in (COVERAGE, EARLIER) for row in load(file)["rows"] if row["kind"] == "timm"}
    text = (
        f"{totals['all']['networks']} networks, {timm} of them of timm, and {len(both)} of timm together with the earlier run below "
        f"(goal {TIMM_GOAL}: {'met' if len(both) >= TIMM_GOAL else 'missed, the machine was shared'}). Other programs used the CPU too, "
        "so all times are CPU seconds. "
        f"Limit: {where['limit_cpu_seconds']:g} CPU seconds for each stage of each tool. Detectors have images of 256 pixels and at most "
        "100 regions, video networks 8 frames of 112 pixels where they take any size."
    )
    if where.get("operators_in_python"):
        names = " and ".join(f"`{name}`" for name in where["operators_in_python"])
        text += f" torchvision's operators {names} are those of `benchmarks/torchvision_ops.py`, in Python."
    left = where.get("not_measured", [])
    if left:
        kinds = Counter(name.partition("/")[0] for name in left)
        text += (
            f" There was no time for {len(left)} more networks ({', '.join(f'{n} of {kind}' for kind, n in kinds.items())}); "
            "`--resume` continues the run."
        )
    if where.get("too_large"):
        text += f" Too large for this machine: {', '.join(where['too_large'])}."
    return text


def _outcome(found: dict[str, Any]) -> str:
    rows, ours = found["rows"], found["totals"]["all"]["ecc"]
    wrong = [row["name"] for row in rows if row["ecc"]["status"] == "WRONG"]
    text = (
        f"ECC prunes {ours.get('exact', 0)} of them exactly. Wrong: {', '.join(wrong) or 'none'}. "
        f"Time limit: {_named(rows, 'time limit')}. Crash: {_named(rows, 'crash')}. "
        f"Entirely frozen: {_frozen(rows)}."
    )
    for key, why in (
        ("difference_float32", "Compared in float64, because rounding in float32 selects other boxes or tokens"),
        ("difference_float64", "Compared with the decisions of the masked network, because scores are equal"),
    ):
        rounded = [row["name"] for row in rows if row["ecc"].get(key) is not None]
        text += f" {why}: {', '.join(rounded)}." if rounded else ""
    return text


def _named(rows: list[dict[str, Any]], status: str) -> str:
    found = [f"{row['name']} ({row['ecc'].get('detail', '')})" for row in rows if row["ecc"]["status"] == status]
    return ", ".join(found) or "none"


def _frozen(rows: list[dict[str, Any]]) -> str:
    found = [row for row in rows if row["ecc"]["status"] == "nothing to prune"]
    return "; ".join(f"{row['name']} ({next(iter(row['ecc']['frozen']), '')})" for row in found) or "none"


def _shares(found: dict[str, Any]) -> str:
    rows = found["rows"]
    shares = [row["ecc"]["prunable_share"] for row in rows if "prunable_share" in row["ecc"]]
    removed = found["totals"]["all"]["median_removed_share"]
    low = sorted((row["ecc"]["prunable_share"], row["name"]) for row in rows if "prunable_share" in row["ecc"])
    low = [one for one in low if one[0] < 0.5]
    both = [row for row in rows if row["ecc"]["status"] == row[PEER]["status"] == "exact"]
    ours, theirs = (
        statistics.median(1 - row[tool]["parameters_left"] / row["parameters"] for row in both)
        for tool in ("ecc", PEER)
    )
    return (
        f"Parameters in prunable groups: {statistics.median(shares):.1%} on the median; less than half in "
        f"{', '.join(f'{name} ({share:.0%})' for share, name in low) or 'none'}. Pruning 40 % of the units of each group removes "
        f"{removed['ecc']:.0%} of the parameters on the median, and Torch-Pruning removes {removed[PEER]:.0%} (0 where it fails); "
        f"over the {len(both)} networks that both prune exactly {ours:.0%} and {theirs:.0%}."
    )


def trace_times() -> str:
    """CPU seconds of traces by version of ECC and by Torch-Pruning."""
    data = load(TIMES)
    commits, summary = data["environment"]["commits"], data["summary"]
    tools = [*commits, *([PEER] if PEER in summary else [])]
    lines = [[row["name"].removeprefix("timm/"), *[_cell(row, tool) for tool in tools]] for row in data["rows"]]
    lines.append(["median", *[_middle(summary, tool) for tool in tools]])
    lines.append(["median of now / this", *[_over(summary, tool) for tool in tools]])
    head = ["CPU seconds to trace", *[VERSIONS.get(tool, tool) for tool in tools]]
    named = ", ".join(f"{VERSIONS.get(tool, tool)} {commit[:7]}" for tool, commit in commits.items())
    slower = summary["0.1"]["median_now_over_this"] if "0.1" in summary else 0.0
    text = (
        f"Time to trace, without verification, one version after the other on one machine ({named}). "
        f"Goal: no slower than 0.1: {'met' if slower <= ABOUT_ONE else 'missed'}"
    )
    if slower > ABOUT_ONE:
        text += (
            f" ({slower:.1f} times as long). Since 0.1 a trace also finds attention heads and residual branches, and it checks more "
            "interpretations of the code by tracing pruned networks"
        )
    return f"{text}.\n\n{table(head, lines)}\n\n{origin(TIMES)}"


def _cell(row: dict[str, Any], tool: str) -> str:
    found = row.get(tool, {})
    return f"{found['seconds']:.3f}" if "seconds" in found else "fails"


def _middle(summary: dict[str, Any], tool: str) -> str:
    return f"{summary[tool]['median_seconds']:.3f}" if tool in summary else ""


def _over(summary: dict[str, Any], tool: str) -> str:
    return f"{summary[tool]['median_now_over_this']:.2f}" if tool in summary else ""
