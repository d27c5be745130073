"""The sections of RESULTS.md about ResNet-56 at shares of the MACs and of the energy, from results/resnet56*.json."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from paired import Interval, paired_interval
from result_tables import RESULTS, load, origin, table

FILES = (
    "resnet56.json",
    "resnet56_energy.json",
    "resnet56_choice.json",
    "resnet56_long.json",
    "resnet56_published.json",
)
"""60 epochs with all methods, shares of the energy, held-out images, 200 epochs for the public table, and the published
protocol."""
LEAD_GOAL = 0.3  # points above the best other method
DENSE_GOAL = 0.2  # most points below the dense network with the same epochs
DENSE = ("dense", "dense_distilled")
NAMES = {
    "dense": "dense, without distillation",
    "dense_distilled": "dense",
    "ecc": "ECC (default)",
    "ecc_widths": "ECC, widths only",
    "ecc_early": "ECC, 5 epochs of pruning",
    "ecc_early_inner": "ECC, inner widths only, 5 epochs of pruning",
    "uniform": "uniform, Taylor",
    "greedy_taylor": "greedy-Taylor, one shot",
    "greedy_branches": "greedy-Taylor with branches, one shot",
    "tp_magnitude": "Torch-Pruning, magnitude",
    "tp_magnitude_global": "Torch-Pruning, magnitude, global",
    "tp_taylor": "Torch-Pruning, Taylor",
    "tp_taylor_global": "Torch-Pruning, Taylor, global",
    "tp_group_norm": "Torch-Pruning, group norm, sparse training",
}
PUBLISHED = (
    ("DepGraph (2023), sparse training", "2.13x fewer", "93.53", "93.77", "100 sparse + 100"),
    ("DepGraph (2023), without sparse training", "2.11x fewer", "93.53", "93.46", ""),
    ("ResRep (2021)", "2.12x fewer", "", "93.71", ""),
    ("White-Box (2022)", "2.25x fewer", "", "93.54", ""),
    ("CHIP (2021)", "1.90x fewer", "", "94.16", "400"),
)
"""Method, MACs, top-1 of the dense network, top-1 of the pruned one, epochs (empty: unknown); on the original CIFAR-10."""


def by_seed(cells: Sequence[dict[str, Any]], method: str) -> dict[int, float]:
    """Accuracy in percent by seed, of cells that have the wanted share of the MACs."""
    return {
        cell["seed"]: 100 * cell["accuracy"]
        for cell in cells
        if cell["method"] == method and "accuracy" in cell and cell["share_is_met"]
    }


def paired_difference(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
    """Ours minus theirs over the seeds that both have; None if there is none."""
    points = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    return paired_interval(points) if points else None


def best_other(cells: Sequence[dict[str, Any]], headline: str) -> str | None:
    """The method, not of ECC and not dense, with the highest mean."""
    means = {
        method: statistics.fmean(scores.values())
        for method in {cell["method"] for cell in cells}
        if not method.startswith("ecc") and method not in DENSE and (scores := by_seed(cells, method))
    }
    return max(means, key=lambda method: means[method]) if means and headline else None


def measured_goals(cells: Sequence[dict[str, Any]], headline: str) -> list[tuple[str, str, bool]]:
    """Goal, its number, and whether it is met; only those with cells."""
    ours, found = by_seed(cells, headline), []
    best = best_other(cells, headline)
    lead = None if best is None else paired_difference(ours, by_seed(cells, best))
    if best is not None and lead is not None:
        goal = f"at least {LEAD_GOAL:g} points above the best other method"
        found.append((goal, f"{lead} points against {NAMES.get(best, best)}, {lead.side}", lead.mean >= LEAD_GOAL))
    for dense in DENSE:
        gap = paired_difference(ours, by_seed(cells, dense))
        if gap is not None:
            goal = f"at most {DENSE_GOAL:g} points below the {NAMES[dense]} network with the same epochs"
            found.append((goal, f"{gap} points", gap.mean >= -DENSE_GOAL))
    return found


def goals(cells: Sequence[dict[str, Any]], headline: str) -> list[str]:
    """Each goal with its number, met or missed."""
    found = measured_goals(cells, headline)
    return [f"{goal}: {value}: {'met' if met else 'missed'}" for goal, value, met in found] or ["open, no cells"]


def long_goals() -> list[tuple[str, str, bool, str]]:
    """Goals of the run with 60 epochs for the summary page, with a reason for those that are missed."""
    if not (RESULTS / FILES[0]).exists():
        return []
    record = load(FILES[0])
    why = (
        "the same importance in one shot has a higher mean: ECC prunes during half of the epochs, and the final widths train "
        "in the other half only; which part of this matters was not isolated"
    )
    return [(*goal, why) for goal in measured_goals(record["cells"], record["headline"])]


def long_training() -> str:
    """One sentence for the summary page."""
    name = "`benchmarks/resnet56.py`, which compares ECC with Torch-Pruning and others over 60 epochs,"
    if not (RESULTS / FILES[0]).exists():
        return f"{name} has not been run yet."
    record = load(FILES[0])
    cells, headline = record["cells"], record["headline"]
    best = best_other(cells, headline)
    named = {NAMES[one]: by_seed(cells, one) for one in (headline, best, DENSE[1]) if one is not None}
    scores = ", ".join(f"{one} {statistics.fmean(score.values()):.2f}" for one, score in named.items() if score)
    return (
        f"Over 60 epochs on ResNet-56 ECC is not above the best other method: {scores} % "
        f"({len(by_seed(cells, headline))} seeds)."
        if any("missed" in text for text in goals(cells, headline))
        else f"Over 60 epochs on ResNet-56: {scores} %."
    )


def energy_share(mine: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> str:
    """Mean energy of the networks of a method, relative to the mean of the dense ones."""
    dense = [cell["joules"] for cell in cells if cell["method"] in DENSE and "joules" in cell]
    joules = [cell["joules"] for cell in mine if "joules" in cell]
    return f"{statistics.fmean(joules) / statistics.fmean(dense):.1%}" if dense and joules else "-"


def resnet56_section() -> str:
    """The sections, one for each record and share of the MACs; empty if the benchmark has not been run."""
    found = []
    for name in [name for name in FILES if (RESULTS / name).exists()]:
        record = load(name)
        shares = sorted({cell["share"] for cell in record["cells"] if cell["share"] < 1}, reverse=True)
        found += [section_of(record, share, origin(name)) for share in shares]
    return "".join(found)


def section_of(record: dict[str, Any], share: float, source: str) -> str:
    """Text and tables of a record, at one share of the MACs."""
    headline, settings = record["headline"], record["settings"]
    cells = [cell for cell in record["cells"] if cell["share"] in (share, 1)]
    ours = by_seed(cells, headline)
    rows = []
    for method in [name for name in NAMES if by_seed(cells, name)]:
        scores, mine = by_seed(cells, method), [cell for cell in cells if cell["method"] == method]
        found = None if method == headline else paired_difference(ours, scores)
        rows.append(
            [
                NAMES[method],
                f"{statistics.fmean(scores.values()):.2f}",
                f"{statistics.stdev(scores.values()):.2f}" if len(scores) > 1 else "-",
                str(len(scores)),
                "-" if found is None else str(found),
                "-" if found is None else found.side,
                f"{statistics.fmean(cell['macs_share'] for cell in mine if 'macs_share' in cell):.1%}",
                f"{statistics.fmean(cell['params'] for cell in mine if 'params' in cell) / 1000:.0f} k",
                energy_share(mine, cells),
            ]
        )
    head = [
        "method",
        "top-1, %",
        "std",
        "seeds",
        "ECC minus it, points",
        "ECC is",
        "MACs",
        "parameters",
        "energy, measured",
    ]
    failed = [cell for cell in cells if not cell.get("share_is_met")]
    commits = sorted({str(cell["commit"])[:10] for cell in cells})
    start = (
        f"weights trained here for {settings['tune_epochs']} epochs"
        if settings["scratch"]
        else f"the published weights, trained for {settings['tune_epochs']} epochs on this copy"
        if settings["tune_epochs"]
        else "the published weights"
    )
    epochs = f"{settings['epochs']} epochs in all (importance, sparse training and pruning included)"
    if settings.get("protocol") == "published":
        epochs = f"each method with its published search, then {settings['epochs']} epochs"
    text = f"""## ResNet-56 on CIFAR-10, {settings["epochs"]} epochs, {1 / share:.2f}x fewer MACs

