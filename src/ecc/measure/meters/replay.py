"""Replay a recorded profile in place of its device: `replay:h200.profile`.

It knows the widths of the file and refuses all others. Rounds are combined and drift is divided out, because the
numbers are used in another order than they were measured. The joules keep the provenance of the recording, and the
description says that they are replayed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from pathlib import Path

from ecc.errors import BadFile, BadWidths, EccError, NoMeter
from ecc.graph import ChannelGraph
from ecc.measure.meter import Declared, Estimated, Measured, MeterInfo, Provenance, Reading, Timed
from ecc.measure.profile import Profile

_Widths = tuple[int, ...]
_MAX_SHOWN = 4  # differences in a message


class Replay:
    """The width configurations of a profile: an `Analytic`, not a meter. The name is for messages and labels."""

    def __init__(self, profile: Profile, name: str) -> None:
        self._profile = profile
        self._name = name
        header = profile.header
        self._recorded: dict[_Widths, Reading] = {}
        if profile.references:  # the dense network, also if the design does not contain it
            self._recorded[header.full_widths] = Reading(
                statistics.median(sample.joules for sample in profile.references),
                statistics.median(sample.seconds for sample in profile.references),
            )
        self._recorded |= {s.widths: Reading(s.joules, s.seconds) for s in profile.corrected()}
        if not self._recorded:
            raise BadFile(f"{name} contains no samples, so there is nothing to replay.")

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Recorded joules and seconds of these widths; groups that are not named keep their full width."""
        header = self._profile.header
        if graph.fingerprint != header.fingerprint:
            raise BadFile(
                f"{self._name} was recorded with network {header.fingerprint}, and this one is {graph.fingerprint}. "
                "A recording is only valid for the same network and input shape."
            )
        vector = graph.widths(widths).tolist()
        full = dict(zip((group.name for group in graph.groups), vector, strict=True))
        wanted = tuple(int(full[name]) for name in header.groups)
        if wanted not in self._recorded:
            raise BadWidths(self._not_recorded(wanted))
        return self._recorded[wanted]

    def describe(self) -> MeterInfo:
        """Description of the recording, marked as a replay."""
        info, header = self._profile.header.meter, self._profile.header
        ran = "" if header.settings is None else f", {header.settings.runner}, {header.settings.precision}"
        where = "" if header.device_type is None else f" on {header.device_type}"
        return dataclasses.replace(
            info,
            name="replay",
            provenance=_replayed(info.provenance, self._name),
            covers=(),  # nothing runs
            reads=f"replay of {self._name}",
            settle_seconds=0.0,
            notes=(f"recorded by {info.name} ({info.reads}){where}, batch {header.batch}{ran}", *info.notes),
        )

    def _not_recorded(self, wanted: _Widths) -> str:
        nearest = min(self._recorded, key=lambda widths: _distance(widths, wanted))
        indices = [sample.index for sample in self._profile.design_samples if sample.widths == nearest]
        which = f"sample {indices[0]}" if indices else "the dense reference"
        differs = [
            f"{group}: {there} instead of {here}"
            for group, there, here in zip(self._profile.header.groups, nearest, wanted, strict=True)
            if there != here
        ]
        more = f" and {len(differs) - _MAX_SHOWN} more" if len(differs) > _MAX_SHOWN else ""
        return (
            f"{self._name} has {len(self._recorded)} width configurations, but not this one. The nearest is {which} "
            f"({', '.join(differs[:_MAX_SHOWN])}{more}). Use recorded widths, or measure on the device."
        )


def open_meter(argument: str) -> Replay:
    """Open `replay:FILE`."""
    if not argument:
        raise NoMeter("replay: no file given; give the profile to replay, such as replay:h200.profile.")
    try:
        return Replay(Profile.load(argument), Path(argument).name)
    except EccError as error:
        raise NoMeter(f"replay: {error}") from error


def _replayed(provenance: Provenance, name: str) -> Provenance:
    """The same kind as the recording. A replay of a replay only names the first file."""
    if isinstance(provenance, Estimated | Declared | Timed):
        return provenance  # not read off a device either; `reads` names the file
    if "replayed from" in provenance.instrument:
        return provenance
    instrument = "" if provenance.instrument == "sensor" else f"{provenance.instrument}, "
    return Measured(f"{instrument}replayed from {name}")


def _distance(widths: _Widths, wanted: _Widths) -> float:
    """Sum of the absolute log ratios of the widths."""
    return sum(abs(math.log(there / here)) for there, here in zip(widths, wanted, strict=True))
