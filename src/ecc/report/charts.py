"""Charts of the page, made by Altair.

The browser draws a chart on the page, where it can be hovered and filtered; vl-convert draws it to SVG, PNG and PDF.
Colours are CSS variables, so that a page switches between light and dark without drawing again; files get the light
values. Names that come from a run are data: they are never part of a Vega expression.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict

import altair as alt
from altair.utils import schemapi

from ecc.formatting import percent, score_text, si_scale
from ecc.run_records import SCORES

from .chart_parts import (
    AT_BUDGET,
    IS_SHOWN,
    ROW_HEIGHT,
    Figure,
    Row,
    css,
    log_axis,
    main_resource,
    make_chart,
    make_figure,
    method_colour,
    method_shape,
    name_axis,
    per_item,
    stronger_for_ecc,
    tooltips,
    x_axis,
    y_axis,
)  # fmt: skip
from .records import GroupWidth, LayerCost, Report, Run

MAX_LAYERS = 40


def figures_of(report: Report, *, validate: bool = False) -> list[Figure]:
    """All figures that the data allow, in the order of the page.

    `validate` checks every chart against the Vega-Lite schema, which takes four times as long.
    """
    makers = (tradeoff, widths, layers, cost, loss, score, dual, width_duals, predictions, learning_curve)
    with schemapi.debug_mode(validate):
        made = [figure for make in makers if (figure := make(report)) is not None]
    for figure in made:
        controls: Row = {"hidden": [], "score": "finetuned", "budget": report.first_budget}
        figure.spec["params"] = [{"name": name, "value": value} for name, value in controls.items()]
    return made


# ---------------------------------------------------------------- results


def tradeoff(report: Report) -> Figure | None:
    """Score against cost of all methods and budgets; None for a single run."""
    main = main_resource(report)
    runs = [run for run in report.finished if run.scores and run.main]
    if report.kind != "grid" or main is None or not runs:
        return None
    divisor, unit, title = per_item(main, report)
    single = [
        {
            "method": run.method,
            "budget": run.budget,
            "score_name": name,
            "cost": run.main.result / divisor,
            "score": run.scores[name],
        }
        for run in runs
        for name in SCORES[1:]
        if name in run.scores and run.main is not None and run.main.result is not None
    ]
    means = _means_over_seeds(single)
    methods, colour, tests = report.methods, method_colour(report.methods), ("datum.score_name === score", IS_SHOWN)
    x = x_axis("cost", f"{title}, {', '.join(report.labels)}", scale=alt.Scale(zero=False))
    scale = alt.Scale(zero=False, nice=True)
    y = y_axis("score", _score_title(report), scale=scale)
    tips = tooltips(("method", "method"), ("budget", "budget"), ("cost", unit or main.resource, ".4~g"))
    tips += tooltips(("score", "score", ".4f"), ("std", "std over seeds", ".4f"), ("seeds", "seeds"))
    low = y_axis("low", _score_title(report), scale=scale)
    parts = [
        make_chart(single, *tests).mark_point(filled=True, size=14, opacity=0.45).encode(x, y, colour),
        make_chart(means, *tests, "datum.std > 0")
        .mark_rule(strokeWidth=1.5, opacity=0.8)
        .encode(x, low, alt.Y2("high"), colour),
        make_chart(means, *tests).mark_line().encode(x, y, colour, strokeWidth=stronger_for_ecc(3.2, 1.6)),
        make_chart(means, *tests)
        .mark_point(filled=True, opacity=1)
        .encode(x, y, colour, method_shape(methods), size=stronger_for_ecc(130, 75), tooltip=tips),
    ]
    if dense := [run.scores["dense"] for run in runs if "dense" in run.scores]:
        row = {"cost": main.dense / divisor, "score": statistics.fmean(dense), "text": "dense network"}
        tips = tooltips(("text", "network"), ("cost", unit or main.resource, ".4~g"), ("score", "score", ".4f"))
        point: Row = {"stroke": css("ink"), "fill": css("paper"), "strokeWidth": 2, "size": 90, "opacity": 1}
        text: Row = {"align": "right", "baseline": "bottom", "dy": -9, "dx": 6, "fill": css("ink")}
        parts += [
            make_chart([row]).mark_rule(strokeDash=[4, 4], opacity=0.6).encode(y),
            make_chart([row]).mark_point(**point).encode(x, y, tooltip=tips),
            make_chart([row]).mark_text(**text).encode(x, y, text="text:N"),
        ]
    caption = "One run per point."
    if len(report.seeds) > 1:
        caption = f"Mean over {len(report.seeds)} seeds; vertical lines show ±1 std, small dots the single runs."
    return make_figure("tradeoff", f"Score against {main.title}", caption, 380, *parts)


def _score_title(report: Report) -> str:
    """Title of an axis of scores. That of a perplexity is its logarithm, so that higher is better in every chart."""
    return "test score" if report.metric == "score" else "log-likelihood per token"


def _means_over_seeds(points: Sequence[Row]) -> list[Row]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for point in points:
        groups.setdefault((point["method"], point["budget"], point["score_name"]), []).append(point)
    rows = []
    for (method, budget, name), found in groups.items():
        scores = [point["score"] for point in found]
        mean, std = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
        row = {"method": method, "budget": budget, "score_name": name, "score": mean, "std": std, "seeds": len(scores)}
        rows.append({**row, "cost": statistics.fmean(p["cost"] for p in found), "low": mean - std, "high": mean + std})
    return sorted(rows, key=lambda row: (row["method"] == "ecc", row["cost"]))  # the last is drawn on top


def widths(report: Report) -> Figure | None:
    """Channels that are left in each group (Figure 6 of the paper)."""
    runs = [run for run in report.runs if run.widths]
    if not runs:
        return None
    order = [row.group for row in runs[0].widths]
    things = runs[0].counted_things
    title = "Layer widths" if things == "channels" else "Remaining weights"
    caption = f"{things.capitalize()} kept in each group"
    if report.kind == "run":
        rows = [{**asdict(row), "text": _kept_text(row), "ratio": row.kept / row.full} for row in runs[0].widths]
        tips = tooltips(("group", "group"), ("text", things), ("ratio", "kept", ".1%"))
        parts = _bars(rows, name_axis("group", order), "kept", "full", things, tips)
        return make_figure(
            "widths", title, f"{caption}; the dense network is shown faintly.", ROW_HEIGHT * len(rows), *parts
        )
    found = [{"group": row.group, "ratio": row.kept / row.full, **_keys(run)} for run in runs for row in run.widths]
    rows = _means([row for row in found if row["group"] in order], "group", "ratio", order)
    x = x_axis("ratio", f"{things} kept", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
    tips = tooltips(("method", "method"), ("budget", "budget"), ("group", "group"), ("ratio", "kept", ".1%"))
    parts = _dots(report, rows, x, name_axis("group", order), tips, joined=True)
    return make_figure(
        "widths", title, f"{caption}, at one budget.{_mean_note(report)}", (ROW_HEIGHT + 2) * len(order), *parts
    )


def _kept_text(row: GroupWidth) -> str:
    if not row.kept:
        return "removed"
    return f"{row.kept:,} of {row.full:,}" + (f" \N{MULTIPLICATION SIGN} {row.channels:,}" if row.channels > 1 else "")


def layers(report: Report) -> Figure | None:
    """Joules of each layer before and after; None without an energy model."""
    runs = [run for run in report.runs if run.layers]
    if not runs:
        return None
    largest = sorted(runs[0].layers, key=lambda row: -row.dense)[:MAX_LAYERS]
    shown = [row for row in runs[0].layers if row in largest]
    order = [row.layer for row in shown]
    batch = report.batch or 1
    factor, unit = si_scale(max(row.dense for row in shown) / batch, "J")
    divisor, axis = batch * factor, f"energy per item [{unit}]"
    source = "energy model (predicted)" if not runs[0].is_unstructured else "analytic platform (estimated)"
    caption = f"Energy before (faint) and after, attributed to layers by the {source}."
    if others := len(runs[0].layers) - len(order):
        caption += f" The {len(order)} largest layers; {others} smaller ones are left out."
    numbers = (("dense", f"before, {unit}", ".4~g"), ("result", f"after, {unit}", ".4~g"))
    if report.kind == "run":
        rows = [
            {"layer": row.layer, "dense": row.dense / divisor, "result": row.result / divisor, "text": _change(row)}
            for row in shown
        ]
        tips = tooltips(("layer", "layer"), *numbers, ("text", "change"))
        parts = _bars(rows, name_axis("layer", order), "result", "dense", axis, tips)
        return make_figure("layers", "Energy by layer", caption, ROW_HEIGHT * len(rows), *parts)
    dense = {row.layer: row.dense / divisor for row in shown}
    found = [
        {"layer": row.layer, "result": row.result / divisor, **_keys(run)}
        for run in runs
        for row in run.layers
        if row.layer in dense
    ]
    rows = [{**row, "dense": dense[row["layer"]]} for row in _means(found, "layer", "result", order)]
    tips = tooltips(("method", "method"), ("budget", "budget"), ("layer", "layer"), *numbers)
    background = (
        make_chart([{"layer": name, "dense": value} for name, value in dense.items()])
        .mark_bar(fill=css("line"), height={"band": 0.62})
        .encode(x_axis("dense", axis), name_axis("layer", order))
    )
    parts = [background, *_dots(report, rows, x_axis("result", axis), name_axis("layer", order), tips)]
    return make_figure("layers", "Energy by layer", caption + _mean_note(report), (ROW_HEIGHT + 2) * len(order), *parts)


def _mean_note(report: Report) -> str:
    return " Mean over seeds." if len(report.seeds) > 1 else ""


def _keys(run: Run) -> Row:
    return {"method": run.method, "budget": run.budget}


def _means(rows: Sequence[Row], name: str, value: str, order: Sequence[str]) -> list[Row]:
    """Means over seeds, per method, budget and name."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"], row[name]), []).append(row[value])
    places = {one: i for i, one in enumerate(order)}
    return [
        {"method": method, "budget": budget, name: one, "order": places[one], value: statistics.fmean(found)}
        for (method, budget, one), found in groups.items()
    ]


