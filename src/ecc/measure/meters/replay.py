"""A recorded profile in the place of the device it was recorded on: `replay:h200.profile`.

It answers for the widths that the file holds, and refuses all others, for it knows nothing of them. What it
says is what was recorded, in the file's own summary: rounds combined, and drift divided out where there was
any, since the numbers are asked for in another order than they were measured in. Its joules keep the provenance
of the recording, and their description says that they are a replay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from ecc.errors import BadFile, BadWidths, EccError, NoMeter
from ecc.graph import ChannelGraph
from ecc.measure.measurement import combined
from ecc.measure.meter import Declared, Estimated, Measured, MeterInfo, Provenance, Reading
from ecc.measure.profile import Profile

_Widths = tuple[int, ...]
_SHOWN = 4  # differences that a message names


class Replay:
    """The networks of a profile, by their widths: an `Analytic`, never a meter.

    Args:
        profile: What was recorded.
        name: Of the file, for messages and labels.

    Raises:
        BadFile: If nothing was recorded.
        BadMeasurement: If the device was not steady while it was recorded.
    """

    def __init__(self, profile: Profile, name: str) -> None:
        self._profile = profile
        self._name = name
        header = profile.header
        self._recorded: dict[_Widths, Reading] = {}
        if profile.references:  # the dense network, also where the design does not hold it
            provenance = header.meter.provenance
            joules, seconds = (
                combined([getattr(sample, value) for sample in profile.references], provenance)
                for value in ("joules", "seconds")
            )
            self._recorded[header.full_widths] = Reading(joules, seconds)
        self._recorded |= {s.widths: Reading(s.joules, s.seconds) for s in profile.corrected()}
        if not self._recorded:
            raise BadFile(f"{name} holds a header but no measurement yet; there is nothing to replay.")

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Joules and seconds that were recorded for these widths; groups not named keep their full width.

        Raises:
            BadFile: If another network was recorded.
            BadWidths: If these widths do not fit the graph or were not recorded; the nearest ones are named.
        """
        header = self._profile.header
        if graph.fingerprint != header.fingerprint:
            raise BadFile(
                f"{self._name} was recorded of network {header.fingerprint}, and this one is {graph.fingerprint}. "
                "A recording holds for the very network and input shape that it was made with."
            )
        vector = graph.widths(widths).tolist()
        full = dict(zip((group.name for group in graph.groups), vector, strict=True))
        wanted = tuple(int(full[name]) for name in header.groups)
        if wanted not in self._recorded:
            raise BadWidths(self._not_recorded(wanted))
        return self._recorded[wanted]

    def describe(self) -> MeterInfo:
        """The recording's own description, which says that it is replayed."""
        info, header = self._profile.header.meter, self._profile.header
        ran = "" if header.settings is None else f", {header.settings.mode}, {header.settings.precision}"
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
        samples = [str(sample.index) for sample in self._profile.design_samples if sample.widths == nearest]
        which = f"sample {samples[0]}" if samples else "the dense reference"
        differs = [
            f"{group} {there} (asked: {here})"
            for group, there, here in zip(self._profile.header.groups, nearest, wanted, strict=True)
            if there != here
        ]
        more = f" and {len(differs) - _SHOWN} more" if len(differs) > _SHOWN else ""
        return (
            f"{self._name} holds {len(self._recorded)} networks, but none of these widths. The nearest is {which}, "
            f"which has {', '.join(differs[:_SHOWN])}{more}. Ask for recorded widths, or measure these on the device."
        )


def open_meter(argument: str) -> Replay:
    """Opens `replay:FILE`.

    Raises:
        NoMeter: If no file is named, or it holds no profile that can be replayed.
    """
    if not argument:
        raise NoMeter("replay: no file is named; give the profile to replay, such as replay:h200.profile.")
    try:
        return Replay(Profile.load(argument), Path(argument).name)
    except EccError as error:
        raise NoMeter(f"replay: {error}") from error


def _replayed(provenance: Provenance, name: str) -> Provenance:
    """The same kind as the recording; a replay of a replay names the first file only."""
    if isinstance(provenance, Estimated | Declared):
        return provenance  # nothing was read off a device then either; `reads` says where the numbers come from
    if "replayed from" in provenance.instrument:
        return provenance
    instrument = "" if provenance.instrument == "sensor" else f"{provenance.instrument}, "
    return Measured(f"{instrument}replayed from {name}")


def _distance(widths: _Widths, wanted: _Widths) -> float:
    """How far apart two networks are, as the energy sees them: by the ratios of their widths."""
    return sum(abs(math.log(there / here)) for there, here in zip(widths, wanted, strict=True))
