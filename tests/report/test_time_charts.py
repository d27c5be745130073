from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecc.report.page import page_facts
from ecc.report.time_charts import descent, duals, loss, score, width_duals
from report.folders import BATCH, write_grid, write_run


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    return page_facts(write_run(tmp_path / "run"))


def drawn(made: dict[str, Any] | None, field: str) -> list[float]:
    """The values of a field, in the first layer that has it."""
    assert made is not None
    for layer in made["spec"].get("layer", [made["spec"]]):
        rows = layer["data"]["values"]
        if rows and field in rows[0]:
            return [row[field] for row in rows]
    raise AssertionError(field)


def test_curves_are_those_of_the_history(run: dict[str, Any]) -> None:
    cell = run["cells"][0]
    assert drawn(loss(run), "loss") == [row["loss"] for row in cell["loss"]]
    assert drawn(duals(run), "dual") == [row["dual"] for row in cell["duals"]]
    spent = drawn(descent(run), "spent")
    assert spent == pytest.approx([row["spent"] / BATCH * 1e6 for row in cell["descent"]])
    limit = cell["resources"][0]["limit"]
    assert drawn(descent(run), "limit") == pytest.approx([limit / BATCH * 1e6])
    assert len(drawn(width_duals(run), "dual")) == len(cell["width_duals"])


def test_scores_stand_where_they_were_taken(run: dict[str, Any]) -> None:
    made = score(run)
    assert drawn(made, "score") == [0.98, 0.95 - 0.1, 0.95]
    assert drawn(made, "batches") == [20.0, 60.0, 70.0]


def test_a_grid_shows_one_seed(tmp_path: Path) -> None:
    facts = page_facts(write_grid(tmp_path / "runs"))
    made = loss(facts)
    assert made is not None
    assert made["caption"].endswith("Seed 0.")
    assert len(drawn(made, "loss")) == 2 * (8 + 2 * 4)  # two budgets, ecc and two rivals
    assert score(facts) is None


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "history.jsonl").write_text("")
    facts = page_facts(folder)
    assert [make(facts) for make in (loss, score, descent, duals, width_duals)] == [None] * 5
    rival = page_facts(write_run(tmp_path / "rival", method="uniform"))
    assert [make(rival) for make in (descent, duals, width_duals)] == [None] * 3
