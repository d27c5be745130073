"""Figures of the energy model: what it predicted beside what was weighed, and what more measurements would give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .charts import SHOWN, Spec, by_method, figure, logarithmic, quantity, scale_of, shape_of, tip, var

Facts = Mapping[str, Any]


def predictions(facts: Facts) -> dict[str, Any] | None:
    """Predicted against what the scales said; None where neither is known."""
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
    wide = ends[0] > 0 and ends[1] > 8 * ends[0]
    x = quantity("value", f"{label} [{unit} per item]", **(logarithmic(ends) if wide else {"scale": {"zero": False}}))
    y = quantity(
        "predicted", f"predicted [{unit} per item]", **(logarithmic(ends) if wide else {"scale": {"zero": False}})
    )
    for row in weighed:
        row |= {"value": row["value"] / scaled, "predicted": row["predicted"] / scaled}
        row["error"] = row["predicted"] / row["value"] - 1
    profile = [
        {"value": value / scaled, "predicted": guess / scaled, "error": guess / value - 1} for value, guess in held_out
    ]
    hover = tip(
        ("value", f"{label}, {unit}", ".4~g"), ("predicted", f"predicted, {unit}", ".4~g"), ("error", "error", "+.2%")
    )
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


def learning(facts: Facts) -> dict[str, Any] | None:
    """The learning curve; None without one."""
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
        noise = {"data": {"values": [{"error": model["noise"], "text": "noise of one measurement"}]}}
        name = {"type": "text", "align": "right", "baseline": "bottom", "dy": -4}
        right = {"value": {"expr": "width"}}
        layers.append({**noise, "mark": {"type": "rule", "strokeDash": [4, 4]}, "encoding": {"y": y}})
        layers.append({**noise, "mark": name, "encoding": {"y": y, "x": right, "text": {"field": "text"}}})
    return figure(
        "learning",
        "Learning curve of the energy model",
        "Mean relative error on networks that the model had not seen, by how many it was fitted to.",
        300,
        {"layer": layers},
    )
