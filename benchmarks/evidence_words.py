"""What the pages of the evidence say in words: how it was done, what was tried, and what a reader has to know."""

from __future__ import annotations

import math
import statistics
from functools import cache
from pathlib import Path

import torch
from evidence_facts import (
    OURS,
    RECIPES,
    SCORES,
    Experiment,
    gains,
    mean_and_spread,
)
from result_tables import load

from ecc.energy import EnergyModel, fit
from ecc.energy.fitting import describe_outlier_widths
from ecc.measure import Profile
from ecc.methods.baselines.netadapt import NetAdaptSettings
from ecc.zoo.recipe import read_recipe

STEADY, EVEN, SOON = (f"{OURS} ({form})" for form in ("steady", "even", "soon"))
ALIKE_SEEDS = "over all seeds that both have with about the same joules"
EVENLY = {"e3": ("alexnet", "tf32"), "e4": ("resnet56", "tf32")}
"""Rows of floors.json that are run as in an experiment."""

UNSURE = 0.05
"""An interval on the scales, as a share of the joules, from which on it is told."""
MOST = 0.5
"""Of the batches of a search that should lead to its winner, or it is told."""
FEW = 4
"""Less than one group in so many is few."""

INTRODUCTION = """## Accuracy against joules

All methods start from the same dense networks, prune the same groups of channels and get the same number of batches,
where nothing else is said; see [the rivals](docs/rivals.md). Scores are on test data, in per cent: mean over seeds ±
standard deviation between them. Every cell stands in [results/evidence.md](results/evidence.md). To be
known before reading on:

- Methods aim at budgets by the energy model of the card; results are put on the scales afterwards, beside the dense
  network. This was done in several sessions and on several cards of the kind, so joules compare as shares of the dense
  network's alone. Cells whose joules had been predicted badly were run once more, by a model that had learned from what
  was weighed: those of all methods, but for *ecc (paper)*. Networks that still spend too much (†) count where methods
  are compared at a budget; *at equal joules*, ECC is compared with what the rivals' curves have at the joules that it
  took.
- No method sees test data. But ECC was changed between earlier grids like these, whose test scores were known, and what
  is told below to have been tried was judged by them; rivals were not developed further. The goals are older than all
  grids, and the present ECC is not.
- *Before tuning* is no comparison at equal training: ECC has then trained for its whole solve, and rivals little or not
  at all. It tells how much a method leaves to the tuning.
- Trainings are short. Rivals were not run for longer, so that nothing is known of that.
- NetAdapt's cells are older than its present way of sharing out steps. Where there were fewer steps than candidates, as
  on E2, the first rounds took them all, and in the last of these some candidates were judged untrained beside others.
- *scratch* trains the widths that `ecc` found from random weights, with the batches of the compression alone. It tells
  that so few do not suffice, and nothing of what the widths are worth.
- *ecc (paper)* is Algorithm 1 with the paper's norm, and with constants raised so that it arrives in so few steps. It
  has any widths, for which the energy models were not fitted, and may go below what is the least for the others. Of
  ERFNet it cuts the groups that the paper cuts.
- The copies of the data are lossy: numbers compare methods with each other, and are no results on the originals."""


def about(found: Experiment) -> str:
    """How an experiment was made, and what its size leaves unsure."""
    record, dense = found.record, mean_and_spread(found.dense())
    joules = [cell.weighed["dense_joules"] for cell in found.cells if cell.weighed]
    facts = [f"{record['device']}, batches of {record['measured_batch']} on the scales"]
    facts += [f"dense: {shown(dense)}" if dense else "no dense score"]
    facts += [f"{min(joules):.3g} to {max(joules):.3g} J a batch, {found.labels}"] if joules else []
    facts += [f"mean error of the energy model: {record['fit']['mean']:.2%}"] if "mean" in record.get("fit", {}) else []
    images, norms = read_recipe(RECIPES[found.name]).batch_size or 0, record["recalibration_batches"]
    batches = statistics.mode([cell.row["batches"]["total"] for cell in found.cells if "batches" in cell.row] or [0])
    trained = f" Methods had {batches:,.0f} batches of {images} images." if batches else ""
    return (
        f"{'; '.join(facts)}.{trained} Batch norms of rivals saw {norms * images} images before a candidate was "
        f"judged, and before the tuning. Candidates were judged on {record['judged_on']} held-out images."
        f"{_test_error(found)}{_unsure(found)}"
    )


def shown(pair: tuple[float, float] | None) -> str:
    """In per cent; no spread where there is one seed."""
    if pair is None:
        return "missing"
    return f"{100 * pair[0]:.2f}" + (f" ± {100 * pair[1]:.2f}" if pair[1] else "")


def _test_error(found: Experiment) -> str:
    """What the size of the test set leaves unsure, where scores are shares of it."""
    count, dense = found.record.get("tested_on"), mean_and_spread(found.dense())
    if count is None or dense is None or found.name in SCORES:
        return ""
    error = math.sqrt(dense[0] * (1 - dense[0]) / count)
    return (
        f" There are {count:,} test images: on other ones as many, a score like the dense network's would differ by "
        f"{100 * error:.2f} points (one standard error)."
    )


