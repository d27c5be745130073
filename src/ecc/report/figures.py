"""Charts as files: SVG and PNG of the figures of a page, and of a fit, drawn by vl-convert."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

from ecc.energy.ablation import FitAblation
from ecc.errors import BadFile
from ecc.io import write_bytes, write_text

from .chart_parts import COLOURS, SCHEMA, Row, log_axis, make_chart, x_axis, y_axis
from .charts import figures_of
from .records import Report

_FAMILIES = {"bilinear": "#9a6b00", "physical": "#0b6e99"}


def draw_figures(report: Report, folder: str | Path) -> list[Path]:
    """Write every figure as SVG and PNG."""
    folder = _made(folder)
    return [
        save_chart(for_file(figure.spec), folder / f"{figure.name}{suffix}")
        for figure in figures_of(report)
        for suffix in (".svg", ".png")
    ]


def draw_fit(found: FitAblation, title: str, folder: str | Path, stem: str) -> Path:
    """Draw predicted against measured cost, errors over widths and learning curves."""
    return save_chart(_fit_chart(found, title), _made(folder) / f"{stem}-prediction.svg")


def _fit_chart(found: FitAblation, title: str) -> Row:
    unit, families = found.unit, found.families
    names = {name: f"{name} ({family.mean:.2%})" for name, family in families.items()}
    points = [
        {"family": names[name], "value": value, "predicted": value * (1 + error), "error": error, "ratio": ratio}
        for name, family in families.items()
        for value, ratio, error in zip(found.values, found.mean_width_ratio, family.errors, strict=True)
    ]
    curves = [
        {"family": names[name], "samples": samples, "error": error}
        for name, family in families.items()
        for samples, error in family.learning_curve
    ]
    ends = [min(found.values), max(found.values)]
    scale = alt.Scale(domain=list(names.values()), range=[_FAMILIES.get(name, "#777777") for name in families])
    colour = alt.Color("family", type="nominal", title="mean error", scale=scale)
    dots: Row = {"filled": True, "size": 14, "opacity": 0.6}
    log = log_axis(ends)
    x, y = (
        x_axis("value", f"{found.label} [{unit}]", **log),
        y_axis("predicted", f"predicted, held out [{unit}]", **log),
    )
    diagonal = make_chart([{"value": end, "predicted": end} for end in ends]).mark_line(stroke="#777777", strokeWidth=1)
    left = diagonal.encode(x, y) + make_chart(points).mark_point(**dots).encode(x, y, colour)
    percents = alt.Axis(format="%")
    middle = make_chart(points).mark_point(**dots).encode(
        x_axis("ratio", "mean ratio of widths kept"), y_axis("error", "error", axis=percents), colour
    )  # fmt: skip
    right = make_chart(curves).mark_line(point=True).encode(
        x_axis("samples", "samples"), y_axis("error", "mean error, held out", axis=percents), colour
    )  # fmt: skip
    if found.noise is not None:
        noise = make_chart([{"error": found.noise, "text": "noise of one measurement"}])
        right = right + noise.mark_rule(strokeDash=[4, 4]).encode(y_axis("error"))
        right = right + noise.mark_text(align="right", dy=-6, fontSize=10).encode(
            y_axis("error"), x=alt.value(270), text="text:N"
        )
    heading = f"{title}: {found.resource}, {found.label} on {found.device}, batch {found.batch}"
    panels = [part.properties(width=270, height=230) for part in (left, middle, right)]
    return file_config(alt.hconcat(*panels).properties(title=heading).to_dict())


def file_config(spec: Row) -> Row:
    """A chart with the colours and fonts of files."""
    axis = {"grid": True, "gridColor": "#e6eaee", "domainColor": "#888", "tickColor": "#888"}
    return {
        **spec,
        "$schema": SCHEMA,
        "config": {"background": "#fff", "axis": axis, "font": "Helvetica, Arial, sans-serif"},
    }


def for_file(spec: Mapping[str, Any]) -> Row:
    """A chart of the page for a file: with light colours, a fixed width and a legend."""
    found: Row = _light(spec)
    found["width"] = 560
    found["config"] |= {"background": "#ffffff", "font": "Helvetica, Arial, sans-serif"}
    for layer in found.get("layer", []):
        for channel in ("color", "shape"):
            if layer.get("encoding", {}).get(channel, {}).get("field") == "method":
                layer["encoding"][channel]["legend"] = {"title": None}
    return found


def _light(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("var(--") and value.endswith(")"):
        return COLOURS[value[6:-1]][0]
    if isinstance(value, Mapping):
        return {key: item if key in ("values", "datasets") else _light(item) for key, item in value.items()}
    return [_light(item) for item in value] if isinstance(value, list | tuple) else value


def save_chart(spec: Mapping[str, Any], path: Path) -> Path:
    """Write a Vega-Lite chart as SVG or PNG, by the ending of the path."""
    import vl_convert

    text = json.dumps(spec)
    if path.suffix.lower() == ".svg":
        write_text(path, vl_convert.vegalite_to_svg(text))
    else:
        write_bytes(path, vl_convert.vegalite_to_png(text, scale=3))
    return path


def _made(folder: str | Path) -> Path:
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot create the folder {folder}: {error.strerror}.") from None
    return folder
