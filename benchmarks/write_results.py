"""RESULTS.md and results/evidence.md from the JSON files in results/: every number in them comes from there.

python3 benchmarks/write_results.py          # write the pages, and draw the figures of the evidence
python3 benchmarks/write_results.py --check  # exit 1 if a page is not what the files say
"""

from __future__ import annotations

import argparse
import re
import sys

from evidence_page import LONG, long_page, section
from gpu_table import gpu_section
from loop_table import loop_section
from profile_table import profile_section
from result_tables import (
    ROOT,
    compressed,
    coverage,
    data_speeds,
    energy_models,
    exports,
    failures,
    floors,
    load,
    origin,
    origin_of,
    reliability,
    resizing,
    scaling,
    startup,
    step_times,
    weights,
    windows,
)
from scale_table import scale_section

PAGE = ROOT / "RESULTS.md"
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SPREAD_GOAL = 0.1  # of the child's spread, at 0.5 s
STEP_GOALS = {"step_time.json": 1.03, "step_time_cpu.json": 1.10}  # a step over one with fused Adam
START_GOALS = (0.5, 5.0)  # seconds of `ecc --version` and of help, and their ratio to `python -c pass`
POINTS_GOAL = 1.5  # of accuracy lost at half of the joules


def in_words(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else f"{number:,}"


def held(goal_is_met: bool) -> str:
    return "held" if goal_is_met else "missed"


def windows_verdict() -> str:
    """Whether windows scatter as little as they should, and how near they are with bias and spread together."""
    found = load("window_accuracy.json")
    ratio = found["spread_ratio_at_half_a_second"]
    ours, child = (
        sum(found["windows"]["0.5"][way][part] ** 2 for part in ("bias", "spread")) ** 0.5
        for way in ("ours", "nvidia-smi child")
    )
    told = f"The goal was a spread of {SPREAD_GOAL:g} of the child's at 0.5 s; it is {ratio:.2f} of it, so the goal is"
    reason = "" if ratio <= SPREAD_GOAL else ": the\nchild scatters little, about a value that is far off"
    together = f"Bias and spread together, ours is {child / ours:.0f} times nearer to\nthe reference."
    return f"{told} {held(ratio <= SPREAD_GOAL)}{reason}. {together}"


def startup_verdict() -> str:
    """Whether version and help are shown as soon as they should."""
    rows = load("startup_time.json")["commands"]
    shown = [row for name, row in rows.items() if name.startswith("ecc ") and name.endswith(("--version", "--help"))]
    most = max(row[key] for row in shown for key in ("ratio", "cpu_ratio"))
    slowest = max(row["seconds"] for row in shown)
    seconds, ratio = START_GOALS
    return (
        f"The goals for version and help were {seconds:g} s and a ratio of {ratio:g}; the slowest takes "
        f"{slowest:.2f} s,\nand the largest ratio is {most:.1f}: {held(slowest <= seconds and most <= ratio)}."
    )


def profiles_measured() -> str:
    """What the profiles were measured on and with."""
    found = load("energy_fit.json")["profiles"]
    devices = sorted({one["device"] for one in found.values()})
    steps = sorted({str(one["width_multiple"]) for one in found.values()})
    precisions = sorted({one["settings"]["precision"].upper() for one in found.values()})
    tuned = [name for name, one in found.items() if one["settings"]["cudnn_autotune"]]
    kernels = f"cuDNN autotuned {', '.join(tuned) or 'none'}, and took its heuristics for the others"
    facts = (
        f"NVML's counter, CUDA graphs, {', '.join(precisions)},\nwidths in multiples of {', '.join(steps)}; {kernels}"
    )
    return f"{', '.join(devices)} ({facts})"


def compressed_how() -> str:
    """The run on the scales, in words."""
    found = load("compress_imagenette.json")
    summary, energy = found["summary"], found["summary"]["budgets"]["energy"]
    shares = {name: summary["widths"][name] / full for name, full in summary["full_widths"].items()}
    narrow = ", ".join(sorted(shares, key=lambda name: shares[name])[:3])
    metric = f'`metric="{found["metric"]}"`' if "metric" in found else "the paper's metric"
    return (
        f"to {energy['limit'] / energy['dense']:.0%} of the joules that the dense network takes, batches of "
        f"{summary['batch']}. This run chose channels by\n{metric}, and the goal for accuracy is "
        f"{held(found['points_lost'] <= POINTS_GOAL)}; narrowed most: {narrow}."
        + (
            ""
            if "metric" in found
            else '\n`importance="taylor"` has since become the default; its run is still to be made.'
        )
    )


def steps_verdict(name: str) -> str:
    """The goal for a step, and how many networks miss it: "1.03 on the GPU, missed by two of four networks"."""
    found, goal = load(name), STEP_GOALS[name]
    ratios = [one["ratio_to_adam"]["ecc"] for one in found["networks"].values()]
    missed = sum(ratio > goal for ratio in ratios)
    where = "a CPU" if found["device"] == "cpu" else "the GPU"
    return f"{goal:.2f} on {where}, missed by {in_words(missed)} of {in_words(len(ratios))} networks"


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


def reliability_origins() -> str:
    """Kinds of faults may be tried at different times; each has its command."""
    kinds = load("reliability.json")["kinds"].values()
    return "\n\n".join(dict.fromkeys(origin_of("reliability.json", kind["environment"]) for kind in kinds))


def page() -> str:
    totals = load("trace_coverage.json")["totals"]["all"]
    exact, count = totals["ecc"]["exact"], totals["networks"]
    environment = load("trace_coverage.json")["environment"]
    rival, limit = environment["torch_pruning"], environment["limit_seconds"]
    weights_subset = load("published_weights.json")["subset"]
    load_average = load("data_speed.json")["environment"]["load_average"]
    window = load("window_accuracy.json")
    return f"""# Results

Made by `benchmarks/write_results.py` from the files in `results/`; nothing here was typed by hand.

## Measuring joules

Short windows against the mean of two aligned windows of 20 s, before and after ({window["network"]};
{window["repeats"]} windows each). *Ours* begins and ends on counter ticks; *nvidia-smi child* is the way of
the paper's published code; *unaligned counter* reads NVML's energy counter at any moment, as Zeus does.

{windows()}

{windows_verdict()}

{origin("window_accuracy.json")}

{profile_section()}## Predicting joules

Ten-fold cross-validated relative errors on profiles measured on an {profiles_measured()}.
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
ImageNet results), {compressed_how()}

{compressed(POINTS_GOAL)}

{origin("compress_imagenette.json")}

## What narrower networks save

Every group of channels cut to a share of its width, rounded to multiples of eight, or four where that is said; *least*
has a single multiple left in each. Measured on an {load("floors.json")["meter"]["device"]} as CUDA graphs with
cuDNN's heuristics, in shares of what the dense network takes when it is run the same way:

{floors()}
That is why ECC measures: kernels are chosen by shape, and neither MACs nor bytes know which. And running the dense
network in another way can save more than cutting it in half: do that first, then profile. The experiments below run in
TF32 with contiguous tensors all the same, because pruning goes farthest there.

{origin("floors.json")}

{section()}{gpu_section()}## What a step costs

A training step with `EccSolver`, in the ramp of a solve of 20,000 steps, over one with fused Adam; *literal* does the
work layer by layer at every step. The goals were {steps_verdict("step_time.json")}, and
{steps_verdict("step_time_cpu.json")}; there, processor time of one thread is compared.
In the MLP stack half of all weights read channels that can be cut, and zeroing the dead ones is a pass over all of them
at every step: that is the likely cause of what it costs there.

{step_times()}

{origin("step_time.json")}

{origin("step_time_cpu.json")}

{loop_section()}## Start of the command line

Medians of {load("startup_time.json")["rounds"]} processes each, taking turns, on a busy machine (load average
{load("startup_time.json")["environment"]["load_average"]}). Ratios are to Python alone. {startup_verdict()}
What cannot be parsed is refused by typer, which takes longer to import.

{startup()}

{origin("startup_time.json")}

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

{reliability_origins()}

{scale_section(load("scale.json"))}
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

`structure` is `with_widths(..., device="meta")`, `with weights` copies slices of the dense weights; `allocate` and
`copy` are the same tensors without us, `deepcopy` is a copy of the dense network.

{resizing()}

{origin("resize_speed.json")}
"""


def wrong() -> list[str]:
    """What is not as the files say."""
    pages = {PAGE: page(), LONG: long_page()}
    stale = [path for path, text in pages.items() if (path.read_text("utf-8") if path.exists() else "") != text]
    pictures = re.findall(r"\]\((results/[^)]+\.svg)\)", pages[PAGE])
    return [path.name for path in stale] + [name for name in pictures if not (ROOT / name).exists()]


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    if text := long_page():
        # Only here: drawing needs the package and matplotlib, and pages without evidence need neither.
        from evidence_figures import main as draw_evidence

        LONG.write_text(text, encoding="utf-8")
        draw_evidence()
    else:
        LONG.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
    elif found := wrong():
        sys.exit(f"{', '.join(found)}: not what results/ says; run benchmarks/write_results.py")


if __name__ == "__main__":
    main()
