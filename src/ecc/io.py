"""Files: bounded reads of files from anywhere, atomic writes, and code of the user."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from ecc.errors import BadFile

try:
    import fcntl
except ImportError:  # Windows has no flock; locks do nothing there
    fcntl = None  # type: ignore[assignment]

MAX_BYTES = 8 << 20
"""Largest file that is read at once. Ours have a megabyte or two; parsing 8 MiB of JSON takes about a second."""

MAX_LINE_BYTES = 1 << 20
"""Longest line of a file that is read line by line; those of a history have some kilobytes."""

_FORMAT_BYTES = 512  # the format of a file is named within its first bytes


def read_bytes(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes. Pipes and devices, which may never end, are refused."""
    with open_to_read(path) as file:
        data = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)  # Python allocates as much as requested
    if len(data) > most:
        raise BadFile(f"{path} is larger than {most >> 20} MiB, the limit for such files.")
    return data


def read_text(path: str | Path, most: int = MAX_BYTES) -> str:
    """Read a UTF-8 file, as `read_bytes` does.

    Raises:
        UnicodeDecodeError: If it is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_lines(path: str | Path, start: int = 0) -> Iterator[bytes]:
    """Read the complete lines of a file one at a time, each with its newline.

    A last line without a newline is left out: a process is writing it, or was killed while it did.
    """
    with open_to_read(path) as file:
        file.seek(start)
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                where = f"{path}:{number}" if start == 0 else str(path)
                raise BadFile(f"{where}: the line is longer than {MAX_LINE_BYTES >> 20} MiB; the file is damaged.")
            if line.endswith(b"\n"):
                yield line


@contextmanager
def open_to_read(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file, open for reading. Opening a pipe would wait for its writer, so pipes and devices are refused."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir():  # opening a folder raises below
            raise BadFile(f"{path} is not a regular file.")
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:  # a NUL in the name
        raise BadFile(f"cannot read {str(path)!r}: {error}.") from None


def refuse_other_file(path: str | Path, mark: str, what: str) -> None:
    """Check that writing to `path` would not replace a file of another kind, such as hours of measurements."""
    exists = False
    with suppress(OSError, ValueError):  # an impossible name is reported when the file is written
        exists = Path(path).is_file()
    if exists:
        with open_to_read(path) as file:
            start = file.read(_FORMAT_BYTES)
        if start and mark.encode() not in start:
            raise BadFile(f"{path} exists and is not a {what}. Give another name, or remove it.")


def execute_file(path: Path) -> ModuleType:
    """Import a Python file that the user names, under a unique name: `torch.py` must not replace torch.

    Raises:
        Exception: Whatever the code of the file raises.
    """
    name = f"ecc_file_{path.stem}_{zlib.crc32(bytes(path.resolve())):08x}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # noqa: PT018 - the path ends in .py
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file atomically; see `replace_file`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file atomically; see `replace_file`."""
    with replace_file(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def replace_file(path: str | Path) -> Iterator[Path]:
    """Replace a file atomically: the block writes a temporary file, which takes the name when it is complete.

    An older file stays until the new one is on the disk. If the block raises, the temporary file is removed.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # replacing a folder raises below
            raise OSError(errno.EINVAL, "it is not a regular file")  # root could replace /dev/null
        try:
            yield temporary
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadFile(f"cannot write {path}: {getattr(error, 'strerror', None) or error}.") from None


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the system supports it.

    Raises:
        OSError: If the disk is full or fails.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this folder, where the file system has locks."""
    descriptor = -1
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            descriptor = os.open(folder.resolve(), os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process is in such a block with this folder; True where that cannot be known."""
    is_free = False
    if fcntl is not None:
        with suppress(OSError):  # another process has the lock, or there are no locks
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            finally:
                os.close(descriptor)
    return not is_free
