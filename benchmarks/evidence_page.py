"""Accuracy against joules, in markdown: a section of RESULTS.md and the long tables of results/evidence.md.

Both come from results/evidence/e1.json to e4.json (see evidence.py), those that are there. benchmarks/write_results.py
writes and checks the pages, and has the figures drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path

from evidence_facts import (
    AFTER,
    ALIKE,
    BAND,
    BEFORE,
    OURS,
    OVER,
    SCORES,
    Cell,
    Experiment,
    ahead,
    experiments,
    gains,
    match,
    mean_and_spread,
    share_of,
    verdicts,
)
from result_tables import RESULTS, load, origin_of, table

from ecc.energy import fit
from ecc.energy.fitting import about_odd_widths
from ecc.measure import Profile

STEADY, EVEN, SOON = (f"{OURS} ({form})" for form in ("steady", "even", "soon"))
UNFINISHED = "not finished"
ALIKE_SEEDS = "over all seeds that both have with about the same joules"
EVENLY = {"e3": ("alexnet", "tf32"), "e4": ("resnet56", "tf32")}
"""Rows of floors.json that are run as in an experiment."""
FOLDER, FIGURES, LONG = RESULTS / "evidence", RESULTS / "figures", RESULTS / "evidence.md"

INTRODUCTION = """## Accuracy against joules

