"""Errors and warnings of ECC. Each message says what happened, the value and the limit, and what to do.

This module imports nothing of ECC, so that every package can use it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


class EccError(Exception):
    """Base class of all errors that ECC raises on purpose.

    Args:
        message: Control characters in it are escaped, so that text from a file cannot control the terminal.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if message.isprintable() else "".join(map(_escape, message)))


def _escape(character: str) -> str:
    return character if character.isprintable() or character == "\n" else repr(character)[1:-1]


class EccWarning(UserWarning):
    """Category of the warnings of ECC, for a filter: `warnings.simplefilter("error", ecc.EccWarning)`."""


class UntraceableModel(EccError):
    """Raised when the channels of a model cannot be traced. Nothing was measured or removed."""


class BadTask(EccError):
    """Raised when a task is unknown, cannot be built, lacks what the called function needs, or when its code fails."""


class BadFile(EccError):
    """Raised when a file is missing, damaged, cannot be written, or belongs to another network or setting."""


class BadWidths(EccError):
    """Raised when channel counts do not fit the network: unknown group, below the minimum, or above full width."""


class NoMeter(EccError):
    """Raised when no energy meter can be opened: wrong name, missing device, library or permission.

    Args:
        message: Why, and what to do.
        remedy: The command that would make this meter work, if there is one; `ecc doctor` shows it.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class BadMeasurement(EccError):
    """Raised when a measurement cannot be trusted.

    Examples: a counter that stands still, jumps, decreases or disagrees with the power reading; a device that
    throttles or that another process uses; a window of too few counter ticks; an all-zero input.
    """


class InfeasibleBudget(EccError):
    """Raised when no allowed widths meet a budget, before any training step."""


class BadBudget(EccError):
    """Raised when a budget cannot be parsed: no number, unknown unit, not above 0, or above 100 %."""


class CannotExport(EccError):
    """Raised when a network cannot be written in a format, or the exported file computes something else."""


class OutOfMemory(EccError):
    """Raised when a device has too little memory. Files that were written before are complete."""


def first_line(error: BaseException) -> str:
    """Type and first line of the message of an exception, such as `ValueError: no such axis`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of an exception with its lines joined."""
    return " ".join(str(error).split())[:limit] or "no message"


def describe_error(error: BaseException) -> str:
    """Type and whole message of an exception in one line: torch puts details below the first line."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("Caught "):  # DataLoader wraps the traceback of a worker process
        return lines[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {one_line(error).rstrip('.')}"


def closest(word: str, known: Iterable[str]) -> str:
    """The known word that is closest to a misspelt one; empty if none is close."""
    return next(iter(difflib.get_close_matches(word.lower(), list(known), n=1)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'digits'?)` with the closest known word; empty if none is close."""
    close = closest(word, known)
    return f" (did you mean {close!r}?)" if close else ""


def import_optional(module: str, what: str, *, package: str = "", install: str = "") -> Any:
    """Import a module of an optional package.

    Args:
        module: Its name.
        what: What needs it, for the message.
        package: Name of the package for readers, if it is not that of the module.
        install: Argument of `pip install`, if it is not the package.

    Raises:
        BadTask: If it cannot be imported.
    """
    package = package or module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadTask(
            f"{what} needs {package}, which cannot be imported ({one_line(error)}); pip install "
            f"{install or package.lower()}."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the host or on a GPU."""
    if isinstance(error, OutOfMemory | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in message or "can't allocate memory" in message)


@contextmanager
def wrap_user_errors(what: str) -> Iterator[None]:
    """Replace exceptions of the user's code by an error that names the code.

    Args:
        what: The code that runs in the block, such as "evaluate of task 'digits'".

    Raises:
        BadTask: In place of any exception that is not an `EccError`.
        OutOfMemory: If memory ran out.
    """
    try:
        yield
    except EccError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{what} ran out of memory ({describe_error(error)}).") from error
        raise BadTask(f"{what} raised {describe_error(error)}.") from error


_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)


@contextmanager
def option_names() -> Iterator[None]:
    """A block in which `option_hint` gives options of the command line instead of Python arguments."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def option_hint(name: str, value: object = None, *, cli: str | None = None) -> str:
    """A setting as the user writes it: `--allow-drift` on the command line, `allow_drift=True` in Python."""
    if not _on_command_line.get():
        return name if value is None else f"{name}={value!r}"
    flag = f"--{(cli or name).replace('_', '-')}"
    return flag if value is None or value is True else f"{flag} {value}"
