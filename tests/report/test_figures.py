from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadFile
from ecc.report.figures import draw_figures, figures_of, vl_convert
from ecc.report.page import page_facts
from report.folders import HOSTILE, write_grid, write_run


def test_a_run_and_a_grid_have_their_figures(tmp_path: Path) -> None:
    run = [one["name"] for one in figures_of(page_facts(write_run(tmp_path / "run")))]
    assert run == ["widths", "layers", "descent", "loss", "score", "duals", "width-duals", "predictions", "learning"]
    grid = [one["name"] for one in figures_of(page_facts(write_grid(tmp_path / "runs")))]
    assert grid == ["tradeoff", "widths", "layers", "descent", "loss", "duals", "predictions", "learning"]


def test_every_figure_has_titles_on_its_axes_and_words_for_those_who_do_not_see_it(tmp_path: Path) -> None:
    for one in figures_of(page_facts(write_grid(tmp_path / "runs"))):
        assert one["spec"]["description"].startswith(one["title"])
        assert {param["name"] for param in one["spec"]["params"]} == {"hidden", "when", "budget"}
        for layer in one["spec"].get("layer", [one["spec"]]):
            for axis in ("x", "y"):
                found = layer["encoding"].get(axis, {})
                if found.get("type") == "quantitative":
                    assert found["axis"]["title"]


def expressions(value: Any, key: str = "") -> list[str]:
    """Every string that Vega would run."""
    if key == "values":
        return []
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in expressions(item, name)]
    if isinstance(value, list):
        return [text for item in value for text in expressions(item, key)]
    return [value] if isinstance(value, str) and key in {"filter", "expr", "test", "labelExpr", "calculate"} else []


def test_no_name_becomes_part_of_an_expression(tmp_path: Path) -> None:
    plain = figures_of(page_facts(write_run(tmp_path / "plain")))
    hostile = figures_of(page_facts(write_run(tmp_path / "hostile", method=HOSTILE, task=HOSTILE)))
    known = {text for one in plain for text in expressions(one["spec"])}
    found = {text for one in hostile for text in expressions(one["spec"])}
    assert found
    assert found <= known


@pytest.mark.slow
def test_figures_come_as_svg_and_png(tmp_path: Path) -> None:
    drawn = draw_figures(page_facts(write_grid(tmp_path / "runs")), tmp_path / "figures")
    assert len(drawn) == 16
    for path in drawn:
        data = path.read_bytes()
        assert data.startswith(b"<svg" if path.suffix == ".svg" else b"\x89PNG")
        assert b"var(--" not in data
    assert "netadapt" in (tmp_path / "figures" / "tradeoff.svg").read_text()  # the legend
    (tmp_path / "taken").write_text("")
    with pytest.raises(BadFile, match="cannot make the folder"):
        draw_figures(page_facts(tmp_path / "runs"), tmp_path / "taken")


def test_without_the_library_the_way_to_get_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: object) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadFile, match=r"pip install vl-convert-python"):
        vl_convert()
