"""What a meter is: a joule counter that only grows, and a description that says where its joules come from.

A meter of your own is a class with two methods, passed as an instance or named on the command line as
`file.py:MyMeter`:

    class MyMeter:
        def read(self) -> float:              # joules since some fixed moment, never falling
            ...
        def describe(self) -> MeterInfo:
            return MeterInfo(name="shunt", device="my board", provenance=Measured(), scope="board")

A source of watts instead of joules becomes such a counter with `PowerIntegrator`. What tells joules without
running anything, such as a platform of published constants, is no meter but an `Analytic`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from ecc.errors import BadMeasurement

if TYPE_CHECKING:
    from ecc.graph import ChannelGraph

# ---------------------------------------------------------------- where joules come from


@dataclass(frozen=True)
class Measured:
    """Joules that an instrument read off the running device."""

    instrument: str = "sensor"
    """`sensor`, or what stands in its place, such as `on-chip model`: then the label says so."""

    @property
    def label(self) -> str:
        """Stands beside every number in tables, files and figures."""
        return "measured" if self.instrument == "sensor" else f"measured ({self.instrument})"


@dataclass(frozen=True)
class Estimated:
    """Joules computed from constants; nothing was read off a device."""

    source: str
    """The constants and where they were published."""

    @property
    def label(self) -> str:
        """Stands beside every number in tables, files and figures."""
        return "estimated"


@dataclass(frozen=True)
class Declared:
    """CPU time that was measured, times watts that the user declared."""

    watts: float
    """What one busy core draws, in the user's word."""

    @property
    def label(self) -> str:
        """Stands beside every number in tables, files and figures."""
        return f"CPU time x declared {self.watts:g} W"


Provenance: TypeAlias = Measured | Estimated | Declared
_KINDS: dict[str, type[Measured] | type[Estimated] | type[Declared]] = {
    "measured": Measured,
    "estimated": Estimated,
    "declared": Declared,
}


@dataclass(frozen=True, kw_only=True)
class MeterInfo:
    """What a number means that this meter read: enough to sign it, and to refuse mixing it with another.

    Raises:
        TypeError: If `provenance` is not one of the three types above.
    """

    name: str
    """Which meter: nvml, jetson, rapl, ..."""

    device: str
    """The product that is metered, such as `NVIDIA H200`."""

    provenance: Provenance
    """`Measured`, `Estimated` or `Declared`: three types, so that they cannot be taken for one another."""

    scope: str
    """What the joules cover: `board`, `GPU rail`, `package`, ..."""

    device_id: str = ""
    """Which specimen of the product, if it can be told (the UUID of a GPU)."""

    covers: tuple[str, ...] = ()
    """torch device types whose work shows up in the counter; empty: all of them."""

    reads: str = "energy counter"
    """`energy counter`, or the power reading that was integrated."""

    resolution_joules: float | None = None
    """The unit in which the counter counts."""

    settle_seconds: float = 0.0
    """How long the sensor remembers the load before; warm-ups last at least this long."""

    max_watts: float | None = None
    """The most the device may draw on average, if it says so; more is taken for a fault."""

    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know."""

    def __post_init__(self) -> None:
        if not isinstance(self.provenance, Measured | Estimated | Declared):
            raise TypeError(
                f"provenance of meter {self.name!r} is {self.provenance!r}; "
                "give Measured(), Estimated(source=...) or Declared(watts=...)."
            )

    @property
    def label(self) -> str:
        """The provenance in a word or two, for every table, file and figure."""
        return self.provenance.label

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        kind = next(name for name, cls in _KINDS.items() if isinstance(self.provenance, cls))
        return {**asdict(self), "provenance": {"kind": kind, **asdict(self.provenance)}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MeterInfo:
        """The reverse of `to_dict`; unknown keys of a later version are left out.

        Raises:
            KeyError, TypeError, ValueError: If it is damaged.
        """
        known = {f.name for f in fields(cls)}
        kept: dict[str, Any] = {name: value for name, value in values.items() if name in known}
        for name in ("covers", "notes"):
            kept[name] = tuple(kept.get(name, ()))
        provenance = dict(kept["provenance"])
        kept["provenance"] = _KINDS[provenance.pop("kind")](**provenance)
        info = cls(**kept)
        texts = [info.name, info.device, info.scope, info.device_id, info.reads, info.label, *info.covers, *info.notes]
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise ValueError("the meter is described by something that is no text")
        return info


# ---------------------------------------------------------------- the plug-in


@dataclass(frozen=True)
class Reading:
    """Joules and seconds: one look at a counter, or what an `Analytic` says one inference takes."""

    joules: float
    """Cumulative joules; of an `Analytic`, those of one inference."""

    seconds: float
    """The monotonic time they belong to; of an `Analytic`, how long one inference takes."""


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """How the device was while it was measured; None or empty where that cannot be read."""

    temperature_celsius: float | None = None
    clock_mhz: float | None = None
    power_watts: float | None = None
    """From a reading other than the counter, to check the counter against."""
    throttling: tuple[str, ...] = ()
    """Why the device runs slower than it should: heat or hardware protection."""
    power_capped: bool = False
    """Whether it runs at its power limit. That is a lawful state, recorded but not refused."""
    other_processes: tuple[str, ...] = ()
    """Who else computes on the device."""


@runtime_checkable
class Meter(Protocol):
    """A joule counter. These two methods are all that a user's own meter needs."""

    def read(self) -> float:
        """Cumulative joules since some fixed moment; never falls."""

    def describe(self) -> MeterInfo:
        """What is metered, and how."""


