"""`History`: who is told the lines of a run's history; `Logger`: curves for other programs, such as TensorBoard.

The history in the run folder is the record. When a run resumes, loggers get its whole history again, cut back to the
checkpoint, so their curves never have points that the history does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ecc.errors import BadFile, EccError

_POSITION = ("phase", "step", "total", "wall")  # fields that say where a line belongs, and are not curves


class History(Protocol):
    """Receives the lines of a history. `RunDir` is one."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line: the fields of a record of `ecc.run_records`, as plain values."""


class Histories:
    """A `History` that passes lines on to several."""

    def __init__(self, *histories: History) -> None:
        self._histories = histories

    def log(self, line: Mapping[str, Any]) -> None:
        """See `History`."""
        for history in self._histories:
            history.log(line)


class Logger(Protocol):
    """Draws curves, or sends them to another program."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add points to curves.

        Args:
            values: Finite numbers by name, such as `prune/loss` or `solver/cost/energy`.
            step: Batches drawn so far, in all phases and by all processes. It never decreases, but a resumed run
                starts from its first step again.
        """

    def close(self) -> None:
        """Write what is still in memory."""


class Loggers:
    """A `History` that passes the numbers of each line on to loggers."""

    def __init__(self, *loggers: Logger) -> None:
        self._loggers = loggers
        self._step = 0

    def log(self, line: Mapping[str, Any]) -> None:
        """See `History`."""
        self._step = int(line.get("total", self._step))
        values = curve_values(line)
        for logger in self._loggers:
            logger.log(values, self._step)


def curve_values(line: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers in a line of a history, as `phase/name`, and `phase/name/key` where they are nested."""
    values = {name: value for name, value in line.items() if name not in _POSITION}
    return dict(_numbers(values, str(line.get("phase", "train"))))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, value


class TensorBoardLogger:
    """Writes curves into a folder for TensorBoard.

    Args:
        folder: For one run; curves of earlier sessions in it are replaced.

    Raises:
        BadFile: If the folder cannot be made.
        EccError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EccError(f"TensorBoard cannot be imported ({error}); pip install tensorboard.") from None
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFile(f"cannot make the folder {folder} for TensorBoard: {error.strerror}.") from None
        self._folder, self._make = str(folder), SummaryWriter
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """See `Logger`."""
        if self._writer is None:  # not earlier: a run that is refused leaves no empty file
            self._writer = self._make(self._folder, purge_step=0)  # the run logs its whole history again
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Logger`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
