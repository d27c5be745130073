"""Reading files that may be hostile, and writing so that nothing on disk is lost, whatever happens meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from tempfile import NamedTemporaryFile

from ecc.errors import BadFile

MOST_BYTES = 8 << 20
"""Of a file that is read at once. Ours have a megabyte or two; the worst JSON of this size takes a second."""


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a plain file of bounded size. A pipe or a device might never end, and is refused.

    Raises:
        BadFile: If it is no such file, or cannot be read.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode) and not Path(path).is_dir():  # a folder has its own error below
            raise BadFile(f"{path} is not a plain file; give one.")
        with Path(path).open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:  # a NUL in the name
        raise BadFile(f"cannot read {str(path)!r}: {error}.") from None
    if len(data) > most:
        raise BadFile(f"{path} is larger than {most >> 20} MiB, so that it cannot be what it should be.")
    return data


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """As `read_bytes`, for text.

    Raises:
        BadFile: If the file cannot be read.
        UnicodeDecodeError: If it is no text; a ValueError, as those of `json.loads` are.
    """
    return read_bytes(path, most).decode("utf-8")


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
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise BadFile(f"cannot write {path}: {getattr(error, 'strerror', error)}.") from None


def umask() -> int:
    """The permissions that new files are made without; there is no way to read them but to set them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
