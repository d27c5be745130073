"""One damaged file: used as a user would, and a look at what is left after."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from ecc.errors import EccError
from faults import fuzz

HANG_SECONDS = 20
"""Nothing may take so long; no limit of speed, but of patience."""
LONGEST_MESSAGE = 4000


@dataclass(frozen=True)
class Target:
    """One file. A run folder has several."""

    name: str
    make: Callable[[Path], Path]
    """Writes what is good into an empty folder; the file to damage."""
    use: Callable[[Path], object]
    """Reads the file, and asks for all that follows from it."""
    json_too: fuzz.BytesMutator | None = fuzz.json_changed
    writes: bool = False
    """Whether a use that succeeds may change files in the folder."""


@dataclass(frozen=True)
class Outcome:
    """What became of one damaged file."""

    kind: str
    """`refused` with one clear error, `accepted` because the damage does no harm, or `lost`."""
    message: str
    seconds: float


class Hang(Exception):
    pass


@contextmanager
def patience(seconds: int = HANG_SECONDS) -> Iterator[None]:
    """Raises `Hang` after that long; in the main thread of a system that has alarms."""

    def ring(number: int, frame: object) -> None:
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(target: Target, damaged: bytes | None, folder: Path) -> Outcome:
    """Damages the file in a fresh copy, uses it, and looks at what is left. None leaves it whole."""
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    template, name = _made(target)
    shutil.copytree(template, home)
    (folder / "beside").write_text("mine")
    file = home / name
    if damaged is not None:
        file.write_bytes(damaged)
    before, here = _contents(home), Path.cwd()
    started = time.monotonic()
    os.chdir(home)
    try:
        with patience():
            target.use(file)
        kind, message = "accepted", ""
    except EccError as error:
        kind, message = "refused", str(error)
    except (Exception, Hang) as error:  # noqa: BLE001 - whatever else comes out is what we look for
        kind, message = "lost", f"{type(error).__name__}: {error}"[:300]
    finally:
        os.chdir(here)
    seconds = time.monotonic() - started
    after = _contents(home)
    if (home / "EXECUTED").exists() or sorted(path.name for path in folder.iterdir()) != ["beside", "home"]:
        kind, message = "lost", "something was run, or written outside"
    elif kind == "refused" and any(after.get(name) != data for name, data in before.items()):
        changed = [name for name, data in before.items() if after.get(name) != data]
        kind, message = "lost", f"{changed} changed although it was refused: {message}"[:300]
    elif kind == "refused" and (len(message) > LONGEST_MESSAGE or not message.replace("\n", " ").isprintable()):
        kind, message = "lost", f"a message of {len(message)} characters: {message[:200]!r}"
    elif kind == "accepted" and not target.writes and after != before:
        kind, message = "lost", "reading changed a file"
    return Outcome(kind, message, seconds)


def _contents(folder: Path) -> dict[str, bytes]:
    own = (".ecc-lock", "environment.json")  # a session is noted before its checkpoint is looked at
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in own)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@cache
def _made(target: Target) -> tuple[Path, Path]:
    """A folder with what is good, and the path in it of what is to be damaged."""
    folder = Path(mkdtemp(prefix="ecc-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, target.make(folder).relative_to(folder)


def good_bytes(target: Target) -> bytes:
    """Of the file that is to be damaged."""
    folder, file = _made(target)
    return (folder / file).read_bytes()
