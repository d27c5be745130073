"""Generate RESULTS.md and results/evidence.md from the JSON files in results/.

python3 benchmarks/write_results.py          # write the pages and draw the figures of the evidence
python3 benchmarks/write_results.py --check  # exit 1 if a page does not match the files
"""

from __future__ import annotations

import argparse
import re
import sys

from ablation_table import ablation_section, importance_section, recovery_section
from allocation_table import allocation_section
from budget_table import budget_section
from coverage_table import coverage_now
from depth_table import depth_section, transformer_section
from evidence_page import LONG, long_page, section
from gpu_table import gpu_section
from llm_table import encoder_section, llm_section
from loop_table import loop_section
from paper_table import paper_section
from profile_table import profile_section
from residual_variance import MIN_GAIN
from resnet56_table import resnet56_section
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
    mutants,
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
from runner_table import runner_section
from scale_table import scale_section
from small_table import small_section
from summary_page import parts_of_step, summary
from trials_table import trials_section
from unseen_table import unseen_section
from vit_table import vit_section

PAGE = ROOT / "RESULTS.md"
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SPREAD_GOAL = 0.1  # relative to polling nvidia-smi, at 0.5 s
STEP_GOALS = {"step_time.json": 1.03, "step_time_cpu.json": 1.03}  # a step over one with fused Adam
START_GOALS = (0.5, 5.0)  # seconds of `ecc --version` and help, and ratio to `python -c pass`
DEPTH_ERROR_GOAL = 0.03
POINTS_GOAL = 1.5  # points of accuracy lost at half of the energy


