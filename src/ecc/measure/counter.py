"""Observe a joule counter: find its ticks, refuse faulty counters, and `probe_counter`.

Counters move in steps, called ticks here. Between two ticks a reading is stale by up to a whole period, so a window
that starts and ends at arbitrary times has an error of 0.41 * period / window (8 % for 0.5 s and a period of 100 ms). A
window that starts and ends on observed ticks is only uncertain by how closely the ticks were observed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ecc.errors import BadMeasurement

from .meter import Clock, Declared, DeviceState, HasState, Meter, Reading, Timed
from .workload import HostWorkload, Workload

POLL_SECONDS = 0.0005
"""Sleep between two readings while the host has nothing else to do."""

JUMP_FACTOR = 3.0
"""A tick of more than this many times the usual power is a fault of the counter."""

_IDLE_SETTLE_SECONDS = 0.5  # clocks and regulators calm down after earlier work
_MIN_TICKS_SEEN = 3  # a period needs two intervals
_MAX_EXTENSION = 3.0  # a probe waits up to this many times `seconds` for its ticks


@dataclass(frozen=True)
class Tick(Reading):
    """A reading that differs from the previous one."""

    gap_seconds: float
    """Time since the previous reading; the tick happened within it."""


class CounterWatch:
    """Reads a counter repeatedly, finds its ticks, and refuses a counter that misbehaves.

    The counter may stay unchanged for `stall_seconds`.
    """

    def __init__(self, meter: Meter, clock: Clock, *, stall_seconds: float = math.inf) -> None:
        self.stall_seconds = stall_seconds
        self.read_seconds = 0.0
        """Total time spent in readings."""
        self.num_reads = 0
        self._meter = meter
        self._name = meter.describe().name
        self._clock = clock
        self._gaps: deque[float] = deque(maxlen=256)
        self._last = self._read()
        self._ticked_at = self._last.seconds
        self._unchanged_reads = 0

    @property
    def usual_gap_seconds(self) -> float:
        """Median time between recent readings."""
        return statistics.median(self._gaps) if self._gaps else 0.0

    def poll(self) -> Tick | None:
        """Read once. Returns a tick if the counter changed since the previous reading."""
        last, now = self._last, self._read()
        gap = now.seconds - last.seconds
        self._last = now
        self._gaps.append(gap)
        if now.joules < last.joules:
            raise BadMeasurement(
                f"the counter of {self._name} decreased from {last.joules:.3f} J to {now.joules:.3f} J: it was reset "
                "(driver reload, suspend) or wrapped around. Measure again; your own meter must unwrap its counter."
            )
        if now.joules > last.joules:
            self._ticked_at, self._unchanged_reads = now.seconds, 0
            return Tick(now.joules, now.seconds, gap)
        self._unchanged_reads += 1
        unchanged = now.seconds - self._ticked_at
        if unchanged > self.stall_seconds and self._unchanged_reads >= _MIN_TICKS_SEEN:
            raise BadMeasurement(
                f"the counter of {self._name} stayed at {now.joules:.3f} J for {unchanged:.1f} s while the device was "
                f"busy (allowed: {self.stall_seconds:.1f} s). Check it with `ecc doctor`, or choose another meter."
            )
        return None

    def _read(self) -> Reading:
        before = self._clock.now()
        joules = float(self._meter.read())
        after = self._clock.now()
        self.read_seconds += after - before
        self.num_reads += 1
        if not math.isfinite(joules):
            raise BadMeasurement(f"the counter of {self._name} returned {joules}; it must return a finite number.")
        return Reading(joules, 0.5 * (before + after))


def check_steps(name: str, ticks: Sequence[Reading], tick_seconds: float, max_watts: float | None = None) -> None:
    """Refuse ticks at constant load in which the counter jumped, or showed more power than its device can draw.

    One step may have `JUMP_FACTOR` times the usual power, and the mean 1.5 times the power limit. A tick that was seen
    late makes the next interval look short, so no interval counts as shorter than `tick_seconds`.
    """
    total = ticks[-1].seconds - ticks[0].seconds
    mean_watts = (ticks[-1].joules - ticks[0].joules) / total
    if max_watts is not None and mean_watts > 1.5 * max_watts:
        raise BadMeasurement(
            f"the counter of {name} shows {mean_watts:.1f} W over {total:.2f} s, but the device is limited to "
            f"{max_watts:.1f} W: the counter is wrong, or uses another unit."
        )
    steps = _join_steps(ticks, max(0.5 * tick_seconds, total / 20))
    usual_watts = statistics.median(joules / seconds for joules, seconds in steps)
    for joules, seconds in steps:
        watts = joules / max(seconds, tick_seconds)
        limits = [usual_watts] if len(steps) > _MIN_TICKS_SEEN else []
        limits += [] if max_watts is None else [max_watts]
        if any(watts > JUMP_FACTOR * limit for limit in limits):
            raise BadMeasurement(
                f"the counter of {name} jumped by {joules:.3f} J within {seconds:.3f} s ({watts:.0f} W; at most "
                f"{JUMP_FACTOR * min(limits):.0f} W are plausible). Measure again; if it recurs, choose another meter."
            )


def _join_steps(ticks: Sequence[Reading], min_seconds: float) -> list[tuple[float, float]]:
    """(joules, seconds) between ticks, joined until each spans `min_seconds`."""
    steps = []
    start = ticks[0]
    for tick in ticks[1:]:
        if tick.seconds - start.seconds >= min_seconds:
            steps.append((tick.joules - start.joules, tick.seconds - start.seconds))
            start = tick
    return steps or [(ticks[-1].joules - ticks[0].joules, ticks[-1].seconds - ticks[0].seconds)]


# --- properties of a counter -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CounterProbe:
    """Properties of a counter, determined once per device and used by every measurement on it."""

    moves: bool
    """Whether the counter changed at all."""
    tick_seconds: float | None
    """Period of the ticks; an upper bound if every reading differed. None if the counter does not move."""
    read_seconds: float
    """Duration of one reading."""
    idle_watts: float | None
    """Power of the idle device; None if it could not be determined."""
    busy_watts: float | None = None
    """Power under the given load, if there was one."""
    step_joules: float | None = None
    """Smallest observed step."""
    idle_state: DeviceState | None = None
    """State of the device before the load, if the meter reads it."""


def probe_counter(
    meter: Meter,
    busy: Workload | Callable[[], object] | None = None,
    seconds: float = 2.0,
    *,
    clock: Clock | None = None,
) -> CounterProbe:
    """Observe a counter while the device is idle, and then under load.

    Args:
        meter: The meter to read.
        busy: A workload, or a function that computes for some milliseconds. None observes the idle device only.
        seconds: Duration of each observation; up to three times as long if the counter hardly ticks.
        clock: Time functions; those of the system by default.
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
    periods = [period for period in (_period(idle), _period(loaded)) if period is not None]
    steps = [later.joules - earlier.joules for part in (idle, loaded) for earlier, later in itertools.pairwise(part)]
    return CounterProbe(
        moves=len(idle if busy is None else loaded) >= 2,
        tick_seconds=min(periods, default=None),
        read_seconds=watch.read_seconds / watch.num_reads,
        # A waiting process uses no CPU time: what polling used is not idle power.
        idle_watts=0.0 if isinstance(info.provenance, Declared | Timed) else _mean_watts(idle),
        busy_watts=_mean_watts(loaded),
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
        if elapsed >= seconds and (len(ticks) >= _MIN_TICKS_SEEN or elapsed >= _MAX_EXTENSION * seconds):
            return ticks
        if not worked:
            clock.sleep(POLL_SECONDS)


def _period(ticks: Sequence[Tick]) -> float | None:
    intervals = [later.seconds - earlier.seconds for earlier, later in itertools.pairwise(ticks)]
    return statistics.median(intervals) if intervals else None


def _mean_watts(ticks: Sequence[Tick]) -> float | None:
    if len(ticks) < 2:
        return None
    return (ticks[-1].joules - ticks[0].joules) / (ticks[-1].seconds - ticks[0].seconds)