def _change(row: LayerCost) -> str:
    change = row.result / row.dense - 1
    return percent(change, 0, sign=True).replace("-", "\N{MINUS SIGN}")


def _bars(rows: list[Row], y: alt.Y, front: str, back: str, title: str, tips: list[alt.Tooltip]) -> list[alt.Chart]:
    """The result in front of the dense network, with the text at the end of the longer bar."""
    scale = alt.Scale(domain=[0, 1.22 * max(row[back] for row in rows)], nice=False)  # room for the text
    bar: Row = {"height": {"band": 0.62}, "cornerRadiusEnd": 2}
    chart, x = make_chart(rows), x_axis(back, title, scale=scale)
    return [
        chart.mark_bar(fill=css("faint"), **bar).encode(x, y, tooltip=tips),
        chart.mark_bar(fill=css("accent"), **bar).encode(x_axis(front, title, scale=scale), y, tooltip=tips),
        chart.mark_text(align="left", dx=6).encode(x, y, text="text:N"),
    ]


def _dots(
    report: Report, rows: list[Row], x: alt.X, y: alt.Y, tips: list[alt.Tooltip], *, joined: bool = False
) -> list[alt.Chart]:
    """One dot per method and name; `joined` connects the dots of a method."""
    rows = sorted(rows, key=lambda row: row["method"] == "ecc")  # the last is drawn on top
    chart, colour = make_chart(rows, IS_SHOWN, AT_BUDGET), method_colour(report.methods)
    line = chart.mark_line(opacity=0.75).encode(
        x, y, colour, order=alt.Order("order", type="quantitative"), strokeWidth=stronger_for_ecc(2.6, 1.2)
    )
    points = chart.mark_point(filled=True, opacity=0.95).encode(
        x, y, colour, method_shape(report.methods), size=stronger_for_ecc(120, 70), tooltip=tips
    )
    return [line, points] if joined else [points]


