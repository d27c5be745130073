"""Text of the evidence pages: setup, ablations and limits."""

from __future__ import annotations

import math
import statistics
from functools import cache
from pathlib import Path

import torch
from evidence_data import (
    LOOP,
    OURS,
    RECIPES,
    SCORES,
    Experiment,
    gains,
    mean_and_spread,
)
from result_tables import load

from ecc.energy import EnergyModel, fit
from ecc.energy.quality import describe_outlier_widths
from ecc.measure import Profile
from ecc.methods.baselines.netadapt import INITIAL_REDUCTION
from ecc.zoo.recipe import read_recipe

CONSTANT_LR, UNIFORM_FLOOR, EARLY = (f"{OURS} ({variant})" for variant in ("constant LR", "uniform floor", "early"))
SAME_SEEDS = "mean over seeds that both have at about equal energy"
UNIFORM = {"e3": ("alexnet", "tf32"), "e4": ("resnet56", "tf32")}
"""Networks of floors.json that run as in an experiment."""

UNSURE = 0.05
"""Relative confidence interval of a measurement above which the page names the run."""
MOST = 0.5
"""Fraction of the batches of a search that should lead to its result; below it the page says so."""
FEW = 4
"""NetAdapt has few candidates if less than one group in this many can meet its first reduction."""

INTRODUCTION = """## Accuracy against measured energy

All methods start from the same dense networks, prune the same channel groups and use the same number of training
batches unless stated otherwise; see [baselines](docs/baselines.md). Scores are test scores in per cent: mean ± standard
deviation over seeds. [results/evidence.md](results/evidence.md) lists every run. Limits of these experiments:

- Methods use the energy model of the GPU to meet the budget, or measurements during pruning where an experiment says so.
  Each result was measured afterwards, next to the dense network, in several sessions on several GPUs of the same kind. Compare only energy relative to the dense network. In the
  records of version 0.1, runs with a large prediction error were repeated with an energy model that includes the new
  measurements (all methods except *ecc (paper)*); the newer ones take the profile of these records. Results that exceed
  their budget (†) are included in the comparisons; *at equal energy* compares ECC with the score of each baseline
  interpolated at the energy that ECC used.
- No method uses test data. However, ECC was changed between earlier experiments whose test scores were known, and the
  ablations below were evaluated on test data. The baselines were not developed further. The goals were fixed before any
  run; ECC was tuned afterwards.
- *pruned* scores (before fine-tuning) do not compare methods at equal training: ECC has trained during pruning, the
  baselines have trained little or not at all. They show how much a method relies on fine-tuning.
- In the records of version 0.1 training is short. NetAdapt, AMC, EAP and LcP were not run with longer training.
- The NetAdapt runs are older than the current distribution of steps over candidates. Where there were fewer steps than
  candidates, as in E2, the first rounds used all steps, and some candidates of the last of these rounds were compared
  without training.
- *scratch* trains the widths that `ecc` found from random initialization, for the batches of the compression only. It
  shows that this is too little training; it says nothing about the widths.
- *ecc (paper)* is Algorithm 1 with the paper's importance criterion and with constants increased so that it converges
  within these short trainings. It uses any width, for which the energy models were not fitted, and may prune below
  the minimum width of the other methods. On ERFNet it prunes only the groups that the paper prunes.
- The data sets are lossy copies. Compare methods with each other; these are not results on the original data."""


