from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ecc.energy import EnergyModel, parse_budgets
from ecc.errors import BadBudget, BadFile, BadMeasurement, BadTask, InfeasibleBudget
from ecc.graph import live_channels, mask_channels_, with_widths
from ecc.methods import Compression, CompressSettings
from ecc.methods import compression as compress
from ecc.methods import runner as phases
from ecc.methods.compression import CompressedModel
from ecc.methods.landing import BAND
from ecc.methods.registry import find_method
from ecc.options import settings_from
from ecc.training import Interrupted, load_state
from ecc.zoo import find_task
from methods import jobs
from methods.jobs import (
    Truth,
    digits_job,
    digits_model,
    history_of,
    platform,
    same_result,
    true_model,
    wide_job,
    wide_task,
)


class Masked:
    """Remembers the network that was cut, and what it was cut to."""

    def __init__(self) -> None:
        self.model = self.small = nn.Module()

    def __call__(self, model: nn.Module, *rest: Any) -> nn.Module:
        self.model = copy.deepcopy(model).eval()
        self.small = compress_slim(model, *rest)
        cut = copy.deepcopy(self.small).eval()
        small, self.small = self.small, cut
        return small


compress_slim = compress.build_slim


class Digits:
    """One run of digits, made once for all tests that look at it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.lines = folder, [], []  # type: ignore[var-annotated]
        self.masked = Masked()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compress, "build_slim", self.masked)
            self.job = digits_job("50%")
            self.before = copy.deepcopy(self.job.task.model.state_dict())
            self.result = self.job.run(folder, progress=self.told.append, history=self)
        self.summary = self.result.summary

    def log(self, facts: Any) -> None:
        self.lines.append(dict(facts))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return Digits(tmp_path_factory.mktemp("digits") / "run")


# ---------------------------------------------------------------- digits, from end to end


def test_the_budget_is_met_on_the_scales_within_the_band(digits: Digits) -> None:
    row = digits.summary["budgets"]["energy"]
    dense, found = (platform().cost(digits.job.graph, widths) for widths in ({}, digits.result.widths))  # type: ignore[union-attr]
    assert row["limit"] == pytest.approx(0.5 * dense.joules, rel=1e-12)
    assert row["dense"] == dense.joules
    assert row["result"] == found.joules
    assert row["met"]
    assert digits.summary["met"]
    assert found.joules <= row["limit"]
    assert (found.joules >= BAND[0] * row["limit"]) == (digits.summary["note"] == "")
    assert digits.summary["weighed"]["result"] == {"energy": found.joules, "latency": found.seconds}


def test_every_number_is_called_an_estimate(digits: Digits) -> None:
    assert digits.summary["label"] == "estimated"
    assert {row["label"] for row in digits.summary["budgets"].values()} == {"estimated"}
    weighings = [facts for facts in history_of(digits.folder) if facts["phase"] == "cost_check"]
    assert weighings
    assert {facts["label"] for facts in weighings} == {"estimated"}
    assert len([line for line in digits.told if ": energy " in line and " J (estimated), " in line]) == len(weighings)


def test_the_scores_are_those_of_the_networks(digits: Digits) -> None:
    scores = digits.summary["scores"]
    assert list(scores) == ["dense", "pruned", "finetuned"]
    task = digits.job.task
    assert task.evaluate is not None
    dense = copy.deepcopy(task.model)
    dense.load_state_dict(load_state(digits.folder / "dense.safetensors"))
    assert scores["dense"] == task.evaluate(dense)
    assert scores["pruned"] == task.evaluate(digits.masked.model) == task.evaluate(digits.masked.small)
    assert scores["finetuned"] == task.evaluate(digits.result.model)


def test_the_cut_network_is_the_masked_one_before_it_is_tuned(digits: Digits) -> None:
    images = torch.randn(32, 1, 8, 8)
    masked, small = digits.masked.model(images), digits.masked.small(images)
    torch.testing.assert_close(small, masked, rtol=1e-4, atol=1e-5)
    assert live_channels(digits.masked.model, digits.job.graph) == digits.result.widths
    assert not torch.equal(digits.result.model.eval()(images), small)  # tuning went on from there
    assert 0 <= digits.summary["max_relative_diff"] < 1e-5


def test_the_slim_network_has_the_widths_and_sizes_that_are_told(digits: Digits) -> None:
    graph, widths = digits.job.graph, digits.result.widths
    size = sum(parameter.numel() for parameter in digits.result.model.parameters())
    assert digits.summary["parameters"] == {"dense": float(graph.parameters()), "result": float(size)}
    assert digits.summary["macs"] == {"dense": float(graph.macs()), "result": float(graph.macs(widths))}
    assert digits.summary["widths"] == widths
    assert digits.summary["full_widths"] == graph.full_widths
    assert all(width <= graph.full_widths[name] for name, width in widths.items())


def test_the_files_can_be_read_by_others(digits: Digits) -> None:
    summary = json.loads((digits.folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(digits.summary))
    widths = json.loads((digits.folder / "widths.json").read_text())
    assert widths == digits.result.widths
    state = safetensors.torch.load_file(digits.folder / "slim.safetensors")
    graph = digits.job.graph
    small = with_widths(find_task("digits").model, graph, {group.name: widths[group.name] for group in graph.prunable})
    small.load_state_dict(state)
    images = torch.randn(8, 1, 8, 8)
    assert torch.equal(small.eval()(images), digits.result.model.eval()(images))


def test_the_history_tells_every_phase_and_is_told_to_others(digits: Digits) -> None:
    lines = history_of(digits.folder)
    assert [
        phase for phase in dict.fromkeys(facts["phase"] for facts in lines) if phase in ("dense", "solve", "tune")
    ] == [
        "dense",
        "solve",
        "tune",
    ]
    assert lines == [json.loads(json.dumps(facts)) for facts in digits.lines]
    settings = digits.job.settings
    total = settings.pretrain_steps + settings.steps + settings.finetune_steps
    assert digits.summary["batches"] == {"total": total, "lineage": total}
    spent = [facts["spent"]["energy"] for facts in lines if facts["phase"] == "solver"]
    assert spent == sorted(spent, reverse=True)
    last = [facts for facts in lines if facts["phase"] == "cost_check"][-1]
    assert last["widths"] == digits.result.widths


def test_the_task_is_left_as_it_was(digits: Digits) -> None:
    now = digits.job.task.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in digits.before.items())


def test_a_finished_run_is_shown_again_without_training(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("it trains")

    monkeypatch.setattr(phases, "train", refuse)
    before = {path.name: path.read_bytes() for path in digits.folder.iterdir() if path.name != "environment.json"}
    fresh = digits_job("50%").run(digits.folder)
    same = digits.job.run(digits.folder)  # the very object that made it
    after = {path.name: path.read_bytes() for path in digits.folder.iterdir() if path.name != "environment.json"}
    assert before == after | {".ecc-lock": before[".ecc-lock"]}
    for found in (fresh, same):
        assert same_result(found, digits.result)
        assert found.summary == json.loads(json.dumps(digits.summary))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "settings.seed = 0, and now settings.seed = 1"),
        ({"prune_steps": 17}, "settings.steps = 16"),
        ({"min_width_ratio": 0.2}, "settings.min_width_ratio = 0.1"),
        ({"width_multiple": 4}, "width_multiple = 1, and now width_multiple = 4"),
        ({"budget": "40%"}, r"budgets\[0\] = .*0.5 of dense"),
        ({"task": "other"}, 'task = "digits", and now task = "other"'),
        ({"source": None}, 'meter = "NVIDIA Jetson TX2", and now meter = null'),
    ],
)
def test_the_folder_of_another_run_is_refused_by_the_field(digits: Digits, changes: dict[str, Any], field: str) -> None:
    changes = dict(changes)
    budget, task = changes.pop("budget", "50%"), digits.job.task
    task = replace(task, name=changes.pop("task", "digits"))
    source = changes.pop("source", platform())
    values = {"pretrain_steps": 6, "prune_steps": 16, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | changes
    job = Compression(
        task, parse_budgets([budget]), digits_model(), meter=source, settings=settings_from(CompressSettings, values)
    )
    before = (digits.folder / "summary.json").read_bytes()
    with pytest.raises(BadFile, match=f"was begun with {field}"):
        job.run(digits.folder)
    assert (digits.folder / "summary.json").read_bytes() == before


def test_the_folder_holds_the_energy_model_for_those_who_have_nothing_else(digits: Digits) -> None:
    kept = EnergyModel.load(digits.folder / "energy.json")
    assert kept == digits_model()
    solver = [line for line in history_of(digits.folder) if line["phase"] == "solver"]
    assert all(set(line["width_duals"]) <= set(kept.groups) and line["width_duals"] for line in solver)


def test_how_often_it_looks_is_not_what_makes_a_run(digits: Digits) -> None:
    again = digits_job("50%", log_every=1, checkpoint_steps=2, checkpoint_seconds=None).run(digits.folder)
    assert again.widths == digits.result.widths


def test_the_result_says_what_came_out(digits: Digits) -> None:
    assert isinstance(digits.result, CompressedModel)
    assert digits.result.graph is digits.job.graph


# ---------------------------------------------------------------- toys


def test_a_wrong_model_is_corrected_and_the_report_has_the_weight(tmp_path: Path) -> None:
    job = wide_job("50%", factor=0.7)
    result = job.run(tmp_path / "run")
    true = jobs.true_model(job.graph)
    share = true.at(result.widths) / (0.5 * true.dense)
    assert BAND[0] <= share <= BAND[1]
    row = result.summary["budgets"]["energy"]
    assert row["result"] == true.at(result.widths)
    assert row["limit"] == pytest.approx(0.5 * true.dense)
    assert job.costs[0].label == "estimated"
    assert abs(float(job.energy_models["energy"].at(result.widths)) / row["result"] - 1) > 0.05  # the model's own word


def test_two_runs_of_one_job_do_not_know_of_each_other(tmp_path: Path) -> None:
    job = wide_job("50%")
    one, other = job.run(tmp_path / "one"), job.run(tmp_path / "other")
    assert same_result(one, other)
    assert one.summary == other.summary
    assert history_of(tmp_path / "one") == history_of(tmp_path / "other")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "other")]
    assert configs[0] == configs[1]


def test_without_a_source_everything_is_called_predicted(tmp_path: Path) -> None:
    graph = wide_job().graph
    model = jobs.wrong_model(graph, 0.8)
    settings = settings_from(CompressSettings, dict(prune_steps=20, finetune_steps=0, lr=1e-3, kd_weight=0.0))
    result = Compression(wide_task(), parse_budgets(["50%"]), model, settings=settings).run(tmp_path / "run")
    assert result.summary["label"] == "predicted"
    assert result.summary["budgets"]["energy"]["label"] == "predicted"
    assert model.at(result.widths) <= 0.5 * model.dense
    assert result.summary["scores"] == {}  # the toy has none
    assert BAND[0] <= model.at(result.widths) / (0.5 * model.dense)


def test_two_budgets_hold_and_each_has_its_label(tmp_path: Path) -> None:
    job = wide_job("70%", "params=50%", name="residual")
    result = job.run(tmp_path / "run")
    rows = result.summary["budgets"]
    assert {name: row["label"] for name, row in rows.items()} == {"energy": "estimated", "params": "counted"}
    size = sum(parameter.numel() for parameter in result.model.parameters())
    assert rows["params"]["result"] == size <= 0.5 * float(job.graph.parameters())
    assert rows["energy"]["result"] <= rows["energy"]["limit"]
    assert result.summary["met"]


def test_widths_are_rounded_as_the_profile_was(tmp_path: Path) -> None:
    job = wide_job("50%")
    origin = replace(job.energy_models["energy"].origin, width_multiple=8)
    model = replace(job.energy_models["energy"], origin=origin)
    settings = CompressSettings(prune_steps=20, finetune_steps=0, lr=1e-3)
    rounded = Compression(wide_task(), job.budgets, model, meter=job.meter, settings=settings)
    result = rounded.run(tmp_path / "run")
    assert result.summary["width_multiple"] == rounded.width_multiple == 8
    assert all(result.widths[group.name] % 8 == 0 for group in job.graph.prunable)
    assert result.summary["met"]


def test_groups_can_be_bound_to_the_even_cut(tmp_path: Path) -> None:
    free, bound = (
        wide_job("70%", name="residual", uniform_floor=floor).run(tmp_path / str(floor)) for floor in (0.0, 0.9)
    )
    least = [min(one.widths[g.name] / g.width for g in one.graph.prunable) for one in (free, bound)]
    assert least[0] < least[1]
    assert bound.summary["met"]


def test_what_is_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """By a signal in each of the three phases; see also `test_resume.py`, with kill -9."""
    settings: dict[str, Any] = {"pretrain_steps": 5, "prune_steps": 16, "finetune_steps": 5, "log_every": 2}
    peace = wide_job("50%", **settings).run(tmp_path / "peace")
    told: list[str] = []
    for stop in (3, 13, 11):  # batches drawn in that session, those that it skips among them
        drawn = [0]

        def batches(epoch: int, drawn: list[int] = drawn, stop: int = stop) -> Iterator[Any]:
            for batch in jobs.noise_batches((3, 4, 4), epoch):
                drawn[0] += 1
                if drawn[0] == stop:
                    os.kill(os.getpid(), 15)
                yield batch

        job = wide_job("50%", task=wide_task(train_batches=batches), **settings)
        with pytest.raises(Interrupted):
            job.run(tmp_path / "war", progress=told.append)
    war = wide_job("50%", **settings).run(tmp_path / "war")
    assert same_result(peace, war)
    assert war.summary == peace.summary
    assert history_of(tmp_path / "war") == history_of(tmp_path / "peace")
    assert sum("training the dense network" in line for line in told) == 1 + 1  # not again once it was trained


# ---------------------------------------------------------------- refused before the long work


def untrainable(*args: Any) -> Any:
    raise AssertionError("it trains")


def test_what_cannot_be_reached_is_refused_before_a_step_is_spent(tmp_path: Path) -> None:
    task = wide_task(train_batches=untrainable)
    with pytest.raises(InfeasibleBudget, match=r"budget .* J of energy is below .* the least this network can use"):
        wide_job("1%", task=task, pretrain_steps=5).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_scales_of_another_device_are_refused_at_once() -> None:
    job = wide_job()
    source = Truth(jobs.true_model(job.graph), device="stone")
    with pytest.raises(BadMeasurement, match="fitted on paper, and the meter reads stone"):
        Compression(job.task, job.budgets, job.energy_models["energy"], meter=source)


def test_bad_jobs_are_refused() -> None:
    job = wide_job()
    energy = job.energy_models["energy"]
    with pytest.raises(BadTask, match="'chain' has no train_batches and loss"):
        Compression(wide_task(train_batches=None, loss=None), job.budgets, energy)
    with pytest.raises(BadBudget, match="no energy model was given"):
        Compression(job.task, job.budgets, [])
    with pytest.raises(BadBudget, match="two of the energy models are about the same resource"):
        Compression(job.task, job.budgets, [energy, energy])
    with pytest.raises(BadBudget, match="budget of latency but no model of it"):
        Compression(job.task, parse_budgets(["latency=1ms"]), energy)
    with pytest.raises(BadFile, match="the energy model belongs to network"):
        Compression(wide_task("residual"), job.budgets, energy)
    frozen = Compression(job.task, job.budgets, energy, freeze=["conv1"])  # the model knows its width, too
    assert "conv1" not in {group.name for group in frozen.graph.prunable}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(BadFile, match="is a file; a run needs a folder"):
        wide_job(task=wide_task(train_batches=untrainable)).run(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("method", [None, "uniform", "eap", "netadapt", "lcp", "amc"])
def test_a_network_with_dead_channels_ends_at_round_widths(method: str | None, tmp_path: Path) -> None:
    task = wide_task(evaluate_held_out=lambda net: -float(sum(p.detach().abs().sum() for p in net.parameters())))
    graph = wide_job().graph
    dead = {"conv1": torch.arange(5), "conv2": torch.arange(11, 20)}  # 91 of 96 and 55 of 64 live
    mask_channels_(task.model, graph, dead)
    job = Compression(
        task,
        parse_budgets(["80%"]),
        true_model(graph),
        settings=CompressSettings(prune_steps=12, finetune_steps=2, lr=1e-3, width_multiple=8),
        method=None if method is None else find_method(method, quick=True),
    )
    result = job.run(tmp_path / "run")
    assert {name: width % 8 for name, width in result.widths.items() if name != "head"} == {"conv1": 0, "conv2": 0}
    network: Any = result.model
    assert (network.conv1.out_channels, network.conv2.out_channels) == tuple(result.widths.values())[:2]
    assert result.summary["budgets"]["energy"]["met"]
