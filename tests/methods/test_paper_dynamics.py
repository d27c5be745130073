"""Compressions that walk by the paper's constants."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import EccError
from methods.jobs import history_of, same_result, wide_job

FAST = {"solver": "admm", "width_lr": 300.0, "penalty": 1.0, "prune_steps": 60, "lr": 1e-3}


def test_the_papers_walk_reaches_a_budget_and_is_weighed(tmp_path: Path) -> None:
    result = wide_job("60%", factor=0.9, **FAST).run(tmp_path / "run")
    assert result.summary["met"]
    assert result.summary["label"] == "estimated"
    marks = [line["step"] for line in history_of(tmp_path / "run") if line["phase"] == "cost_check"]
    assert marks == [15, 30, 45, 60]
    again = wide_job("60%", factor=0.9, **FAST).run(tmp_path / "again")
    assert same_result(result, again)


def test_it_arrives_when_it_arrives_and_says_if_it_has_not(tmp_path: Path) -> None:
    result = wide_job("60%", **FAST | {"width_lr": 1.0}).run(tmp_path / "run")
    assert not result.summary["met"]
    assert "no steps are left" in result.summary["note"]


@pytest.mark.parametrize(("budgets", "more"), [(("60%",), {"width_multiple": 8}), (("60%", "params=90%"), {})])
def test_what_the_paper_does_not_have_is_refused_before_anything_is_done(
    budgets: tuple[str, ...], more: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(EccError, match="the paper's dynamics know one budget and no rounding"):
        wide_job(*budgets, **FAST, **more)