def about(found: Experiment) -> str:
    """Setup of an experiment and its statistical limits."""
    record, dense = found.record, mean_and_spread(found.dense())
    joules = [cell.measured["dense_joules"] for cell in found.cells if cell.measured]
    facts = [f"{record['device']}, batch size {record['measured_batch']} when measured"]
    facts += [f"dense: {shown(dense)}" if dense else "no dense score"]
    trained = mean_and_spread(list(found.dense_trained().values()))
    facts += [f"dense with the same training: {shown(trained)} ({len(found.dense_trained())} seeds)"] if trained else []
    facts += [f"{min(joules):.3g} to {max(joules):.3g} J per batch, {found.labels}"] if joules else []
    facts += (
        [f"mean cross-validated error of the energy model of these runs {record['fit']['mean']:.2%}"]
        if "mean" in record.get("fit", {})
        else []
    )
    images, norms = read_recipe(RECIPES[found.name]).batch_size or 0, record["recalibration_batches"]
    used = f" Each method used {found.batches:,} batches of {images} images." if found.batches else ""
    return (
        f"{'; '.join(facts)}.{used} Batch-norm statistics of the baselines were recalibrated on {norms * images} images "
        f"before each evaluation and before fine-tuning. Candidates were compared on {record['held_out_images']} held-out "
        "images."
        f"{_loops(found)}{_test_error(found)}{_unsure(found)}"
    )


def _loops(found: Experiment) -> str:
    """How many runs measured; empty if none did."""
    done = [cell for cell in found.cells if cell.missing is None]
    loops = sum(LOOP in cell.row for cell in done)
    if not loops:
        return ""
    rest = "" if loops == len(done) else ", the others with predictions alone"
    return f" {loops} of {len(done)} runs met their budget with measurements during the run{rest}."


def shown(pair: tuple[float, float] | None) -> str:
    """Mean ± standard deviation in per cent; no deviation for a single seed."""
    if pair is None:
        return "missing"
    return f"{100 * pair[0]:.2f}" + (f" ± {100 * pair[1]:.2f}" if pair[1] else "")


def _test_error(found: Experiment) -> str:
    """Standard error due to the size of the test set, where scores are accuracies."""
    count, dense = found.record.get("test_images"), mean_and_spread(found.dense())
    if count is None or dense is None or found.name in SCORES:
        return ""
    error = math.sqrt(dense[0] * (1 - dense[0]) / count)
    return f" The test set has {count:,} images: the standard error of the dense score is {100 * error:.2f} points."


def _unsure(found: Experiment) -> str:
    """Runs whose measurement has a wide confidence interval."""
    rows = [cell for cell in found.cells if cell.measured and (cell.measured.get("relative_ci") or 0.0) > UNSURE]
    names = ", ".join(f"{cell.method} at {cell.budget}, seed {cell.seed}" for cell in rows)
    return f" Confidence intervals wider than {UNSURE:.0%}: {names}." if rows else ""


def uniformly_pruned(found: Experiment) -> str:
    """Measured energy of uniformly pruned networks, where it is known."""
    rows = [row for row in load("floors.json")["rows"] if (row["network"], row["way"]) == UNIFORM.get(found.name)]
    shares = [
        f"{cut} {joules / row['joules']['dense']:.1%}"
        for row in rows
        for cut, joules in row["joules"].items()
        if cut != "dense"
    ]
    return (
        f"Energy after uniform pruning, relative to dense (`results/floors.json`): {', '.join(shares)}."
        if shares
        else ""
    )


def of_the_model(found: Experiment) -> str:
    """Widths at which the energy model is wrong, and whether NetAdapt has enough candidates."""
    file = found.path.with_suffix(".profile.gz")
    if not file.exists():
        return ""
    model = _fitted(file, file.stat().st_mtime_ns)
    return "\n\n".join(filter(None, (describe_outlier_widths(model.quality), _netadapt_candidates(found, model))))


@cache
def _fitted(file: Path, changed: int) -> EnergyModel:
    del changed  # part of the cache key: a changed file is read again
    return fit(Profile.load(file))


