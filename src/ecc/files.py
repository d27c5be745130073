"""Writing files so that nothing on disk is lost, whatever happens while writing."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from ecc.errors import BadFile


def write_text(path: str | Path, text: str) -> None:
    """Write a text file whole or not at all: an older one stays until the new one is complete on disk.

    Raises:
        BadFile: the folder is missing, may not be written, or the disk is full.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> None:
    """As `write_text`, for bytes."""
    path = Path(path)
    temporary = ""
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
            temporary = file.name
            os.fchmod(file.fileno(), 0o666 & ~umask())  # as any other new file; temporary ones are private
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise BadFile(f"cannot write {path}: {error.strerror}.") from None


def umask() -> int:
    """The permissions that new files are made without; there is no way to read them but to set them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
