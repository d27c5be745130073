"""The evidence scripts: a tiny experiment from beginning to end, and the verdicts and tables on made-up records."""

from __future__ import annotations

import json
import math
import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecc.errors import BadMeasurement
from ecc.measure import DeviceState, Measured, Meter, MeterInfo, find_meter
from ecc.measure.window import check_state
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.grid import GridRun
from ecc.settings import MeasureSettings
from ecc.training import Interrupted
from ecc.zoo.data import ImageData, Packed
from ecc.zoo.image_task import NETWORKS
from ecc.zoo.recipe import read_recipe
from ecc.zoo.resnet_cifar import CifarResNet

pytest.importorskip("PIL")
import evidence
import evidence_data as data
import evidence_grid as grids
import evidence_meter
import evidence_record
import evidence_text
import packed

RECORD = {
    "environment": {"cpu": "made up", "date": "2026-01-01", "command": "benchmarks/evidence.py"},
    "device": "a GPU",
    "measured_batch": 4,
    "fit": {"mean": 0.01},
    "full_widths": {"a": 16, "b": 32},
    "recalibration_batches": 2,
    "held_out_images": 512,
    "width_multiple": 8,
    "settings": {"min_width_ratio": 0.1},
}


def row(
    method: str, budget: str, after: float, *, seed: int = 0, before: float = 0.5, of_budget: float | None = 0.99
) -> dict[str, Any]:
    """A run as evidence.py records it; the dense network scores 0.9 and uses 2 J."""
    found: dict[str, Any] = {"method": method, "budget": budget, "seed": seed, "widths": {"a": 8, "b": 24}}
    found["scores"] = {"dense": 0.9, "pruned": before, "finetuned": after}
    found["predicted"] = {"limit": 1.0, "result": 0.98}
    if of_budget is not None:
        joules = 2.0 * float(budget.rstrip("%")) / 100 * of_budget
        found["measured"] = {"joules": joules, "dense_joules": 2.0, "label": "measured"}
    return found


def missing(method: str, budget: str, reason: str = "not finished", seed: int = 0) -> dict[str, Any]:
    return {"method": method, "budget": budget, "seed": seed, "missing": reason}


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**RECORD, "rows": list(rows)}), encoding="utf-8")


def verdict(folder: Path, goal: str, where: str = "E1") -> Any:
    (one,) = [
        one for one in data.verdicts(data.experiments(folder)) if goal in one.goal and one.where.startswith(where)
    ]
    return one


