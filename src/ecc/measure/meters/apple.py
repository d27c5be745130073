"""Apple silicon through the optional package zeus-apple-silicon, which reads the energy counters of the system.

These counters come from an activity model on the chip, not from a sensor, and the label says so.
"""

from __future__ import annotations

import importlib
import platform
from typing import Any

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meter import Measured, MeterInfo

_PARTS = {
    "": ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "ane_mj", "dram_mj"),
    "cpu": ("cpu_total_mj",),
    "gpu": ("gpu_mj", "gpu_sram_mj"),
}


class AppleMeter:
    """Sum of the energy counters of the chip."""

    def __init__(self, monitor: Any, argument: str = "") -> None:
        self._monitor = monitor
        self._argument = argument
        values = monitor.get_cumulative_energy()
        # A missing counter is None.
        self._parts = [part for part in _PARTS[argument] if getattr(values, part, None) is not None]
        if not self._parts:
            raise NoMeter(f"this chip has none of the energy counters {', '.join(_PARTS[argument])}.")

    def read(self) -> float:
        """Joules since the counters started."""
        try:
            values = self._monitor.get_cumulative_energy()
        except RuntimeError as error:
            raise BadMeasurement(f"the system's energy counters cannot be read: {error}") from error
        return sum(float(getattr(values, part)) for part in self._parts) * 1e-3

    def describe(self) -> MeterInfo:
        """Scope is the parts that are added."""
        return MeterInfo(
            name="apple",
            device=f"Apple silicon ({platform.machine()})",
            provenance=Measured(instrument="on-chip model"),
            scope=" + ".join(part.removesuffix("_mj") for part in self._parts),
            covers={"cpu": ("cpu",), "gpu": ("mps",)}.get(self._argument, ("cpu", "mps")),
            resolution_joules=1e-3,
            notes=("the counters are an activity model by the manufacturer, not a sensor",),
        )


def open_meter(argument: str = "", *, library: Any = None) -> AppleMeter:
    """Open `apple` (CPU, GPU, neural engine and memory), `apple:cpu` or `apple:gpu`."""
    if argument not in _PARTS:
        raise NoMeter(f"apple:{argument} is unknown; give apple, apple:cpu or apple:gpu.")
    if library is None:
        if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
            here = f"{platform.system()} on {platform.machine()}"
            raise NoMeter(f"this is {here}, not macOS on Apple silicon.")
        try:
            library = importlib.import_module("zeus_apple_silicon")
        except ImportError:
            raise NoMeter("the package zeus-apple-silicon is not installed: pip install zeus-apple-silicon.") from None
    try:
        return AppleMeter(library.AppleEnergyMonitor(), argument)
    except (RuntimeError, AttributeError) as error:
        raise NoMeter(f"zeus-apple-silicon cannot read the system's energy counters: {error}") from error