All methods start from the same dense networks, prune the same groups of channels and get the same number of batches,
but for *ecc (long)*; see [the rivals](docs/rivals.md). They aim at budgets in joules by the energy model of the card;
then results are put on the scales beside the dense network; those that were not are counted below. *scratch* trains the
widths that `ecc` found from random weights. Scores are on test data, which no method sees, in per cent: mean over seeds
± standard deviation between them. The copies of the data are lossy: numbers compare methods with each other, and are no
results on the originals. Every cell stands in [results/evidence.md](results/evidence.md)."""


def section(folder: Path = FOLDER) -> str:
    """The section of RESULTS.md; empty without records."""
    found = experiments(folder)
    if not found:
        return ""
    parts = [INTRODUCTION, in_short(found), goals(found), tried(found), *(one_experiment(one) for one in found)]
    return "\n\n".join(part for part in parts if part) + "\n\n"


def long_page(folder: Path = FOLDER) -> str:
    """All cells, one by one; empty without records."""
    found = experiments(folder)
    if not found:
        return ""
    parts = ["# Accuracy against joules, cell by cell"]
    parts += ["Made by `benchmarks/write_results.py` from `results/evidence/`; nothing here was typed by hand."]
    for one in found:
        parts += [f"## {one.title}", _about(one), cells_table(one), missing(one), *_origins(one)]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_short(found: list[Experiment]) -> str:
    """Where ECC is ahead of its best rival, and where it is behind, budget by budget."""
    lines = []
    for budget in sorted({budget for one in found for budget in one.budgets}, key=share_of, reverse=True):
        points = {
            one.title.partition(":")[0]: (match(one, budget, AFTER).points, match(one, budget, BEFORE).points)
            for one in found
            if budget in one.budgets
        }
        sides = {"ahead": [], "behind": [], "without a score": []}
        for name, (after, _) in points.items():
            side = "without a score" if after is None else "behind" if after < -ALIKE else "ahead"
            sides[side].append(name if after is None else f"{name} ({after:+.2f})")
        told = "; ".join(f"{side} on {', '.join(names)}" for side, names in sides.items() if names)
        first = [before for _, before in points.values() if before is not None]
        led = f"before tuning ahead on {sum(one >= -ALIKE for one in first)} of {len(first)}" if first else ""
        lines.append(f"- {budget}: {told}" + (f"; {led}, by {min(first):+.2f} to {max(first):+.2f}." if led else "."))
    return "ECC beside the best of its rivals, in points after tuning:\n\n" + "\n".join(lines)


def goals(found: list[Experiment]) -> str:
    """What was wanted before anything was run, and what became of it."""
    unfinished = {one.title for one in found if any(cell.missing == UNFINISHED for cell in one.cells)}
    rows, words = [], []
    for one in verdicts(found):
        words.append("held so far" if one.verdict == "held" and one.where in unfinished else one.verdict)
        rows.append([one.goal, one.where, f"**{words[-1]}**", one.numbers])
    counts = ", ".join(
        f"{words.count(word)} {word}" for word in ("held", "held so far", "missed", "open") if word in words
    )
    head = f"The goals, set before the runs: {counts}. Numbers are points, by which ECC leads its best rival."
    return f"{head}\n\n" + table(["goal", "experiment", "", "numbers"], rows)


def one_experiment(found: Experiment) -> str:
    """Title, figures, tables and origin."""
    parts = [f"### {found.title}", _about(found), _evenly_cut(found), _odd_widths(found), _forms(found)]
    parts += [f"![{found.score_name} against joules](results/figures/{accuracy_figure(found)})"]
    mark = f"; † spends over {OVER:.0%} of its budget" if any(cell.is_over for cell in found.cells) else ""
    parts += [f"{found.score_name} after tuning{mark}:", scores_table(found, AFTER)]
    parts += [f"{found.score_name} before tuning:", scores_table(found, BEFORE)]
    if found.score_name == "mean IoU":
        parts += [f"As the paper's Table 2: mean IoU in per cent, and joules a batch, {found.labels}:", table_2(found)]
    parts += ["ECC beside the best rival, after tuning, over the seeds that both have:", matches_table(found)]
    parts += [_within(found), joules_table(found)]
    parts += [f"![channels kept](results/figures/{widths_figure(found)})", missing(found), *_origins(found)]
    return "\n\n".join(part for part in parts if part)


def accuracy_figure(found: Experiment) -> str:
    return f"evidence-{found.name}-accuracy.svg"


def widths_figure(found: Experiment) -> str:
    return f"evidence-{found.name}-widths.svg"


def _about(found: Experiment) -> str:
    record, dense = found.record, mean_and_spread(found.dense())
    joules = [cell.weighed["dense_joules"] for cell in found.cells if cell.weighed]
    weight = mean_and_spread(joules)
    facts = [f"{record['device']}, batches of {record['measured_batch']}"]
    facts += [f"dense: {shown(dense)}" if dense else "no dense score"]
    facts += [f"{weight[0]:.4g} J a batch, {found.labels}"] if weight else []
    facts += [f"mean error of the energy model: {record['fit']['mean']:.2%}"] if "mean" in record.get("fit", {}) else []
    norms, judged = record["recalibration_batches"], record["judged_on"]
    return (
        f"{'; '.join(facts)}. Batch norms of rivals saw {norms} batches before a candidate was judged, and before the "
        f"tuning. Candidates were judged on {judged} held-out images.{_test_error(found)}"
    )


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


def _evenly_cut(found: Experiment) -> str:
    """What is left of the joules when all groups are cut alike, where that was measured."""
    rows = [row for row in load("floors.json")["rows"] if (row["network"], row["way"]) == EVENLY.get(found.name)]
    told = [
        f"{cut} {joules / row['joules']['dense']:.1%}"
        for row in rows
        for cut, joules in row["joules"].items()
        if cut != "dense"
    ]
    return f"Cut evenly, the network takes of its joules (`results/floors.json`): {', '.join(told)}." if told else ""


def _odd_widths(found: Experiment) -> str:
    """Widths at which the energy model fails, where there are any."""
    file = found.path.with_suffix(".profile.gz")
    return about_odd_widths(fit(Profile.load(file)).quality) if file.exists() else ""


def _forms(found: Experiment) -> str:
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
            means[one.title] = sign * statistics.fmean(gain for some in pairs.values() for gain in some)
            parts = [f"{budget} {sign * statistics.fmean(some):+.2f}" for budget, some in pairs.items()]
            lines.append(f"- {one.title}: {means[one.title]:+.2f} ({', '.join(parts)})")
    if not lines:
        return ""
    if any(mean <= 0 for mean in means.values()):
        verdict = "it does not help everywhere, and so it is not the default."
    else:
        verdict = "it helps everywhere." if len(means) == len(found) else "it helps so far, and is not run everywhere."
    return verdict + "\n\n" + "\n".join(lines)


def _origins(found: Experiment) -> list[str]:
    dates = sorted({cell.row["date"] for cell in found.cells if "date" in cell.row})
    several = [f"Cells of this grid are of {', '.join(dates)}."] if len(dates) > 1 else []
    return [*several, origin_of(f"evidence/{found.path.name}", found.record["environment"])]


# ---------------------------------------------------------------- tables


def shown(pair: tuple[float, float] | None) -> str:
    """In per cent; no spread where there is one seed."""
    if pair is None:
        return "missing"
    return f"{100 * pair[0]:.2f}" + (f" ± {100 * pair[1]:.2f}" if pair[1] else "")


def _grid(found: Experiment, cell: Callable[[str, str], str]) -> str:
    """One row a method, one column a budget."""
    asked = {(one.method, one.budget) for one in found.cells}
    rows = [
        [method, *(cell(method, budget) if (method, budget) in asked else "" for budget in found.budgets)]
        for method in found.methods
    ]
    return table(["method", *found.budgets], rows)


def scores_table(found: Experiment, when: str) -> str:
    """Mean and spread over seeds; how many seeds, where some are missing.

    In bold the best of each budget, forms of ECC and what spends too much left out.
    """
    asked = len({cell.seed for cell in found.cells})

    def is_over(method: str, budget: str) -> bool:
        return any(cell.is_over for cell in found.at(method, budget))

    def mean(method: str, budget: str) -> float | None:
        pair = mean_and_spread(list(found.by_seed(method, budget, when).values()))
        is_form = method not in (OURS, *found.rivals)
        return None if pair is None or is_form or is_over(method, budget) else pair[0]

    def one(method: str, budget: str) -> str:
        scores = list(found.by_seed(method, budget, when).values())
        text = shown(mean_and_spread(scores)) + (f" ({len(scores)} of {asked})" if 0 < len(scores) < asked else "")
        text += " †" if is_over(method, budget) else ""
        means = [one for name in found.methods if (one := mean(name, budget)) is not None]
        return f"**{text}**" if means and mean(method, budget) == max(means) else text

    return _grid(found, one)


def table_2(found: Experiment) -> str:
    """Score and joules of every method at each budget."""

    def one(method: str, budget: str) -> str:
        cells = found.at(method, budget)
        score = mean_and_spread([cell.scores[AFTER] for cell in cells if AFTER in cell.scores])
        joules = mean_and_spread([cell.weighed["joules"] for cell in cells if cell.weighed])
        if score is None:
            return "missing"
        return f"{100 * score[0]:.1f}, " + ("not weighed" if joules is None else f"{joules[0]:.3g} J")

    return _grid(found, one)


def matches_table(found: Experiment) -> str:
    """The verdict of each budget."""
    rows = []
    for budget in found.budgets:
        one = match(found, budget, AFTER)
        ours = "missing" if one.ours is None else f"{100 * one.ours:.2f}"
        rival = "missing" if one.theirs is None else f"{one.rival}, {100 * one.theirs:.2f}"
        points = "" if one.points is None else f"{one.points:+.2f}"
        above = {"held": "yes", "missed": "no"}.get(ahead(one, 0.0), "open")
        shares = [_share(found.at(name, budget)) for name in (OURS, one.rival or "")]
        rows.append([budget, ours, rival, points, above, *shares, ", ".join(one.absent)])
    head = ["budget", "ECC", "best rival", "points ahead", "at or above", "joules of dense, ECC", "and rival"]
    return table([*head, "without a score"], rows)


def _share(cells: list[Cell]) -> str:
    pair = mean_and_spread([cell.share for cell in cells if cell.share is not None])
    return "" if pair is None else f"{pair[0]:.1%}"


def joules_table(found: Experiment) -> str:
    """How near to their budgets the networks of each method came on the scales."""
    rows = []
    for method in found.methods:
        shares = _of_budgets([cell for cell in found.cells if cell.method == method])
        inside = sum(BAND[0] <= share <= BAND[1] for share in shares)
        over = sum(share > BAND[1] for share in shares)
        ends = [f"{min(shares):.1%}", f"{max(shares):.1%}"] if shares else ["", ""]
        rows.append([method, str(len(shares)), str(inside), str(over), *ends])
    return table(["method", "weighed", "within", "over", "least of budget", "most of budget"], rows)


def _of_budgets(cells: list[Cell]) -> list[float]:
    return [cell.of_budget for cell in cells if cell.of_budget is not None]


def _within(found: Experiment) -> str:
    shares = _of_budgets(list(found.cells))
    finished = sum(cell.missing is None for cell in found.cells)
    if not shares:
        return f"None of {finished} networks was weighed."
    inside = sum(BAND[0] <= share <= BAND[1] for share in shares)
    worst = max(shares, key=lambda share: max(share - BAND[1], BAND[0] - share))
    unweighed = f" Not weighed: {finished - len(shares)}." if finished > len(shares) else ""
    return (
        f"On the scales ({found.labels}), {inside} of {len(shares)} networks are within {BAND[0]:.0%} and "
        f"{BAND[1]:.0%} of their budget; the farthest is at {worst:.1%}.{unweighed}"
    )


def cells_table(found: Experiment) -> str:
    """Every finished cell."""
    rows = []
    for cell in sorted(found.cells, key=lambda one: (-share_of(one.budget), found.methods.index(one.method), one.seed)):
        if cell.missing is not None:
            continue
        predicted, batches = cell.row.get("predicted"), cell.row.get("batches", {})
        weighed = ["", "", ""]
        if cell.weighed:
            weighed = [f"{cell.weighed['joules']:.4g}", f"{cell.share:.1%}", f"{cell.of_budget:.1%}"]
        rows.append(
            [
                cell.method,
                cell.budget,
                str(cell.seed),
                *(f"{100 * cell.scores[when]:.2f}" if when in cell.scores else "" for when in ("dense", BEFORE, AFTER)),
                "" if predicted is None else f"{predicted['result'] / predicted['limit']:.1%}",
                *weighed,
                _counted(cell, "parameters", 1e6),
                _counted(cell, "macs", 1e9),
                f"{batches['total']:,.0f}" if "total" in batches else "",
                f"{cell.row['cell_seconds']:.0f}" if "cell_seconds" in cell.row else "",
            ]
        )
    head = [
        "method",
        "budget",
        "seed",
        "dense",
        "before",
        "after",
        "of budget, predicted",
        f"J a batch, {found.labels}",
    ]
    head += ["of dense", "of budget", "parameters, M", "MACs, G", "batches", "seconds"]
    return table(head, rows)


def _counted(cell: Cell, what: str, unit: float) -> str:
    return f"{cell.row[what]['result'] / unit:.2f}" if what in cell.row else ""


def missing(found: Experiment) -> str:
    """The cells without a network, by reason; methods together that miss the same ones for it."""
    rows = [cell for cell in found.cells if cell.missing is not None]
    seeds: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in rows:
        seeds.setdefault((str(cell.missing), cell.method), {}).setdefault(cell.budget, []).append(str(cell.seed))
    methods: dict[tuple[str, str], list[str]] = {}
    for (why, method), budgets in seeds.items():
        where = "; ".join(f"{budget} of seed {', '.join(which)}" for budget, which in budgets.items())
        methods.setdefault((why, where), []).append(method)
    lines = [f"- {', '.join(names)} at {where}: {why.rstrip('.')}." for (why, where), names in methods.items()]
    return "\n".join([f"Missing, {len(rows)} of {len(found.cells)} cells:\n", *lines]) if rows else ""
