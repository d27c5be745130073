"""Figures of a run over time: its loss and score, the live energy against its schedule, and the dual variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .charts import AT_BUDGET, SHOWN, STEP, Spec, by_method, figure, names, quantity, scale_of, tip, var

Facts = Mapping[str, Any]
_BATCHES = "batches drawn"


def time_figures() -> tuple[Callable[[Facts], dict[str, Any] | None], ...]:
    """The makers, in the order of the page; each gives None where the facts have nothing to draw."""
    return _descent, _loss, _duals, _width_duals


def _watched(facts: Facts) -> list[dict[str, Any]]:
    """The cells whose time is drawn: those of the first seed, lest curves lie on each other."""
    return [cell for cell in facts["cells"] if cell["seed"] == facts["seeds"][0]]


def _rows(facts: Facts, name: str) -> list[dict[str, Any]]:
    return [
        {"method": cell["method"], "budget": cell["budget"], **row} for cell in _watched(facts) for row in cell[name]
    ]


def _seed(facts: Facts) -> str:
    return f" Seed {facts['seeds'][0]}." if len(facts["seeds"]) > 1 else ""


def _over(facts: Facts, end: float | None = None) -> Spec:
    """The axis of time: the same in every figure of a run, so that they can be read one below the other."""
    ends = [phase["end"] for cell in _watched(facts) for phase in cell["phases"]]
    scale = {"domain": [0, end or max(ends, default=1)], "nice": False}
    return quantity("batches", _BATCHES, scale=scale)


def _phases(facts: Facts) -> list[Spec]:
    """Where a phase begins: a thin line, and its name at the top."""
    if facts["kind"] != "run":
        return []
    rows = facts["cells"][0]["phases"]
    x = {**_over(facts), "field": "start"}
    return [
        {
            "data": {"values": [row for row in rows if row["start"] > 0]},
            "mark": {"type": "rule", "stroke": var("faint")},
            "encoding": {"x": x},
        },
        {
            "data": {"values": rows},
            "mark": {"type": "text", "align": "left", "baseline": "top", "dx": 5, "fontSize": 11},
            "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "phase"}},
        },
    ]


def _loss(facts: Facts) -> dict[str, Any] | None:
    rows = [row for row in _rows(facts, "loss") if row["loss"] > 0]
    if len(rows) < 2:
        return None
    x, y = _over(facts), quantity("loss", "training loss", scale={"type": "log"}, axis={"format": "~g"})
    hover = tip(("method", "method"), ("phase", "phase"), ("batches", "batches", "d"), ("loss", "loss", ".4~g"))
    line: Spec = {
        "data": {"values": rows},
        "transform": [SHOWN, AT_BUDGET],
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {
            "x": x,
            "y": y,
            "color": by_method(facts["methods"]),
            "detail": {"field": "phase", "type": "nominal"},
        },
    }
    dots = {**line, "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0}}
    dots["encoding"] = {**line["encoding"], "tooltip": hover}
    caption = "Mean loss between two lines of the history, on a logarithmic axis; from the solve on, the dense network's"
    return figure(
        "loss", "Loss", f"{caption} word is part of it.{_seed(facts)}", 220, {"layer": [*_phases(facts), line, dots]}
    )


def _descent(facts: Facts) -> dict[str, Any] | None:
    rows = _rows(facts, "descent")
    if len(rows) < 2:
        return None
    batch = facts["batch"] or 1
    factor, unit = scale_of(max(row["spent"] for row in rows) / batch, "J")
    scaled = batch * factor
    for row in rows:
        row |= {"spent": row["spent"] / scaled, "target": row["target"] / scaled}
    weighed = [
        {**row, "weighed": row["weighed"] / scaled} for row in _rows(facts, "weighings") if row["batches"] is not None
    ]
    limits = [
        {"method": cell["method"], "budget": cell["budget"], "limit": row["limit"] / scaled, "text": "budget"}
        for cell in _watched(facts)
        for row in cell["resources"]
        if row["resource"] == "energy" and row["limit"] and cell["descent"]
    ]
    chosen = [SHOWN, AT_BUDGET]
    x, y = _over(facts), quantity("spent", f"energy an item [{unit}]", scale={"zero": True})
    hover = tip(("batches", "batches", "d"), ("spent", f"live, predicted, {unit}", ".4~g"))
    hover += tip(("target", f"schedule, {unit}", ".4~g"))
    colour = by_method(facts["methods"])
    label = ", ".join(sorted({row["label"] for row in weighed}))
    layers: list[Spec] = [
        *_phases(facts),
        {
            "data": {"values": limits},
            "transform": chosen,
            "mark": {"type": "rule", "strokeWidth": 1.5, "stroke": var("good")},
            "encoding": {"y": {**y, "field": "limit"}},
        },
        {
            "data": {"values": limits},
            "transform": chosen,
            "mark": {"type": "text", "align": "right", "baseline": "top", "dy": 5, "fill": var("good")},
            "encoding": {"y": {**y, "field": "limit"}, "x": {"value": {"expr": "width"}}, "text": {"field": "text"}},
        },
        {
            "data": {"values": rows},
            "transform": chosen,
            "mark": {"type": "line", "stroke": var("soft"), "strokeDash": [5, 4], "strokeWidth": 1.5},
            "encoding": {"x": x, "y": {**y, "field": "target"}},
        },
        {
            "data": {"values": rows},
            "transform": chosen,
            "mark": {"type": "line", "strokeWidth": 2.5, "interpolate": "step-after"},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "data": {"values": rows},
            "transform": chosen,
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0},
            "encoding": {"x": x, "y": y, "tooltip": hover},
        },
        {
            "data": {"values": weighed},
            "transform": chosen,
            "mark": {"type": "point", "filled": True, "size": 90, "fill": var("ink"), "opacity": 1, "shape": "diamond"},
            "encoding": {
                "x": x,
                "y": {**y, "field": "weighed"},
                "tooltip": tip(("step", "step of the solve"), ("weighed", f"{label}, {unit}", ".4~g"))
                + tip(("error", "error of the model", "+.2%")),
            },
        },
    ]
    caption = "Line: energy of the channels that are alive, predicted. Dashed: what the schedule allows. "
    caption += f"Diamonds: put on the scales ({label}). " if weighed else ""
    return figure("descent", "Energy against its schedule", caption.strip() + _seed(facts), 260, {"layer": layers})


def _duals(facts: Facts) -> dict[str, Any] | None:
    rows = _rows(facts, "duals")
    if len(rows) < 2:
        return None
    x, y = _over(facts), quantity("dual", "z", axis={"format": "~s", "titleFontStyle": "italic"})
    line: Spec = {
        "data": {"values": rows},
        "transform": [SHOWN, AT_BUDGET],
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {"x": x, "y": y, "color": by_method(facts["methods"])},
    }
    dots = {**line, "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0}}
    dots["encoding"] = {**line["encoding"], "tooltip": tip(("batches", "batches", "d"), ("dual", "z", ".4~g"))}
    caption = f"What one more joule of budget would be worth, in units of the loss.{_seed(facts)}"
    return figure("duals", "Dual variable of the energy", caption, 170, {"layer": [*_phases(facts), line, dots]})


def _width_duals(facts: Facts) -> dict[str, Any] | None:
    rows = [row for row in _rows(facts, "width_duals") if row["dual"] > 0]
    if not rows:
        return None
    times = sorted({row["batches"] for row in rows})
    following = dict(zip(times, [*times[1:], 2 * times[-1] - times[-2] if len(times) > 1 else times[-1] + 1], strict=True))
    for row in rows:
        row["until"] = following[row["batches"]]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    scale = {"type": "log", "range": [0.08, 1]}
    spec: Spec = {
        "data": {"values": rows},
        "mark": {"type": "rect", "fill": var("accent")},
        "encoding": {
            "x": _over(facts),
            "x2": {"field": "until"},
            "y": names("group", None, groups),
            "opacity": {"field": "dual", "type": "quantitative", "scale": scale, "legend": None},
            "tooltip": tip(("group", "group"), ("batches", "batches", "d"), ("dual", "y", ".4~g")),
        },
    }
    caption = "What one more channel of each group would be worth, in units of the loss: the stronger the colour, the more."
    return figure("width-duals", "Dual variables of the widths", caption, STEP * len(groups), spec)
