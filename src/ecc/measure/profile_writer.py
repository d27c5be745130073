"""Append samples to a profile: the file is locked, and every sample is on the disk before the next is measured.

A process that is killed at any time loses at most the sample in progress: an incomplete last line is removed when the
file is opened again, and its sample is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ecc.errors import BadFile
from ecc.io import read_bytes

from .profile import (
    HEADER_START,
    MAX_PROFILE_BYTES,
    Profile,
    ProfileHeader,
    Sample,
    header_line,
    parse_profile,
    sample_line,
)

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]


class ProfileWriter:
    """Contents of an open profile, and a method to append to it. Create it with `open_profile`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.header: ProfileHeader | None = None
        """None while the file is empty."""
        self.samples: list[Sample] = []
        self._descriptor = descriptor
        self._is_empty = True
        self._read()

    def profile(self) -> Profile:
        """The profile as it is now."""
        assert self.header is not None, "the header is set before the first sample"
        return Profile(self.header, tuple(self.samples))

    def start(self, header: ProfileHeader) -> None:
        """Set the header of a new file. It is written with the first sample, so a failed start leaves no file."""
        assert self.header is None, "a file has one header"
        self.header = header

    def append(self, sample: Sample) -> None:
        """Append a sample; it is on the disk when this returns."""
        assert self.header is not None, "the header is set before the first sample"
        if self._is_empty:
            self._write(header_line(self.header))
            self._is_empty = False
        self._write(sample_line(sample))
        self.samples.append(sample)

    def _read(self) -> None:
        data = read_bytes(self.path, MAX_PROFILE_BYTES)
        complete = data[: data.rfind(b"\n") + 1]
        if data[: len(HEADER_START)] != HEADER_START[: len(data)]:
            raise BadFile(f"{self.path} exists and is not a profile of this version of ecc. Give another file.")
        if complete:
            profile = parse_profile(complete, self.path)
            self.header, self.samples, self._is_empty = profile.header, list(profile.samples), False
        if len(complete) < len(data):
            os.ftruncate(self._descriptor, len(complete))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise BadFile(
                f"cannot write {self.path}: {error.strerror}. The samples written so far are safe."
            ) from error


@contextmanager
def open_profile(path: str | Path) -> Iterator[ProfileWriter]:
    """Open a profile for appending, with a lock against other processes."""
    path = Path(path)
    if path.suffix == ".gz":
        raise BadFile(
            f"{path}: samples cannot be appended to a compressed file. Leave out .gz, and compress it at the end."
        )
    descriptor = _lock(path)
    try:
        writer = ProfileWriter(path, descriptor)
        try:
            yield writer
        finally:
            if os.fstat(descriptor).st_size == 0:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # releases the lock, as does the end of the process


def _lock(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise BadFile(f"cannot write {path}: {error.strerror}.") from None
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BadFile(
                f"another process is writing {path}. Wait for it, or give another file. Several devices can measure "
                "shards of one design, each into its own file."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner has just removed the empty file
