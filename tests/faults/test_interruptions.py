"""What stops a run half-way: signals, a full disk, too little memory, data that cannot be read, a clock that jumps.

Whatever it is, one line says so, what was saved is whole, and the same command goes on.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import ecc
from ecc.cli.app import app
from ecc.errors import BadFile
from ecc.measure import Profile
from ecc.training import load_state
from faults.folder import filled
from measure.profile_cases import computed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals and limits")

TASKS = """
import os
import time
import torch
from net import batches, task

calls = [0]


def once(at, error):
    '''Raises at that call, if there is a file `trouble`, which is removed.'''
    calls[0] += 1
    if calls[0] == at and os.path.exists("trouble"):
        os.remove("trouble")
        raise error


def out_of_memory():
    made = task()
    dense = made.loss

    def loss(outputs, targets):
        once(5, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
        return dense(outputs, targets)

    return task(loss=loss)


def broken_loader():
    def train_batches(epoch):
        for batch in batches(epoch):
            once(5, OSError("the disk of the images is gone"))
            yield batch

    return task(train_batches=train_batches)


def nan_loss():
    def loss(outputs, targets):
        calls[0] += 1
        return torch.nn.functional.cross_entropy(outputs, targets) * (float("nan") if calls[0] == 5 else 1)

    return task(loss=loss)


def slow():
    def train_batches(epoch):
        for batch in batches(epoch):
            time.sleep(0.05)
            yield batch

    return task(train_batches=train_batches)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = filled(tmp_path_factory.mktemp("interruptions"))
    (folder / "tasks.py").write_text(TASKS)
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("net.py", "tasks.py", "net.json", "net.profile"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(task: str, *more: str) -> list[str]:
    asked = (
        "--energy net.json --meter none --budget 80% --prune-steps 8 --finetune-steps 2 --lr 1e-3 --device cpu -o run"
    )
    return ["compress", f"tasks.py:{task}", *asked.split(), *more]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def refused(result: Result) -> str:
    """The one line, after the looks of it were checked."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, len(lines)) == (2, 1), result.output
    assert "Traceback" not in result.output
    return lines[0]


def steps_of(run: Path) -> int:
    return int(load_state(run / "checkpoint.safetensors")["state"]["step"])


# ---------------------------------------------------------------- the user's code, and memory


def test_out_of_memory_names_the_way_out_and_the_run_goes_on_with_smaller_micro_batches(folder: Path) -> None:
    Path("trouble").touch()
    line = refused(run(*words("out_of_memory", "--pretrain-steps", "2")))
    assert "step 3 ran out of memory on cpu (OutOfMemoryError: CUDA out of memory" in line
    assert "the last good checkpoint is run/checkpoint.safetensors, at step 2" in line
    assert "Give the same command with --micro-batch N, N items at once (micro_batch), and it goes on" in line
    saved = load_state("run/checkpoint.safetensors")["state"]
    assert (saved["phase"], saved["step"], saved["stream"]["lineage"]) == ("solve", 2, 4)
    again = run(*words("out_of_memory", "--pretrain-steps", "2", "--micro-batch", "2"))
    assert again.exit_code == 0, again.output
    facts = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    assert {line.get("micro_batch") for line in facts if line["phase"] == "dense"} == {None}
    assert [line["total"] for line in facts if line["phase"] in ("solve", "tune")][-1] == 12  # none drawn twice
    assert {line.get("micro_batch") for line in facts if line["phase"] == "tune"} == {2}


def test_a_loader_that_fails_is_named_with_its_batch_and_the_state_is_kept(folder: Path) -> None:
    Path("trouble").touch()
    line = refused(run(*words("broken_loader")))
    assert "train_batches(1) of task 'toy', at batch 1, raised OSError: the disk of the images is gone" in line
    assert "It is step 5; the last good checkpoint is run/checkpoint.safetensors, at step 4" in line
    assert steps_of(Path("run")) == 4
    broken = run(*words("broken_loader"))
    assert broken.exit_code == 0, broken.output
    whole = run(*words("broken_loader", "-o", "whole"))
    assert whole.exit_code == 0, whole.output
    one, other = load_state("run/slim.safetensors"), load_state("whole/slim.safetensors")
    assert list(one) == list(other)
    assert all(torch.equal(one[name], other[name]) for name in one)  # as if nothing had happened


def test_a_loss_that_is_no_number_is_told_with_its_step_and_the_last_good_checkpoint(folder: Path) -> None:
    line = refused(run(*words("nan_loss", "--pretrain-steps", "2")))
    assert "is not finite at step 3" in line
    assert "Lower the learning rate" in line
    assert load_state("run/checkpoint.safetensors")["state"]["step"] == 2


# ---------------------------------------------------------------- signals, and two at once


def started(*args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(ecc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "ecc", *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_saves_the_state_keeps_others_out_meanwhile_and_the_same_command_goes_on(
    folder: Path, number: signal.Signals
) -> None:
    args = words("slow", "--prune-steps", "400")
    process = started(*args)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "solving" in line:
                break
        told = refused(run(*args, "--quiet"))
        assert f"run is in use by process {process.pid}. Wait for it, or give another folder." in told
        time.sleep(0.5)
        process.send_signal(number)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number, rest
    assert f"stopped by signal {int(number)} after step" in rest
    assert "Give the same command again to go on." in rest
    assert "Traceback" not in rest
    assert 0 < steps_of(Path("run")) < 400
    assert not Path("run/summary.json").exists()


@pytest.mark.slow
def test_an_export_that_is_asked_to_stop_leaves_nothing_behind_and_can_be_repeated(made: Path, folder: Path) -> None:
    shutil.copytree(made / "run", "run")
    args = ("export", "run", "--task", "net.py:task", "--format", "pt2", "-o", "out")
    process = started(*args)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "writing pt2" in line:
                break
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, rest
    assert "Traceback" not in rest
    assert not Path("out").exists()
    again = run(*args)
    assert again.exit_code == 0, again.output
    assert sorted(path.name for path in Path("out").iterdir()) == ["model_card.md", "slim.pt2"]


# ---------------------------------------------------------------- disks


class Full:
    """A disk that is full from some write on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC, after: int = 0) -> None:
        self.left, self.code = after, code
        for name in ("fsync", "ftruncate"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))

    def failing(self, real: Any) -> Any:
        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args)

        return call


