"""Paired differences with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t

from ecc.measure.measurement import t_quantile


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences, and half the width of its confidence interval."""

    mean: float
    half_width: float
    """Infinite for a single pair."""
    pairs: int

    @property
    def side(self) -> str:
        """ahead or behind where the interval excludes zero, otherwise undecided."""
        if abs(self.mean) <= self.half_width:
            return "undecided"
        return "ahead" if self.mean > 0 else "behind"

    def __str__(self) -> str:
        spread = "one pair" if math.isinf(self.half_width) else f"± {self.half_width:.2f}"
        return f"{self.mean:+.2f} ({spread})"


def paired_interval(differences: Sequence[float], comparisons: int = 1) -> Interval:
    """The 95 % interval of Student's t of the mean of paired differences.

    Args:
        differences: One for each pair.
        comparisons: If there are several, all intervals together have this confidence (Bonferroni).
    """
    count, mean = len(differences), statistics.fmean(differences)
    if count < 2:
        return Interval(mean, math.inf, count)
    error = statistics.stdev(differences) / math.sqrt(count)
    quantile = t_quantile(count - 1) if comparisons == 1 else float(t.ppf(1 - 0.025 / comparisons, count - 1))
    return Interval(mean, quantile * error, count)
