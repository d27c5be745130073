"""Seconds of two ONNX files beside each other, measured here, on this CPU, by onnxruntime.

Blocks of the one and the other alternate, and each pair of neighbours gives one ratio: what slows the machine down for
a while slows both. Alternating does not help against other programs. With four times as much to do as there were cores,
one pair of files gave ratios from 3.1 to 4.3 by the clock on the wall, and 3.3 to 4.7 by the fastest runs: a short run
fits between two interruptions, and a long one does not. So one thread is timed by its own processor time, which does
not count waiting (3.0 to 3.1). Several threads have no such clock. The ratio is the number to trust; seconds are of
this machine and this moment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ecc.task import Inputs, batch_size_of

from .formats import feed_of, onnx_session

PAIRS = 11
BLOCK_SECONDS = 0.1
MIN_RUNS = 3
_FINE_SECONDS = 1e-5  # Windows counts in steps of some milliseconds

Clock = Callable[[], float]


@dataclass(frozen=True)
class Latency:
    """Two files, timed in turn."""

    dense_seconds: float
    """Median over blocks, for one batch."""
    slim_seconds: float
    ratio: float
    """Dense over slim, median over pairs of blocks: above 1 the slim one is faster."""
    ratio_range: tuple[float, float]
    """The second lowest and second highest of the pairs."""
    batch: int
    threads: int
    clock: str
    """`processor time` of the one thread, or `wall clock` with several."""
    label: str = "measured here, on this CPU, by onnxruntime"


def compare_latency(dense: Path, slim: Path, example_input: Inputs) -> Latency:
    """Times two ONNX files on the same inputs.

    Args:
        dense: The file of the dense network.
        slim: The file of the slim one.
        example_input: One batch.
    """
    sessions = [onnx_session(path) for path in (dense, slim)]
    feeds = [feed_of(session, example_input) for session in sessions]
    clock_name, clock = clock_of(torch.get_num_threads())
    counts = []
    for session, feed in zip(sessions, feeds, strict=True):
        _block(session, feed, MIN_RUNS, clock)  # the first runs allocate
        counts.append(max(MIN_RUNS, round(BLOCK_SECONDS / _block(session, feed, MIN_RUNS, clock))))
    times: list[tuple[float, float]] = []
    for number in range(PAIRS):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {which: _block(sessions[which], feeds[which], counts[which], clock) for which in order}
        times.append((found[0], found[1]))
    ratios = sorted(first / second for first, second in times)
    return Latency(
        dense_seconds=statistics.median(first for first, _ in times),
        slim_seconds=statistics.median(second for _, second in times),
        ratio=statistics.median(ratios),
        ratio_range=(ratios[1], ratios[-2]),
        batch=batch_size_of(example_input),
        threads=torch.get_num_threads(),
        clock=clock_name,
    )


def clock_of(threads: int) -> tuple[str, Clock]:
    """What to time by: the thread's own clock, where one thread does all the work and the system's is fine enough."""
    if threads == 1 and time.get_clock_info("thread_time").resolution <= _FINE_SECONDS:
        return "processor time", time.thread_time
    return "wall clock", time.perf_counter


def _block(session: Any, feed: dict[str, Any], runs: int, clock: Clock) -> float:
    """Median seconds of one run."""
    seconds = []
    for _ in range(runs):
        start = clock()
        session.run(None, feed)
        seconds.append(clock() - start)
    return statistics.median(seconds)
