"""The figures of the evidence: accuracy against joules, and the widths that methods chose.

PYTHONPATH=src python3 benchmarks/evidence_figures.py    # as benchmarks/write_results.py does
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evidence_data import AFTER, BEFORE, OURS, Experiment, experiments, mean_and_spread, share_of
from evidence_page import FIGURES, FOLDER, accuracy_figure, widths_figure
from plotting import pyplot, save_figure

from ecc.report.charts import COLOURS, OTHER_METHOD

PAPER = f"{OURS} (paper)"
MARKERS = {"ecc": "o", "netadapt": "s", "amc": "^", "eap": "P", "lcp": "D", "uniform": "v", "greedy": ">"}
MARKERS |= {"scratch": "<"}
GREY = "#777777"
COLUMNS = 3
SCRATCH = "scratch"


def draw(found: Experiment, folder: Path) -> list[Path]:
    """Both figures of an experiment."""
    plots = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    return [
        save_figure(accuracy(found, plots), folder / accuracy_figure(found), plots),
        save_figure(widths(found, plots), folder / widths_figure(found), plots),
    ]


def style(method: str) -> dict[str, Any]:
    """As on the pages of `ecc report`; a variant of ECC, such as "ecc (paper)", is dashed."""
    name, _, variant = method.partition(" ")
    known = name if name in MARKERS else OTHER_METHOD[0]
    ours = method == OURS
    return {
        "color": COLOURS[known][0],
        "marker": MARKERS[known],
        "ls": "--" if variant else "-",
        "mfc": "white" if variant else COLOURS[known][0],
        "lw": 2.2 if ours else 1.2,
        "ms": 6 if ours else 4.5,
        "zorder": 4 if ours else 3,
        "label": method,
    }


def drawn(found: Experiment) -> list[str]:
    """All methods, and of the variants of ECC the paper's; those that were tried lie on top of it, and are in tables."""
    return [name for name in found.methods if name in (OURS, PAPER, *found.baselines)]


def accuracy(found: Experiment, plots: Any) -> Any:
    """Score against measured joules, after and before tuning: a line a method, mean and range over seeds."""
    figure, axes = plots.subplots(1, 2, figsize=(10.4, 4.0), layout="constrained")
    dense = mean_and_spread(found.dense())
    for axis, when in zip(axes, (AFTER, BEFORE), strict=True):
        ends = [100 * dense[0]] if dense else []
        below: list[float] = []
        for method in drawn(found):
            if method == SCRATCH and when == BEFORE:
                continue  # random weights
            points = [point for budget in found.budgets if (point := _point(found, method, budget, when))]
            if points:
                across, mean, low, high = zip(*points, strict=True)
                axis.errorbar(across, mean, (low, high), capsize=2, elinewidth=1, **style(method))
                (below if method == SCRATCH else ends).extend(one[1] - one[2] for one in points)
                ends.extend(one[1] + one[3] for one in points if method != SCRATCH)
        if dense:
            axis.axhline(100 * dense[0], color=GREY, lw=0.8, ls=":", zorder=1)
            axis.annotate("dense", (0.01, 100 * dense[0]), xycoords=("axes fraction", "data"), va="bottom",
                          fontsize=8, color=GREY)  # fmt: skip
        axis.set(title=when, xlabel=f"joules, % of dense ({found.labels})", ylabel=f"{found.score_name} [%]")
        axis.set_xticks([100 * share_of(budget) for budget in found.budgets])
        axis.grid(alpha=0.25)
        _cut_off(axis, ends, below)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    seeds = len({cell.seed for cell in found.cells if cell.share is not None})
    over = f"mean, least and most of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{found.title}; {over}; {found.record['device']}", x=0.01, ha="left", fontsize=10)
    figure.set_facecolor("white")  # a page may be dark
    return figure


