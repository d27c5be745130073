"""Figures of what came out: score against joules, widths, and energy by layer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import AT_BUDGET, SHOWN, Spec, by_method, figure, names, quantity, scale_of, shape_of, tip, var
from .page import energy_row

Facts = Mapping[str, Any]
MOST_LAYERS = 40
STEP = 22  # pixels a row of a chart with names

# ---------------------------------------------------------------- score against joules


def tradeoff(facts: Facts) -> dict[str, Any] | None:
    """Score against joules, of all methods and budgets; None for a single run."""
    cells = [cell for cell in facts["cells"] if cell["status"] == "finished" and energy_row(cell) and cell["scores"]]
    if facts["kind"] != "grid" or not cells:
        return None
    batch = facts["batch"] or 1
    rows = [(cell, energy_row(cell)) for cell in cells]
    resource, unit = rows[0][1]["resource"], rows[0][1]["unit"]  # type: ignore[index]  # filtered above
    share = batch if resource == "energy" else 1
    factor, shown = scale_of(max(row["dense"] for _, row in rows if row) / share, unit)
    single: list[dict[str, Any]] = []
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell, row in rows:
        for when in ("before", "after"):
            if row is None or when not in cell["scores"]:
                continue
            point = {
                "method": cell["method"],
                "budget": cell["budget"],
                "when": when,
                "seed": cell["seed"],
                "cost": row["result"] / share / factor,
                "score": cell["scores"][when],
            }
            single.append(point)
            grouped.setdefault((cell["method"], cell["budget"], when), []).append(point)
    means = [_mean_point(key, points) for key, points in grouped.items()]
    means.sort(key=lambda point: (point["method"] == "ecc", point["cost"]))  # what comes last is drawn on top
    dense = [cell["scores"]["dense"] for cell in cells if "dense" in cell["scores"]]
    at = {"filter": "datum.when === when"}
    x = quantity("cost", f"{resource} per item [{shown}], {', '.join(facts['labels'])}", scale={"zero": False})
    if resource != "energy":
        x["axis"]["title"] = f"{resource} [{shown}]".replace(" []", "")
    y = quantity("score", "test score", scale={"zero": False, "nice": True})
    colour = by_method(facts["methods"])
    hover = tip(("method", "method"), ("budget", "budget"), ("cost", shown or resource, ".4~g"))
    hover += tip(("score", "score", ".4f"), ("spread", "± over seeds", ".4f"), ("seeds", "seeds"))
    layers: list[Spec] = [
        {
            "data": {"values": single},
            "transform": [at, SHOWN],
            "mark": {"type": "point", "filled": True, "size": 14, "opacity": 0.45},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "data": {"values": means},
            "transform": [at, SHOWN, {"filter": "datum.spread > 0"}],
            "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.8},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
        },
        {
            "data": {"values": means},
            "transform": [at, SHOWN],
            "mark": {"type": "line"},
            "encoding": {"x": x, "y": y, "color": colour, "strokeWidth": _ecc(3.2, 1.6)},
        },
        {
            "data": {"name": "points", "values": means},
            "transform": [at, SHOWN],
            "mark": {"type": "point", "filled": True, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "shape": shape_of(facts["methods"]),
                "size": _ecc(130, 75),
                "tooltip": hover,
            },
        },
    ]
    if dense:
        full = statistics.fmean(row["dense"] for _, row in rows if row) / share / factor
        layers += _dense({"cost": full, "score": statistics.fmean(dense), "text": "dense network"}, x, y, shown)
    return figure(
        "tradeoff",
        "Score against energy" if resource == "energy" else f"Score against {resource}",
        f"Mean of {len(facts['seeds'])} seeds, with the spread between them as an upright line and each run as a dot. "
        "Where no line is seen, the seeds agree, or there is one."
        if len(facts["seeds"]) > 1
        else "One run a point; with one seed there is no spread to show.",
        380,
        {"layer": layers},
    )


def _mean_point(key: tuple[str, str, str], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [point["score"] for point in points]
    mean, spread = statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
    return {
        "method": key[0],
        "budget": key[1],
        "when": key[2],
        "cost": statistics.fmean(point["cost"] for point in points),
        "score": mean,
        "spread": spread,
        "low": mean - spread,
        "high": mean + spread,
        "seeds": len(scores),
    }


def _ecc(strong: float, other: float) -> Spec:
    """ECC stands out from the others."""
    return {"condition": {"test": "datum.method === 'ecc'", "value": strong}, "value": other}


def _dense(row: Mapping[str, Any], x: Spec, y: Spec, unit: str) -> list[Spec]:
    """Where everything starts: a hollow point, with its name beside it and a line to compare with."""
    data = {"data": {"values": [row]}}
    hover = tip(("text", "network"), ("cost", unit, ".4~g"), ("score", "score", ".4f"))
    point = {"type": "point", "stroke": var("ink"), "fill": var("paper"), "strokeWidth": 2, "size": 90, "opacity": 1}
    name = {"type": "text", "align": "right", "baseline": "bottom", "dy": -9, "dx": 6, "fill": var("ink")}
    return [
        {**data, "mark": {"type": "rule", "strokeDash": [4, 4], "opacity": 0.6}, "encoding": {"y": y}},
        {**data, "mark": point, "encoding": {"x": x, "y": y, "tooltip": hover}},
        {**data, "mark": name, "encoding": {"x": x, "y": y, "text": {"field": "text"}}},
    ]


# ---------------------------------------------------------------- widths and layers


def widths(facts: Facts) -> dict[str, Any] | None:
    """What is left of each group: the paper's Figure 6."""
    cells = [cell for cell in facts["cells"] if cell["widths"]]
    if not cells:
        return None
    groups = [row["group"] for row in cells[0]["widths"]]
    what = cells[0]["what"]
    title = "Layer widths" if what == "channels" else "Weights left"
    caption = f"{what.capitalize()} that are left in each group, of those that the dense network has there"
    if facts["kind"] == "run":
        rows = [
            {**row, "text": f"{row['kept']:,} of {row['full']:,}", "share": row["kept"] / row["full"]}
            for row in cells[0]["widths"]
        ]
        hover = tip(("group", "group"), ("text", what), ("share", "kept", ".1%"))
        return figure(
            "widths",
            title,
            f"{caption} (faint).",
            STEP * len(rows),
            _bars(rows, groups, "group", "kept", "full", what, hover),
        )
    order = {group: number for number, group in enumerate(groups)}
    means: dict[tuple[str, str, str], list[float]] = {}
    for cell in cells:
        for row in cell["widths"]:
            key = (cell["method"], cell["budget"], row["group"])
            means.setdefault(key, []).append(row["kept"] / row["full"])
    rows = [
        {
            "method": method,
            "budget": budget,
            "group": group,
            "order": order[group],
            "share": statistics.fmean(shares),
        }
        for (method, budget, group), shares in means.items()
        if group in order
    ]
    x = quantity("share", f"{what} kept", scale={"domain": [0, 1]}, axis={"format": "%"})
    hover = tip(("method", "method"), ("budget", "budget"), ("group", "group"), ("share", "kept", ".1%"))
    return figure(
        "widths", title, f"{caption}. Mean over seeds, at one budget.", (STEP + 2) * len(groups),
        _dots(facts, rows, groups, "group", x, hover, joined="order"),
    )  # fmt: skip


