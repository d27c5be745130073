"""A compression that is killed and resumed, or runs in two processes, ends as one that was never stopped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ecc.training import BatchStream, load_state
from methods.jobs import history_of
from methods.processes import TRAIN_STEPS, TRAININGS
from methods.small import SMALL
from training.launching import environment, in_two_processes, under_torchrun
from training.toys import Net, toy_task

TESTS = Path(__file__).resolve().parent.parent


def check_same(one: Path, other: Path) -> None:
    """Compare the results and histories of two runs."""
    for name in ("summary.json", "widths.json", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (load_state(run / "slim.safetensors") for run in (one, other))
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    lines = history_of(one)
    assert len(lines) > 5
    assert lines == history_of(other)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked and killed")
@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name == "ecc" else [pytest.mark.thorough]) for name in SMALL]
)
def test_kill_9_at_random_moments_changes_nothing(method: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "methods" / "killed.py"), str(tmp_path), method, "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["status"] == 0, done.stderr
    assert outcome["killed"][0][0] == "prune"
    assert len({tuple(place) for place in outcome["killed"]}) > 1  # at several different places
    check_same(tmp_path / "whole", tmp_path / "parts")
    assert not list((tmp_path / "parts").glob(".*.tmp"))


@pytest.mark.slow
def test_two_processes_train_as_one_decide_the_same_and_resume(tmp_path: Path) -> None:
    """One test, so that the processes run once, whichever worker gets it."""
    pytest.importorskip("accelerate")
    in_two_processes("methods/processes.py", tmp_path)
    for name in TRAININGS:
        check_training_with_the_joint_batch(tmp_path, name)
    check_decisions_at_every_step(tmp_path)
    check_that_the_first_process_writes_and_the_run_resumes(tmp_path)


def check_training_with_the_joint_batch(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Net(norm=False, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stream = BatchStream(toy_task(), seed=3)
    for _ in range(TRAIN_STEPS):
        (images, labels), (more_images, more_labels) = next(stream), next(stream)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([images, more_images])), torch.cat([labels, more_labels])).backward()
        optimizer.step()
    first, second = (load_state(folder / f"{name}-{rank}.safetensors") for rank in (0, 1))
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(first[key], weight, rtol=1e-3, atol=1e-5)
        assert torch.equal(first[key], second[key])


def check_decisions_at_every_step(folder: Path) -> None:
    first, second = (load_state(folder / f"{rank}.safetensors") for rank in (0, 1))
    assert list(first["steps"]) == list(second["steps"]) == [str(step + 1) for step in range(16)]
    for step, values in first["steps"].items():
        for name, tensor in values.items():
            assert torch.equal(tensor, second["steps"][step][name]), (step, name)
    assert len({tuple(values["widths"].tolist()) for values in first["steps"].values()}) > 4
    assert len({tuple(values["targets"].tolist()) for values in first["steps"].values()}) > 1  # they were corrected
    assert (first["label"], second["label"]) == ("estimated", "estimated")
    assert all(torch.equal(first["slim"][name], second["slim"][name]) for name in first["slim"])


def check_that_the_first_process_writes_and_the_run_resumes(folder: Path) -> None:
    assert not (folder / "whole-1").exists()
    sessions = json.loads((folder / "parts" / "environment.json").read_text())["sessions"]
    assert len(sessions) == 2
    assert len({session["pid"] for session in sessions}) == 1
    summary = json.loads((folder / "whole-0" / "summary.json").read_text())
    assert (summary["batches"]["total"], summary["met"]) == (2 * (2 + 16 + 3), True)
    assert summary["relative_ci"] == pytest.approx(0.012 / math.sqrt(3))  # the mean of three readings near the budget
    check_same(folder / "whole-0", folder / "parts")


@pytest.mark.thorough  # two processes and kill -9 are tested above, one at a time
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_torchrun_restarts_killed_processes_and_the_result_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said = under_torchrun("methods/restarted.py", tmp_path, "--max-restarts", "2", timeout=240)
    assert {path.name for path in tmp_path.glob("* died")} == {"rank 0 died", "rank 1 died"}
    assert said.count("exitcode: -9") == 2, said
    for run in ("whole", "parts"):
        assert len(json.loads((tmp_path / run / "environment.json").read_text())["sessions"]) == 3
    check_same(tmp_path / "whole", tmp_path / "parts")
    states = [load_state(tmp_path / f"parts-{rank}.safetensors")["slim"] for rank in (0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
