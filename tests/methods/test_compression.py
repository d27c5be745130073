"""Compressions from end to end: digits on a platform, and toys whose true cost is known."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ecc.constants import PEER_METHODS, TRANSFORMER_METHODS
from ecc.energy import EnergyModel, parse_budgets
from ecc.errors import BadBudget, BadFile, BadMeasurement, BadTask, EccError, InfeasibleBudget
from ecc.graph import live_channels, mask_channels_, with_widths
from ecc.methods import Amc, Compression, CompressSettings, NetAdapt, PruningContext, Uniform
from ecc.methods import compression as compression_module
from ecc.methods import runner as runner_module
from ecc.methods.base import magnitudes
from ecc.methods.budget_controller import TOLERANCE_BAND
from ecc.methods.ecc.optimizer_wrapper import PruningOptimizer
from ecc.methods.registry import METHODS, find_method
from ecc.methods.runner import describe_slow_data
from ecc.options import settings_from
from ecc.records import read_record
from ecc.run_records import PHASES, SCORES, BatchCount, DenseAndResult, RunSummary
from ecc.torch_utils import tensors_in
from ecc.training import Interrupted, RunDir, load_state
from ecc.zoo import find_task
from methods import jobs
from methods.jobs import (
    WIDE,
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
from methods.small import SMALL
from methods.works import work_of


def untrainable(*args: Any, **options: Any) -> Any:
    raise AssertionError("it trains")


class Curves:
    """A logger and a history."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str, float]] = []
        self.lines: list[dict[str, Any]] = []

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        if step is None:
            self.lines.append(dict(values))
        else:
            self.points += [(step, name, value) for name, value in values.items()]

    def close(self) -> None:
        raise AssertionError("it belongs to the caller")


# ---------------------------------------------------------------- digits, from end to end


