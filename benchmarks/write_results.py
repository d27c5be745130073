"""RESULTS.md from the JSON files in results/: every number in it comes from there.

python3 benchmarks/write_results.py          # write the page
python3 benchmarks/write_results.py --check  # exit 1 if the page is not what the files say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "results", ROOT / "RESULTS.md"
KINDS = ("torchvision classification", "torchvision segmentation", "timm", "all")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def origin(name: str) -> str:
    found = load(name)["environment"]
    keys = ("cpu", "cores", "python", "torch", "torchvision", "timm", "torch_pruning", "onnx", "onnxruntime")
    facts = ", ".join(f"{key} {found[key]}" for key in keys if found.get(key))
    return f"`results/{name}`, {found['date']}: {facts}. `{found['command']}`"


def coverage() -> str:
    totals = load("trace_coverage.json")["totals"]
    rows = load("trace_coverage.json")["rows"]
    statuses = sorted({s for t in totals.values() for tool in ("ecc", "torch_pruning") for s in t[tool]})
    lines = [["networks", *[str(totals[k]["networks"]) for k in KINDS]]]
    for tool, title in (("ecc", "ECC"), ("torch_pruning", "Torch-Pruning")):
        for status in statuses:
            counts = [totals[k][tool].get(status, 0) for k in KINDS]
            if any(counts):
                lines += [[f"{title}: {status}", *map(str, counts)]]
        lines.append(
            [f"{title}: median seconds to trace", *[f"{totals[k]['median_trace_seconds'][tool]:.2f}" for k in KINDS]]
        )
    lines.append(["trace, theirs / ours, median", *[f"{totals[k]['median_trace_ratio']:.2f}" for k in KINDS]])
    lines.append(["cut, their step / ours, median", *[f"{totals[k]['median_cut_ratio']:.1f}" for k in KINDS]])
    lines.append(["removal alone, theirs / ours, median", *[f"{totals[k]['median_removal_ratio']:.1f}" for k in KINDS]])
    missed = [row for row in rows if row["ecc"]["status"] != "exact"]
    slow = sorted(rows, key=lambda row: -row["ecc"]["trace_seconds"])[:5]
    return "\n".join(
        [
            table(["", *KINDS], lines),
            "",
            "Not exact with ECC: "
            + "; ".join(f"{row['name']}: {row['ecc']['status']}" for row in missed)
            + ". Slowest to trace: "
            + ", ".join(f"{row['name']} {row['ecc']['trace_seconds']:.1f} s" for row in slow)
            + ".",
        ]
    )


def failures() -> str:
    rows = load("trace_coverage.json")["rows"]
    lines = [
        [
            row["name"],
            row["torch_pruning"]["status"],
            str(row["torch_pruning"].get("detail") or "")[:90].replace("|", " "),
        ]
        for row in rows
        if row["torch_pruning"]["status"] != "exact"
    ]
    return table(["network", "Torch-Pruning", "detail"], lines)


def scaling() -> str:
    data = load("trace_scaling.json")
    lines = [
        [
            f"{p['family']}, depth {p['depth']}, width {p['width']}",
            f"{p['trace_seconds']:.3f}",
            f"{p['resized_seconds'] * 1e3:.1f}",
            "-" if p.get("slim_seconds") is None else f"{p['slim_seconds'] * 1e3:.1f}",
            f"{p['file_bytes'] / 1e3:.0f}",
        ]
        for p in data["points"]
    ]
    exponents = [
        f"{e['family']} over {e['over']}: trace {e['trace_seconds']:.2f}, resized {e['resized_seconds']:.2f}"
        for e in data["exponents"]
    ]
    head = ["network", "trace, s", "resized on meta, ms", "slim, ms", "graph file, kB"]
    return table(head, lines) + "\n\nExponents over the last decade (1 is linear): " + "; ".join(exponents) + "."


def resizing() -> str:
    rows = load("resize_speed.json")["rows"]
    keys = list(rows[0]["milliseconds"])
    lines = [[row["network"], *[f"{row['milliseconds'][key]:.2f}" for key in keys]] for row in rows]
    return table(["CPU milliseconds at half widths", *keys], lines)


def energy_models() -> str:
    lines = []
    for name, one in load("energy_fit.json")["profiles"].items():
        bilinear, physical = one["families"]["bilinear"], one["families"]["physical"]
        lines.append(
            [
                name,
                str(one["rows"]),
                f"{one['seconds_per_network']:.2f}",
                f"{one['noise']:.2%}",
                f"{bilinear['mean']:.2%}",
                f"**{physical['mean']:.2%}**",
                f"{physical['ninetieth']:.2%}",
                f"{physical['bias']:+.2%}",
                f"{physical['dense_fitted']:+.1%} / {physical['dense']:+.1%}",
                f"{physical['near_dense']:.2%}",
            ]
        )
    head = ["profile", "rows", "s a row", "noise", "bilinear", "ours", "9 in 10", "bias", "dense: fitted / held out"]
    return table([*head, "near dense"], lines)


def exports() -> str:
    """Files for other programs: how far they are from the network, and what onnxruntime takes."""
    found = load("export_roundtrip.json")
    rows = []
    for row in found["rows"]:
        errors = [f"{row['formats'][kind]['error']:.1e}" for kind in ("safetensors", "pt2", "onnx", "torchscript")]
        times = []
        for step in ("8", "1"):
            entry = row["latency"][step]
            low, high = entry["ratio_range"]
            times += [f"{entry['macs']:.1f}", f"{entry['ratio']:.2f} ({low:.2f} to {high:.2f})"]
        rows.append([f"{row['network']}, {'x'.join(map(str, row['input']))}", *errors, *times])
    head = ["network, input", "safetensors", "pt2", "onnx", "torchscript"]
    head += ["MACs, 8s", "latency, 8s", "MACs, 1s", "latency, 1s"]
    return table(head, rows)


EXPORTS = """## Exports

