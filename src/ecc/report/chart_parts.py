"""Parts that charts share: colours, axes, tooltips, and the frame of a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
from altair.utils import schemapi

from ecc.formatting import si_scale

from .records import Report, Resource

COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#16202a", "#e8edf2"),
    "soft": ("#566370", "#a3afbb"),
    "line": ("#d9dfe5", "#2d3844"),
    "paper": ("#ffffff", "#10161d"),
    "accent": ("#0a66c2", "#5fb0ff"),
    "faint": ("#c5d0db", "#3a4754"),
    "good": ("#1a7f4b", "#58c48c"),
    "bad": ("#b3261e", "#ff8a80"),
    # Methods: ECC has the strongest colour. The others differ in lightness as well as hue, and in their shapes.
    "ecc": ("#0a66c2", "#5fb0ff"),
    "netadapt": ("#d55e00", "#ff9a4d"),
    "amc": ("#8e4585", "#d69ad0"),
    "eap": ("#7a6a00", "#d8c64a"),
    "lcp": ("#00795c", "#4fd1ab"),
    "uniform": ("#6b7680", "#a9b4be"),
    "greedy": ("#b0306a", "#ff8fbe"),
    "scratch": ("#5b4636", "#c9a98c"),
    "greedy_taylor": ("#b01c1c", "#ff7a70"),
    "tp_taylor": ("#00707f", "#4cc9dc"),
    "tp_magnitude": ("#3f6f00", "#9bd14b"),
    "tp_group_norm": ("#8a5a00", "#e8b04a"),
    "halp": ("#6a3fb5", "#b794ff"),
}
"""Light and dark value of each CSS variable."""

STAR = "M0,-1.3L0.34,-0.47L1.24,-0.4L0.56,0.18L0.76,1.05L0,0.59L-0.76,1.05L-0.56,0.18L-1.24,-0.4L-0.34,-0.47Z"
HEXAGON = "M0,-1.05L0.91,-0.52L0.91,0.52L0,1.05L-0.91,0.52L-0.91,-0.53Z"
PENTAGON = "M0,-1.1L1.05,-0.34L0.65,0.89L-0.65,0.89L-1.05,-0.34Z"
STAR_OF_FOUR = "M0,-1.35L0.35,-0.35L1.35,0L0.35,0.35L0,1.35L-0.35,0.35L-1.35,0L-0.35,-0.35Z"
SALTIRE = "M0.41,-1L1,-0.41L0.59,0L1,0.41L0.41,1L0,0.59L-0.41,1L-1,0.41L-0.59,0L-1,-0.41L-0.41,-1L0,-0.59Z"
"""SVG paths; Vega scales them."""

SHAPES = {
    "ecc": "circle",
    "netadapt": "square",
    "amc": "triangle-up",
    "eap": "cross",
    "lcp": "diamond",
    "uniform": "triangle-down",
    "greedy": "triangle-right",
    "scratch": "triangle-left",
    "greedy_taylor": STAR,
    "tp_taylor": HEXAGON,
    "tp_magnitude": PENTAGON,
    "tp_group_norm": STAR_OF_FOUR,
    "halp": SALTIRE,
}
OTHER_METHOD = ("scratch", "square")
"""Colour and shape of a method that has none of its own."""

ROW_HEIGHT = 22
"""Pixels per name in charts with one row per group or layer."""

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
IS_SHOWN = "indexof(hidden, datum.method) < 0"  # `hidden`, `score` and `budget` are set by the controls of a page
AT_BUDGET = "budget === null || datum.budget === budget"

Row = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A chart of the page."""

    name: str
    """For anchors and file names."""
    title: str
    caption: str
    height: float
    """Pixels of the plot without axes: the page reserves the space, so that nothing jumps."""
    spec: dict[str, Any]
    """Vega-Lite."""


def make_figure(name: str, title: str, caption: str, height: float, *parts: alt.Chart) -> Figure:
    """Layers as a figure of the page."""
    chart = alt.layer(*parts).properties(
        width="container",
        height=height,
        description=f"{title}. {caption}",
        autosize={"type": "fit-x", "contains": "padding"},
    )
    spec = chart.to_dict(validate=schemapi.DEBUG_MODE)
    spec |= {"$schema": SCHEMA, "config": _config(), "padding": {"left": 4, "right": 12, "top": 10, "bottom": 4}}
    return Figure(name, title, caption, height + 56, spec)


