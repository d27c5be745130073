"""Reading files that may be hostile, and writing so that nothing on disk is lost, whatever happens meanwhile."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO

from ecc.errors import BadFile

try:
    import fcntl
except ImportError:  # Windows: what a process leaves that is killed while it writes stays there
    fcntl = None  # type: ignore[assignment]

MAX_BYTES = 8 << 20
"""Of a file that is read at once. Ours have a megabyte or two; the worst JSON of this size takes a second."""


MARKED_BYTES = 512
"""Of a file, in which it says what it is."""


MAX_LINE_BYTES = 1 << 20
"""Of a line that is read by itself; those of a history have some kilobytes."""


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a plain file of bounded size. A pipe or a device might never end, and is refused.

    Raises:
        BadFile: If it is no such file, or cannot be read.
    """
    with _opened(path) as file:
        data = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)  # Python reserves what is asked for
    if len(data) > most:
        raise BadFile(f"{path} is larger than {most >> 20} MiB, so that it cannot be what it should be.")
    return data


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """As `read_bytes`, for text.

    Raises:
        BadFile: If the file cannot be read.
        UnicodeDecodeError: If it is no text; a ValueError, as those of `json.loads` are.
    """
    return read_bytes(path, most).decode("utf-8")


def read_lines(path: str | Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a plain file, each with its end, one at a time: memory does not grow with the file.

    A last line without its end is left out: it is being written, or was torn when a process died.

    Args:
        path: The file.
        start: Where to begin: 0, or the end of a line.

    Raises:
        BadFile: If it is no such file, cannot be read, or a line has no end in sight.
    """
    with _opened(path) as file:
        file.seek(start)
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                where = f"{path}:{number}" if start == 0 else str(path)
                raise BadFile(f"{where}: the line is damaged: it is longer than {MAX_LINE_BYTES >> 20} MiB.")
            if line.endswith(b"\n"):
                yield line


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir():  # a folder has its own error below
            raise BadFile(f"{path} is not a plain file; give one.")
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:  # a NUL in the name
        raise BadFile(f"cannot read {str(path)!r}: {error}.") from None


def refuse_other_file(path: str | Path, mark: str, what: str) -> None:
    """Refuses to put a file in the place of one of another kind, such as hours of measurements.

    Args:
        path: Where it is to go; nothing may be there.
        mark: What files of its kind have in their first lines.
        what: Its kind, for the message.

    Raises:
        BadFile: If another file is there.
    """
    there = False
    with suppress(OSError, ValueError):  # a name that cannot be is told when it is written
        there = Path(path).is_file()
    if there:
        with _opened(path) as file:
            start = file.read(MARKED_BYTES)
        if start and mark.encode() not in start:
            raise BadFile(f"{path} is there and is no {what}; it is left as it is. Give another name, or remove it.")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all: an older one stays until the new one is complete on disk.

    Raises:
        BadFile: the folder is missing, may not be written, or the disk is full.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """As `write_text`, for bytes."""
    path = Path(path)

    def made() -> Path:
        descriptor, name = mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(descriptor)
        return Path(name)

    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a folder has its own error
            raise OSError(errno.EINVAL, "it is not a plain file")  # root would put a file in the place of a device
        remove_abandoned(path.parent, f".{path.name}.", ".tmp")
        with temporary(made) as new:
            try:
                with new.open("wb") as file:
                    os.fchmod(file.fileno(), 0o666 & ~umask())  # as any other new file; temporary ones are private
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(path)
            finally:
                new.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadFile(f"cannot write {path}: {getattr(error, 'strerror', error)}.") from None


@contextmanager
def temporary(make: Callable[[], Path]) -> Iterator[Path]:
    """A new file or folder with a lock on it, so that others see that its maker lives; its maker removes it."""
    while True:
        path = make()
        lock = _locked(path, wait=True)
        if path.exists():
            break
        if lock >= 0:
            os.close(lock)
        # In the moment before the lock, another process took it for abandoned.
    try:
        yield path
    finally:
        if lock >= 0:
            os.close(lock)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits for other processes that are in such a block with the same folder, where the file system has locks."""
    lock = _locked(folder.resolve(), wait=True)
    try:
        yield
    finally:
        if lock >= 0:
            os.close(lock)


def remove_abandoned(folder: Path, prefix: str, suffix: str = "") -> None:
    """Removes temporary files and folders of processes that were killed; those of living ones are locked."""
    for path in temporaries(folder, prefix, suffix):
        lock = _locked(path)
        if lock < 0:
            continue
        with suppress(OSError):  # someone else removed it
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.close(lock)


def temporaries(folder: Path, prefix: str, suffix: str = "") -> list[Path]:
    """Temporary files and folders by their name, in which eight characters are random; some may be in use."""
    return list(folder.glob(f"{glob.escape(prefix)}????????{suffix}"))


def _locked(path: Path, *, wait: bool = False) -> int:
    """A descriptor that holds a lock until it is closed or the process dies; -1 if there is none to be had."""
    descriptor = -1
    if fcntl is not None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:  # gone, in use, or on a file system without locks
            if descriptor >= 0:
                os.close(descriptor)
            return -1
    return descriptor


def umask() -> int:
    """The permissions that new files are made without; there is no way to read them but to set them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