Networks cut at random to about half their widths, written in each format, and run by the format's own program at
several batch sizes: the largest difference from the network's outputs, over the largest output (allowed: {tolerance:g}).
Then dense over slim, in MACs and in onnxruntime's latency, with widths in multiples of 8 and with widths as drawn.
Latency is measured on the CPU below: {latency}.
Other programs were running meanwhile: the load average was {load}.

{table}

{origin}
"""


def exports_section() -> str:
    file = "export_roundtrip.json"
    found = load(file)
    busy = ", ".join(map(str, found["environment"]["load_average"]))
    return EXPORTS.format(
        tolerance=found["tolerance"], latency=found["latency"], load=busy, table=exports(), origin=origin(file)
    )


def page() -> str:
    totals = load("trace_coverage.json")["totals"]["all"]
    exact, count = totals["ecc"]["exact"], totals["networks"]
    environment = load("trace_coverage.json")["environment"]
    rival, limit = environment["torch_pruning"], environment["limit_seconds"]
    return f"""# Results

Made by `benchmarks/write_results.py` from the files in `results/`; nothing here was typed by hand.

## Predicting joules

Ten-fold cross-validated relative errors on profiles measured on an NVIDIA H200 (NVML's counter, CUDA graphs, TF32,
cuDNN's heuristics, widths in multiples of 8). *Noise* is the standard deviation of one measurement, from the dense
reference that is measured again and again. *Ours* is `physical`, the default; whatever it chooses for itself is chosen
anew within each fold. The dense network stands in every profile: its error is told in the fit, and when held out.

{energy_models()}

![predicted against measured, AlexNet](results/figures/alexnet-b128-prediction.svg)

As in the paper, a perceptron behind the bilinear features does not help:

![error over iterations of Adam](results/figures/paper-figures-2-3.svg)

{origin("energy_fit.json")}

## Tracing and cutting real networks

{exact} of {count} networks are cut exactly: 40 % of the units of every group that can be cut are silenced in one
copy and removed in another, and the outputs agree to 1e-4 of their largest value. Torch-Pruning {rival} is
measured in the same processes, through its high-level pruner with head counts given. *Differs by nature* means
that it cut through a normalisation over channels, which changes any network. A row that ran into the time limit
({limit:g} s for each stage, for both tools) counts with that limit in the medians. *Step* is its own unit of work,
with ranking and group search; *removal alone* leaves those out.

{coverage()}

{origin("trace_coverage.json")}

## Where Torch-Pruning does not give an exact network

{failures()}

## Growth with depth and width

{scaling()}

![trace time over depth and width](results/trace_scaling.svg)

{origin("trace_scaling.json")}

## Building a network of other widths

`structure` is `resized(..., device="meta")`, `with weights` copies slices of the dense weights; `allocate` and
`copy` are the same tensors without us, `deepcopy` is a copy of the dense network.

{resizing()}

{origin("resize_speed.json")}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("RESULTS.md is not what results/ says: run benchmarks/write_results.py")


if __name__ == "__main__":
    main()
