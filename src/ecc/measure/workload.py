"""Workloads: keep a device busy with one network while its counter is read.

    HostWorkload     the host computes a chunk, then reads the counter
    QueuedWorkload   the device works on queued chunks while the host reads the counter

Work comes in chunks of a few milliseconds, so that the counter can be read in between.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch

from .meter import Clock

CHUNK_SECONDS = 0.004
"""Length of a chunk: short enough for counters that tick every 10 ms, long enough to hide the reading of a counter."""

_MAX_CALIBRATION_RUNS = 1 << 14
_MIN_QUEUED_SECONDS = 0.02  # bridges short stalls of the host
_QUEUED_READS = 8  # NVML readings take 2 to 4 ms on an H200, occasionally 14
_HOST_CHUNK_READS = 3  # chunk length in readings, so that a host that computes spends most of its time computing


class Event(Protocol):
    """A marker in a device's queue."""

    def query(self) -> bool:
        """Whether the device has passed the marker."""


@runtime_checkable
class Workload(Protocol):
    """Endless work, and a count of the completed runs."""

    chunks_done: int
    """Chunks completed so far."""

    chunks_host_bound: int
    """Chunks that were queued too late to keep the device busy."""

    def advance(self) -> bool:
        """Keep the device busy. Returns whether the host worked, so that it need not sleep."""

    def done_at(self, seconds: float) -> float | None:
        """Runs completed by that time; None if not known yet (call `advance` and try again)."""

    def forget_before(self, seconds: float) -> None:
        """Drop the record of runs before that time."""

    def drain(self) -> None:
        """Wait until the queue is empty."""


class _RunLog:
    """Times and cumulative counts of completed runs."""

    def __init__(self, clock: Clock) -> None:
        self.seconds = [clock.now()]
        self.counts = [0]

    def add(self, seconds: float, runs: int) -> None:
        self.seconds.append(seconds)
        self.counts.append(self.counts[-1] + runs)

    def forget_before(self, seconds: float) -> None:
        keep = max(0, bisect.bisect_right(self.seconds, seconds) - 1)
        del self.seconds[:keep], self.counts[:keep]