@pytest.mark.parametrize(("code", "text"), [(errno.ENOSPC, "No space left"), (errno.EIO, "Input/output error")])
def test_a_disk_that_is_full_at_any_moment_loses_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    """At every write in turn: one line, and in the end the run is what it would have been."""
    assert run(*words("slow", "-o", "whole")).exit_code == 0
    failures = 0
    for after in range(40):
        with monkeypatch.context() as patch:
            Full(patch, code, after)
            result = run(*words("slow"))
        if result.exit_code == 0:
            break
        failures += 1
        assert text in refused(result)
        assert not list(Path("run").glob(".*.tmp"))
        if Path("run/checkpoint.safetensors").exists():
            load_state("run/checkpoint.safetensors")
    assert failures >= 4
    assert run(*words("slow")).exit_code == 0
    one, other = load_state("run/slim.safetensors"), load_state("whole/slim.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [0, 300, 3000] if os.environ.get("ECC_FAULTS") == "full" else [300])
def test_a_file_system_that_takes_no_more_bytes_is_one_line(folder: Path, limit: int) -> None:
    """For real: the system refuses to let a file grow beyond the limit."""
    code = (
        "import resource, signal, sys; from ecc.cli import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); sys.argv[0] = 'ecc'; main()"
    )
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for args in (words("slow"), ["fit", "net.profile", "-o", "new.json"], ["fit", "net.profile", "-o", "net.json"]):
        path = os.pathsep.join([str(Path(ecc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "File too large" in done.stderr.splitlines()[-1]
    assert {path: path.read_bytes() for path in before} == before
    assert run(*words("slow")).exit_code == 0  # once there is room


def test_a_full_disk_keeps_the_rows_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.profile"
    with monkeypatch.context() as patch:
        Full(patch, after=9)
        with pytest.raises(BadFile, match=r"No space left on device\. What it holds so far is safe"):
            computed(path)
    held = len(Profile.load(path).samples)
    assert held >= 7
    computed(path)
    computed(tmp_path / "b.profile")
    assert path.read_bytes() == (tmp_path / "b.profile").read_bytes()


@pytest.mark.parametrize(
    ("code", "text"), [(errno.EACCES, "Permission denied"), (errno.EROFS, "Read-only file system")]
)
def test_a_folder_that_may_not_be_written_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
) -> None:
    """Simulated, since root may write everywhere."""
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and str(path).startswith((str(folder), "run", "new")):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **named)

    def refusing_folder(path: Any, *args: Any, **named: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "open", refusing)
    profile = ["profile", "net.py:build", "--meter", "platform:jetson-tx2", "--samples", "12", "-o", "new.profile"]
    for args in (profile, ["fit", "net.profile", "-o", "new.json"], words("slow")):
        assert text in refused(run(*args))
    monkeypatch.setattr(os, "mkdir", refusing_folder)
    assert text in refused(run(*words("slow", "-o", "other")))
    grid = "compare tasks.py:slow --energy net.json --meter none --methods ecc --budgets 80% --seeds 1 -o grid"
    assert text in refused(run(*grid.split()))


# ---------------------------------------------------------------- clocks


def test_a_clock_that_jumps_back_changes_no_duration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time is only written down; durations come from a clock that cannot go back."""

    def jumping() -> Iterator[float]:
        now = 2e9
        while True:
            yield now
            now -= 3600.0

    clock = jumping()
    monkeypatch.setattr(time, "time", lambda: next(clock))
    result = run(*words("slow"))
    assert result.exit_code == 0, result.output
    facts = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    seconds = [line["wall"]["session_seconds"] for line in facts]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] < 600
