"""Writing files so that nothing on disk is lost, whatever happens while writing."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from ecc.errors import BadFile


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: an older one stays until the new one is complete on disk.

    Raises:
        BadFile: the folder is missing, may not be written, or the disk is full.
    """
    path = Path(path)
    temporary = ""
    try:
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise BadFile(f"cannot write {path}: {error.strerror}.") from None