def _config() -> Row:
    text: Row = {"labelColor": css("soft"), "titleColor": css("ink"), "labelFontSize": 12, "titleFontSize": 12}
    axis = {"titleFontWeight": 500, "titlePadding": 8, "gridColor": css("line"), "labelPadding": 6}
    few_ticks = {"expr": "max(3, round(width / 110))"}  # as many as the screen has room for
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {**text, **axis, "grid": True, "gridWidth": 1, "domain": False, "ticks": False},
        "axisX": {"labelFlush": True, "labelOverlap": "greedy", "labelSeparation": 8, "tickCount": few_ticks},
        "axisY": {"tickCount": 5, "minExtent": 40},
        "legend": {**text, "orient": "top", "title": None, "symbolSize": 80, "symbolOpacity": 1},
        "text": {"fill": css("soft"), "fontSize": 12},
        "rule": {"stroke": css("soft")},
    }


def css(name: str) -> str:
    """One of `COLOURS`, as the page or a file sets it."""
    return f"var(--{name})"


def make_chart(rows: Sequence[Row], *filters: str) -> alt.Chart:
    """A chart of some rows, after filters."""
    chart = alt.Chart(alt.InlineData(values=list(rows)))
    for test in filters:
        chart = chart.transform_filter(test)
    return chart


def x_axis(field: str, title: str | None = None, **more: Any) -> alt.X:
    """A number along the x axis."""
    return alt.X(field, type="quantitative", title=title, **more)


def y_axis(field: str, title: str | None = None, **more: Any) -> alt.Y:
    """A number along the y axis."""
    return alt.Y(field, type="quantitative", title=title, **more)


def name_axis(field: str, order: Sequence[str]) -> alt.Y:
    """Names along the y axis."""
    limit = {"expr": "width < 320 ? 110 : 220"}
    return alt.Y(field, type="nominal", sort=list(order), title=None, axis=alt.Axis(grid=False, labelLimit=limit))


def method_colour(methods: Sequence[str]) -> alt.Color:
    """One colour per method; see `method_shape`."""
    colours = [css(name if name in SHAPES else OTHER_METHOD[0]) for name in methods]
    return alt.Color("method", type="nominal", legend=None, scale=alt.Scale(domain=list(methods), range=colours))


def method_shape(methods: Sequence[str]) -> alt.Shape:
    """Methods differ in shape too, for readers who do not distinguish the colours."""
    shapes = [SHAPES.get(name, OTHER_METHOD[1]) for name in methods]
    return alt.Shape("method", type="nominal", legend=None, scale=alt.Scale(domain=list(methods), range=shapes))


def tooltips(*fields: tuple[str, ...]) -> list[alt.Tooltip]:
    """(field, title) for names, (field, title, format) for numbers."""
    return [
        alt.Tooltip(field, title=title, type="quantitative", format=form[0])
        if form
        else alt.Tooltip(field, title=title, type="nominal")
        for field, title, *form in fields
    ]


def log_axis(values: Sequence[float], room: float = 0.0) -> Row:
    """Scale and axis for positive values with ticks at round numbers, and room at the top as a fraction of the axis."""
    low, high = min(values), max(values)
    steps = (1,) if high > 100 * low else (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 4, 5, 7)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    domain = [0.9 * low, 1.1 * high * (high / low) ** room]
    return {
        "scale": alt.Scale(type="log", nice=False, domain=domain),
        "axis": alt.Axis(values=[tick for tick in ticks if 0.8 * low <= tick <= 1.25 * high], format="~g"),
    }


def stronger_for_ecc(strong: float, other: float) -> Any:
    """A size or a stroke width that is larger for ecc."""
    return alt.condition("datum.method === 'ecc'", alt.value(strong), alt.value(other))


def per_item(resource: Resource, report: Report) -> tuple[float, str, str]:
    """Divisor, unit and axis title for a resource; energy is shown per item, other resources per inference."""
    batch = report.batch or 1 if resource.resource == "energy" else 1
    factor, unit = si_scale(resource.dense / batch, resource.unit)
    per = " per item" if batch > 1 else ""
    return batch * factor, unit, f"{resource.title}{per} [{unit}]" if unit else resource.title


def main_resource(report: Report) -> Resource | None:
    """The resource that charts show: the energy, or the first one with a budget."""
    known = [run.main for run in (report.finished or report.runs) if run.main is not None]
    return known[0] if known else None