def layers(facts: Facts) -> dict[str, Any] | None:
    """Joules of each layer before and after; None where nothing coefficients them."""
    cells = [cell for cell in facts["cells"] if cell["layers"]]
    if not cells:
        return None
    batch = facts["batch"] or 1
    largest = sorted(cells[0]["layers"], key=lambda row: -row["dense"])[:MOST_LAYERS]
    order = [row["layer"] for row in cells[0]["layers"] if row in largest]
    factor, unit = scale_of(max(row["dense"] for row in largest) / batch, "J")
    left_out = len(cells[0]["layers"]) - len(order)
    caption = (
        "Before (faint) and after, as the energy model shares the joules out among the layers: predicted, not measured."
    )
    if cells[0]["what"] == "weights":
        caption = (
            "Before (faint) and after, as the analytic platform coefficients the weights of each layer: estimated."
        )
    caption += f" The {len(order)} largest; {left_out} are smaller." if left_out else ""
    title, axis = "Energy by layer", f"energy per item [{unit}]"
    if facts["kind"] == "run":
        rows = [
            {
                "layer": row["layer"],
                "dense": row["dense"] / batch / factor,
                "result": row["result"] / batch / factor,
                "text": _change(row),
            }
            for row in cells[0]["layers"]
            if row["layer"] in order
        ]
        hover = tip(("layer", "layer"), ("dense", f"before, {unit}", ".4~g"), ("result", f"after, {unit}", ".4~g"))
        spec = _bars(rows, order, "layer", "result", "dense", axis, [*hover, *tip(("text", "change"))])
        return figure("layers", title, caption, STEP * len(rows), spec)
    found: dict[tuple[str, str, str], list[float]] = {}
    dense = {row["layer"]: row["dense"] / batch / factor for row in cells[0]["layers"]}
    for cell in cells:
        for row in cell["layers"]:
            if row["layer"] in order:
                key = (cell["method"], cell["budget"], row["layer"])
                found.setdefault(key, []).append(row["result"] / batch / factor)
    points = [
        {"method": method, "budget": budget, "layer": layer, "result": statistics.fmean(joules), "dense": dense[layer]}
        for (method, budget, layer), joules in found.items()
    ]
    hover = tip(("method", "method"), ("budget", "budget"), ("layer", "layer"))
    hover += tip(("dense", f"before, {unit}", ".4~g"), ("result", f"after, {unit}", ".4~g"))
    spec = _dots(facts, points, order, "layer", quantity("result", axis), hover)
    tick = {
        "data": {"values": [{"layer": layer, "dense": dense[layer]} for layer in order]},
        "mark": {"type": "bar", "fill": var("line"), "height": {"band": 0.62}},
        "encoding": {"x": quantity("dense", axis), "y": names("layer", None, order)},
    }
    spec["layer"].insert(0, tick)
    return figure("layers", title, f"{caption} Mean over seeds.", (STEP + 2) * len(order), spec)


