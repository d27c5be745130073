from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile
from ecc.run_records import BatchCount, TrainLine
from ecc.training import RunInUse, open_run
from ecc.training.run_dir import first_difference
from training.toys import without_wall

CONFIG = {"task": "toy", "budget": {"joules": 0.5}, "widths": (1, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "history.jsonl").read_text().splitlines()]


def contents(path: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in path.iterdir() if entry.name != ".ecc-lock"}


def test_a_run_is_a_folder_with_everything_in_it(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        assert (run.checkpoint(), run.summary(), list(run.history())) == (None, None, [])
        run.log({"step": 1, "loss": torch.tensor(0.5)})
        run.log(TrainLine(phase="prune", step=2, loss=float("nan"), lr=0.1, total=2))
        run.save({"weights": torch.ones(2)})
        run.finish(BatchCount(total=5, lineage=3))
    names = {".ecc-lock", "config.json", "environment.json", "history.jsonl", "checkpoint.safetensors", "summary.json"}
    assert {entry.name for entry in path.iterdir()} == names
    assert json.loads((path / "config.json").read_text())["config"] == {**CONFIG, "widths": [1, 2]}
    lines = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    assert set(lines[0]["wall"]) == {"time", "session_seconds"}
    with open_run(path, CONFIG) as run:
        state = run.checkpoint()
        assert state is not None
        assert torch.equal(state["weights"], torch.ones(2))
        expected = {"phase": "prune", "step": 2, "loss": None, "lr": 0.1, "total": 2, "lineage": 0, "micro_batch": None}
        assert without_wall(run.history()) == [{"step": 1, "loss": 0.5}, expected]
        assert run.summary(BatchCount) == BatchCount(total=5, lineage=3)


@pytest.mark.parametrize(
    ("argv", "environment", "command"),
    [
        (["/home/me/bin/ecc", "compress", "a net.py:build"], {}, "ecc compress 'a net.py:build'"),
        (["/site/ecc/__main__.py", "compress"], {}, "ecc compress"),
        (["work/train.py", "--fast"], {}, "python train.py --fast"),
        (["ecc", "x"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4 -m ecc x"),
        (["t.py"], {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nnodes 2 --nproc-per-node 4 t.py"),
    ],
)
def test_every_session_notes_its_software_and_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], environment: dict[str, str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        with open_run(path, CONFIG):
            pass
    sessions = json.loads((path / "environment.json").read_text())["sessions"]
    assert [session["command"] for session in sessions] == [command] * 2
    assert (sessions[0]["torch"], sessions[0]["pid"]) == (torch.__version__, os.getpid())


# ---------------------------------------------------------------- configs and folders


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}, ("b.c[1]", "2", "3")),
        ({"a": 1}, {"a": 1, "b": None}, ("b", "(missing)", "null")),
        ({"a": 1}, {"a": True}, ("a", "1", "true")),
        ({"a": {"b": 1}}, {"a": 1}, ("a", '{"b": 1}', "1")),
        ({"a": [0.012345678901]}, {"a": [0.012345678902]}, None),  # a fit with another number of threads
        ({"a": [0.0123456]}, {"a": [0.0123457]}, ("a[0]", "0.0123456", "0.0123457")),
        ({"a": 0.0}, {"a": 1e-9}, ("a", "0.0", "1e-09")),
        ({"a": 1_000_000_000}, {"a": 1_000_000_001}, ("a", "1000000000", "1000000001")),
    ],
)
def test_the_first_difference_of_two_configs(before: Any, now: Any, difference: Any) -> None:
    assert first_difference(before, now) == difference


def test_another_config_is_refused_and_nothing_changes(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.save({})
    before = contents(path)
    message = r"is a run with budget\.joules = 0\.5, and now budget\.joules = 0\.6"
    with pytest.raises(BadFile, match=message), open_run(path, CONFIG | {"budget": {"joules": 0.6}}):
        pass
    assert contents(path) == before


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("thesis.tex", "precious", "holds 'thesis.tex' and is not a run folder"),
        ("history.jsonl", "precious", "holds 'history.jsonl' and is not a run folder"),
        ("config.json", "{}", "is not the config of a run"),
        ("config.json", "{torn", "is not valid JSON"),
        (
            "config.json",
            '{"format": "ecc run", "version": 99, "config": {}}',
            "has version 99; this version of ecc reads",
        ),
    ],
)
def test_a_folder_of_something_else_stays_as_it_is(path: Path, name: str, text: str, message: str) -> None:
    path.mkdir(parents=True)
    (path / name).write_text(text)
    with pytest.raises(BadFile, match=message), open_run(path, CONFIG):
        pass
    assert contents(path) == {name: text.encode()}


