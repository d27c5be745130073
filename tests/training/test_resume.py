"""Killed at any moment, a run that is taken up again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ecc.training.checkpoint import load_state
from training.toys import without_wall

TESTS = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked and killed")
@pytest.mark.thorough  # methods/test_resume.py kills a whole compression
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_9_at_random_moments_changes_nothing(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, str(TESTS / "training" / "killing.py"), str(tmp_path), str(seed)]
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["status"] == 0, done.stderr
    assert len(set(outcome["killed"])) > 3, "it was killed at several different places"
    assert json.loads((tmp_path / "war" / "summary.json").read_text())["resumed_at"] > 0

    peace, war = (load_state(tmp_path / name / "weights.safetensors") for name in ("peace", "war"))
    assert peace
    assert all(torch.equal(peace[name], war[name]) for name in peace)
    histories = [
        without_wall([json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()])
        for name in ("peace", "war")
    ]
    assert len(histories[0]) == 20
    assert histories[0] == histories[1]
    assert not list((tmp_path / "war").glob(".*.tmp"))
