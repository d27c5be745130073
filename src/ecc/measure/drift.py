"""Drift of a device during a profile, observed on the dense reference network.

A device warms up, and the energy of the same work changes. The dense network is therefore measured again and again
between the samples. Between two such measurements its energy is interpolated linearly on a logarithmic scale, and the
samples are divided by it. If the reference only shows noise, nothing is divided: that would add its noise.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MAX_CV = 0.03
"""Largest coefficient of variation (std / mean) of the reference for which a profile is trusted."""

_QUANTILE = 1.645  # one-sided 5 % of the normal distribution


@dataclass(frozen=True)
class Point:
    """One measurement, as far as drift needs it."""

    session: int
    """Measurements of one session were made without a break. Drift is not interpolated across breaks."""
    value: float
    """Joules or seconds."""
    is_reference: bool


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Variation of the reference over a profile."""

    references: int
    """Number of reference measurements."""
    cv: float
    """Standard deviation / mean of all reference measurements; 0 for a single one."""
    span: float
    """Largest / smallest - 1."""
    noise: float
    """Standard deviation of a single measurement without drift, from neighbours in time."""
    is_significant: bool
    """Whether neighbours in time agree better than chance. Only then is drift divided out."""

    @property
    def is_steady(self) -> bool:
        """Whether the reference varied little enough to trust the profile."""
        return self.cv <= MAX_CV

    def __str__(self) -> str:
        rule = "drift corrected" if self.is_significant else "no significant drift"
        return f"reference measured {self.references} times: std {self.cv:.2%}, noise {self.noise:.2%}; {rule}"


def reference_drift(points: Sequence[Point]) -> Drift | None:
    """Variation of the reference measurements among `points`; None without any."""
    references = [point for point in points if point.is_reference]
    if not references:
        return None
    values = [point.value for point in references]
    logs = [math.log(value) for value in values]
    mean_square_step, ratio = _neighbour_steps(references, logs)
    # Von Neumann's ratio is 1 for independent values and approaches 0 for slow changes. Its variance for normal
    # values is (n - 2) / (n^2 - 1), Young 1941.
    n = len(values)
    critical = 1 - _QUANTILE * math.sqrt((n - 2) / (n * n - 1)) if n > 2 else 0.0
    return Drift(
        references=n,
        cv=statistics.stdev(values) / statistics.fmean(values) if n > 1 else 0.0,
        span=max(values) / min(values) - 1,
        noise=math.sqrt(0.5 * mean_square_step),
        is_significant=ratio < critical,
    )


def log_drift(points: Sequence[Point]) -> list[float]:
    """For each point, the logarithm of reference energy at that time / median reference energy.

    Before the first and after the last reference of a session, the nearest reference counts.
    """
    drift = reference_drift(points)
    if drift is None or not drift.is_significant:
        return [0.0] * len(points)
    usual = math.log(statistics.median(point.value for point in points if point.is_reference))
    knots: dict[int, list[tuple[int, float]]] = {}
    for position, point in enumerate(points):
        if point.is_reference:
            knots.setdefault(point.session, []).append((position, math.log(point.value) - usual))
    return [
        _interpolate(knots[point.session], position) if point.session in knots else 0.0
        for position, point in enumerate(points)
    ]


def _neighbour_steps(references: Sequence[Point], logs: Sequence[float]) -> tuple[float, float]:
    """Mean square difference of neighbours within a session, and its ratio to twice the variance."""
    squares = [
        (logs[i + 1] - logs[i]) ** 2 for i in range(len(logs) - 1) if references[i].session == references[i + 1].session
    ]
    variance = statistics.variance(logs) if len(logs) > 1 else 0.0
    if not squares or variance == 0:
        return 0.0, 1.0
    mean_square = statistics.fmean(squares)
    return mean_square, mean_square / (2 * variance)


def _interpolate(knots: Sequence[tuple[int, float]], position: int) -> float:
    after = bisect_right(knots, (position, math.inf))
    if after in (0, len(knots)):
        return knots[min(after, len(knots) - 1)][1]
    (x0, y0), (x1, y1) = knots[after - 1], knots[after]
    return y0 + (y1 - y0) * (position - x0) / (x1 - x0)
