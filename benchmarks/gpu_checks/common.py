"""What the checks share: the record of a check, its result, and subprocesses with a time limit."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TAIL_CHARACTERS = 2000
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of Linux


@dataclass(frozen=True)
class Context:
    """Where a check runs."""

    device: str
    """`cuda`; the project's own tests run some checks on `cpu`."""
    folder: Path
    """An empty folder for what the check writes."""
    small: bool = False
    """A short form, for the project's own tests."""

    def shared(self, name: str) -> Path:
        """A file that one check leaves for another."""
        return self.folder.parent / name


@dataclass
class Outcome:
    """What a check found."""

    passed: bool
    summary: str
    """One line for the table."""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One check: `run` returns its outcome; an exception is a failure."""

    name: str
    title: str
    run: Callable[[Context], Outcome]
    limit_seconds: float
    phase: int = 2
    """Checks of one phase run at the same time, phases one after another: 0, alone, because it measures energy and
    processor time; 1, it measures the energy of the GPU or uses the CPU only; 2, all others."""
    processes: int = 1
    needs: str = ""
    """The check whose results it reads."""


class CommandFailed(RuntimeError):
    """A subprocess failed or exceeded its time limit."""


@dataclass(frozen=True)
class Finished:
    """A subprocess that ended with exit code 0."""

    output: str
    seconds: float


def run_python(words: Sequence[str | Path], folder: Path, limit_seconds: float) -> Finished:
    """Run `python WORDS` in `folder`.

    Raises:
        CommandFailed: If the exit code is not 0, or the time limit passes.
    """
    return finish(start_python(words, folder), limit_seconds)


def finish(process: subprocess.Popen[str], limit_seconds: float) -> Finished:
    """Wait for a process of `start_python`; as `run_python` otherwise."""
    started = time.monotonic()
    command = [str(word) for word in process.args]  # type: ignore[union-attr]
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        kill_group(process)
        output, _ = process.communicate()
        print(output)
        raise CommandFailed(f"{_shown(command)}: over {limit_seconds:.0f} s.\n{output[-TAIL_CHARACTERS:]}") from None
    finally:
        kill_group(process)
    if process.returncode != 0:
        print(output)
        raise CommandFailed(f"{_shown(command)}: exit code {process.returncode}.\n{output[-TAIL_CHARACTERS:]}")
    return Finished(output, time.monotonic() - started)


def start_python(words: Sequence[str | Path], folder: Path) -> subprocess.Popen[str]:
    """Start `python WORDS` in `folder`, in a process group of its own; output and errors are one stream."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_with_parent(number: int) -> None:
    """Let the system send this process a signal when its parent ends, even when that is killed (Linux only)."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, number)


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill a process of `start_python` and the processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _shown(command: Sequence[str]) -> str:
    return " ".join(["python", *(Path(word).name if Path(word).is_absolute() else word for word in command[1:])])


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"
