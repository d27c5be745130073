"""The figures of the evidence: accuracy against joules, and the widths that methods chose.

PYTHONPATH=src python3 benchmarks/evidence_figures.py    # as benchmarks/write_results.py does
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
from evidence_data import AFTER, BEFORE, OURS, Experiment, experiments, mean_and_spread, share_of
from evidence_page import FIGURES, FOLDER, accuracy_figure, widths_figure
from plotting import GREY, in_rows, save_figure, scale_of

from ecc.report.chart_parts import COLOURS, OTHER_METHOD, SHAPES, Row, make_chart, stronger_for_ecc, x_axis, y_axis

PAPER = f"{OURS} (paper)"
COLUMNS = 3
SCRATCH = "scratch"
PANEL: Row = {"width": 260, "height": 150}
"""Size of a panel of widths."""


def draw(found: Experiment, folder: Path) -> list[Path]:
    """Both figures of an experiment."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds = len({cell.seed for cell in found.cells if cell.share is not None})
    over = f"mean, least and most of {seeds} seeds" if seeds > 1 else "one seed"
    title = f"{found.title}; {over}; {found.record['device']}"
    return [
        save_figure(accuracy(found), folder / accuracy_figure(found), title),
        save_figure(widths(found), folder / widths_figure(found), f"{found.title}: channels kept, mean over seeds"),
    ]


def encodings(methods: list[str]) -> list[Any]:
    """Colour, shape and dashes as on the pages of `ecc report`; a variant of ECC, such as "ecc (paper)", is dashed."""
    known = {method: method.partition(" ")[0] for method in methods}
    known = {method: name if name in SHAPES else OTHER_METHOD[0] for method, name in known.items()}
    colours = {method: COLOURS[name][0] for method, name in known.items()}
    shapes = {method: SHAPES[name] for method, name in known.items()}
    dashes = {method: [4, 3] if " " in method else [1, 0] for method in methods}
    return [
        alt.Color("method", type="nominal", scale=scale_of(colours)),
        alt.Shape("method", type="nominal", scale=scale_of(shapes)),
        alt.StrokeDash("method", type="nominal", scale=scale_of(dashes)),
    ]


def drawn(found: Experiment) -> list[str]:
    """All methods, and of the variants of ECC the paper's; those that were tried lie on top of it, and are in tables."""
    return [name for name in found.methods if name in (OURS, PAPER, *found.baselines)]


def accuracy(found: Experiment) -> Any:
    """Score against measured joules, after and before tuning: a line a method, mean and range over seeds."""
    return alt.hconcat(*(accuracy_panel(found, when) for when in (AFTER, BEFORE)))


def accuracy_panel(found: Experiment, when: str) -> Any:
    """Score against measured joules, after or before fine-tuning."""
    methods = [name for name in drawn(found) if name != SCRATCH or when == AFTER]  # before tuning: random weights
    rows: list[Row] = []
    for method in methods:
        points = [point for budget in found.budgets if (point := _point(found, method, budget, when))]
        rows += [{"method": method, "share": x, "score": y, "low": y - a, "high": y + b} for x, y, a, b in points]
    trained = list(found.dense_trained().values()) if when == AFTER else []
    dense, name = mean_and_spread(trained or found.dense()), "dense, same training" if trained else "dense"
    level = 100 * dense[0] if dense else None
    domain, note = _cut_off(rows, level)
    scale = alt.Scale(zero=False) if domain is None else alt.Scale(domain=domain)
    ticks = [100 * share_of(budget) for budget in found.budgets]
    title = f"joules, % of dense ({found.labels})"
    x = x_axis("share", title, scale=alt.Scale(zero=False), axis=alt.Axis(values=ticks))
    y, low = (y_axis(name, f"{found.score_name} [%]", scale=scale) for name in ("score", "low"))
    colour, shape, dash = encodings(drawn(found))
    chart = make_chart(rows)
    parts = [
        chart.mark_rule(clip=True).encode(x, low, alt.Y2("high"), colour),
        chart.mark_line(clip=True).encode(x, y, colour, dash, strokeWidth=stronger_for_ecc(2.6, 1.3)),
        chart.mark_point(filled=True, size=45, opacity=1, clip=True).encode(x, y, colour, shape),
    ]
    if level is not None:
        line = make_chart([{"score": level, "text": name}])
        parts.append(line.mark_rule(strokeDash=[2, 3], stroke=GREY).encode(y))
        parts.append(line.mark_text(align="left", dy=-6, fill=GREY).encode(y, x=alt.value(2), text="text:N"))
    if note:
        text = make_chart([{"text": note}]).mark_text(align="right", fill=COLOURS[SCRATCH][0])
        parts.append(text.encode(x=alt.value(395), y=alt.value(272), text="text:N"))
    return alt.layer(*parts).properties(title=when, width=400, height=280)


