"""`ecc compare`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ecc.cli import app
from methods.jobs import digits_model


@pytest.fixture
def energy(tmp_path: Path) -> Path:
    path = tmp_path / "energy.json"
    digits_model().save(path)
    return path


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *words])
    return result.exit_code, result.output


def test_a_quick_comparison_of_two_methods(energy: Path, tmp_path: Path) -> None:
    words = ("digits", "--energy", str(energy), "--quick", "--methods", "ecc,uniform", "-o", str(tmp_path / "runs"))
    code, text = run(*words, "--figure", str(tmp_path / "grid.svg"))
    assert code == 0
    assert "cost estimated" in text
    assert (tmp_path / "grid.svg").stat().st_size > 5000
    code, text = run(*words, "--json")
    assert code == 0
    rows = json.loads(text)
    assert {(row["method"], row["budget"]) for row in rows} == {
        (m, b) for m in ("ecc", "uniform") for b in ("65%", "40%")
    }
    assert all(row["met"] and row["batches_total"] == 60 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "magic"], "there is no method 'magic'"),
        (["--methods", ""], "at least one method"),
        (["--budgets", "sixty"], "starts with no number"),
        (["--seeds", "0"], "at least one method, one budget and one seed"),
        (["--meter", "magic"], "magic"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str, energy: Path, tmp_path: Path) -> None:
    code, text = run("digits", "--energy", str(energy), "-o", str(tmp_path / "runs"), *words)
    assert code == 2
    assert message in " ".join(text.split())
    assert "Traceback" not in text
