from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadFile, EccError
from ecc.graph import ChannelGraph
from ecc.measure import MeterInfo, Reading
from ecc.measure.meter import Measured
from ecc.methods import CompressSettings
from ecc.methods.grid import Comparison, GridRun
from ecc.methods.registry import find_method
from ecc.options import settings_from
from ecc.records import read_record
from ecc.run_records import GridFailure, GridRunInfo, RunSummary
from ecc.training import Interrupted, history_lines
from methods.jobs import Truth, _graph, noise_batches, true_model, wide_task, wrong_model

ONE: dict[str, Any] = {"methods": ["uniform"], "budgets": ["65%"], "seeds": 1}


def grid(**changes: Any) -> Comparison:
    graph, values = _graph("chain"), {"pretrain_steps": 3, "prune_steps": 20, "finetune_steps": 2, "lr": 1e-3}
    options: dict[str, Any] = {
        "methods": ["uniform", "ecc"],
        "budgets": ["65%", "50%"],
        "seeds": 2,
        "meter": Truth(true_model(graph)),
        "settings": settings_from(CompressSettings, {**values, "log_every": 5, **changes.pop("values", {})}),
    }
    task = wide_task("chain", evaluate=lambda net: float(next(net.parameters()).detach().abs().sum()))
    return Comparison(task, changes.pop("model", wrong_model(graph, 0.9)), **(options | changes))


@pytest.mark.thorough
def test_every_run_has_the_same_batches_and_the_dense_network_of_its_seed(tmp_path: Path) -> None:
    assert grid().run(tmp_path / "runs") == []
    dense: dict[int, set[float]] = {0: set(), 1: set()}
    for one in grid().runs:
        summary = read_record(one.folder(tmp_path / "runs") / "summary.json", RunSummary)
        info = read_record(one.folder(tmp_path / "runs") / "cell.json", GridRunInfo)
        assert summary.met
        assert summary.batches is not None
        assert summary.batches.total == 22
        assert (info.method, info.budget, info.seed, info.sessions) == (one.method, one.budget, one.seed, 1)
        assert info.seconds > 0
        assert info.peak_bytes is None or info.peak_bytes > 0
        dense[one.seed].add(summary.scores["dense"])
    assert [len(scores) for scores in dense.values()] == [1, 1]
    assert dense[0] != dense[1]


def test_with_the_published_protocol_all_have_the_same_finetuning(tmp_path: Path) -> None:
    batches = {}
    for protocol in ("equal", "published"):
        assert grid(**ONE | {"methods": ["uniform", "ecc"]}, protocol=protocol).run(tmp_path / protocol) == []
        for method in ("uniform", "ecc"):
            folder = GridRun(method, "65%", 0).folder(tmp_path / protocol)
            found = read_record(folder / "summary.json", RunSummary).batches
            assert found is not None
            batches[protocol, method] = found.total
    assert batches == {
        ("equal", "uniform"): 22,
        ("equal", "ecc"): 22,
        ("published", "uniform"): 2,
        ("published", "ecc"): 22,
    }
    assert find_method("netadapt", published=True).config()["short_steps"] == 100
    assert find_method("netadapt", published=True).config()["within_prune_steps"] is False
    with pytest.raises(EccError, match="protocol 'fair' is unknown"):
        grid(protocol="fair")


class Device(Truth):
    """A meter of a device, so that its readings are measured and not estimated; other dense costs at each start."""

    def __init__(self, factor: float = 1.0, instrument: str = "sensor") -> None:
        super().__init__(true_model(_graph("chain")))
        self.factor, self.instrument = factor, instrument

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        return replace(super().cost(graph, widths), joules=self.factor * self.energy.at(widths))

    def describe(self) -> MeterInfo:
        return replace(super().describe(), provenance=Measured(self.instrument))


@pytest.mark.parametrize("instrument", ["sensor", "on-chip model"])
def test_a_run_uses_the_measurements_of_those_before(tmp_path: Path, instrument: str) -> None:
    """Also if the device has become more expensive: what counts is the cost relative to the dense network."""

    def readings(root: Path, budget: str, factor: float) -> int:
        meter, one = Device(factor, instrument), GridRun("ecc", budget, 0)
        job = grid(methods=["ecc"], budgets=["65%", "50%"], seeds=1, meter=meter, values={"prune_steps": 40})
        job.open(root)
        assert job.run_one(one, root) is None
        summary = read_record(one.folder(root) / "summary.json", RunSummary)
        assert summary.label.startswith("measured")
        assert summary.met
        assert summary.within_band
        checks = [line for line in history_lines(one.folder(root)) if line["phase"] == "cost_check"]
        assert len(checks) == meter.calls  # one for the dense network, none of another run; the last one is repeated
        return meter.calls

    alone = readings(tmp_path / "alone", "50%", 1.3)
    readings(tmp_path / "both", "65%", 1.0)
    assert readings(tmp_path / "both", "50%", 1.3) < alone


