"""Watching a joule counter: its ticks, the faults that no honest counter shows, and `probe`.

Counters move in steps. Between two steps a reading is stale by up to a whole period, so a window that starts
and ends at any moment errs by 0.41 period / window (8 % for 0.5 s on a counter of 100 ms). A window that
starts and ends on observed steps, called ticks here, errs only by how closely the ticks were watched.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ecc.errors import BadMeasurement

from .meter import Clock, Declared, DeviceState, HasState, Meter, Reading
from .workload import HostWorkload, Workload

POLL_SECONDS = 0.0005
"""Rest between two looks at the counter while there is nothing else to do."""

JUMP_FACTOR = 3.0
"""A step of more than this many times the usual power is a fault of the counter, not of the load."""

_IDLE_SETTLE_SECONDS = 0.5  # clocks and regulators come down from the load before
_MIN_TICKS_SEEN = 3  # a period needs two intervals
_PATIENCE = 3.0  # times the asked seconds that a probe waits for them


@dataclass(frozen=True)
class Tick(Reading):
    """A reading that differed from the one before."""

    gap_seconds: float
    """Time since the reading before: the step happened somewhere in there."""


class CounterWatch:
    """Reads a counter over and over, notices its ticks and refuses what a counter must not do.

    Args:
        meter: What is read.
        clock: The time.
        stall_seconds: How long the counter may stand still.
    """

    def __init__(self, meter: Meter, clock: Clock, *, stall_seconds: float = math.inf) -> None:
        self.stall_seconds = stall_seconds
        self.read_seconds = 0.0  # spent in reading, all together
        self.num_reads = 0
        self._meter = meter
        self._name = meter.describe().name
        self._clock = clock
        self._gaps: deque[float] = deque(maxlen=256)
        self._last = self._look()
        self._moved_at = self._last.seconds
        self._unmoved_reads = 0

    @property
    def usual_gap_seconds(self) -> float:
        """Median time between two of the latest readings."""
        return statistics.median(self._gaps) if self._gaps else 0.0

    def poll(self) -> Tick | None:
        """Reads once; a tick if the counter has moved since the last reading.

        Raises:
            BadMeasurement: If the counter went back or has stood still for too long.
        """
        last, now = self._last, self._look()
        gap = now.seconds - last.seconds
        self._last = now
        self._gaps.append(gap)
        if now.joules < last.joules:
            raise BadMeasurement(
                f"the counter of {self._name} went back from {last.joules:.3f} J to {now.joules:.3f} J: "
                "it was reset (driver reload, suspend) or wrapped around. Measure again; a meter of your own "
                "must unwrap its counter."
            )
        if now.joules > last.joules:
            self._moved_at, self._unmoved_reads = now.seconds, 0
            return Tick(now.joules, now.seconds, gap)
        self._unmoved_reads += 1
        still = now.seconds - self._moved_at
        if still > self.stall_seconds and self._unmoved_reads >= _MIN_TICKS_SEEN:
            raise BadMeasurement(
                f"the counter of {self._name} stood still at {now.joules:.3f} J for {still:.1f} s while the "
                f"device was busy; {self.stall_seconds:.1f} s is the most it may. Check it with `ecc doctor` "
                "or choose another meter."
            )
        return None

    def _look(self) -> Reading:
        before = self._clock.now()
        joules = float(self._meter.read())
        after = self._clock.now()
        self.read_seconds += after - before
        self.num_reads += 1
        if not math.isfinite(joules):
            raise BadMeasurement(f"the counter of {self._name} read {joules}; it must give a finite number.")
        return Reading(joules, 0.5 * (before + after))


def check_steps(name: str, ticks: Sequence[Reading], tick_seconds: float, max_watts: float | None = None) -> None:
    """Refuses a series of ticks in which the counter jumped, or drew more than its device can.

    Args:
        name: The meter, for the message.
        ticks: At constant load.
        tick_seconds: The counter's period. A tick that was seen late makes the next interval look short, so
            no interval is taken for shorter than this.
        max_watts: What the device may draw on average, if known.

    Raises:
        BadMeasurement: If a step is over `JUMP_FACTOR` times the usual power, or the mean over 1.5 times the
            most the device may draw.
    """
    total = ticks[-1].seconds - ticks[0].seconds
    mean_watts = (ticks[-1].joules - ticks[0].joules) / total
    if max_watts is not None and mean_watts > 1.5 * max_watts:
        raise BadMeasurement(
            f"the counter of {name} says {mean_watts:.1f} W over {total:.2f} s, but the device is limited to "
            f"{max_watts:.1f} W: the counter is wrong, or counts in another unit."
        )
    steps = _steps(ticks, max(0.5 * tick_seconds, total / 20))
    usual_watts = statistics.median(joules / seconds for joules, seconds in steps)
    for joules, seconds in steps:
        watts = joules / max(seconds, tick_seconds)
        limits = [usual_watts] if len(steps) > _MIN_TICKS_SEEN else []
        limits += [] if max_watts is None else [max_watts]
        if any(watts > JUMP_FACTOR * limit for limit in limits):
            raise BadMeasurement(
                f"the counter of {name} jumped by {joules:.3f} J within {seconds:.3f} s, as if by "
                f"{watts:.0f} W, where {min(limits):.0f} W is usual or allowed; {JUMP_FACTOR:g} times that "
                "is the most believed. Measure again; if it recurs, choose another meter."
            )


def _steps(ticks: Sequence[Reading], min_seconds: float) -> list[tuple[float, float]]:
    """(joules, seconds) between ticks, joined until each spans `min_seconds`."""
    steps = []
    start = ticks[0]
    for tick in ticks[1:]:
        if tick.seconds - start.seconds >= min_seconds:
            steps.append((tick.joules - start.joules, tick.seconds - start.seconds))
            start = tick
    return steps or [(ticks[-1].joules - ticks[0].joules, ticks[-1].seconds - ticks[0].seconds)]


# ---------------------------------------------------------------- what a counter is like


@dataclass(frozen=True, kw_only=True)
class CounterProbe:
    """How a counter behaves: measured once for a device, used by every measurement on it."""

    moves: bool
    """Whether it counts at all."""

    tick_seconds: float | None
    """Period of its steps; an upper bound where each reading found it moved. None if it does not move."""

    read_seconds: float
    """How long one reading takes."""

    idle_watts: float | None
    """Power with the device awake but idle; None if it could not be seen."""

    busy_watts: float | None = None
    """Power under the load that was given, if one was."""

    step_joules: float | None = None
    """The smallest step that was seen."""

    idle_state: DeviceState | None = None
    """Temperature, clock and neighbours before the load, if the meter tells."""


def probe_counter(
    meter: Meter,
    busy: Workload | Callable[[], object] | None = None,
    seconds: float = 2.0,
    *,
    clock: Clock | None = None,
) -> CounterProbe:
    """Watches a counter at rest, and then under load.

    Args:
        meter: What is read.
        busy: A load, or a function that computes for some milliseconds; None watches at rest only.
        seconds: How long to watch each; up to three times as long if the counter hardly ticks.
        clock: The time; the system's by default.

    Raises:
        BadMeasurement: If the counter goes back.
    """
    clock = clock or Clock()
    info = meter.describe()
    clock.sleep(max(_IDLE_SETTLE_SECONDS, info.settle_seconds))
    state = meter.state() if isinstance(meter, HasState) else None
    watch = CounterWatch(meter, clock)
    idle = _observe(watch, clock, seconds, None)
    loaded: list[Tick] = []
    if busy is not None:
        load = busy if isinstance(busy, Workload) else HostWorkload(busy, 1, clock)
        loaded = _observe(watch, clock, seconds, load)
        load.drain()
    intervals = [period for period in (_period(idle), _period(loaded)) if period is not None]
    steps = [later.joules - earlier.joules for part in (idle, loaded) for earlier, later in _pairs(part)]
    # CPU time that polling took is not idle power: a process that waits spends none.
    idle_watts = 0.0 if isinstance(info.provenance, Declared) else _watts(idle)
    return CounterProbe(
        moves=len(idle if busy is None else loaded) >= 2,
        tick_seconds=min(intervals, default=None),
        read_seconds=watch.read_seconds / watch.num_reads,
        idle_watts=idle_watts,
        busy_watts=_watts(loaded),
        step_joules=min(steps, default=None),
        idle_state=state,
    )


def _observe(watch: CounterWatch, clock: Clock, seconds: float, load: Workload | None) -> list[Tick]:
    ticks: list[Tick] = []
    started = clock.now()
    while True:
        worked = load is not None and load.advance()
        tick = watch.poll()
        if tick is not None:
            ticks.append(tick)
        elapsed = clock.now() - started
        if elapsed >= seconds and (len(ticks) >= _MIN_TICKS_SEEN or elapsed >= _PATIENCE * seconds):
            return ticks
        if not worked:
            clock.sleep(POLL_SECONDS)


def _pairs(ticks: Sequence[Tick]) -> list[tuple[Tick, Tick]]:
    return list(itertools.pairwise(ticks))


def _period(ticks: Sequence[Tick]) -> float | None:
    intervals = [later.seconds - earlier.seconds for earlier, later in _pairs(ticks)]
    return statistics.median(intervals) if intervals else None


def _watts(ticks: Sequence[Tick]) -> float | None:
    if len(ticks) < 2:
        return None
    return (ticks[-1].joules - ticks[0].joules) / (ticks[-1].seconds - ticks[0].seconds)
