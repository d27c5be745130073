"""`RunDir`: a run is a folder, and repeating its command resumes it.

    config.json             settings of the run; a run with other settings is refused
    environment.json        software and command of every session
    history.jsonl           one JSON object per line; times and dates are in its field `wall`
    checkpoint.safetensors  the last state
    summary.json            the result; it exists when the run is finished

When a run resumes, its history is cut back to the checkpoint. In the end it reads as if there had been no interruption.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ecc.constants import RUN_PROFILE, WORKLOAD_PROFILES
from ecc.errors import BadFile, describe_error
from ecc.io import read_lines
from ecc.measure.environment import environment
from ecc.records import from_json, read_record, to_builtins, to_json, write_record

from .checkpoint import load_state, save_state

try:
    import fcntl
except ImportError:  # Windows: two processes in one run folder are not noticed there
    fcntl = None  # type: ignore[assignment]

FORMAT = "ecc run"
VERSION = 2

T = TypeVar("T")
_LOCK = ".ecc-lock"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # a link in a folder from elsewhere could point to any file of the user
_MISSING = "(missing)"
_locks: set[int] = set()  # descriptors of the locks that this process holds


class RunInUse(BadFile):
    """Raised when another process uses the folder of a run."""


class RunDir:
    """The folder of a run in progress. Made by `open_run`.

    With several processes only one writes; in the others the writing methods do nothing.
    """

    def __init__(self, path: Path, config: Any, *, writes: bool) -> None:
        self.path = path
        self.config = config
        """Settings of the run, as plain values."""
        self.writes = writes
        self._started = time.monotonic()
        self._lines = 0
        self._end: int | None = None  # end of the lines to keep, in bytes; None once the others are removed
        self._descriptor = -1

    @property
    def checkpoint_path(self) -> Path:
        """File of the last state."""
        return self.path / "checkpoint.safetensors"

    def checkpoint(self) -> dict[str, Any] | None:
        """The last state; None if there is none yet.

        Raises:
            BadFile: If it is damaged.
        """
        return _load_checkpoint(self.checkpoint_path)["state"] if self.checkpoint_path.exists() else None

    @contextmanager
    def restoring(self, file: str = "checkpoint.safetensors") -> Iterator[None]:
        """A block that uses values from a file of the run. If they do not fit, the error names the file.

        Raises:
            BadFile: In place of errors that unexpected values cause.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, AttributeError) as error:
            raise BadFile(
                f"{self.path / file} does not fit this run ({describe_error(error)}); restore it from a copy or start "
                "a new run."
            ) from None

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint. It is on the disk when this returns, and so is the history."""
        if self.writes:
            self._sync_history()
            save_state(self.checkpoint_path, {"history_lines": self._lines, "state": dict(state)})

    def log(self, line: Any) -> None:
        """Add a line to the history, with date and time in its field `wall`.

        Args:
            line: A record of `ecc.run_records`, or a mapping of plain values. NaN and infinity become null.

        Raises:
            BadFile: If it cannot be written.
        """
        if not self.writes:
            return
        fields = to_builtins(line)
        seconds = round(time.monotonic() - self._started, 3)
        wall = {"time": _now(), "session_seconds": seconds, **fields.get("wall", {})}
        data = to_json({**fields, "wall": wall}) + b"\n"
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
        return islice(history_lines(self.path), self._lines if self.writes else None)

    def finish(self, summary: Any) -> None:
        """Write the result, a record such as `RunSummary`. From now on the run is finished."""
        if self.writes:
            self._sync_history()  # a finished run is not resumed, so its history must be complete
            write_record(self.path / "summary.json", summary)

    def summary(self, kind: type[T] = dict) -> T | None:  # type: ignore[assignment]  # a dict without a type
        """The result as a `kind`; None if the run is not finished.

        Raises:
            BadFile: If it is damaged.
        """
        path = self.path / "summary.json"
        return read_record(path, kind) if path.exists() else None

    def _open_history(self) -> None:
        """Find the lines to keep: up to the checkpoint, or all if the run is finished; never an incomplete one."""
        path = self.path / "history.jsonl"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_LINK, 0o666)
        except OSError as error:
            raise BadFile(f"cannot write {path}: {error.strerror}.") from None
        keep: int | None = None
        if not (self.path / "summary.json").exists():
            has_checkpoint = self.checkpoint_path.exists()
            keep = _load_checkpoint(self.checkpoint_path)["history_lines"] if has_checkpoint else 0
        self._lines = self._end = count = 0
        for count, (_, end) in enumerate(_parsed_lines(path), start=1):
            if keep is None or count <= keep:
                self._lines, self._end = count, end
        if keep is not None and count < keep:
            raise BadFile(f"{path} has {count} lines, but had {keep} at the checkpoint; restore it or start a new run.")

    def _cut_back(self) -> None:
        """Remove the lines after the checkpoint, as late as possible: a run that is refused keeps its lines."""
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
def open_run(path: str | Path, config: Any, *, device_type: str = "cpu", writes: bool = True) -> Iterator[RunDir]:
    """Start a run in a folder, or resume it. Other processes cannot use the folder meanwhile.

    Args:
        path: The folder; made if it is missing.
        config: Everything that determines the result: a mapping or a record. It must be the same when a run resumes.
        device_type: Device whose software is noted in environment.json.
        writes: False in all processes of a run but one; they only read, and take no lock.

    Raises:
        BadFile: If the folder holds something else, the run has another config, or a file is damaged. Nothing in the
            folder is changed then.
        RunInUse: If another process uses the folder.
    """
    path, config = Path(path), to_builtins(config)
    if not writes:
        yield RunDir(path, config, writes=False)
        return
    check_run_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot make the folder {path}: {error.strerror}.") from None
    descriptor = _lock(path)
    run = RunDir(path, config, writes=True)
    try:
        _check_config(path, config)
        run._open_history()
        _note_session(path, device_type)
        for leftover in [*path.glob(".*.tmp"), *path.glob(".tmp*")]:  # of a process that was killed while it wrote
            with suppress(OSError):
                leftover.unlink(missing_ok=True)
        yield run
    finally:
        run._close()
        _locks.discard(descriptor)
        os.close(descriptor)  # releases the lock, as does the end of the process


def check_run_folder(path: Path) -> None:
    """Refuse a folder that holds something other than a run.

    Raises:
        BadFile: If it does, or is a file.
    """
    try:
        if path.exists() and not path.is_dir():
            raise BadFile(f"{path} is a file; a run needs a folder.")
        if not path.exists() or (path / "config.json").exists():
            return
        profiles = [path / name for name in (RUN_PROFILE, *WORKLOAD_PROFILES)]
        own = [path / _LOCK, *profiles, *path.glob(".config.json.*.tmp")]  # of a run that did not start
        other = sorted(entry.name for entry in path.iterdir() if entry not in own)
    except OSError as error:
        raise BadFile(f"cannot read the folder {path}: {error.strerror}.") from None
    if other:
        raise BadFile(f"{path} holds {other[0]!r} and is not a run folder. Give an empty or a new folder.")


def _check_config(path: Path, config: Any) -> None:
    """Write the config of a new run, or compare it with that of the run that is resumed."""
    file = path / "config.json"
    if not file.exists():
        write_record(file, {"format": FORMAT, "version": VERSION, "config": config})
        return
    found: dict[str, Any] = read_record(file, dict)
    if found.get("format") != FORMAT or "config" not in found:
        raise BadFile(f"{file} is not the config of a run. Give another folder.")
    if found.get("version") != VERSION:
        raise BadFile(f"{file} has version {found.get('version')}; this version of ecc reads version {VERSION}.")
    difference = first_difference(found["config"], config)
    if difference:
        field, before, now = difference
        if field == "weights":
            raise BadFile(
                f"{path} is a run of a network with other initial weights. To resume, load the same weights, or call "
                "torch.manual_seed before you build the network; otherwise give another folder."
            )
        raise BadFile(
            f"{path} is a run with {field} = {before}, and now {field} = {now}. Use the same settings to resume, or "
            "another folder."
        )


TOLERANCE = 1e-6
"""Relative difference of numbers that counts as none: with another number of threads, a fit has other last digits."""


def first_difference(before: Any, now: Any, place: str = "") -> tuple[str, str, str] | None:
    """The first field in which two configs differ, with both values as JSON; None if they are equal.

    Numbers that are not whole may differ by `TOLERANCE`.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            below = f"{place}.{key}" if place else str(key)
            if key not in before or key not in now:
                return below, _as_json(before.get(key, _MISSING)), _as_json(now.get(key, _MISSING))
            if found := first_difference(before[key], now[key], below):
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return next((found for index, pair in pairs if (found := first_difference(*pair, f"{place}[{index}]"))), None)
    if isinstance(before, float) and isinstance(now, float):
        is_same = math.isclose(before, now, rel_tol=TOLERANCE)
    else:
        is_same = before == now and isinstance(before, bool) == isinstance(now, bool)
    return None if is_same else (place or "config", _as_json(before), _as_json(now))


