"""Workloads: keep a device busy with one network while its counter is read.

    HostWorkload     the host computes a chunk, then reads the counter
    QueuedWorkload   the device works on queued chunks while the host reads the counter

Work comes in chunks of a few milliseconds, so that the counter can be read in between.
"""

from __future__ import annotations

import bisect
import importlib
import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from .meter import Clock

CHUNK_SECONDS = 0.004
"""Length of a chunk: short enough for counters that tick every 10 ms, long enough to hide the reading of a counter."""

_MAX_CALIBRATION_RUNS = 1 << 14
_MIN_QUEUED_SECONDS = 0.02  # bridges short stalls of the host
_QUEUED_READS = 8  # NVML readings take 2 to 4 ms on an H200, occasionally 14
_HOST_CHUNK_READS = 3  # chunk length in readings, so that a host that computes spends most of its time computing


IsDone: TypeAlias = Callable[[], bool]
"""Whether the device has passed a marker in its queue."""


class Workload:
    """Endless work in chunks, and a record of the completed runs.

    Args:
        run: Computes or queues one run.
        num_runs: Runs in a chunk.
        clock: Time functions.
    """

    def __init__(self, run: Callable[[], object], num_runs: int, clock: Clock) -> None:
        self.chunks_done = 0
        """Chunks completed so far."""
        self.chunks_host_bound = 0
        """Chunks that were queued too late to keep the device busy."""
        self._run, self._num_runs, self._clock = run, num_runs, clock
        self._seconds, self._counts = [clock.now()], [0]  # times and cumulative counts of completed runs

    def advance(self) -> bool:
        """Keep the device busy. Returns whether the host worked, so that it need not sleep."""
        raise NotImplementedError

    def done_at(self, seconds: float) -> float | None:
        """Runs completed by that time; None if not known yet (call `advance` and try again)."""
        raise NotImplementedError

    def drain(self) -> None:
        """Wait until the queue is empty."""

    def forget_before(self, seconds: float) -> None:
        """Drop the record of runs before that time."""
        keep = max(0, bisect.bisect_right(self._seconds, seconds) - 1)
        del self._seconds[:keep], self._counts[:keep]

    def _run_chunk(self) -> None:
        for _ in range(self._num_runs):
            self._run()

    def _log_chunk(self) -> None:
        self._seconds.append(self._clock.now())
        self._counts.append(self._counts[-1] + self._num_runs)
        self.chunks_done += 1


class HostWorkload(Workload):
    """Work that is complete when its function returns: networks on the CPU.

    Args:
        synchronize: Waits for the device after each chunk, for devices without events.
    """

    def __init__(
        self, run: Callable[[], object], num_runs: int, clock: Clock, synchronize: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(run, num_runs, clock)
        self._synchronize = synchronize

    def advance(self) -> bool:
        """Compute one chunk."""
        self._run_chunk()
        self._synchronize()
        self._log_chunk()
        return True

    def done_at(self, seconds: float) -> float:
        """Exact count: nothing runs between two chunks."""
        return float(self._counts[max(0, bisect.bisect_right(self._seconds, seconds) - 1)])


class QueuedWorkload(Workload):
    """Work in a device's queue, always some chunks ahead, so that the device never idles.

    Args:
        mark: Puts a marker at the end of the queue, and returns whether the device has passed it.
        synchronize: Waits until the queue is empty.
        depth: Chunks in the queue, including the one that is running.
    """

    def __init__(
        self,
        run: Callable[[], object],
        num_runs: int,
        clock: Clock,
        *,
        mark: Callable[[], IsDone],
        synchronize: Callable[[], object],
        depth: int = 2,
    ) -> None:
        super().__init__(run, num_runs, clock)
        self._mark, self._synchronize, self._depth = mark, synchronize, depth
        self._queued: deque[IsDone] = deque()
        self._was_ahead = False

    def advance(self) -> bool:
        """Record completed chunks, and queue one more unless the queue is full."""
        self._log_completed()
        if len(self._queued) >= self._depth:
            self._was_ahead = True
            return False
        self.chunks_host_bound += len(self._queued) < 2 and not self._was_ahead
        self._was_ahead = False
        self._run_chunk()
        self._queued.append(self._mark())
        return True

    def done_at(self, seconds: float) -> float | None:
        """Count interpolated within the chunk that was running; None until that chunk is complete."""
        after = bisect.bisect_left(self._seconds, seconds)
        if after == len(self._seconds):
            return None
        if after == 0:
            return float(self._counts[0])
        (t0, t1), (n0, n1) = self._seconds[after - 1 : after + 1], self._counts[after - 1 : after + 1]
        return n0 + (n1 - n0) * (seconds - t0) / (t1 - t0)

    def drain(self) -> None:
        """Wait until the queue is empty."""
        self._synchronize()
        self._log_completed()

    def _log_completed(self) -> None:
        while self._queued and self._queued[0]():
            self._queued.popleft()
            self._log_chunk()


def make_workload(
    run: Callable[[], object],
    device_type: str,
    clock: Clock,
    *,
    read_seconds: float = 0.0,
    is_asynchronous: bool = True,
) -> tuple[Workload, float]:
    """Create the workload for a device, with chunks of about `CHUNK_SECONDS`.

    Args:
        run: One run, queued or computed on the current device.
        device_type: torch device type: cpu, cuda, mps, ...
        clock: Time functions.
        read_seconds: Duration of one counter reading. The device must not run out of work meanwhile.
        is_asynchronous: Whether `run` returns before the device is done; on the CPU it never does.

    Returns:
        The workload, and the actual length of its chunks.
    """
    is_asynchronous = is_asynchronous and device_type != "cpu"
    backend: Any = getattr(importlib.import_module("torch"), device_type) if is_asynchronous else None
    synchronize: Callable[[], object] = (lambda: None) if backend is None else backend.synchronize
    is_queued = is_asynchronous and device_type == "cuda"
    chunk_seconds = CHUNK_SECONDS if is_queued else max(CHUNK_SECONDS, _HOST_CHUNK_READS * read_seconds)
    run_seconds = _time_run(run, synchronize, clock, chunk_seconds)
    num_runs = max(1, round(chunk_seconds / run_seconds))
    load: Workload
    if is_queued:
        depth = queue_depth(num_runs * run_seconds, read_seconds)
        load = QueuedWorkload(run, num_runs, clock, mark=_mark_cuda_queue, synchronize=synchronize, depth=depth)
    else:
        load = HostWorkload(run, num_runs, clock, synchronize)
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


def _mark_cuda_queue() -> IsDone:
    event: Any = importlib.import_module("torch").cuda.Event()
    event.record()
    is_done: IsDone = event.query
    return is_done
