from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.task import Task
from ecc.training.run_dir import open_run
from ecc.training.schedules import Cosine
from ecc.training.signals import Interrupted
from training.toys import Kept, fit, same_weights, toy_task, without_wall


@pytest.mark.parametrize("first", [1, 3, 8, 13, 19])
def test_n_and_n_steps_are_2n_steps_bit_for_bit(tmp_path: Path, first: int) -> None:
    whole_kept, (whole, _) = Kept(), fit(20)
    with open_run(tmp_path / "whole", {}) as run:
        fit(20, run=run)
        expected = without_wall(run.history())

    def stop(step: int, facts: Any) -> None:
        if step == first:
            signal.raise_signal(signal.SIGTERM)

    with open_run(tmp_path / "run", {}) as run, pytest.raises(Interrupted):
        fit(20, run=run, on_step=stop)
    with open_run(tmp_path / "run", {}) as run:
        model, outcome = fit(20, run=run, history=whole_kept)
        assert outcome.resumed_at == first
        assert without_wall(run.history()) == expected
    assert same_weights(model, whole)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_resumes_bit_for_bit(tmp_path: Path, precision: Any) -> None:
    whole, _ = fit(10, precision=precision)
    for steps in (5, 10):
        with open_run(tmp_path / "run", {}) as run:
            model, _ = fit(steps, run=run, precision=precision)
    assert same_weights(model, whole)


def test_the_scale_that_fp16_has_found_is_taken_up(tmp_path: Path) -> None:
    """The loss is so large that the first steps overflow and are left out, until the scale fits."""

    def large(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1000 * F.cross_entropy(outputs, targets)

    whole, _ = fit(20, precision="fp16", task=toy_task(loss=large))
    for steps in (14, 20):
        with open_run(tmp_path / "run", {}) as run:
            model, _ = fit(steps, run=run, precision="fp16", task=toy_task(loss=large))
            state = run.checkpoint()
    assert state is not None
    assert 0 < state["scaler"]["scale"] < 2.0**16
    assert same_weights(model, whole)


def test_the_rates_that_a_training_began_with_are_kept(tmp_path: Path) -> None:
    """An optimizer that comes from an earlier phase starts at another rate than a fresh one."""
    whole, _ = fit(10, lr=0.01, schedule=Cosine())

    def stop(step: int, facts: Any) -> None:
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    with open_run(tmp_path / "run", {}) as run, pytest.raises(Interrupted):
        fit(10, lr=0.01, schedule=Cosine(), run=run, on_step=stop)
    with open_run(tmp_path / "run", {}) as run:
        assert same_weights(fit(10, lr=0.5, schedule=Cosine(), run=run)[0], whole)


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        first, _ = fit(4, run=run)
    with open_run(tmp_path / "run", {}) as run:
        second, outcome = fit(4, run=run)
        assert (outcome.steps, outcome.resumed_at, outcome.loss) == (4, 4, None)
    assert same_weights(first, second)


def test_checkpoints_come_by_steps_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(**options: Any) -> list[int]:
        steps = []
        with open_run(tmp_path / str(len(list(tmp_path.iterdir()))), {}) as run:
            monkeypatch.setattr(run, "save", lambda state: steps.append(state["step"]))
            fit(10, run=run, **options)
        return steps

    assert saved(checkpoint_steps=4) == [4, 8, 10]
    assert saved(checkpoint_steps=None) == [10]
    clock = iter(range(1000))
    monkeypatch.setattr("ecc.training.loop.time.monotonic", lambda: float(next(clock)))
    assert len(saved(checkpoint_seconds=3.0)) > 3


def test_phases_of_one_run_follow_each_other(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        fit(4, run=run, phase="solve", extra=lambda: {"widths": [1, 2]})
        state = run.checkpoint()
        assert state is not None
        assert (state["phase"], state["step"], state["extra"]) == ("solve", 4, {"widths": [1, 2]})
        model, outcome = fit(6, run=run, phase="fine-tune")
        assert outcome.resumed_at == 0
        assert [(facts["phase"], facts["step"]) for facts in run.history()] == [
            *(("solve", 3), ("solve", 4), ("fine-tune", 3), ("fine-tune", 6))
        ]
    assert same_weights(model, fit(6, phase="fine-tune")[0])


def test_a_hook_can_end_it_for_good(tmp_path: Path) -> None:
    for resumed_at in (0, 4):
        with open_run(tmp_path / "run", {}) as run:
            _, outcome = fit(20, run=run, on_step=lambda step, facts: step == 4)
            assert (outcome.steps, outcome.stopped, outcome.resumed_at) == (4, True, resumed_at)
            assert [facts["step"] for facts in run.history()] == [3, 4]


def test_hooks_are_told_the_facts_of_every_step() -> None:
    seen = []
    fit(3, on_step=lambda step, facts: seen.append((step, facts)))
    assert [step for step, _ in seen] == [1, 2, 3]
    assert [facts["lineage"] for _, facts in seen] == [1, 2, 3]
    assert all(isinstance(facts["loss"], Tensor) and facts["loss"].isfinite() for _, facts in seen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    def stop(step: int, facts: Any) -> None:
        if step == 2:
            signal.raise_signal(number)

    with open_run(tmp_path / "run", {}) as run:
        message = rf"signal {int(number)} after step 2, which .*checkpoint\.safetensors holds.*same command"
        with pytest.raises(Interrupted, match=message) as caught:
            fit(20, run=run, on_step=stop)
        assert caught.value.signum == number
        state = run.checkpoint()
        assert state is not None
        assert state["step"] == 2
    with pytest.raises(Interrupted, match="nothing was saved"):
        fit(20, on_step=stop)


def test_a_signal_in_the_last_step_is_not_lost(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run, pytest.raises(Interrupted):
        fit(1, run=run, on_step=lambda step, facts: signal.raise_signal(signal.SIGTERM))
    with open_run(tmp_path / "run", {}) as run:
        assert fit(1, run=run)[1].resumed_at == 1


def test_buffers_that_torch_does_not_save_are_taken_up(tmp_path: Path) -> None:
    """A cut network that is built anew has others, where they differ from channel to channel."""

    def task(value: float) -> Task:
        found = toy_task()
        found.model.register_buffer("shift", torch.full((3,), value), persistent=False)
        return found

    with open_run(tmp_path / "run", {}) as run:
        fit(3, run=run, task=task(1.0))
    with open_run(tmp_path / "run", {}) as run:
        model, _ = fit(5, run=run, task=task(2.0))
    assert torch.equal(model.shift, torch.ones(3))
