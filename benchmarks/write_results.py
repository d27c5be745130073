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


def windows() -> str:
    lines = [
        [
            f"{length} s, {way}",
            f"{row['bias']:+.2%}",
            f"{row['spread']:.2%}",
            f"{(row['bias'] ** 2 + row['spread'] ** 2) ** 0.5:.2%}",
            f"{row['mean_window_seconds']:.2f}",
        ]
        for length, ways in load("window_accuracy.json")["windows"].items()
        for way, row in ways.items()
    ]
    return table(["window", "bias", "spread", "both (r.m.s.)", "really took, s"], lines)


def step_times() -> str:
    lines = []
    for name in ("step_time.json", "step_time_cpu.json"):
        data = load(name)
        for network, one in data["networks"].items():
            lines.append(
                [
                    f"{network}, {data['device']}",
                    f"{one['parameters'] / 1e6:.1f} M",
                    "x".join(map(str, one["shape"])),
                    f"{one['milliseconds']['adam']:.1f}",
                    f"**{one['ratio_to_adam']['ecc']:.3f}**",
                    f"{one['ratio_to_adam']['literal']:.3f}",
                ]
            )
    return table(["network", "parameters", "batch", "Adam, ms", "EccSolver / Adam", "literal / Adam"], lines)


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
several batch sizes: the largest difference from the network's outputs, over the largest output (allowed:
{tolerance:g}). Then dense over slim, in MACs and in onnxruntime's latency, with widths in multiples of 8 and with
widths as drawn. Latency is measured on the CPU below: {latency}.
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


def weights() -> str:
    lines = []
    for name, one in load("published_weights.json")["networks"].items():
        found = ", ".join(
            f"{what} {one[key]:.1%}"
            for key, what in (
                ("top1", "top-1"),
                ("top1_of_1000", "top-1 of 1,000"),
                ("top5_of_1000", "top-5 of 1,000"),
                ("top1_of_10", "top-1 of ten"),
                ("mean_iou", "mean IoU"),
            )
            if key in one
        )
        lines.append([name, found, one["stated"]])
    return table(["network and data", "here", "stated for the files"], lines)


def data_speeds() -> str:
    lines = []
    for name, one in load("data_speed.json")["speed"].items():
        best = one.get("threads_2", one)
        lines.append([name, f"{best['images_per_core_second']:,.0f}", f"{best['images_per_second']:,.0f}"])
    return table(["training images", "a second of one core", "a second here"], lines)


def reliability() -> str:
    found = load("reliability.json")
    lines = [
        [kind, f"{one['tried']:,}", f"{one['survived']:,}", str(len(one["lost"]))]
        for kind, one in found["kinds"].items()
    ]
    totals = found["totals"]
    lines.append(["all", f"{totals['tried']:,}", f"{totals['survived']:,}", str(totals["lost"])])
    return table(["faults", "tried", "survived", "lost"], lines)


def compressed() -> str:
    found = load("compress_imagenette.json")
    summary = found["summary"]
    scores, energy = summary["scores"], summary["budgets"]["energy"]
    lines = [
        [
            "dense",
            f"{energy['dense']:.4f}",
            "100 %",
            f"{scores['dense']:.2%}",
            f"{summary['parameters']['dense'] / 1e6:.2f} M",
        ],
        [
            "compressed",
            f"{energy['result']:.4f}",
            f"{found['energy_share_of_dense']:.1%}",
            f"{scores['before tuning']:.2%} / {scores['after tuning']:.2%}",
            f"{summary['parameters']['result'] / 1e6:.2f} M",
        ],
    ]
    widths = ", ".join(f"{w} of {summary['full_widths'][n]}" for n, w in summary["widths"].items())
    return (
        table(["", f"J a batch, {energy['label']}", "share", "accuracy before / after tuning", "parameters"], lines)
        + f"\n\nThe budget of {energy['limit']:.4f} J is reached to {found['budget_share_reached']:.1%}, after "
        + f"{summary['weighings']} weighings; {found['points_lost']:.1f} points are lost, where the goal was 1.5. "
        + f"Widths, from the input on: {widths}."
    )


