"""Curves for other programs: `Logger`, what such a program has to be, and TensorBoard's.

A run's history is the record, and loggers are told the numbers in it. When a run is taken up again they are told the
whole history anew, which was cut back to the checkpoint: so a logger never has points that the history has not, and
one that is asked for late has those of before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ecc.errors import BadFile, EccError

from .jsonl import plain

_WHEN = ("phase", "step", "total", "wall")  # what a line says of itself


class Logger(Protocol):
    """Draws curves, or sends them to where they are drawn."""

    def log(self, facts: Mapping[str, Any], step: int) -> None:
        """Takes points.

        Args:
            facts: Finite numbers by name, such as `solve/loss` or `solver/spent/energy`.
            step: Batches drawn so far, in all phases and by all processes; it never falls within a session. A session
                begins at the beginning again, with the points that it takes over.
        """

    def close(self) -> None:
        """Writes what is still in memory."""


class Loggers:
    """A `History` that tells loggers the numbers of each line."""

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = loggers
        self._step = 0

    def log(self, facts: Mapping[str, Any]) -> None:
        """See `History`."""
        self._step = int(facts.get("total", self._step))
        numbers = numbers_of(facts)
        for logger in self._loggers:
            logger.log(numbers, self._step)


def numbers_of(facts: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in a line of a history, as `phase/name`, and `phase/name/key` where they are nested."""
    told = plain({name: value for name, value in facts.items() if name not in _WHEN}, "facts")
    return dict(_numbers(told, str(facts.get("phase", "train"))))


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{place}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield place, value


class TensorBoardLogger:
    """Writes curves into a folder that TensorBoard shows.

    Args:
        folder: For one run alone: what an earlier session has written there is no longer shown.

    Raises:
        BadFile: If the folder cannot be made.
        EccError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EccError(
                f"curves for TensorBoard need its package, which cannot be imported ({error}); pip install tensorboard."
            ) from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFile(f"cannot make the folder {folder} for TensorBoard: {error.strerror}.") from None
        self._folder, self._make = str(folder), SummaryWriter
        self._writer: Any = None

    def log(self, facts: Mapping[str, Any], step: int) -> None:
        """See `Logger`."""
        if self._writer is None:  # not before: a run that is refused leaves no empty file
            # From step 0 on, all that was there is purged: the run tells its history anew.
            self._writer = self._make(self._folder, purge_step=0)
        for name, value in facts.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Logger`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