class Digits:
    """One run of digits for all tests that look at it; the networks before and after slimming are kept."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.curves, self.messages = folder, Curves(), list[str]()
        real = compression_module.build_slim

        def build_slim(model: nn.Module, *rest: Any) -> nn.Module:
            small = real(model, *rest)
            self.masked, self.slim = copy.deepcopy(model).eval(), copy.deepcopy(small).eval()
            return small

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compression_module, "build_slim", build_slim)
            self.job = digits_job("50%")
            self.before = copy.deepcopy(self.job.task.model.state_dict())
            self.result = self.job.run(folder, progress=self.messages.append, history=self.curves)
        self.summary = self.result.summary


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return Digits(tmp_path_factory.mktemp("digits") / "run")


def test_the_measured_cost_meets_the_budget_and_every_number_is_labelled(digits: Digits) -> None:
    row, summary = digits.summary.budgets["energy"], digits.summary
    dense, found = (platform().cost(digits.job.graph, widths) for widths in ({}, digits.result.widths))  # type: ignore[union-attr]
    assert row.limit == pytest.approx(0.5 * dense.joules, rel=1e-12)
    assert (row.dense, row.result, row.met, summary.met) == (dense.joules, found.joules, True, True)
    assert summary.within_band
    assert TOLERANCE_BAND[0] <= row.result / row.limit <= TOLERANCE_BAND[1]
    assert summary.measured["latency"] == DenseAndResult(dense=dense.seconds, result=found.seconds)
    checks = [line for line in history_of(digits.folder) if line["phase"] == "cost_check"]
    assert {row.label, summary.label, *(line["label"] for line in checks)} == {"estimated"}
    steps = {line["step"] for line in checks}  # one message after each, also where several checks follow one step
    assert len([line for line in digits.messages if "J (estimated), " in line]) == len(steps)
    assert len(checks) == summary.cost_checks
    assert checks[-1]["widths"] == digits.result.widths


def test_the_slim_network_is_the_masked_one_before_finetuning(digits: Digits) -> None:
    images, task = torch.randn(32, 1, 8, 8), digits.job.task
    torch.testing.assert_close(digits.slim(images), digits.masked(images), rtol=1e-4, atol=1e-5)
    assert live_channels(digits.masked, digits.job.graph) == digits.result.widths
    assert not torch.equal(digits.result.model.eval()(images), digits.slim(images))
    assert digits.summary.max_relative_diff is not None
    assert digits.summary.max_relative_diff < 1e-5
    dense = copy.deepcopy(task.model)
    dense.load_state_dict(load_state(digits.folder / "dense.safetensors"))
    assert task.evaluate is not None
    networks = dense, digits.slim, digits.result.model
    assert digits.summary.scores == dict(zip(SCORES, map(task.evaluate, networks), strict=True))


def test_the_summary_and_the_files_hold_what_was_returned(digits: Digits) -> None:
    graph, widths, summary = digits.job.graph, digits.result.widths, digits.summary
    size = float(sum(parameter.numel() for parameter in digits.result.model.parameters()))
    assert summary.parameters == DenseAndResult(dense=float(graph.parameters()), result=size)
    assert summary.macs == DenseAndResult(dense=float(graph.macs()), result=float(graph.macs(widths)))
    assert (summary.widths, summary.full_widths) == (widths, graph.full_widths)
    assert summary.batches == BatchCount(total=26, lineage=26)
    assert read_record(digits.folder / "summary.json", RunSummary) == summary
    assert json.loads((digits.folder / "widths.json").read_text()) == widths
    assert EnergyModel.load(digits.folder / "energy.json") == digits_model()
    small = with_widths(find_task("digits").model, graph, {group.name: widths[group.name] for group in graph.prunable})
    small.load_state_dict(safetensors.torch.load_file(digits.folder / "slim.safetensors"))
    images = torch.randn(8, 1, 8, 8)
    assert torch.equal(small.eval()(images), digits.result.model.eval()(images))
    now = digits.job.task.model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in digits.before.items())  # the task is not changed


def test_the_history_has_every_phase_and_is_also_passed_on(digits: Digits) -> None:
    lines = history_of(digits.folder)
    assert tuple(dict.fromkeys(line["phase"] for line in lines if line["phase"] in PHASES)) == PHASES
    assert lines == [json.loads(json.dumps(line)) for line in digits.curves.lines]
    solver = [line for line in lines if line["phase"] == "solver"]
    costs = [line["cost"]["energy"] for line in solver]
    assert costs == sorted(costs, reverse=True)
    assert all(set(line["width_duals"]) == set(digits.job.graph.full_widths) for line in solver)


def test_a_finished_run_is_loaded_without_training(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "train", untrainable)
    monkeypatch.setattr(compression_module, "Training", untrainable)
    kept = [path for path in digits.folder.iterdir() if path.name not in ("environment.json", ".ecc-lock")]
    before = {path.name: path.read_bytes() for path in kept}
    for job in (digits_job("50%"), digits.job, digits_job("50%", log_every=1, checkpoint_steps=2, micro_batch=9)):
        again = job.run(digits.folder)
        assert same_result(again, digits.result)
        assert again.summary == digits.summary
    assert before == {path.name: path.read_bytes() for path in kept}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": 1}, "settings.seed = 0"),
        ({"prune_steps": 17}, "settings.prune_steps = 16"),
        ({"width_multiple": 4}, "width_multiple = 1"),
        ({"budget": "40%"}, r"budgets\[0\] = .*50% of dense"),
        ({"task": "other"}, 'task = "digits"'),
        ({"meter": None}, 'meter = "NVIDIA Jetson TX2"'),
        ({"method": "uniform"}, 'method.name = "ecc"'),
    ],
)
def test_the_folder_of_another_run_is_refused(digits: Digits, changes: dict[str, Any], field: str) -> None:
    values = {"pretrain_steps": 6, "prune_steps": 16, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | changes
    task = replace(digits.job.task, name=values.pop("task", "digits"))
    budgets, meter = parse_budgets([values.pop("budget", "50%")]), values.pop("meter", platform())
    method = values.pop("method", "ecc")
    settings = settings_from(CompressSettings, values)
    before = (digits.folder / "summary.json").read_bytes()
    with pytest.raises(BadFile, match=field):
        Compression(task, budgets, digits_model(), meter=meter, settings=settings, method=method).run(digits.folder)
    assert (digits.folder / "summary.json").read_bytes() == before


# ---------------------------------------------------------------- budgets and settings


def test_a_run_continues_with_a_fit_that_differs_in_the_last_digits(tmp_path: Path) -> None:
    """As a fit with another number of threads does."""
    first = wide_job().run(tmp_path / "a")
    job = wide_job()
    (model,) = job.energy_models.values()
    for factor, is_same in ((1 + 1e-12, True), (1.001, False)):
        fitted = replace(model.fitted, coefficients=tuple(factor * one for one in model.fitted.coefficients))
        other = Compression(
            job.task, job.budgets, replace(model, fitted=fitted), meter=job.meter, settings=job.settings
        )
        with nullcontext() if is_same else pytest.raises(BadFile, match="limits"):
            assert same_result(other.run(tmp_path / "a"), first)


def test_a_counted_budget_needs_no_model_and_no_meter(tmp_path: Path) -> None:
    settings = CompressSettings(prune_steps=20, finetune_steps=0, lr=1e-3)
    job = Compression(wide_task(), parse_budgets(["macs=50%", "params=60%"]), settings=settings)
    summary = job.run(tmp_path / "run").summary
    assert (summary.met, summary.within_band, summary.label, summary.device, summary.measured) == (
        True, True, "counted", "", {},
    )  # fmt: skip
    assert {row.label for row in summary.budgets.values()} == {"counted"}
    assert summary.macs is not None
    assert summary.macs.result == summary.budgets["macs"].result <= 0.5 * summary.macs.dense


def test_a_wrong_model_is_corrected_and_two_budgets_keep_their_labels(tmp_path: Path) -> None:
    job = wide_job("70%", "params=50%", name="residual", factor=0.7)
    said: list[str] = []
    result = job.run(tmp_path / "run", progress=said.append)
    assert said.count("no score: no evaluate= given") == 1
    rows, size = result.summary.budgets, sum(parameter.numel() for parameter in result.model.parameters())
    assert {name: row.label for name, row in rows.items()} == {"energy": "estimated", "params": "counted"}
    assert rows["params"].result == size <= 0.5 * float(job.graph.parameters())
    assert rows["energy"].result == true_model(job.graph).at(result.widths) <= rows["energy"].limit
    assert abs(job.energy_models["energy"].at(result.widths) / rows["energy"].result - 1) > 0.05
    steps = [line["step"] for line in history_of(tmp_path / "run") if line["phase"] == "cost_check"]
    assert len(steps) == result.summary.cost_checks > len(set(steps))  # several readings after one step


def test_widths_are_multiples_as_in_the_profile(tmp_path: Path) -> None:
    job = wide_job("50%")
    energy = job.energy_models["energy"]
    model = replace(energy, origin=replace(energy.origin, width_multiple=8))
    settings = CompressSettings(prune_steps=20, finetune_steps=0, lr=1e-3)
    summary = (
        Compression(wide_task(), job.budgets, model, meter=job.meter, settings=settings).run(tmp_path / "a").summary
    )
    assert (summary.width_multiple, summary.met) == (8, True)
    assert all(summary.widths[group.name] % 8 == 0 for group in job.graph.prunable)


@pytest.mark.parametrize(("width_lr", "is_met"), [(300.0, True), (1.0, False)])
def test_the_published_solver_is_measured_and_says_if_it_did_not_converge(
    tmp_path: Path, width_lr: float, is_met: bool
) -> None:
    constants = {"paper_width_penalty": 1.0, "paper_energy_penalty": 1.0, "paper_width_lr": width_lr}
    options = {"solver": "paper", "importance": "adam_norm", "prune_steps": 60, **constants}
    summary = wide_job("60%", factor=0.9, **options).run(tmp_path / "run").summary
    steps = [line["step"] for line in history_of(tmp_path / "run") if line["phase"] == "cost_check"]
    assert steps == [9, 30, 45, 60]
    assert (summary.met, "no pruning steps are left" in summary.note) == (is_met, not is_met)


def test_another_optimizer_trains_every_phase_with_its_own_rate(tmp_path: Path) -> None:
    made = []

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.003, momentum=0.9))
        return made[-1]

    settings = settings_from(
        CompressSettings, {"pretrain_steps": 2, "prune_steps": 20, "finetune_steps": 4, "log_every": 1}
    )
    job = Compression(wide_task(), parse_budgets(["macs=60%"]), settings=settings, optimizer=momentum)
    assert job.run(tmp_path / "run").summary.met
    rates = {line["phase"]: line["lr"] for line in reversed(history_of(tmp_path / "run")) if "lr" in line}
    assert rates == {"pretrain": 0.003, "prune": 0.003, "finetune": 0.003}  # at the first step of each phase
    assert len(made) == 4  # three phases, and one for the config
    with pytest.raises(BadFile, match="optimizer"):
        Compression(wide_task(), parse_budgets(["macs=60%"]), settings=settings).run(tmp_path / "run")


# ---------------------------------------------------------------- every method


def test_methods_have_names_and_the_matrix_has_all_of_them() -> None:
    assert {name: find_method(name).name for name in METHODS} == {name: name for name in METHODS}
    # The last two kinds are in zoo/test_language.py and baselines/test_torch_pruning.py.
    assert set(METHODS) == {*SMALL, *TRANSFORMER_METHODS, *PEER_METHODS}
    for name in METHODS:
        is_same = find_method(name).config() == find_method(name, quick=True).config()
        assert is_same == (name not in ("amc", "lcp", "legr"))  # a quick run is another run
    with pytest.raises(EccError, match=r"unknown method 'magic'; choose one of ecc, .*uniform"):
        Compression(wide_task(), parse_budgets(["macs=50%"]), method="magic")


@pytest.mark.parametrize("share", [pytest.param("65%", marks=pytest.mark.thorough), "35%"])
@pytest.mark.parametrize(
    "network",
    ["residual", *(pytest.param(n, marks=pytest.mark.thorough) for n in WIDE if n != "residual")],
)
@pytest.mark.parametrize("name", SMALL)
def test_every_method_meets_its_budget_with_the_same_number_of_batches(
    name: str, network: str, share: str, tmp_path: Path
) -> None:
    task = wide_task(network, evaluate_held_out=sum_of_squares)
    job = wide_job(share, name=network, factor=0.9, task=task)
    job.method = SMALL[name]()
    summary = job.run(tmp_path / "run").summary
    assert (summary.met, summary.method) == (True, name)
    assert summary.batches is not None
    assert summary.batches.total == 28  # 24 to prune, 4 to finetune
    assert summary.max_relative_diff is not None
    assert summary.max_relative_diff < 1e-4


def sum_of_squares(net: nn.Module) -> float:
    return -float(sum(parameter.detach().square().sum() for parameter in net.parameters()))


@pytest.mark.parametrize("method", ["ecc", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("uniform", "eap"))])
def test_a_network_with_masked_channels_ends_at_multiples(method: str, tmp_path: Path) -> None:
    task, graph = wide_task(evaluate_held_out=sum_of_squares), wide_job().graph
    mask_channels_(task.model, graph, {"conv1": torch.arange(5), "conv2": torch.arange(11, 20)})  # 91 and 55 are live
    settings = CompressSettings(prune_steps=12, finetune_steps=2, lr=1e-3, width_multiple=8)
    job = Compression(task, parse_budgets(["80%"]), true_model(graph), settings=settings, method=method)
    result = job.run(tmp_path / "run")
    network: Any = result.model
    assert (network.conv1.out_channels, network.conv2.out_channels) == tuple(result.widths.values())[:2]
    assert {name: width % 8 for name, width in result.widths.items() if name != "head"} == {"conv1": 0, "conv2": 0}
    assert result.summary.met


def test_unread_channels_of_an_unslimmed_network_are_removed(tmp_path: Path) -> None:
    def task() -> Any:
        found = wide_task()
        model: Any = found.model
        with torch.no_grad():
            for tensor in (model.conv1.weight, model.conv1.bias, model.bn1.weight, model.bn1.bias):
                tensor[5:] = 0
            model.conv2.weight[:, 5:] = 0  # 5 of 96 channels are read, less than the minimum width
        return found

    result = wide_job("70%", task=task()).run(tmp_path / "run")
    assert result.widths == {name: int(getattr(result.model, name).weight.shape[0]) for name in result.widths}
    assert result.widths["conv1"] == 5
    assert result.summary.budgets["energy"].result == pytest.approx(true_model(result.graph).at(result.widths))


def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
    _, inputs, targets, weights = batch
    return (weights * (model(inputs).flatten(1).mean(1) - targets).square()).mean()


def weighted_batches(epoch: int) -> Iterator[Any]:
    for number, (inputs, targets) in enumerate(jobs.noise_batches((3, 4, 4), epoch)):
        yield f"batch {number}", inputs, targets, torch.ones_like(targets)


@pytest.mark.parametrize("method", ["uniform", "one_shot", "amc", "lcp"])
def test_batches_that_only_the_loss_understands(method: str, tmp_path: Path) -> None:
    """Only the form of the batches differs, so the results are equal."""
    found = []
    for fields in ({}, {"train_batches": weighted_batches, "loss": weighted}):
        task = wide_task("residual", evaluate_held_out=lambda _: 0.0, **fields)
        settings = CompressSettings(prune_steps=4, finetune_steps=1)
        job = Compression(task, parse_budgets(["macs=60%"]), settings=settings, method=method)
        if method in SMALL:
            job.method = SMALL[method]()
        found.append(job.run(tmp_path / str(len(found))))
    assert same_result(*found)


# ---------------------------------------------------------------- stopped and resumed


class OneByOne:
    """Removes the least channel of the widest group in each step."""

    name = "one by one"
    needs_held_out = False
    fails_at = -1
    stops_at = -1

    def config(self) -> dict[str, Any]:
        return {"count": 1}

    def start(self, context: PruningContext) -> None:
        self.context, self.steps = context, 0

    @property
    def is_done(self) -> bool:
        return self.context.constraint_violation(self.context.widths()) <= 0

    def step(self) -> None:
        if self.steps == self.fails_at:
            raise KeyboardInterrupt
        if self.steps == self.stops_at:
            signal.raise_signal(signal.SIGINT)
        self.steps += 1
        context, widths = self.context, self.context.widths()
        widths[max(range(2), key=widths.__getitem__)] -= 1
        context.keep_channels_(context.model, magnitudes(context), widths)
        context.train(context.model, 1, 1e-3, context.stream)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])


def test_a_method_without_a_schedule_resumes_between_its_steps(tmp_path: Path) -> None:
    def run(folder: str, **fields: int) -> Any:
        job = wide_job("70%", factor=0.9, checkpoint_steps=1)
        job.method = method = OneByOne()
        vars(method).update(fields)
        return job.run(tmp_path / folder)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("parts", fails_at=5)
    with pytest.raises(
        Interrupted, match=r"stopped by signal 2 after step 8 of one by one.*Run the same command again"
    ):
        run("parts", stops_at=7)
    again = run("parts")
    assert same_result(whole, again)
    assert again.summary == whole.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


def test_a_run_that_is_stopped_in_every_phase_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """By signals; `test_resume.py` has kill -9."""
    settings: dict[str, Any] = {"pretrain_steps": 5, "prune_steps": 16, "finetune_steps": 5, "log_every": 2}
    score = {"evaluate": lambda net: float(next(net.parameters()).detach().sum())}
    whole, early, late = Curves(), Curves(), Curves()
    expected = wide_job("50%", task=wide_task(**score), **settings).run(tmp_path / "whole", loggers=[whole])
    messages: list[str] = []
    for stop in (3, 13, 11):  # batches drawn in that session, those that it skips included
        drawn = [0]

        def batches(epoch: int, drawn: list[int] = drawn, stop: int = stop) -> Iterator[Any]:
            for batch in jobs.noise_batches((3, 4, 4), epoch):
                drawn[0] += 1
                if drawn[0] == stop:
                    os.kill(os.getpid(), 15)
                yield batch

        job = wide_job("50%", task=wide_task(train_batches=batches, **score), **settings)
        with pytest.raises(Interrupted):
            job.run(tmp_path / "parts", progress=messages.append, loggers=[early] if stop == 3 else [])
    found = wide_job("50%", task=wide_task(**score), **settings).run(tmp_path / "parts", loggers=[late])
    assert same_result(expected, found)
    assert found.summary == expected.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    assert sum("pretraining the dense network" in line for line in messages) == 2  # not again once it was trained
    assert late.points == whole.points  # a logger gets every point once
    assert 0 < len(early.points) < len(whole.points)


@pytest.mark.parametrize(("factor", "least"), [(1e4, 6), (1e7, 12)])
@pytest.mark.parametrize("solver", ["scheduled", "admm"])
def test_steps_that_overflow_in_fp16_do_not_delay_pruning(
    factor: float, least: int, solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped: list[int] = []
    skip = PruningOptimizer.skip_step
    monkeypatch.setattr(PruningOptimizer, "skip_step", lambda solver: (skipped.append(solver._steps), skip(solver)))

    def run(folder: str, stop: int | None = None) -> Any:
        def batches(epoch: int) -> Iterator[Any]:
            for number, batch in enumerate(jobs.noise_batches((3, 4, 4), epoch), start=1):
                if stop == 4 * epoch + number:
                    os.kill(os.getpid(), 15)
                yield batch

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return factor * jobs.squared(outputs, targets)

        task = wide_task("residual", train_batches=batches, loss=loss)
        values = {"prune_steps": 12, "finetune_steps": 1, "precision": "fp16", "lr": 1e-4, "solver": solver}
        job = Compression(task, parse_budgets(["macs=50%"]), settings=settings_from(CompressSettings, values))
        return job.run(tmp_path / folder)

    whole = run("whole")
    count = len(skipped)
    assert count >= least
    assert whole.summary.met
    assert whole.summary.within_band
    with pytest.raises(Interrupted):
        run("parts", stop=6)
    assert same_result(run("parts"), whole)
    assert len(skipped) == 2 * count


@pytest.mark.parametrize(
    ("settings", "every"),
    [({"checkpoint_every": None}, None), ({"checkpoint_steps": 1}, 1), ({"checkpoint_steps": 5}, 5)],
)
def test_a_search_is_saved_when_a_checkpoint_is_due(
    settings: dict[str, int | None], every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a search take milliseconds: a checkpoint after each one would take longer than the search."""
    saved: list[int] = []
    save = RunDir.save

    def count(run: RunDir, state: dict[str, Any]) -> None:
        if state["phase"] == "prune":
            saved.append(state["extra"]["controller"]["steps"])
        save(run, state)

    monkeypatch.setattr(RunDir, "save", count)
    job = wide_job("45%", task=wide_task(evaluate_held_out=lambda _: 0.0), **settings)
    job.method = SMALL["lcp"]()
    job.run(tmp_path / "run")
    checks = [line["step"] for line in history_of(tmp_path / "run") if line["phase"] == "cost_check"]
    assert checks[-1] > 2 * len(checks)
    due = [] if every is None else range(every, max(saved) + 1, every)
    assert sorted(set(saved)) == sorted({*checks, *due})


