"""Cutting windows, from counter tick to counter tick, out of the run of a device that is kept busy.

The edges of a window are where it errs: a tick is known to lie between two readings of the counter, so the
counter is read closely when a tick is due, and a tick that was seen late is not taken for an edge.

And it errs where its ticks differ. A sensor that averages over a part of each period only sees other layers of the
network at each tick, and a pause of the device that falls into that part counts for more than it is. So a window goes
on, for a few more ticks, until the joules of its ticks agree.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from ecc.errors import BadMeasurement

from .counter import POLL_SECONDS, CounterProbe, CounterWatch, Tick, check_steps
from .measurement import MeasureSettings, Window, relative_interval
from .meter import Clock, DeviceState, HasState, Meter, MeterInfo
from .workload import QueuedWorkload, Workload

_JITTER = 0.03  # of a period: no tick comes earlier after the last, so the host need not look before
_READS_A_WINDOW = 25  # of a counter that moves all the time; enough to see a fault
_MIN_CHUNKS = 5  # in a window of queued work, whose ends are interpolated within a chunk
_MAX_BLURRED_TICKS = 5  # ticks seen late that are passed over before one is taken all the same
_MAX_MORE_TICKS = 5  # beyond those that a window needs, where its ticks differ


class WindowAligner:
    """A load, the counter that watches it, and the windows cut out of their common run.

    Args:
        load: Keeps the device busy.
        chunk_seconds: How long its chunks are.
        meter: What is read.
        counter: How its counter behaves.
        settings: How long windows are, and when they agree.
        clock: The time.

    Raises:
        BadMeasurement: If the counter does not move, or ticks too slowly for the longest window.
    """

    def __init__(
        self,
        load: Workload,
        chunk_seconds: float,
        meter: Meter,
        counter: CounterProbe,
        settings: MeasureSettings,
        clock: Clock,
    ) -> None:
        self.info = meter.describe()
        if not counter.moves or counter.tick_seconds is None:
            raise BadMeasurement(
                f"the counter of {self.info.name} stood still while it was probed: it does not count what "
                "runs here. Check it with `ecc doctor`, or choose another meter."
            )
        self.tick_seconds = counter.tick_seconds
        least_seconds = settings.min_ticks * self.tick_seconds
        if least_seconds > settings.max_window_seconds:
            raise BadMeasurement(
                f"the counter of {self.info.name} ticks every {self.tick_seconds:.3g} s, so that "
                f"{settings.min_ticks} ticks take {least_seconds:.3g} s, but windows end at "
                f"max_window_seconds={settings.max_window_seconds:g}. Raise that, or choose a faster meter."
            )
        self._load, self._chunk_seconds = load, chunk_seconds
        self._meter, self._settings, self._clock = meter, settings, clock
        stall_seconds = max(1.0, 10 * self.tick_seconds)
        self._watch = CounterWatch(meter, clock, stall_seconds=stall_seconds)
        self._gap_seconds = 0.0
        self._quiet_seconds = 0.0
        self._quiet_until = -math.inf

    def warm_up(self) -> None:
        """Runs until clocks and sensor are settled, and learns how closely the counter can be watched."""
        started, seconds = self._clock.now(), max(self._settings.warmup_seconds, self.info.settle_seconds)
        while self._clock.now() - started < seconds or self._load.chunks_done < 2:
            if not self._load.advance():
                self._clock.sleep(POLL_SECONDS)
            self._watch.poll()
        self._gap_seconds = self._watch.usual_gap_seconds
        if self.tick_seconds > 8 * self._gap_seconds:
            self._quiet_seconds = (1 - _JITTER) * self.tick_seconds - self._gap_seconds
        elif not self._sees_ticks:
            self._quiet_seconds = self._needed_seconds / _READS_A_WINDOW

    def windows(self) -> Iterator[Window]:
        """Cuts windows until they agree."""
        joules: list[float] = []
        while True:
            window = self._window()
            joules.append(window.joules)
            yield window
            interval = relative_interval(joules)
            agreed = interval is not None and interval <= self._settings.target_relative_ci
            if len(joules) >= self._settings.max_repeats:
                return
            if len(joules) >= self._settings.min_repeats and agreed:
                return

    # ------------------------------------------------------------ one window

    @property
    def _sees_ticks(self) -> bool:
        """Whether the counter is read often enough to tell its ticks apart."""
        return self._gap_seconds < 0.5 * self.tick_seconds

    def _blur(self, gap_seconds: float) -> float:
        """How far the counter may be from its last reading, in time: a gap, but never more than a period."""
        return min(gap_seconds, self.tick_seconds)

    @property
    def _edge_target(self) -> float:
        """A third of the interval that is asked for may come from the edges of a window."""
        return self._settings.target_relative_ci / 3

    @property
    def _tick_target(self) -> float:
        """The rest of it may come from how its ticks differ."""
        return self._settings.target_relative_ci - self._edge_target

    @property
    def _needed_seconds(self) -> float:
        """Length of a window: as asked, of enough ticks, and long enough for how sharp its edges are."""
        needed = max(
            self._settings.window_seconds,
            self._settings.min_ticks * self.tick_seconds,
            0.41 * self._blur(self._gap_seconds) / self._edge_target,
            _MIN_CHUNKS * self._chunk_seconds if isinstance(self._load, QueuedWorkload) else 0.0,
        )
        return min(needed, self._settings.max_window_seconds)

    def _is_sharp(self, tick: Tick) -> bool:
        blur = self._blur(tick.gap_seconds)
        allowed = self._edge_target * self._needed_seconds / 0.41
        return blur <= max(allowed, 1.5 * self._blur(self._gap_seconds))

    def _next_tick(self) -> Tick:
        """Keeps the device busy until the counter moves."""
        while True:
            worked = self._load.advance()
            if self._clock.now() >= self._quiet_until:
                tick = self._watch.poll()
                if tick is not None:
                    unseen = tick.gap_seconds if self._sees_ticks else 0.0  # it may have come that much earlier
                    self._quiet_until = tick.seconds - unseen + self._quiet_seconds
                    return tick
            if not worked:
                self._clock.sleep(POLL_SECONDS)

    def _first_tick(self) -> Tick:
        for _ in range(_MAX_BLURRED_TICKS):
            tick = self._next_tick()
            if self._is_sharp(tick):
                return tick
        self._quiet_seconds = 0.0  # ticks come too unevenly to look away in between
        return self._next_tick()

    def _window(self) -> Window:
        start = self._first_tick()
        self._load.forget_before(start.seconds)
        read_seconds = self._watch.read_seconds
        chunks, host_bound = self._load.chunks_done, self._load.chunks_host_bound
        ticks = self._ticks_from(start)
        end = ticks[-1]
        read_seconds = self._watch.read_seconds - read_seconds
        chunks = max(1, self._load.chunks_done - chunks)
        host_bound = self._load.chunks_host_bound - host_bound
        done = self._runs_at(end.seconds) - self._runs_at(start.seconds)
        state = device_state(self._meter)
        check_state(state, self.info, self._settings)
        check_steps(self.info.name, ticks, self.tick_seconds, self.info.max_watts)
        seconds = end.seconds - start.seconds
        blur = math.hypot(self._blur(start.gap_seconds), self._blur(end.gap_seconds))
        return Window(
            joules=(end.joules - start.joules) / done,
            seconds=seconds / done,
            window_seconds=seconds,
            inferences=done,
            ticks=len(ticks) - 1 if self._sees_ticks else math.floor(seconds / self.tick_seconds),
            edge_error=blur / math.sqrt(12) / seconds,  # a tick is anywhere in its gap: uniform
            polling_share=read_seconds / seconds,
            host_bound_share=min(1.0, host_bound / chunks),
            state=state,
        )

    def _ticks_from(self, start: Tick) -> list[Tick]:
        """Ticks up to the first sharp one after the needed time at which they agree, or are as many as allowed."""
        # A quarter of a period less: the last tick of N periods must not be missed for having come early.
        needed = self._needed_seconds - 0.25 * self.tick_seconds
        ticks, blurred, most = [start], 0, 0
        while True:
            tick = self._next_tick()
            ticks.append(tick)
            seconds, count = tick.seconds - start.seconds, len(ticks) - 1
            enough = count >= self._settings.min_ticks or not self._sees_ticks
            if seconds >= needed and enough:
                most = most or count + _MAX_MORE_TICKS
                if self._sees_ticks and count < most and tick_error(ticks, self.tick_seconds) > self._tick_target:
                    continue
                if self._is_sharp(tick) or blurred >= _MAX_BLURRED_TICKS:
                    return ticks
                blurred += 1
            if not enough and seconds > 2 * self._settings.max_window_seconds:
                raise BadMeasurement(
                    f"the counter of {self.info.name} ticked only {count} times in {seconds:.1f} s; a window "
                    f"needs {self._settings.min_ticks}. Lower min_ticks knowingly, or choose a faster meter."
                )

    def _runs_at(self, seconds: float) -> float:
        while (runs := self._load.done_at(seconds)) is None:
            if not self._load.advance():
                self._clock.sleep(POLL_SECONDS)
        return runs


def tick_error(ticks: Sequence[Tick], tick_seconds: float) -> float:
    """Relative standard error of the mean joules of a tick, as those of a window differ; 0 for a single one.

    Args:
        ticks: Of the window, its first edge included.
        tick_seconds: Period of the counter. Where a tick was missed, its joules are in the next one.
    """
    joules = [
        (later.joules - earlier.joules) / max(1, round((later.seconds - earlier.seconds) / tick_seconds))
        for earlier, later in itertools.pairwise(ticks)
    ]
    if len(joules) < 2:
        return 0.0
    return statistics.stdev(joules) / math.sqrt(len(joules)) / statistics.fmean(joules)


def check_state(state: DeviceState | None, info: MeterInfo, settings: MeasureSettings) -> None:
    """Refuses a device that others use or that throttles.

    Raises:
        BadMeasurement: Unless the settings allow it.
    """
    if state is None:
        return
    if state.other_processes and not settings.allow_shared:
        raise BadMeasurement(
            f"{info.device} is shared with {', '.join(state.other_processes)}, whose joules would be counted "
            "as ours. Wait for it or end it; allow_shared=True measures all the same."
        )
    if state.throttling and not settings.allow_throttling:
        heat = "" if state.temperature_celsius is None else f" at {state.temperature_celsius:.0f} C"
        raise BadMeasurement(
            f"{info.device} throttles{heat} ({', '.join(state.throttling)}), so its clocks change under the "
            "measurement. Let it cool, or improve its cooling; allow_throttling=True measures all the same."
        )


def device_state(meter: Meter) -> DeviceState | None:
    """How the device is, if its meter can tell."""
    return meter.state() if isinstance(meter, HasState) else None
