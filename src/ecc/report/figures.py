"""Which figures a page has, and the figures as files for papers."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecc.errors import BadFile
from ecc.files import write_bytes, write_text

from .charts import (
    AT_BUDGET,
    CHOSEN,
    MOST_LAYERS,
    SHOWN,
    STEP,
    Spec,
    by_method,
    figure,
    for_file,
    names,
    quantity,
    scale_of,
    shape_of,
    tip,
    var,
)
from .timeline import time_figures

Facts = Mapping[str, Any]


def figures_of(facts: Facts) -> list[dict[str, Any]]:
    """All figures that the facts allow, in the order of the page."""
    makers = (_tradeoff, _widths, _layers, *time_figures(), _predictions, _learning)
    made = [made for make in makers if (made := make(facts)) is not None]
    chosen = [dict(one) for one in CHOSEN]
    chosen[2]["value"] = first_budget(facts)
    for one in made:
        one["spec"]["params"] = chosen
    return made


def first_budget(facts: Facts) -> str | None:
    """The budget that is shown first: the middle one; None where there is no choice."""
    budgets = facts["budgets"]
    return budgets[len(budgets) // 2] if len(budgets) > 1 else None


def energy_row(cell: Facts) -> dict[str, Any] | None:
    """Of its resources the energy, or what was asked for instead."""
    rows: list[dict[str, Any]] = cell["resources"]
    return next((row for row in rows if row["resource"] == "energy"), rows[0] if rows else None)


def draw_figures(facts: Facts, folder: str | Path) -> list[Path]:
    """Writes every figure as SVG and PNG.

    Raises:
        BadFile: If vl-convert is not installed, or the folder cannot be written to.
    """
    convert, folder = vl_convert(), Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot make the folder {folder}: {error.strerror}.") from None
    drawn = []
    for one in figures_of(facts):
        spec = json.dumps(for_file(one["spec"]))
        drawn += [folder / f"{one['name']}.svg", folder / f"{one['name']}.png"]
        write_text(drawn[-2], convert.vegalite_to_svg(spec))
        write_bytes(drawn[-1], convert.vegalite_to_png(spec, scale=3))
    return drawn


def vl_convert() -> Any:
    """The package that carries Vega-Lite, for pages and for files.

    Raises:
        BadFile: If it is not installed.
    """
    try:
        return importlib.import_module("vl_convert")
    except ImportError:
        raise BadFile("the page needs vl-convert; install it with: pip install 'ecc-compress[report]'.") from None


# ---------------------------------------------------------------- score against joules


def _tradeoff(facts: Facts) -> dict[str, Any] | None:
    cells = [cell for cell in facts["cells"] if cell["status"] == "finished" and energy_row(cell) and cell["scores"]]
    if facts["kind"] != "grid" or not cells:
        return None
    batch = facts["batch"] or 1
    rows = [(cell, energy_row(cell)) for cell in cells]
    resource, unit = rows[0][1]["resource"], rows[0][1]["unit"]  # type: ignore[index]  # filtered above
    share = batch if resource == "energy" else 1
    factor, shown = scale_of(max(row["dense"] for _, row in rows if row) / share, unit)
    single, grouped = [], {}
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
    dense = [cell["scores"]["dense"] for cell in cells if "dense" in cell["scores"]]
    at = {"filter": "datum.when === when"}
    x = quantity("cost", f"{resource} an item [{shown}], {', '.join(facts['labels'])}", scale={"zero": False})
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
            "name": "means",
            "data": {"values": means},
            "transform": [at, SHOWN],
            "mark": {"type": "line", "strokeWidth": {"expr": "2"}},
            "encoding": {"x": x, "y": y, "color": colour, "strokeWidth": _ecc(3.2, 1.6)},
        },
        {
            "data": {"name": "tradeoff_points", "values": means},
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
    layers[2]["mark"] = {"type": "line"}
    if dense:
        layers += _reference({"score": statistics.fmean(dense)}, "score", "dense network", y="score")
    return figure(
        "tradeoff",
        "Score against energy" if resource == "energy" else f"Score against {resource}",
        f"Mean of {len(facts['seeds'])} seeds with the spread between them as a line, and each run as a dot."
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


def _reference(row: Mapping[str, Any], field: str, text: str, *, y: str) -> list[Spec]:
    """A dashed line across the plot, with its name above its right end."""
    place = {"field": field, "type": "quantitative", "title": None}
    del y
    return [
        {"data": {"values": [row]}, "mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"y": place}},
        {
            "data": {"values": [row]},
            "mark": {"type": "text", "align": "right", "baseline": "bottom", "dy": -4, "text": text},
            "encoding": {"y": place, "x": {"value": {"expr": "width"}}},
        },
    ]


# ---------------------------------------------------------------- widths and layers


def _widths(facts: Facts) -> dict[str, Any] | None:
    cells = [cell for cell in facts["cells"] if cell["widths"] and cell["widths"][0]["full"]]
    if not cells:
        return None
    groups = [row["group"] for row in cells[0]["widths"]]
    what = cells[0]["what"]
    title = "Layer widths" if what == "channels" else "Weights left"
    caption = f"{what.capitalize()} that are left in each group, of those that the dense network has there."
    if facts["kind"] == "run":
        rows = [
            {**row, "text": f"{row['kept']:,} of {row['full']:,}", "share": row["kept"] / row["full"]}
            for row in cells[0]["widths"]
        ]
        hover = tip(("group", "group"), ("text", what), ("share", "kept", ".1%"))
        return figure("widths", title, caption, STEP * len(rows), _bars(rows, groups, "group", "kept", "full", what, hover))
    means: dict[tuple[str, str, str], list[float]] = {}
    for cell in cells:
        for row in cell["widths"]:
            key = (cell["method"], cell["budget"], row["group"])
            means.setdefault(key, []).append(row["kept"] / row["full"])
    rows = [
        {"method": method, "budget": budget, "group": group, "order": groups.index(group), "share": statistics.fmean(all_)}
        for (method, budget, group), all_ in means.items()
        if group in groups
    ]
    x = quantity("share", f"{what} kept", scale={"domain": [0, 1]}, axis={"format": "%"})
    hover = tip(("method", "method"), ("budget", "budget"), ("group", "group"), ("share", "kept", ".1%"))
    return figure(
        "widths", title, f"{caption} Mean over seeds, at one budget.", (STEP + 2) * len(groups),
        _dots(facts, rows, groups, "group", x, hover, joined="order"),
    )  # fmt: skip


def _layers(facts: Facts) -> dict[str, Any] | None:
    cells = [cell for cell in facts["cells"] if cell["layers"]]
    if not cells:
        return None
    batch = facts["batch"] or 1
    largest = sorted(cells[0]["layers"], key=lambda row: -row["dense"])[:MOST_LAYERS]
    order = [row["layer"] for row in cells[0]["layers"] if row in largest]
    factor, unit = scale_of(max(row["dense"] for row in largest) / batch, "J")
    left_out = len(cells[0]["layers"]) - len(order)
    caption = "Before and after, as the energy model shares the joules out among the layers: predicted, not measured."
    if cells[0]["what"] == "weights":
        caption = "Before and after, as the analytic platform prices the weights of each layer: estimated."
    caption += f" The {len(order)} largest; {left_out} are smaller." if left_out else ""
    title, axis = "Energy by layer", f"energy an item [{unit}]"
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
        {"method": method, "budget": budget, "layer": layer, "result": statistics.fmean(all_), "dense": dense[layer]}
        for (method, budget, layer), all_ in found.items()
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
    return figure("layers", title, f"{caption} Bars: dense.", (STEP + 2) * len(order), spec)


def _change(row: Mapping[str, Any]) -> str:
    share = row["result"] / row["dense"] - 1
    return f"{100 * share:+.0f} %".replace("-", "−") if abs(share) >= 0.005 else "±0 %"


def _bars(
    rows: list[dict[str, Any]], order: list[str], name: str, front: str, back: str, title: str, hover: list[Spec]
) -> Spec:
    """What is left, before what there was; the text behind the longer bar."""
    y = names(name, None, order)
    x = quantity(front, title)
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
    layers.append({"mark": {"type": "point", "filled": True, "opacity": 0.95}, "encoding": {**encoding, "tooltip": hover}})
    # The filters stand with each layer: others may lie beside them that have no methods.
    return {"layer": [{"data": {"values": rows}, "transform": [SHOWN, AT_BUDGET], **layer} for layer in layers]}


# ---------------------------------------------------------------- the energy model


def _predictions(facts: Facts) -> dict[str, Any] | None:
    model = facts["model"]
    held_out = model["held_out"] if model else []
    weighed = [
        {"method": cell["method"], "budget": cell["budget"], "value": row["weighed"], "predicted": row["predicted"]}
        for cell in facts["cells"]
        for row in cell["weighings"]
    ]
    if not held_out and not weighed:
        return None
    batch = facts["batch"] or 1
    everything = [value for pair in held_out for value in pair]
    everything += [row[key] for row in weighed for key in ("value", "predicted")]
    factor, unit = scale_of(max(everything) / batch, "J")
    scaled = batch * factor
    label = ", ".join(sorted({row["label"] for cell in facts["cells"] for row in cell["weighings"]})) or model["label"]
    ends = [min(everything) / scaled, max(everything) / scaled]
    kind = {"scale": {"type": "log", "nice": False}} if ends[0] > 0 and ends[1] > 8 * ends[0] else {"scale": {"zero": False}}
    x = quantity("value", f"{label} [{unit} an item]", **kind)
    y = quantity("predicted", f"predicted [{unit} an item]", **kind)
    for row in weighed:
        row |= {"value": row["value"] / scaled, "predicted": row["predicted"] / scaled}
        row["error"] = row["predicted"] / row["value"] - 1
    profile = [{"value": value / scaled, "predicted": guess / scaled, "error": guess / value - 1} for value, guess in held_out]
    hover = tip(("value", f"{label}, {unit}", ".4~g"), ("predicted", f"predicted, {unit}", ".4~g"), ("error", "error", "+.2%"))
    diagonal = [{"value": end, "predicted": end} for end in ends]
    layers: list[Spec] = [
        {
            "data": {"values": diagonal},
            "mark": {"type": "line", "stroke": var("soft"), "strokeWidth": 1, "strokeDash": [4, 4]},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": {"values": profile},
            "mark": {"type": "point", "stroke": var("soft"), "size": 26, "strokeWidth": 1, "opacity": 0.75},
            "encoding": {"x": x, "y": y, "tooltip": hover},
        },
        {
            "data": {"values": weighed},
            "transform": [SHOWN],
            "mark": {"type": "point", "filled": True, "opacity": 0.9, "size": 80},
            "encoding": {
                "x": x,
                "y": y,
                "color": by_method(facts["methods"]),
                "shape": shape_of(facts["methods"]),
                "tooltip": [*tip(("method", "method"), ("budget", "budget")), *hover],
            },
        },
    ]
    caption = "On the dashed line a prediction is right. Hollow: networks of the profile, each predicted without it. "
    caption += f"Filled: networks on the way to the budget, {label} by the run."
    return figure("predictions", f"Predicted against {label}", caption, 300, {"layer": layers})


def _learning(facts: Facts) -> dict[str, Any] | None:
    model = facts["model"]
    if not model or len(model["learning_curve"]) < 2:
        return None
    rows = [{"rows": count, "error": error} for count, error in model["learning_curve"]]
    x = quantity("rows", "networks measured" if model["label"].startswith("measured") else "networks in the profile")
    x["scale"] = {"zero": False}
    y = quantity("error", "mean error on unseen networks", scale={"zero": True}, axis={"format": ".2~%"})
    encoding = {"x": x, "y": y, "tooltip": tip(("rows", "networks", "d"), ("error", "mean error", ".3~%"))}
    line = {"type": "line", "stroke": var("accent"), "strokeWidth": 2}
    point = {"type": "point", "filled": True, "fill": var("accent"), "opacity": 1, "size": 60}
    layers: list[Spec] = [
        {"data": {"values": rows}, "mark": line, "encoding": encoding},
        {"data": {"values": rows}, "mark": point, "encoding": encoding},
    ]
    if model["noise"] is not None:
        layers += _reference({"error": model["noise"]}, "error", "noise of one measurement", y="error")
    return figure(
        "learning",
        "Learning curve of the energy model",
        "Mean relative error on networks that the model had not seen, by how many it was fitted to.",
        300,
        {"layer": layers},
    )
