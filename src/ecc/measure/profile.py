"""`Profile`: measured energy of many width configurations of one network, and its file.

The file has one JSON record per line: a header, then one sample per line, appended and never changed. It may be
compressed (.gz). pandas reads it in one line:

    pandas.read_json("digits.profile", lines=True).dropna(subset="index")

`dropna` removes the header and the measurements of the dense reference, which have no `index`. The widths of a sample
are in the order of `groups` of the header:

    pandas.read_json("digits.profile", lines=True).header[0]["groups"]

Joules and seconds are gross values of one inference of the whole batch.
"""

from __future__ import annotations

import gzip
import io
import math
import operator
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from ecc.errors import BadFile, BadMeasurement, option_hint
from ecc.graph import ChannelGraph, StructureSpec
from ecc.io import MAX_BYTES, read_bytes, write_bytes
from ecc.records import from_json, to_builtins, to_json
from ecc.settings import Design, MeasureSettings, Shard
from ecc.task import Inputs, batch_size_of
from ecc.torch_utils import input_shapes

from .counter import CounterProbe
from .drift import MAX_CV, Drift, Point, log_drift, reference_drift
from .measurement import relative_interval
from .meter import MeterInfo
from .runner_search import RunnerSearch

VERSION = 4
HEADER_START = b'{"header":{"format":"ecc profile"'
"""First bytes of every profile."""

MAX_PROFILE_BYTES = 256 << 20
"""Size limit of a profile, about a million samples."""

MAX_DEVICE_DIFFERENCE = 0.02
"""Largest relative difference of the reference between devices whose profiles are merged."""

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

# --- header ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MergedPart:
    """One of the profiles that were merged."""

    shard: Shard | None
    device_id: str
    created: str | None
    reference_joules: float
    """Median energy of the dense reference on this device."""
    rescaled_by: float | None
    """Factor by which its joules were multiplied; None if they were not."""


