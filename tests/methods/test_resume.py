"""Killed at any moment, a compression that is taken up again ends as if nothing had happened, whatever its method."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ecc.errors import BadFile
from ecc.methods import Compression
from ecc.training import RunDir, load_state
from methods.jobs import history_of, wide_job, wide_task
from methods.small import SMALL

TESTS = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked and killed")
@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[] if name == "ecc" else [pytest.mark.thorough]) for name in SMALL],
)
def test_kill_9_at_random_moments_changes_nothing(method: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "methods" / "killed.py"), str(tmp_path), method, "1"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["status"] == 0, done.stderr
    assert outcome["killed"][0][0] == "solve"
    assert len({tuple(place) for place in outcome["killed"]}) > 1, "it was killed at several different places"
    peace, war = (load_state(tmp_path / name / "slim.safetensors") for name in ("peace", "war"))
    assert peace
    assert list(peace) == list(war)
    assert all(torch.equal(peace[name], war[name]) for name in peace)
    for file in ("widths.json", "summary.json", "config.json"):
        assert (tmp_path / "war" / file).read_bytes() == (tmp_path / "peace" / file).read_bytes()
    histories = [history_of(tmp_path / name) for name in ("peace", "war")]
    assert len(histories[0]) > 5
    assert histories[0] == histories[1]
    assert not list((tmp_path / "war").glob(".*.tmp"))


@pytest.mark.parametrize(("settings", "each"), [({"checkpoint_seconds": None}, False), ({"checkpoint_steps": 5}, True)])
def test_a_rival_saves_when_it_is_time(
    settings: dict[str, int | None], each: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a search take milliseconds: a checkpoint after each would take longer than the search."""
    phases: list[str] = []
    save = RunDir.save
    monkeypatch.setattr(RunDir, "save", lambda run, state: (phases.append(state["phase"]), save(run, state)))
    job = wide_job("45%", task=wide_task(evaluate_held_out=lambda _: 0.0), **settings)
    job.method = SMALL["lcp"]()
    job.run(tmp_path / "run")
    history = history_of(tmp_path / "run")
    searched = sum(line["phase"] == "lcp" for line in history)
    weighed = sum(line["phase"] == "cost_check" for line in history)
    assert searched > 2 * weighed
    assert phases.count("solve") == (searched + weighed if each else weighed)


@pytest.mark.parametrize("method", ["ecc", "lcp"])
def test_a_run_goes_on_with_the_weights_it_was_begun_with(method: str, tmp_path: Path) -> None:
    def job() -> Compression:
        found = wide_job("45%", task=wide_task(evaluate_held_out=lambda _: 0.0), checkpoint_steps=1)
        found.method = None if method == "ecc" else SMALL[method]()
        return found

    job().run(tmp_path / "run")
    job().run(tmp_path / "run")
    other = job()
    with torch.no_grad():
        next(other.task.model.parameters()).mul_(2)
    with pytest.raises(BadFile, match="weights"):
        other.run(tmp_path / "run")
    trained = job()
    trained.settings = replace(trained.settings, pretrain_steps=1)
    assert trained.config()["weights"] is None
