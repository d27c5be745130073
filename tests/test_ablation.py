"""The ablation scripts: paired differences and verdicts on made-up cells, and settings of the variants."""

from __future__ import annotations

from typing import Any

import ablation_table as table
import pytest
from paired import paired_interval

from ecc.zoo.recipe import read_recipe


def cell(variant: str, seed: int, held_out: float, test: float = 0.5, budget: str = "50%") -> dict[str, Any]:
    return {"task": "t", "variant": variant, "budget": budget, "seed": seed, "held_out": held_out, "test": test}


def test_differences_are_paired_and_verdicts_follow_the_interval() -> None:
    base = [0.5, 0.6, 0.9]
    cells = [cell("default", seed, score) for seed, score in enumerate(base)]
    cells += [cell("better", seed, score + 0.01 + 0.001 * seed) for seed, score in enumerate(base)]
    cells += [cell("worse", seed, score - 0.02 - 0.001 * seed) for seed, score in enumerate(base)]
    cells += [cell("noise", seed, score + (0.1, -0.1, 0.02)[seed]) for seed, score in enumerate(base)]
    cells += [cell("better", 7, 0.0), cell("better", 0, 0.0, budget="20%")]  # without a pair
    found = {name: table.differences(cells, name, "held_out") for name in ("better", "worse", "noise")}
    assert found["better"] == pytest.approx([1.0, 1.1, 1.2])
    verdicts = {name: table.verdict(paired_interval(some)) for name, some in found.items()}
    assert verdicts == {"better": "helps", "worse": "hurts", "noise": "no difference beyond noise"}
    assert table.differences(cells, "better", "test") == [0.0, 0.0, 0.0]


def test_every_variant_of_every_experiment_has_valid_settings() -> None:
    pytest.importorskip("PIL")
    import evidence_grid as grids

    for name in grids.DATA:
        settings = read_recipe(grids.RECIPES / f"{name}.toml").settings
        for variant in (*grids.SOLVER_VARIANTS.values(), *grids.VARIANTS[name].values()):
            made = grids.changed(grids.changed(settings, {"depth": False}), variant.settings)
            assert made.solver == variant.settings.get("solver", "scheduled")


def test_the_solvers_are_compared_by_one_command() -> None:
    pytest.importorskip("PIL")
    import solvers

    rows = [{"method": "ecc", "budget": "50%", "seed": seed, "scores": {"finetuned": 0.8}} for seed in range(3)] + [
        {"method": "ecc", "budget": "50%", "seed": seed, "variant": "admm, taylor", "scores": {"finetuned": 0.81}}
        for seed in range(2)
    ]
    rows.append({"method": "ecc", "budget": "50%", "seed": 2, "variant": "admm, taylor", "missing": "not finished"})
    assert solvers.differences({"rows": rows}, "admm, taylor") == pytest.approx([1.0, 1.0])