# ---------------------------------------------------------------- the run over time


def _first_seed(report: Report) -> list[Run]:
    return [run for run in report.runs if run.seed == report.seeds[0]] if report.seeds else []


def _points(report: Report, name: str) -> list[Row]:
    return [{**_keys(run), **asdict(point)} for run in _first_seed(report) for point in getattr(run.curves, name)]


def _seed_note(report: Report) -> str:
    return f" Seed {report.seeds[0]}." if len(report.seeds) > 1 else ""


def _time(report: Report, field: str = "batches", *, prune_only: bool = False, grid: bool = True) -> alt.X:
    """The time axis: that of the whole run, or of the prune phase."""
    phases = [phase for run in _first_seed(report) for phase in run.curves.phases]
    phases = [phase for phase in phases if phase.phase == "prune" or not prune_only]
    start = min((phase.start for phase in phases), default=0.0) if prune_only else 0.0
    end = max((phase.end for phase in phases), default=start + 1.0)
    scale = alt.Scale(domain=[start, end], nice=False, zero=False)
    return x_axis(field, "training batches", scale=scale, axis=alt.Axis(grid=grid))


def _phase_marks(report: Report, *, text: bool = True) -> list[alt.Chart]:
    """A vertical line where a phase begins, and its name at the top."""
    if report.kind != "run":
        return []
    rows = [asdict(phase) for phase in report.runs[0].curves.phases]
    x = _time(report, "start")
    marks = [make_chart([row for row in rows if row["start"] > 0]).mark_rule(stroke=css("faint")).encode(x)]
    name = make_chart(rows).mark_text(align="left", baseline="top", dx=5, fontSize=11)
    marks += [name.encode(x, y=alt.value(0), text="phase:N")] if text else []
    return [mark for mark in marks if mark.data.values]


