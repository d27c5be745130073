"""`Profile`: the energy of many widths of one network, and the file it is kept in.

The file holds JSON lines: a header, then one line a measurement, appended and never changed. The networks of
the design are read by pandas in one line, compressed (.gz) or not:

    pandas.read_json("digits.profile", lines=True).dropna(subset="index")

`dropna` leaves out the header and the measurements of the dense reference, which have no `index`. The widths of a
sample stand in the order of `network.groups` of the header, which is the first value of the column `header`:

    pandas.read_json("digits.profile", lines=True).header[0]["network"]["groups"]
"""

from __future__ import annotations

import gzip
import io
import json
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ecc.errors import BadFile, BadMeasurement, EccError
from ecc.graph import ChannelGraph
from ecc.io import MAX_BYTES, read_bytes, write_bytes

from .drift import MAX_CV, Drift, Point, drift_of, log_drift
from .measurement import combined, relative_interval
from .profile_header import ProfileHeader
from .samples import Sample, sample_line

_T = TypeVar("_T")

DRIFT_REMEDY = (
    "Measure again on a device that nothing else uses, with longer windows (ecc profile --window 2, window_seconds=2), "
    "or accept it with ecc fit --allow-drift (allow_drift=True)."
)
"""What to do where the reference varied by more than is trusted."""


@dataclass(frozen=True, kw_only=True)
class CorrectedSample:
    """One network of a profile: drift divided out, rounds combined."""

    index: int
    """Number of the network in the design."""

    widths: tuple[int, ...]
    """Of the groups that can be cut, in the order of the header."""

    joules: float
    """Per inference of the whole batch, gross."""

    seconds: float
    """Per inference of the whole batch."""

    relative_ci: float | None
    """Half the 95 % interval of the mean over rounds; None for a single one."""


@dataclass(frozen=True, repr=False)
class Profile:
    """A header, and measurements in the order in which they were made."""

    header: ProfileHeader
    samples: tuple[Sample, ...]

    def __repr__(self) -> str:
        count = f"{len(self.design_samples)} samples, {len(self.references)} of the dense network"
        return f"<Profile of {self.header.fingerprint}: {count}, {self.label} on {self.header.meter.device}>"

    @property
    def label(self) -> str:
        """Measured, estimated or declared: belongs beside every number."""
        return self.header.label

    @cached_property
    def design_samples(self) -> tuple[Sample, ...]:
        """The measurements of the design: without the references."""
        return tuple(sample for sample in self.samples if not sample.is_reference)

    @cached_property
    def references(self) -> tuple[Sample, ...]:
        """The measurements of the dense reference."""
        return tuple(sample for sample in self.samples if sample.is_reference)

    @cached_property
    def drift(self) -> Drift | None:
        """How the joules of the dense reference varied; None if it was never measured."""
        return self.drift_of_field("joules")

    def drift_of_field(self, field: str) -> Drift | None:
        """Likewise, of `joules` or `seconds`."""
        return drift_of([Point(sample.session, getattr(sample, field), True) for sample in self.references])

    @property
    def repeat_noise(self) -> float | None:
        """Relative standard deviation of the joules of one measurement, from rounds; None with one round."""
        return self.repeat_noise_of_field("joules")

    def repeat_noise_of_field(self, field: str) -> float | None:
        """Likewise, of `joules` or `seconds`."""
        squares, freedom = 0.0, 0
        for samples in self._by_network(self._without_drift(field)).values():
            logs = [math.log(value) for _, value in samples]
            if len(logs) > 1:
                squares += statistics.variance(logs) * (len(logs) - 1)
                freedom += len(logs) - 1
        return math.sqrt(squares / freedom) if freedom else None

    @property
    def seconds_per_sample(self) -> float | None:
        """How long one measurement takes in all, building and warming up among it; None where it is not known."""
        times = [datetime.fromisoformat(sample.measured_at) if sample.measured_at else None for sample in self.samples]
        gaps = [
            (later - earlier).total_seconds()
            for (earlier, later), (first, second) in zip(pairwise(times), pairwise(self.samples), strict=True)
            if earlier is not None and later is not None and first.session == second.session
        ]
        gaps = [gap for gap in gaps if gap >= 0]  # a clock that was set back in between tells nothing
        return statistics.median(gaps) if gaps else None

    def corrected(self, *, allow_drift: bool = False, of: str = "joules") -> tuple[CorrectedSample, ...]:
        """One sample a network, in the order of the design: drift divided out, rounds combined.

        Args:
            allow_drift: Takes a profile whose reference varied by more than is trusted.
            of: `joules` or `seconds`: what has to be steady.

        Raises:
            BadMeasurement: If the reference varied by more than 3 %, unless `allow_drift`.
        """
        drift = self.drift_of_field(of)
        if drift is not None and not drift.is_steady and not allow_drift:
            raise BadMeasurement(
                f"the {of} of the dense reference varied by {drift.cv:.1%} (standard deviation) over this profile; "
                f"{MAX_CV:.0%} is the most that is trusted. {DRIFT_REMEDY}"
            )
        joules = self._by_network(self._without_drift("joules"))
        seconds = self._by_network(self._without_drift("seconds"))
        return tuple(
            CorrectedSample(
                index=number,
                widths=joules[number][0][0].widths,
                joules=combined([value for _, value in joules[number]], self.header.meter.provenance),
                seconds=combined([value for _, value in seconds[number]], self.header.meter.provenance),
                relative_ci=relative_interval([value for _, value in joules[number]]),
            )
            for number in sorted(joules)
        )

    def named(self, widths: Sequence[int]) -> dict[str, int]:
        """The widths of a sample by group name, as the graph takes them."""
        return dict(zip(self.header.groups, widths, strict=True))

    def first(self, count: int) -> Profile:
        """The profile as it was when it had that many networks."""
        ends = [end for end, sample in enumerate(self.samples, start=1) if not sample.is_reference]
        return Profile(self.header, self.samples[: ends[count - 1]] if 0 < count <= len(ends) else ())

    def _without_drift(self, name: str) -> list[float]:
        values = [float(getattr(sample, name)) for sample in self.samples]
        points = [
            Point(sample.session, value, sample.is_reference)
            for sample, value in zip(self.samples, values, strict=True)
        ]
        return [value / math.exp(drift) for value, drift in zip(values, log_drift(points), strict=True)]

    def _by_network(self, values: Sequence[float]) -> dict[int, list[tuple[Sample, float]]]:
        found: dict[int, list[tuple[Sample, float]]] = {}
        for sample, value in zip(self.samples, values, strict=True):
            if sample.index is not None:
                found.setdefault(sample.index, []).append((sample, value))
        return found

    # ------------------------------------------------------------ files

    @classmethod
    def load(cls, path: str | Path, graph: ChannelGraph | None = None) -> Profile:
        """Reads a profile. A last line that was cut off by a crash is left out.

        Args:
            path: The file, compressed if its name ends in .gz.
            graph: If given, the network that the profile must belong to.

        Raises:
            BadFile: If anything else is wrong; the message names the line.
        """
        profile = parsed(read_text(path), path)
        if graph is not None:
            expected = graph.fingerprint
            if profile.header.fingerprint != expected:
                raise BadFile(
                    f"{path} belongs to network {profile.header.fingerprint}, and this one is {expected}. "
                    "Profile this network, with this input shape, into a file of its own."
                )
        return profile

    def save(self, path: str | Path) -> None:
        """Writes the whole profile, compressed if the name ends in .gz.

        Raises:
            BadFile: If it cannot be written.
        """
        text = "".join([header_line(self.header), *map(sample_line, self.samples)])
        data = text.encode("utf-8")
        # Without a time stamp, equal profiles give equal files.
        write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