def _point(found: Experiment, method: str, budget: str, when: str) -> tuple[float, float, float, float] | None:
    """Joules, mean score, and how far the seeds lie below and above it; only of networks that were measured."""
    cells = [cell for cell in found.at(method, budget) if cell.share is not None and when in cell.scores]
    share = mean_and_spread([cell.share for cell in cells if cell.share is not None])
    scores = [100 * cell.scores[when] for cell in cells]
    mean = mean_and_spread(scores)
    if share is None or mean is None:
        return None
    return 100 * share[0], mean[0], max(mean[0] - min(scores), 0.0), max(max(scores) - mean[0], 0.0)


def _cut_off(rows: list[Row], dense: float | None) -> tuple[list[float] | None, str]:
    """Limits of the axis and a note if a control is so far below the others that it leaves the figure."""
    below = [row["low"] for row in rows if row["method"] == SCRATCH]
    ends = [row[key] for row in rows if row["method"] != SCRATCH for key in ("low", "high")]
    ends += [] if dense is None else [dense]
    if not ends or not below:
        return None, ""
    room = 0.06 * (max(ends) - min(ends)) or 0.5
    if min(below) >= min(ends) - 4 * room:
        return None, ""
    return [min(ends) - 4 * room, max(ends) + room], f"{SCRATCH} goes down to {min(below):.1f}"


# ---------------------------------------------------------------- widths


def middle(found: Experiment) -> str:
    """50 %, or else the budget in the middle."""
    return "50%" if "50%" in found.budgets else found.budgets[len(found.budgets) // 2]


def widths(found: Experiment) -> Any:
    """Channels kept in each group: ECC at all budgets, then ECC beside each baseline at one."""
    budget, full = middle(found), found.record.get("full_widths", {})
    # scratch has the widths of ECC.
    others = [name for name in drawn(found) if name not in (OURS, SCRATCH) and kept(found, name, budget, full)]
    panels = [widths_panel(found)]
    for name in others:
        chart = make_chart([*width_rows(found, name, budget), *width_rows(found, OURS, budget)])
        method_colour, _, dash = encodings([name, OURS])
        line = chart.mark_line(point=alt.OverlayMarkDef(size=12)).encode(*width_axes(found), method_colour, dash)
        panels.append(line.properties(title=f"{name} beside {OURS}, {budget}", **PANEL))
    return in_rows(panels, COLUMNS)


def widths_panel(found: Experiment) -> Any:
    """Channels that ECC keeps in each group, at all budgets."""
    rows = [row for one in found.budgets for row in width_rows(found, OURS, one)]
    colour = alt.Color("budget", type="ordinal", sort=list(found.budgets), scale=alt.Scale(scheme="viridis"))
    line = make_chart(rows).mark_line().encode(*width_axes(found), colour)
    return line.properties(title=f"{OURS}, all budgets", **PANEL)


def width_axes(found: Experiment) -> tuple[Any, Any]:
    """Groups, and channels kept of them."""
    full = found.record.get("full_widths", {})
    scale = alt.Scale(domain=[0, 100]) if full else alt.Scale(zero=True)
    y = y_axis("kept", "channels kept [%]" if full else "channels kept", scale=scale)
    return x_axis("group", "group of channels, from the input on"), y


def width_rows(found: Experiment, method: str, budget: str) -> list[Row]:
    """The channels that a method keeps at one budget."""
    shares = enumerate(kept(found, method, budget, found.record.get("full_widths", {})))
    return [{"method": method, "budget": budget, "group": group, "kept": share} for group, share in shares]


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