@pytest.mark.parametrize("name", [name for name in SMALL if name != "ecc"])
def test_a_checkpoint_does_not_hold_the_dense_weights_twice(name: str) -> None:
    context, method = work_of(share=0.5), SMALL[name]()
    method.start(context)
    dense = {tensor.shape for tensor in context.model.state_dict().values() if tensor.dim() > 1}
    assert not [tensor.shape for tensor in tensors_in(method.state_dict()) if tensor.shape in dense]


@pytest.mark.thorough
def test_two_runs_of_one_job_are_independent_and_other_weights_are_another_run(tmp_path: Path) -> None:
    job = wide_job("50%")
    one, other = job.run(tmp_path / "one"), job.run(tmp_path / "other")
    assert same_result(one, other)
    assert history_of(tmp_path / "one") == history_of(tmp_path / "other")
    with torch.no_grad():
        next(job.task.model.parameters()).mul_(2)
    with pytest.raises(BadFile, match="weights"):
        job.run(tmp_path / "one")
    job.settings = replace(job.settings, pretrain_steps=1)
    assert job.config()["weights"] is None  # trained by the run


# ---------------------------------------------------------------- refused before anything is written


class Undeclared(Uniform):
    def step(self) -> None:
        self.context.held_out(self.context.model)


def two_processes(job: Compression) -> None:
    job.distributed.size, job.method = 2, Uniform()