def _as_json(value: Any) -> str:
    return _MISSING if value is _MISSING else json.dumps(value)


def _note_session(path: Path, device_type: str) -> None:
    file = path / "environment.json"
    found: dict[str, Any] = read_record(file, dict) if file.exists() else {"sessions": []}
    sessions = found.get("sessions")
    if not isinstance(sessions, list):
        raise BadFile(f"{file} has no list of sessions; restore it from a copy, or delete it.")
    session = {"started": _now(), "pid": os.getpid(), "device": device_type, "command": _command()}
    write_record(file, {"sessions": [*sessions, {**session, **environment(device_type)}]})


def _command() -> str:
    """The command line of this process, with the name of the program instead of its path."""
    program = Path(sys.argv[0]).name
    words = ["ecc"] if program in ("ecc", "__main__.py") else ["python", program]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        each = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        nodes = ["--nnodes", str(processes // each)] if processes > each else []
        words = ["torchrun", *nodes, "--nproc-per-node", str(each), *(["-m", "ecc"] if words == ["ecc"] else [program])]
    return shlex.join([*words, *sys.argv[1:]])


def _lock(path: Path) -> int:
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
    with suppress(OSError):  # on a full disk the lock holds without the number
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode("ascii"))
    _locks.add(descriptor)
    return descriptor


def _close_locks_in_child() -> None:
    """Close the locks in a forked process, such as a data loader; otherwise they would be held until it ends."""
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_locks_in_child)


def history_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """The history of a run that another process may own, read one line at a time.

    Raises:
        BadFile: If a line is damaged.
    """
    return (line for line, _ in _parsed_lines(folder / "history.jsonl"))


def _parsed_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The complete lines of a history, each with its end in bytes."""
    end = 0
    for number, line in enumerate(read_lines(path), start=1):
        end += len(line)
        yield from_json(line, dict, f"{path}:{number}"), end


def _load_checkpoint(path: Path) -> dict[str, Any]:
    saved = load_state(path)
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):
        lines = saved.get("history_lines")
        if isinstance(lines, int) and lines >= 0:
            return saved
    raise BadFile(f"{path} is not a checkpoint of a run; restore it from a copy or start a new run.")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
