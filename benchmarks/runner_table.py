"""The section on inference runners and precision in RESULTS.md, from results/runners.json and results/precision.json."""

from __future__ import annotations

from typing import Any

from result_tables import ROOT, load, origin, table


def runner_section() -> str:
    """The section; empty parts are left out while their file does not exist."""
    parts = []
    if (ROOT / "results" / "runners.json").is_file():
        parts.append(_runners(load("runners.json")))
    if (ROOT / "results" / "precision.json").is_file():
        parts.append(_precision(load("precision.json")))
    return "".join(parts)


def _runners(found: dict[str, Any]) -> str:
    device = found["meter"]["device"]
    models = [
        [
            row["runner"],
            row["network"],
            str(row["samples"]),
            "-" if row.get("seconds_per_sample") is None else f"{row['seconds_per_sample']:.2f}",
            row.get("problem", "-") if not row.get("errors") else f"{row['errors']['mean']:.1%}",
            "-" if not row.get("errors") else f"{row['errors']['p90']:.1%}",
        ]
        for row in found["models"]
    ]
    searches = [
        [
            f"{row['network']}, batch {row['batch']}",
            row["search"]["candidates"][0]["runner"] + ", fp32",
            f"{row['search']['candidates'][0]['joules']:.4g}",
            row["best"],
            f"{row['search']['candidates'][row['search']['chosen']]['joules']:.4g}",
            f"{row['saving']:.0%}",
        ]
        for row in found["searches"]
        if "search" in row
    ]
    return f"""## Inference runners

Cross-validated error of the energy model with each runner, {device}; goal: at most 3 %.

{table(["runner", "network", "samples", "s per sample", "mean error", "p90"], models)}

The cheapest way to run the dense network, as `--runner auto` finds it: outputs within 5 % of fp32, random weights.

{table(["network", "default", "J per batch", "cheapest", "J per batch", "saved"], searches)}

{origin("runners.json")}

"""


def _precision(found: dict[str, Any]) -> str:
    dense = found["rows"][0]
    lines = [
        [
            row["budget"] or "-",
            row["way"],
            f"{row['seconds'] * 1e3:.3g}" if "seconds" in row else "-",
            f"{row['seconds'] / dense['seconds']:.0%}" if "seconds" in row else "-",
            f"{row['score']:.4f}" if "score" in row else row.get("problem", "-"),
        ]
        for row in found["rows"]
    ]
    return f"""## Precision and pruning under the same latency budget

The digits network with onnxruntime on a CPU, batch {found["batch"]}, {found["label"]}: pruned in fp32, quantised to int8, or both.

{table(["budget", "way", "ms per batch", "of dense", "accuracy"], lines)}

{origin("precision.json")}

"""
