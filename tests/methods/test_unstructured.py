from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

from ecc.energy import nonzero_cost, parse_budgets
from ecc.errors import BadBudget, BadFile, BadMeasurement, BadTask, BadWidths, EccError, InfeasibleBudget, NoMeter
from ecc.measure.meters.platform import Platform
from ecc.methods import CompressedModel, CompressSettings, WeightCompression, runner
from ecc.methods.ecc.weight_solver import count_nonzeros
from ecc.methods.unstructured import zero_skipping_platform
from ecc.options import settings_from
from ecc.records import read_record
from ecc.run_records import PHASES, SCORES, BatchCount, RunSummary
from ecc.task import Task, with_batch_size
from ecc.training import Interrupted, load_state
from ecc.zoo import find_task
from measure.fakes import FakeBoard, FakeMeter
from methods import jobs
from methods.jobs import history_of, wide_task

EYERISS = Platform("eyeriss")


def sparse_job(*budgets: str, task: Task | None = None, **settings: Any) -> WeightCompression:
    values = {"prune_steps": 16, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | settings
    made = settings_from(CompressSettings, values)
    return WeightCompression(task or wide_task(), parse_budgets(budgets or ("40%",)), EYERISS, settings=made)


def same(one: CompressedModel, other: CompressedModel) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return one.summary == other.summary and all(torch.equal(first[name], second[name]) for name in first)


def nonzeros_of(result: CompressedModel) -> dict[str, int]:
    assert result.summary.sparse is not None
    return result.summary.sparse.nonzeros


def untrainable(*args: Any, **options: Any) -> Any:
    raise AssertionError("it trains")


# ---------------------------------------------------------------- digits, from end to end


class Digits:
    """One run of digits for all tests that look at it."""

    def __init__(self, folder: Path) -> None:
        task = find_task("digits")
        self.folder, self.lines = folder, list[dict[str, Any]]()
        self.task = replace(task, example_input=with_batch_size(task.example_input, 1))
        self.before = copy.deepcopy(self.task.model.state_dict())
        values = {"pretrain_steps": 60, "pretrain_lr": 3e-3, "prune_steps": 60, "finetune_steps": 20, "lr": 2e-3}
        self.job = sparse_job("40%", task=self.task, **values, log_every=10)
        self.result = self.job.run(folder, history=self)
        self.summary = self.result.summary

    def log(self, line: Any) -> None:
        self.lines.append(dict(line))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return Digits(tmp_path_factory.mktemp("sparse") / "run")


def test_the_estimate_meets_the_budget_and_the_network_still_works(digits: Digits) -> None:
    cost, row = nonzero_cost(digits.result.graph, EYERISS), digits.summary.budgets["energy"]
    assert row.dense == pytest.approx(EYERISS.cost(digits.result.graph, {}).joules, rel=1e-9)
    assert row.limit == pytest.approx(0.4 * row.dense)
    assert row.result == pytest.approx(float(cost.value(torch.tensor(list(nonzeros_of(digits.result).values())))))
    assert row.limit - max(cost.coefficients) <= row.result <= row.limit * (1 + 1e-9)
    assert (digits.summary.met, digits.summary.label, row.label) == (True, "estimated", "estimated")
    scores = digits.summary.scores
    assert tuple(scores) == SCORES
    assert min(scores["dense"], scores["finetuned"]) > 0.8  # chance is 0.1
    assert digits.task.evaluate is not None
    assert scores["finetuned"] == digits.task.evaluate(digits.result.model)


def test_zero_weights_stay_zero_during_finetuning(digits: Digits) -> None:
    cost, sparse = nonzero_cost(digits.result.graph, EYERISS), digits.summary.sparse
    solver = [line for line in digits.lines if line["phase"] == "solver"]
    assert sparse is not None
    assert count_nonzeros(digits.result.model, cost) == solver[-1]["nonzeros"] == sparse.nonzeros
    energies = [line["cost"]["energy"] for line in solver]
    assert energies == sorted(energies, reverse=True)
    assert 0.1 < sum(sparse.nonzeros.values()) / sum(sparse.weights.values()) < 0.4
    assert all(count >= 0.1 * sparse.weights[name] for name, count in sparse.nonzeros.items())
    assert "no GPU does this" in sparse.assumes
    shapes = {name: parameter.shape for name, parameter in digits.task.model.named_parameters()}
    assert {name: parameter.shape for name, parameter in digits.result.model.named_parameters()} == shapes


def test_files_hold_what_was_returned(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_record(digits.folder / "summary.json", RunSummary) == digits.summary
    assert json.loads((digits.folder / "nonzeros.json").read_text()) == nonzeros_of(digits.result)
    state = digits.result.model.state_dict()
    with safetensors.safe_open(digits.folder / "sparse.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), state[name]) for name in state)
    assert history_of(digits.folder) == [json.loads(json.dumps(line)) for line in digits.lines]
    assert digits.summary.batches == BatchCount(total=140, lineage=140)
    assert all(torch.equal(digits.task.model.state_dict()[name], value) for name, value in digits.before.items())
    monkeypatch.setattr(runner, "train", untrainable)
    assert same(digits.job.run(digits.folder), digits.result)  # without training
    other = WeightCompression(digits.task, parse_budgets(["50%"]), EYERISS, settings=digits.job.settings)
    with pytest.raises(BadFile, match=r"budgets\[0\]"):
        other.run(digits.folder)


# ---------------------------------------------------------------- stopped and resumed


class Killed(BaseException):
    """Nothing catches this, so the files are those that kill -9 would leave."""


SETTINGS: dict[str, Any] = {"pretrain_steps": 5, "prune_steps": 16, "finetune_steps": 6, "log_every": 2}


@pytest.mark.parametrize("way", ["signal", pytest.param("kill", marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_in_every_phase_ends_bit_for_bit_the_same(tmp_path: Path, way: str) -> None:
    def scored(**fields: Any) -> Task:
        return wide_task(evaluate=lambda model: float(next(model.parameters()).detach().sum()), **fields)

    expected = sparse_job("40%", task=scored(), **SETTINGS).run(tmp_path / "whole")
    phases = []
    for stop in (3, 7, 7, 7, 7, 7, 7, 7):  # batches that a session draws, those that it skips included
        drawn = [0]

        def batches(epoch: int, drawn: list[int] = drawn, stop: int = stop) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in jobs.noise_batches((3, 4, 4), epoch):
                drawn[0] += 1
                if drawn[0] == stop and way == "kill":
                    raise Killed
                if drawn[0] == stop:
                    os.kill(os.getpid(), 15)
                yield batch

        every = 2 if way == "kill" else None
        job = sparse_job("40%", task=scored(train_batches=batches), **SETTINGS, checkpoint_steps=every)
        try:
            job.run(tmp_path / "parts")
        except (Killed, Interrupted):
            phases.append(load_state(tmp_path / "parts" / "checkpoint.safetensors")["state"]["phase"])
    assert set(phases) == set(PHASES)
    found = sparse_job("40%", task=scored(), **SETTINGS).run(tmp_path / "parts")
    assert same(found, expected)
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


# ---------------------------------------------------------------- budgets and refusals


def test_an_infeasible_budget_is_refused_before_training(tmp_path: Path) -> None:
    job = sparse_job("40%")
    (found,) = job.feasibility()
    full = torch.tensor(job.cost.full_widths, dtype=torch.float64)
    assert found.uniform_ratio is not None
    assert float(job.cost.value(found.uniform_ratio * full)) == pytest.approx(found.limit)
    message = r"not reachable: with 90 % of the weights in every group .*min_width_ratio=0.45 \(reaches"
    with pytest.raises(InfeasibleBudget, match=message):
        sparse_job("40%", task=wide_task(train_batches=untrainable), min_width_ratio=0.9).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_devices_that_do_not_skip_zeros_are_refused() -> None:
    for source in (Platform("jetson-tx2"), FakeMeter(FakeBoard()), jobs.Truth(jobs.digits_model())):
        with pytest.raises(BadMeasurement, match=r"scattered zeros\. Use platform:eyeriss"):
            WeightCompression(wide_task(), parse_budgets(["40%"]), source)
    for spec in ("auto", "nvml", "platform:gtx-1080-ti"):
        with pytest.raises(BadMeasurement, match="scattered zeros"):
            zero_skipping_platform(spec)
    with pytest.raises(NoMeter, match="did you mean 'eyeriss'"):
        zero_skipping_platform("platform:eyeris")
    assert zero_skipping_platform("platform:eyeriss").name == "eyeriss"


@pytest.mark.parametrize(
    ("budgets", "options", "error", "message"),
    [
        (("40%", "params=5k"), {}, BadBudget, "one energy budget; given: energy, params"),
        (("latency=5ms",), {}, BadBudget, "given: latency"),
        (("40%",), {"width_multiple": 8}, EccError, "width_multiple has no effect on unstructured pruning"),
        (("40%",), {"uniform_floor": 0.5}, EccError, "uniform_floor has no effect"),
        (("40%",), {"solver": "admm"}, EccError, "solver has no effect"),
        (("40%",), {"importance": "taylor"}, EccError, "importance has no effect"),
        (("40%",), {"depth": False}, EccError, "depth has no effect"),
        (("40%",), {"task": wide_task(train_batches=None, loss=None)}, BadTask, "has no train_batches"),
        (("40%",), {"task": wide_task(model=nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))}, BadWidths, "no convolution"),
    ],
)
def test_bad_jobs_are_refused(budgets: tuple[str, ...], options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sparse_job(*budgets, **options)