def _change(row: Mapping[str, Any]) -> str:
    share = row["result"] / row["dense"] - 1
    return f"{100 * share:+.0f} %".replace("-", "\N{MINUS SIGN}") if abs(share) >= 0.005 else "±0 %"


def _bars(
    rows: list[dict[str, Any]], order: list[str], name: str, front: str, back: str, title: str, hover: list[Spec]
) -> Spec:
    """What is left, before what there was; the text behind the longer bar."""
    y = names(name, None, order)
    room = {"domain": [0, 1.22 * max(row[back] for row in rows)], "nice": False}  # for the text, on a phone too
    x = quantity(front, title, scale=room)
    bar = {"type": "bar", "height": {"band": 0.62}, "cornerRadiusEnd": 2}
    return {
        "data": {"values": rows},
        "layer": [
            {"mark": {**bar, "fill": var("faint")}, "encoding": {"y": y, "x": {**x, "field": back}, "tooltip": hover}},
            {"mark": {**bar, "fill": var("accent")}, "encoding": {"y": y, "x": x, "tooltip": hover}},
            {
                "mark": {"type": "text", "align": "left", "dx": 6},
                "encoding": {"y": y, "x": {**x, "field": back}, "text": {"field": "text"}},
            },
        ],
    }


def _dots(
    facts: Facts,
    rows: list[dict[str, Any]],
    order: list[str],
    name: str,
    x: Spec,
    hover: list[Spec],
    joined: str | None = None,
) -> Spec:
    """One dot a method in each row; the dots of a method can be joined, in the order of a field."""
    y = names(name, None, order)
    colour = by_method(facts["methods"])
    layers: list[Spec] = []
    if joined:
        down = {"field": joined, "type": "quantitative"}
        encoding = {"x": x, "y": y, "color": colour, "order": down, "strokeWidth": _ecc(2.6, 1.2)}
        layers.append({"mark": {"type": "line", "opacity": 0.75}, "encoding": encoding})
    encoding = {"x": x, "y": y, "color": colour, "shape": shape_of(facts["methods"]), "size": _ecc(120, 70)}
    layers.append(
        {"mark": {"type": "point", "filled": True, "opacity": 0.95}, "encoding": {**encoding, "tooltip": hover}}
    )
    # The filters stand with each layer: others may lie beside them that have no methods.
    rows = sorted(rows, key=lambda row: row["method"] == "ecc")  # what comes last is drawn on top
    return {"layer": [{"data": {"values": rows}, "transform": [SHOWN, AT_BUDGET], **layer} for layer in layers]}