def in_words(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else f"{number:,}"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def windows_verdict() -> str:
    """Whether the spread goal is met, and the total error of both ways to measure."""
    found = load("window_accuracy.json")
    ratio = found["spread_ratio_at_half_a_second"]
    ours, child = (
        sum(found["windows"]["0.5"][way][part] ** 2 for part in ("bias", "spread")) ** 0.5
        for way in ("ours", "nvidia-smi child")
    )
    goal = f"Goal: a spread of at most {SPREAD_GOAL:g} times that of *nvidia-smi polling* at 0.5 s; it is {ratio:.2f} times:"
    reason = "" if ratio <= SPREAD_GOAL else " (polling varies\nlittle, but around a value that is far off)"
    total = f"The total error (bias and\nspread) of aligned windows is {child / ours:.0f} times smaller."
    return f"{goal} {verdict(ratio <= SPREAD_GOAL)}{reason}. {total}"


def startup_verdict() -> str:
    """Whether the start-up goals are met."""
    rows = load("startup_time.json")["commands"]
    shown = [row for name, row in rows.items() if name.startswith("ecc ") and name.endswith(("--version", "--help"))]
    most = max(row[key] for row in shown for key in ("ratio", "cpu_ratio"))
    slowest = max(row["seconds"] for row in shown)
    seconds, ratio = START_GOALS
    return (
        f"Goals for version and help: at most {seconds:g} s, {verdict(slowest <= seconds)} (the slowest takes {slowest:.2f} s), "
        f"and a ratio of at most\n{ratio:g}, {verdict(most <= ratio)} (the largest is {most:.1f}; it depends on how fast Python itself starts)."
    )


def profiles_measured() -> str:
    """Device and settings of the profiles of the paper's networks."""
    every = load("energy_fit.json")["profiles"]
    found = {name: one for name, one in every.items() if not name.startswith("depth/")}
    devices = sorted({one["device"] for one in every.values()})
    steps = sorted({str(one["width_multiple"]) for one in found.values()})
    precisions = sorted({one["settings"]["precision"].upper() for one in found.values()})
    tuned = [name for name, one in found.items() if one["settings"]["cudnn_autotune"]]
    kernels = f"cuDNN autotuning for {', '.join(tuned) or 'none'}, heuristics for the others"
    facts = f"NVML energy counter, CUDA graphs, {', '.join(precisions)},\nwidths in multiples of {', '.join(steps)}; {kernels}"
    return f"{', '.join(devices)} ({facts})"


def depth_errors() -> str:
    """Errors of the profiles with removed branches, with the goal."""
    found = {name: one for name, one in load("energy_fit.json")["profiles"].items() if name.startswith("depth/")}
    each = [
        f"{name.removeprefix('depth/').partition('-')[0]} in "
        f"{'all widths' if one['width_multiple'] is None else 'multiples of ' + str(one['width_multiple'])} "
        f"{one['families']['physical']['mean']:.2%} "
        f"({verdict(one['families']['physical']['mean'] <= DEPTH_ERROR_GOAL)})"
        for name, one in found.items()
    ]
    return (
        f"Profiles in `depth/` include networks with removed residual branches (FP32, cuDNN autotuning). Goal of their error: at "
        f"most {DEPTH_ERROR_GOAL:.0%}. {'; '.join(each)}.\nResNet-56 has 16 to 64 channels in a layer: single channels change which "
        f"kernel runs, and networks of one or two channels are\nhardest to predict. Use `--width-multiple 8` for such networks "
        f"on a GPU.\n\n{residual_sentences()}"
    )


def residual_sentences() -> str:
    """What the held-out errors depend on, where they are above their goal."""
    found = {name: one for name, one in load("energy_fit.json")["profiles"].items() if one["residuals"]}
    lines = []
    for name, one in found.items():
        parts = one["residuals"]
        gains = (("one width", parts["gain_of_single_widths"]), ("the two widths of a layer", parts["gain_of_pairs"]))
        lines.append(
            f"{name}: std {parts['std']:.1%}, noise {one['noise']:.1%}; "
            + ", ".join(f"{what} {gain:.1f}" for what, gain in gains)
            + (f" (alike over {parts['length_of_pairs']:.0f} channels)" if parts["gain_of_pairs"] > MIN_GAIN else "")
        )
    return (
        f"Held-out errors of the profiles above their goal (logarithms), and how much a Gaussian process of one width, or of the two "
        f"widths of a layer, raises their log-likelihood (more than {MIN_GAIN:g} would count): {'; '.join(lines)}.\nThe errors are "
        "far above the noise of the measurements. Where nothing raises the likelihood, they follow neither a function of one width "
        "nor a smooth one of a layer's two widths: the cost changes from one multiple of 8 to the next, as libraries select "
        "kernels by shape."
    )


def compressed_how() -> str:
    """Setup of the measured run."""
    found = load("compress_imagenette.json")
    summary, energy = found["summary"], found["summary"]["budgets"]["energy"]
    shares = {name: summary["widths"][name] / full for name, full in summary["full_widths"].items()}
    narrow = ", ".join(sorted(shares, key=lambda name: shares[name])[:3])
    criterion = f'`importance="{found["importance"]}"`'
    return (
        f"to {energy['limit'] / energy['dense']:.0%} of the energy of the dense network, batch size {summary['batch']}, "
        f"{criterion}.\nGoal: at most {POINTS_GOAL:g} points lost ({verdict(found['points_lost'] <= POINTS_GOAL)}). "
        f"The layers pruned most are {narrow}."
    )


def steps_verdict(name: str) -> str:
    """The goal for a step and how many networks miss it: "1.03 on the GPU, missed by two of four networks"."""
    found, goal = load(name), STEP_GOALS[name]
    ratios = [one["ratio_to_adam"]["ecc"] for one in found["networks"].values()]
    missed = sum(ratio > goal for ratio in ratios)
    where = "a CPU" if found["device"] == "cpu" else "the GPU"
    return f"{goal:.2f} on {where}, missed by {in_words(missed)} of {in_words(len(ratios))} networks"


EXPORTS = """## Exports

Networks pruned at random to about half of their widths, exported to each format and run by the runtime of that format
at several batch sizes. The table shows the largest difference from the outputs of the network, relative to the largest
output (allowed: {tolerance:g}), and dense / slim ratios of MACs and of onnxruntime latency, with widths in multiples of
8 and with any widths. Latency was measured on the CPU below: {latency}. Other programs were running (load average
{load}).

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
    """The commands that produced each kind of fault."""
    kinds = load("reliability.json")["kinds"].values()
    return "\n\n".join(dict.fromkeys(origin_of("reliability.json", kind["environment"]) for kind in kinds))


def page() -> str:
    totals = load("trace_coverage.json")["totals"]["all"]
    exact, count = totals["ecc"]["exact"], totals["networks"]
    environment = load("trace_coverage.json")["environment"]
    peer_version, limit = environment["torch_pruning"], environment["limit_seconds"]
    weights_subset = load("published_weights.json")["subset"]
    load_average = load("data_speed.json")["environment"]["load_average"]
    window = load("window_accuracy.json")
    return f"""# Results

Generated by `benchmarks/write_results.py` from the files in `results/`. *Measured* is read from a meter, *estimated* comes
from an analytic device model, *predicted* from a fitted energy model, *counted* is exact (MACs, parameters).

{summary()}## Accuracy of energy measurements

Short measurements compared with the mean of two aligned 20 s measurements, before and after ({window["network"]};
{window["repeats"]} each). *Aligned window* (ECC) begins and ends on ticks of the energy counter; *nvidia-smi polling* is
what the paper's published code does; *unaligned counter* reads the NVML energy counter at any moment, as Zeus does.

{windows()}

{windows_verdict()}

{origin("window_accuracy.json")}

{profile_section()}## Accuracy of the energy model

Ten-fold cross-validated relative errors on profiles measured on an {profiles_measured()}.
*Noise* is the standard deviation of repeated measurements of the dense network. `bilinear` is the paper's model,
`physical` the default; its hyper-parameters are chosen within each fold. *From 100* is its error on all other samples when it
is fitted to 100, a mean over {load("energy_fit.json")["choices_of_100"]} random choices. The dense and the smallest network, with all branches and without
any, are part of every profile and of every fold's fit; their errors when held out (*ends*: how many, and the largest) are
given apart and are not part of the mean. The terms of the model were chosen on these profiles; only coefficients, steps
and the strength of the prior are chosen within the folds.

{energy_models()}

{depth_errors()}

![predicted against measured, AlexNet](results/figures/alexnet-b128-prediction.svg)

As in the paper, an MLP on top of the bilinear features does not help:

![error over iterations of Adam](results/figures/paper-figures-2-3.svg)

{origin("energy_fit.json")}

{unseen_section()}## Compression to a measured budget

MobileNet v1 with its ImageNet weights on Imagenette (a lossy 128 px copy, so these are not ImageNet results),
{compressed_how()}

{compressed(POINTS_GOAL)}

{origin("compress_imagenette.json")}

## Measured energy of uniformly pruned networks

Every channel group is pruned to a fraction of its width, rounded to a multiple of eight (or four where stated); *least*
keeps one multiple in each group. Measured on an {load("floors.json")["meter"]["device"]} with CUDA graphs and cuDNN
heuristics, relative to the dense network in the same execution mode:

{floors()}
Kernels are selected by shape, so neither MACs nor bytes predict energy: that is why ECC measures. Another execution mode
for the dense network can save more than pruning it to half, so choose the mode first and then profile. The experiments
below use TF32 with contiguous tensors, where pruning saves most.

{origin("floors.json")}

{transformer_section()}{depth_section()}{runner_section()}{section()}{paper_section()}{resnet56_section()}{vit_section()}{llm_section()}{encoder_section()}{gpu_section()}## Overhead of a solver step

Time of a training step with `EccSolver`, during pruning in a run of 20,000 steps, relative to a step with fused Adam;
*admm, per layer* is a straightforward implementation that updates layer by layer at every step. Goals:
{steps_verdict("step_time.json")}, and {steps_verdict("step_time_cpu.json")} (processor time of one thread).
In the MLP stack half of all weights consume prunable channels and are masked at every step. The parts of the
solver's step on a GPU: {parts_of_step(load("step_time.json")["networks"]["MLP stack"])}.
The row of the MLP stack on a CPU was measured on a busy machine,
where such ratios vary by a few hundredths from call to call.

{step_times()}

{origin("step_time.json")}

{origin("step_time_cpu.json")}

{loop_section()}{budget_section()}{small_section()}{allocation_section()}{ablation_section()}{importance_section()}{recovery_section()}## Start-up time of the command line

Medians of {load("startup_time.json")["rounds"]} processes each, interleaved (load average of five minutes
{load("startup_time.json")["environment"]["load_average"]}). Ratios are relative to `python -c pass`. {startup_verdict()}

{startup()}

{origin("startup_time.json")}

{trials_section()}## Published weights and data

Published weights loaded into the networks of `ecc.zoo` and evaluated on lossy copies of the data: {weights_subset}. This
checks that weights and networks fit; these are not results on the original data.

{weights()}

{origin("published_weights.json")}

Reading and augmenting training images on a busy machine (load average {load_average}):

{data_speeds()}

{origin("data_speed.json")}

## Robustness

Damaged files of every format that ECC reads (truncated, flipped bits, wrong types and sizes), decompression bombs under a
memory limit, and invalid commands. A case passes if there is one clear message or the file is still readable, nothing is
executed, and nothing outside is changed or lost. Kills: `kill -9` at random moments of each command, half of them just
before a change to a file. A case passes if running the same command again gives the result of an undisturbed run, bit
for bit, and leaves no temporary file.

{reliability()}

{reliability_origins()}

## Mutation testing

`benchmarks/mutants.py` introduces one small fault at a time into the solver, the slimming and the energy fit, and runs the
tests of that package. A mutant is killed if a test fails. Nineteen mutants were rewritten for the code of 0.2, so the two
columns are not exactly comparable.

{mutants()}

{origin("mutants_before.json")}

{origin("mutants.json")}

{scale_section(load("scale.json"))}
{exports_section()}
## Tracing and pruning real networks

Measured with ECC {environment["ecc"]}.

{exact} of {count} networks are pruned exactly: 40 % of the units of every prunable group are masked in one copy and
removed in another, and the outputs agree to 1e-4 of the largest output. Torch-Pruning {peer_version} ran in the same
processes, through its high-level pruner with head counts given. *Differs by nature* means that it pruned through a
normalization over channels, which changes the outputs of any network. A network that reached the time limit ({limit:g} s
per stage, for both tools) counts with that limit in the medians. *Step* is the pruner's own step with ranking and group
search; *removal alone* leaves those out.

{coverage()}

{origin("trace_coverage.json")}

### With version 0.2

{coverage_now()}

## Networks that Torch-Pruning does not prune exactly

{failures()}

## Tracing time against depth and width

{scaling()}

![trace time against depth and width](results/trace_scaling.svg)

{origin("trace_scaling.json")}

## Time to build a network with other widths

`structure` is `with_widths(..., device="meta")`; `with weights` also copies slices of the dense weights; `allocate` and
`copy` do the same with plain tensors; `deepcopy` copies the dense network.

{resizing()}

{origin("resize_speed.json")}
"""


def wrong() -> list[str]:
    """Pages and pictures that do not match the files."""
    pages = {PAGE: page(), LONG: long_page()}
    stale = [path for path, text in pages.items() if (path.read_text("utf-8") if path.exists() else "") != text]
    pictures = re.findall(r"\]\((results/[^)]+\.svg)\)", pages[PAGE])
    return [path.name for path in stale] + [name for name in pictures if not (ROOT / name).exists()]


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    if text := long_page():
        # Imported here: drawing needs the package and its plotting library, pages without evidence need neither.
        from evidence_figures import main as draw_evidence
        from front_figures import main as draw_fronts
        from paper_figures import main as draw_paper

        LONG.write_text(text, encoding="utf-8")
        draw_evidence()
        draw_fronts()
        draw_paper()
    else:
        LONG.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
    elif found := wrong():
        sys.exit(f"{', '.join(found)}: does not match results/; run benchmarks/write_results.py")


if __name__ == "__main__":
    main()
