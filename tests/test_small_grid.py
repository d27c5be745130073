"""The grid of all methods on small networks: its cells and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_grid
import small_table as table


def cell(method: str, seed: int, accuracy: float, *, budget: str = "45%", of_budget: float = 0.99) -> dict[str, Any]:
    return {
        "task": "resnet8", "method": method, "budget": budget, "seed": seed, "commit": "abcdef",
        "scores": {"finetuned": accuracy}, "of_budget": of_budget, "batches": 600 + seed,
    }  # fmt: skip


def record(cells: list[dict[str, Any]]) -> dict[str, Any]:
    return {"settings": {"meter": "platform:x", "prune": 3, "finetune": 4, "pretrain": 5}, "cells": cells}


def test_the_table_compares_ecc_with_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.small_section() == ""
    cells = [cell("ecc", seed, 0.5 + seed / 100) for seed in (0, 1)]
    cells += [cell("uniform", seed, 0.48 + seed / 100) for seed in (0, 1)]
    cells += [cell("halp", seed, 0.49 + seed / 100) for seed in (0, 1)]
    cells += [cell("lcp", seed, 0.45 + seed / 100, of_budget=1.01) for seed in (0, 1)]
    cells += [cell("uniform", 0, 0.6, budget=small_grid.DENSE_BUDGET)]
    text = table.section_of(record(cells), "source")
    assert "budgets on the energy of `platform:x`" in text
    assert "Every method has 600 to 601 batches after 5 of the dense network" in text
    assert "Dense: 60.00." in text
    assert "| ECC | 50.50 ± 0.71 |" in text
    assert "| halp | 49.50 ± 0.71 (+1.00 ± 0.00) |" in text
    assert "| lcp | 45.50 ± 0.71 † (+5.00 ± 0.00) |" in text
    assert "45% +1.00 (± 0.00) against halp, ahead. Below uniform pruning in the mean: lcp at 45%; beyond" in text
    assert "interval: lcp at 45% (-3.00 ± 0.00)." in text
    assert "| uniform | +2.00 (± 0.00), ahead |  |" in text  # over all networks and budgets
    assert "| ECC |  | -2.00 (± 0.00), behind |" in text
    cells += [cell("tp_taylor", seed, 0.6, of_budget=1.2) for seed in (0, 1)]
    assert "against halp, ahead" in table.section_of(record(cells), "source")  # one over its budget is not the best


def test_differences_are_averaged_over_the_budgets_of_a_network() -> None:
    cells = [cell("ecc", 0, 0.5), cell("ecc", 0, 0.6, budget="60%"), cell("ecc", 1, 0.7), cell("ecc", 2, 0.7)]
    cells += [cell("amc", 0, 0.4), cell("amc", 0, 0.3, budget="60%"), cell("amc", 1, 0.69)]
    assert table.over_budgets(cells, "ecc", "amc") == pytest.approx([20.0, 1.0])  # seed 2 has no pair
    assert table._overall(cells[:2]) == ""


def test_every_method_has_a_cell_at_every_budget_and_the_dense_network_comes_first() -> None:
    options = small_grid.parse(["--out", "x.json", "--seeds", "2"])
    keys = small_grid.keys_of(options)
    assert keys[0] == {"task": "digits", "method": "uniform", "budget": "100%", "seed": 0}
    assert len(keys) == 2 * (3 + 6 * len(small_grid.METHODS) - 4)
    assert not any((key["task"], key["method"]) in small_grid.EXCLUDED for key in keys)
    assert any(key["method"] == "ecc_early" for key in keys)
    published = small_grid.keys_of(small_grid.parse(["--out", "x.json", "--protocol", "published"]))
    assert not any(key["method"] == "ecc_early" for key in published)
    assert {"task": "digits", "method": "ecc_widths", "budget": "60%", "seed": 1} in keys


@pytest.mark.slow
def test_a_cell_meets_its_budget_with_equal_batches() -> None:
    words = ["--out", "x.json", "--pretrain", "20", "--prune", "12", "--finetune", "8", "--samples", "30"]
    options = small_grid.parse(words)
    found = small_grid.run(options, {"task": "digits", "method": "ecc", "budget": "70%", "seed": 0})
    assert found["batches"] == 20
    assert found["met"]
    assert 0.9 < float(str(found["of_budget"])) <= 1


def test_the_published_protocol_names_the_batches_of_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.published_sentence() is None
    cells = [cell("ecc", seed, 0.5) for seed in (0, 1)] + [cell("netadapt", seed, 0.6) for seed in (0, 1)]
    for one in cells:
        one["batches"] *= 1 if one["method"] == "ecc" else 5
    text = table.published_of(record(cells), "source")
    assert "every result has 4 batches of fine-tuning; ECC\nprunes for 3 batches before." in text
    assert "Batches in all: netadapt 3,000 to 3,005, ECC 600 to 601." in text
    assert "45% -10.00 (± 0.00) against netadapt, behind." in text
    assert table.first_places(cells) == (0, 1, 1)


@pytest.mark.slow
def test_a_published_search_is_not_limited_to_the_pruning_steps() -> None:
    words = ["--pretrain", "20", "--prune", "12", "--finetune", "8", "--samples", "30", "--protocol", "published"]
    options = small_grid.parse(["--out", "x.json", *words])
    found = small_grid.run(options, {"task": "digits", "method": "eap", "budget": "70%", "seed": 0})
    assert int(str(found["batches"])) > 100
    found = small_grid.run(options, {"task": "digits", "method": "uniform", "budget": "70%", "seed": 0})
    assert found["batches"] == 8  # fine-tuning only
