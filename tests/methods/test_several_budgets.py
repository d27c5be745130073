"""One run with several budgets, on a toy whose true cost is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.api import CompressResult, compress_task
from ecc.budget import parse_several_budgets
from ecc.errors import BadBudget, BadFile, EccError, InfeasibleBudget
from ecc.methods import CompressSettings
from ecc.methods import compression as compression_module
from ecc.methods.several_budgets import stage_settings
from ecc.options import settings_from
from ecc.records import read_record
from ecc.run_records import FRONT_FILE, Front
from ecc.task import Task
from ecc.training import Interrupted
from methods import jobs
from methods.jobs import Truth, true_model, wide, wide_task, wrong_model

BUDGETS = ["50%", "80%", "65%"]
STEPS: dict[str, Any] = {"pretrain_steps": 4, "prune_steps": 61, "finetune_steps": 6, "lr": 1e-3, "log_every": 5}


def score(model: torch.nn.Module) -> float:
    return float(next(model.parameters()).detach().sum())


def run(folder: Path, budgets: list[str] = BUDGETS, task: Task | None = None, **options: Any) -> CompressResult:
    graph = wide("chain")[2]
    settings = settings_from(CompressSettings, STEPS | options.pop("settings", {}))
    return compress_task(
        task or wide_task(evaluate=score),
        parse_several_budgets(budgets),
        several=True,
        folder=folder,
        meter=Truth(true_model(graph)),
        energy_models=[wrong_model(graph, 0.8)],
        settings=settings,
        **options,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CompressResult:
    return run(tmp_path_factory.mktemp("several") / "run")


def test_each_budget_has_a_result_that_was_measured(whole: CompressResult) -> None:
    true = true_model(wide("chain")[2])
    assert [one.folder.name for one in whole.front] == ["energy_80pct", "energy_65pct", "energy_50pct"]
    for share, one in zip((0.8, 0.65, 0.5), whole.front, strict=True):
        assert 0.98 <= true.at(one.widths) / (share * true.dense) <= 1
        assert one.summary.within_band
        assert set(one.summary.scores) == {"dense", "pruned", "finetuned"}
        assert one.summary.scores["dense"] == whole.front[0].summary.scores["dense"]
        assert (one.folder / "slim.safetensors").exists()
    assert whole.summary == whole.front[-1].summary
    assert "at 3 budgets</h1>" in whole.report().read_text(encoding="utf-8")


def test_pruning_goes_on_from_one_budget_to_the_next(whole: CompressResult) -> None:
    for milder, tighter in zip(whole.front, whole.front[1:], strict=False):
        assert all(width <= milder.widths[name] for name, width in tighter.widths.items())
    front = read_record(whole.folder.parent / FRONT_FILE, Front)
    assert [row.folder for row in front.rows] == [one.folder.name for one in whole.front]
    assert [row.score for row in front.rows] == [one.score for one in whole.front]
    assert all(row.met for row in front.rows)
    assert front.batches == sum(row.batches for row in front.rows) == 4 + 61 + 2 + 4 + 6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_steps_are_shared_out_and_the_tightest_budget_gets_those_of_its_own_run(count: int) -> None:
    settings = settings_from(CompressSettings, STEPS | {"finetune_steps": 90})
    stages = stage_settings(settings, count)
    assert sum(one.prune_steps for one in stages) == settings.prune_steps
    assert [one.pretrain_steps for one in stages] == [4, *[0] * (count - 1)]
    assert sum(one.finetune_steps for one in stages) == pytest.approx(count * 60, abs=count / 2)
    for name in ("prune_steps", "finetune_steps"):
        steps = [getattr(one, name) for one in stages]
        assert steps == sorted(steps)
        assert steps[0] > 0
    assert (stages[0].finetune_steps, stages[-1].finetune_steps) == (30, 90)
    assert len({one.train.seed for one in stages}) == count  # other batches


def test_a_finished_run_is_loaded_and_a_stopped_one_resumes(
    whole: CompressResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stop in (15, 12, 14):  # batches drawn in that session
        drawn = [0]

        def batches(epoch: int, drawn: list[int] = drawn, stop: int = stop) -> Iterator[Any]:
            for batch in jobs.noise_batches((3, 4, 4), epoch):
                drawn[0] += 1
                if drawn[0] == stop:
                    os.kill(os.getpid(), 15)
                yield batch

        with pytest.raises(Interrupted):
            run(tmp_path / "run", task=wide_task(train_batches=batches, evaluate=score))
    again = run(tmp_path / "run")
    monkeypatch.setattr(compression_module, "Training", None)  # nothing is trained
    for found in (again, run(tmp_path / "run")):
        assert [one.summary for one in found.front] == [one.summary for one in whole.front]
        for one, other in zip(found.front, whole.front, strict=True):
            first, second = one.model.state_dict(), other.model.state_dict()
            assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(BadFile, match="budgets"):
        run(tmp_path / "run", ["80%", "60%"])


@pytest.mark.parametrize(
    ("budgets", "options", "error", "message"),
    [
        (["50%"], {}, BadBudget, "at least two different ones, not 50%"),
        (["50%", "50%"], {}, BadBudget, "at least two different ones"),
        (["50%", "macs=40%"], {}, BadBudget, "must be on one resource"),
        (["50%", "1 mJ"], {}, BadBudget, "all in percent or all in a unit"),
        (["50%", "x"], {}, BadBudget, "x"),
        (["80%", "50%"], {"method": "uniform"}, EccError, "prunes while it trains"),
        (["80%", "50%"], {"settings": {"prune_steps": 1}}, EccError, "at least 2 pruning steps"),
        (["80%", "0.1%"], {}, InfeasibleBudget, "is not reachable"),
    ],
)
def test_what_is_not_possible_is_refused_before_anything_is_trained(
    budgets: list[str], options: dict[str, Any], error: type[EccError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path / "run", budgets, **options)
    assert not (tmp_path / "run" / "config.json").exists()