def _curve(rows: list[Row], x: alt.X, y: alt.Y, report: Report, tips: list[alt.Tooltip]) -> list[alt.Chart]:
    """A line, with invisible points that show the tooltip."""
    chart, colour = make_chart(rows, IS_SHOWN, AT_BUDGET), method_colour(report.methods)
    detail: Row = {"detail": "phase:N"} if "phase" in rows[0] else {}
    points = chart.mark_point(filled=True, size=70, opacity=0).encode(x, y, colour, tooltip=tips, **detail)
    return [chart.mark_line(strokeWidth=2).encode(x, y, colour, **detail), points]


def loss(report: Report) -> Figure | None:
    """The training loss of all phases."""
    rows = [row for row in _points(report, "loss") if row["loss"] > 0]
    if len(rows) < 2:
        return None
    y = y_axis("loss", "training loss", **log_axis([row["loss"] for row in rows], room=0.12))
    tips = tooltips(("method", "method"), ("phase", "phase"), ("batches", "batches", "d"), ("loss", "loss", ".4~g"))
    caption = (
        "Mean training loss on a logarithmic axis. From the prune phase on it includes the distillation loss, if any."
    )
    parts = [*_phase_marks(report), *_curve(rows, _time(report), y, report, tips)]
    return make_figure("loss", "Training loss", caption + _seed_note(report), 220, *parts)


def score(report: Report) -> Figure | None:
    """The scores of the dense, the pruned and the finetuned network."""
    run = report.runs[0] if report.runs else None
    if report.kind != "run" or run is None or not run.scores or not run.curves.phases:
        return None
    ends = {phase.phase: phase.end for phase in run.curves.phases}
    last = run.curves.phases[-1].end
    times = {"dense": ends.get("pretrain", 0.0), "pruned": ends.get("prune", last), "finetuned": last}
    rows = [
        {"batches": times[name], "score": value, "name": name, "text": f"{name} {score_text(value, run.metric)}"}
        for name, value in run.scores.items()
        if name in times
    ]
    if not rows:
        return None
    x, tips = _time(report), tooltips(("name", "network"), ("score", "score", ".4f"))
    y = y_axis("score", _score_title(report), scale=alt.Scale(zero=False, padding=24), axis=alt.Axis(tickCount=4))
    align: Row = {"expr": "datum.batches < 1 ? 'left' : 'right'"}
    parts = [
        *_phase_marks(report, text=False),
        make_chart(rows).mark_line(stroke=css("faint"), strokeWidth=1.5).encode(x, y),
        make_chart(rows).mark_point(filled=True, size=80, fill=css("accent"), opacity=1).encode(x, y, tooltip=tips),
        make_chart(rows)
        .mark_text(align=align, dx=-2, dy=alt.ExprRef("datum.name === 'pruned' ? 16 : -12"))
        .encode(x, y, text="text:N"),
    ]
    caption = "Score on the test data, which no choice depends on."
    return make_figure("score", "Test score", caption, 130, *parts)


