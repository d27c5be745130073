"""`ecc compare`, run as a user runs it."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.methods.grid import Cell, Comparison
from ecc.methods.registry import METHODS
from ecc.report.compare import draw_grid, grid_facts, grid_view, load_grid
from ecc.training import Interrupted
from methods.jobs import digits_model


@pytest.fixture
def energy(tmp_path: Path) -> Path:
    path = tmp_path / "energy.json"
    digits_model().save(path)
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *words])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.thorough  # test_examples_in_help.py makes a grid in the same way
def test_a_quick_comparison_of_all_methods(energy: Path, tmp_path: Path) -> None:
    words = ("digits", "--energy", str(energy), "--quick", "--budgets", "45%", "-o", str(tmp_path / "runs"))
    code, text = run(*words, "--figure", str(tmp_path / "grid.svg"))
    assert code == 0
    assert "cost estimated" in text
    assert (tmp_path / "grid.svg").stat().st_size > 5000
    moved = (tmp_path / "runs").rename(tmp_path / "moved")  # table and figure come out of the folders alone
    file = io.StringIO()
    Console(file=file, width=80).print(grid_view(load_grid(moved)))
    assert file.getvalue().strip() in text
    draw_grid(load_grid(moved), tmp_path / "again.svg")
    assert drawn(tmp_path / "again.svg") == drawn(tmp_path / "grid.svg")
    rows = grid_facts(load_grid(moved))
    assert {(row["method"], row["budget"]) for row in rows} == {(method, "45%") for method in METHODS}
    assert all(row["met"] and row["batches_total"] == 60 and row["batches_lineage"] <= 60 for row in rows)
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)


def drawn(figure: Path) -> str:
    """A figure, without its date and the random names in it."""
    return re.sub(r"<dc:date>.*?</dc:date>|id=\"[^\"]*\"|url\([^)]*\)|href=\"[^\"]*\"", "", figure.read_text())


def test_a_finished_grid_is_shown_again(energy: Path, tmp_path: Path) -> None:
    words = ("digits", "--energy", str(energy), "--quick", "--methods", "uniform", "-o", str(tmp_path / "runs"))
    assert run(*words)[0] == 0
    code, text = run(*words, "--json")
    assert code == 0
    rows = json.loads(text)
    assert {(row["method"], row["budget"]) for row in rows} == {("uniform", "65%"), ("uniform", "40%")}
    assert all(row["met"] and row["batches_total"] == 60 for row in rows)


def test_asked_to_stop_it_says_how_to_go_on(energy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: Comparison, cell: Cell, root: Path) -> None:
        raise Interrupted("stopped at step 3. The same command goes on from here.", signal.SIGTERM)

    monkeypatch.setattr(Comparison, "_run", stopped)
    code, text = run("digits", "--energy", str(energy), "--quick", "-o", str(tmp_path / "runs"))
    assert code == 128 + signal.SIGTERM
    assert "The same command goes on" in text
    assert not list((tmp_path / "runs").glob("seed-*/*.failed.json"))  # which it has not


def test_without_ray_one_line_says_what_to_install(
    energy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, text = run("digits", "--energy", str(energy), "--quick", "--on", "ray", "-o", str(tmp_path / "runs"))
    assert code == 2
    assert "pip install ray" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "magic"], "there is no method 'magic'"),
        (["--methods", ""], "at least one method"),
        (["--budgets", "sixty"], "starts with no number"),
        (["--seeds", "0"], "at least one method, one budget and one seed"),
        (["--meter", "magic"], "magic"),
        (["--on", "mars"], "--on mars is unknown; there are here and ray"),
        (["--micro-batch", "0"], "micro_batch is 0; give a whole number of at least 1"),
        (["--width-multiple", "0"], "width_multiple=0 is below 1"),
        (["--min-width-ratio", "2"], "min_width_ratio=2.0 is a share"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, energy: Path, tmp_path: Path) -> None:
    code, text = run("digits", "--energy", str(energy), "-o", str(tmp_path / "runs"), *words)
    assert code == 2
    assert message in " ".join(text.split())
    assert "Traceback" not in text


def test_a_figure_takes_the_place_of_no_other_file(energy: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.svg"
    mine.write_text('{"header": "hours of measurements"}')
    code, text = run("digits", "--energy", str(energy), "-o", str(tmp_path / "runs"), "--figure", str(mine))
    assert code == 2
    assert "is there and is no figure; it is left as it is" in " ".join(text.split())
    assert mine.read_text() == '{"header": "hours of measurements"}'
    assert not (tmp_path / "runs").exists()


def test_cells_asked_for_that_all_fail_are_an_error_whatever_is_there_already(energy: Path, tmp_path: Path) -> None:
    few = ("--methods", "uniform,uniform", "--seeds", "1", "--prune-steps", "1", "--finetune-steps", "1")
    words = ("digits", "--energy", str(energy), "-o", str(tmp_path / "runs"), *few)
    code, text = run(*words, "--budgets", "60%,60%", "--json")
    assert code == 0
    (row,) = json.loads(text)
    assert row["met"] is True
    assert row["seconds"] > 0
    code, text = run(*words, "--budgets", "1%")
    assert code == 2
    assert "no cell that was asked for has a result" in text
    rows = {row["budget"]: row["met"] for row in grid_facts(load_grid(tmp_path / "runs"))}
    assert rows == {"60%": True, "1%": None}
