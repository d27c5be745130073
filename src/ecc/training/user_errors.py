"""What goes wrong in the user's code, or for want of memory, told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ecc.errors import BadTask, EccError

_LONGEST = 300  # of what an exception says, in letters
_SIGNS = ("out of memory", "can't allocate memory")  # of GPUs, and of the host


class OutOfMemory(EccError):
    """Raised when a device has too little memory. What was saved before is whole."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was missing; torch has said so in several ways."""
    if isinstance(error, OutOfMemory | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def describe(error: BaseException) -> str:
    """An exception in one line; one that came from a process that loads data, as it was there."""
    lines = str(error).strip().splitlines() or ["no message"]
    if lines[0].startswith("Caught ") and len(lines) > 1:  # as DataLoader hands it on, traceback and all
        return lines[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {one_line(error).rstrip('.')}"


def one_line(error: BaseException) -> str:
    """What an exception says, its first lines in one: torch tells below the first which weights do not fit."""
    return " ".join(str(error).split())[:_LONGEST] or "no message"


@contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """Turns an exception of what the user supplied into an error that names it.

    Raises:
        BadTask: In the place of any other exception.
        OutOfMemory: If memory was missing.
    """
    try:
        yield
    except EccError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{what} ran out of memory ({describe(error)}).") from error
        raise BadTask(f"{what} raised {describe(error)}.") from error
