from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecc.report.page import page_facts
from ecc.report.result_charts import layers, tradeoff, widths
from report.folders import BATCH, energy_model, write_grid, write_run


@pytest.fixture
def grid(tmp_path: Path) -> dict[str, Any]:
    return page_facts(write_grid(tmp_path / "runs"))


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    return page_facts(write_run(tmp_path / "run"))


def values(layer: dict[str, Any]) -> list[dict[str, Any]]:
    return list(layer["data"]["values"])


def test_score_against_joules_has_means_spread_and_every_run(grid: dict[str, Any]) -> None:
    made = tradeoff(grid)
    assert made is not None
    single, _, means, *_ = made["spec"]["layer"]
    assert len(values(single)) == 24  # 12 runs, before and after tuning
    point = next(p for p in values(means) if (p["method"], p["budget"], p["when"]) == ("ecc", "65%", "after"))
    assert point["score"] == pytest.approx(0.96)
    assert point["spread"] == pytest.approx(0.01414, abs=1e-5)
    assert (point["low"], point["high"]) == pytest.approx((0.96 - 0.01414, 0.96 + 0.01414), abs=1e-5)
    assert point["cost"] == pytest.approx(0.99 * 0.65 * energy_model().dense / BATCH * 1e6)
    assert single["encoding"]["x"]["axis"]["title"] == "energy per item [µJ], estimated"
    assert values(means)[-1]["method"] == "ecc"  # drawn on top
    assert values(made["spec"]["layer"][-1])[0]["cost"] == pytest.approx(energy_model().dense / BATCH * 1e6)


def test_one_run_has_no_trade_off(run: dict[str, Any]) -> None:
    assert tradeoff(run) is None


def test_widths_of_a_run_are_bars_before_bars(run: dict[str, Any]) -> None:
    made = widths(run)
    assert made is not None
    rows = made["spec"]["data"]["values"]
    assert [row["group"] for row in rows] == list(energy_model().groups)
    assert rows[0]["text"] == f"{rows[0]['kept']} of {rows[0]['full']}"
    run["cells"][0]["widths"] = []
    assert widths(run) is None


def test_widths_of_a_grid_are_shares_by_method_and_budget(grid: dict[str, Any]) -> None:
    made = widths(grid)
    assert made is not None
    rows = values(made["spec"]["layer"][-1])
    assert len(rows) == 3 * 2 * len(energy_model().groups)
    assert all(0 < row["share"] <= 1 for row in rows)


def test_layers_before_and_after(run: dict[str, Any], grid: dict[str, Any]) -> None:
    made = layers(run)
    assert made is not None
    rows = made["spec"]["data"]["values"]
    assert sum(row["dense"] for row in rows) == pytest.approx(energy_model().dense / BATCH * 1e6)
    assert {row["text"][-2:] for row in rows} == {" %"}
    assert "predicted" in made["caption"]
    made = layers(grid)
    assert made is not None
    dense, dots = made["spec"]["layer"]
    assert {row["layer"] for row in values(dense)} == {row["layer"] for row in values(dots)}
    run["cells"][0]["layers"] = []
    assert layers(run) is None


def test_of_many_layers_the_largest_are_drawn(run: dict[str, Any]) -> None:
    run["cells"][0]["layers"] = [{"layer": f"l{i}", "dense": float(i + 1), "result": 1.0} for i in range(100)]
    made = layers(run)
    assert made is not None
    assert [row["layer"] for row in made["spec"]["data"]["values"]] == [f"l{i}" for i in range(60, 100)]
    assert "The 40 largest; 60 are smaller." in made["caption"]