def _unsure(found: Experiment) -> str:
    """Networks whose joules scattered on the scales."""
    rows = [cell for cell in found.cells if cell.weighed and cell.weighed.get("relative_ci", 0.0) > UNSURE]
    told = ", ".join(f"{cell.method} at {cell.budget} of seed {cell.seed}" for cell in rows)
    return f" On the scales these scattered by over {UNSURE:.0%}: {told}." if rows else ""


def evenly_cut(found: Experiment) -> str:
    """What is left of the joules when all groups are cut alike, where that was measured."""
    rows = [row for row in load("floors.json")["rows"] if (row["network"], row["way"]) == EVENLY.get(found.name)]
    told = [
        f"{cut} {joules / row['joules']['dense']:.1%}"
        for row in rows
        for cut, joules in row["joules"].items()
        if cut != "dense"
    ]
    return f"Cut evenly, the network takes of its joules (`results/floors.json`): {', '.join(told)}." if told else ""


def of_the_model(found: Experiment) -> str:
    """Widths at which the energy model fails, and what it leaves to NetAdapt, where there is something to tell."""
    file = found.path.with_suffix(".profile.gz")
    if not file.exists():
        return ""
    model = _fitted(file, file.stat().st_mtime_ns)
    return "\n\n".join(filter(None, (describe_outlier_widths(model.quality), _left_to_netadapt(found, model))))


@cache
def _fitted(file: Path, changed: int) -> EnergyModel:
    del changed  # a file that is another one by now is read again
    return fit(Profile.load(file))


def _left_to_netadapt(found: Experiment, model: EnergyModel) -> str:
    """How many groups can propose something in its first round, where these are few."""
    step, asked = found.record["width_multiple"], NetAdaptSettings().initial_reduction
    full = torch.tensor(model.full_widths, dtype=torch.float64)
    dense, groups, able = float(model.value(full)), 0, 0
    for place, name in enumerate(model.groups):
        width = found.record["full_widths"].get(name, 0)
        floor = math.ceil(found.record["settings"]["min_width_ratio"] * width / step) * step
        if 0 < floor < width and model.min_widths[place] < model.full_widths[place]:
            cut = full.clone()
            cut[place] = floor
            groups, able = groups + 1, able + (1 - float(model.value(cut)) / dense >= asked)
    if able >= groups / FEW:
        return ""
    rows = [cell.row["batches"] for cell in found.cells if cell.method == "netadapt" and "batches" in cell.row]
    reached = [row["lineage"] / row["total"] for row in rows]
    spent = ""
    if reached and min(reached) < MOST:
        spent = f", and of its batches {min(reached):.0%} to {max(reached):.0%} led to the winner"
    return (
        f"{able} of {groups} groups can alone save the {asked:.0%} that a first round of NetAdapt asks for, so it has "
        f"little to choose from{spent}: read its scores as those of this setting."
    )


def forms(found: Experiment) -> str:
    forms = found.record.get("forms", {})
    told = [f"*ecc ({name})* has {', '.join(f'{k} = {v}' for k, v in how.items())}" for name, how in forms.items()]
    return "; ".join(told) + "." if told else ""


def tried(found: list[Experiment]) -> str:
    """What was tried because ECC was behind at mild budgets, beside what it was tried against, where both were run."""
    fall, bound, soon = _gained(found, STEADY), _gained(found, EVEN, sign=-1.0), _gained(found, SOON, sign=-1.0)
    parts = []
    if fall:
        parts.append(
            "ECC was behind at mild budgets, and a learning rate that stays as it is during the solve was suspected. "
            "In these recipes it falls over solve and tuning, as that of the rivals does in their tuning "
            f"(`falling = true`); *{STEADY}* keeps it, as ECC does by default. Points that the fall gains after "
            f"tuning, {ALIKE_SEEDS}: {fall}"
        )
    if bound:
        parts.append(
            "Then its choice was suspected: harm is judged channel by channel, as if each went alone, which pays for "
            f"cutting a few groups deep. *{EVEN}* cuts none of them far below what an even cut would leave. Points "
            f"that this gains after tuning, {ALIKE_SEEDS}: {bound}"
        )
    if soon:
        parts.append(
            "Last its time: rivals cut at once and train what is left, and ECC is on its way down in much of its "
            f"training. *{SOON}* has as many batches, of which the solve has a quarter, so that the mildest budget is "
            f"met early. Points that this gains after tuning, {ALIKE_SEEDS}: {soon}"
        )
    return "\n\n".join(parts)


def _gained(found: list[Experiment], form: str, sign: float = 1.0) -> str:
    """A verdict, and points for each experiment and budget; empty where the form was not run."""
    means: dict[str, float] = {}
    lines = []
    for one in found:
        if pairs := gains(one, form):
            all_of_them = [sign * gain for some in pairs.values() for gain in some]
            means[one.title] = statistics.fmean(all_of_them)
            parts = [f"{budget} {sign * statistics.fmean(some):+.2f}" for budget, some in pairs.items()]
            count = f"{len(all_of_them)} pair{'s' * (len(all_of_them) > 1)}"
            lines.append(f"- {one.title}: {means[one.title]:+.2f} ({count}; {', '.join(parts)})")
    if not lines:
        return ""
    lost = sum(mean <= 0 for mean in means.values())
    if lost:
        verdict = f"it helps on {len(means) - lost} of {len(means)}, and so it is not the default."
    else:
        verdict = "it helps everywhere." if len(means) == len(found) else "it helps so far, and is not run everywhere."
    return verdict + "\n\n" + "\n".join(lines)
