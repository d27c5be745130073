"""The tables of RESULTS.md, each from one JSON file in results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
LEAST_ENERGY_GOAL = 0.15
"""Least energy of a network without its residual branches, as a fraction of the dense one."""
CLEARLY = 1.03  # relative energy that is clearly above the noise of short measurements
WINDOWS = {"ours": "aligned window", "nvidia-smi child": "nvidia-smi polling"}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def origin(name: str) -> str:
    return origin_of(name, load(name)["environment"])


def origin_of(name: str, found: dict[str, Any]) -> str:
    """Source of a table: file, date, machine and command."""
    keys = ("cpu", "cores", "python", "torch", "torchvision", "timm", "torch_pruning", "onnx", "onnxruntime")
    facts = ", ".join(f"{key} {found[key]}" for key in keys if found.get(key))
    return f"`results/{name}`, {found['date']}: {facts}. `{found['command']}`"


def coverage(file: str = "trace_coverage.json") -> str:
    """Results of both tools by kind of network."""
    data = load(file)
    totals, rows = data["totals"], data["rows"]
    kinds = list(totals)
    statuses = sorted({s for t in totals.values() for tool in ("ecc", "torch_pruning") for s in t[tool]})
    lines = [["networks", *[str(totals[k]["networks"]) for k in kinds]]]
    for tool, title in (("ecc", "ECC"), ("torch_pruning", "Torch-Pruning")):
        for status in statuses:
            counts = [totals[k][tool].get(status, 0) for k in kinds]
            if any(counts):
                lines += [[f"{title}: {status}", *map(str, counts)]]
        lines.append([f"{title}: median seconds to trace", *_row(totals, ("median_trace_seconds", tool), ".2f")])
        lines.append(
            [f"{title}: median share of parameters removed", *_row(totals, ("median_removed_share", tool), ".0%")]
        )
    for key, title, form in (
        ("median_trace_ratio", "trace time, Torch-Pruning / ECC, median", ".2f"),
        ("median_cut_ratio", "prune time, pruner step / ECC, median", ".1f"),
        ("median_removal_ratio", "prune time, removal alone / ECC, median", ".1f"),
    ):
        lines.append([title, *_row(totals, (key,), form)])
    missed = [row for row in rows if row["ecc"]["status"] != "exact"]
    traced = [row for row in rows if row["ecc"].get("trace_seconds") is not None]
    slow = sorted(traced, key=lambda row: -row["ecc"]["trace_seconds"])[:5]
    return "\n".join(
        [
            table(["", *kinds], [line for line in lines if any(line[1:])]),
            "",
            "Not exact with ECC: "
            + ("; ".join(f"{row['name']}: {row['ecc']['status']}" for row in missed) or "none")
            + ". Slowest to trace: "
            + ", ".join(f"{row['name']} {row['ecc']['trace_seconds']:.1f} s" for row in slow)
            + ".",
        ]
    )


def _row(totals: dict[str, Any], keys: tuple[str, ...], form: str) -> list[str]:
    """One value of each kind of network; empty where it is not known."""
    cells = []
    for kind in totals.values():
        value: Any = kind
        for key in keys:
            value = (value or {}).get(key)
        cells.append("" if value is None else format(value, form))
    return cells


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
            f"{p['with_widths_seconds'] * 1e3:.1f}",
            "-" if p.get("slim_seconds") is None else f"{p['slim_seconds'] * 1e3:.1f}",
            f"{p['file_bytes'] / 1e3:.0f}",
        ]
        for p in data["points"]
    ]
    exponents = [
        f"{e['family']} over {e['over']}: trace {e['trace_seconds']:.2f}, with_widths {e['with_widths_seconds']:.2f}"
        for e in data["exponents"]
    ]
    head = ["network", "trace, s", "with_widths on meta, ms", "slim, ms", "graph file, kB"]
    blocks = ", ".join(f"{one['blocks']} {one['kind']} {one['trace_seconds']:.2f} s" for one in data["blocks"])
    return (
        table(head, lines)
        + "\n\nExponents over the last factor of ten (1 is linear): "
        + "; ".join(exponents)
        + f".\n\nTime to trace other blocks: {blocks}."
    )


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
                str(len(one["values"])),
                f"{one['seconds_per_sample']:.2f}",
                f"{one['noise']:.2%}",
                f"{bilinear['mean']:.2%}",
                f"**{physical['mean']:.2%}**",
                "" if one["from_100"] is None else f"{one['from_100']:.2%}",
                f"{physical['p90']:.2%}",
                f"{physical['bias']:+.2%}",
                f"{physical['dense_fitted']:+.1%} / {physical['dense']:+.1%}",
                f"{physical['smallest']:+.1%}",
                f"{physical['ends']}: {physical['max_at_ends']:.1%}",
                f"{physical['near_dense']:.2%}",
            ]
        )
    head = [
        "profile",
        "samples",
        "s per sample",
        "noise",
        "bilinear",
        "physical",
        "from 100",
        "p90",
        "bias",
        "dense: fitted / held out",
        "smallest, held out",
        "ends, held out: max",
    ]
    return table([*head, "near dense"], lines)


def floors() -> str:
    """Energy of uniformly pruned networks, and how many need more than the dense one."""
    found = load("floors.json")["rows"]
    cuts = [cut for cut in found[0]["joules"] if cut != "dense"]
    lines, dearer = [], []
    for row in found:
        name = f"{row['network']}, batch {row['batch']}, {row['way']}"
        shares = {cut: row["joules"][cut] / row["joules"]["dense"] for cut in cuts if cut in row["joules"]}
        dearer += [share for share in shares.values() if share > CLEARLY]
        cells = [f"{shares[cut]:.1%}" if cut in shares else "" for cut in cuts]
        lines.append([name, f"{row['joules']['dense']:.4g}", *cells])
    return (
        table(["network", "dense, J per batch", *cuts], lines)
        + f"\n\n{len(dearer)} of these pruned networks need more than {CLEARLY:.0%} of the energy of the dense network, "
        + f"up to {max(dearer):.1f} times as much.\n{_least_energy(found)}"
    )


def _least_energy(rows: list[dict[str, Any]]) -> str:
    """The least energy with and without removed branches, and the goal for the latter."""
    found = []
    for network in dict.fromkeys(row["network"] for row in rows if row["branches"]):
        joules = [row["joules"] for row in rows if row["network"] == network]
        widths = [min(one[cut] for cut in one if "branches" not in cut) / one["dense"] for one in joules]
        depth = [min(one.values()) / one["dense"] for one in joules]
        met = "met" if max(depth) <= LEAST_ENERGY_GOAL else "missed"
        found.append(
            f"{network}: {min(widths):.1%} to {max(widths):.1%} with widths alone, {min(depth):.1%} to {max(depth):.1%} with "
            f"removed branches ({met})"
        )
    return f"Least energy, goal at most {LEAST_ENERGY_GOAL:.0%} of dense: {'; '.join(found)}.\n"


def windows() -> str:
    lines = [
        [
            f"{length} s, {WINDOWS.get(way, way)}",
            f"{row['bias']:+.2%}",
            f"{row['spread']:.2%}",
            f"{(row['bias'] ** 2 + row['spread'] ** 2) ** 0.5:.2%}",
            f"{row['mean_window_seconds']:.2f}",
        ]
        for length, ways in load("window_accuracy.json")["windows"].items()
        for way, row in ways.items()
    ]
    return table(["window", "bias", "std", "total (RMS)", "actual length, s"], lines)


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
                    f"{one['ratio_to_adam']['admm']:.3f}",
                    one["commit"] if one["commit"].startswith("version") else one["commit"][:7],
                ]
            )
    heads = ["network", "parameters", "batch", "Adam, ms", "EccSolver / Adam", "admm, per layer / Adam", "commit"]
    return table(heads, lines)


def startup() -> str:
    found = load("startup_time.json")["commands"]
    rows = [
        [f"`{name}`"]
        + [f"{1000 * row[key]:.0f}" for key in ("seconds", "cpu_seconds")]
        + [f"{row[key]:.1f}" for key in ("ratio", "cpu_ratio")]
        for name, row in found.items()
    ]
    return table(["command", "wall, ms", "processor, ms", "wall, ratio", "processor, ratio"], rows)


def exports() -> str:
    """Exported files: difference from the network, and latency in onnxruntime."""
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
    return table(["network and data", "here", "published for the files"], lines)


def data_speeds() -> str:
    lines = []
    for name, one in load("data_speed.json")["speed"].items():
        best = one.get("threads_2", one)
        lines.append([name, f"{best['images_per_core_second']:,.0f}", f"{best['images_per_second']:,.0f}"])
    return table(["training images", "per second and core", "per second here"], lines)


def reliability() -> str:
    found = load("reliability.json")
    lines = [
        [kind, f"{one['tried']:,}", f"{one['survived']:,}", str(len(one["lost"]))]
        for kind, one in found["kinds"].items()
    ]
    totals = found["totals"]
    lines.append(["all", f"{totals['tried']:,}", f"{totals['survived']:,}", str(totals["lost"])])
    return table(["kind", "cases", "passed", "failed"], lines)


def compressed(points_goal: float) -> str:
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
            f"{scores['pruned']:.2%} / {scores['finetuned']:.2%}",
            f"{summary['parameters']['result'] / 1e6:.2f} M",
        ],
    ]
    widths = ", ".join(f"{w} of {summary['full_widths'][n]}" for n, w in summary["widths"].items())
    return (
        table(["", f"J per batch, {energy['label']}", "/ dense", "accuracy: pruned / fine-tuned", "parameters"], lines)
        + f"\n\nThe result uses {found['budget_share_reached']:.1%} of the budget of {energy['limit']:.4f} J, after "
        + f"{summary['cost_checks']} measurements during pruning. Accuracy falls by {found['points_lost']:.1f} points (goal: at "
        + f"most {points_goal:g}). Widths from input to output: {widths}."
    )


def mutants() -> str:
    """Mutants killed by the tests, before and after the redesign of version 0.2."""
    found = {name: load(name)["counts"] for name in ("mutants_before.json", "mutants.json")}
    lines = []
    for package, now in found["mutants.json"].items():
        if package == "all" or not now:  # a package that was not run again
            continue
        cells = []
        for counts in found.values():
            one = counts.get(package, {})
            cells.append(f"{one.get('killed', 0)} of {sum(one.values())}")
        lines.append([package, *cells])
    return table(["package", "killed in 0.1", "killed in 0.2"], lines)