def test_what_a_killed_process_left_is_removed_and_other_files_stay(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".ecc-lock").write_text("1\n")
    (path / ".config.json.abc.tmp").write_text("{")
    with open_run(path, CONFIG) as run:
        assert run.checkpoint() is None
    (path / ".checkpoint.safetensors.abc.tmp").write_bytes(b"half")
    (path / ".tmpAbC123").write_bytes(b"half")  # of the safetensors package
    (path / "notes.txt").write_text("the user's own")
    with open_run(path, CONFIG):
        assert not [entry for entry in path.iterdir() if "tmp" in entry.name]
        assert (path / "notes.txt").exists()


# ---------------------------------------------------------------- history and checkpoints


def test_history_is_cut_back_to_the_checkpoint(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 0})
    with open_run(path, CONFIG) as run:
        assert list(run.history()) == []  # there was no checkpoint
        run.log({"step": 1})
        run.log({"step": 2})
        run.save({})
        run.log({"step": 3})
    message = r"checkpoint\.safetensors does not fit this run \(KeyError: 'model'\)"
    with pytest.raises(BadFile, match=message), open_run(path, CONFIG) as run, run.restoring():
        raise KeyError("model")
    assert steps(path) == [1, 2, 3]  # a run that is refused keeps its lines
    with open_run(path, CONFIG) as run:
        assert [line["step"] for line in run.history()] == [1, 2]
        run.log({"step": 30})
        run.finish({})
    with (path / "history.jsonl").open("a") as file:
        file.write('{"step": 31, "lo')  # torn
    with open_run(path, CONFIG) as run:
        assert [line["step"] for line in run.history()] == [1, 2, 30]  # that of a finished run stays
        run.log({"step": 31})
    assert steps(path) == [1, 2, 30, 31]


# ---------------------------------------------------------------- several processes


def test_other_processes_read_and_never_write(path: Path) -> None:
    with open_run(path, CONFIG) as main, open_run(path, CONFIG, writes=False) as other:
        main.save({"step": 7})
        before = contents(path)
        other.log({"step": 1})
        other.save({"step": 8})
        other.finish({})
        assert other.checkpoint() == {"step": 7}
        assert contents(path) == before


FORKING = """
import os, signal, sys, time
from ecc.training import open_run
with open_run(sys.argv[1], {}) as run:
    worker = os.fork()
    if worker == 0:
        os.close(1)  # the test waits for its end
        time.sleep(60)
        os._exit(0)
    print(worker, flush=True)
    sys.stdin.read()
"""


def test_the_lock_names_its_process_and_ends_with_it_though_a_worker_lives_on(path: Path) -> None:
    pytest.importorskip("fcntl")
    message = f"is in use by process {os.getpid()}\\. Wait for it"
    with open_run(path, {}), pytest.raises(RunInUse, match=message), open_run(path, {}):
        pass
    command = [sys.executable, "-c", FORKING, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(RunInUse, match=f"is in use by process {holder.pid}"), open_run(path, {}):
                pass
            holder.kill()
            holder.wait()
            os.kill(worker, 0)  # it is alive
            with open_run(path, {}) as run:
                assert run.writes
        finally:
            os.kill(worker, signal.SIGKILL)
