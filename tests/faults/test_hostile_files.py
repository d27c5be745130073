"""Damaged and hostile files: one clear error, nothing is executed, nothing outside is written, nothing is lost.

Each file is damaged in six ways; `ECC_FAULTS=full` in as many as `benchmarks/reliability.py` reports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ecc
from ecc.energy import EnergyModel
from ecc.errors import BadFile, EccError
from ecc.measure import Profile
from ecc.training import load_state
from faults import fuzz
from faults.bombs import BOMBS
from faults.targets import TARGETS, attempt, good_bytes

COUNT = 240 if os.environ.get("ECC_FAULTS") == "full" else 6

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs alarms and limits")


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_refused_clearly_or_does_no_harm(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    assert attempt(target, None, tmp_path / "x").kind == "accepted"  # the undamaged file works
    outcomes = {}
    for what, damaged in fuzz.mutations(good_bytes(target), COUNT, change_content=target.change_content):
        outcomes[what] = attempt(target, damaged, tmp_path / "x")
    assert {what: one.message for what, one in outcomes.items() if one.kind == "lost"} == {}
    assert sum(one.kind == "refused" for one in outcomes.values()) >= COUNT // 8


@pytest.mark.thorough
def test_bombs_do_not_fill_the_memory(tmp_path: Path) -> None:
    """In a process with little memory."""
    words = [sys.executable, str(Path(__file__).with_name("bombs.py")), str(tmp_path)]
    path = os.pathsep.join([str(Path(ecc.__file__).parents[1]), str(Path(__file__).parents[1])])
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert {name.partition("/")[0] for name in answers} == set(BOMBS)
    assert {
        name: answer for name, answer in answers.items() if not answer["said"].startswith(("BadFile: ", "BadTask: "))
    } == {}


def test_names_in_files_are_never_paths(tmp_path: Path) -> None:
    target = TARGETS["state"]
    data = good_bytes(target).replace(b'"a"', b'"../"')
    assert attempt(target, data, tmp_path / "x").kind == "refused"


@pytest.mark.parametrize("load", [load_state, Profile.load, EnergyModel.load])
def test_pickles_are_never_loaded(load: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's file format nor a bare pickle."""
    monkeypatch.chdir(tmp_path)
    assert callable(load)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.mkdir, ("EXECUTED",)

    torch.save({"weight": Evil()}, "evil.pt")
    Path("evil.pickle").write_bytes(fuzz.PICKLE)
    for name in ("evil.pt", "evil.pickle"):
        with pytest.raises(BadFile):
            load(name)
    assert not Path("EXECUTED").exists()
    torch.load("evil.pt", weights_only=False)
    assert Path("EXECUTED").exists()  # the trap works


@pytest.mark.parametrize("name", ["history.jsonl", ".ecc-lock", "config.json", "checkpoint.safetensors"])
def test_links_in_a_run_folder_are_not_written_through(name: str, tmp_path: Path) -> None:
    """A run folder from elsewhere may hold links to any file of the user."""
    target = TARGETS["run, finetuning: checkpoint.safetensors"]
    attempt(target, good_bytes(target), tmp_path / "x")
    run, mine = tmp_path / "x" / "home" / "run", tmp_path / "diary"
    mine.write_text("dear diary\n")
    (run / "summary.json").unlink(missing_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine)
    with pytest.raises(EccError):
        target.use(run / "checkpoint.safetensors")
    assert mine.read_text() == "dear diary\n"
