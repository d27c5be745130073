"""The sections of RESULTS.md about ResNet-56 at shares of the MACs and of the energy, from results/resnet56*.json."""

from __future__ import annotations

import json
import statistics
from collections import Counter
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
LONG, PUBLISHED_PROTOCOL = FILES[3:]
PUBLIC_EPOCHS = 200
PUBLIC_GOAL = 0.3  # points above the dense network, in the public table at 2.13 times fewer MACs
LEAD_GOAL = 0.3  # points above the best other method
DENSE_GOAL = 0.2  # most points below the dense network with the same epochs
ENERGY_GOAL = 0.3  # the same at half of the energy
DENSE = ("dense", "dense_distilled")
FRONT, FRONT_FIGURE = "resnet56_front.json", "resnet56-front.svg"
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
    ("DepGraph (2023), sparse training", "2.57x fewer", "93.53", "93.64", "100 sparse + 100"),
    ("DepGraph (2023), without sparse training", "2.51x fewer", "93.53", "93.36", ""),
)
"""Method, MACs, top-1 of the dense network, top-1 of the pruned one, epochs (empty: unknown); on the original CIFAR-10."""
NOTED_SPREAD = 0.02
"""Repeated measurements of equal widths that differ by more are mentioned."""
PUBLISHED_RANGE = 0.12
"""Published numbers are shown where their MACs are so close, relative to those of the table."""


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


