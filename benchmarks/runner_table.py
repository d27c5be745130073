"""The sections on inference runners, precision and analytic platforms in RESULTS.md."""

from __future__ import annotations

import statistics
from typing import Any

from result_tables import ROOT, load, origin, table

from ecc.measure import Profile


def runner_section() -> str:
    """The sections; one is left out while its file does not exist."""
    sections = {
        "runners.json": _runners, "cpu_latency.json": _cpu_latency, "precision.json": _precision,
        "precision_layers.json": _precision_layers,
        "platform_error.json": _platform,
    }  # fmt: skip
    return "".join(make(load(name)) for name, make in sections.items() if (ROOT / "results" / name).is_file())


RUNNER_GOAL = 0.03
ERROR_GOAL, BUDGET_BAND = (
    0.05,
    (0.98, 1.0),
)  # of the latency model, and of the fresh measurement as a share of the budget


def _cpu_latency(found: dict[str, Any]) -> str:
    rows = [
        [
            row["runner"].partition(":")[0],
            row["clock"],
            f"{row['noise']:.1%}" if "noise" in row else "-",
            f"{row['noise_in_turns']:.1%}" if "noise" in row else "-",
            f"{row['errors']['mean']:.1%}" if row.get("errors") else "-",
            f"{row['aligned']['errors']['mean']:.1%}" if row.get("aligned", {}).get("errors") else "-",
            "{share:.1%} ({0:.1%} to {1:.1%})".format(*row["fresh"]["interval"], **row["fresh"])
            if "fresh" in row
            else row.get("problem", "-"),
        ]
        for row in found["rows"]
    ]
    goal = [row for row in found["rows"] if row["clock"] == "cputime"]
    errors = [
        sum(bool(one.get("errors")) and one["errors"]["mean"] <= ERROR_GOAL for one in part)
        for part in (goal, [row.get("aligned", {}) for row in goal])
    ]
    low, high = BUDGET_BAND
    met = sum(
        "fresh" in row and row["fresh"]["interval"][0] <= high and row["fresh"]["interval"][1] >= low for row in goal
    )
    share = found["rows"][0]["budget"]
    medians = ", ".join(
        "{0} {median_of_turns:.1%} ({1:.1%} to {2:.1%})".format(
            row["runner"].partition(":")[0], *row["fresh"]["median_interval"], **row["fresh"]
        )
        for row in goal
        if "fresh" in row
    )
    reason = (
        "Readings near the budget are repeated and averaged: among single noisy readings, the network that comes closest to its "
        "budget\nfrom below is more often one that was read too high. For comparison, the fresh measurement as the median of the ratios "
        f"of single turns,\nas it was published before, though of longer windows: {medians}."
    )
    for row in goal:
        if row.get("errors") and row["errors"]["mean"] > ERROR_GOAL:
            name = row["runner"].partition(":")[0]
            file = f"results/cpu_latency/{name}.profile.gz"
            intervals = [one.relative_ci or 0.0 for one in Profile.load(ROOT / file).design_samples]
            reason += (
                f"\n\nThe model of {name} is above its goal. The error is mostly not noise: in its profile (`{file}`) nine of ten "
                f"samples\nhave an interval below {statistics.quantiles(intervals, n=10)[-1]:.1%}. The largest error is "
                f"{row['errors']['max']:.0%}, that near the dense network {row['errors']['near_dense']:.1%}."
            )
    return f"""## Latency budgets on a CPU

Profile, fit and compression to {share:.0%} of the latency of the dense network ({found["network"]}, batch {found["batch"]}, one thread) on a
machine that other programs use. Noise is that of the dense network, measured again and again: alone, and in turns with another
copy of it, as profiles with clocks do. The result is loaded anew and measured in turns with the dense network. Its share of the budget comes
from the fastest window of each, since other programs only add time, with its 95 % confidence interval.

{table(["runner", "clock", "noise", "noise in turns", "model error", "aligned", "fresh, of the budget"], rows)}

The model of the compression covers widths in multiples of 8 and networks without some residual branches, down to a small part of the time
of the dense network; the aligned one multiples of 16, the block of both runtimes, with every branch.

{reason}

Goals, with the clock `cputime`: error of the latency model at most {ERROR_GOAL:.0%}, met with {errors[0]} of {len(goal)} runners, and with {errors[1]} for
aligned widths; fresh measurement within
{low:.0%} to {high:.0%} of the budget within its interval, met with {met} of {len(goal)}.

{origin("cpu_latency.json")}

"""


