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

from ecc.errors import BadFile, EccError
from ecc.training.checkpoint import save_state
from ecc.training.run_dir import open_run
from training.toys import without_wall

CONFIG = {"task": "toy", "budget": {"joules": 0.5}, "widths": (1, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def steps(path: Path) -> list[int]:
    lines = (path / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_run_is_a_folder_with_everything_in_it(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        assert (run.checkpoint(), run.summary(), list(run.history())) == (None, None, [])
        run.log({"step": 1, "loss": torch.tensor(0.5)})
        run.save({"weights": torch.ones(2)})
        run.finish({"joules": 0.4})
    names = {".ecc-lock", "config.json", "environment.json", "history.jsonl", "checkpoint.safetensors", "summary.json"}
    assert {entry.name for entry in path.iterdir()} == names
    assert json.loads((path / "config.json").read_text())["config"] == {**CONFIG, "widths": [1, 2]}
    (line,) = [json.loads(line) for line in (path / "history.jsonl").read_text().splitlines()]
    assert set(line) == {"step", "loss", "wall"}
    assert set(line["wall"]) == {"time", "session_seconds"}
    with open_run(path, CONFIG) as run:
        state = run.checkpoint()
        assert state is not None
        assert torch.equal(state["weights"], torch.ones(2))
        assert without_wall(run.history()) == [{"step": 1, "loss": 0.5}]
        assert run.summary() == {"joules": 0.4}


def test_every_session_notes_its_software(path: Path) -> None:
    for _ in range(2):
        with open_run(path, CONFIG):
            pass
    sessions = json.loads((path / "environment.json").read_text())["sessions"]
    assert [session["torch"] for session in sessions] == [torch.__version__] * 2
    assert sessions[0]["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("argv", "distributed", "command"),
    [
        (["/home/me/bin/ecc", "compress", "a net.py:build"], {}, "ecc compress 'a net.py:build'"),
        (["/site/ecc/__main__.py", "compress"], {}, "ecc compress"),
        (["work/train.py", "--fast"], {}, "python train.py --fast"),
        (["ecc", "x"], {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nproc-per-node 4 -m ecc x"),
        (["t.py"], {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, "torchrun --nnodes 2 --nproc-per-node 4 t.py"),
    ],
)
def test_every_session_notes_its_command(
    path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], distributed: dict[str, str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    for name, value in distributed.items():
        monkeypatch.setenv(name, value)
    with open_run(path, CONFIG):
        pass
    (session,) = json.loads((path / "environment.json").read_text())["sessions"]
    assert session["command"] == command


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "digits"}, 'was begun with task = "toy", and now task = "digits" is asked for'),
        ({"budget": {"joules": 0.6}}, r"budget\.joules = 0\.5, and now budget\.joules = 0\.6"),
        ({"widths": [1, 3]}, r"widths\[1\] = 2, and now widths\[1\] = 3"),
        ({"seed": 1}, r"seed = \(absent\), and now seed = 1"),
    ],
)
def test_another_config_is_refused_by_its_first_difference(path: Path, change: Any, message: str) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.save({})
    before = {entry: entry.read_bytes() for entry in path.iterdir() if entry.name != ".ecc-lock"}
    with pytest.raises(BadFile, match=message), open_run(path, CONFIG | change):
        pass
    assert {entry: entry.read_bytes() for entry in path.iterdir() if entry.name != ".ecc-lock"} == before


def test_a_config_that_json_cannot_hold_is_refused_before_a_folder_is_made(path: Path) -> None:
    with pytest.raises(EccError, match=r"config\.a is a function"), open_run(path, {"a": lambda: 0}):
        pass
    assert not path.exists()


@pytest.mark.parametrize("name", ["thesis.tex", "history.jsonl", "lock"])
def test_a_folder_that_is_no_run_is_left_as_it_is(path: Path, name: str) -> None:
    path.mkdir(parents=True)
    (path / name).write_text("precious")
    with pytest.raises(BadFile, match=f"holds '{name}' and is no run; it is left as it is"), open_run(path, CONFIG):
        pass
    assert [(entry.name, entry.read_text()) for entry in path.iterdir()] == [(name, "precious")]


def test_a_file_in_its_place_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(BadFile, match="is a file; a run needs a folder"), open_run(path, CONFIG):
        pass
    assert path.read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="cannot make the folder"), open_run(tmp_path / "file" / "a", CONFIG):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no config of a run, and is left as it is"),
        ("{torn", "cannot be read"),
        ("[]", "is damaged"),
        ('{"format": "ecc run", "version": 99, "config": {}}', "has version 99; this ecc reads version 1"),
    ],
)
def test_a_config_of_something_else_is_refused(path: Path, text: str, message: str) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text(text)
    with pytest.raises(BadFile, match=message), open_run(path, CONFIG):
        pass
    assert (path / "config.json").read_text() == text


def test_a_run_that_died_before_it_had_begun_is_begun(path: Path) -> None:
    path.mkdir(parents=True)
    (path / ".ecc-lock").write_text("1\n")
    (path / ".config.json.abc.tmp").write_text("{")
    with open_run(path, CONFIG) as run:
        assert run.checkpoint() is None
    assert not (path / ".config.json.abc.tmp").exists()


def test_what_a_dead_process_was_writing_is_removed(path: Path) -> None:
    with open_run(path, CONFIG):
        pass
    (path / ".checkpoint.safetensors.abc.tmp").write_bytes(b"half")
    (path / "notes.txt").write_text("the user's own")
    with open_run(path, CONFIG):
        assert not (path / ".checkpoint.safetensors.abc.tmp").exists()
        assert (path / "notes.txt").exists()


# ---------------------------------------------------------------- history


def test_history_goes_back_to_the_checkpoint(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.log({"step": 2})
        run.save({})
        run.log({"step": 3})
    assert steps(path) == [1, 2, 3]
    with open_run(path, CONFIG) as run:
        assert [facts["step"] for facts in run.history()] == [1, 2]
        run.log({"step": 30})
        run.save({})
    with open_run(path, CONFIG) as run:
        assert steps(path) == [1, 2, 30]


def test_a_run_that_is_refused_later_keeps_the_lines_that_would_be_made_again(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.save({})
        run.log({"step": 2})
    said = r"checkpoint\.safetensors does not fit this run \(KeyError: 'model'\)"
    with pytest.raises(BadFile, match=said), open_run(path, CONFIG) as run, run.restoring():
        raise KeyError("model")
    assert steps(path) == [1, 2]


def test_history_without_a_checkpoint_begins_anew(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
    with open_run(path, CONFIG) as run:
        assert list(run.history()) == []


def test_the_history_of_a_finished_run_stays_whole(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.save({})
        run.log({"step": 1})
        run.finish({})
    with open_run(path, CONFIG) as run:
        assert without_wall(run.history()) == [{"step": 1}]


def test_a_torn_line_is_dropped(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.save({})
        run.finish({})
    with (path / "history.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    with open_run(path, CONFIG) as run:
        run.log({"step": 2})
    assert steps(path) == [1, 2]


def test_a_history_shorter_than_at_its_checkpoint_is_refused(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.log({"step": 1})
        run.save({})
    (path / "history.jsonl").write_text("")
    with pytest.raises(BadFile, match="has 0 lines, but had 1 at the checkpoint"), open_run(path, CONFIG):
        pass


def test_a_full_disk_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with open_run(path, CONFIG) as run:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(BadFile, match=r"cannot write .*history\.jsonl: No space left"):
            run.log({"step": 1})


# ---------------------------------------------------------------- checkpoints


def test_a_damaged_checkpoint_is_refused_and_kept(path: Path) -> None:
    with open_run(path, CONFIG) as run:
        run.save({"weights": torch.ones(9)})
        run.log({"step": 1})
    file = path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(BadFile, match=r"checkpoint\.safetensors is cut off"), open_run(path, CONFIG):
        pass
    assert steps(path) == [1]


def test_a_state_that_is_no_checkpoint_is_refused(path: Path) -> None:
    with open_run(path, CONFIG):
        pass
    save_state(path / "checkpoint.safetensors", [1])
    with pytest.raises(BadFile, match="is no checkpoint of a run"), open_run(path, CONFIG):
        pass


# ---------------------------------------------------------------- several processes


def test_other_processes_read_and_never_write(path: Path) -> None:
    with open_run(path, CONFIG) as main, open_run(path, CONFIG, writes=False) as other:
        main.save({"step": 7})
        before = sorted(path.iterdir())
        other.log({"step": 1})
        other.save({"step": 8})
        other.finish({})
        assert other.checkpoint() == {"step": 7}
        assert sorted(path.iterdir()) == before
        assert list(main.history()) == []


def test_two_writers_are_kept_apart_by_name(path: Path) -> None:
    pytest.importorskip("fcntl")
    with (
        open_run(path, CONFIG),
        pytest.raises(BadFile, match=f"is in use by process {os.getpid()}\\. Wait for it"),
        open_run(path, CONFIG),
    ):
        pass
    with open_run(path, CONFIG):  # the lock ended with the block
        pass


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.ftruncate(descriptor, 0)
os.write(descriptor, f"{os.getpid()}\\n".encode())
print("held", flush=True)
sys.stdin.read()
"""


FORKING = """
import os, signal, sys, time
from ecc.training.run_dir import open_run
with open_run(sys.argv[1], {}) as run:
    worker = os.fork()
    if worker == 0:
        os.close(1)  # the test waits for its end
        time.sleep(60)
        os._exit(0)
    print(worker, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_outlives_its_run_does_not_hold_the_lock(path: Path) -> None:
    pytest.importorskip("fcntl")
    killed = subprocess.run([sys.executable, "-c", FORKING, str(path)], stdout=subprocess.PIPE, text=True, check=False)
    worker = int(killed.stdout)
    try:
        assert killed.returncode == -signal.SIGKILL
        os.kill(worker, 0)  # it is alive
        with open_run(path, {}) as run:
            assert run.writes
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_lock_ends_with_its_process(path: Path) -> None:
    pytest.importorskip("fcntl")
    with open_run(path, CONFIG):
        pass
    command = [sys.executable, "-c", HOLDER, str(path / ".ecc-lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadFile, match=f"is in use by process {holder.pid}"), open_run(path, CONFIG):
            pass
        holder.kill()
        holder.wait()
        with open_run(path, CONFIG) as run:
            assert run.writes


# ---------------------------------------------------------------- folders from elsewhere


@pytest.mark.skipif(os.name != "posix", reason="needs links")
@pytest.mark.parametrize("name", ["history.jsonl", ".ecc-lock"])
def test_a_link_that_leads_out_of_the_folder_is_not_written_through(name: str, path: Path, tmp_path: Path) -> None:
    with open_run(path, CONFIG):
        pass
    (tmp_path / "diary").write_text("mine\n")
    (path / name).unlink()
    (path / name).symlink_to(tmp_path / "diary")
    with pytest.raises(BadFile, match="cannot write"), open_run(path, CONFIG):
        pass
    assert (tmp_path / "diary").read_text() == "mine\n"


@pytest.mark.parametrize("text", ["5", '{"sessions": 5}', "[" * 100_000, '{"a":' * 100_000])
def test_a_damaged_list_of_sessions_is_one_clear_line(text: str, path: Path) -> None:
    with open_run(path, CONFIG):
        pass
    (path / "environment.json").write_text(text)
    said = r"environment\.json (cannot be read|is damaged|holds no list)"
    with pytest.raises(BadFile, match=said), open_run(path, CONFIG):
        pass


@pytest.mark.parametrize("saved", [{"state": {}}, {"state": 5, "history_lines": 0}, {"state": {}, "history_lines": -1}])
def test_a_checkpoint_that_is_none_is_refused(saved: Any, path: Path) -> None:
    with open_run(path, CONFIG):
        pass
    save_state(path / "checkpoint.safetensors", saved)
    with pytest.raises(BadFile, match="is no checkpoint of a run"), open_run(path, CONFIG):
        pass


def test_a_name_that_no_system_takes_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot look into .*: File name too long"), open_run(tmp_path / ("a" * 300), {}):
        pass