def measured_goals(cells: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Goal, its number, and whether it is met; only those with cells."""
    headline, is_energy = record["headline"], record["settings"].get("profile") is not None
    ours, found = by_seed(cells, headline), []
    best = best_other(cells, headline)
    lead = None if best is None or is_energy else paired_difference(ours, by_seed(cells, best))
    if best is not None and lead is not None:
        goal = f"at least {LEAD_GOAL:g} points above the best other method"
        found.append((goal, f"{lead} points against {NAMES.get(best, best)}, {lead.side}", lead.mean >= LEAD_GOAL))
    limit = ENERGY_GOAL if is_energy else DENSE_GOAL
    epochs = "as many epochs of fine-tuning" if is_published(record) else "the same epochs"
    for dense in DENSE:
        gap = paired_difference(ours, by_seed(cells, dense))
        if gap is not None:
            goal = f"at most {limit:g} points below the {NAMES[dense]} network with {epochs}"
            found.append((goal, f"{gap} points", gap.mean >= -limit))
    return found


def is_public(record: dict[str, Any]) -> bool:
    """Whether the record is that of the public table."""
    return bool(record["settings"]["epochs"] == PUBLIC_EPOCHS)


def is_published(record: dict[str, Any]) -> bool:
    """Whether each method has its published search besides the epochs of fine-tuning."""
    return bool(record["settings"].get("protocol") == "published")


def goals(cells: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[str]:
    """Each goal with its number, met or missed."""
    found = measured_goals(cells, record)
    return [f"{goal}: {value}: {'met' if met else 'missed'}" for goal, value, met in found] or ["open, no cells"]


def long_goals() -> list[tuple[str, str, bool | None, str]]:
    """Goals of the long trainings for the summary page: goal, result, whether it is met, and why not."""
    found: list[tuple[str, str, bool | None, str]] = []
    runs = ((FILES[0], "60 epochs, 47 % of the MACs"), (FILES[1], "30 epochs, half of the predicted energy"))
    for name, title in runs:
        if (RESULTS / name).exists():
            record = load(name)
            reason = _schedules() if name == FILES[0] else "not isolated"
            found += [
                (f"{title}: {goal}", text, met, reason) for goal, text, met in measured_goals(record["cells"], record)
            ]
    return found + public_goals(load(LONG) if (RESULTS / LONG).exists() else {"cells": []})


def public_goals(record: dict[str, Any]) -> list[tuple[str, str, bool | None, str]]:
    """Goals of the public table: above the dense network at 2.13 times fewer MACs, and above published results."""
    found: list[tuple[str, str, bool | None, str]] = []
    for share in (0.469, 0.389):
        cells = [cell for cell in record["cells"] if "error" not in cell and cell["share"] in (share, 1.0)]
        ours = by_seed(cells, record.get("headline", "ecc"))
        epochs = record.get("settings", {}).get("epochs", PUBLIC_EPOCHS)
        title = f"{epochs} epochs, {1 / share:.2f} times fewer MACs"
        dense = next((scores for name in DENSE[::-1] if (scores := by_seed(cells, name))), {})
        if share == 0.469:
            lead = paired_difference(ours, dense)
            goal = f"{title}: at least {PUBLIC_GOAL:g} points above the dense network with the same epochs"
            met = None if lead is None else lead.mean >= PUBLIC_GOAL
            found.append((goal, "" if lead is None else f"{lead} points", met, _losses(cells, record)))
        best = max((float(row[3]) for row in published_near(share) if "400" not in row[4]), default=0.0)
        goal = f"{title}: above the best published result with at most 200 epochs, {best:.2f} % (original data)"
        mean = statistics.fmean(ours.values()) if ours else None
        text = "" if mean is None else f"{mean:.2f} % ({len(ours)} {'seed' if len(ours) == 1 else 'seeds'})"
        level = f"; the dense network has {statistics.fmean(dense.values()):.2f} % with as many epochs" if dense else ""
        found.append((goal, text, None if mean is None else mean > best, f"not isolated{level}"))
    return found


def _losses(cells: Sequence[dict[str, Any]], record: dict[str, Any]) -> str:
    """The last training losses of ECC and of the dense network, as far as a reason is known."""
    means = [
        statistics.fmean(losses)
        for names in ((record.get("headline", "ecc"),), DENSE)
        if (losses := [cell["train_loss"] for cell in cells if cell["method"] in names and "train_loss" in cell])
    ]
    return (
        f"not isolated; the training loss ends at {means[0]:.3f}, that of dense at {means[1]:.3f}"
        if len(means) == 2
        else ""
    )


def long_epochs() -> str:
    """The epochs of each record of trainings, in words."""
    names = {FILES[0]: "equal MACs", FILES[1]: "shares of the energy", LONG: "the MACs of published results"}
    there = {name: what for name, what in names.items() if (RESULTS / name).exists()}
    return ", ".join(f"{load(name)['settings']['epochs']} epochs at {what}" for name, what in there.items())


def _schedules() -> str:
    """Why goals at equal MACs are missed, from the comparison of schedules on held-out images."""
    if not (RESULTS / FILES[2]).exists():
        return "not isolated"
    cells = load(FILES[2])["cells"]
    means = [statistics.fmean(by_seed(cells, method).values()) for method in dict.fromkeys(c["method"] for c in cells)]
    return (
        "not isolated; the pruning schedule made no difference on held-out images: with 30 epochs, gradual pruning, 5 epochs of "
        f"pruning and one-shot pruning lie between {min(means):.2f} and {max(means):.2f} %"
    )


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
    lead = None if best is None else paired_difference(by_seed(cells, headline), by_seed(cells, best))
    place = "" if lead is None else f" ECC is {'' if lead.mean > 0 else 'not '}above the best other method"
    public = (
        [] if not (RESULTS / LONG).exists() else [one for one in load(LONG)["cells"] if one["share"] in (0.469, 1.0)]
    )
    named = {NAMES[one]: by_seed(public, one) for one in (headline, best, DENSE[1]) if one is not None}
    longer = ", ".join(f"{one} {statistics.fmean(score.values()):.2f}" for one, score in named.items() if score)
    seeds = "one seed" if len(named[NAMES[headline]]) == 1 else f"{len(named[NAMES[headline]])} seeds"
    over = f" Over {PUBLIC_EPOCHS} epochs: {longer} % ({seeds})." if longer else ""
    return f"Over 60 epochs on ResNet-56{place}: {scores} % ({len(by_seed(cells, headline))} seeds).{over}"


def equal_energy() -> str | None:
    """One sentence for the summary page about half of the energy; None if that has not been run."""
    if not (RESULTS / FILES[1]).exists():
        return None
    record = load(FILES[1])
    cells = record["cells"]
    scores = {
        name: f"{statistics.fmean(found.values()):.2f} % at "
        f"{energy_share([cell for cell in cells if cell['method'] == name], cells)}"
        for name in NAMES
        if (found := by_seed(cells, name))
    }
    others = ", ".join(f"{NAMES[name]} {text}" for name, text in scores.items() if name != record["headline"])
    lead = paired_difference(by_seed(cells, record["headline"]), by_seed(cells, "uniform"))
    return (
        "Top-1 accuracy of ResNet-56 at the energy that was measured afterwards; "
        f"{record['settings']['epochs']} epochs, {len(by_seed(cells, record['headline']))} seeds. ECC, which removes residual "
        f"branches and widths, {scores[record['headline']]}; {others}. "
        f"ECC minus uniform: {lead} points, {'undecided' if lead is None else lead.side}."
    )


def measured_at(cell: dict[str, Any]) -> str:
    """Commit of the call that measured a cell. Calls may run on different cards, whose readings differ by some per cent."""
    return str(cell.get("measured_commit", cell.get("commit")))


def energy_share(mine: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> str:
    """Mean of `energy_shares`, for a table."""
    shares = energy_shares(mine, cells)
    return f"{statistics.fmean(shares):.1%}" if shares else "-"


def energy_shares(mine: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[float]:
    """Energy of the networks of a method, each relative to the dense network that the same call measured."""
    dense: dict[str, list[float]] = {}
    for cell in cells:
        if cell["method"] in DENSE and "joules" in cell:
            dense.setdefault(measured_at(cell), []).append(cell["joules"])
    return [
        cell["joules"] / statistics.fmean(dense[measured_at(cell)])
        for cell in mine
        if "joules" in cell and measured_at(cell) in dense
    ]


def repeated_energy(cells: Sequence[dict[str, Any]]) -> float:
    """Largest relative difference in energy between measurements of networks with equal widths; 0 if none was repeated."""
    measured: dict[str, list[float]] = {}
    for cell in cells:
        if "joules" in cell:
            measured.setdefault(json.dumps(cell["widths"], sort_keys=True), []).append(cell["joules"])
    return max((max(joules) / min(joules) - 1 for joules in measured.values()), default=0.0)


def resnet56_section() -> str:
    """The sections, one for each record and share of the MACs; empty if the benchmark has not been run."""
    found = []
    for name in [name for name in FILES if (RESULTS / name).exists()]:
        record = load(name)
        shares = sorted({cell["share"] for cell in record["cells"] if cell["share"] < 1}, reverse=True)
        found += [section_of(record, share, origin(name)) for share in shares]
        if name == FILES[1]:
            found.append(front_section())
    return "".join(found)


def front_cells() -> list[dict[str, Any]]:
    """Cells of all shares of the energy that have a score."""
    files = [name for name in (FILES[1], FRONT) if (RESULTS / name).exists()]
    return [cell for name in files for cell in load(name)["cells"] if "accuracy" in cell and cell["share_is_met"]]


def front_scores(share: float) -> str:
    """Top-1 accuracy of all methods at one share of the energy, for a sentence; empty if it was not run."""
    cells = [cell for cell in front_cells() if cell["share"] == share]
    means = {
        NAMES[name]: f"{100 * statistics.fmean(cell['accuracy'] for cell in mine):.2f} % ({len(mine)})"
        for name in NAMES
        if (mine := [cell for cell in cells if cell["method"] == name])
    }
    return ", ".join(f"{name} {text}" for name, text in means.items())


def front_section() -> str:
    """A table of methods and shares of the energy; empty without the record of other shares."""
    if not (RESULTS / FRONT).exists():
        return ""
    cells, record = front_cells(), load(FRONT)
    shares = sorted({cell["share"] for cell in cells if cell["share"] < 1}, reverse=True)
    dense = [cell for cell in cells if cell["method"] == DENSE[1]]
    rows = []
    for method in [name for name in NAMES if any(cell["method"] == name and cell["share"] < 1 for cell in cells)]:
        row = [NAMES[method]]
        for share in shares:
            mine = [cell for cell in cells if (cell["method"], cell["share"]) == (method, share)]
            score = f"{100 * statistics.fmean(cell['accuracy'] for cell in mine):.2f}" if mine else ""
            row.append(f"{score} ({energy_share(mine, [*mine, *dense])}, {len(mine)})" if mine else "")
        rows.append(row)
    level = 100 * statistics.fmean(cell["accuracy"] for cell in dense)
    counts = Counter((cell["method"], cell["share"]) for cell in cells if cell["share"] < 1)
    warning = " One seed decides nothing where differences are small." if 1 in counts.values() else ""
    return (
        "### Other shares of the energy\n\nThe same training at other predicted shares: top-1 accuracy in %, and in parentheses the "
        f"measured energy relative to dense and the\nnumber of seeds. The dense network has {level:.2f} % after as many epochs.{warning}\n\n"
        + table(["method", *(f"{share:.0%}" for share in shares)], rows)
        + f"\n\n![top-1 against measured energy](results/figures/{FRONT_FIGURE})\n\n"
        + f"Commits of the cells: {', '.join(sorted({str(cell['commit'])[:10] for cell in record['cells']}))}.\n\n{origin(FRONT)}\n\n"
    )


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
    batches = "Batches are the same for all methods of a seed, so differences are paired"
    if is_published(record):
        epochs = f"each method with its published search, then {settings['epochs']} epochs"
        batches = "Methods with a search see more batches; differences between cells of a seed are paired"
    is_energy, is_held_out = settings.get("profile") is not None, settings["held_out"]
    title = f"{share:.0%} of the energy" if is_energy else f"{1 / share:.2f}x fewer MACs"
    scored = (
        "A tenth of the training images was held out and scored; choices are made there, no test image was used"
        if is_held_out
        else f"The test images were scored once for each cell, and the headline\nof ECC (*{NAMES[headline]}*) was named before the run"
    )
    budget = (
        f"to {share:.0%} of the energy, as a model of the profile `results/depth/{settings['profile']}` predicts it, "
        f"with widths\nin multiples of {settings['multiple']}; there is no measured loop, so the measured energies differ from the share"
        if is_energy
        else f"to {share:.0%} of the MACs"
    )
    trunk = " It cannot reach half of the energy in this way." if is_energy and share <= 0.5 else ""
    tp = any(cell["method"].startswith("tp_") for cell in cells) or trunk
    torch_pruning = (
        "Torch-Pruning prunes the inner widths of blocks only, because its graph does not follow the zero-padded shortcuts."
        f"{trunk}\n"
        if tp
        else ""
    )
    text = f"""## ResNet-56 on CIFAR-10, {settings["epochs"]} epochs, {title}{", held-out images" if is_held_out else ""}{", published protocol" if is_published(record) else ""}

All methods prune {budget}.
They share one training loop: SGD {settings["lr"]:g} with a cosine, batch {settings["batch"]}, {epochs}, crops and flips,
distillation from the dense network with weight {settings["distill"]:g}, recalibrated batch norms. They start from {start}.
{batches}; ± is the 95 % interval (Student's t). *ahead*
and *behind* are said only where it excludes zero. {scored}.
{torch_pruning}The copy of CIFAR-10 is lossy: compare with the rows of this table alone.
"""
    parts = [text, table(head, rows)]
    if is_energy:
        measured = sum("joules" in cell for cell in cells)
        parts.append(f"Measured: {measured} of {len(cells)} networks; the shares are means over these.")
    if (spread := repeated_energy(cells)) > NOTED_SPREAD:
        parts.append(
            f"Networks of equal widths that were measured in different calls differ by up to {spread:.1%} in energy. So energies "
            "are relative\nto the dense network of the same call, and left out if that call did not measure it."
        )
    if is_public(record):
        found_goals = [goal for goal in public_goals(record) if f" {1 / share:.2f} times" in goal[0]]
        lines = [f"{goal}: {value}: {'met' if met else 'missed'}" for goal, value, met, _ in found_goals]
        parts.append("Goals: " + ";\n".join(lines) + ".")
    elif not is_held_out:
        parts.append("Goals: " + ";\n".join(goals(cells, record)) + ".")
    if not (is_energy or is_held_out) and (published := published_near(share)):
        parts += [
            "Published on the original CIFAR-10, with other dense networks and trainings:",
            table(["method", "MACs", "dense", "top-1, %", "epochs"], published),
        ]
    if failed:
        names = ", ".join(f"{cell['method']} (seed {cell['seed']})" for cell in failed)
        parts.append(f"Left out, because they failed or missed the share of the MACs: {names}.")
    device = ", ".join(sorted({str(cell["device"]) for cell in cells if "device" in cell}))
    return "\n\n".join([*parts, f"Commits of the cells: {', '.join(commits)}. Device: {device}.", source]) + "\n\n"


def published_near(share: float) -> list[list[str]]:
    """Rows of `PUBLISHED` with about this share of the MACs."""
    return [list(row) for row in PUBLISHED if abs(share * float(row[1].split("x")[0]) - 1) <= PUBLISHED_RANGE]
