"""Drift: how the device changed while a profile was measured, seen on one reference network.

A device warms up, and its energy for the same work with it. The dense network is measured again and again
between the others; between two such measurements its energy is taken to run straight, on a logarithmic scale,
and the others are divided by it. A reference that only scatters is not divided by: that would add its noise.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CV = 0.03
"""A reference that varies by more than this (standard deviation / mean) makes a profile doubtful."""

_QUANTILE = 1.645  # one-sided 5 % of the normal distribution


@dataclass(frozen=True)
class Point:
    """One sample of a profile, as drift sees it."""

    session: int
    """Rows of one session were measured without a break; drift is not followed across breaks."""

    value: float
    """Joules or seconds, positive."""

    is_reference: bool


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How one reference network varied over a profile."""

    references: int
    """How often it was measured."""

    cv: float
    """Standard deviation / mean of all its measurements; 0 for a single one."""

    span: float
    """Largest over smallest, less one."""

    noise: float
    """Standard deviation of a single measurement as neighbours in time tell it: drift is left out."""

    is_significant: bool
    """Whether neighbours in time agree better than chance: only then is drift divided out."""

    @property
    def is_steady(self) -> bool:
        """Whether the reference varied little enough to trust the profile."""
        return self.cv <= MAX_CV

    def __str__(self) -> str:
        rule = "divided out" if self.is_significant else "no more than its scatter, left in"
        return (
            f"reference measured {self.references} times: spread {self.cv:.2%}, "
            f"of which noise {self.noise:.2%}; drift {rule}"
        )


def drift_of(points: Sequence[Point]) -> Drift | None:
    """How the references varied; None without any."""
    references = [point for point in points if point.is_reference]
    if not references:
        return None
    values = [point.value for point in references]
    mean = statistics.fmean(values)
    logs = [math.log(value) for value in values]
    cv = statistics.stdev(values) / mean if len(values) > 1 else 0.0
    mean_square_step, ratio = _steps(references, logs)
    # Von Neumann's ratio: 1 for independent values, towards 0 for slow changes. Its variance for normal
    # values is (n - 2) / (n^2 - 1), Young 1941.
    n = len(values)
    critical = 1 - _QUANTILE * math.sqrt((n - 2) / (n * n - 1)) if n > 2 else 0.0
    return Drift(
        references=n,
        cv=cv,
        span=max(values) / min(values) - 1,
        noise=math.sqrt(0.5 * mean_square_step),
        is_significant=ratio < critical,
    )


def log_drift(points: Sequence[Point]) -> list[float]:
    """For each sample, the logarithm of how much more than usual the device used at that time.

    Usual is the median of the references. Before the first reference of a session and after its last, the
    nearest one counts.
    """
    drift = drift_of(points)
    if drift is None or not drift.is_significant:
        return [0.0] * len(points)
    usual = math.log(statistics.median(point.value for point in points if point.is_reference))
    knots: dict[int, list[tuple[int, float]]] = {}
    for position, point in enumerate(points):
        if point.is_reference:
            knots.setdefault(point.session, []).append((position, math.log(point.value) - usual))
    return [
        _interpolated(knots[point.session], position) if point.session in knots else 0.0
        for position, point in enumerate(points)
    ]


def _steps(references: Sequence[Point], logs: Sequence[float]) -> tuple[float, float]:
    """Mean square difference of neighbours within a session, and its ratio to twice the variance."""
    squares = [
        (logs[i + 1] - logs[i]) ** 2 for i in range(len(logs) - 1) if references[i].session == references[i + 1].session
    ]
    variance = statistics.variance(logs) if len(logs) > 1 else 0.0
    if not squares or variance == 0:
        return 0.0, 1.0
    mean_square = statistics.fmean(squares)
    return mean_square, mean_square / (2 * variance)


def _interpolated(knots: Sequence[tuple[int, float]], position: int) -> float:
    """At a position; knots are in ascending order, and are searched by halves, as a long profile has many."""
    after = bisect_right(knots, (position, math.inf))
    if after in (0, len(knots)):
        return knots[min(after, len(knots) - 1)][1]
    (x0, y0), (x1, y1) = knots[after - 1], knots[after]
    return y0 + (y1 - y0) * (position - x0) / (x1 - x0)
