"""The figures of a page as Vega-Lite specifications: data with a description of how to draw them.

The same specification is drawn by the browser on the page, where it can be hovered and filtered, and by vl-convert to
SVG and PNG for papers. Colours are names of CSS variables, so that a page changes between light and dark without
drawing anew; for files they are replaced by their light values. No name from a run ever becomes part of an expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Spec = dict[str, Any]

COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#16202a", "#e8edf2"),
    "soft": ("#566370", "#a3afbb"),
    "line": ("#d9dfe5", "#2d3844"),
    "paper": ("#ffffff", "#10161d"),
    "accent": ("#0a66c2", "#5fb0ff"),
    "faint": ("#c5d0db", "#3a4754"),
    "good": ("#1a7f4b", "#58c48c"),
    "bad": ("#b3261e", "#ff8a80"),
    # Methods: ECC takes the strongest colour. The others differ in lightness as well as hue, and in their shapes.
    "ecc": ("#0a66c2", "#5fb0ff"),
    "netadapt": ("#d55e00", "#ff9a4d"),
    "amc": ("#8e4585", "#d69ad0"),
    "eap": ("#7a6a00", "#d8c64a"),
    "lcp": ("#00795c", "#4fd1ab"),
    "uniform": ("#6b7680", "#a9b4be"),
    "greedy": ("#b0306a", "#ff8fbe"),
    "scratch": ("#5b4636", "#c9a98c"),
}
"""Light and dark; each is a CSS variable of the page."""

SHAPES = {"ecc": "circle", "netadapt": "square", "amc": "triangle-up", "eap": "cross", "lcp": "diamond"}
SHAPES |= {"uniform": "triangle-down", "greedy": "triangle-right", "scratch": "triangle-left"}
OTHER = ("scratch", "square")  # colour and shape of a method that is not known here

STEP = 22  # pixels a row of a chart with names
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

_FEW_TICKS = {"expr": "max(3, round(width / 110))"}  # as many as a phone, or a screen, has room for
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"), (1e-12, "p"))


def var(name: str) -> str:
    """A colour of the page."""
    return f"var(--{name})"


def method_colour(name: str) -> str:
    """The colour that a method has in every figure."""
    return var(name if name in SHAPES else OTHER[0])


def scale_of(largest: float, unit: str) -> tuple[float, str]:
    """What to divide by, and the unit then: 0.019 J gives (0.001, mJ)."""
    for factor, prefix in _PREFIXES:
        if largest >= factor:
            return factor, prefix + unit
    return 1.0, unit


# ---------------------------------------------------------------- parts


def figure(name: str, title: str, caption: str, height: float, spec: Spec) -> dict[str, Any]:
    """A figure of the page: where it stands, what it says, and how it is drawn.

    Args:
        name: For the page's anchors and for files.
        title: Its heading.
        caption: What is seen, in words.
        height: Of the plot, without axes; pages keep the place free, so that nothing jumps.
        spec: Vega-Lite, without size.
    """
    if "layer" in spec:  # a layer without data would have no scale
        spec = {**spec, "layer": [layer for layer in spec["layer"] if layer.get("data") != {"values": []}]}
    return {
        "name": name,
        "title": title,
        "caption": caption,
        "height": height + 56,
        "spec": {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "description": f"{title}. {caption}",
            "width": "container",
            "height": height,
            "autosize": {"type": "fit-x", "contains": "padding"},
            "padding": {"left": 4, "right": 12, "top": 10, "bottom": 4},
            "config": _config(),
            **spec,
        },
    }


def _config() -> Spec:
    text = {"labelColor": var("soft"), "titleColor": var("ink"), "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": "transparent",
        "font": FONT,
        "view": {"stroke": None},
        "axis": {
            **text,
            "titleFontWeight": 500,
            "titlePadding": 8,
            "grid": True,
            "gridColor": var("line"),
            "gridWidth": 1,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
        },
        "axisX": {"labelFlush": True, "labelOverlap": "greedy", "labelSeparation": 8, "tickCount": _FEW_TICKS},
        "axisY": {"tickCount": 5, "minExtent": 40},
        "legend": {**text, "orient": "top", "title": None, "symbolSize": 80, "symbolOpacity": 1},
        "text": {"fill": var("soft"), "fontSize": 12},
        "rule": {"stroke": var("soft")},
    }


def by_method(methods: Sequence[str], *, legend: bool = False) -> Spec:
    """Colour of a method; shapes are for points alone."""
    scale = {"domain": list(methods), "range": [method_colour(name) for name in methods]}
    return {"field": "method", "type": "nominal", "scale": scale, "legend": {} if legend else None}


def shape_of(methods: Sequence[str], *, legend: bool = False) -> Spec:
    """Shape of a method's points, for those who do not tell the colours apart."""
    scale = {"domain": list(methods), "range": [SHAPES.get(name, OTHER[1]) for name in methods]}
    return {"field": "method", "type": "nominal", "scale": scale, "legend": {} if legend else None}


def quantity(field: str, title: str, **more: Any) -> Spec:
    """A number along an axis."""
    axis = {"title": title, **more.pop("axis", {})}
    return {"field": field, "type": "quantitative", "axis": axis, **more}


def logarithmic(values: Sequence[float], room: float = 0.0) -> Spec:
    """Scale and axis for values above 0, with lines at round numbers only, and room at the top as a share of it."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1,) if high > 100 * low else (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    shown = [tick for tick in ticks if 0.8 * low <= tick <= 1.25 * high]
    axis = {"values": shown, "format": "~g"}
    return {
        "scale": {"type": "log", "nice": False, "domain": [0.9 * low, 1.1 * high * (high / low) ** room]},
        "axis": axis,
    }


def names(field: str, title: str | None, order: Sequence[str]) -> Spec:
    """Names down the left side, in this order."""
    axis = {"title": title, "grid": False, "labelLimit": {"expr": "width < 320 ? 110 : 220"}}
    return {"field": field, "type": "nominal", "sort": list(order), "axis": axis}


def tip(*fields: tuple[str, str] | tuple[str, str, str]) -> list[Spec]:
    """What is shown on hovering: (field, title) for names, (field, title, format) for numbers."""
    return [
        {"field": one[0], "title": one[1], "type": "nominal"}
        if len(one) == 2
        else {"field": one[0], "title": one[1], "type": "quantitative", "format": one[2]}
        for one in fields
    ]


CHOSEN: tuple[Spec, ...] = ({"name": "hidden", "value": []}, {"name": "when", "value": "after"})
"""What the page's filters set, beside `budget`; every figure has all three, so that one call sets them everywhere."""

SHOWN = {"filter": "indexof(hidden, datum.method) < 0"}
AT_BUDGET = {"filter": "budget === null || datum.budget === budget"}


def for_file(spec: Mapping[str, Any], width: int = 560) -> Spec:
    """A specification that needs no page: light, of a fixed width, and with a legend."""
    found: Any = _with_light(spec)
    found["width"] = width
    found["config"] |= {"background": "#ffffff", "font": "Helvetica, Arial, sans-serif"}
    for layer in found.get("layer", []):
        for channel in ("color", "shape"):
            if layer.get("encoding", {}).get(channel, {}).get("field") == "method":
                layer["encoding"][channel]["legend"] = {"title": None}
    return dict(found)


def _with_light(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("var(--") and value.endswith(")"):
        return COLOURS[value[6:-1]][0]
    if isinstance(value, Mapping):
        return {key: item if key == "values" else _with_light(item) for key, item in value.items()}
    return [_with_light(item) for item in value] if isinstance(value, list | tuple) else value
