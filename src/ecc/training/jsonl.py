"""Facts about a run as plain values: lines of JSON, and the first field in which two of them differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ecc.errors import BadFile, EccError
from ecc.io import read_lines

ABSENT = "(absent)"


def plain(value: Any, place: str = "config") -> Any:
    """The same facts as JSON would give them back: tuples as lists, tensors of one number as numbers.

    What is no number is none in JSON: NaN and the infinities become None.

    Raises:
        EccError: If there is something else.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach().item()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise EccError(f"{place} has keys that are no strings, which JSON cannot hold; name its fields by strings.")
        return {key: plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    raise EccError(f"{place} is a {type(value).__name__}, which JSON cannot hold; give plain values.")


def json_line(facts: Mapping[str, Any]) -> bytes:
    """One line of a history."""
    return (json.dumps(plain(facts, "facts"), allow_nan=False) + "\n").encode("utf-8")


def parsed_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The facts of every whole line, each with the place where the line ends; one at a time, as a week has many.

    A last line without its end was torn when a process died, and is left out.

    Raises:
        BadFile: If another line is damaged.
    """
    end = 0
    for number, line in enumerate(read_lines(path), start=1):
        end += len(line)
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict):
            raise BadFile(f"{path}:{number}: the line is damaged; restore the file from a copy or start anew.")
        yield facts, end


def first_difference(then: Any, now: Any, place: str = "") -> tuple[str, str, str] | None:
    """The first field in which two configs differ, with both values; None if there is none."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            below = f"{place}.{key}" if place else str(key)
            if key not in then or key not in now:
                return below, _shown(then.get(key, ABSENT)), _shown(now.get(key, ABSENT))
            found = first_difference(then[key], now[key], below)
            if found:
                return found
        return None
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (old, new) in enumerate(zip(then, now, strict=True)):
            found = first_difference(old, new, f"{place}[{index}]")
            if found:
                return found
        return None
    same = then == now and isinstance(then, bool) == isinstance(now, bool)
    return None if same else (place or "config", _shown(then), _shown(now))


def _shown(value: Any) -> str:
    return value if value is ABSENT else json.dumps(value)