@pytest.mark.slow
def test_a_fresh_experiment_runs_and_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "tiny.toml").write_text(
        'task = "resnet20"\nimage_size = [8, 8]\nbatch_size = 4\n'
        'methods = ["uniform", "ecc"]\nbudgets = ["80%"]\nseeds = 2\n'
        "[settings]\npretrain_steps = 2\nprune_steps = 2\nfinetune_steps = 1\nwidth_multiple = 1\n",
        encoding="utf-8",
    )
    for module in (evidence, grids):
        monkeypatch.setattr(module, "RECIPES", tmp_path)
    monkeypatch.setitem(grids.DATA, "tiny", "cifar10")
    monkeypatch.setitem(grids.MEASURED_BATCH, "tiny", 256)
    monkeypatch.setitem(grids.VARIANTS, "tiny", {"uniform floor": grids.Variant({"uniform_floor": 0.8}, seeds=1)})
    small = replace(NETWORKS["resnet20"], build=lambda outputs: CifarResNet(1, outputs))
    monkeypatch.setitem(NETWORKS, "resnet20", small)
    monkeypatch.delitem(packed.WEIGHTS, "resnet20")  # random ones are trained
    images = torch.randint(256, (3, 16, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    splits = [Packed(some, torch.arange(16) % 2) for some in images]
    tiny = grids.for_all(ImageData("cifar10", ("even", "odd"), *splits))
    options = SimpleNamespace(
        name="tiny", data=tmp_path, root=tmp_path, out=tmp_path / "new" / "out.json", device="cpu", samples=40,
        methods=None, budgets=None, seeds=None, settings="{}", variants="recipe", only={}, protocol="equal",
    )  # fmt: skip
    recipe = read_recipe(tmp_path / "tiny.toml")
    task, source = grids.the_task(options, recipe, tiny), find_meter("platform:jetson-tx2")
    energy = grids.fitted(task, source, options)
    assert (tmp_path / "new" / "out.profile.gz").exists()
    requested = grids.the_grids(options, recipe, task)
    for grid in requested:
        grid.comparison.open(grid.runs)

    evidence.worker(options, tiny)

    assert evidence.unfinished(requested, {}) == []
    first, variant = requested
    trained = evidence_record.dense_weights
    assert list(trained(first)) == ["0", "1"]
    assert trained(first)["0"] != trained(first)["1"]
    assert trained(variant) == {"0": trained(first)["0"]}  # the same network; the variant has one seed
    evidence.measure_results(requested, evidence.cost_evaluator(task, 256, energy, source), math.inf)
    rows = evidence_record.rows_of(requested)
    assert [(row.get("variant"), row["method"], row["seed"]) for row in rows] == [
        (None, "uniform", 0), (None, "ecc", 0), (None, "uniform", 1), (None, "ecc", 1), ("uniform floor", "ecc", 0)
    ]  # fmt: skip
    assert all(row["measured"]["joules"] < 0.9 * row["measured"]["dense_joules"] for row in rows)
    assert all(row["device"] == "cpu" and row["commit"] for row in rows)
    assert "--only method=uniform,variant=,budget=80%,seed=0 --again" in rows[0]["command"]
    evidence.forget(requested, {"method": "uniform", "seed": "1"})
    assert [cell.seed for _, cell in evidence.unfinished(requested, {})] == [1]


ECC_85, AMC_84 = row("ecc", "50%", 0.85), row("amc", "50%", 0.84)
AT_OR_ABOVE = {
    "ahead at every budget": ([ECC_85, AMC_84, row("ecc", "35%", 0.8), row("amc", "35%", 0.8)], "met", "35%: +0.00"),
    "behind at one budget": (
        [ECC_85, AMC_84, row("ecc", "35%", 0.8), row("lcp", "35%", 0.812)],
        "missed",
        "35%: -1.20",
    ),
    "a baseline is missing": ([ECC_85, AMC_84, missing("lcp", "50%")], "open", "without lcp"),
    "behind, and one missing": ([row("ecc", "50%", 0.83), AMC_84, missing("lcp", "50%")], "missed", "-1.00"),
    "ECC is missing": ([missing("ecc", "50%"), AMC_84], "open", "50%: no score of ecc"),
    "only common seeds count": (
        [
            row("ecc", "50%", 0.8),
            row("ecc", "50%", 0.9, seed=1),
            missing("amc", "50%"),
            row("amc", "50%", 0.88, seed=1),
        ],
        "met",
        "+2.00 (ECC 90.00 %, amc 88.00 %, 1 seed)",
    ),
    "a variant of ECC is no baseline": (
        [ECC_85, AMC_84, {**row("ecc", "50%", 0.9), "variant": "paper"}],
        "met",
        "+1.00",
    ),
}


@pytest.mark.parametrize("case", AT_OR_ABOVE)
def test_goal_at_or_above_every_baseline(tmp_path: Path, case: str) -> None:
    rows, word, numbers = AT_OR_ABOVE[case]
    write(tmp_path, "e1", rows)
    one = verdict(tmp_path, "at or above")
    assert (one.verdict, numbers in one.numbers) == (word, True), one


@pytest.mark.parametrize(
    ("goal", "name", "rows", "word"),
    [
        ("1 point ahead", "e1", [row("ecc", "35%", 0.810), row("amc", "35%", 0.8)], "met"),
        ("1 point ahead", "e1", [row("ecc", "35%", 0.8099), row("amc", "35%", 0.8)], "missed"),
        ("5 points ahead", "e3", [row("ecc", "50%", 0.7, before=0.65), row("amc", "50%", 0.9, before=0.6)], "met"),
        ("5 points ahead", "e3", [row("ecc", "50%", 0.7, before=0.64), row("amc", "50%", 0.9, before=0.6)], "missed"),
        ("of dense", "e4", [row("ecc", "50%", 0.897), row("amc", "50%", 0.5)], "met"),
        ("of dense", "e4", [row("ecc", "50%", 0.896), row("amc", "50%", 0.5)], "missed"),
        ("of dense", "e4", [row("ecc", "65%", 0.89), row("amc", "65%", 0.5)], "open"),
    ],
)
def test_goals_with_a_margin(tmp_path: Path, goal: str, name: str, rows: list[Any], word: str) -> None:
    write(tmp_path, name, rows)
    assert verdict(tmp_path, goal, name.upper()).verdict == word


def test_the_trained_dense_network_is_no_baseline_but_the_reference(tmp_path: Path) -> None:
    trained = [{**row("uniform", "100%", 0.93), "variant": data.DENSE}]
    write(tmp_path, "e4", [row("ecc", "50%", 0.899), row("amc", "50%", 0.8)])
    assert "0.10 points below dense" in verdict(tmp_path, "within 0.3 points of dense", "E4").numbers
    write(tmp_path, "e4", [row("ecc", "50%", 0.899), row("amc", "50%", 0.8), *trained])
    (found,) = data.experiments(tmp_path)
    assert (found.baselines, found.budgets, found.dense_trained()) == (["amc"], ["50%"], {0: 0.93})
    one = verdict(tmp_path, "within 0.3 points of dense", "E4")
    assert (one.verdict, one.numbers) == ("missed", "3.10 points below dense with the same training")
    assert "dense with the same training: 93.00" in evidence_text.about(found)


def test_scores_at_equal_energy_are_interpolated(tmp_path: Path) -> None:
    ours = row("ecc", "50%", 0.80, of_budget=1.1)  # 55 % of the dense energy
    theirs = [row("amc", "50%", 0.70, of_budget=1.0), row("amc", "80%", 0.88, of_budget=1.0)]
    write(tmp_path, "e1", [ours, *theirs, row("uniform", "80%", 0.60)])
    (found,) = data.experiments(tmp_path)
    assert data.at_equal_joules(found, "50%") == pytest.approx(100 * (0.80 - (0.70 + 0.18 * 5 / 30)))
    assert data.at_equal_joules(found, "80%") is None
    write(tmp_path, "e1", [row("ecc", "35%", 0.6, of_budget=1.0), *theirs])
    (found,) = data.experiments(tmp_path)
    assert data.at_equal_joules(found, "35%") == pytest.approx(-10.0)  # the baseline has no network as small


class Broken:
    """A comparison whose method `broken` raises an unexpected error, and whose dense network of seed 1 does."""

    settings = SimpleNamespace(prune_steps=1)
    seeds = 2
    runs = tuple(GridRun(method, "50%", seed) for seed in (0, 1) for method in ("amc", "broken", "ecc"))

    def unfinished(self, root: Path) -> list[GridRun]:
        return [cell for cell in self.runs if not cell.folder(root).exists()]

    def prerequisite(self, cell: GridRun) -> None:
        return None

    def needs_pretraining(self, seed: int, root: Path) -> bool:
        return seed == 1

    def pretrain(self, seed: int, root: Path) -> None:
        if seed == 1:
            raise RuntimeError("no memory for the dense network")

    def run_one(self, cell: GridRun, root: Path) -> None:
        if cell.method == "broken":
            raise RuntimeError("no memory")
        cell.folder(root).mkdir(parents=True)

    def write_failure(self, cell: GridRun, root: Path, error: str) -> None:
        cell.failure_file(root).parent.mkdir(parents=True, exist_ok=True)
        cell.failure_file(root).write_text(json.dumps({"error": error}), encoding="utf-8")


def test_an_unexpected_error_ends_one_run_and_no_worker_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "claims").mkdir()
    comparison: Any = Broken()
    grid = grids.Grid("", comparison, tmp_path / "runs")
    monkeypatch.setattr(evidence, "the_grids", lambda *_: [grid])
    monkeypatch.setattr(evidence, "the_task", lambda *_: None)
    options: Any = SimpleNamespace(name="alexnet-imagenette", root=tmp_path, device="cpu", only={})
    evidence.claimed(evidence.name_of(grid, GridRun("amc", "50%", 0)), tmp_path)  # by a worker that died

    data: Any = None
    evidence.worker(options, data)

    assert [cell.method for cell in grid.finished()] == ["ecc"]
    assert grid.failure(GridRun("broken", "50%", 0)) == "RuntimeError: no memory"
    assert "dense network" in str(grid.failure(GridRun("ecc", "50%", 1)))
    assert "Traceback" in capsys.readouterr().err


def test_runs_are_ordered_by_seed_and_then_the_longest_first(tmp_path: Path) -> None:
    comparison: Any = Broken()
    left = evidence.unfinished([grids.Grid("", comparison, tmp_path)], {})
    assert [(cell.seed, cell.method) for _, cell in left[:3]] == [(0, "amc"), (0, "ecc"), (0, "broken")]


def test_time_for_measuring_depends_on_the_results_there_are() -> None:
    assert evidence.time_after(0, 500.0) < evidence.time_after(20, 500.0) < evidence.time_after(500, 500.0)
    assert evidence.time_after(500, 500.0) <= 125.0


def test_a_network_that_cannot_be_measured_is_left_out(tmp_path: Path) -> None:
    comparison: Any = Broken()
    grid = grids.Grid("", comparison, tmp_path)
    widths = {"amc": 8, "broken": 16, "ecc": 24}
    for cell in comparison.runs[:3]:
        cell.folder(tmp_path).mkdir(parents=True)
        (cell.folder(tmp_path) / "widths.json").write_text(json.dumps({"a": widths[cell.method]}), encoding="utf-8")

    def cost(widths: dict[str, int]) -> Any:
        if widths.get("a") == 16:
            raise BadMeasurement("the reading is noisy")
        return SimpleNamespace(
            amounts={"energy": 1.0 + len(widths), "latency": 1.0}, relative_ci=0.01, label="measured"
        )

    evaluate: Any = cost
    evidence.measure_results([grid], evaluate, math.inf)
    assert [cell.method for _, cell, file in evidence.results_of([grid]) if file.exists()] == ["amc", "ecc"]
    assert evidence.unmeasured([grid]) == 1


# ---------------------------------------------------------------- measurements during the runs

INFO = MeterInfo(name="m", device="d", provenance=Measured(), scope="board")
GRAPH: Any = SimpleNamespace(variable=[SimpleNamespace(name="a", width=8)])


class Workers:
    """Threads in the place of workers: each trains, asks for measurements, and trains on."""

    def __init__(self, widths: Sequence[Sequence[int]], joules: Any) -> None:
        self.training, self.overlaps, self.asked = set[int](), 0, list[dict[str, int]]()
        self.readings: list[list[Any]] = [[] for _ in widths]
        self.widths, self.joules = widths, joules
        self.service = evidence_meter.MeasuringService(
            self.measure, INFO, multiprocessing.get_context("spawn"), len(widths)
        )
        self.threads = [threading.Thread(target=self.work, args=(number,)) for number in range(len(widths))]

    def measure(self, widths: Any) -> MeasuredCost:
        self.asked.append(dict(widths))
        time.sleep(0.02)
        self.overlaps += len(self.training)
        return MeasuredCost({"energy": self.joules(widths), "latency": 1.0}, "measured", 0.004)

    def train(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.service.meters[number].gate()
            self.training.add(number)
            time.sleep(0.003)
            self.training.discard(number)

    def work(self, number: int) -> None:
        meter = self.service.meters[number]
        try:
            self.train(number, 20 + 10 * number)
            for width in self.widths[number]:
                self.readings[number].append(meter.cost(GRAPH, {"a": width}))
        except (BadMeasurement, Interrupted) as error:
            self.readings[number].append(str(error))
        else:
            self.train(number, 20)
        meter.rest()

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        end = time.monotonic() + 30
        while (alive := [thread.is_alive() for thread in self.threads]) != [False] * len(alive):
            self.service.serve(alive)
            time.sleep(0.002)
            assert time.monotonic() < end


def test_networks_are_measured_while_all_workers_pause() -> None:
    workers = Workers([(8, 4), (4, 2), (), (2,)], lambda widths: float(widths.get("a", 8)))
    workers.run()
    assert workers.overlaps == 0
    assert [[one.joules for one in found] for found in workers.readings] == [[8, 4], [4, 2], [], [2]]
    assert all(one.relative_ci == 0.004 for found in workers.readings for one in found)
    asked = [one["a"] for one in workers.asked if one]
    assert sorted(asked) == [2, 4]  # each once; 8 are the dense network
    assert workers.service.readings == len(workers.asked) == 3


def test_readings_are_scaled_to_the_first_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_meter, "DENSE_SECONDS", 0.0)
    warmer = iter([1.0, 1.0, 1.1, 1.1])
    workers = Workers([(4, 2)], lambda widths: next(warmer) * widths.get("a", 8))
    workers.run()
    assert [one.joules for one in workers.readings[0]] == pytest.approx([4, 2])


def test_a_network_that_cannot_be_measured_fails_its_run_only() -> None:
    def joules(widths: Any) -> float:
        if widths.get("a") == 4:
            raise BadMeasurement("the reading is noisy")
        return 1.0

    workers = Workers([(4,), (2,)], joules)
    workers.run()
    assert workers.readings[0] == ["the reading is noisy"]
    assert workers.readings[1][0].joules == 1.0


def test_no_measurement_begins_after_the_end() -> None:
    workers = Workers([(4,)], lambda _: 1.0)
    (thread,) = workers.threads
    thread.start()
    while not workers.service.connections[0].poll():
        time.sleep(0.01)
    workers.service.serve([True], time.monotonic() - 1)
    assert workers.asked == []
    workers.service.stop()
    thread.join(10)
    assert workers.readings == [["stopped while it waited for a measurement."]]


def test_workers_that_wait_stop_when_the_time_is_over() -> None:
    workers = Workers([(4,)], lambda _: 1.0)
    (thread,) = workers.threads
    thread.start()
    workers.service.stop()
    thread.join(10)
    assert workers.readings == [["stopped while it waited for a measurement."]]


class BusyMeter:
    """A meter of a device that other processes use."""

    def read(self) -> float:
        return 7.0

    def describe(self) -> MeterInfo:
        return INFO

    def state(self) -> DeviceState:
        return DeviceState(temperature_celsius=50.0, other_processes=("process 7",))


def test_processes_that_pause_do_not_count_as_users_of_the_device() -> None:
    meter = evidence_meter.PausedProcesses(BusyMeter())
    assert isinstance(meter, Meter)
    assert (meter.read(), meter.describe()) == (7.0, INFO)
    assert meter.state() == DeviceState(temperature_celsius=50.0)
    check_state(meter.state(), INFO, MeasureSettings())  # a measurement is not refused
    with pytest.raises(BadMeasurement, match="process 7"):
        check_state(BusyMeter().state(), INFO, MeasureSettings())
