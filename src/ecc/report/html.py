"""The page: one HTML file with its style, its program, its plotting library and its numbers inside.

A page asks the network for nothing, and its security policy forbids it to: only the two programs that were put in here
may run, known by their hashes. Numbers and names come as JSON in which no character can end the element around it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .charts import COLOURS, SHAPES
from .figures import figures_of, vl_convert
from .markup import text
from .sections import body_of


def page_of(facts: Mapping[str, Any], *, live: bool = False) -> str:
    """The whole page.

    Args:
        facts: From `page_facts`.
        live: Whether it asks the server that it came from for news.

    Raises:
        BadFile: If the plotting library is not installed.
    """
    library, program = _library(), _asset("page.js")
    content = content_of(facts)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(library)} {_hash(program)}",
            "style-src 'unsafe-inline'",  # the plotting library sets styles of elements
            *(["connect-src 'self'"] if live else []),
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"{" data-live" if live else ""}>',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(facts['task'])}: ECC report</title>",
            f"<style>{style()}</style>",
            "</head>",
            "<body>",
            '<header class="top"><p class="brand">ECC report</p><p id="live" role="status"></p>'
            '<button id="theme" type="button" aria-label="Change between light and dark">Dark</button></header>',
            f"<main>{content['body']}</main>",
            f'<script type="application/json" id="content">{embedded(_without_body(content))}</script>',
            f"<script>{library}</script>",
            f"<script>{program}</script>",
            "</body>",
            "</html>\n",
        )
    )


def content_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What changes as a run goes on: the body, the figures and the facts."""
    figures = figures_of(facts)
    return {
        "body": str(body_of(facts, figures)),
        "figures": {one["name"]: one["spec"] for one in figures},
        "facts": facts,
    }


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element, whatever names are in it."""
    safe = json.dumps(data, allow_nan=False)  # in ASCII, so that no line separator of Unicode is left either
    return safe.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def style() -> str:
    """The style sheet, with the colours of the figures as variables."""
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1))
    methods = "".join(f".m-{name}{{color:var(--{name})}}" for name in SHAPES)
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}"
        f"{methods}{_asset('page.css')}"
    )


def _without_body(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name != "body"}


@lru_cache(maxsize=1)
def _library() -> str:
    """Vega, Vega-Lite and their loader, as one script."""
    code = str(vl_convert().javascript_bundle()).replace("</script", r"<\/script")
    return f"(function(){{{code}}})();"  # it is a module: inside a function, its names are its own


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return (files("ecc.report") / name).read_text(encoding="utf-8").strip()


def _hash(program: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(program.encode('utf-8')).digest()).decode('ascii')}'"
