"""Interfaces of energy meters.

A meter is a joule counter that never decreases, with a description of what it measures. Your own meter is a class with
two methods. Pass an instance, or name the class on the command line as `file.py:MyMeter`:

    class MyMeter:
        def read(self) -> float:              # joules since some fixed time; never decreases
            ...
        def describe(self) -> MeterInfo:
            return MeterInfo(name="shunt", device="my board", provenance=Measured(), scope="board")

`PowerIntegrator` turns a source of watts into a joule counter. A source that computes joules without running anything,
such as a platform of published constants, is an `Analytic`, not a meter.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import msgspec

from ecc.errors import BadMeasurement

if TYPE_CHECKING:
    from ecc.graph import ChannelGraph

# --- provenance --------------------------------------------------------------------------------------
# Tagged structs: msgspec writes the kind next to the fields and picks the class by it when reading.


class Measured(msgspec.Struct, frozen=True, tag_field="kind", tag="measured"):
    """Joules that an instrument read off the running device."""

    instrument: str = "sensor"
    """`sensor`, or what takes its place, such as `on-chip model`; the label then names it."""

    @property
    def label(self) -> str:
        """Label shown next to every number."""
        return "measured" if self.instrument == "sensor" else f"measured ({self.instrument})"


class Estimated(msgspec.Struct, frozen=True, tag_field="kind", tag="estimated"):
    """Joules computed from constants; nothing was read off a device."""

    source: str
    """The constants and where they were published."""

    @property
    def label(self) -> str:
        """Label shown next to every number."""
        return "estimated"


class Declared(msgspec.Struct, frozen=True, tag_field="kind", tag="declared"):
    """Measured CPU time multiplied by a power that the user declared."""

    watts: float
    """Declared power of one busy core."""

    @property
    def label(self) -> str:
        """Label shown next to every number."""
        return f"CPU time x declared {self.watts:g} W"


class Timed(msgspec.Struct, frozen=True, tag_field="kind", tag="timed"):
    """Time alone: no energy is known. The counter counts seconds of a clock, which are the latency."""

    clock: str
    """`CPU time` or `wall clock`."""

    @property
    def label(self) -> str:
        """Label shown next to every number."""
        return f"measured ({self.clock})"


Provenance: TypeAlias = Measured | Estimated | Declared | Timed


@dataclass(frozen=True, kw_only=True)
class MeterInfo:
    """Description of a meter: what its joules mean, and whether they may be compared with those of another.

    Raises:
        TypeError: If `provenance` is not one of the types above.
        ValueError: If a text contains control characters, as in a damaged file.
    """

    name: str
    """Name of the meter: nvml, jetson, rapl, ..."""
    device: str
    """Product name of the metered device, such as `NVIDIA H200`."""
    provenance: Provenance
    """`Measured`, `Estimated`, `Declared` or `Timed`."""
    scope: str
    """What the joules cover: `board`, `GPU rail`, `package`, ..."""
    device_id: str = ""
    """Identifier of this one device, if known (the UUID of a GPU)."""
    covers: tuple[str, ...] = ()
    """torch device types whose work the meter sees; empty means all."""
    reads: str = "energy counter"
    """`energy counter`, or the power reading that is integrated."""
    resolution_joules: float | None = None
    """Step of the counter."""
    settle_seconds: float = 0.0
    """Averaging time of the sensor. Warm-ups last at least this long."""
    max_watts: float | None = None
    """Power limit of the device, if known. A higher mean is treated as a fault of the counter."""
    notes: tuple[str, ...] = ()
    """Remarks for readers of the numbers."""

    def __post_init__(self) -> None:
        if not isinstance(self.provenance, Measured | Estimated | Declared | Timed):
            raise TypeError(
                f"provenance of meter {self.name!r} is {self.provenance!r}; "
                "give Measured(), Estimated(source=...), Declared(watts=...) or Timed(clock=...)."
            )
        for text in (self.name, self.device, self.scope, self.device_id, self.reads, self.label, *self.covers):
            if not text.isprintable():
                raise ValueError(f"description of the meter contains control characters: {text!r}")

    @property
    def label(self) -> str:
        """Label of the provenance, shown next to every number."""
        return self.provenance.label

    @property
    def has_energy(self) -> bool:
        """Whether it counts joules; a clock does not."""
        return not isinstance(self.provenance, Timed)


# --- protocols ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Joules and seconds: one reading of a counter, or the cost of one inference from an `Analytic`."""

    joules: float
    """Cumulative joules of a counter, or joules of one inference."""
    seconds: float
    """Monotonic time of the reading, or duration of one inference."""
    relative_ci: float | None = field(default=None, kw_only=True)
    """Half width of the 95 % confidence interval of the joules, if an `Analytic` knows it; None if they are exact."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """State of the device during a measurement; None or empty where it cannot be read."""

    temperature_celsius: float | None = None
    clock_mhz: float | None = None
    power_watts: float | None = None
    """Power reading that does not come from the energy counter, used to check the counter."""
    throttling: tuple[str, ...] = ()
    """Active reasons for reduced clocks: heat or hardware protection."""
    power_capped: bool = False
    """Whether the device runs at its power limit. This is recorded, not refused."""
    other_processes: tuple[str, ...] = ()
    """Other processes that compute on the device."""


@runtime_checkable
class Meter(Protocol):
    """A joule counter. A meter of your own needs only these two methods."""

    def read(self) -> float:
        """Cumulative joules since some fixed time; never decreases."""

    def describe(self) -> MeterInfo:
        """Description of the meter."""


@runtime_checkable
class HasState(Protocol):
    """A meter that also reads the state of its device."""

    def state(self) -> DeviceState:
        """Current temperature, clock, throttling and other processes."""


@runtime_checkable
class Analytic(Protocol):
    """A source that computes the cost of a network from its widths, without building or running it.

    An `Analytic` is never a `Meter`: it has no counter, its provenance is `Estimated`, and `measure` refuses it.
    Profiles accept both. A replayed recording is an `Analytic` that keeps the provenance of the recording.
    """

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Joules and seconds of one inference of the graph's example input; widths by group name."""

    def describe(self) -> MeterInfo:
        """Description of the source."""


