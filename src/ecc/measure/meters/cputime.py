"""CPU time of this process x watts that the user declares: an honest stand-in where nothing can be metered.

It ranks networks by the processor time they take, and the label says what it is. Wall-clock time would also
charge the neighbours on a shared machine; process time does not.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from ecc.errors import NoMeter
from ecc.measure.meter import Declared, MeterInfo

_WATTS = re.compile(r"([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(m?)W?", re.ASCII)


class CpuTimeMeter:
    """Seconds of CPU time, all threads of the process, times declared watts.

    Raises:
        NoMeter: If `watts` is not a positive number.
    """

    def __init__(self, watts: float, *, cpu_seconds: Callable[[], float] = time.process_time) -> None:
        if not (math.isfinite(watts) and watts > 0):
            raise NoMeter(f"cputime is declared {watts} W; give a positive number: cputime:15W.")
        self._watts = watts
        self._cpu_seconds = cpu_seconds

    def read(self) -> float:
        """CPU seconds since the process began, times the declared watts."""
        return self._cpu_seconds() * self._watts

    def describe(self) -> MeterInfo:
        """Provenance is `Declared`: only the time was measured."""
        return MeterInfo(
            name="cputime",
            device="CPU",
            provenance=Declared(self._watts),
            scope="this process",
            covers=("cpu",),
            reads="process CPU time",
            notes=("only the CPU time is measured; the watts of a busy core are the user's word",),
        )


def open_meter(argument: str) -> CpuTimeMeter:
    """Opens `cputime:15W`.

    Raises:
        NoMeter: If no watts are declared.
    """
    match = _WATTS.fullmatch(argument)
    if match is None:
        given = f"{argument!r} is not a power" if argument else "no watts are declared"
        raise NoMeter(f"cputime: {given}; say what one busy core draws, such as cputime:15W.")
    try:
        watts = float(match[1])
    except ValueError:
        raise NoMeter(f"cputime: {argument!r} is not a power; say it as cputime:15W.") from None
    return CpuTimeMeter(watts * (1e-3 if match[2] else 1.0))
