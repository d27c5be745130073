"""A profile that is being written: locked, appended to, on the disk after every sample.

A process that dies at any moment loses the sample in flight and nothing else: a line that was cut off is dropped
when the file is opened again, and its sample is measured anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ecc.errors import BadFile
from ecc.io import read_bytes

from .profile import HEADER_START, MOST_PROFILE_BYTES, Profile, header_line, parsed
from .profile_header import ProfileHeader
from .samples import Sample, sample_line

try:
    import fcntl
except ImportError:  # Windows: two processes on one file are not noticed there
    fcntl = None  # type: ignore[assignment]


class ProfileFile:
    """What the file holds, and a way to add to it. Made by `open_profile`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.header: ProfileHeader | None = None
        """None as long as the file is empty."""
        self.samples: list[Sample] = []
        self._descriptor = descriptor
        self._is_empty = True
        self._read()

    def profile(self) -> Profile:
        """All that was read and appended."""
        assert self.header is not None, "a file has a header before it has a profile"
        return Profile(self.header, tuple(self.samples))

    def start(self, header: ProfileHeader) -> None:
        """Gives a new file its header. It is written with the first sample, so that a false start leaves nothing."""
        assert self.header is None, "a file has one header"
        self.header = header

    def append(self, sample: Sample) -> None:
        """Adds a sample; it is on the disk when this returns.

        Raises:
            BadFile: If it cannot be written, as on a full disk.
        """
        assert self.header is not None, "a header comes before samples"
        if self._is_empty:
            self._write(header_line(self.header))
            self._is_empty = False
        self._write(sample_line(sample))
        self.samples.append(sample)

    def _read(self) -> None:
        data = read_bytes(self.path, MOST_PROFILE_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        start = HEADER_START.encode("utf-8")
        if data[: len(start)] != start[: len(data)]:
            raise BadFile(f"{self.path} is not a profile, and is left as it is. Give another file.")
        if whole:
            there = parsed(whole.decode("utf-8", errors="replace"), self.path)
            self.header, self.samples, self._is_empty = there.header, list(there.samples), False
        if len(whole) < len(data):
            os.ftruncate(self._descriptor, len(whole))

    def _write(self, text: str) -> None:
        data = text.encode("utf-8")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError as error:
            raise BadFile(f"cannot write {self.path}: {error.strerror}. What it holds so far is safe.") from error


@contextmanager
def open_profile(path: str | Path) -> Iterator[ProfileFile]:
    """Opens a profile to append to it, and keeps other processes out meanwhile.

    Raises:
        BadFile: If another process writes to it, or it is not a profile, or cannot be written.
    """
    path = Path(path)
    if path.suffix == ".gz":
        raise BadFile(
            f"{path} is compressed, and samples cannot be appended to it. Leave out .gz, and compress it when done."
        )
    descriptor = _locked(path)
    try:
        file = ProfileFile(path, descriptor)
        try:
            yield file
        finally:
            if os.fstat(descriptor).st_size == 0:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # this gives the lock back, as does the death of the process


def _locked(path: Path) -> int:
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
                f"{path} is being written by another process. Wait for it, or give another file; several "
                "devices share a design by shards, each into a file of its own."
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed it just now, being empty
