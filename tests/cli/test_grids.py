from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ecc.cli import grids
from ecc.cli.compare import GridSpec
from ecc.errors import BadFile, BadTask, EccError
from ecc.measure import EnergySource
from ecc.methods import CompressSettings
from methods.jobs import digits_model


@pytest.fixture
def spec(tmp_path: Path) -> GridSpec:
    digits_model().save(tmp_path / "energy.json")
    return GridSpec(
        task="digits",
        energy=(str(tmp_path / "energy.json"),),
        methods=("uniform",),
        budgets=("65%",),
        seeds=2,
        settings=CompressSettings(prune_steps=7),
        device="cpu",
    )


def test_the_same_grid_is_built_from_plain_values(spec: GridSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[EnergySource] = []
    monkeypatch.setattr(grids, "close_meter", closed.append)
    with spec.opened() as grid:
        assert grid.task.name == "digits"
        assert [(cell.method, cell.budget, cell.seed) for cell in grid.cells] == [
            ("uniform", "65%", 0),
            ("uniform", "65%", 1),
        ]
        assert grid.settings.steps == 7
        assert grid.source is not None
        assert grid.source.describe().device_id == "jetson-tx2"  # auto: what the energy model is of
        assert not closed
    assert closed == [grid.source]
    with replace(spec, meter="none").opened() as grid:
        assert grid.source is None


def test_what_cannot_be_built_is_refused(spec: GridSpec) -> None:
    for wrong, error in (
        (replace(spec, energy=("missing.json",)), BadFile),
        (replace(spec, task="digitz"), BadTask),
        (replace(spec, methods=("magic",)), EccError),
        (replace(spec, device="magic"), EccError),
    ):
        with pytest.raises(error), wrong.opened():
            pass
