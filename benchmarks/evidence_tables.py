"""The tables of the evidence: scores, matches, joules, and every cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from evidence_facts import (
    AFTER,
    BAND,
    BEFORE,
    OURS,
    Cell,
    Experiment,
    at_equal_joules,
    match,
    mean_and_spread,
    share_of,
)
from evidence_words import shown
from result_tables import table


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
    """Score and joules of every method at each budget; joules as if all had been weighed beside one dense network."""
    dense = [cell.weighed["dense_joules"] for cell in found.cells if cell.weighed]
    reference = statistics.median(dense) if dense else 0.0

    def one(method: str, budget: str) -> str:
        cells = found.at(method, budget)
        score = mean_and_spread([cell.scores[AFTER] for cell in cells if AFTER in cell.scores])
        joules = mean_and_spread([cell.share * reference for cell in cells if cell.share is not None])
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
        seeds = ", ".join(f"{each:+.2f}" for each in one.seed_points)
        equal = at_equal_joules(found, budget)
        shares = [_share(found.at(name, budget)) for name in (OURS, one.rival or "")]
        fair = "" if equal is None else f"{equal:+.2f}"
        rows.append([budget, ours, rival, points, seeds, *shares, fair, ", ".join(one.absent)])
    head = ["budget", "ECC", "best rival", "points ahead", "by seed", "joules of dense, ECC", "and rival"]
    head += ["ahead at equal joules"]
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


def within(found: Experiment) -> str:
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
        weighed = ["", "", "", ""]
        if cell.weighed:
            weighed = [f"{cell.weighed['joules']:.4g}", f"{cell.share:.1%}", f"{cell.of_budget:.1%}"]
            weighed += [f"{cell.weighed['relative_ci']:.1%}" if "relative_ci" in cell.weighed else ""]
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
                *(f"{batches[key]:,.0f}" if key in batches else "" for key in ("total", "lineage")),
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
    head += ["of dense", "of budget", "±", "parameters, M", "MACs, G", "batches", "to the winner", "seconds"]
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
