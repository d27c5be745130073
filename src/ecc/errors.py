"""Every error and warning that ECC raises on purpose. Each message names the value, the limit and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LONGEST = 4000
"""Characters of a message. Values from files stand in messages, and a hostile file has long ones."""


class EccError(Exception):
    """Base of all errors that ECC raises on purpose, so that one `except` catches them.

    Args:
        message: Shortened in its middle if a value in it is very long. Characters that a terminal would obey instead
            of showing them are written as escapes.
    """

    def __init__(self, message: str) -> None:
        shown = message if message.isprintable() else "".join(map(_shown, message))
        if len(shown) > LONGEST:
            shown = f"{shown[: LONGEST // 2]} ... {shown[5 - LONGEST // 2 :]}"
        super().__init__(shown)


def _shown(character: str) -> str:
    return character if character.isprintable() or character == "\n" else repr(character)[1:-1]


class EccWarning(UserWarning):
    """Category of the warnings of ECC, for a filter: `warnings.simplefilter("error", ecc.EccWarning)`."""


class UntraceableModel(EccError):
    """Raised when the channels of a model cannot be followed, before anything is measured or removed."""


class BadTask(EccError):
    """Raised when a task is unknown, cannot be built, or lacks what the called function needs."""


class BadFile(EccError):
    """Raised when a file that ECC wrote is missing, damaged, or belongs to another network or setting."""


class BadWidths(EccError):
    """Raised when channel counts do not fit the network: wrong group, below one, or above full width."""


class NoMeter(EccError):
    """Raised when no energy meter can be opened: wrong spec, missing device, library or permission.

    The message lists each thing that was tried, exactly why it failed, and the ways forward.

    Args:
        message: Why, and what to do.
        remedy: The command that would make this very meter work, where there is one; `ecc doctor` shows it.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class BadMeasurement(EccError):
    """Raised when a measurement must not be trusted, instead of averaging the fault away.

    Among them: a counter that stands still, jumps, goes back or disagrees with the power reading; a device
    that throttles or that another process shares; a window of too few counter ticks; an all-zero input.
    """


class InfeasibleBudget(EccError):
    """Raised when no allowed widths meet a budget, before any training step is spent on it."""


class BadBudget(EccError):
    """Raised when a budget cannot be read: no number, another unit, not above 0."""


class CannotExport(EccError):
    """Raised when a network cannot be written in a format, or what was written computes something else."""


def first_line(error: BaseException) -> str:
    """Type and first line of the message of an exception, such as `ValueError: no such axis`."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


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
    """A setting as the user writes it: `--allow-drift` on the command line, `allow_drift=True` in Python.

    Args:
        name: Name of the Python argument.
        value: Suggested value; None names the setting only.
        cli: Name of the option of the command line, if it differs.
    """
    if not _on_command_line.get():
        return name if value is None else f"{name}={value!r}"
    flag = f"--{(cli or name).replace('_', '-')}"
    return flag if value is None or value is True else f"{flag} {value}"