def _precision_layers(found: dict[str, Any]) -> str:
    rows = [
        [
            row["way"],
            f"{row['budget']:.0%}" if "budget" in row else "-",
            f"{row['latency']:.1%}",
            f"{row['spread']:.1%}",
            f"{row['error']:.2%}",
            f"{row['score']:.4f}",
        ]
        for row in found["rows"]
    ]
    fewest, most = (pick(one["error"] for one in found["layers"]) for pick in (min, max))
    return f"""### int8 for some layers only

Each of the {len(found["layers"])} layers of the same network alone was left in fp32: the output error is then between {fewest:.1%} and {most:.1%}. The
layers that gain most per cost were left in fp32 together, within a latency budget relative to int8; that file was measured anew, in turns
with the int8 file.

{table(["way", "budget", "latency, of int8", "spread", "output error", "accuracy"], rows)}

{origin("precision_layers.json")}

"""


def _platform(found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{found[name]['measured']:.3g}",
            f"{found[name]['computed']:.3g}",
            f"{found[name]['ratio']:.2f}",
            f"{found[name]['relative_mean']:.0%}",
            f"{found[name]['relative_p90']:.0%}",
        ]
        for name in ("joules", "seconds")
    ]
    return f"""## Error of an analytic platform

`platform:{found["platform"]}` against ResNet-56 (fp32, CUDA graphs, batch {found["batch"]}) measured on an {found["device"]}, which has the same chip: the dense
network, and {found["joules"]["samples"]} narrower networks relative to the dense one. Nothing measured exists for the other platforms of current devices.

{table(["", "measured", "computed", "ratio", "relative error", "p90"], rows)}

{origin("platform_error.json")}

"""


def _runners(found: dict[str, Any]) -> str:
    device = found["meter"]["device"]
    profiled, searched = (
        [{**cell, name: cell["name"]} for cell in found["cells"] if cell["part"] == part] if "cells" in found else old
        for part, name, old in (
            ("model", "runner", found.get("models", [])),
            ("search", "network", found.get("searches", [])),
        )
    )
    models = [
        [
            row["runner"],
            row.get("network", "-"),
            str(row.get("samples", "-")),
            "-" if row.get("seconds_per_sample") is None else f"{row['seconds_per_sample']:.2f}",
            row.get("problem", row.get("error", "-")) if not row.get("errors") else f"{row['errors']['mean']:.1%}",
            "-" if not row.get("errors") else f"{row['errors']['p90']:.1%}",
        ]
        for row in profiled
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
        for row in searched
        if "search" in row
    ]
    return f"""## Inference runners

Cross-validated error of the energy model with each runner, {device}; goal: at most 3 %, {_error_goal(profiled)}.

{table(["runner", "network", "samples", "s per sample", "mean error", "p90"], models)}

The cheapest way to run the dense network, as `--runner auto` finds it: outputs within 5 % of fp32, random weights.

{table(["network", "default", "J per batch", "cheapest", "J per batch", "saved"], searches)}

{origin("runners.json")}

"""


def _error_goal(profiled: list[dict[str, Any]]) -> str:
    """Which runners met the goal, which missed it, and which profiles are not complete."""
    known = {row["runner"]: row["errors"]["mean"] for row in profiled if row.get("errors")}
    parts = {
        "met by": [name for name, error in known.items() if error <= RUNNER_GOAL],
        "missed by": [name for name, error in known.items() if error > RUNNER_GOAL],
    }
    text = "; ".join(f"{words} {', '.join(names)}" for words, names in parts.items() if names)
    stopped = [row for row in profiled if "stopped_by" in row]
    for row in stopped:
        text += f". The profile of {row['runner']} has {row['samples']} samples, because a measurement was refused"
    noise = {row["runner"]: row["reference_cv"] for row in profiled if row.get("reference_cv") is not None}
    if known.get("compile", 0.0) > RUNNER_GOAL:
        text += (
            f".\nThe error of compile is not noise: the dense network repeats within {noise['compile']:.1%}. torch.compile "
            "chooses kernels and a memory layout of its own\nfor every width. Which of them cause the error was not isolated, "
            "since the samples of this run were not kept. Until then, check a\nbudget with this runner on the meter, as "
            "`ecc compress` does"
        )
    return text


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

The digits network with onnxruntime on a CPU, batch {found["batch"]}, {found["label"]}: pruned in fp32, quantized to int8, or both.

{table(["budget", "way", "ms per batch", "of dense", "accuracy"], lines)}

{origin("precision.json")}

"""
