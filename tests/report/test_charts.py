"""Charts of the page, and charts as files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ecc.energy.ablation import FitAblation, run_ablation
from ecc.errors import BadFile
from ecc.report import charts
from ecc.report.chart_parts import COLOURS, SHAPES
from ecc.report.figures import draw_figures, draw_fit
from ecc.report.load import load_report
from methods.jobs import digits_profile
from report.folders import HOSTILE, write_grid, write_run

RUN = ["widths", "layers", "cost", "loss", "score", "dual", "width-duals", "predictions", "learning-curve"]
GRID = ["tradeoff", "widths", "layers", "cost", "loss", "dual", "predictions", "learning-curve"]


def walk(value: Any) -> Any:
    """Every dict inside a chart, but not its data."""
    if isinstance(value, dict):
        yield value
        for key, item in value.items():
            yield from walk(item) if key not in ("values", "datasets") else ()
    elif isinstance(value, list):
        for item in value:
            yield from walk(item)


def test_runs_and_grids_have_their_figures(tmp_path: Path) -> None:
    assert [figure.name for figure in charts.figures_of(load_report(write_run(tmp_path / "run")))] == RUN
    assert [figure.name for figure in charts.figures_of(load_report(write_grid(tmp_path / "grid")))] == GRID
    baseline = write_run(tmp_path / "baseline", method="uniform", model=False, scores={})
    assert [figure.name for figure in charts.figures_of(load_report(baseline))] == ["widths", "loss", "predictions"]
    unstructured = write_run(tmp_path / "unstructured", model=False, unstructured=True)
    found = {figure.name: figure for figure in charts.figures_of(load_report(unstructured))}
    assert found["widths"].title == "Remaining weights"
    assert "estimated" in found["layers"].caption


@pytest.mark.parametrize("kind", ["run", "grid"])
def test_charts_are_valid_vega_lite_with_titles_and_descriptions(tmp_path: Path, kind: str) -> None:
    report = load_report(write_run(tmp_path / "x") if kind == "run" else write_grid(tmp_path / "x"))
    for figure in charts.figures_of(report, validate=True):  # Altair raises an error for what the schema does not have
        spec = figure.spec
        assert spec["description"] == f"{figure.title}. {figure.caption}"
        json.dumps(spec, allow_nan=False)
        axes = [one for part in walk(spec) for key, one in part.items() if key in ("x", "y") and "field" in one]
        assert axes
        assert all(one.get("title") or one["type"] == "nominal" for one in axes), figure.name
        params = {one["name"]: one["value"] for one in spec["params"]}
        assert params == {"hidden": [], "score": "finetuned", "budget": report.first_budget}


def test_scores_of_a_language_model_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", scores={"dense": -3.0445, "finetuned": -3.2})
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "metric": "perplexity"}))
    text = json.dumps(next(one for one in charts.figures_of(load_report(folder)) if one.name == "score").spec)
    assert "log-likelihood per token" in text
    assert "test score" not in text
    assert "dense 21.0" in text


def test_names_are_never_part_of_an_expression(tmp_path: Path) -> None:
    """An expression is code; names belong into the data."""
    report = load_report(write_run(tmp_path / "run", task=HOSTILE, method=HOSTILE, device=HOSTILE))
    expressions = [
        part[key]
        for figure in charts.figures_of(report)
        for part in walk(figure.spec)
        for key in ("filter", "expr", "test", "labelExpr")
        if key in part
    ]
    assert expressions
    assert all("hacked" not in text for text in expressions)


@pytest.mark.parametrize("side", [0, 1])
def test_text_and_marks_contrast_with_the_background(side: int) -> None:
    """WCAG: 4.5 for text, 3 for graphics."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    paper = luminance(COLOURS["paper"][side])
    for name, pair in COLOURS.items():
        bright, dark = sorted((paper, luminance(pair[side])), reverse=True)
        contrast = (bright + 0.05) / (dark + 0.05)
        assert contrast >= (4.5 if name in ("ink", "soft", "good", "bad") else 3 if name in SHAPES else 1), name
    assert len({COLOURS[name] for name in SHAPES}) == len(set(SHAPES.values())) == len(SHAPES)


# ---------------------------------------------------------------- files


def test_figures_are_written_as_svg_and_png_without_css_variables(tmp_path: Path) -> None:
    written = draw_figures(load_report(write_run(tmp_path / "run")), tmp_path / "figures")
    assert [path.name for path in written] == [f"{name}{end}" for name in RUN for end in (".svg", ".png")]
    for path in written:
        data = path.read_bytes()
        assert data.startswith(b"<svg" if path.suffix == ".svg" else b"\x89PNG")
        assert b"var(--" not in data


def test_the_tradeoff_of_a_grid_is_written_with_a_legend(tmp_path: Path) -> None:
    report = load_report(write_grid(tmp_path / "runs"))
    draw_figures(report, tmp_path / "figures")
    text = (tmp_path / "figures" / "tradeoff.svg").read_text(encoding="utf-8")
    assert all(method in text for method in report.methods)


@cache
def ablation() -> FitAblation:
    return run_ablation(digits_profile())


def test_figures_of_a_fit_are_the_same_for_the_same_data(tmp_path: Path) -> None:
    drawn = draw_fit(ablation(), "digits", tmp_path / "figures", "digits")
    assert drawn.name == "digits-prediction.svg"
    text = drawn.read_text(encoding="utf-8")
    assert all(words in text for words in ("digits", "predicted, held out", "mean error", "physical"))
    assert draw_fit(ablation(), "digits", tmp_path / "again", "digits").read_text(encoding="utf-8") == text


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hours of measurements")
    with pytest.raises(BadFile, match="cannot create the folder"):
        draw_fit(ablation(), "x", tmp_path / "file" / "inside", "x")
