"""What stops a run half-way: signals, full disks, too little memory, data that cannot be read, a clock that jumps.

In every case there is one clear error, saved files are complete, and the same command resumes.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
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
from faults.folder import add_network
from measure.profile_cases import computed

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals and limits")

TASKS = """
import os
import time
import torch
from net import batches, task

calls = [0]


def once(at, error):
    '''Raise at that call if there is a file `trouble`, and remove the file.'''
    calls[0] += 1
    if calls[0] == at and os.path.exists("trouble"):
        os.remove("trouble")
        raise error


def out_of_memory():
    def loss(outputs, targets):
        once(5, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
        return torch.nn.functional.cross_entropy(outputs, targets)

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
            time.sleep(0.02)
            yield batch

    return task(train_batches=train_batches)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interruptions")
    add_network(folder)
    (folder / "tasks.py").write_text(TASKS)
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("net.py", "tasks.py", "net.json", "net.profile"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compress(task: str, *more: str) -> list[str]:
    options = "--energy net.json --meter none --budget 80% --prune-steps 8 --finetune-steps 2 --lr 1e-3 --device cpu"
    return ["compress", f"tasks.py:{task}", *options.split(), "-o", "run", *more]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def error_of(result: Result) -> str:
    """The only error of a command that failed."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, len(lines)) == (2, 1), result.output
    assert "Traceback" not in result.output
    return lines[0]


def checkpoint() -> dict[str, Any]:
    state: dict[str, Any] = load_state("run/checkpoint.safetensors")["state"]
    return state


def assert_same_weights(one: str, other: str) -> None:
    first, second = load_state(f"{one}/slim.safetensors"), load_state(f"{other}/slim.safetensors")
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- the user's code, and memory


def test_out_of_memory_names_the_remedy_and_the_run_resumes_with_it(folder: Path) -> None:
    Path("trouble").touch()
    line = error_of(run(*compress("out_of_memory", "--pretrain-steps", "2")))
    assert "step 3 ran out of memory on cpu (OutOfMemoryError: CUDA out of memory" in line
    assert "the last good checkpoint is run/checkpoint.safetensors, at step 2. Resume with --micro-batch N" in line
    saved = checkpoint()
    assert (saved["phase"], saved["step"], saved["stream"]["lineage"]) == ("prune", 2, 4)
    again = run(*compress("out_of_memory", "--pretrain-steps", "2", "--micro-batch", "2"))
    assert again.exit_code == 0, again.output
    lines = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    trained = {(line["phase"], line["micro_batch"]) for line in lines if "micro_batch" in line}
    assert trained == {("pretrain", None), ("prune", None), ("prune", 2), ("finetune", 2)}
    assert lines[-1]["total"] == 12  # no batch was drawn twice


def test_batches_that_fail_are_named_and_the_run_resumes_as_if_nothing_had_happened(folder: Path) -> None:
    Path("trouble").touch()
    line = error_of(run(*compress("broken_loader")))
    assert "train_batches of task 'toy', at epoch 1, batch 1, raised OSError: the disk of the images is gone" in line
    assert "It is step 5; the last good checkpoint is run/checkpoint.safetensors, at step 4" in line
    assert checkpoint()["step"] == 4
    for output in ("run", "whole"):
        again = run(*compress("broken_loader", "-o", output))
        assert again.exit_code == 0, again.output
    assert_same_weights("run", "whole")


def test_a_loss_that_is_not_finite_is_reported_with_the_last_good_checkpoint(folder: Path) -> None:
    line = error_of(run(*compress("nan_loss", "--pretrain-steps", "2")))
    assert "is not finite at step 3" in line
    assert "Lower the learning rate" in line
    assert checkpoint()["step"] == 2


# ---------------------------------------------------------------- signals, and two processes at once


def started(*args: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(ecc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "ecc", *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def output_after_signal(process: subprocess.Popen[str], number: signal.Signals) -> str:
    try:
        process.send_signal(number)
        _, output = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number, output
    assert "Traceback" not in output
    return output


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    assert any(text in line for line in process.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_saves_the_state_and_a_second_process_is_refused_before(folder: Path, number: signal.Signals) -> None:
    args = compress("slow", "--prune-steps", "400")
    process = started(*args)
    wait_for(process, "pruning")
    message = f"run is in use by process {process.pid}. Wait for it, or give another folder."
    assert message in error_of(run(*args, "--quiet"))
    time.sleep(0.5)
    output = output_after_signal(process, number)
    assert f"stopped by signal {int(number)} after step" in output
    assert "Run the same command again to resume." in output
    assert 0 < checkpoint()["step"] < 400
    assert not Path("run/summary.json").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_an_export_that_is_stopped_leaves_nothing_behind_and_can_be_repeated(made: Path, folder: Path) -> None:
    shutil.copytree(made / "run", "run")
    args = ("export", "run", "--task", "net.py:task", "--format", "pt2", "-o", "out")
    process = started(*args)
    wait_for(process, "writing pt2")
    output_after_signal(process, signal.SIGTERM)
    assert not Path("out").exists()
    again = run(*args)
    assert again.exit_code == 0, again.output
    assert sorted(path.name for path in Path("out").iterdir()) == ["model_card.md", "slim.pt2"]


# ---------------------------------------------------------------- disks


def fill_disk(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC, after: int = 0) -> None:
    """Let writes fail after some of them."""
    count = itertools.count()

    def failing(real: Any) -> Any:
        def call(*args: Any) -> Any:
            if next(count) >= after:
                raise OSError(code, os.strerror(code))
            return real(*args)

        return call

    for name in ("fsync", "ftruncate"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.thorough)])
def test_a_disk_that_fails_at_any_write_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert run(*compress("slow", "-o", "whole")).exit_code == 0
    failures = 0
    for after in range(60):
        with monkeypatch.context() as patch:
            fill_disk(patch, code, after)
            result = run(*compress("slow"))
        if result.exit_code == 0:
            break
        failures += 1
        assert os.strerror(code) in error_of(result)
        assert not [path for path in Path("run").iterdir() if "tmp" in path.name]
        if Path("run/checkpoint.safetensors").exists():
            load_state("run/checkpoint.safetensors")
    assert failures >= 4
    assert run(*compress("slow")).exit_code == 0
    assert_same_weights("run", "whole")


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [0, 300, 3000] if os.environ.get("ECC_FAULTS") == "full" else [300])
def test_a_file_system_that_limits_the_size_of_files_is_reported(folder: Path, limit: int) -> None:
    code = (
        "import resource, signal, sys; from ecc.cli import main; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); sys.argv[0] = 'ecc'; main()"
    )
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    path = os.pathsep.join([str(Path(ecc.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    for args in (compress("slow"), ["fit", "net.profile", "-o", "new.json"], ["fit", "net.profile", "-o", "net.json"]):
        command = [sys.executable, "-c", code, *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        assert "File too large" in done.stderr.splitlines()[-1]
    assert {path: path.read_bytes() for path in before} == before
    assert run(*compress("slow")).exit_code == 0


def test_a_full_disk_keeps_the_samples_of_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.profile"
    with monkeypatch.context() as patch:
        fill_disk(patch, after=9)
        with pytest.raises(BadFile, match=r"No space left on device"):
            computed(path)
    assert len(Profile.load(path).samples) >= 7
    computed(path)
    computed(tmp_path / "b.profile")
    assert path.read_bytes() == (tmp_path / "b.profile").read_bytes()


def test_a_folder_that_cannot_be_written_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated, since root may write everywhere."""
    real, text = os.open, os.strerror(errno.EROFS)

    def refuse(path: Any, *args: Any, **named: Any) -> Any:
        raise OSError(errno.EROFS, text, str(path))

    def refuse_writing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR) and str(path).startswith((str(folder), "run", "new", ".")):
            refuse(path)
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refuse_writing)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    profile = ["profile", "net.py:build", "--meter", "platform:jetson-tx2", "--samples", "12", "-o", "new.profile"]
    for args in (profile, ["fit", "net.profile", "-o", "new.json"], compress("slow")):
        assert text in error_of(run(*args))
    monkeypatch.setattr(os, "mkdir", refuse)
    assert text in error_of(run(*compress("slow", "-o", "other")))
    grid = "compare tasks.py:slow --energy net.json --meter none --methods ecc --budgets 80% --seeds 1 -o grid"
    assert text in error_of(run(*grid.split()))


# ---------------------------------------------------------------- clocks


def test_a_clock_that_jumps_back_changes_no_duration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(2e9, -3600.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    result = run(*compress("slow"))
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    seconds = [line["wall"]["session_seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[0] <= seconds[-1] < 600