@dataclass(frozen=True, kw_only=True)
class ProfileHeader:
    """Network, input, device, meter, settings, design and software of a profile: what its numbers mean.

    A profile contains one network, on one device, run in one way. Samples are only appended under an equal header.

    Raises:
        ValueError: If the groups do not fit the structure.
    """

    format: Literal["ecc profile"] = "ecc profile"
    version: Literal[4] = 4
    created: str | None = None
    """UTC time; None for computed profiles, so that equal ones are equal files."""
    groups: tuple[str, ...]
    """Groups whose widths vary, in the order of the widths of each sample."""
    full_widths: tuple[int, ...]
    """Full widths of those groups."""
    input_shapes: dict[str, tuple[int, ...]]
    """Shapes of the inputs by argument name or position."""
    batch: Annotated[int, Meta(ge=1)]
    """Items in one inference."""
    meter: MeterInfo
    device_type: str | None = None
    """torch device type on which the networks ran; None if nothing was run."""
    settings: MeasureSettings | None = None
    """How the networks were run and measured; None if nothing was run. Its runner is resolved."""
    runner_reason: str | None = None
    """Why this runner was used."""
    runner_search: RunnerSearch | None = None
    """What `--runner auto` measured before it chose."""
    design: Design
    counter: CounterProbe | None = None
    """Properties of the meter's counter."""
    environment: dict[str, str]
    """Versions of the software."""
    merged_from: tuple[MergedPart, ...] = ()
    """Parts of a merged profile."""
    structure: StructureSpec
    """The network as far as costs depend on it, so that a profile can be fitted by itself."""

    def __post_init__(self) -> None:
        full = dict(zip(self.structure.groups, self.structure.full_widths, strict=True))
        if [full.get(name) for name in self.groups] != list(self.full_widths):
            raise ValueError("groups and full widths do not fit the structure")
        if not all(name.isprintable() for name in self.structure.groups):
            raise ValueError("the name of a group contains control characters")

    @classmethod
    def of(cls, graph: ChannelGraph, example_input: Inputs, **fields: Any) -> ProfileHeader:
        """The header for a graph and an example input; other fields as keyword arguments."""
        if fields.get("runner_search") is not None:
            fields["runner_reason"] = "the cheapest of those that were compared"
        return cls(
            structure=graph.structure,
            groups=tuple(group.name for group in graph.variable),
            full_widths=tuple(group.width for group in graph.variable),
            input_shapes=input_shapes(example_input),
            batch=batch_size_of(example_input),
            **fields,
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the channel graph."""
        return self.structure.fingerprint

    @property
    def label(self) -> str:
        """Label of the provenance, shown next to every number."""
        return self.meter.label


_MAY_DIFFER = {
    "created",
    "counter",
    "design.samples",
    "design.rounds",
    "design.depth",
    "environment.ecc",
    "environment.python",
    "meter.notes",
    "runner_reason",
    "runner_search",
}
"""Fields that do not change the measured energy, and the size of the design, which may grow."""


def header_conflict(
    old: ProfileHeader, new: ProfileHeader, *, ignore: frozenset[str] = frozenset()
) -> tuple[str, Any, Any] | None:
    """The first field in which two headers contradict each other, with both values; None if they agree.

    Fields in `ignore` may differ as well, such as `design.shard`.
    """
    mine, other = dict(_flatten(to_builtins(old))), dict(_flatten(to_builtins(new)))
    computed = old.device_type is None and new.device_type is None
    # Inputs first: another batch also changes the shapes, and other shapes the fingerprint.
    first = [name for name in ("batch", *other) if name == "batch" or name.startswith("input_shapes.")]
    for name in dict.fromkeys((*first, *mine, *other)):
        if name in _MAY_DIFFER or name.partition(".")[0] in _MAY_DIFFER or name in ignore:
            continue
        if computed and name.startswith("environment."):
            continue  # computed numbers do not depend on the software
        if mine.get(name) != other.get(name):
            return name, mine.get(name), other.get(name)
    return None


def _flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name == "structure":
            yield "fingerprint", value["fingerprint"]
            yield "removable branches", ", ".join(branch["name"] for branch in value["branches"])
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- samples -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement of one width configuration; fields are None where the source does not provide them."""

    index: Count | None = None
    """Index in the design; None for the dense reference."""
    round: Count = 0
    """Repeat number. Rounds are far apart in time."""
    session: Count = 0
    """Samples of one session were measured without a break."""
    widths: tuple[Annotated[int, Meta(ge=0)], ...]
    """Widths of the groups, in the order of the header. All groups of a removed branch have width 0."""
    joules: Positive
    """Gross energy of one inference of the whole batch."""
    seconds: Positive
    """Time of one inference of the whole batch."""
    relative_ci: NotNegative | None = None
    """Half width of the 95 % CI over the windows; None for a single window."""
    edge_error: NotNegative | None = None
    """Relative standard error from the edges of the window."""
    ticks: Annotated[int, Meta(ge=1)] | None = None
    """Counter ticks in the shortest window."""
    temperature_celsius: float | None = None
    clock_mhz: NotNegative | None = None
    power_capped: bool | None = None
    """Whether the device ran at its power limit."""
    throttled: bool | None = None
    """Whether the device throttled, which is only accepted with `allow_throttling`."""
    host_bound_share: NotNegative | None = None
    """Near 1 if kernel launches limit the speed."""
    measured_at: Annotated[datetime, Meta(tz=True)] | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is a measurement of the dense reference."""
        return self.index is None


@dataclass(frozen=True, kw_only=True)
class CorrectedSample:
    """One width configuration with drift divided out and rounds combined."""

    index: int
    """Index in the design."""
    widths: tuple[int, ...]
    """Widths of the groups, in the order of the header."""
    joules: float
    """Gross energy of one inference of the whole batch."""
    seconds: float
    """Time of one inference of the whole batch."""
    relative_ci: float | None
    """Half width of the 95 % CI of the mean over rounds; None for a single round."""


def header_line(header: ProfileHeader) -> bytes:
    """The first line of a file. The header is nested, so that it is one column in pandas."""
    return b'{"header":' + to_json(header) + b"}\n"


def sample_line(sample: Sample) -> bytes:
    """The line of a sample, without the fields that are None."""
    return to_json({name: value for name, value in vars(sample).items() if value is not None}) + b"\n"


# --- profile -----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Profile:
    """A header, and samples in the order in which they were measured."""

    header: ProfileHeader
    samples: tuple[Sample, ...]
    """All measurements, including those of the dense reference."""

    def __repr__(self) -> str:
        count = f"{len(self.design_samples)} samples, {len(self.references)} of the dense network"
        return f"<Profile of {self.header.fingerprint}: {count}, {self.label} on {self.header.meter.device}>"

    @property
    def label(self) -> str:
        """Label of the provenance, shown next to every number."""
        return self.header.label

    @cached_property
    def design_samples(self) -> tuple[Sample, ...]:
        """Samples of the design, without the references."""
        return tuple(sample for sample in self.samples if not sample.is_reference)

    @cached_property
    def references(self) -> tuple[Sample, ...]:
        """Measurements of the dense reference."""
        return tuple(sample for sample in self.samples if sample.is_reference)

    @cached_property
    def drift(self) -> Drift | None:
        """Variation of the energy of the dense reference; None if it was never measured."""
        return self.drift_of_field("joules")

    def drift_of_field(self, field: str) -> Drift | None:
        """Variation of `joules` or `seconds` of the dense reference."""
        return reference_drift([Point(sample.session, getattr(sample, field), True) for sample in self.references])

    @property
    def repeat_noise(self) -> float | None:
        """Relative standard deviation of the energy of one measurement, from rounds; None with one round."""
        return self.repeat_noise_of_field("joules")

    def repeat_noise_of_field(self, field: str) -> float | None:
        """Relative standard deviation of `joules` or `seconds` of one measurement."""
        squares, freedom = 0.0, 0
        for values in self._without_drift(field).values():
            if len(values) > 1:
                squares += statistics.variance(map(math.log, values)) * (len(values) - 1)
                freedom += len(values) - 1
        return math.sqrt(squares / freedom) if freedom else None

    @property
    def seconds_per_sample(self) -> float | None:
        """Median total time per measurement, including building and warm-up; None if unknown."""
        gaps = [
            (later.measured_at - earlier.measured_at).total_seconds()
            for earlier, later in pairwise(self.samples)
            if earlier.measured_at and later.measured_at and earlier.session == later.session
        ]
        gaps = [gap for gap in gaps if gap >= 0]  # negative if the clock was set back
        return statistics.median(gaps) if gaps else None

    def corrected(self, *, allow_drift: bool = False, of: str = "joules") -> tuple[CorrectedSample, ...]:
        """Samples in the order of the design, with drift divided out and the median of rounds.

        Args:
            allow_drift: Accept a profile whose reference varied by more than `MAX_CV`.
            of: Field whose variation is checked.

        Raises:
            BadMeasurement: If the reference varied by more than 3 %, unless `allow_drift`.
        """
        drift = self.drift_of_field(of)
        if drift is not None and not drift.is_steady and not allow_drift:
            raise BadMeasurement(
                f"the {of} of the dense reference varied by {drift.cv:.1%} (std) during this profile; at most "
                f"{MAX_CV:.0%} is accepted. {drift_remedy()}"
            )
        joules, seconds = self._without_drift("joules"), self._without_drift("seconds")
        widths = {sample.index: sample.widths for sample in reversed(self.design_samples)}
        return tuple(
            CorrectedSample(
                index=index,
                widths=widths[index],
                joules=statistics.median(joules[index]),
                seconds=statistics.median(seconds[index]),
                relative_ci=relative_interval(joules[index]),
            )
            for index in sorted(joules)
        )

    def widths_by_group(self, widths: Sequence[int]) -> dict[str, int]:
        """Widths of a sample by group name, as the graph takes them."""
        return dict(zip(self.header.groups, widths, strict=True))

    def head(self, count: int) -> Profile:
        """The profile up to its first `count` design samples."""
        ends = [end for end, sample in enumerate(self.samples, start=1) if not sample.is_reference]
        return Profile(self.header, self.samples[: ends[count - 1]] if 0 < count <= len(ends) else ())

    def missing_samples(self) -> list[int]:
        """Indices of the design that the profile does not contain, such as those of a shard that was not merged."""
        known = {sample.index for sample in self.design_samples}
        return [index for index in range(self.header.design.samples) if index not in known]

    def _without_drift(self, field: str) -> dict[int, list[float]]:
        """Values of each design index, divided by the drift of the device."""
        points = [Point(sample.session, getattr(sample, field), sample.is_reference) for sample in self.samples]
        found: dict[int, list[float]] = {}
        for sample, point, drift in zip(self.samples, points, log_drift(points), strict=True):
            if sample.index is not None:
                found.setdefault(sample.index, []).append(point.value / math.exp(drift))
        return found

    # --- files ---------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, graph: ChannelGraph | None = None) -> Profile:
        """Read a profile. An incomplete last line, as after a crash, is ignored.

        Args:
            path: The file, compressed if its name ends in .gz.
            graph: If given, the network that the profile must belong to.

        Raises:
            BadFile: If the file is not a valid profile, or belongs to another network.
        """
        profile = parse_profile(_read(path), path)
        if graph is not None and profile.header.fingerprint != graph.fingerprint:
            raise BadFile(
                f"{path} belongs to network {profile.header.fingerprint}, and this network is {graph.fingerprint}. "
                "Profile this network, with this input shape, into another file."
            )
        return profile

    def save(self, path: str | Path) -> None:
        """Write the whole profile, compressed if the name ends in .gz.

        Raises:
            BadFile: If it cannot be written.
        """
        data = b"".join([header_line(self.header), *map(sample_line, self.samples)])
        # Without a time stamp, equal profiles give equal files.
        write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def drift_remedy() -> str:
    """What to do if the reference varied too much."""
    window = option_hint("window_seconds", 2, cli="window")
    return (
        f"Measure again on a device that nothing else uses, with longer windows ({window}), or accept the profile in "
        f"the fit with {option_hint('allow_drift', True)}."
    )


@dataclass(frozen=True)
class _HeaderLine:
    header: ProfileHeader


def parse_profile(data: bytes, path: str | Path) -> Profile:
    """Parse the complete lines of a file."""
    lines = data.split(b"\n")[:-1]
    if not lines:
        raise BadFile(f"{path} is empty: it has no header of a profile.")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_BYTES:
            raise BadFile(f"{path}:{number}: the line is longer than {MAX_BYTES >> 20} MiB.")
    try:
        found = from_json(lines[0], dict[str, dict[str, Any]], path).get("header", {})
    except BadFile:
        found = {}
    if found.get("format") != "ecc profile":
        raise BadFile(f"{path} is not a profile; give a file that `ecc profile` wrote.")
    if found.get("version") == 3:
        lines[0] = to_json({"header": _upgrade(found)})
    elif found.get("version") != VERSION:
        raise BadFile(f"{path} has version {found.get('version')}; this version of ecc reads version {VERSION}.")
    header = from_json(lines[0], _HeaderLine, f"{path}:1").header
    names = [f"{path}:{number}" for number in range(2, len(lines) + 1)]
    samples = tuple(from_json(line, Sample, name) for name, line in zip(names, lines[1:], strict=True))
    check_samples(header, samples, names)
    return Profile(header, samples)


def check_samples(header: ProfileHeader, samples: Sequence[Sample], names: Sequence[str]) -> None:
    """Refuse samples without a cost or with impossible widths, and a sample that occurs twice.

    The samples come from a file or were made in Python; the names say where, for messages.
    """
    inside = {name for branch in header.structure.branches for name in branch.groups}
    least, full = [0 if name in inside else 1 for name in header.groups], header.full_widths
    seen: dict[tuple[int, int], str] = {}
    for sample, name in zip(samples, names, strict=True):
        if not (0 < sample.joules < math.inf and 0 < sample.seconds < math.inf):
            cost = f"{sample.joules} joules and {sample.seconds} seconds"
            raise BadFile(f"{name}: {cost}; both must be above 0. Remove the sample.")
        if (
            len(sample.widths) != len(full)
            or not all(map(operator.le, least, sample.widths))
            or not all(map(operator.le, sample.widths, full))
        ):
            raise BadFile(f"{name}: widths {list(sample.widths)} do not fit the full widths {list(full)}.")
        if sample.index is not None and seen.setdefault((sample.index, sample.round), name) != name:
            first = seen[sample.index, sample.round]
            raise BadFile(
                f"{name}: sample {sample.index} of round {sample.round} is already in {first}. Remove one of the two."
            )


def _upgrade(header: dict[str, Any]) -> dict[str, Any]:
    """The header of a profile of version 3, which had an execution mode and a memory format in place of a runner."""
    settings, reason = header.get("settings"), header.get("mode_reason")
    if isinstance(settings, dict):
        runner = "cuda-graph" if settings.get("mode") == "graph" else settings.get("mode")
        settings = {**settings, "runner": runner, "channels_last": settings.get("memory_format") == "channels_last"}
    return {**header, "version": VERSION, "settings": settings, "runner_reason": reason}


def _read(path: str | Path) -> bytes:
    """The complete lines of a file, decompressed."""
    data = read_bytes(path, MAX_PROFILE_BYTES)
    if Path(path).suffix == ".gz":
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(MAX_PROFILE_BYTES + 1)  # a small file may unpack to a thousand times its size
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise BadFile(f"{path} is not a complete gzip file ({error}).") from None
        if len(data) > MAX_PROFILE_BYTES:
            raise BadFile(f"{path} unpacks to more than {MAX_PROFILE_BYTES >> 20} MiB; it is not a profile.")
    return data[: data.rfind(b"\n") + 1]


# --- merging -----------------------------------------------------------------------------------------


def merge_profiles(paths: Sequence[str | Path], out: str | Path, *, rescale: bool = False) -> Profile:
    """Merge profiles of one design that were measured on equal devices, each on its shard.

    Every device also measures the dense reference, which shows whether the devices are equal.

    Args:
        paths: The profiles of the shards.
        out: The file to write, compressed if its name ends in .gz.
        rescale: Scale each profile so that all agree on the reference; the header records the factors.

    Raises:
        BadFile: If the profiles have different networks, settings or designs, contain the same sample, or come from
            devices whose references differ by more than 2 %.
    """
    if len(paths) < 2:
        raise BadFile(f"{len(paths)} file given to merge; give two or more.")
    if Path(out).exists():
        raise BadFile(f"{out} already exists. Give another name.")
    shards = [Profile.load(path) for path in paths]
    _check_mergeable(paths, shards)
    levels = [_reference_level(path, shard) for path, shard in zip(paths, shards, strict=True)]
    factors = [(1.0, 1.0)] * len(shards)
    if rescale:
        common = [statistics.geometric_mean(column) for column in zip(*levels, strict=True)]
        factors = [(common[0] / joules, common[1] / seconds) for joules, seconds in levels]
    else:
        _check_levels(paths, [joules for joules, _ in levels], "J" if shards[0].header.meter.has_energy else "s", out)
    samples: list[Sample] = []
    for shard, (joules, seconds) in zip(shards, factors, strict=True):
        # Sessions of their own: drift is not interpolated from one device to the next.
        first = 1 + max((sample.session for sample in samples), default=-1)
        samples += [
            replace(s, session=first + s.session, joules=s.joules * joules, seconds=s.seconds * seconds)
            for s in shard.samples
        ]
    designs = [shard.header.design for shard in shards]
    size, rounds = max(design.samples for design in designs), max(design.rounds for design in designs)
    header = replace(
        shards[0].header,
        design=replace(designs[0], shard=None, samples=size, rounds=rounds),
        meter=replace(shards[0].header.meter, device_id=""),
        merged_from=tuple(
            MergedPart(
                shard=shard.header.design.shard,
                device_id=shard.header.meter.device_id,
                created=shard.header.created,
                reference_joules=joules,
                rescaled_by=scale[0] if rescale else None,
            )
            for shard, (joules, _), scale in zip(shards, levels, factors, strict=True)
        ),
    )
    profile = Profile(header, tuple(samples))
    profile.save(out)
    return profile


def _reference_level(path: str | Path, shard: Profile) -> tuple[float, float]:
    """Median joules and seconds of the dense reference."""
    if not shard.references:
        raise BadFile(f"{path} has no measurement of the dense reference, so it cannot be compared.")
    joules = statistics.median(sample.joules for sample in shard.references)
    return joules, statistics.median(sample.seconds for sample in shard.references)


def _check_levels(paths: Sequence[str | Path], levels: Sequence[float], unit: str, out: str | Path) -> None:
    low, high = min(range(len(levels)), key=levels.__getitem__), max(range(len(levels)), key=levels.__getitem__)
    difference = levels[high] / levels[low] - 1
    if difference > MAX_DEVICE_DIFFERENCE:
        command = f"ecc merge {' '.join(map(str, paths))} -o {out} --rescale"
        raise BadFile(
            f"the devices differ: the dense reference takes {levels[low]:.4g} {unit} in {paths[low]} and "
            f"{levels[high]:.4g} {unit} in {paths[high]}, {difference:.1%} more ({MAX_DEVICE_DIFFERENCE:.0%} is "
            f"accepted). Check whether one is warmer, slower or shared, or scale them: {command}"
        )


def _check_mergeable(paths: Sequence[str | Path], shards: Sequence[Profile]) -> None:
    seen: dict[tuple[int | None, int], str | Path] = {}
    for path, shard in zip(paths, shards, strict=True):
        if shard.header.merged_from:
            raise BadFile(f"{path} is already merged; give the files that it was merged from.")
        ignore = frozenset({"design.shard", "meter.device_id"})
        conflict = header_conflict(shards[0].header, shard.header, ignore=ignore)
        if conflict is not None:
            name, first, other = conflict
            raise BadFile(f"{paths[0]} and {path} cannot be merged: {name} is {first!r} and {other!r}.")
        keys = [(sample.index, sample.round) for sample in shard.design_samples]
        for index, round_ in keys:
            if (index, round_) in seen:
                raise BadFile(
                    f"sample {index} of round {round_} is in {seen[index, round_]} and in {path}. Leave out one file."
                )
        seen.update(dict.fromkeys(keys, path))
