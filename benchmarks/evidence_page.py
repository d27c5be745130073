"""Accuracy against joules, in markdown: a section of RESULTS.md and the long tables of results/evidence.md.

Both come from results/evidence/e1.json to e4.json (see evidence.py), those that are there. benchmarks/write_results.py
writes and checks the pages, and has the figures drawn.
"""

from __future__ import annotations

from pathlib import Path

from evidence_facts import (
    AFTER,
    ALIKE,
    BEFORE,
    OVER,
    Experiment,
    at_equal_joules,
    experiments,
    match,
    share_of,
    verdicts,
)
from evidence_tables import cells_table, joules_table, matches_table, missing, scores_table, table_2, within
from evidence_words import INTRODUCTION, about, evenly_cut, forms, of_the_model, tried
from result_tables import RESULTS, origin_of, table

UNFINISHED = "not finished"
FOLDER, FIGURES, LONG = RESULTS / "evidence", RESULTS / "figures", RESULTS / "evidence.md"


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
        parts += [f"## {one.title}", about(one), cells_table(one), missing(one), *_origins(one)]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_short(found: list[Experiment]) -> str:
    """Where ECC is ahead of its best rival, and where it is behind."""
    budgets = sorted({budget for one in found for budget in one.budgets}, key=share_of, reverse=True)
    rows = [[budget, *(_side(one, budget) for one in found)] for budget in budgets]
    head = (
        "ECC beside the best of its rivals, in points after tuning, and in brackets at equal joules; *level* where "
        "seeds disagree about who is ahead:"
    )
    return f"{head}\n\n" + table(["budget", *(one.title.partition(":")[0] for one in found)], rows)


def _side(found: Experiment, budget: str) -> str:
    one, equal = match(found, budget, AFTER), at_equal_joules(found, budget)
    if budget not in found.budgets:
        return ""
    if one.points is None:
        return "no score"
    side = "level" if one.is_level else "behind" if one.points < -ALIKE else "ahead"
    return f"{side}, {one.points:+.2f}" + ("" if equal is None else f" ({equal:+.2f})")


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
    head = (
        f"The goals, set before the runs: {counts}. They are about means over seeds, however near these are. Numbers "
        "are points, by which ECC leads its best rival."
    )
    return f"{head}\n\n" + table(["goal", "experiment", "", "numbers"], rows)


def one_experiment(found: Experiment) -> str:
    """Title, figures, tables and origin."""
    parts = [f"### {found.title}", about(found), evenly_cut(found), of_the_model(found), forms(found)]
    parts += [f"![{found.score_name} against joules](results/figures/{accuracy_figure(found)})"]
    mark = f"; † spends over {OVER:.0%} of its budget" if any(cell.is_over for cell in found.cells) else ""
    parts += [f"{found.score_name} after tuning{mark}:", scores_table(found, AFTER)]
    parts += [f"{found.score_name} before tuning:", scores_table(found, BEFORE)]
    if found.score_name == "mean IoU":
        joules = f"joules a batch ({found.labels}, as shares of one dense network)"
        parts += [f"As the paper's Table 2: mean IoU in per cent, and {joules}:", table_2(found)]
    parts += ["ECC beside the best rival, after tuning, over the seeds that both have:", matches_table(found)]
    parts += [within(found), joules_table(found)]
    parts += [f"![channels kept](results/figures/{widths_figure(found)})", missing(found), *_origins(found)]
    return "\n\n".join(part for part in parts if part)


def accuracy_figure(found: Experiment) -> str:
    return f"evidence-{found.name}-accuracy.svg"


def widths_figure(found: Experiment) -> str:
    return f"evidence-{found.name}-widths.svg"


def _origins(found: Experiment) -> list[str]:
    dates = sorted({cell.row["date"] for cell in found.cells if "date" in cell.row})
    several = [f"Cells of this grid are of {', '.join(dates)}."] if len(dates) > 1 else []
    return [*several, origin_of(f"evidence/{found.path.name}", found.record["environment"])]
