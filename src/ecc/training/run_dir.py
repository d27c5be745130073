"""`RunDir`: a run is a folder, and repeating its command continues it.

    config.json             what was asked; a run that asks for something else is refused
    environment.json        the software and the command of every session that worked on it
    history.jsonl           one JSON object a line; what differs from run to run is in its field `wall`
    checkpoint.safetensors  the last state, whole
    summary.json            what came out; its presence says that the run is finished

History is cut back to the checkpoint when a run is taken up again, so that in the end it reads as if there had
been no interruption.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from ecc.constants import RUN_PROFILE
from ecc.errors import BadFile
from ecc.io import read_bytes, write_text
from ecc.measure.environment import environment

from .checkpoint import load_state, save_state, sync_folder
from .jsonl import first_difference, json_line, parsed_lines, plain

try:
    import fcntl
except ImportError:  # Windows: two processes on one run are not noticed there
    fcntl = None  # type: ignore[assignment]

FORMAT = "ecc run"
VERSION = 1

_LOCK = ".ecc-lock"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a link in a folder from elsewhere could lead to any file of the user
_HELD: set[int] = set()  # descriptors of the locks of this process


class RunInUse(BadFile):
    """Raised when another process works in the folder of a run; it may be free again later."""


class RunDir:
    """The folder of a run that is at work. Made by `open_run`.

    With several processes only one writes; on the others the writing methods do nothing.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, writes: bool) -> None:
        self.path = path
        self.config = config
        """What was asked, as plain values."""
        self.writes = writes
        self._started = time.monotonic()
        self._lines = 0
        self._end: int | None = None  # of the lines that are kept; None once the others are gone
        self._descriptor = -1

    @property
    def checkpoint_path(self) -> Path:
        """Where the last state is, once there is one."""
        return self.path / "checkpoint.safetensors"

    def checkpoint(self) -> dict[str, Any] | None:
        """The last state that was saved; None if there is none yet.

        Raises:
            BadFile: If it is damaged.
        """
        if not self.checkpoint_path.exists():
            return None
        state: dict[str, Any] = _saved(self.checkpoint_path)["state"]
        return state

    def restoring(self, file: str = "checkpoint.safetensors") -> AbstractContextManager[None]:
        """A block in which what a file of the run holds is put to use: if it does not fit, the file is named.

        Raises:
            BadFile: In the place of what unforeseen values lead to.
        """
        return _restoring(self.path / file)

    def save(self, state: Mapping[str, Any]) -> None:
        """Replaces the checkpoint; it is on the disk when this returns, and so is the history up to here."""
        if self.writes:
            self._sync_history()
            save_state(self.checkpoint_path, {"history_lines": self._lines, "state": dict(state)})

    def log(self, facts: Mapping[str, Any]) -> None:
        """Adds a line to the history, with the time in its field `wall`.

        Raises:
            BadFile: If it cannot be written, as on a full disk.
        """
        if not self.writes:
            return
        seconds = round(time.monotonic() - self._started, 3)
        wall = {"time": _now(), "session_seconds": seconds, **facts.get("wall", {})}
        data = json_line({**facts, "wall": wall})
        try:
            self._cut_back()
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise BadFile(f"cannot write {self.path / 'history.jsonl'}: {error.strerror}.") from None
        self._lines += 1

    def history(self) -> Iterator[dict[str, Any]]:
        """All lines so far, read one at a time.

        Raises:
            BadFile: If a line is damaged.
        """
        lines = parsed_lines(self.path / "history.jsonl")
        return (facts for facts, _ in islice(lines, self._lines if self.writes else None))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes what came out; from now on the run counts as finished."""
        if self.writes:
            self._sync_history()  # a finished run is not taken up again, so its history must be whole
            write_text(self.path / "summary.json", json.dumps(plain(summary), indent=2) + "\n")

    def summary(self) -> dict[str, Any] | None:
        """What came out; None as long as the run is not finished."""
        path = self.path / "summary.json"
        return _json(path) if path.exists() else None

    def _open_history(self) -> None:
        """Finds where to go on: without a torn last line, and after the checkpoint of a run that is not finished."""
        path = self.path / "history.jsonl"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666)
        except OSError as error:
            raise BadFile(f"cannot write {path}: {error.strerror}.") from None
        keep: int | None = None
        if self.summary() is None:
            keep = _saved(self.checkpoint_path)["history_lines"] if self.checkpoint_path.exists() else 0
        self._lines = self._end = there = 0
        for there, (_, end) in enumerate(parsed_lines(path), start=1):
            if keep is None or there <= keep:
                self._lines, self._end = there, end
        if keep is not None and there < keep:
            raise BadFile(f"{path} has {there} lines, but had {keep} at the checkpoint; restore it, or start anew.")

    def _cut_back(self) -> None:
        """Drops what is to be done again, as late as possible: a run that is refused keeps its lines."""
        if self._end is not None:
            os.ftruncate(self._descriptor, self._end)
            self._end = None

    def _sync_history(self) -> None:
        try:
            self._cut_back()
            os.fsync(self._descriptor)
        except OSError as error:
            raise BadFile(f"cannot write {self.path / 'history.jsonl'}: {error.strerror}.") from None

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@contextmanager
def open_run(
    path: str | Path, config: Mapping[str, Any], *, device_type: str = "cpu", writes: bool = True
) -> Iterator[RunDir]:
    """Begins a run in a folder, or takes it up again, and keeps other processes out meanwhile.

    Args:
        path: The folder; made if it is missing.
        config: Everything that decides the outcome, as plain values. It must be what it was the first time.
        device_type: Of the device that computes: its software is noted.
        writes: False on all processes of a run but one: these only read, and take no lock.

    Raises:
        BadFile: If the folder holds something else, the run was asked for something else, or a file is damaged.
            Nothing that was there is changed then.
        RunInUse: If another process works in it.
    """
    path, config = Path(path), plain(config)
    if not writes:
        yield RunDir(path, config, writes=False)
        return
    check_run_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot make the folder {path}: {error.strerror}.") from None
    descriptor = _locked(path)
    run = RunDir(path, config, writes=True)
    try:
        _begin(path, config)
        run._open_history()
        _note_session(path, device_type)
        for leftover in path.glob(".*.tmp"):  # what a process that died was writing; the lock says that it is dead
            with suppress(OSError):  # a folder of that name is not ours
                leftover.unlink(missing_ok=True)
        yield run
    finally:
        run._close()
        _HELD.discard(descriptor)
        os.close(descriptor)  # this gives the lock back, as does the death of the process


def check_run_folder(path: Path) -> None:
    """Refuse a folder that holds something else than a run.

    Raises:
        BadFile: If it does, or is a file.
    """
    try:
        _refuse_others(path)
    except OSError as error:
        raise BadFile(f"cannot look into {path}: {error.strerror}.") from None


def _refuse_others(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise BadFile(f"{path} is a file; a run needs a folder. Give another path.")
    if not path.exists() or (path / "config.json").exists():
        return
    own = [path / _LOCK, path / RUN_PROFILE, *path.glob(".config.json.*.tmp")]  # of a run that died before it had begun
    other = sorted(entry.name for entry in path.iterdir() if entry not in own)
    if other:
        raise BadFile(f"{path} holds {other[0]!r} and is no run; it is left as it is. Give an empty or a new folder.")


def _begin(path: Path, config: Any) -> None:
    """Writes the config of a new run, or compares it with that of the old one."""
    file = path / "config.json"
    if not file.exists():
        text = json.dumps({"format": FORMAT, "version": VERSION, "config": config}, indent=2)
        write_text(file, text + "\n")
        sync_folder(path)
        return
    found = _json(file)
    if found.get("format") != FORMAT or "config" not in found:
        raise BadFile(f"{file} is no config of a run, and is left as it is. Give another folder.")
    if found.get("version") != VERSION:
        raise BadFile(f"{file} has version {found.get('version')}; this ecc reads version {VERSION}.")
    difference = first_difference(found["config"], config)
    if difference:
        field, then, now = difference
        raise BadFile(
            f"{path} was begun with {field} = {then}, and now {field} = {now} is asked for. "
            "Ask for the same to go on, or give another folder."
        )


def _note_session(path: Path, device_type: str) -> None:
    file = path / "environment.json"
    sessions = _json(file).get("sessions") if file.exists() else []
    if not isinstance(sessions, list):
        raise BadFile(f"{file} holds no list of sessions; restore it from a copy, or delete it.")
    session = {"started": _now(), "pid": os.getpid(), "device": device_type, "command": _command()}
    sessions.append({**session, **environment(device_type)})
    write_text(file, json.dumps({"sessions": sessions}, indent=2) + "\n")


def _command() -> str:
    """What was typed, as far as a process can tell; a program is named without its folder."""
    program = Path(sys.argv[0]).name
    words = ["ecc"] if program in ("ecc", "__main__.py") else ["python", program]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        nodes = ["--nnodes", str(processes // each)] if processes > each else []
        words = ["torchrun", *nodes, "--nproc-per-node", str(each), *(["-m", "ecc"] if words == ["ecc"] else [program])]
    return shlex.join([*words, *sys.argv[1:]])


def _locked(path: Path) -> int:
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    except OSError as error:
        raise BadFile(f"cannot write into {path}: {error.strerror}.") from None
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunInUse(f"{path} is in use by process {holder}. Wait for it, or give another folder.") from None
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode("ascii"))
    _HELD.add(descriptor)
    return descriptor


def _let_go() -> None:
    """In a forked process, such as one that loads data: a lock is held as long as anyone has it open."""
    for descriptor in _HELD:
        os.close(descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def _restoring(path: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
        first = " ".join(str(error).split())[:200]
        reason = f"{type(error).__name__}: {first}"
        raise BadFile(f"{path} does not fit this run ({reason}); restore it from a copy or start anew.") from None


def _saved(path: Path) -> dict[str, Any]:
    saved = load_state(path)
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):
        lines = saved.get("history_lines")
        if isinstance(lines, int) and lines >= 0:
            return saved
    raise BadFile(f"{path} is no checkpoint of a run; restore it from a copy or start anew.")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise BadFile(
            f"{path} cannot be read ({type(error).__name__}); restore it from a copy or start anew."
        ) from None
    if not isinstance(found, dict):
        raise BadFile(f"{path} is damaged; restore it from a copy or start anew.")
    return found


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