def test_a_finished_comparison_can_be_extended(tmp_path: Path) -> None:
    root, messages = tmp_path / "runs", list[str]()
    grid(**ONE).run(root, messages.append)
    before = {path: path.read_bytes() for path in root.rglob("summary.json")}
    grid(**ONE).run(root, messages.append)
    better = wrong_model(_graph("chain"), 0.95)  # of the same device
    more = ONE | {"methods": ["uniform", "ecc"]}
    grid(**more, model=better, values={"log_every": 7, "micro_batch": 2, "checkpoint_every": 9.0}).run(
        root, messages.append
    )
    assert messages == ["uniform 65% seed 0: done", "ecc 65% seed 0: done"]
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_failed_run_leaves_its_reason_and_the_others_continue(tmp_path: Path) -> None:
    failed = grid(**ONE | {"budgets": ["1%", "65%"]}).run(tmp_path)
    assert failed == [GridRun("uniform", "1%", 0)]
    assert "is not reachable" in read_record(tmp_path / "seed-0" / "uniform-1.failed.json", GridFailure).error
    assert (tmp_path / "seed-0" / "uniform-65" / "summary.json").exists()


def test_frozen_modules_are_not_pruned_by_any_method_and_scratch_trains_the_widths_of_ecc(tmp_path: Path) -> None:
    job = grid(**ONE | {"methods": ["scratch", "uniform", "ecc"]}, freeze=["conv1"])
    assert job.run(tmp_path) == []
    found = {one.method: read_record(one.folder(tmp_path) / "summary.json", RunSummary) for one in job.runs}
    assert found["scratch"].widths == found["ecc"].widths
    assert found["scratch"].batches == found["ecc"].batches
    full = _graph("chain").full_widths
    assert {summary.widths["conv1"] for summary in found.values()} == {full["conv1"]}
    for text in ("{", "5", '{"stem": "8"}'):
        (GridRun("ecc", "65%", 0).folder(tmp_path) / "widths.json").write_text(text)
        with pytest.raises(BadFile, match=r"widths\.json is not"):
            job._method(GridRun("scratch", "65%", 0), tmp_path)


def test_the_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    grid(**ONE, values={"pretrain_steps": 0}).run(root)
    model = wrong_model(_graph("chain"), 0.9)
    stone = replace(model, origin=replace(model.origin, meter=replace(model.origin.meter, device="stone")))
    for changes, message in (
        ({"values": {"lr": 0.5}}, r"settings\.lr = 0\.001, and now it is 0\.5"),
        ({"quick": True}, "quick = False, and now it is True"),
        ({"protocol": "published"}, "protocol = equal, and now it is published"),
        ({"freeze": ["conv1"]}, "freeze = "),
        ({"model": stone, "meter": Truth(stone, device="stone")}, "device = paper, and now it is stone"),
    ):
        values = {"pretrain_steps": 0, **changes.pop("values", {})}  # type: ignore[dict-item,arg-type]
        with pytest.raises(BadFile, match=f"was started with {message}"):
            grid(**ONE, values=values, **changes).run(root)
    other = grid(**ONE, values={"pretrain_steps": 0})
    next(other.task.model.parameters()).data.mul_(2)
    with pytest.raises(BadFile, match="was started with weights = "):
        other.run(root)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(BadFile, match="do not belong to a comparison"):
        grid().run(tmp_path / "other")


def test_ctrl_c_stops_the_comparison_and_a_killed_start_is_repeated(tmp_path: Path) -> None:
    def stopping(epoch: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        yield from noise_batches((3, 4, 4), epoch)

    (tmp_path / ".grid.json.12345678.tmp").write_text("{")  # killed at its first write
    job = grid(**ONE)
    job.task = replace(job.task, train_batches=stopping)
    with pytest.raises(Interrupted):
        job.run(tmp_path)
    assert not list(tmp_path.rglob("*.failed.json"))
    assert json.loads((tmp_path / "grid.json").read_text())["task"] == "chain"


def test_pretraining_that_was_killed_before_its_summary_is_completed(tmp_path: Path) -> None:
    job, dense = grid(**ONE), tmp_path / "seed-0" / "dense"
    job.pretrain(0, tmp_path)
    weights = (dense / "dense.safetensors").read_bytes()
    (dense / "summary.json").rename(dense / ".summary.json.12345678.tmp")
    assert job.needs_pretraining(0, tmp_path)
    job.pretrain(0, tmp_path)
    assert (dense / "dense.safetensors").read_bytes() == weights
    assert not job.needs_pretraining(0, tmp_path)
    assert not list(dense.glob(".*.tmp"))
