from __future__ import annotations

import json
from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.report.page import energy_row, first_budget, page_facts, short_budget
from report.folders import write_grid, write_run


def test_a_run_is_a_page_of_one_cell(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run"))
    assert (facts["kind"], facts["task"], facts["methods"], facts["budgets"]) == ("run", "digits", ["ecc"], ["50%"])
    assert facts["commands"] == ["ecc compress digits --budget 50% -o run"]
    assert facts["environments"] == [{"device": "cpu", "ecc": "0.1.0", "torch": "2.9"}]
    assert first_budget(facts) is None
    row = energy_row(facts["cells"][0])
    assert row is not None
    assert row["resource"] == "energy"
    json.dumps(facts, allow_nan=False)


def test_a_grid_has_its_cells_rows_and_failures(tmp_path: Path) -> None:
    facts = page_facts(write_grid(tmp_path / "runs"))
    assert (facts["kind"], len(facts["cells"]), facts["running"]) == ("grid", 12, 0)
    assert facts["methods"] == ["ecc", "netadapt", "uniform"]
    assert facts["budgets"] == ["65%", "40%"]
    assert first_budget(facts) == "40%"
    rows = {(row["method"], row["budget"]): row for row in facts["rows"]}
    assert rows["ecc", "65%"]["after"] == pytest.approx((0.96, 0.01414), abs=1e-4)
    assert facts["failed"] == [{"method": "amc", "budget": "65%", "seed": "1", "error": "no <luck>"}]


def test_a_cell_at_work_is_shown_as_such(tmp_path: Path) -> None:
    root = write_grid(tmp_path / "runs")
    write_run(root / "seed-2" / "ecc-65", share=0.65, seed=2, finished=False)
    (root / "seed-2" / "dense").mkdir()
    facts = page_facts(root)
    assert (facts["running"], facts["seeds"], facts["budgets"]) == (1, [0, 1, 2], ["65%", "40%"])


@pytest.mark.parametrize("made", ["nothing", "file", "other"])
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, made: str) -> None:
    path = tmp_path / "x"
    if made == "file":
        path.write_text("")
    if made == "other":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    with pytest.raises(BadFile, match=r"give (that|the folder) of `ecc compress`") as error:
        page_facts(path)
    assert "\n" not in str(error.value)


def test_a_grid_without_runs_and_a_damaged_cell(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "grid.json").write_text("{}")
    with pytest.raises(BadFile, match="without any run yet"):
        page_facts(root)
    root = write_grid(tmp_path / "more")
    (root / "seed-0" / "ecc-40" / "cell.json").write_text('{"budget": "40%"}')
    with pytest.raises(BadFile, match=r"cell\.json is damaged: its method is"):
        page_facts(root)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("energy 0.5 of dense", "50%"),
        ("energy 0.3333 of dense", "33.33%"),
        ("latency 0.5 of dense", "latency 50%"),
        ("energy 0.0247 J", "energy 0.0247 J"),
        ("energy 1.2.3 of dense", "energy 1.2.3 of dense"),
        ("<b>", "<b>"),
    ],
)
def test_budgets_are_shortened(text: str, short: str) -> None:
    assert short_budget(text) == short


def test_a_grid_keeps_the_curves_of_one_seed_and_one_model(tmp_path: Path) -> None:
    """Figures show no more, and a page of a thousand runs would be ten times as large."""
    facts = page_facts(write_grid(tmp_path / "runs"))
    assert facts["seeds"] == [0, 1]
    for cell in facts["cells"]:
        assert bool(cell["loss"]) == (cell["seed"] == 0)
        assert bool(cell["descent"] and cell["duals"]) == (cell["seed"] == 0 and cell["method"] == "ecc")
        assert "model" not in cell
        assert cell["phases"]
    assert facts["model"]["rows"] > 0