def _point(found: Experiment, method: str, budget: str, when: str) -> tuple[float, float, float, float] | None:
    """Joules, mean score, and how far the seeds lie below and above it; only of networks that were measured."""
    cells = [cell for cell in found.at(method, budget) if cell.share is not None and when in cell.scores]
    share = mean_and_spread([cell.share for cell in cells if cell.share is not None])
    scores = [100 * cell.scores[when] for cell in cells]
    mean = mean_and_spread(scores)
    if share is None or mean is None:
        return None
    return 100 * share[0], mean[0], max(mean[0] - min(scores), 0.0), max(max(scores) - mean[0], 0.0)


def _cut_off(axis: Any, ends: list[float], below: list[float]) -> None:
    """Lets a control that is far below the others leave the figure, and says so: the others are to be described apart."""
    if not ends or not below:
        return
    room = 0.06 * (max(ends) - min(ends)) or 0.5
    if min(below) < min(ends) - 4 * room:
        axis.set_ylim(min(ends) - 4 * room, max(ends) + room)
        axis.annotate(f"{SCRATCH} goes down to {min(below):.1f}", (0.99, 0.02), xycoords="axes fraction", ha="right",
                      fontsize=8, color=COLOURS[SCRATCH][0])  # fmt: skip


# ---------------------------------------------------------------- widths


def middle(found: Experiment) -> str:
    """50 %, or else the budget in the middle."""
    return "50%" if "50%" in found.budgets else found.budgets[len(found.budgets) // 2]


def widths(found: Experiment, plots: Any) -> Any:
    """Channels kept in each group: ECC at all budgets, then ECC beside each baseline at one."""
    budget, full = middle(found), found.record.get("full_widths", {})
    # scratch has the widths of ECC.
    others = [name for name in drawn(found) if name not in (OURS, SCRATCH) and kept(found, name, budget, full)]
    rows = -(-(len(others) + 1) // COLUMNS)
    size = (4.2 * COLUMNS, 2.5 * rows + 0.5)
    figure, grid = plots.subplots(rows, COLUMNS, figsize=size, layout="constrained", sharey=True, squeeze=False)
    axes = list(grid.flat)
    colours = plots.get_cmap("viridis_r")
    for number, one in enumerate(found.budgets):
        if shares := kept(found, OURS, one, full):
            colour = colours(0.1 + 0.9 * number / max(1, len(found.budgets) - 1))
            axes[0].plot(shares, "-", color=colour, lw=1.3, label=one)
    axes[0].set_title(f"{OURS}, all budgets", loc="left", fontsize=9)
    axes[0].legend(frameon=False, fontsize=7, ncols=3)
    for axis, name in zip(axes[1:], others, strict=False):
        for method in (name, OURS):
            axis.plot(kept(found, method, budget, full), **style(method) | {"ms": 3, "lw": 1.3})
        axis.set_title(f"{name} beside {OURS}, {budget}", loc="left", fontsize=9)
        axis.legend(frameon=False, fontsize=7)
    for axis in axes[1 + len(others) :]:
        axis.set_axis_off()
    for axis in axes[: 1 + len(others)]:
        axis.grid(alpha=0.25)
        axis.set(xlabel="group of channels, from the input on")
    for row in grid:
        row[0].set_ylabel("channels kept [%]" if full else "channels kept")
    axes[0].set_ylim((0, 135 if full else None))  # room for the legend
    if full:
        axes[0].set_yticks(range(0, 101, 25))
    figure.suptitle(f"{found.title}: channels kept, mean over seeds", x=0.01, ha="left", fontsize=10)
    figure.set_facecolor("white")
    return figure


def kept(found: Experiment, method: str, budget: str, full: dict[str, int]) -> list[float]:
    """Of each group, in per cent of the dense network where its widths are known; channels otherwise."""
    cells = [cell.widths for cell in found.at(method, budget) if cell.widths]
    names = list(full) or [name for one in cells[:1] for name in one]
    return [
        sum(100 * one[name] / full[name] if full else one[name] for one in cells) / len(cells)
        for name in names
        if cells and all(name in one for one in cells)
    ]


def main() -> None:
    for found in experiments(FOLDER):
        print(*draw(found, FIGURES), sep="\n")


if __name__ == "__main__":
    main()
