"""How the cells of the evidence are run: what is measured, what is given up, and what is run again."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_networks_of_the_same_widths_are_weighed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    evidence, compare = importlib.import_module("evidence"), importlib.import_module("ecc.methods.grid")
    weighing, energy = importlib.import_module("ecc.methods.cost_evaluator"), importlib.import_module("ecc.energy")
    requested: list[dict[str, int]] = []

    def evaluate_cost(widths: dict[str, int]) -> Any:
        requested.append(widths)
        return weighing.MeasuredCost({"energy": 1.0 + len(requested), "latency": 1.0}, "measured", 0.01)

    cells = [compare.GridRun(name, "50%", 0) for name in ("ecc", "scratch", "uniform")]
    asks = SimpleNamespace(cells=cells, missing=lambda _: [], energy=object.__new__(energy.EnergyModel))
    for cell, widths in zip(cells, ({"a": 3, "b": 4}, {"b": 4, "a": 3}, {"a": 2, "b": 4}), strict=True):
        folder = cell.folder(tmp_path)
        folder.mkdir(parents=True)
        (folder / "widths.json").write_text(json.dumps(widths), encoding="utf-8")
    monkeypatch.setattr(energy.EnergyModel, "resource", "energy", raising=False)
    monkeypatch.setattr(evidence, "CostEvaluator", lambda *_, **__: scales)
    monkeypatch.setattr(evidence, "trace_channels", lambda *_, **__: None)
    monkeypatch.setattr(evidence, "with_batch_size", lambda *_: None)
    task = SimpleNamespace(model=None, example_input=None)
    evidence.measure_results([evidence.Grid("", asks, tmp_path)], task, 1, None, math.inf)
    assert requested == [{}, {"a": 3, "b": 4}, {"a": 2, "b": 4}]
    joules = [json.loads((cell.folder(tmp_path) / "measured.json").read_text())["joules"] for cell in cells]
    assert joules == [3.0, 3.0, 4.0]


def test_what_builds_on_a_failure_is_given_up(tmp_path: Path) -> None:
    """Otherwise the workers wait for a cell that can never begin, until their time is over."""
    pytest.importorskip("PIL")
    evidence_grid, compare = importlib.import_module("evidence_grid"), importlib.import_module("ecc.methods.grid")
    scratch, ours = compare.GridRun("scratch", "1%", 0), compare.GridRun("ecc", "1%", 0)
    grid = evidence_grid.Grid("", object.__new__(compare.Comparison), tmp_path)
    assert grid.failure(scratch) is None
    file = evidence_grid.failure_of(ours, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text('{"error": "too little"}', encoding="utf-8")
    assert grid.failure(ours) == "too little"
    assert grid.failure(scratch) == "builds on ecc, which failed: too little"


def test_what_was_weighed_is_learned_from_and_what_was_missed_is_run_again_once(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    grids, compare = importlib.import_module("evidence_grid"), importlib.import_module("ecc.methods.grid")
    measure, energy = importlib.import_module("ecc.measure"), importlib.import_module("ecc.energy")
    shutil.copy(ROOT / "results" / "evidence" / "e1.profile.gz", tmp_path / "profile.gz")
    first = measure.Profile.load(tmp_path / "profile.gz")
    dense = 1.01 * first.references[0].joules  # on another day
    requested = object.__new__(compare.Comparison)
    cells = [compare.GridRun(name, "50%", 0) for name in ("ecc", "scratch", "uniform", "amc", "eap")]
    shares = dict(zip(cells, (0.55, 0.55, 0.51, 0.495, None), strict=True))  # 0.5 were predicted for all
    asks = SimpleNamespace(cells=cells, settings=SimpleNamespace(width_multiple=None), built_on=requested.built_on)
    asks.missing = lambda runs: [cell for cell in cells if not (cell.folder(runs) / "summary.json").exists()]
    grid = grids.Grid("", asks, tmp_path / "runs")

    def run(cell: Any, width: int) -> None:
        folder = cell.folder(grid.runs)
        folder.mkdir(parents=True)
        kept = dict(zip(first.header.groups, [width, *first.header.full_widths[1:]], strict=True))
        (folder / "widths.json").write_text(json.dumps(kept), encoding="utf-8")
        summary = {"budgets": {"energy": {"limit": 0.5, "result": 0.5}}}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        if (share := shares[cell]) is not None:
            facts = {"joules": share * dense, "dense_joules": dense, "seconds": share, "dense_seconds": 1.0}
            facts["relative_ci"] = 0.01
            (folder / "measured.json").write_text(json.dumps(facts), encoding="utf-8")

    for number, cell in enumerate(cells):
        run(cell, 8 * max(1, number))  # scratch has the widths of ecc
    begun = compare.GridRun("lcp", "50%", 0)
    cells.append(begun)
    begun.folder(grid.runs).mkdir(parents=True)  # with the limits of the old model
    grids.failure_of(begun, grid.runs).write_text('{"error": "too little"}', encoding="utf-8")
    again = importlib.import_module("evidence_rerun")
    again.refit_and_rerun([grid], tmp_path)
    whole = measure.Profile.load(tmp_path / "profile.gz")
    assert len(whole.design_samples) == len(first.design_samples) + 3
    added = [sample.joules / first.references[0].joules for sample in whole.corrected()[-3:]]
    assert added == pytest.approx([0.55, 0.51, 0.495], rel=0.02)  # as shares of the dense network, drift divided out
    assert energy.EnergyModel.load(tmp_path / "energy.json").origin.samples == len(whole.design_samples)
    assert grid.finished() == cells[2:-1]  # ecc was 10 % above what was predicted, and scratch builds on it
    assert not begun.folder(grid.runs).exists()
    assert grid.failure(begun) is None

    for cell in cells[:2]:
        run(cell, 8)
    again.refit_and_rerun([grid], tmp_path)
    assert grid.finished() == cells[:-1]
    assert len(measure.Profile.load(tmp_path / "profile.gz").design_samples) == len(whole.design_samples)


def test_cells_of_a_record_count_as_done(tmp_path: Path) -> None:
    """Folders of runs are not kept in the repository; what they came to is."""
    pytest.importorskip("PIL")
    grids, compare = importlib.import_module("evidence_grid"), importlib.import_module("ecc.methods.grid")
    records, errors = importlib.import_module("evidence_record"), importlib.import_module("ecc.errors")
    file = ROOT / "results" / "evidence" / "e2.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    variants: dict[str, Any] = {}
    for row in before["rows"]:
        variants.setdefault(row.get("variant", ""), []).append(compare.GridRun(row["method"], row["budget"], row["seed"]))

    def requested(variant: str, **changes: Any) -> Any:
        asks = object.__new__(compare.Comparison)
        settings = SimpleNamespace(**before["settings"] | {"checkpoint_seconds": 1.0} | changes)
        found = SimpleNamespace(cells=variants[variant], settings=settings, built_on=asks.built_on)
        found.missing = lambda runs: compare.Comparison.missing(found, runs)
        return grids.Grid(variant, found, tmp_path / f"runs-{variant}")

    kept = [requested(variant) for variant in variants]
    done = [row for row in before["rows"] if "missing" not in row]
    even = [row for row in done if row.get("variant") == "even"]
    assert records.bring_cells(file, kept, ["even"]) == len(done) - len(even) > 0
    rows = records.rows_of(kept)
    assert [row for row in rows if "missing" not in row] == [row for row in done if row not in even]
    assert records.bring_cells(file, kept) == len(even)  # those that are there stay
    assert [row for row in records.rows_of(kept) if "missing" not in row] == done
    with pytest.raises(errors.BadFile, match=r"lr = 0.0005, and now it is 0.1"):
        records.bring_cells(file, [requested("", lr=0.1)])


def test_the_energy_model_of_a_record_is_that_of_its_profile(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    records, energy = importlib.import_module("evidence_record"), importlib.import_module("ecc.energy")
    measure, file = importlib.import_module("ecc.measure"), ROOT / "results" / "evidence" / "e1.json"
    records.bring_model(file, tmp_path)
    brought = energy.EnergyModel.load(tmp_path / "energy.json")
    assert brought.origin.samples == len(measure.Profile.load(file.with_suffix(".profile.gz")).design_samples)
    (tmp_path / "profile.gz").unlink()
    records.bring_model(file, tmp_path)
    assert not (tmp_path / "profile.gz").exists()  # what is there already is the later one


def test_a_fresh_run_trains_the_dense_network_of_each_seed_for_all_grids_then_its_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    evidence, grids = importlib.import_module("evidence"), importlib.import_module("evidence_grid")
    measure, packed = importlib.import_module("ecc.measure"), importlib.import_module("packed")
    recipes, data = importlib.import_module("ecc.zoo.recipe"), importlib.import_module("ecc.zoo.data")
    (tmp_path / "claims").mkdir()
    (tmp_path / "tiny.toml").write_text(
        'task = "resnet20"\nsize = [8, 8]\nbatch_size = 4\nmethods = ["uniform", "ecc"]\nbudgets = ["80%"]\nseeds = 2\n'
        "[settings]\ntrain_steps = 2\nsteps = 2\ntune_steps = 1\nround_to = 1\n",
        encoding="utf-8",
    )
    for module in (evidence, grids):
        monkeypatch.setattr(module, "RECIPES", tmp_path)
    monkeypatch.setitem(grids.DATA, "tiny", "cifar10")
    monkeypatch.setitem(grids.MEASURED_BATCH, "tiny", 256)
    monkeypatch.setitem(grids.VARIANTS, "tiny", {"uniform floor": grids.Variant({"uniform_floor": 0.8}, seeds=1)})
    networks, resnet = importlib.import_module("ecc.zoo.image_task"), importlib.import_module("ecc.zoo.resnet_cifar")
    small = replace(networks.NETWORKS["resnet20"], build=lambda outputs: resnet.CifarResNet(1, outputs))
    monkeypatch.setitem(networks.NETWORKS, "resnet20", small)
    monkeypatch.delitem(packed.WEIGHTS, "resnet20")  # random ones are trained
    images = torch.randint(256, (3, 16, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    splits = [data.Packed(some, torch.arange(16) % 2) for some in images]
    tiny = grids.for_all(data.ImageData("cifar10", ("even", "odd"), *splits))
    options = SimpleNamespace(
        name="tiny", data=tmp_path, root=tmp_path, out=tmp_path / "new" / "out.json", device="cpu", samples=40,
        methods=None, budgets=None, seeds=None, settings="{}",
    )  # fmt: skip
    recipe = recipes.read_recipe(tmp_path / "tiny.toml")
    task, source = grids.the_task(options, recipe, tiny), measure.find_meter("platform:jetson-tx2")
    grids.fitted(task, source, options)
    assert (tmp_path / "new" / "out.profile.gz").exists()
    requested = grids.the_grids(options, recipe, task)
    for grid in requested:
        grid.comparison.open(grid.runs)

    evidence.worker(options, tiny)

    assert evidence.unfinished(requested) == []
    first, even = requested
    trained = importlib.import_module("evidence_record").dense_weights
    assert list(trained(first)) == ["0", "1"]
    assert trained(first)["0"] != trained(first)["1"]
    assert trained(even) == {"0": trained(first)["0"]}  # the same network, and none of a seed that the variant has not
    evidence.measure_results(requested, task, 256, source, math.inf)
    rows = importlib.import_module("evidence_record").rows_of(requested)
    assert [(row.get("variant"), row["method"], row["seed"]) for row in rows] == [
        (None, "uniform", 0), (None, "ecc", 0), (None, "uniform", 1), (None, "ecc", 1), ("even", "ecc", 0)
    ]  # fmt: skip
    assert all(row["measured"]["joules"] < 0.9 * row["measured"]["dense_joules"] for row in rows)
