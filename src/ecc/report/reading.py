"""Reading files that may be damaged: whatever is wrong is said in one line that names the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ecc.errors import BadFile
from ecc.io import read_bytes

_LARGEST = 1e100
_REPLACED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is found wrong in here is wrong with this file.

    Raises:
        BadFile: Which names it.
    """
    try:
        yield
    except _REPLACED as error:
        said = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise BadFile(f"{path} is damaged ({said}); restore it from a copy or run again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one object.

    Raises:
        BadFile: If it does not.
    """
    try:
        found = parsed(read_bytes(path))
    except (ValueError, RecursionError):
        raise BadFile(f"{path} is damaged: it is no JSON; restore it from a copy or run again.") from None
    if not isinstance(found, dict):
        raise BadFile(f"{path} is damaged: it holds no object; restore it from a copy or run again.")
    return found


def parsed_line(line: bytes, path: Path, count: int) -> dict[str, Any]:
    """The facts in a line of a history.

    Args:
        line: Whole.
        path: Of the file.
        count: Of the line, from 1.

    Raises:
        BadFile: If it is damaged.
    """
    try:
        facts = parsed(line)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise BadFile(f"{path}:{count}: the line is damaged; restore the file from a copy or run again.")
    return facts


def number(value: Any) -> float:
    """A number that can be computed with.

    Raises:
        ValueError: If it is none, or so large that it is none in this world.
    """
    found = float(value)
    if isinstance(value, str | bool) or not abs(found) < _LARGEST:
        raise ValueError(f"{value!r:.40} is no number")
    return found


def positive(value: Any) -> float:
    """As `number`, and above 0: what others are divided by."""
    found = number(value)
    if found < 1 / _LARGEST:
        raise ValueError(f"{value!r:.40} is not above 0, or hardly")
    return found


def parsed(data: bytes) -> Any:
    """JSON; NaN and what is infinite are no numbers in it, and become None."""
    return json.loads(data, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    found = float(text)
    return found if math.isfinite(found) else None