def page() -> str:
    totals = load("trace_coverage.json")["totals"]["all"]
    exact, count = totals["ecc"]["exact"], totals["networks"]
    environment = load("trace_coverage.json")["environment"]
    rival, limit = environment["torch_pruning"], environment["limit_seconds"]
    weights_subset = load("published_weights.json")["subset"]
    load_average = load("data_speed.json")["environment"]["load_average"]
    window = load("window_accuracy.json")
    window_network, window_repeats = window["network"], window["repeats"]
    window_ratio = window["spread_ratio_at_half_a_second"]
    ours, child = (
        sum(window["windows"]["0.5"][way][part] ** 2 for part in ("bias", "spread")) ** 0.5
        for way in ("ours", "nvidia-smi child")
    )
    window_rms = child / ours
    return f"""# Results

Made by `benchmarks/write_results.py` from the files in `results/`; nothing here was typed by hand.

## Measuring joules

Short windows against the mean of two aligned windows of 20 s, before and after ({window_network}; {window_repeats}
windows each). *Ours* ends on counter ticks, and where the ticks have seen all parts of the network; *nvidia-smi child*
is the way of the paper's published code; *unaligned counter* reads NVML's energy counter at any moment, as Zeus does.

{windows()}

The goal was a spread of a tenth of the child's at 0.5 s; it is {window_ratio:.2f} of it, so the goal is missed: the
child scatters little, about a value that is far off. Bias and spread together, ours is {window_rms:.0f} times nearer to
the reference.

{origin("window_accuracy.json")}

## Predicting joules

Ten-fold cross-validated relative errors on profiles measured on an NVIDIA H200 (NVML's counter, CUDA graphs, TF32,
widths in multiples of 8; cuDNN autotuned AlexNet at batch 1, and took its heuristics for the others).
*Noise* is the standard deviation of one measurement, from the dense reference that is measured again and again. *Ours*
is `physical`, the default; whatever it chooses for itself is chosen anew within each fold. The dense network
stands in every profile: its error is told in the fit, and when held out.

{energy_models()}

![predicted against measured, AlexNet](results/figures/alexnet-b128-prediction.svg)

As in the paper, a perceptron behind the bilinear features does not help:

![error over iterations of Adam](results/figures/paper-figures-2-3.svg)

{origin("energy_fit.json")}

## Compressing on the scales

MobileNet v1 with its ImageNet weights on Imagenette (a lossy 128 px copy: numbers compare with each other, and are no
ImageNet results), to half of the joules that the dense network takes, batches of 64. This run chose channels by the
paper's metric, and the goal for accuracy is missed; the first layers, which are dear, were narrowed most.
`metric="taylor"` has since become the default; its run is still to be made.

{compressed()}

{origin("compress_imagenette.json")}

## What a step costs

A training step with `EccSolver`, in the ramp of a solve of 20,000 steps, over one with fused Adam; *literal* does the
work layer by layer at every step. The goals were 1.03 on the GPU, missed by two of four networks, and 1.10 on a CPU,
where processor time of one thread is compared. The GPU was measured with the paper's metric and with masks that were
multiplied one by one; the CPU with `metric="taylor"` and masks multiplied together.

{step_times()}

{origin("step_time.json")}

{origin("step_time_cpu.json")}

## Published weights and data

Weights of others in our networks, on packed lossy copies of data: {weights_subset}. This checks
that weights and network fit; it is no result on the originals.

{weights()}

{origin("published_weights.json")}

Reading and augmenting training images, on a busy machine (load average {load_average}):

{data_speeds()}

{origin("data_speed.json")}

## Faults

Damaged files of every kind that is read (cut off, bits flipped, values of other types and sizes), bombs under a limit
of memory, and wrong commands. Survived: one clear line, or a file that still reads; nothing executed, nothing outside
touched, nothing lost. Kills: -9 at random moments of each command, half of them just before a change to a file.
Survived: the same command again ends as an undisturbed run does, bit for bit, and leaves no temporary file.

{reliability()}

{origin("reliability.json")}

{exports_section()}
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
