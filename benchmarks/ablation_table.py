"""The sections of RESULTS.md about the ablation of ECC, its solvers, and the importance of channels."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from paired import Interval, paired_interval
from result_tables import RESULTS, load, origin, table

FILE = "ablation.json"
IMPORTANCE = "importance.json"
RECOVERY = "recovery.json"
PUBLISHED_WEIGHTS = ("mobilenet_v1", "erfnet", "resnet20", "resnet56")
"""Networks that `packed.py` has weights of."""
BASE = "default"
SOLVERS = {
    BASE: "scheduled, taylor (default)",
    "adam_norm": "scheduled, adam_norm",
    "admm, taylor": "admm, taylor",
    "admm, adam_norm": "admm, adam_norm",
}
MEANINGS = {
    BASE: "ramp of 60 % of the pruning steps, constant learning rate while pruning, cosine in fine-tuning",
    "early": "ramp of 20 %",
    "cosine": 'one cosine over pruning and fine-tuning (`lr_schedule="cosine"`)',
    "early, cosine": "both",
    "by budget, cosine": "the cosine, and a ramp that is shorter for mild budgets; tight ones as *cosine*",
    "regrowth": "each update plans from all channels until the ramp ends; channels come back with their old weights",
    "calibrated": "importance of each group times measured / predicted loss after removing a quarter of its channels",
    "candidate plans": "three plans are trained for a tenth of the steps each, and the best on held-out data is used",
    "EMA": "averaged weights (decay 0.98) in fine-tuning",
    "uniform floor": "`uniform_floor=0.8`",
    "root": "the default since then: what a group loses is divided by the square root of the share of its channels that remain, "
    "in place of the share as in all others",
}
CORRELATION_GOAL, SLOPE_GOAL = 0.9, 1.3
PRESENT, BEFORE_ROOT = "root, exits", "share, larger"
"""Rules for channels and branches in `recovery.json`."""
WHEN = {"at_once": "at once", "trained": "trained"}


def differences(cells: Sequence[dict[str, Any]], variant: str, score: str, base: str = BASE) -> list[float]:
    """Points of a variant less those of the base, for every task, budget and seed that both have."""
    places: dict[str, dict[tuple[str, str, int], float]] = {base: {}, variant: {}}
    for cell in cells:
        if cell["variant"] in places:
            places[cell["variant"]][cell["task"], cell["budget"], cell["seed"]] = 100 * cell[score]
    common = sorted(places[base].keys() & places[variant].keys())
    return [places[variant][place] - places[base][place] for place in common]


def verdict(interval: Interval) -> str:
    """What the held-out data say."""
    return {"ahead": "helps", "behind": "hurts", "undecided": "no difference beyond noise"}[interval.side]


def ablation_section() -> str:
    """Ablation and comparison of the solvers; empty without the record."""
    if not (RESULTS / FILE).exists():
        return ""
    record = load(FILE)
    cells, steps = record["cells"], record["steps"]
    places = sorted({(cell["task"], cell["budget"]) for cell in cells}, key=lambda one: (one[0], -float(one[1][:-1])))
    seeds = {task: len({cell["seed"] for cell in cells if cell["task"] == task}) for task, _ in places}
    how = "; ".join(
        f"{task}: {seeds[task]} seeds, {one['pretrain']} + {one['prune']} + {one['finetune']} batches, widths in multiples "
        f"of {one['width_multiple']}" + (f", {one['images']:,} images" if "images" in one else "")
        for task, one in steps.items()
    )
    commits = sorted({cell["commit"][:7] for cell in cells})
    seconds = sum(cell["seconds"] for cell in cells)
    heads = ["variant", *(f"{task}, {budget}" for task, budget in places), "pairs", "held-out", "test", "verdict"]
    parts = [
        "## Ablation of ECC at equal batches",
        "`benchmarks/ablation.py` prunes one dense network for each seed to budgets in MACs. All variants of a cell have the\n"
        "same batches (pretraining, pruning and fine-tuning), candidates and calibration included. Columns of budgets are\n"
        "mean test accuracy; *held-out* and *test* are paired differences to the default in points over all tasks, budgets\n"
        "and seeds with 95 % intervals. The verdict is that of the held-out data, which variants are chosen by, with intervals\n"
        "that are wider because there are several variants (Bonferroni). These are short trainings on a CPU\n"
        f"({how}). resnet8 is the CIFAR ResNet with one block in each stage, on CIFAR-10 (a lossy copy) at 16x16 pixels.",
        table(heads, [_line(cells, name, places) for name in MEANINGS if _has(cells, name)]),
        "\n".join(f"- *{name}*: {text}." for name, text in MEANINGS.items() if _has(cells, name)),
        "What does not help beyond noise is not part of the package: regrowth, calibration, candidate plans, ramps by budget\n"
        "and EMA exist only in `benchmarks/ablation_variants.py`. `lr_schedule` and `uniform_floor` stay options, because\n"
        "their effect on E1 to E4 differs between networks. The intervals show what this comparison can resolve; smaller\n"
        "effects need more seeds and longer trainings. Cells that are missing were not run.",
        "### Solvers and criteria",
        '`solver="scheduled"` and `solver="admm"` (the paper\'s iteration in relative units), each with both criteria, in the\n'
        f"same cells. {_choice(cells)}:",
        table(heads, [_line(cells, name, places, SOLVERS[name]) for name in SOLVERS if _has(cells, name)]),
        f"{len(cells)} cells of commits {', '.join(commits)}, {seconds:,.0f} s of processor time. "
        f"{sum(cell['is_met'] for cell in cells)} of them meet their budget. "
        "`benchmarks/solvers.py` runs the same comparison of solvers on E1 to E4 with a GPU.",
        origin(FILE),
    ]
    return "\n\n".join(parts) + "\n\n"


def _choice(cells: Sequence[dict[str, Any]]) -> str:
    """What follows for the default."""
    others = [name for name in SOLVERS if name != BASE and _has(cells, name)]
    ahead = [n for n in others if _verdict_interval(cells, n).side == "ahead"]
    if ahead:
        return f"Ahead of the default on held-out data: {'; '.join(ahead)}"
    return "The default stays `scheduled` with `taylor`, since nothing is ahead of it on held-out data"


def _has(cells: Sequence[dict[str, Any]], name: str) -> bool:
    return any(cell["variant"] == name for cell in cells)


def _line(
    cells: Sequence[dict[str, Any]], name: str, places: Sequence[tuple[str, str]], shown: str | None = None
) -> list[str]:
    means = []
    for task, budget in places:
        found = [c["test"] for c in cells if (c["task"], c["budget"], c["variant"]) == (task, budget, name)]
        means.append(f"{100 * statistics.fmean(found):.2f}" if found else "-")
    if name == BASE:
        return [shown or name, *means, "-", "-", "-", "-"]
    held_out, test = (paired_interval(differences(cells, name, score)) for score in ("held_out", "test"))
    return [
        shown or name,
        *means,
        str(held_out.pairs),
        str(held_out),
        str(test),
        verdict(_verdict_interval(cells, name)),
    ]


def _verdict_interval(cells: Sequence[dict[str, Any]], name: str) -> Interval:
    """Interval of the held-out differences, corrected for the number of variants."""
    others = {cell["variant"] for cell in cells} - {BASE}
    return paired_interval(differences(cells, name, "held_out"), comparisons=len(others))


def _points_met(columns: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """At how many points two criteria meet the goals of correlation and of slopes."""
    return {
        name: (
            sum(found[name]["correlation"] >= CORRELATION_GOAL for found in columns),
            sum(found[name]["slope_ratio_max_min"] <= SLOPE_GOAL for found in columns),
        )
        for name in ("corrected", "calibrated")
    }


def importance_goal() -> tuple[str, str, bool | None, str]:
    """The goal, the result, whether it is met and why not, for the summary."""
    points = [point["criteria"] for one in load(IMPORTANCE)["networks"].values() for point in one["points"].values()]
    met = _points_met(points)
    (ours, slopes), (_, calibrated) = met["corrected"], met["calibrated"]
    return (
        f"importance: rank correlation at least {CORRELATION_GOAL}, measured / predicted loss (slope) within a factor of "
        f"{SLOPE_GOAL} between groups, at all points",
        f"correlation at {ours} of {len(points)}, slopes at {slopes}",
        ours == slopes == len(points),
        f"with a calibration by measured removals slopes are within {SLOPE_GOAL} at {calibrated}; it made no difference beyond "
        "noise in the ablation",
    )


def _start(published: Sequence[str]) -> str:
    """Which networks start from published weights."""
    if not published:
        return "All networks start from random weights."
    return f"From published weights: {', '.join(published)}; the others start from random ones."


def importance_section() -> str:
    """How well criteria predict the loss; empty without the record."""
    if not (RESULTS / IMPORTANCE).exists():
        return ""
    record = load(IMPORTANCE)
    settings = list(record["networks"].values())
    if any("calibration" not in one for one in settings):  # a record of an earlier version
        return ""
    points = [
        (name, point, found["criteria"])
        for name, network in record["networks"].items()
        for point, found in network["points"].items()
    ]
    columns = [found for _, _, found in points]
    criteria = list(dict.fromkeys(name for found in columns for name in found))
    rows = [
        [
            name,
            point,
            *(
                f"{found[one]['correlation']:.2f} / {found[one]['slope_ratio_p90_p10']:.1f} / "
                f"{found[one]['slope_ratio_max_min']:.1f}"
                if one in found
                else ""
                for one in criteria
            ),
        ]
        for name, point, found in points
    ]
    goals = "; ".join(
        f"*{name}* has the correlation at {one} and the slopes at {two} of {len(columns)} points"
        for name, (one, two) in _points_met(columns).items()
    )
    counts = dict.fromkeys(one["calibration"] for one in settings)
    by_count = {n: [name for name, one in record["networks"].items() if one["calibration"] == n] for n in counts}
    removals = ", ".join(f"{count} ({', '.join(names)})" for count, names in by_count.items())
    published = [name for name in record["networks"] if name.partition(":")[0] in PUBLISHED_WEIGHTS]
    parts = [
        "## Importance and the loss after removal",
        f"`benchmarks/importance.py` removes random parts (up to 60 %) of single groups, {settings[0]['removals']} times at three\n"
        "points of training, and compares the measured increase of the loss on other batches with the prediction of each\n"
        "criterion. Each entry: rank correlation over all removals / ratio of the 90th to the 10th percentile of the slopes of\n"
        "the groups / ratio of the largest to the smallest slope. *corrected* is what the solver uses: the variance of the sum\n"
        "of w g, divided by the square root of the share of the channels that remain; *by_share* is divided by the share itself.\n"
        "*joint* has the covariances of the removed channels, divided by the share. *count* is the share of the channels that is\n"
        "removed: what the number alone predicts. *lamp*, *batch_norm* (scales; where every group has one) and *activation* (weights times\n"
        "inputs, as Wanda) are from other publications, see the script.\n"
        f"*calibrated* multiplies each group by a factor from other removals on other batches, of each group {removals}:\n"
        f"as many forward passes for each group. {_start(published)}",
        table(["network", "after", *criteria], rows),
        f"Goals: correlation of at least {CORRELATION_GOAL}, slopes within a factor of {SLOPE_GOAL} between groups (largest\n"
        f"to smallest): {goals}.",
        origin(IMPORTANCE),
    ]
    return "\n\n".join(parts) + "\n\n"


def recovery_section() -> str:
    """How well estimates predict the loss after a removal and a short training; empty without the record."""
    if not (RESULTS / RECOVERY).exists():
        return ""
    record = load(RECOVERY)
    networks, settings = record["networks"], record["settings"]
    names = [f"{one['network']}, seed {one['seed']}" for one in networks]
    rows = []
    for number, entry in enumerate(networks[0]["estimates"]):
        found = [one["estimates"][number] for one in networks]
        label = f"{entry['channels']}, {entry['branches']}"
        if label == PRESENT:
            label = f"**{label}**"
        numbers = [[f"{one[when]['correlation']:.2f} / {one[when]['spread']:.1f}" for one in found] for when in WHEN]
        rows.append([label, *(text for pair in zip(*numbers, strict=True) for text in pair)])
    parts = [
        "## Importance and the loss after removal and training",
        "`benchmarks/recovery.py` removes the least important third, two thirds or 90 % of the channels of each group, or a residual\n"
        f"branch, and measures the increase of the training loss at once and after {settings['recovery']} training steps (the unpruned network has\n"
        "as many). A plan chooses between channels and branches, so one unit has to hold for both. *sum*, *root* and *share*: the sum\n"
        "of the importance over the removed channels, divided by nothing, by the square root of the share of the channels that remain, or by\n"
        "the share. *exits*: the importance of the last parameters of the branch; *larger*: at least what its channels lose by *share* at\n"
        f"their minimum widths. In bold what ECC uses; it used *{BEFORE_ROOT}* before. Each entry: rank correlation / ratio of the 90th to\n"
        "the 10th percentile of measured / predicted, which is 1 for an exact estimate.",
        table(["channels, branches", *(f"{name}, {title}" for name in names for title in WHEN.values())], rows),
        f"{sum(len(one['rows']) for one in networks)} removals.",
        origin(RECOVERY),
    ]
    return "\n\n".join(parts) + "\n\n"