def cost(report: Report) -> Figure | None:
    """Predicted cost during pruning, its schedule, and the measurements; None for methods that do not log it."""
    rows, main = _points(report, "cost"), main_resource(report)
    if len(rows) < 2 or main is None:
        return None
    divisor, unit, title = per_item(main, report)
    for row in rows:
        row["cost"] /= divisor
        row["target"] = None if row["target"] is None else row["target"] / divisor
    checks = [row for row in _points(report, "checks") if row["batches"] is not None]
    for row in checks:
        row["measured"] /= divisor
    limits = [
        {**_keys(run), "limit": row.limit / divisor, "text": "budget"}
        for run in _first_seed(report)
        for row in run.resources
        if row.resource == main.resource and row.limit and run.curves.cost
    ]
    tests = (IS_SHOWN, AT_BUDGET)
    x, label = _time(report, prune_only=True), ", ".join(sorted({row["label"] for row in checks}))
    tips = tooltips(
        ("batches", "batches", "d"), ("cost", f"predicted, {unit}", ".4~g"), ("target", f"schedule, {unit}", ".4~g")
    )
    check_tips = tooltips(
        ("step", "prune step"), ("measured", f"{label}, {unit}", ".4~g"), ("error", "prediction error", "+.2%")
    )

    def cost_axis(field: str) -> alt.Y:
        return y_axis(field, title, scale=alt.Scale(zero=True))

    right: Row = {"align": "right", "baseline": "top", "dy": 5, "fill": css("good")}
    diamond: Row = {"filled": True, "size": 90, "fill": css("ink"), "opacity": 1, "shape": "diamond"}
    parts = [
        make_chart(limits, *tests).mark_rule(strokeWidth=1.5, stroke=css("good")).encode(cost_axis("limit")),
        make_chart(limits, *tests)
        .mark_text(**right)
        .encode(cost_axis("limit"), x=alt.value({"expr": "width"}), text="text:N"),
        make_chart(rows, *tests)
        .mark_line(strokeWidth=2.5, interpolate="step-after")
        .encode(x, cost_axis("cost"), method_colour(report.methods)),
        make_chart(rows, *tests, "isValid(datum.target)")
        .mark_line(stroke=css("ink"), strokeDash=[2, 4], strokeWidth=1.5)
        .encode(x, cost_axis("target"), detail="method:N"),
        make_chart(rows, *tests).mark_point(filled=True, size=70, opacity=0).encode(x, cost_axis("cost"), tooltip=tips),
        make_chart(checks, *tests).mark_point(**diamond).encode(x, cost_axis("measured"), tooltip=check_tips),
    ]
    caption = f"Line: predicted {main.title} of the pruned network. Dotted: the schedule."
    caption += f" Diamonds: cost checks ({label})." if checks else ""
    parts = [part for part in parts if part.data.values]  # an empty layer would have no scale
    name = main.title[0].upper() + main.title[1:]
    return make_figure("cost", f"{name} during pruning", caption + _seed_note(report), 260, *parts)


def dual(report: Report) -> Figure | None:
    """The dual variable z of the budget (Eq. 4 of the paper)."""
    rows = _points(report, "dual")
    if len(rows) < 2:
        return None
    x = _time(report, prune_only=True)
    y = y_axis("dual", "z", axis=alt.Axis(labelExpr="format(datum.value, '~s')", titleFontStyle="italic"))
    tips = tooltips(("method", "method"), ("batches", "batches", "d"), ("dual", "z", ".4~g"))
    caption = f"z: the decrease of the loss per unit of additional budget.{_seed_note(report)}"
    return make_figure("dual", "Dual variable of the budget", caption, 170, *_curve(rows, x, y, report, tips))


def width_duals(report: Report) -> Figure | None:
    """The dual variables y of the widths (Eq. 4 of the paper), one row per group."""
    rows = [row for row in _points(report, "width_duals") if row["dual"] > 0]
    if not rows:
        return None
    times = sorted({row["batches"] for row in rows})
    before = [2 * times[0] - times[1] if len(times) > 1 else times[0] - 1, *times[:-1]]
    since = dict(zip(times, before, strict=True))
    rows = [{**row, "since": since[row["batches"]]} for row in rows]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    opacity = alt.Opacity("dual", type="quantitative", legend=None, scale=alt.Scale(type="log", range=[0.08, 1]))
    tips = tooltips(("group", "group"), ("batches", "batches", "d"), ("dual", "y", ".4~g"))
    chart = (
        make_chart(rows)
        .mark_rect(fill=css("accent"))
        .encode(
            _time(report, prune_only=True, grid=False),
            alt.X2("since"),
            name_axis("group", groups),
            opacity,
            tooltip=tips,
        )
    )
    caption = "y: the decrease of the loss per additional channel of a group. Stronger colours are larger values."
    return make_figure("width-duals", "Dual variables of the widths", caption, ROW_HEIGHT * len(groups), chart)


