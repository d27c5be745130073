"""CPU time of this process in place of a meter, for machines without one.

    cputime        latency in CPU time of this process; no energy
    cputime:15W    CPU time x a power that you declare

CPU time does not include other processes of a shared machine. It adds up all threads, so with several threads it is
longer than the latency.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from ecc.errors import NoMeter
from ecc.measure.meter import Declared, MeterInfo, Timed

_WATTS = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(m?)W?", re.ASCII)


class CpuTimeMeter:
    """CPU time of all threads of the process, times the declared watts of one busy core, if energy is of interest."""

    def __init__(self, watts: float | None = None, *, cpu_seconds: Callable[[], float] = time.process_time) -> None:
        if watts is not None and not (math.isfinite(watts) and watts > 0):
            raise NoMeter(f"cputime: the declared power is {watts} W; give a positive number, such as cputime:15W.")
        self._watts, self._cpu_seconds = watts, cpu_seconds

    def read(self) -> float:
        """CPU seconds since the start of the process, times the declared watts."""
        return self._cpu_seconds() * (self._watts or 1.0)

    def describe(self) -> MeterInfo:
        """Provenance is `Declared` or `Timed`: only the time is measured."""
        note = "the power of a busy core is declared by the user" if self._watts else "no energy is measured"
        return MeterInfo(
            name="cputime",
            device="CPU",
            provenance=Timed("CPU time") if self._watts is None else Declared(self._watts),
            scope="this process",
            covers=("cpu",),
            reads="process CPU time",
            notes=(f"only the CPU time is measured; {note}",),
        )


def open_meter(argument: str) -> CpuTimeMeter:
    """Open `cputime` or `cputime:15W`."""
    if not argument:
        return CpuTimeMeter()
    match = _WATTS.fullmatch(argument)
    if match is None:
        raise NoMeter(f"cputime: {argument!r} is not a power; give the power of one busy core, such as cputime:15W.")
    return CpuTimeMeter(float(match[1]) * (1e-3 if match[2] else 1.0))
