"""The page: one HTML file that holds its style, its scripts, the plotting library and its data.

A page makes no network request, and its content security policy forbids any: only the two scripts that are put in here
may run, identified by their hashes. Jinja2 escapes every name; data is embedded as JSON in which no character can close
the element around it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ecc import formatting
from ecc.io import refuse_other_file, write_text
from ecc.records import to_builtins

from .chart_parts import COLOURS, HEXAGON, PENTAGON, SALTIRE, SHAPES, STAR, STAR_OF_FOUR
from .charts import figures_of
from .load import load_report
from .records import Report

DASH = "\N{EN DASH}"
"""Shown where there is no number."""

_GLYPHS = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "cross": "✚",
    "diamond": "◆",
    "triangle-down": "▼",
    "triangle-right": "▶",
    "triangle-left": "◀",
    STAR: "★",
    HEXAGON: "⬢",
    PENTAGON: "⬟",
    STAR_OF_FOUR: "✦",
    SALTIRE: "✖",
}


def render_page(report: Report, *, live: bool = False) -> str:
    """The whole page."""
    library, script = _library(), _asset("page.js")
    content = page_content(report)
    policy = [
        "default-src 'none'",
        f"script-src {_hash(library)} {_hash(script)}",
        "style-src 'unsafe-inline'",  # the plotting library sets styles of elements
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return (
        _templates()
        .get_template("page.html")
        .render(
            report=report,
            live=live,
            policy=Markup("; ".join(policy)),  # hashes and keywords only
            style=Markup(style()),
            body=Markup(content["body"]),
            content=Markup(embedded({name: content[name] for name in ("figures", "data")})),
            library=Markup(library),
            script=Markup(script),
        )
    )


def write_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run or of a comparison; by default `report.html` in its folder."""
    path = Path(folder) / "report.html" if path is None else Path(path)
    refuse_other_file(path, "<!doctype html>", "page")
    write_text(path, render_page(load_report(folder)))
    return path


def page_content(report: Report) -> dict[str, Any]:
    """What changes while a run continues: the body, the figures and the data."""
    figures = figures_of(report)
    body = (
        _templates()
        .get_template("body.html")
        .render(
            report=report,
            run=report.runs[0] if report.runs else None,
            figures={figure.name: figure for figure in figures},
        )
    )
    specs = {figure.name: figure.spec for figure in figures}
    return {"body": body, "figures": specs, "data": to_builtins(report)}


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element, whatever names it contains."""
    text = json.dumps(data, allow_nan=False)  # ASCII: no line separator of Unicode is left either
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def style() -> str:
    """The style sheet, with the colours of the charts as variables."""
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1))
    methods = "".join(f".m-{name}{{color:var(--{name})}}" for name in SHAPES)
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}"
        f"{methods}{_asset('page.css')}"
    )


# ---------------------------------------------------------------- Jinja2


@lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("ecc.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "si": _si,
        "percent": _percent,
        "score": _score,
        "count": _count,
        "swatch": _swatch,
        "text": _text,
        "fields": lambda record: list(vars(record).items()),
    }
    made.globals |= {"DASH": DASH}
    return made


def _number(value: float, text: str) -> Markup:
    """A number as it is shown, with the exact value for programs."""
    shown = text.replace(" ", "\N{NO-BREAK SPACE}").replace("-", "\N{MINUS SIGN}")
    return Markup('<data value="{}">{}</data>').format(repr(float(value)), shown)


def _si(value: float | None, unit: str) -> str | Markup:
    return DASH if value is None else _number(value, formatting.si(value, unit))


def _percent(share: float | None, digits: int = 1, *, sign: bool = False) -> str | Markup:
    return DASH if share is None else _number(share, formatting.percent(share, digits, sign=sign))


def _score(value: float | None, *, sign: bool = False, metric: str = "score") -> str | Markup:
    if value is None:
        return DASH
    return _number(value, f"{value:+.4f}" if sign else formatting.score_text(value, metric))


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _text(number: str) -> str:
    """A number of the other filters without its element: Jinja2's `striptags` would replace no-break spaces."""
    return re.sub("<[^>]*>", "", number)


def _swatch(method: str) -> Markup:
    """The mark that a method has in every chart."""
    name = method if method in SHAPES else "other"
    return Markup('<span class="mark m-{}" aria-hidden="true">{}</span>').format(
        name, _GLYPHS[SHAPES.get(method, "square")]
    )


# ---------------------------------------------------------------- scripts


@lru_cache(maxsize=1)
def _library() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script."""
    import vl_convert

    code = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub has no default
    code = code.replace("</script", r"<\/script")
    return f"(function(){{{code}}})();"  # the bundle is a module: inside a function its names stay its own


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return (files("ecc.report") / "templates" / name).read_text(encoding="utf-8").strip()


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"
