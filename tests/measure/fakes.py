"""A board with a stepping joule counter, on a clock of its own: what the window is tested against."""

from __future__ import annotations

import random
from collections.abc import Callable

from ecc.measure import Clock, DeviceState, Measured, MeterInfo, Provenance
from ecc.measure.workload import QueuedWorkload


class FakeBoard:
    """Draws `busy_watts` while it has work, else `idle_watts`; its counter steps every `tick_seconds`.

    Args:
        tick_seconds: Period of the counter.
        idle_watts: Power without work.
        busy_watts: Power with work.
        phase: When the first tick comes, as a share of the period.
        noise: Relative standard deviation of a tick's joules.
        read_seconds: How long a reading takes.
        resolution_joules: What the counter rounds to.
        fault: Bends a reading: `fault(joules, now)`.
        seed: Of the noise.
    """

    def __init__(
        self,
        *,
        tick_seconds: float = 0.1,
        idle_watts: float = 80.0,
        busy_watts: float = 300.0,
        phase: float = 0.5,
        noise: float = 0.0,
        read_seconds: float = 20e-6,
        resolution_joules: float = 1e-3,
        fault: Callable[[float, float], float] = lambda joules, now: joules,
        seed: int = 0,
    ) -> None:
        self.tick_seconds = tick_seconds
        self.idle_watts = idle_watts
        self.busy_watts = busy_watts
        self.read_seconds = read_seconds
        self.fault = fault
        self.num_reads = 0
        self._noise = noise
        self._resolution = resolution_joules
        self._random = random.Random(seed)
        self._now = 1000.0
        self._busy_until = self._now
        self._next_tick = self._now + phase * tick_seconds
        self._since_tick = 0.0
        self._joules = 12_345.678
        self.clock = Clock(now=self.now, sleep=self.wait)

    # --- time -------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        """The host waits; the device works on if it has work."""
        end = self._now + seconds
        while self._now < end:
            busy = self._busy_until > self._now
            until = min(end, self._next_tick, self._busy_until if busy else end)
            self._since_tick += (until - self._now) * (self.busy_watts if busy else self.idle_watts)
            self._now = until
            if self._now >= self._next_tick:
                self._joules += self._since_tick * (1 + self._noise * self._random.gauss(0, 1))
                self._since_tick = 0.0
                self._next_tick += self.tick_seconds

    def work(self, seconds: float) -> None:
        """Host and device work together, as on a CPU."""
        self._busy_until = max(self._busy_until, self._now + seconds)
        self.wait(seconds)

    def queue(self, seconds: float, launch_seconds: float) -> None:
        """The host launches; the device works on it when it gets there."""
        self.wait(launch_seconds)
        self._busy_until = max(self._busy_until, self._now) + seconds

    def mark(self) -> Callable[[], bool]:
        end = self._busy_until
        return lambda: self._now >= end

    def queued(self, *, run_seconds: float, launch_seconds: float, depth: int = 2) -> QueuedWorkload:
        """Chunks of four runs in the device's queue."""
        return QueuedWorkload(
            lambda: self.queue(run_seconds, launch_seconds),
            4,
            self.clock,
            mark=self.mark,
            synchronize=self.synchronize,
            depth=depth,
        )

    def synchronize(self) -> None:
        self.wait(max(0.0, self._busy_until - self._now))

    # --- counter ----------------------------------------------------------------------------------------

    def read(self) -> float:
        self.num_reads += 1
        self.wait(self.read_seconds)
        joules = self.fault(self._joules, self._now)
        return round(joules / self._resolution) * self._resolution


class FakeMeter:
    """Meter of a fake board; `state` is what it tells of the device."""

    def __init__(
        self,
        board: FakeBoard,
        *,
        state: DeviceState | Callable[[], DeviceState] | None = None,
        provenance: Provenance | None = None,
        **info: object,
    ) -> None:
        self.board = board
        self._state = state if state is not None else DeviceState()
        named = {"name": "fake", "device": "fake board", "scope": "board", **info}
        self._info = MeterInfo(provenance=provenance or Measured(), **named)  # type: ignore[arg-type]

    def read(self) -> float:
        return self.board.read()

    def describe(self) -> MeterInfo:
        return self._info

    def state(self) -> DeviceState:
        return self._state() if callable(self._state) else self._state
