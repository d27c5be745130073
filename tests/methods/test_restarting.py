"""A compression in two processes, one of which is killed, and which torchrun starts again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ecc.training import load_state
from methods.jobs import history_of
from training.launching import in_two_processes


@pytest.mark.thorough  # two processes, and being killed, are in test_compress_processes.py and test_resume.py
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_job_whose_processes_were_killed_ends_as_the_one_in_peace(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said = in_two_processes("methods/restarted.py", tmp_path, "--max-restarts", "2", timeout=240)
    peace, war = tmp_path / "peace", tmp_path / "war"
    assert {path.name for path in tmp_path.glob("* died")} == {"rank 0 died", "rank 1 died"}
    assert said.count("exitcode: -9") == 2, said

    sessions = [len(json.loads((run / "environment.json").read_text())["sessions"]) for run in (peace, war)]
    assert sessions == [3, 3]
    for file in ("summary.json", "widths.json", "config.json", "slim.safetensors"):
        assert (war / file).read_bytes() == (peace / file).read_bytes(), file
    assert history_of(war) == history_of(peace)
    assert len(history_of(war)) > 10
    states = [load_state(tmp_path / f"war-{rank}.safetensors")["slim"] for rank in (0, 1)]
    assert states[0]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    began = json.loads((war / "history.jsonl").read_text().splitlines()[0])
    assert began["wall"]["time"] < sessions_of(war)[1], "the first lines are of the session that was killed"


def sessions_of(run: Path) -> list[str]:
    """When each began."""
    return [session["started"] for session in json.loads((run / "environment.json").read_text())["sessions"]]