@runtime_checkable
class HasState(Protocol):
    """A meter that can also tell how its device is doing."""

    def state(self) -> DeviceState:
        """Temperature, clock, throttling and neighbours, now."""


@runtime_checkable
class Analytic(Protocol):
    """A source that needs no run: it tells what a network costs at given widths, and nothing is built.

    An analytic source is never a `Meter`: it has no counter that could be read while something runs, its
    provenance is `Estimated`, and `measure` refuses it. Profiles take either. A replayed recording answers in
    the same way and keeps the provenance of what was recorded.
    """

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Joules and seconds of one inference of the graph's example input; widths go by group name."""

    def describe(self) -> MeterInfo:
        """Whose joules they are, and where the constants come from."""


@runtime_checkable
class NoisyAnalytic(Analytic, Protocol):
    """An `Analytic` with artificial noise, which is another each time that a network is asked for."""

    noise: float

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int], *, repeat: int = 0) -> Reading:
        """Joules and seconds of one inference, the `repeat`-th time."""


EnergySource: TypeAlias = Meter | Analytic


def close_meter(meter: EnergySource) -> None:
    """Ends the meter's threads and handles, if it has any."""
    close = getattr(meter, "close", None)
    if callable(close):
        close()


@dataclass(frozen=True)
class Clock:
    """Time, passed in, so that tests can make their own."""

    now: Callable[[], float] = field(default=time.monotonic)
    sleep: Callable[[float], None] = field(default=time.sleep)


# ---------------------------------------------------------------- watts to joules


class PowerIntegrator:
    """Turns any source of watts into a joule counter: trapezoids on the monotonic clock, in a thread.

    The counter steps once a sample, so its tick is the sampling period. It is as good as the power reading
    behind it: a reading that averages over a second must be given that second (`settle_seconds`).
    """

    def __init__(
        self,
        power_watts: Callable[[], float],
        *,
        period_seconds: float = 0.01,
        now: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        """Takes the first sample, so that a source that does not work fails here.

        Args:
            power_watts: Returns the power now, in watts. It may block, as a pipe does: then the period is 0.
            period_seconds: From one sample to the next.
            now: The monotonic clock.
            start: False leaves the sampling to calls of `sample`.
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
        """Joules since construction, up to the last sample.

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
        """Reads the power once and adds the trapezoid since the last sample."""
        watts = self._checked_power()
        at = self._now()
        with self._lock:
            self._joules += 0.5 * (self._watts + watts) * (at - self._at)
            self._watts, self._at = watts, at

    def close(self) -> None:
        """Stops the thread; reading afterwards is an error. A source that blocks must be ended first."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _checked_power(self) -> float:
        watts = float(self._power_watts())
        if not math.isfinite(watts) or watts < 0:
            raise BadMeasurement(f"the power source gave {watts} W; it must give a number of at least 0.")
        return watts

    def _run(self) -> None:
        due = self._at
        while not self._stop.is_set():
            due = max(due + self._period, self._now())  # after a stall carry on, do not catch up
            if self._stop.wait(max(0.0, due - self._now())):
                return
            try:
                self.sample()
            except Exception as failure:  # noqa: BLE001 - whatever it is, the reader must hear of it
                with self._lock:
                    self._failure = failure
                return
