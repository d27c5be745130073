"""The notebook runs from the first cell to the last, draws its figures, and holds no stale output."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quick_start.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def test_it_is_a_valid_notebook_without_outputs_that_says_how_to_install() -> None:
    made = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    first = next(cell for cell in cells() if cell["cell_type"] == "code")
    assert "".join(first["source"]).startswith('%pip install -q "ecc-compress[digits]"')
    for cell in cells():
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


SHORTER = {"epochs=8": "epochs=1", "epochs=12": "epochs=3", "pretrain_steps=200": "pretrain_steps=30"}


@pytest.mark.slow
@pytest.mark.parametrize("shorter", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_every_cell_runs(
    shorter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells()):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or text.startswith("%pip"):
            continue
        for long, short in SHORTER.items() if shorter else ():
            text = text.replace(long, short)
        body = ast.parse(text, f"cell {number}").body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), namespace)
        if isinstance(last, ast.Expr):  # a notebook shows its value
            value = ast.fix_missing_locations(ast.Assign([ast.Name("shown", ast.Store())], last.value, lineno=1))
            exec(compile(ast.Module([value], []), f"cell {number}", "exec"), namespace)
            shown.append(namespace["shown"])
    output = capsys.readouterr().out
    assert "groups are prunable" in output
    assert ": met" in output
    assert namespace["result"].met
    assert namespace["result"].score > (0.3 if shorter else 0.8)
    assert len(namespace["front"]) == 3
    charts = [chart.to_dict() for chart in shown if chart is not None]
    assert len(charts) == 2
    assert len(charts[0]["hconcat"]) == 2
    assert len(charts[1]["data"]["values"]) == 4  # the dense network and three budgets
    assert (tmp_path / "compressed" / "report.html").is_file()
    assert (tmp_path / "slim.safetensors").is_file()
