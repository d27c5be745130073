"""CPU time of this process x a declared power, for machines without a meter.

It ranks networks by their CPU time, and the label says so. Unlike wall-clock time, CPU time does not include other
processes of a shared machine.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from ecc.errors import NoMeter
from ecc.measure.meter import Declared, MeterInfo

_WATTS = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(m?)W?", re.ASCII)


class CpuTimeMeter:
    """CPU time of all threads of the process times declared watts.

    Raises:
        NoMeter: If `watts` is not a positive number.
    """

    def __init__(self, watts: float, *, cpu_seconds: Callable[[], float] = time.process_time) -> None:
        if not (math.isfinite(watts) and watts > 0):
            raise NoMeter(f"cputime: the declared power is {watts} W; give a positive number, such as cputime:15W.")
        self._watts = watts
        self._cpu_seconds = cpu_seconds

    def read(self) -> float:
        """CPU seconds since the start of the process times the declared watts."""
        return self._cpu_seconds() * self._watts

    def describe(self) -> MeterInfo:
        """Provenance is `Declared`: only the time is measured."""
        return MeterInfo(
            name="cputime",
            device="CPU",
            provenance=Declared(self._watts),
            scope="this process",
            covers=("cpu",),
            reads="process CPU time",
            notes=("only the CPU time is measured; the power of a busy core is declared by the user",),
        )


def open_meter(argument: str) -> CpuTimeMeter:
    """Open `cputime:15W`.

    Raises:
        NoMeter: If no watts are declared.
    """
    match = _WATTS.fullmatch(argument)
    if match is None:
        given = f"{argument!r} is not a power" if argument else "no power is declared"
        raise NoMeter(f"cputime: {given}; give the power of one busy core, such as cputime:15W.")
    return CpuTimeMeter(float(match[1]) * (1e-3 if match[2] else 1.0))
