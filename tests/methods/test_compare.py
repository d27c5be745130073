from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadFile, EccError
from ecc.methods import CompressSettings
from ecc.methods.grid import Comparison, GridRun
from ecc.options import settings_from
from ecc.training import Interrupted
from methods.jobs import Truth, _graph, noise_batches, true_model, wide_task, wrong_model


def grid(**changes: Any) -> Comparison:
    graph = _graph("chain")
    values: dict[str, Any] = {
        "methods": ["uniform", "ecc"],
        "budgets": ["65%", "50%"],
        "seeds": 2,
        "source": Truth(true_model(graph)),
        "settings": settings_from(
            CompressSettings, dict(pretrain_steps=3, prune_steps=20, finetune_steps=2, lr=1e-3, log_every=5)
        ),
    }
    task = wide_task("chain", evaluate=lambda net: float(next(net.parameters()).detach().abs().sum()))
    return Comparison(task, wrong_model(graph, 0.9), **(values | changes))


def test_budgets_that_would_share_a_folder_are_refused() -> None:
    with pytest.raises(EccError, match=r"budgets 'params=50%' and 'params=50' would share a folder"):
        grid(budgets=["params=50%", "params=50"])


def test_every_cell_is_a_run_at_equal_batches_from_one_dense_network_a_seed(tmp_path: Path) -> None:
    assert grid().run(tmp_path / "runs") == []
    summaries = {}
    for cell in grid().cells:
        folder = cell.folder(tmp_path / "runs")
        summary = json.loads((folder / "summary.json").read_text())
        facts = json.loads((folder / "cell.json").read_text())
        assert summary["met"]
        assert summary["batches"]["total"] == 22
        assert facts["seconds"] > 0
        assert facts["sessions"] == 1
        assert facts["peak_bytes"] > 0
        summaries[cell] = summary
    assert len(summaries) == 8
    by_seed = {
        seed: {summary["scores"]["dense"] for cell, summary in summaries.items() if cell.seed == seed}
        for seed in (0, 1)
    }
    assert all(len(scores) == 1 for scores in by_seed.values())  # all methods start from the same network
    assert by_seed[0] != by_seed[1]


def test_a_finished_grid_is_left_as_it_is_and_can_be_extended(tmp_path: Path) -> None:
    root, told = tmp_path / "runs", []
    grid(methods=["uniform"], seeds=1).run(root, told.append)
    before = {path: path.read_bytes() for path in root.rglob("summary.json")}
    grid(methods=["uniform"], seeds=1).run(root, told.append)
    assert len(told) == 2
    grid(methods=["uniform", "ecc"], seeds=1, budgets=["65%"]).run(root, told.append)
    assert told[2:] == ["ecc 65% seed 0: done"]
    assert all(path.read_bytes() == data for path, data in before.items())


