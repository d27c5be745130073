from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from scipy.stats import ttest_rel

from ecc.errors import BadFile
from ecc.report.compare import draw_grid, grid_facts, grid_view, load_grid, p_value

SCORES = {"ecc": [0.95, 0.96, 0.94], "uniform": [0.90, 0.92, 0.91]}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A grid as its folders would hold it."""
    root = tmp_path / "runs"
    for method, scores in SCORES.items():
        for seed, score in enumerate(scores):
            folder = root / f"seed-{seed}" / f"{method}-50"
            folder.mkdir(parents=True)
            summary = {
                "scores": {"dense": 0.98, "pruned": score - 0.1, "finetuned": score},
                "budgets": {"energy": {"result": 0.5, "dense": 1.0, "limit": 0.51}},
                "label": "estimated",
                "met": True,
                "batches": {"total": 100, "lineage": 90},
            }
            (folder / "summary.json").write_text(json.dumps(summary))
            cell = {"method": method, "budget": "50%", "seed": seed, "seconds": 2.0 + seed, "peak_bytes": 1000 + seed}
            (folder / "cell.json").write_text(json.dumps(cell))
    failed = {"method": "amc", "budget": "50%", "seed": 1, "error": "no [luck]"}
    (root / "seed-1" / "amc-50.failed.json").write_text(json.dumps(failed))
    (root / "grid.json").write_text("{}")
    return root


def test_numbers_are_means_over_seeds_and_a_paired_test(runs: Path) -> None:
    rows = {row["method"]: row for row in grid_facts(load_grid(runs))}
    assert rows["ecc"]["after"] == pytest.approx((0.95, 0.01))
    assert rows["uniform"]["after"] == pytest.approx((0.91, 0.01))
    assert rows["ecc"]["p_value"] is None
    assert rows["uniform"]["p_value"] == pytest.approx(ttest_rel(SCORES["ecc"], SCORES["uniform"]).pvalue)
    assert (rows["ecc"]["seconds"], rows["ecc"]["peak_bytes"], rows["ecc"]["batches_lineage"]) == (3.0, 1002, 90)
    assert rows["amc"]["failed"] == ["seed 1: no [luck]"]
    assert rows["amc"]["after"] is None
    assert rows["amc"]["met"] is None


def test_seconds_are_of_cells_that_ran_in_one_go(runs: Path) -> None:
    file = runs / "seed-2" / "ecc-50" / "cell.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sessions": 2}))
    rows = {row["method"]: row for row in grid_facts(load_grid(runs))}
    assert rows["ecc"]["seconds"] == 2.5
    assert rows["uniform"]["seconds"] == 3.0


def test_the_table_fits_a_terminal(runs: Path) -> None:
    file = io.StringIO()
    Console(file=file, width=80).print(grid_view(load_grid(runs)))
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert "budget method after before of dense batches seconds peak MB p".split() in lines
    assert any(line[:4] == ["50%", "uniform", "0.910±0.010", "0.810±0.010"] for line in lines)


def test_the_table_has_every_cell_and_names_what_failed(runs: Path) -> None:
    file = io.StringIO()
    Console(file=file, width=120).print(grid_view(load_grid(runs)))
    text = file.getvalue()
    assert "0.950±0.010" in text
    assert "0.910±0.010" in text
    assert "cost estimated" in text
    assert "failed: amc 50% seed 1: no" in text
    assert "90/100" in text  # batches


def test_the_figure_is_drawn_from_the_folders(runs: Path, tmp_path: Path) -> None:
    path = draw_grid(load_grid(runs), tmp_path / "grid.svg")
    assert path.read_text(encoding="utf-8").startswith("<?xml")


def test_a_test_of_one_seed_or_of_no_difference_says_nothing() -> None:
    assert p_value({0: 0.9}, {0: 0.8}) is None
    assert p_value({0: 0.9, 1: 0.8}, {0: 0.9, 1: 0.8}) is None
    assert p_value({0: 0.9, 1: 0.8}, {2: 0.9}) is None


def test_a_folder_that_is_no_grid_and_a_damaged_cell_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="holds no grid of runs"):
        load_grid(tmp_path)
    (runs / "seed-0" / "ecc-50" / "cell.json").write_text("{")
    with pytest.raises(BadFile, match="run its cell again"):
        load_grid(runs)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cell.json", {"method": 5}),
        ("cell.json", {"seed": None}),
        ("cell.json", {"peak_bytes": "many"}),
        ("cell.json", {"budget": "x" * 100_000}),
        ("cell.json", {"budget": "\x1b[2J"}),
        ("cell.json", {"budget": "\ud800"}),
        ("summary.json", {"scores": {"pruned": "bad"}}),
        ("summary.json", {"scores": []}),
        ("summary.json", {"scores": {"finetuned": "good"}}),
        ("summary.json", {"budgets": {}}),
        ("summary.json", {"budgets": {"energy": {"result": 1, "dense": 0}}}),
        ("summary.json", {"batches": {"total": 5}}),
        ("summary.json", {"label": None}),
    ],
)
def test_facts_of_another_kind_are_refused_by_the_file(runs: Path, name: str, change: dict[str, object]) -> None:
    file = runs / "seed-0" / "ecc-50" / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(BadFile, match=rf"{name} is damaged.*run its cell again"):
        load_grid(runs)