class HostWorkload:
    """Work that is complete when its function returns: networks on the CPU.

    Args:
        run: Computes one run.
        num_runs: Runs in a chunk.
        clock: Time functions.
        synchronize: Waits for the device after each chunk, for devices without events.
    """

    def __init__(
        self,
        run: Callable[[], object],
        num_runs: int,
        clock: Clock,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self._run, self._num_runs, self._clock, self._synchronize = run, num_runs, clock, synchronize
        self._log = _RunLog(clock)
        self.chunks_done = 0
        self.chunks_host_bound = 0

    def advance(self) -> bool:
        """Compute one chunk."""
        for _ in range(self._num_runs):
            self._run()
        if self._synchronize is not None:
            self._synchronize()
        self._log.add(self._clock.now(), self._num_runs)
        self.chunks_done += 1
        return True

    def done_at(self, seconds: float) -> float:
        """Exact count: nothing runs between two chunks."""
        return float(self._log.counts[max(0, bisect.bisect_right(self._log.seconds, seconds) - 1)])

    def forget_before(self, seconds: float) -> None:
        """Drop the record of runs before that time."""
        self._log.forget_before(seconds)

    def drain(self) -> None:
        """Nothing is ever queued."""


class QueuedWorkload:
    """Work in a device's queue, always some chunks ahead, so that the device never idles.

    Args:
        run: Queues one run and returns.
        num_runs: Runs in a chunk.
        clock: Time functions.
        mark: Puts a marker at the end of the queue.
        synchronize: Waits until the queue is empty.
        depth: Chunks in the queue, including the one that is running.
    """

    def __init__(
        self,
        run: Callable[[], object],
        num_runs: int,
        clock: Clock,
        *,
        mark: Callable[[], Event],
        synchronize: Callable[[], object],
        depth: int = 2,
    ) -> None:
        self._run, self._num_runs, self._clock = run, num_runs, clock
        self._mark, self._synchronize, self._depth = mark, synchronize, depth
        self._queued: deque[Event] = deque()
        self._was_ahead = False
        self._log = _RunLog(clock)
        self.chunks_done = 0
        self.chunks_host_bound = 0

    def advance(self) -> bool:
        """Record completed chunks, and queue one more unless the queue is full."""
        self._log_completed()
        if len(self._queued) >= self._depth:
            self._was_ahead = True
            return False
        self.chunks_host_bound += len(self._queued) < 2 and not self._was_ahead
        self._was_ahead = False
        for _ in range(self._num_runs):
            self._run()
        self._queued.append(self._mark())
        return True

    def done_at(self, seconds: float) -> float | None:
        """Count interpolated within the chunk that was running; None until that chunk is complete."""
        log = self._log
        after = bisect.bisect_left(log.seconds, seconds)
        if after == len(log.seconds):
            return None
        if after == 0:
            return float(log.counts[0])
        (t0, t1), (n0, n1) = log.seconds[after - 1 : after + 1], log.counts[after - 1 : after + 1]
        return n0 + (n1 - n0) * (seconds - t0) / (t1 - t0)

    def forget_before(self, seconds: float) -> None:
        """Drop the record of runs before that time."""
        self._log.forget_before(seconds)

    def drain(self) -> None:
        """Wait until the queue is empty."""
        self._synchronize()
        self._log_completed()

    def _log_completed(self) -> None:
        while self._queued and self._queued[0].query():
            self._queued.popleft()
            self._log.add(self._clock.now(), self._num_runs)
            self.chunks_done += 1


def make_workload(
    run: Callable[[], object], device_type: str, clock: Clock, *, read_seconds: float = 0.0
) -> tuple[Workload, float]:
    """Create the workload for a device, with chunks of about `CHUNK_SECONDS`.

    Args:
        run: One run, queued or computed on the current device.
        device_type: torch device type: cpu, cuda, mps, ...
        clock: Time functions.
        read_seconds: Duration of one counter reading. The device must not run out of work meanwhile.

    Returns:
        The workload, and the actual length of its chunks.
    """
    backend: Any = None if device_type == "cpu" else getattr(torch, device_type)
    synchronize: Callable[[], object] = (lambda: None) if backend is None else backend.synchronize
    is_queued = device_type == "cuda"
    chunk_seconds = CHUNK_SECONDS if is_queued else max(CHUNK_SECONDS, _HOST_CHUNK_READS * read_seconds)
    run_seconds = _time_run(run, synchronize, clock, chunk_seconds)
    num_runs = max(1, round(chunk_seconds / run_seconds))
    load: Workload
    if is_queued:
        depth = queue_depth(num_runs * run_seconds, read_seconds)
        load = QueuedWorkload(run, num_runs, clock, mark=_cuda_event, synchronize=synchronize, depth=depth)
    else:
        load = HostWorkload(run, num_runs, clock, None if backend is None else synchronize)
    return load, num_runs * run_seconds


def queue_depth(chunk_seconds: float, read_seconds: float) -> int:
    """Number of chunks to queue: the running one, and enough behind it to bridge a stall of the host."""
    return 1 + max(1, math.ceil(max(_MIN_QUEUED_SECONDS, _QUEUED_READS * read_seconds) / chunk_seconds))


def _time_run(
    run: Callable[[], object], synchronize: Callable[[], object], clock: Clock, chunk_seconds: float
) -> float:
    """Seconds of one run; the number of runs doubles until they take half a chunk."""
    num_runs = 1
    while True:
        synchronize()
        started = clock.now()
        for _ in range(num_runs):
            run()
        synchronize()
        seconds = clock.now() - started
        if seconds >= 0.5 * chunk_seconds or num_runs >= _MAX_CALIBRATION_RUNS:
            return max(seconds / num_runs, 1e-9)
        num_runs *= 2


def _cuda_event() -> Event:
    event = torch.cuda.Event()
    event.record()
    return event