EnergySource: TypeAlias = Meter | Analytic


def close_meter(meter: EnergySource) -> None:
    """Close the threads and handles of a meter, if it has any."""
    close = getattr(meter, "close", None)
    if callable(close):
        close()


@dataclass(frozen=True)
class Clock:
    """Time functions, replaceable in tests."""

    now: Callable[[], float] = field(default=time.monotonic)
    sleep: Callable[[float], None] = field(default=time.sleep)


# --- watts to joules ---------------------------------------------------------------------------------


class PowerIntegrator:
    """Integrates power readings to a joule counter in a background thread (trapezoidal rule).

    The counter ticks once per sample. It is as accurate as the power reading: a reading that averages over one second
    needs `settle_seconds=1` in the `MeterInfo`.
    """

    def __init__(
        self,
        power_watts: Callable[[], float],
        *,
        period_seconds: float = 0.01,
        now: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        """Take the first sample, so that a source that does not work fails here.

        Args:
            power_watts: Returns the current power in watts. It may block (as a pipe does); use period 0 then.
            period_seconds: Time between two samples.
            now: Monotonic clock.
            start: Start the thread. Without it, call `sample` yourself.
        """
        self._power_watts = power_watts
        self._period = period_seconds
        self._now = now
        self._joules = 0.0
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watts = self._checked_power()
        self._at = now()
        self._thread = threading.Thread(target=self._run, name="ecc-power-integrator", daemon=True)
        if start:
            self._thread.start()

    def read(self) -> float:
        """Joules from construction to the last sample.

        Raises:
            BadMeasurement: If the power source failed or the integrator was closed.
        """
        with self._lock:
            if self._failure is not None:
                raise BadMeasurement(f"the power reading failed: {self._failure}") from self._failure
            if self._stop.is_set():
                raise BadMeasurement("the power integrator was closed; open the meter again.")
            return self._joules

    def sample(self) -> None:
        """Read the power once and add the energy since the last sample."""
        watts = self._checked_power()
        at = self._now()
        with self._lock:
            self._joules += 0.5 * (self._watts + watts) * (at - self._at)
            self._watts, self._at = watts, at

    def close(self) -> None:
        """Stop the thread. Reading afterwards is an error. End a source that blocks before this call."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _checked_power(self) -> float:
        watts = float(self._power_watts())
        if not math.isfinite(watts) or watts < 0:
            raise BadMeasurement(f"the power source returned {watts} W; it must return a number of at least 0.")
        return watts

    def _run(self) -> None:
        due = self._at
        while not self._stop.is_set():
            due = max(due + self._period, self._now())  # after a stall, continue from now
            if self._stop.wait(max(0.0, due - self._now())):
                return
            try:
                self.sample()
            except Exception as failure:  # noqa: BLE001 - the next read() reports it
                with self._lock:
                    self._failure = failure
                return
