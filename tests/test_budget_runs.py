"""The tables of runs on real devices and of the paper's devices, and the figure in the form of the paper."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import budget_runs
import measured_budgets
import paper_devices
import paper_figures
import paper_table
import pytest
import result_tables

PUBLISHED = {"width": [3.0, 4.0, 8.0, 10.0], "coef": [1.0, 2.0, 4.0], "bias": 0.5}


def latency_cell(loop: str, fresh: float, ci: float = 0.01) -> dict[str, Any]:
    return {"loop": loop, "fresh": fresh, "fresh_relative_ci": ci}


def test_runs_are_counted_with_and_without_the_loop() -> None:
    runs = [
        budget_runs.Runs("a", False, [0.9, 1.1]),
        budget_runs.Runs("b", True, [0.985, 1.0]),
        budget_runs.Runs("c", True, [1.001]),
    ]
    assert runs[0].row() == ["a", "no", "2", "1 (50%)", "0 (0%)", "90.0% to 110.0%"]
    assert budget_runs.total(runs, is_loop=True).row() == ["all", "yes", "3", "1 (33%)", "2 (67%)", "98.5% to 100.1%"]
    assert list(budget_runs.total(runs, is_loop=False).shares) == [0.9, 1.1]


def test_committed_runs_are_in_the_table() -> None:
    runs = budget_runs.all_runs()
    assert [one.is_loop for one in runs] == sorted(one.is_loop for one in runs)
    assert {one.is_loop for one in runs} == {False, True}
    (small,) = [one for one in runs if one.title.startswith("MobileNet v1, half")]
    record = json.loads((budget_runs.RESULTS / "compress_imagenette.json").read_text(encoding="utf-8"))
    assert list(small.shares) == [record["budget_share_reached"]]
    text = budget_runs.budget_runs_section()
    assert all(f"| {one.title} | " in text for one in runs)


def test_runs_above_the_budget_are_compared_with_their_interval() -> None:
    cells = [latency_cell("measured", 1.005), latency_cell("measured", 1.05), latency_cell("predicted", 1.2)]
    text = budget_runs._latency_note({"errors": {"x": {"mean": 0.02}}, "cells": cells})
    assert "x 2.0%" in text
    assert "Of the 2 runs with the loop that are above the budget, 1 have an interval that contains it." in text


def test_the_authors_energy_of_alexnet_is_a_sum_of_products_of_shares() -> None:
    assert paper_devices.authors_joules(PUBLISHED, [4, 8]) == pytest.approx(7.5)
    assert paper_devices.authors_joules(PUBLISHED, [2, 8]) == pytest.approx(0.5 + 0.5 + 2 * 0.5 + 4)


def test_a_network_of_the_paper_is_compared_with_its_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = paper_devices.compare("MobileNet v1", "jetson-tx2", 40)
    assert row["joules"] == pytest.approx(row["joules_in_paper"], rel=0.01)  # the constants were solved for it
    assert row["least_share"] < row["tightest_share_in_paper"] < 1
    one = {"samples": 3, "mean_error": 0.01, "p90_error": 0.02, "rank_correlation": 0.9}
    record = {"environment": {"date": "2026-01-01", "command": "c"}, "networks": [row], "alexnet": one}
    for module in (paper_table, result_tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert paper_table._devices() == ""
    (tmp_path / paper_table.DEVICES_FILE).write_text(json.dumps(record), encoding="utf-8")
    text = paper_table._devices()
    assert "| MobileNet v1, jetson-tx2 | 0.0487 J | 0.04891 J | 51% |" in text
    assert "by 1.0% on average (p90 2.0%), with a rank correlation of 0.9000." in text


def test_the_figure_of_the_paper_has_its_methods_and_panels(tmp_path: Path) -> None:
    found = paper_figures.draw(paper_figures.FOLDER, tmp_path)
    assert found is not None
    text = found.read_text(encoding="utf-8")
    panels = [title for titles in paper_figures.TITLES.values() for title in titles]
    assert all(f">{title}<" in text for title in panels)
    assert all(f">{name}<" in text for name in ("ecc", "netadapt", "amc"))
    assert ">eap<" not in text
    assert paper_figures.draw(tmp_path, tmp_path) is None


def test_every_latency_budget_is_met_both_ways_before_the_next_seed() -> None:
    options = SimpleNamespace(seeds=2, cases=list(measured_budgets.CASES), budgets=["80%", "35%"])
    keys = measured_budgets.keys_of(options)
    assert len(keys) == 2 * len(measured_budgets.CASES) * 2 * 2
    assert [key["loop"] for key in keys[:2]] == list(measured_budgets.LOOPS)
    assert [key["seed"] for key in keys] == sorted(key["seed"] for key in keys)
    assert {case.partition("-")[0] for case in measured_budgets.CASES} == set(measured_budgets.BATCH)
