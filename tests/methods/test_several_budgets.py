"""One run with several budgets, on a toy whose true cost is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.api import CompressResult, compress_task
from ecc.budget import parse_budgets, parse_several_budgets
from ecc.errors import BadBudget, BadFile, EccError, InfeasibleBudget
from ecc.methods import CompressSettings
from ecc.methods import compression as compression_module
from ecc.methods.several_budgets import stage_settings
from ecc.options import settings_from
from ecc.records import read_record
from ecc.run_records import FRONT_FILE, Front
from ecc.task import Task
from ecc.training import Interrupted, load_state
from methods import jobs
from methods.jobs import Truth, true_model, wide, wide_task, wrong_model

BUDGETS = ["50%", "80%", "65%"]
STEPS: dict[str, Any] = {"pretrain_steps": 4, "prune_steps": 61, "finetune_steps": 6, "lr": 1e-3, "log_every": 5}


def score(model: torch.nn.Module) -> float:
    return float(next(model.parameters()).detach().sum())


def run(folder: Path, budgets: list[str] = BUDGETS, task: Task | None = None, **options: Any) -> CompressResult:
    graph, several = wide("chain")[2], options.pop("several", True)
    settings = settings_from(CompressSettings, STEPS | options.pop("settings", {}))
    return compress_task(
        task or wide_task(evaluate=score),
        parse_several_budgets(budgets) if several else parse_budgets(budgets),
        several=several,
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


def test_milder_budgets_are_a_chain_and_the_tightest_is_a_run_of_its_own(whole: CompressResult, tmp_path: Path) -> None:
    milder, tighter, tightest = whole.front
    assert all(width <= milder.widths[name] for name, width in tighter.widths.items())
    front = read_record(whole.folder.parent / FRONT_FILE, Front)
    assert [row.folder for row in front.rows] == [one.folder.name for one in whole.front]
    assert [row.score for row in front.rows] == [one.score for one in whole.front]
    assert all(row.met for row in front.rows)
    assert front.batches == sum(row.batches for row in front.rows) == 4 + 30 + 1 + 4 + 61 + 6
    # With the same dense network it is bit for bit the result of a run with this budget alone.
    task = wide_task(evaluate=score)
    task.model.load_state_dict(load_state(milder.folder / "dense.safetensors"))
    alone = run(tmp_path / "alone", ["50%"], task, several=False, settings={"pretrain_steps": 0})
    assert alone.widths == tightest.widths
    first, second = alone.model.state_dict(), tightest.model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], value) for name, value in tighter.model.state_dict().items())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_milder_budgets_share_some_steps_and_the_tightest_gets_all_of_them(count: int) -> None:
    settings = settings_from(CompressSettings, STEPS | {"prune_steps": 300, "finetune_steps": 300})
    *chain, tightest = stage_settings(settings, count)
    assert tightest == replace(settings, pretrain_steps=0)
    assert [one.pretrain_steps for one in chain] == [4, *[0] * (count - 2)]
    for name in ("prune_steps", "finetune_steps"):
        steps = [getattr(one, name) for one in chain]
        assert steps == sorted(steps)
        assert 0 < steps[0] <= steps[-1] < getattr(settings, name)
    total = sum(one.prune_steps + one.finetune_steps for one in (*chain, tightest))
    assert total / 600 <= {2: 1.4, 3: 1.7, 5: 2.2}[count]
    assert len({one.train.seed for one in (*chain, tightest)}) == count  # other batches


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