def _netadapt_candidates(found: Experiment, model: EnergyModel) -> str:
    """How many groups can meet the first reduction of NetAdapt, if these are few."""
    step, requested = found.record["width_multiple"], INITIAL_REDUCTION
    full = torch.tensor(model.full_widths, dtype=torch.float64)
    dense, groups, able = float(model.value(full)), 0, 0
    for place, name in enumerate(model.groups):
        width = found.record["full_widths"].get(name, 0)
        floor = math.ceil(found.record["settings"]["min_width_ratio"] * width / step) * step
        if 0 < floor < width and model.min_widths[place] < model.full_widths[place]:
            cut = full.clone()
            cut[place] = floor
            groups, able = groups + 1, able + (1 - float(model.value(cut)) / dense >= requested)
    if able >= groups / FEW:
        return ""
    rows = [cell.row["batches"] for cell in found.cells if cell.method == "netadapt" and "batches" in cell.row]
    reached = [row["lineage"] / row["total"] for row in rows]
    spent = ""
    if reached and min(reached) < MOST:
        spent = f", and {min(reached):.0%} to {max(reached):.0%} of its batches trained the final network"
    return (
        f"Only {able} of {groups} groups can save the {requested:.0%} of the first NetAdapt round alone, so NetAdapt has few "
        f"candidates{spent}."
    )


def variants(found: Experiment) -> str:
    variants = found.record.get("variants", {})
    texts = [f"*ecc ({name})*: {', '.join(f'`{k}={v}`' for k, v in how.items())}" for name, how in variants.items()]
    return "Variants: " + "; ".join(texts) + "." if texts else ""


def ablations(found: list[Experiment]) -> str:
    """What was tried because ECC was behind at mild budgets, with its effect, where both variants were run."""
    schedule = _gained(found, CONSTANT_LR)
    floor, early = (_gained(found, variant, sign=-1.0) for variant in (UNIFORM_FLOOR, EARLY))
    parts = []
    if schedule:
        parts.append(
            "**Ablation 1: learning-rate schedule.** The recipes use one cosine over pruning and fine-tuning "
            f'(`lr_schedule = "cosine"`), as the baselines do; *{CONSTANT_LR}* keeps the rate constant while pruning, which '
            f"is the default of ECC. Points gained by the cosine after fine-tuning, {SAME_SEEDS}: {schedule}"
        )
    if floor:
        parts.append(
            "**Ablation 2: minimum width.** Channel importance ignores interactions, so a few layers may be pruned too far. "
            f"*{UNIFORM_FLOOR}* (`uniform_floor = 0.8`) keeps every layer above 80 % of its width under uniform pruning. "
            f"Points gained after fine-tuning, {SAME_SEEDS}: {floor}"
        )
    if early:
        parts.append(
            "**Ablation 3: pruning schedule.** Baselines prune at once and then train; ECC prunes during much of its "
            f"training. *{EARLY}* prunes in a quarter of the steps and fine-tunes for the rest. Points gained after "
            f"fine-tuning, {SAME_SEEDS}: {early}"
        )
    return "\n\n".join(parts)


def _gained(found: list[Experiment], variant: str, sign: float = 1.0) -> str:
    """Verdict, and points for each experiment and budget; empty if the variant was not run."""
    means: dict[str, float] = {}
    lines = []
    for one in found:
        if pairs := gains(one, variant):
            all_of_them = [sign * gain for some in pairs.values() for gain in some]
            means[one.title] = statistics.fmean(all_of_them)
            parts = [f"{budget} {sign * statistics.fmean(some):+.2f}" for budget, some in pairs.items()]
            count = f"{len(all_of_them)} pair{'s' * (len(all_of_them) > 1)}"
            lines.append(f"- {one.title}: {means[one.title]:+.2f} ({count}; {', '.join(parts)})")
    if not lines:
        return ""
    lost = sum(mean <= 0 for mean in means.values())
    if lost:
        verdict = f"it helps on {len(means) - lost} of {len(means)} networks. Not enabled by default."
    else:
        verdict = "it helps on all networks." if len(means) == len(found) else "it helps on all networks that were run."
    return verdict + "\n\n" + "\n".join(lines)
