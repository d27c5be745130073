"""`wall`: latency in wall-clock time on any device, where no energy counter works."""

from __future__ import annotations

import time

from ecc.errors import NoMeter
from ecc.measure.meter import MeterInfo, Timed


class WallClock:
    """Wall-clock time: latency without energy."""

    def read(self) -> float:
        """Seconds since some fixed time."""
        return time.perf_counter()

    def describe(self) -> MeterInfo:
        """Provenance is `Timed`."""
        return MeterInfo(
            name="wall",
            device="this machine",
            provenance=Timed("wall clock"),
            scope="all that it runs",
            reads="wall clock",
            notes=("no energy is measured; other programs on the machine add to the time",),
        )


def open_meter(argument: str) -> WallClock:
    """Open `wall`."""
    if argument:
        raise NoMeter(f"wall: {argument!r} has no effect; a clock has no argument.")
    return WallClock()
