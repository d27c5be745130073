"""Figures of a run over time: its loss and score, the live energy against its schedule, and the dual variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .charts import AT_BUDGET, SHOWN, STEP, Spec, by_method, figure, logarithmic, names, quantity, scale_of, tip, var

Facts = Mapping[str, Any]
_BATCHES = "batches drawn"
UNSEEN = {"type": "point", "filled": True, "size": 70, "opacity": 0}


def _watched(facts: Facts) -> list[dict[str, Any]]:
    """The cells whose time is drawn: those of the first seed, lest curves lie on each other."""
    return [cell for cell in facts["cells"] if cell["seed"] == facts["seeds"][0]]


def _rows(facts: Facts, name: str) -> list[dict[str, Any]]:
    return [
        {"method": cell["method"], "budget": cell["budget"], **row} for cell in _watched(facts) for row in cell[name]
    ]


def _seed(facts: Facts) -> str:
    return f" Seed {facts['seeds'][0]}." if len(facts["seeds"]) > 1 else ""


def _over(facts: Facts, *, solve: bool = False) -> Spec:
    """The axis of time: that of the whole run, or of the solve alone, the same in every figure of its kind."""
    phases = [phase for cell in _watched(facts) for phase in cell["phases"]]
    chosen = [phase for phase in phases if phase["phase"] == "prune"] if solve else phases
    start = min((phase["start"] for phase in chosen), default=0.0) if solve else 0.0
    end = max((phase["end"] for phase in chosen), default=start + 1.0)
    return quantity("batches", _BATCHES, scale={"domain": [start, end], "nice": False, "zero": False})


def _phases(facts: Facts) -> list[Spec]:
    """Where a phase begins: a thin line, and its name at the top, which comes second."""
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


def loss(facts: Facts) -> dict[str, Any] | None:
    """The training loss, phase after phase."""
    rows = [row for row in _rows(facts, "loss") if row["loss"] > 0]
    if len(rows) < 2:
        return None
    x, y = _over(facts), quantity("loss", "training loss", **logarithmic([row["loss"] for row in rows], room=0.12))
    hover = tip(("method", "method"), ("phase", "phase"), ("batches", "batches", "d"), ("loss", "loss", ".4~g"))
    colour, phase = by_method(facts["methods"]), {"field": "phase", "type": "nominal"}
    layers = [*_phases(facts), *_curve(rows, {"x": x, "y": y, "color": colour, "detail": phase}, hover)]
    caption = (
        "Mean between two lines of the history, on a logarithmic axis. From the solve on, agreement with the dense"
    )
    caption += f" network is part of the loss, where distillation is on.{_seed(facts)}"
    return figure("loss", "Loss", caption, 220, {"layer": layers})


def _curve(rows: list[dict[str, Any]], encoding: Spec, hover: list[Spec]) -> list[Spec]:
    """A line, and unseen points on it that answer when they are hovered."""
    data: Spec = {"data": {"values": rows}, "transform": [SHOWN, AT_BUDGET]}
    return [
        {**data, "mark": {"type": "line", "strokeWidth": 2}, "encoding": encoding},
        {**data, "mark": UNSEEN, "encoding": {**encoding, "tooltip": hover}},
    ]


def score(facts: Facts) -> dict[str, Any] | None:
    """The three scores at the times at which they were taken."""
    cell = facts["cells"][0]
    if facts["kind"] != "run" or not cell["scores"] or not cell["phases"]:
        return None
    ends = {phase["phase"]: phase["end"] for phase in cell["phases"]}
    last = cell["phases"][-1]["end"]
    times = {"dense": ends.get("pretrain", 0.0), "before": ends.get("prune", last), "after": last}
    words = {"dense": "dense", "before": "cut", "after": "fine-tuned"}
    rows = [
        {"batches": times[name], "score": value, "name": words[name], "text": f"{words[name]} {value:.4f}"}
        for name, value in cell["scores"].items()
    ]
    x, y = _over(facts), quantity("score", "test score", scale={"zero": False, "padding": 18}, axis={"tickCount": 4})
    encoding: Spec = {"x": x, "y": y}
    point = {"type": "point", "filled": True, "size": 80, "fill": var("accent"), "opacity": 1}
    text = {"type": "text", "align": {"expr": "datum.batches < 1 ? 'left' : 'right'"}, "dx": -2, "dy": -12}
    layers: list[Spec] = [
        *_phases(facts)[:1],  # the points have names of their own
        {
            "data": {"values": rows},
            "mark": {"type": "line", "stroke": var("faint"), "strokeWidth": 1.5},
            "encoding": encoding,
        },
        {
            "data": {"values": rows},
            "mark": point,
            "encoding": {**encoding, "tooltip": tip(("name", "network"), ("score", "score", ".4f"))},
        },
        {"data": {"values": rows}, "mark": text, "encoding": {**encoding, "text": {"field": "text"}}},
    ]
    caption = "On the test data, which nothing was chosen by: the dense network, the cut one, and the fine-tuned one."
    return figure("score", "Score", caption, 130, {"layer": layers})


def descent(facts: Facts) -> dict[str, Any] | None:
    """The live energy against its schedule, and the weighings; None where a method logs no descent."""
    rows = _rows(facts, "descent")
    if len(rows) < 2:
        return None
    batch = facts["batch"] or 1
    factor, unit = scale_of(max(row["spent"] for row in rows) / batch, "J")
    scaled = batch * factor
    for row in rows:
        row |= {"spent": row["spent"] / scaled, "target": None if row["target"] is None else row["target"] / scaled}
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
    x, y = _over(facts, solve=True), quantity("spent", f"energy per item [{unit}]", scale={"zero": True})
    hover = tip(("batches", "batches", "d"), ("spent", f"live, predicted, {unit}", ".4~g"))
    hover += tip(("target", f"schedule, {unit}", ".4~g"))
    colour = by_method(facts["methods"])
    label = ", ".join(sorted({row["label"] for row in weighed}))
    layers: list[Spec] = [
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
            "mark": {"type": "line", "strokeWidth": 2.5, "interpolate": "step-after"},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "data": {"values": rows},
            "transform": [*chosen, {"filter": "isValid(datum.target)"}],
            "mark": {"type": "line", "stroke": var("ink"), "strokeDash": [2, 4], "strokeWidth": 1.5},
            "encoding": {"x": x, "y": {**y, "field": "target"}},
        },
        {
            "data": {"values": rows},
            "transform": chosen,
            "mark": UNSEEN,
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
    caption = "Line: energy of what is alive, predicted. Dotted: what the schedule allows. "
    caption += f"Diamonds: put on the scales ({label}). " if weighed else ""
    return figure("descent", "Energy against its schedule", caption.strip() + _seed(facts), 260, {"layer": layers})


def duals(facts: Facts) -> dict[str, Any] | None:
    """z of Eq. (4) over the solve."""
    rows = _rows(facts, "duals")
    if len(rows) < 2:
        return None
    x, y = (
        _over(facts, solve=True),
        quantity("dual", "z", axis={"labelExpr": "format(datum.value, '~s')", "titleFontStyle": "italic"}),
    )
    hover = tip(("method", "method"), ("batches", "batches", "d"), ("dual", "z", ".4~g"))
    layers = _curve(rows, {"x": x, "y": y, "color": by_method(facts["methods"])}, hover)
    budgets = [row for row in facts["cells"][0]["resources"] if row["limit"] is not None]
    more = "joule of budget" if len(budgets) < 2 else "share of the dense network's costs"
    caption = f"z: what one more {more} would be worth, in units of the loss.{_seed(facts)}"
    return figure("duals", "Dual variable of the energy", caption, 170, {"layer": layers})


def width_duals(facts: Facts) -> dict[str, Any] | None:
    """y of Eq. (4), one row a group."""
    rows = [row for row in _rows(facts, "width_duals") if row["dual"] > 0]
    if not rows:
        return None
    times = sorted({row["batches"] for row in rows})
    since = dict(zip(times, [2 * times[0] - times[1] if len(times) > 1 else times[0] - 1, *times[:-1]], strict=True))
    for row in rows:
        row["since"] = since[row["batches"]]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    time = _over(facts, solve=True)
    time["axis"]["grid"] = False  # it would shine through
    scale = {"type": "log", "range": [0.08, 1]}
    spec: Spec = {
        "data": {"values": rows},
        "mark": {"type": "rect", "fill": var("accent")},
        "encoding": {
            "x": time,
            "x2": {"field": "since"},
            "y": names("group", None, groups),
            "opacity": {"field": "dual", "type": "quantitative", "scale": scale, "legend": None},
            "tooltip": tip(("group", "group"), ("batches", "batches", "d"), ("dual", "y", ".4~g")),
        },
    }
    caption = "y: what one more channel of each group would be worth, in units of the loss."
    caption += " The stronger the colour, the more."
    return figure("width-duals", "Dual variables of the widths", caption, STEP * len(groups), spec)
