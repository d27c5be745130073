"""Tables of the evidence: scores, comparisons, energy, and every run."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from evidence_data import (
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
from evidence_text import shown
from result_tables import table


def _grid(found: Experiment, cell: Callable[[str, str], str]) -> str:
    """One row per method, one column per budget."""
    requested = {(one.method, one.budget) for one in found.cells}
    rows = [
        [method, *(cell(method, budget) if (method, budget) in requested else "" for budget in found.budgets)]
        for method in found.methods
    ]
    return table(["method", *found.budgets], rows)


def scores_table(found: Experiment, when: str) -> str:
    """Mean ± standard deviation over seeds, and the number of seeds where some are missing.

    The best of each budget is bold; variants of ECC and runs that exceed the budget are not considered.
    """
    requested = len({cell.seed for cell in found.cells})

    def is_over(method: str, budget: str) -> bool:
        return any(cell.is_over for cell in found.at(method, budget))

    def mean(method: str, budget: str) -> float | None:
        pair = mean_and_spread(list(found.by_seed(method, budget, when).values()))
        is_form = method not in (OURS, *found.baselines)
        return None if pair is None or is_form or is_over(method, budget) else pair[0]

    def one(method: str, budget: str) -> str:
        scores = list(found.by_seed(method, budget, when).values())
        text = shown(mean_and_spread(scores)) + (
            f" ({len(scores)} of {requested})" if 0 < len(scores) < requested else ""
        )
        text += " †" if is_over(method, budget) else ""
        means = [one for name in found.methods if (one := mean(name, budget)) is not None]
        return f"**{text}**" if means and mean(method, budget) == max(means) else text

    return _grid(found, one)


def table_2(found: Experiment) -> str:
    """Score and energy of every method at each budget; energy is scaled to the median dense network."""
    dense = [cell.measured["dense_joules"] for cell in found.cells if cell.measured]
    reference = statistics.median(dense) if dense else 0.0

    def one(method: str, budget: str) -> str:
        cells = found.at(method, budget)
        score = mean_and_spread([cell.scores[AFTER] for cell in cells if AFTER in cell.scores])
        joules = mean_and_spread([cell.share * reference for cell in cells if cell.share is not None])
        if score is None:
            return "missing"
        return f"{100 * score[0]:.1f}, " + ("not measured" if joules is None else f"{joules[0]:.3g} J")

    return _grid(found, one)


def matches_table(found: Experiment) -> str:
    """ECC and the best baseline at each budget."""
    rows = []
    for budget in found.budgets:
        one = match(found, budget, AFTER)
        ours = "missing" if one.ours is None else f"{100 * one.ours:.2f}"
        baseline = "missing" if one.theirs is None else f"{one.baseline}, {100 * one.theirs:.2f}"
        points = "" if one.points is None else f"{one.points:+.2f}"
        seeds = ", ".join(f"{each:+.2f}" for each in one.seed_points)
        equal = at_equal_joules(found, budget)
        shares = [_share(found.at(name, budget)) for name in (OURS, one.baseline or "")]
        fair = "" if equal is None else f"{equal:+.2f}"
        rows.append([budget, ours, baseline, points, seeds, *shares, fair, ", ".join(one.absent)])
    head = [
        "budget",
        "ECC",
        "best baseline",
        "difference, points",
        "by seed",
        "ECC: energy / dense",
        "baseline: energy / dense",
    ]
    head += ["difference at equal energy"]
    return table([*head, "without a score"], rows)


def _share(cells: list[Cell]) -> str:
    pair = mean_and_spread([cell.share for cell in cells if cell.share is not None])
    return "" if pair is None else f"{pair[0]:.1%}"


def joules_table(found: Experiment) -> str:
    """Measured energy relative to the budget, by method."""
    rows = []
    for method in found.methods:
        shares = _of_budgets([cell for cell in found.cells if cell.method == method])
        inside = sum(BAND[0] <= share <= BAND[1] for share in shares)
        over = sum(share > BAND[1] for share in shares)
        ends = [f"{min(shares):.1%}", f"{max(shares):.1%}"] if shares else ["", ""]
        rows.append([method, str(len(shares)), str(inside), str(over), *ends])
    return table(["method", "measured runs", "97 to 100 %", "above 100 %", "min / budget", "max / budget"], rows)


def _of_budgets(cells: list[Cell]) -> list[float]:
    return [cell.of_budget for cell in cells if cell.of_budget is not None]


def within(found: Experiment) -> str:
    shares = _of_budgets(list(found.cells))
    finished = sum(cell.missing is None for cell in found.cells)
    if not shares:
        return f"None of the {finished} results was measured."
    inside = sum(BAND[0] <= share <= BAND[1] for share in shares)
    worst = max(shares, key=lambda share: max(share - BAND[1], BAND[0] - share))
    unmeasured = f" {finished - len(shares)} were not measured." if finished > len(shares) else ""
    return (
        f"{inside} of {len(shares)} results use {BAND[0]:.0%} to {BAND[1]:.0%} of their budget ({found.labels}); the "
        f"farthest uses {worst:.1%}.{unmeasured}"
    )


def cells_table(found: Experiment) -> str:
    """Every finished run."""
    rows = []
    for cell in sorted(found.cells, key=lambda one: (-share_of(one.budget), found.methods.index(one.method), one.seed)):
        if cell.missing is not None:
            continue
        reached, batches = cell.in_the_run, cell.row.get("batches", {})
        measured = ["", "", "", ""]
        if cell.measured:
            measured = [f"{cell.measured['joules']:.4g}", f"{cell.share:.1%}", f"{cell.of_budget:.1%}"]
            measured += ["" if (ci := cell.measured.get("relative_ci")) is None else f"{ci:.1%}"]
        rows.append(
            [
                cell.method,
                cell.budget,
                str(cell.seed),
                *(f"{100 * cell.scores[when]:.2f}" if when in cell.scores else "" for when in ("dense", BEFORE, AFTER)),
                "" if reached is None else f"{reached:.1%}",
                *measured,
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
        "pruned",
        "finetuned",
        "in the run / budget",
        f"J per batch, {found.labels}",
    ]
    head += [
        "/ dense",
        "/ budget",
        "95 % CI",
        "parameters, M",
        "MACs, G",
        "batches",
        "batches of the result",
        "seconds",
    ]
    return table(head, rows)


def _counted(cell: Cell, what: str, unit: float) -> str:
    return f"{cell.row[what]['result'] / unit:.2f}" if what in cell.row else ""


def missing(found: Experiment) -> str:
    """Runs without a result, by reason."""
    rows = [cell for cell in found.cells if cell.missing is not None]
    seeds: dict[tuple[str, str], dict[str, list[str]]] = {}
    for cell in rows:
        seeds.setdefault((str(cell.missing), cell.method), {}).setdefault(cell.budget, []).append(str(cell.seed))
    methods: dict[tuple[str, str], list[str]] = {}
    for (why, method), budgets in seeds.items():
        where = "; ".join(f"{budget}, seed {', '.join(which)}" for budget, which in budgets.items())
        methods.setdefault((why, where), []).append(method)
    lines = [f"- {', '.join(names)} at {where}: {why.rstrip('.')}." for (why, where), names in methods.items()]
    return "\n".join([f"Runs without a result, {len(rows)} of {len(found.cells)}:\n", *lines]) if rows else ""
