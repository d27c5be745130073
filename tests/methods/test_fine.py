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
from torch import Tensor

from ecc.energy import nonzero_cost, parse_budgets
from ecc.errors import BadBudget, BadFile, BadMeasurement, BadTask, BadWidths, EccError, InfeasibleBudget, NoMeter
from ecc.measure import find_meter
from ecc.measure.meters.platform import Platform
from ecc.methods import CompressSettings, SparseResult, WeightCompression, phases
from ecc.methods.ecc.weight_solver import count_nonzeros
from ecc.methods.unstructured import zero_skipping_platform
from ecc.options import settings_from
from ecc.task import Task, with_batch_size
from ecc.training import Interrupted, load_state
from ecc.zoo import find_task
from measure.fakes import FakeBoard, FakeMeter
from methods import jobs
from methods.jobs import history_of, wide_task

EYERISS = Platform("eyeriss")


def fine_job(*budgets: str, task: Task | None = None, **settings: Any) -> WeightCompression:
    """A compression of a toy."""
    values = {"prune_steps": 16, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | settings
    return WeightCompression(
        task or wide_task(),
        parse_budgets(budgets or ("40%",)),
        EYERISS,
        settings=settings_from(CompressSettings, values),
    )


# ---------------------------------------------------------------- digits, from end to end


class Digits:
    """One run of digits, made once for all tests that look at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.lines = folder, [], []  # type: ignore[var-annotated]
        self.task = find_task("digits")
        self.before = copy.deepcopy(self.task.model.state_dict())
        settings = settings_from(
            CompressSettings,
            dict(
                pretrain_steps=60,
                pretrain_lr=3e-3,
                prune_steps=60,
                finetune_steps=20,
                lr=2e-3,
                log_every=10,
                checkpoint_seconds=None,
            ),
        )
        self.job = WeightCompression(self.task, parse_budgets(["40%"]), EYERISS, settings=settings)
        self.result = self.job.run(folder, history=self, progress=self.told.append)
        self.summary = self.result.summary

    def log(self, facts: Any) -> None:
        self.lines.append(dict(facts))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return Digits(tmp_path_factory.mktemp("fine") / "run")


def test_digits_meet_the_budget_and_are_read_well(digits: Digits) -> None:
    cost = nonzero_cost(digits.result.graph, EYERISS)
    row = digits.summary["budgets"]["energy"]
    assert row["dense"] == pytest.approx(EYERISS.cost(digits.result.graph, {}).joules, rel=1e-9)
    assert row["limit"] == pytest.approx(0.4 * row["dense"])
    counts = torch.tensor(list(digits.result.nonzeros.values()))
    assert row["result"] == pytest.approx(float(cost.value(counts)))
    assert row["limit"] - max(cost.coefficients) <= row["result"] <= row["limit"] * (1 + 1e-9)
    assert digits.summary["met"]
    assert row["met"]
    scores = digits.summary["scores"]
    assert list(scores) == ["dense", "pruned", "finetuned"]
    assert scores["dense"] > 0.8
    assert scores["finetuned"] > 0.8  # chance is 0.1
    assert digits.task.evaluate is not None
    assert scores["finetuned"] == digits.task.evaluate(digits.result.model)


def test_everything_is_called_an_estimate_and_says_what_it_assumes(digits: Digits) -> None:
    assert digits.summary["label"] == digits.summary["budgets"]["energy"]["label"] == "estimated"
    assert "no GPU works so" in digits.summary["assumes"]
    assert digits.summary["granularity"] == "weight"


def test_what_is_zero_stays_zero_while_the_rest_is_tuned(digits: Digits) -> None:
    cost = nonzero_cost(digits.result.graph, EYERISS)
    solved = [facts["nonzeros"] for facts in digits.lines if facts["phase"] == "solver"]
    energies = [facts["spent"]["energy"] for facts in digits.lines if facts["phase"] == "solver"]
    assert digits.result.nonzeros == count_nonzeros(digits.result.model, cost) == solved[-1]
    assert energies == sorted(energies, reverse=True)
    full = digits.summary["weights"]
    assert sum(digits.result.nonzeros.values()) / sum(full.values()) == pytest.approx(1 - digits.summary["sparsity"])
    assert 0.6 < digits.summary["sparsity"] < 0.9
    assert all(count >= 0.1 * full[name] for name, count in digits.result.nonzeros.items())
    assert digits.summary["sparsities"]["head.weight"] == 1 - digits.result.nonzeros["head.weight"] / 480
    before = dict(digits.task.model.named_parameters())
    assert all(p.shape == before[name].shape for name, p in digits.result.model.named_parameters())


def test_files_hold_what_was_returned(digits: Digits) -> None:
    assert json.loads((digits.folder / "summary.json").read_text()) == json.loads(json.dumps(digits.summary))
    assert json.loads((digits.folder / "nonzeros.json").read_text()) == digits.result.nonzeros
    state = digits.result.model.state_dict()
    found = load_state(digits.folder / "sparse.safetensors")
    assert all(torch.equal(found[name], state[name]) for name in state)
    with safetensors.safe_open(digits.folder / "sparse.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        assert torch.equal(file.get_tensor("head.weight"), state["head.weight"])
    assert history_of(digits.folder) == [json.loads(json.dumps(facts)) for facts in digits.lines]
    assert digits.summary["batches"] == {"total": 140, "lineage": 140}
    assert all(torch.equal(digits.task.model.state_dict()[name], value) for name, value in digits.before.items())


def test_a_finished_run_is_shown_again_without_training(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "train", untrainable)
    again = digits.job.run(digits.folder)
    assert same(again, digits.result)
    assert again.summary == json.loads(json.dumps(digits.summary))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"budgets": ["50%"]}, r"budgets\[0\] = .*0.4 of dense"),
        ({"settings": {"seed": 5}}, "settings.seed = 0"),
        ({"platform": Platform("eyeriss", tile=8)}, 'meter = "eyeriss"'),
    ],
)
def test_the_folder_of_another_run_is_refused_by_the_field(digits: Digits, changes: dict[str, Any], field: str) -> None:
    settings = replace(digits.job.settings, **changes.get("settings", {}))
    budgets = parse_budgets(changes.get("budgets", ["40%"]))
    job = WeightCompression(digits.task, budgets, changes.get("platform", EYERISS), settings=settings)
    with pytest.raises(BadFile, match=f"was begun with {field}"):
        job.run(digits.folder)


def same(one: SparseResult, other: SparseResult) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return one.nonzeros == other.nonzeros and all(torch.equal(first[name], second[name]) for name in first)


def untrainable(*args: Any, **options: Any) -> Any:
    raise AssertionError("it trains")


# ---------------------------------------------------------------- stopped and killed


class Killed(BaseException):
    """Nobody catches this, so that what lies on the disk is what kill -9 would leave."""


SETTINGS: dict[str, Any] = {"pretrain_steps": 5, "prune_steps": 16, "finetune_steps": 6, "log_every": 2}


def scored(**fields: Any) -> Task:
    return wide_task(evaluate=lambda model: float(next(model.parameters()).detach().sum()), **fields)


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SparseResult]:
    folder = tmp_path_factory.mktemp("peace") / "run"
    return folder, fine_job("40%", task=scored(), **SETTINGS).run(folder)


@pytest.mark.parametrize("way", ["signal", "kill"])
def test_a_run_that_is_stopped_in_each_phase_goes_on_bit_for_bit(
    tmp_path: Path, peace: tuple[Path, SparseResult], way: str
) -> None:
    phases = []
    for stop in (3, 7, 7, 7, 7, 7, 7, 7):  # batches that a session draws, those that it skips among them
        drawn = [0]

        def batches(epoch: int, drawn: list[int] = drawn, stop: int = stop) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in jobs.noise_batches((3, 4, 4), epoch):
                drawn[0] += 1
                if drawn[0] == stop and way == "kill":
                    raise Killed
                if drawn[0] == stop:
                    os.kill(os.getpid(), 15)
                yield batch

        task = scored(train_batches=batches)
        job = fine_job("40%", task=task, **SETTINGS, checkpoint_steps=2 if way == "kill" else None)
        try:
            job.run(tmp_path / "war")
        except (Killed, Interrupted):
            phases.append(load_state(tmp_path / "war" / "checkpoint.safetensors")["state"]["phase"])
    assert set(phases) == {"dense", "solve", "tune"}
    assert len(phases) > 4
    war = fine_job("40%", task=scored(), **SETTINGS).run(tmp_path / "war")
    folder, result = peace
    assert same(war, result)
    assert war.summary == result.summary
    assert history_of(tmp_path / "war") == history_of(folder)
    for name in ("nonzeros.json", "summary.json", "config.json"):
        assert (tmp_path / "war" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "settings", [{"finetune_steps": 0}, {"distill": 0.0}, {"prune_steps": 1, "finetune_steps": 0}], ids=str
)
def test_phases_can_be_left_out(tmp_path: Path, settings: dict[str, Any]) -> None:
    result = fine_job("40%", **settings).run(tmp_path / "run")
    assert result.summary["met"]
    assert result.summary["scores"] == {}
    assert not (tmp_path / "run" / "dense.safetensors").exists()


def test_joules_and_joules_an_item(tmp_path: Path) -> None:
    whole = fine_job("40%")
    dense = whole.cost.dense
    task = replace(wide_task(), example_input=with_batch_size(wide_task().example_input, 2))
    assert fine_job(f"{0.5 * dense:.17g} J", task=task).limit == pytest.approx(0.5 * dense)
    assert fine_job(f"{0.25 * dense:.17g} J/image", task=task).limit == pytest.approx(0.5 * dense)


# ---------------------------------------------------------------- refused before the long work


def test_the_reach_of_a_budget(tmp_path: Path) -> None:
    job = fine_job("40%")
    found = job.reach()
    full = torch.tensor(job.cost.full_widths, dtype=torch.float64)
    assert (found.dense, found.limit) == pytest.approx((job.cost.dense, 0.4 * job.cost.dense))
    assert found.label == "estimated"
    assert found.uniform_ratio is not None
    assert float(job.cost.value(found.uniform_ratio * full)) == pytest.approx(found.limit)
    task = wide_task(train_batches=untrainable)
    with pytest.raises(InfeasibleBudget, match=r"J of energy is below .* lower min_width_ratio"):
        fine_job("40%", task=task, min_width_ratio=0.9).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_devices_that_do_not_skip_zeros_are_refused_in_one_line() -> None:
    for source in (Platform("jetson-tx2"), FakeMeter(FakeBoard()), jobs.Truth(jobs.digits_model())):
        with pytest.raises(
            BadMeasurement, match=r"save no energy on scattered zeros\. Give platform:eyeriss"
        ) as caught:
            WeightCompression(wide_task(), parse_budgets(["40%"]), source)
        assert "\n" not in str(caught.value)
    for spec in ("auto", "nvml", "none", "platform:gtx-1080-ti", "cputime:15W"):
        with pytest.raises(BadMeasurement, match="scattered zeros"):
            zero_skipping_platform(spec)
    with pytest.raises(NoMeter, match="did you mean 'eyeriss'"):
        zero_skipping_platform("platform:eyeris")
    assert zero_skipping_platform("platform:eyeriss").name == "eyeriss"


def test_bad_jobs_are_refused() -> None:
    eyeriss = find_meter("platform:eyeriss")
    with pytest.raises(BadTask, match="'chain' has no train_batches and loss"):
        WeightCompression(wide_task(train_batches=None, loss=None), parse_budgets(["40%"]), eyeriss)
    with pytest.raises(BadBudget, match="one budget of energy, and this is about energy, params"):
        fine_job("40%", "params=5k")
    with pytest.raises(BadBudget, match="this is about latency"):
        fine_job("latency=5ms")
    with pytest.raises(BadBudget, match="this is about nothing"):
        WeightCompression(wide_task(), [], eyeriss)
    with pytest.raises(EccError, match="width_multiple=8 is for widths"):
        fine_job("40%", width_multiple=8)
    with pytest.raises(EccError, match=r"uniform_floor=0.5 is for widths"):
        fine_job("40%", uniform_floor=0.5)
    with pytest.raises(BadWidths, match="no convolution or linear layer"):
        fine_job("40%", task=wide_task(model=torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ReLU())))