All methods prune to {share:.0%} of the MACs and share one training loop: SGD {settings["lr"]:g} with a
cosine, batch {settings["batch"]}, {epochs}, crops and flips,
distillation from the dense network with weight {settings["distill"]:g}, recalibrated batch norms. They start from {start}.
Batches are the same for all methods of a seed, so differences are paired; ± is the 95 % interval (Student's t). *ahead*
and *behind* are said only where it excludes zero. The test images were scored once for each cell, and the headline
of ECC (*{NAMES[headline]}*) was named before the run. Torch-Pruning prunes the inner widths of blocks only, because its
graph does not follow the zero-padded shortcuts. The copy of CIFAR-10 is lossy: compare with the rows of this table alone.
"""
    parts = [
        text,
        table(head, rows),
        "Goals: " + ";\n".join(goals(cells, headline)) + ".",
        "Published on the original CIFAR-10, with other dense networks and trainings:",
        table(["method", "MACs", "dense", "top-1, %", "epochs"], [list(row) for row in PUBLISHED]),
    ]
    if failed:
        names = ", ".join(f"{cell['method']} (seed {cell['seed']})" for cell in failed)
        parts.append(f"Left out, because they failed or missed the share of the MACs: {names}.")
    device = ", ".join(sorted({str(cell["device"]) for cell in cells if "device" in cell}))
    return "\n\n".join([*parts, f"Commits of the cells: {', '.join(commits)}. Device: {device}.", source]) + "\n\n"