def test_what_is_frozen_stays_whole_by_all_methods_and_is_part_of_the_grid(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    some = {"seeds": 1, "budgets": ["80%"]}
    assert grid(**some, freeze=["conv1"]).run(root) == []
    for method in ("uniform", "ecc"):
        widths = json.loads((GridRun(method, "80%", 0).folder(root) / "widths.json").read_text())
        full = _graph("chain").full_widths
        assert widths["conv1"] == full["conv1"]
        assert widths != full
    with pytest.raises(BadFile, match="was begun with freeze"):
        grid(**some).run(root)


def test_a_cell_that_fails_is_written_down_and_the_others_go_on(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    failed = grid(methods=["uniform"], budgets=["1%", "65%"], seeds=1).run(root)
    assert failed == [GridRun("uniform", "1%", 0)]
    reason = json.loads((root / "seed-0" / "uniform-1.failed.json").read_text())
    assert "is below" in reason["error"]
    assert (root / "seed-0" / "uniform-65" / "summary.json").exists()


def test_scratch_trains_the_widths_that_ecc_found(tmp_path: Path) -> None:
    grid(methods=["scratch", "ecc"], budgets=["65%"], seeds=1).run(tmp_path / "runs")
    one, other = (
        json.loads((tmp_path / "runs" / "seed-0" / f"{name}-65" / "summary.json").read_text())
        for name in ("ecc", "scratch")
    )
    assert one["widths"] == other["widths"]
    assert one["batches"]["total"] == other["batches"]["total"]
    with pytest.raises(EccError, match="compare ecc as well"):
        grid(methods=["scratch"])


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EccError, match="there is no method 'magic'"):
        grid(methods=["magic"])
    with pytest.raises(EccError, match="at least one method"):
        grid(methods=[])
    with pytest.raises(EccError, match="starts with no number"):
        grid(budgets=["sixty"])
    grid(methods=["uniform"], budgets=["65%"], seeds=1).run(tmp_path / "runs")
    with pytest.raises(BadFile, match=r"was begun with settings\.lr = 0\.001, and now it is 0\.5"):
        grid(
            settings=settings_from(
                CompressSettings, dict(pretrain_steps=3, prune_steps=20, finetune_steps=2, lr=0.5, log_every=5)
            )
        ).run(tmp_path / "runs")
    with pytest.raises(BadFile, match="was begun with quick = False, and now it is True"):
        grid(quick=True).run(tmp_path / "runs")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(BadFile, match="is no grid of runs and is left as it is"):
        grid().run(tmp_path / "other")


def test_ctrl_c_ends_the_grid_and_not_only_a_cell(tmp_path: Path) -> None:
    def stopping(epoch: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        yield from noise_batches((3, 4, 4), epoch)

    job = grid(methods=["ecc"], seeds=1)
    job.task = replace(job.task, train_batches=stopping)
    with pytest.raises(Interrupted, match="Give the same command again"):
        job.run(tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("*.failed.json"))


@pytest.mark.parametrize("text", ["{", "5", '{"stem": "8"}', '{"stem": true}', "[" * 100_000])
def test_widths_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    job = grid(methods=["scratch", "ecc"], budgets=["65%"], seeds=1)
    file = GridRun("ecc", "65%", 0).folder(tmp_path) / "widths.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(BadFile, match=r"widths\.json holds no widths"):
        job._method(GridRun("scratch", "65%", 0), tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_grid_that_was_killed_at_its_first_write_begins_anew(tmp_path: Path) -> None:
    (tmp_path / ".grid.json.12345678.tmp").write_text("{")
    grid().begin(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["grid.json"]


def test_a_dense_network_that_was_saved_and_then_killed_is_finished_first(tmp_path: Path) -> None:
    small = grid(methods=["uniform"], budgets=["65%"], seeds=1)
    small.train_dense(0, tmp_path)
    dense = tmp_path / "seed-0" / "dense"
    weights = (dense / "dense.safetensors").read_bytes()
    (dense / "summary.json").rename(dense / ".summary.json.12345678.tmp")
    assert small.needs_dense(0, tmp_path)
    small.train_dense(0, tmp_path)
    assert (dense / "dense.safetensors").read_bytes() == weights
    assert (dense / "summary.json").exists()
    assert not list(dense.glob(".*.tmp"))


def test_what_changes_no_result_may_change_and_the_device_may_not(tmp_path: Path) -> None:
    root, some = tmp_path / "runs", {"methods": ["uniform"], "seeds": 1}
    grid(**some, budgets=["65%"]).run(root)
    settings = replace(grid().settings, micro_batch=2, log_every=7, checkpoint_seconds=9.0)
    assert grid(**some, settings=settings).run(root) == []
    assert (GridRun("uniform", "50%", 0).folder(root) / "summary.json").exists()
    better = grid(**some)
    better.energy = wrong_model(_graph("chain"), 0.95)  # of the same device
    assert better.run(root) == []
    other = grid(**some)
    origin = better.energy.origin
    meter = replace(origin.meter, device="another device")
    other.energy = replace(better.energy, origin=replace(origin, meter=meter))
    with pytest.raises(BadFile, match=r"was begun with device = .*, and now it is another device"):
        other.run(root)


def test_a_grid_goes_on_with_the_weights_it_was_begun_with(tmp_path: Path) -> None:
    untrained = replace(grid().settings, pretrain_steps=0)
    grid(methods=["uniform"], seeds=1, budgets=["65%"], settings=untrained).run(tmp_path / "runs")
    other = grid(methods=["uniform"], seeds=1, settings=untrained)
    next(other.task.model.parameters()).data.mul_(2)
    with pytest.raises(BadFile, match="was begun with weights = "):
        other.run(tmp_path / "runs")