@pytest.mark.parametrize(
    ("budget", "change", "error", "message"),
    [
        ("1%", None, InfeasibleBudget, r"energy budget .* is not reachable.*Options: a budget of at least"),
        ("50%", two_processes, EccError, "'uniform' does not support distributed training"),
        *(
            ("50%", method, BadTask, f"'{method.name}' compares candidates.*'chain' has no evaluate_held_out")
            for method in (NetAdapt(), Amc())
        ),
    ],
)
def test_what_is_not_possible_is_refused_before_anything_is_trained(
    budget: str, change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    job = wide_job(budget, task=wide_task(train_batches=untrainable), pretrain_steps=5)
    if callable(change):
        change(job)
    elif change is not None:
        job.method = change
    with pytest.raises(error, match=message):
        job.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_jobs_are_refused(tmp_path: Path) -> None:
    job = wide_job()
    energy, task = job.energy_models["energy"], job.task
    with pytest.raises(BadBudget, match="two models are given for the same resource"):
        Compression(task, job.budgets, [energy, energy])
    with pytest.raises(BadBudget, match="needs a latency model"):
        Compression(task, parse_budgets(["latency=1ms"]), energy)
    with pytest.raises(BadBudget, match="energy model"):
        Compression(task, job.budgets)
    with pytest.raises(BadFile, match="belongs to"):
        Compression(wide_task("residual"), job.budgets, energy)
    with pytest.raises(BadMeasurement, match="fitted on paper, but the meter reads stone"):
        Compression(task, job.budgets, energy, meter=Truth(true_model(job.graph), device="stone"))
    for budgets, more in ((("60%",), {"width_multiple": 8}), (("60%", "params=90%"), {})):
        with pytest.raises(EccError, match="solver 'paper' supports one budget"):
            wide_job(*budgets, solver="paper", **more)
    frozen = Compression(task, job.budgets, energy, freeze=["conv1"])
    assert "conv1" not in {group.name for group in frozen.graph.prunable}
    (tmp_path / "run").write_text("mine")
    with pytest.raises(BadFile):
        wide_job(task=wide_task(train_batches=untrainable)).run(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_bad_tasks_are_refused(tmp_path: Path) -> None:
    def raises(model: Any) -> float:
        raise FileNotFoundError("no test split")

    broken, infinite, buffer, frozen = wide_task(), wide_task(), wide_task(), wide_task()
    broken.model.conv1.bias.data[0] = float("nan")  # type: ignore[union-attr,index]
    infinite.model.conv1.bias.data[0] = float("inf")  # type: ignore[union-attr,index]
    buffer.model.register_buffer("scale", torch.tensor([1.0, float("nan")]))
    frozen.model.requires_grad_(False)
    for task, message in (
        (wide_task(train_batches=None, loss=None), "'chain' has no train_batches"),
        (broken, "conv1.bias of task 'chain' contains NaN"),
        (infinite, "conv1.bias of task 'chain' contains NaN or infinite values"),
        (buffer, "scale of task 'chain' contains NaN"),
        (frozen, "no parameter of task 'chain' is trainable"),
        (wide_task(evaluate=raises), "evaluate of task 'chain' raised FileNotFoundError: no test split"),
        (wide_task(evaluate=lambda _: float("nan")), "evaluate of task 'chain' returned nan"),
    ):
        with pytest.raises(BadTask, match=message):
            wide_job(task=task).run(tmp_path / "run")
    job = wide_job("50%")
    job.method = Undeclared()
    with pytest.raises(BadTask, match="its needs_held_out must be True"):
        job.run(tmp_path / "other")
    assert not (tmp_path / "run" / "summary.json").exists()


class Causal(nn.Module):
    """Each position has the mean of the positions up to it, by a mask of -inf as in causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.head = nn.Linear(6, 32), nn.Linear(32, 2)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.wide(self.mask.softmax(-1) @ inputs).relu())


def test_a_buffer_may_be_infinite(tmp_path: Path) -> None:
    task = wide_task("transformer MLP", model=Causal())
    settings = CompressSettings(prune_steps=4, finetune_steps=1)
    result = Compression(task, parse_budgets(["macs=60%"]), settings=settings).run(tmp_path / "run")
    assert result.summary.met
    assert torch.equal(result.model.mask, task.model.mask)  # type: ignore[arg-type]  # tensors


@pytest.mark.thorough
def test_slow_data_is_reported_if_a_device_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "80% of the training time was spent in train_batches" in describe_slow_data(gpu, 80.0, 100.0)
    assert [describe_slow_data(*each) for each in ((gpu, 40.0, 100.0), (gpu, 0.8, 1.0), (cpu, 80.0, 100.0))] == [""] * 3
    messages: list[str] = []
    monkeypatch.setattr(runner_module, "describe_slow_data", lambda _, drawing, all_: f"{0 < drawing < all_}")
    wide_job("50%", pretrain_steps=2).run(tmp_path / "run", progress=messages.append)
    assert "True" in messages


@pytest.mark.parametrize("method", ["netadapt", "eap", "halp"])
def test_methods_that_train_between_passes_use_the_given_optimizer(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, made = list[float](), list[torch.optim.Optimizer]()

    class Momentum(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def momentum(parameters: Any) -> torch.optim.Optimizer:
        made.append(Momentum(parameters, lr=0.05, momentum=0.9))
        return made[-1]

    monkeypatch.setattr(compression_module, "MaskedAdam", lambda *given: pytest.fail("Adam, not the given optimizer"))
    graph = jobs._graph("chain")
    job = Compression(
        jobs.wide_task("chain", evaluate_held_out=lambda model: 0.0), parse_budgets(("50%",)), jobs.true_model(graph),
        meter=jobs.Truth(jobs.true_model(graph)), method=SMALL[method](), optimizer=momentum,
        settings=settings_from(CompressSettings, {"prune_steps": 20, "finetune_steps": 0}),
    )  # fmt: skip
    result = job.run(tmp_path / "run")
    assert len(steps) >= 4
    assert set(steps) == {0.05}
    assert result.summary.met  # masked channels stay masked although the momentum would move them