# ---------------------------------------------------------------- lines

MOST_PROFILE_BYTES = 256 << 20
"""About a million samples. They are read line by line, so that they unfold into little more."""

HEADER_START = '{"header": {"format": "ecc profile"'
"""How every profile begins."""


def header_line(header: ProfileHeader) -> str:
    """The first line. All under one key, so that pandas keeps it to one column."""
    return json.dumps({"header": header.to_dict()}) + "\n"


def read_text(path: str | Path) -> str:
    """The text of a profile, up to the last complete line.

    Raises:
        BadFile: If it cannot be read, or is no text.
    """
    try:
        data = read_bytes(path, MOST_PROFILE_BYTES)
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MOST_PROFILE_BYTES + 1)  # a thousand times as much may be in it
            if len(data) > MOST_PROFILE_BYTES:
                size = f"{MOST_PROFILE_BYTES >> 20} MiB"
                raise BadFile(f"{path} unfolds into more than {size}, so that it is no profile.")
        return data[: data.rfind(b"\n") + 1].decode("utf-8")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise BadFile(f"{path} is not a whole gzip file ({error}).") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path} is not a profile: it is not text.") from None


def parsed(text: str, path: str | Path) -> Profile:
    """The profile that a text holds.

    Args:
        text: Complete lines.
        path: For messages.

    Raises:
        BadFile: If anything is wrong; the message names the line.
    """
    lines = text.split("\n")[:-1]
    if not lines:
        raise BadFile(f"{path} holds no profile yet: its header is missing.")
    header = _checked(path, 1, lines[0], _header)
    samples: list[Sample] = []
    seen: dict[tuple[int, int], int] = {}
    for number, line in enumerate(lines[1:], start=2):
        sample = _checked(path, number, line, lambda data: Sample.from_dict(data, header.full_widths))
        if sample.index is not None:
            first = seen.setdefault((sample.index, sample.round), number)
            if first != number:
                raise BadFile(
                    f"{path}:{number}: sample {sample.index} of round {sample.round} stands in line {first} already. "
                    "Remove one of the two."
                )
        samples.append(sample)
    return Profile(header, tuple(samples))


def _header(data: dict[str, Any]) -> ProfileHeader:
    if "header" not in data:
        raise BadFile("this is not the header of a profile.")
    return ProfileHeader.from_dict(data["header"])


def _checked(path: str | Path, number: int, line: str, build: Callable[[dict[str, Any]], _T]) -> _T:
    """What a line holds, or an error that names it."""
    try:
        if len(line) > MAX_BYTES:
            raise BadFile(f"the line is longer than {MAX_BYTES >> 20} MiB.")
        data = json.loads(line, parse_constant=_refuse_constant)
        if not isinstance(data, dict):
            raise BadFile("this is not a line of a profile.")
        return build(data)
    except EccError as error:
        raise BadFile(f"{path}:{number}: {error}") from None
    except json.JSONDecodeError as error:
        if number == 1 and line.strip() == "{":  # a profile has its header in one line
            raise BadFile(f"{path} is no profile, but another JSON file; give one that `ecc profile` wrote.") from None
        raise BadFile(f"{path}:{number}: this is not JSON ({error.msg}).") from None
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadFile(f"{path}:{number}: damaged ({type(error).__name__}: {error}).") from None


def _refuse_constant(name: str) -> float:
    raise BadFile(f"{name} is not a number.")
