from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadFile, BadTask
from ecc.methods import CompressSettings, phases
from ecc.methods.runner import CompressionRunner, about_slow_batches
from ecc.training import Interrupted, RunDir, load_state, save_state
from ecc.zoo import find_task


class Halving(CompressionRunner[dict[str, Any]]):
    """The least that a compression can be: it halves all weights and trains on."""

    began = 0

    def _begin(self) -> None:
        self.began += 1

    def _asked(self) -> dict[str, Any]:
        return {"factor": 0.5}

    def _go(self, run: RunDir) -> dict[str, Any]:
        model = self.task.model
        reached, stream = self._reached(run), self._stream()
        teacher = self._dense(run, model, stream, reached)
        self.had_teacher = teacher is not None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        self._train(run, model, self._adam(model), stream, "solve", teacher)
        self._log(run, {"phase": "halving", "total": stream.total})
        save_state(run.path / "slim.safetensors", model.state_dict())
        run.finish({"scores": self.scores, "total": stream.total})
        return {"scores": self.scores, "total": stream.total}

    def _as_it_was(self, run: RunDir, summary: dict[str, Any]) -> dict[str, Any]:
        return {**summary, "again": True}


def halving(**changes: Any) -> Halving:
    settings = CompressSettings(
        **{"pretrain_steps": 3, "prune_steps": 2, "finetune_steps": 1, "pretrain_lr": 1e-3, **changes}
    )
    return Halving(find_task("digits"), settings, "cpu")


class Notes:
    """A history."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, facts: Any) -> None:
        self.lines.append(dict(facts))


def test_phases_share_stream_scores_and_history(tmp_path: Path) -> None:
    job, notes, told = halving(), Notes(), []
    result = job.run(tmp_path / "run", history=notes, progress=told.append)
    assert result["total"] == 5  # three batches before, two of the solve
    assert list(result["scores"]) == ["dense"]
    assert told[0] == "training the dense network, 3 steps"
    assert {"phase": "halving", "total": 5} in notes.lines
    assert {line["phase"] for line in notes.lines} == {"dense", "score", "solve", "halving"}
    assert {"phase": "score", "dense": result["scores"]["dense"], "total": 3} in notes.lines
    assert set(load_state(tmp_path / "run" / "dense.safetensors")) == set(job.task.model.state_dict())
    assert job.had_teacher


class Curves:
    """A logger."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str, float]] = []

    def log(self, facts: Any, step: int) -> None:
        self.points += [(step, name, value) for name, value in facts.items()]

    def close(self) -> None:
        raise AssertionError("it belongs to the caller")


def test_a_logger_of_a_run_that_was_stopped_has_each_point_once(tmp_path: Path) -> None:
    whole, first, second, late = (Curves() for _ in range(4))
    halving(log_every=1).run(tmp_path / "whole", loggers=[whole])
    drawn = [0]

    def stopping(epoch: int) -> Any:
        for batch in find_task("digits").train_batches(epoch):  # type: ignore[misc]  # digits have some
            drawn[0] += 1
            if drawn[0] == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    job = halving(log_every=1)
    job.task = replace(job.task, train_batches=stopping)
    with pytest.raises(Interrupted):
        job.run(tmp_path / "run", loggers=[first])
    halving(log_every=1).run(tmp_path / "run", loggers=[second])
    halving(log_every=1).run(tmp_path / "run", loggers=[late])  # it is finished
    assert 0 < len(first.points) < len(whole.points)
    assert second.points == late.points == whole.points
    assert [step for step, name, _ in whole.points if name.endswith("/loss")] == [1, 2, 3, 4, 5]
    assert (3, "score/dense") in [(step, name) for step, name, _ in whole.points]


def test_a_finished_run_is_shown_again(tmp_path: Path) -> None:
    first = halving().run(tmp_path / "run")
    again = halving().run(tmp_path / "run")
    assert again == {**first, "again": True}


def test_what_changes_no_result_may_change_between_sessions(tmp_path: Path) -> None:
    halving().run(tmp_path / "run")
    assert halving(log_every=1, checkpoint_steps=7).run(tmp_path / "run")["again"]
    assert halving(micro_batch=16).run(tmp_path / "run")["again"]  # as one does that is out of memory
    with pytest.raises(BadFile, match=r"settings\.lr"):
        halving(lr=0.5).run(tmp_path / "run")


def test_refusals_come_before_anything_is_written(tmp_path: Path) -> None:
    class Refusing(Halving):
        def _begin(self) -> None:
            raise BadFile("no")

    with pytest.raises(BadFile, match="no"):
        Refusing(find_task("digits"), None, "cpu").run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_without_distillation_there_is_no_teacher(tmp_path: Path) -> None:
    job = halving(distill=0.0, pretrain_steps=0)
    job.run(tmp_path / "run")
    assert not job.had_teacher
    assert not (tmp_path / "run" / "dense.safetensors").exists()


def test_a_task_that_cannot_be_trained_is_refused() -> None:
    task = replace(find_task("digits"), train_batches=None, loss=None)
    with pytest.raises(BadTask, match="has no train_batches and loss; compressing needs both"):
        Halving(task, None, "cpu")


def test_frozen_parameters_are_not_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    adam = halving(lr=0.25)._adam(model)
    assert [id(p) for group in adam.param_groups for p in group["params"]] == [id(p) for p in model[1].parameters()]
    assert adam.param_groups[0]["lr"] == 0.25


def test_a_network_that_cannot_be_trained_is_refused_at_once() -> None:
    task = find_task("digits")
    task.model.head.bias.data[0] = float("nan")  # type: ignore[union-attr,index]  # it has a head
    with pytest.raises(BadTask, match=r"head\.bias of task 'digits' holds NaN"):
        Halving(task, CompressSettings(), "cpu")
    frozen = find_task("digits")
    frozen.model.requires_grad_(False)
    with pytest.raises(BadTask, match="no parameter of task 'digits' can be trained"):
        Halving(frozen, CompressSettings(), "cpu")


def test_an_evaluation_that_raises_is_one_line(tmp_path: Path) -> None:
    def evaluate(model: Any) -> float:
        raise FileNotFoundError("no test split")

    job = halving()
    job.task = replace(job.task, evaluate=evaluate)
    with pytest.raises(BadTask, match="evaluate of task 'digits' raised FileNotFoundError: no test split"):
        job.run(tmp_path / "run")


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused_before_anything_is_pruned(score: float, tmp_path: Path) -> None:
    job = halving()
    job.task = replace(job.task, evaluate=lambda _: score)
    with pytest.raises(BadTask, match=rf"evaluate of task 'digits' gave {score}; give a finite number"):
        job.run(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_slow_batches_are_told_where_a_device_waits_for_them() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "80% of the time went into train_batches" in about_slow_batches(gpu, 80.0, 100.0)
    assert about_slow_batches(gpu, 40.0, 100.0) == ""
    assert about_slow_batches(gpu, 0.8, 1.0) == "", "of a moment nothing can be said"
    assert about_slow_batches(cpu, 80.0, 100.0) == ""


def test_the_time_of_drawing_is_told_after_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []

    def told(device: torch.device, drawing: float, whole: float) -> str:
        seen.append((drawing, whole))
        return f"slow on {device}"

    monkeypatch.setattr(phases, "about_slow_batches", told)
    lines: list[str] = []
    settings = CompressSettings(pretrain_steps=0, prune_steps=3, finetune_steps=0)
    Halving(find_task("digits"), settings, "cpu").run(tmp_path / "run", progress=lines.append)
    assert "slow on cpu" in lines
    assert all(0 < drawing < whole for drawing, whole in seen)
