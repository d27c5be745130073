"""`Sample`: one measurement of a profile, and what is checked when it is read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from ecc.errors import BadFile

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement, as read; None where a source does not tell."""

    index: int | None
    """Number of the network in the design; None for the dense reference."""

    round: int = 0
    """Which of the repeats, far apart in time."""

    session: int = 0
    """Rows of one session were measured without a break."""

    widths: tuple[int, ...]
    """Of the groups that can be cut, in the order of the header."""

    joules: float
    """Per inference of the whole batch, gross."""

    seconds: float
    """Per inference of the whole batch."""

    relative_ci: float | None = None
    """Half the 95 % interval of the mean over the windows; None for a single window."""

    edge_error: float | None = None
    """Relative standard error from how closely the window's ticks were seen."""

    ticks: int | None = None
    """Counter ticks in the shortest window."""

    temperature_celsius: float | None = None
    clock_mhz: float | None = None
    power_capped: bool | None = None
    """Whether the device ran at its power limit."""

    host_bound_share: float | None = None
    """Near 1 where launches, not the device, set the pace."""

    measured_at: str | None = None
    """UTC."""

    @property
    def is_reference(self) -> bool:
        """Whether this is the dense network, measured again to see drift."""
        return self.index is None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is not known is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {"index": self.index, "reference": self.is_reference, **known}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], full_widths: Sequence[int]) -> Sample:
        """The reverse of `to_dict`.

        Raises:
            BadFile: If a value is missing, of the wrong type or out of its range.
        """
        data = {"index": data.get("row"), **data}  # files of 0.1
        number = None if data.get("index") is None else _whole(data, "index")
        if data.get("reference") is not (number is None):
            raise BadFile(f"reference is {data.get('reference')!r}, although index is {number}.")
        known = {name for name, value in data.items() if value is not None}
        return cls(
            index=number,
            round=_whole(data, "round"),
            session=_whole(data, "session"),
            widths=_widths(data.get("widths"), full_widths),
            joules=_real(data, "joules", above=0),
            seconds=_real(data, "seconds", above=0),
            ticks=_whole(data, "ticks", least=1) if "ticks" in known else None,
            temperature_celsius=_real(data, "temperature_celsius") if "temperature_celsius" in known else None,
            power_capped=_of_type(data, "power_capped", bool) if "power_capped" in known else None,
            measured_at=_moment(data, "measured_at") if "measured_at" in known else None,
            **{name: _real(data, name, least=0) for name in _NOT_NEGATIVE if name in known},
        )


def sample_line(sample: Sample) -> str:
    """The line of one measurement."""
    return json.dumps(sample.to_dict()) + "\n"


# ---------------------------------------------------------------- checks

_NOT_NEGATIVE = ("relative_ci", "edge_error", "clock_mhz", "host_bound_share")


def _whole(data: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadFile(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    return value


def _real(data: Mapping[str, Any], name: str, *, above: float = -math.inf, least: float = -math.inf) -> float:
    value = data.get(name)
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (above < number < math.inf and number >= least):
        limit = f" above {above:g}" if math.isfinite(above) else ""
        limit += f" of at least {least:g}" if math.isfinite(least) else ""
        raise BadFile(f"{name} is {value!r}; it must be a number{limit}.")
    return number


def _of_type(data: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    value = data.get(name)
    if not isinstance(value, kind):
        raise BadFile(f"{name} is {value!r}; it must be a {kind.__name__}.")
    return value


def _moment(data: Mapping[str, Any], name: str) -> str:
    value = _of_type(data, name, str)
    try:
        known = datetime.fromisoformat(value).tzinfo is not None  # or it could not be compared with the others
    except ValueError:
        known = False
    if not known:
        raise BadFile(f"{name} is {value!r}; it must be a time such as 2026-01-01T00:00:00.000+00:00.")
    return value


def _widths(value: object, full_widths: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) != len(full_widths):
        raise BadFile(f"widths is {value!r}; it must be a list of {len(full_widths)} whole numbers.")
    for width, full in zip(value, full_widths, strict=True):
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= full:
            raise BadFile(f"widths holds {width!r}; it must be a whole number in 1..{full}.")
    return tuple(value)
