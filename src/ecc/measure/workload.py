"""Keeping a device busy with one network while its counter is read.

    host    work   work   work   |  the counter is read between two chunks
    queue   work work work work     the counter is read while the device works on chunks queued before

Work comes in chunks of some milliseconds, so that the counter can be watched between them.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from .meter import Clock

CHUNK_SECONDS = 0.004
"""Short enough to see ticks of some 10 ms, long enough to hide the reading of a counter."""

_MAX_CALIBRATION_RUNS = 1 << 14
_AHEAD_SECONDS = 0.02  # queued at least, for a host that is held up
_AHEAD_READS = 8  # readings of the counter; NVML's take 2 to 4 ms on an H200, and now and then 14
_HOST_CHUNK_READS = 3  # so that a host that computes itself spends most of its time at that


class Event(Protocol):
    """A mark in a device's queue."""

    def query(self) -> bool:
        """Whether the device has passed it."""


@runtime_checkable
class Workload(Protocol):
    """Work without end, and a count of what is done."""

    chunks_done: int
    """Chunks completed so far."""

    chunks_host_bound: int
    """Chunks that the host queued without having been ahead of the device: launches set the pace."""

    def advance(self) -> bool:
        """Keeps the device busy; True if the host worked meanwhile, so that it need not rest."""

    def done_at(self, seconds: float) -> float | None:
        """Runs completed by that time; None if it is not known yet: advance, and ask again."""

    def forget_before(self, seconds: float) -> None:
        """Lets go of the record of what was done before that time."""

    def drain(self) -> None:
        """Waits until nothing is queued."""


class _Record:
    """When how many runs were done."""

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
    """Work that is over when its function returns: networks on the CPU.

    Args:
        run: One run.
        num_runs: Runs in a chunk.
        clock: The time.
        synchronize: Waits for a device after each chunk, for devices without events to query.
    """

    def __init__(
        self,
        run: Callable[[], object],
        num_runs: int,
        clock: Clock,
        synchronize: Callable[[], object] | None = None,
    ) -> None:
        self._run = run
        self._num_runs = num_runs
        self._clock = clock
        self._synchronize = synchronize
        self._record = _Record(clock)
        self.chunks_done = 0
        self.chunks_host_bound = 0

    def advance(self) -> bool:
        """Computes one chunk."""
        for _ in range(self._num_runs):
            self._run()
        if self._synchronize is not None:
            self._synchronize()
        self._record.add(self._clock.now(), self._num_runs)
        self.chunks_done += 1
        return True

    def done_at(self, seconds: float) -> float:
        """Exact: nothing runs between two chunks."""
        record = self._record
        return float(record.counts[max(0, bisect.bisect_right(record.seconds, seconds) - 1)])

    def forget_before(self, seconds: float) -> None:
        """Lets go of the record of what was done before that time."""
        self._record.forget_before(seconds)

    def drain(self) -> None:
        """Nothing is ever queued."""


class QueuedWorkload:
    """Work that is put into a device's queue, always some chunks ahead, so that the device never waits.

    Args:
        run: Queues one run and returns.
        num_runs: Runs in a chunk.
        clock: The time.
        mark: Puts a mark into the queue, behind what is there.
        synchronize: Waits until the queue is empty.
        depth: Chunks in the queue, the one at work included.
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
        self._run = run
        self._num_runs = num_runs
        self._clock = clock
        self._mark = mark
        self._synchronize = synchronize
        self._depth = depth
        self._queued: deque[Event] = deque()
        self._was_ahead = False
        self._record = _Record(clock)
        self.chunks_done = 0
        self.chunks_host_bound = 0

    def advance(self) -> bool:
        """Notes what is done and puts one chunk into the queue if it is not full."""
        self._note_done()
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
        """Interpolated within the chunk that was at work; None until that chunk is done."""
        record = self._record
        after = bisect.bisect_left(record.seconds, seconds)
        if after == len(record.seconds):
            return None
        if after == 0:
            return float(record.counts[0])
        (t0, t1), (n0, n1) = record.seconds[after - 1 : after + 1], record.counts[after - 1 : after + 1]
        return n0 + (n1 - n0) * (seconds - t0) / (t1 - t0)

    def forget_before(self, seconds: float) -> None:
        """Lets go of the record of what was done before that time."""
        self._record.forget_before(seconds)

    def drain(self) -> None:
        """Waits until the queue is empty."""
        self._synchronize()
        self._note_done()

    def _note_done(self) -> None:
        while self._queued and self._queued[0].query():
            self._queued.popleft()
            self._record.add(self._clock.now(), self._num_runs)
            self.chunks_done += 1


def make_workload(
    run: Callable[[], object], device_type: str, clock: Clock, *, read_seconds: float = 0.0
) -> tuple[Workload, float]:
    """The load for a device, its chunks calibrated.

    Args:
        run: One run, queued or computed on the current device.
        device_type: torch's name: cpu, cuda, mps, ...
        clock: The time.
        read_seconds: How long a reading of the counter takes. The device must not run out of work meanwhile.

    Returns:
        The load, and how long its chunks really are.
    """
    synchronize = _synchronize(device_type)
    is_queued = device_type == "cuda"
    chunk_seconds = CHUNK_SECONDS if is_queued else max(CHUNK_SECONDS, _HOST_CHUNK_READS * read_seconds)
    run_seconds = _time_of_a_run(run, synchronize, clock, chunk_seconds)
    num_runs = max(1, round(chunk_seconds / run_seconds))
    load: Workload
    if is_queued:
        depth = queue_depth(num_runs * run_seconds, read_seconds)
        load = QueuedWorkload(run, num_runs, clock, mark=_cuda_mark, synchronize=synchronize, depth=depth)
    else:
        load = HostWorkload(run, num_runs, clock, synchronize if device_type != "cpu" else None)
    return load, num_runs * run_seconds


def queue_depth(chunk_seconds: float, read_seconds: float) -> int:
    """Chunks to queue: one at work, and enough behind it for as long as the host may be held up."""
    return 1 + max(1, math.ceil(max(_AHEAD_SECONDS, _AHEAD_READS * read_seconds) / chunk_seconds))


def _time_of_a_run(
    run: Callable[[], object], synchronize: Callable[[], object], clock: Clock, chunk_seconds: float
) -> float:
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


def _synchronize(device_type: str) -> Callable[[], object]:
    import torch

    if device_type == "cpu":
        return lambda: None
    backend: Any = getattr(torch, device_type)
    synchronize: Callable[[], object] = backend.synchronize
    return synchronize


def _cuda_mark() -> Event:
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
