"""Which figures a page has, and the figures as files for papers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecc.errors import BadFile
from ecc.io import write_bytes, write_text

from .charts import CHOSEN, for_file
from .model_charts import learning, predictions
from .page import first_budget
from .result_charts import layers, tradeoff, widths
from .time_charts import descent, duals, loss, score, width_duals

_MAKERS = (tradeoff, widths, layers, descent, loss, score, duals, width_duals, predictions, learning)

Facts = Mapping[str, Any]


def figures_of(facts: Facts) -> list[dict[str, Any]]:
    """All figures that the facts allow, in the order of the page."""
    made = [made for make in _MAKERS if (made := make(facts)) is not None]
    for one in made:
        one["spec"]["params"] = [*CHOSEN, {"name": "budget", "value": first_budget(facts)}]
    return made


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
        raise BadFile("the page needs vl-convert; install it with: pip install vl-convert-python.") from None
