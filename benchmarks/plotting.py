"""Altair charts for the figures of the benchmarks: rows of data in panels, in one style, written as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from ecc.report.chart_parts import SCHEMA, Row
from ecc.report.figures import save_chart

GREY = "#777777"
CONFIG: Row = {
    "background": "white",  # a page may be dark
    "font": "Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"gridColor": "#e6eaee", "domainColor": "#888888", "tickColor": "#888888"},
    "title": {"anchor": "start", "fontSize": 11, "fontWeight": "normal"},
    "legend": {"title": None, "symbolOpacity": 1},
}


def scale_of(styles: Mapping[str, Any]) -> alt.Scale:
    """A scale that gives each name its value."""
    return alt.Scale(domain=list(styles), range=list(styles.values()))


def in_rows(panels: Sequence[Any], columns: int) -> Any:
    """Panels side by side, in several rows, each with scales and a legend of its own."""
    own: Any = dict.fromkeys(("color", "shape", "strokeDash"), "independent")
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    return alt.vconcat(*(alt.hconcat(*row).resolve_scale(**own) for row in rows)).resolve_scale(**own)


def save_figure(chart: Any, path: Path, title: str = "") -> Path:
    """Write a chart; the same data give the same file."""
    made: Row = (chart.properties(title=title) if title else chart).to_dict()
    return save_chart({**made, "$schema": SCHEMA, "config": CONFIG}, path)