# ---------------------------------------------------------------- the energy model


def predictions(report: Report) -> Figure | None:
    """Predicted against measured cost, of the samples of the profile and of the checks during pruning."""
    main, model = main_resource(report), report.model
    checks = [
        {**_keys(run), "measured": check.measured, "predicted": check.predicted, "error": check.error}
        for run in report.runs
        for check in run.curves.checks
    ]
    samples: list[Row] = [
        {"measured": measured, "predicted": predicted, "error": predicted / measured - 1}
        for measured, predicted in (model.quality.held_out if model else ())
    ]
    if main is None or not (samples or checks):
        return None
    divisor, unit, title = per_item(main, report)
    for row in (*samples, *checks):
        row["measured"], row["predicted"] = row["measured"] / divisor, row["predicted"] / divisor
    values = [row[key] for row in (*samples, *checks) for key in ("measured", "predicted")]
    ends = [min(values), max(values)]
    labels = sorted({check.label for run in report.runs for check in run.curves.checks})
    label = ", ".join(labels) or (model.label if model else "")
    near = [0.95 * ends[0], 1.05 * ends[1]] if ends[1] < 1.001 * ends[0] else None  # else the axis shows rounding
    more: Row = (
        log_axis(ends) if ends[1] > 8 * ends[0] else {"scale": alt.Scale(zero=False, domain=near or alt.Undefined)}
    )
    x, y = x_axis("measured", f"{label} {title}", **more), y_axis("predicted", f"predicted {title}", **more)
    tips = tooltips(
        ("measured", f"{label}, {unit}", ".4~g"),
        ("predicted", f"predicted, {unit}", ".4~g"),
        ("error", "error", "+.2%"),
    )
    dashed: Row = {"stroke": css("soft"), "strokeWidth": 1, "strokeDash": [4, 4]}
    hollow: Row = {"stroke": css("soft"), "size": 26, "strokeWidth": 1, "opacity": 0.75}
    parts = [
        make_chart([{"measured": end, "predicted": end} for end in ends]).mark_line(**dashed).encode(x, y),
        make_chart(samples).mark_point(**hollow).encode(x, y, tooltip=tips),
        make_chart(checks, IS_SHOWN)
        .mark_point(filled=True, opacity=0.9, size=80)
        .encode(
            x, y, method_colour(report.methods), method_shape(report.methods),
            tooltip=[*tooltips(("method", "method"), ("budget", "budget")), *tips],
        ),
    ]  # fmt: skip
    caption = "The dashed line is a perfect prediction."
    caption += " Hollow: samples of the profile (cross-validated)." if samples else ""
    caption += f" Filled: networks during pruning ({label})." if checks else ""
    parts = [part for part in parts if part.data.values]
    return make_figure("predictions", f"Predicted against {label}", caption, 300, *parts)


def learning_curve(report: Report) -> Figure | None:
    """The error of the energy model by the number of samples."""
    model = report.model
    if model is None or len(model.quality.learning_curve) < 2:
        return None
    rows = [{"samples": samples, "error": error} for samples, error in model.quality.learning_curve]
    x = x_axis("samples", "samples of the profile", scale=alt.Scale(zero=False))
    y = y_axis("error", "mean cross-validated error", scale=alt.Scale(zero=True), axis=alt.Axis(format=".2~%"))
    tips = tooltips(("samples", "samples", "d"), ("error", "mean error", ".3~%"))
    parts = [
        make_chart(rows).mark_line(stroke=css("accent"), strokeWidth=2).encode(x, y, tooltip=tips),
        make_chart(rows).mark_point(filled=True, fill=css("accent"), opacity=1, size=60).encode(x, y, tooltip=tips),
    ]
    if model.quality.noise is not None:
        noise = make_chart([{"error": model.quality.noise, "text": "noise of one measurement"}])
        text: Row = {"align": "right", "baseline": "bottom", "dy": -4}
        parts.append(noise.mark_rule(strokeDash=[4, 4]).encode(y))
        parts.append(noise.mark_text(**text).encode(y, x=alt.value({"expr": "width"}), text="text:N"))
    caption = "Mean relative error on held-out samples, by the number of samples in the fit."
    return make_figure("learning-curve", "Learning curve of the energy model", caption, 300, *parts)
