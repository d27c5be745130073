"""Results of a measurement: `Window` and `Measurement`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ecc.settings import MeasureSettings

from .meter import Declared, DeviceState, MeterInfo, Provenance, Timed


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window, from one counter tick to another."""

    joules: float
    """Gross energy per inference."""
    seconds: float
    """Time per inference."""
    window_seconds: float
    """Length of the window."""
    inferences: float
    """Inferences within the window; fractional where its edge falls inside a chunk of work."""
    ticks: int
    """Counter ticks within the window."""
    edge_error: float
    """Relative standard error from the uncertainty of the times of the first and last tick."""
    polling_share: float
    """Fraction of the window that the host spent reading the counter."""
    host_bound_share: float
    """Fraction of chunks that the device waited for; near 1 if the launches limit the speed."""
    state: DeviceState | None = None
    """State of the device at the end of the window."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Energy and time of one inference of one batch, with the details needed to judge them."""

    joules: float
    """Gross energy per inference, as the meter reads it. Budgets refer to this number."""
    seconds: float
    """Time per inference."""
    net_joules: float | None
    """Energy per inference minus idle power times `seconds`; None without an idle reading."""
    idle_watts: float | None
    """Idle power that was subtracted for `net_joules`."""
    relative_ci: float | None
    """Half width of the 95 % CI of the mean, relative; None with a single window."""
    batch: int
    """Items in one inference."""
    device_type: str
    """torch device type on which the network ran."""
    combined_by: str
    """How windows were combined: `median`, or `minimum` for clocks."""
    tick_seconds: float
    """Period of the counter."""
    windows: tuple[Window, ...]
    meter: MeterInfo
    settings: MeasureSettings

    @property
    def label(self) -> str:
        """Label of the provenance, shown next to every number."""
        return self.meter.label

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds

    @property
    def joules_per_item(self) -> float:
        """Gross energy per item of the batch, such as joules per image."""
        return self.joules / self.batch

    @property
    def converged(self) -> bool:
        """Whether the confidence interval reached `target_relative_ci`."""
        return self.relative_ci is not None and self.relative_ci <= self.settings.target_relative_ci

    @property
    def ticks(self) -> int:
        """Fewest counter ticks of any window."""
        return min(window.ticks for window in self.windows)

    @property
    def edge_error(self) -> float:
        """Largest edge error of any window."""
        return max(window.edge_error for window in self.windows)

    @property
    def polling_share(self) -> float:
        """Largest polling share of any window."""
        return max(window.polling_share for window in self.windows)

    @property
    def host_bound_share(self) -> float:
        """Largest host-bound share of any window."""
        return max(window.host_bound_share for window in self.windows)

    @property
    def temperature_celsius(self) -> float | None:
        """Median over the windows."""
        return self._median("temperature_celsius")

    @property
    def clock_mhz(self) -> float | None:
        """Median over the windows."""
        return self._median("clock_mhz")

    @property
    def sensor_watts(self) -> float | None:
        """Power reading of the device, median over the windows."""
        return self._median("power_watts")

    @property
    def power_capped(self) -> bool:
        """Whether the device ran at its power limit in any window."""
        return any(window.state is not None and window.state.power_capped for window in self.windows)

    @property
    def throttled(self) -> bool:
        """Whether the device throttled in any window; only accepted with `allow_throttling`."""
        return any(window.state is not None and bool(window.state.throttling) for window in self.windows)

    def __str__(self) -> str:
        spread = "" if self.relative_ci is None else f" +- {self.relative_ci:.1%}"
        items = "" if self.batch == 1 else f" of {self.batch} items"
        return (
            f"{self.joules:.4g} J{spread} and {self.seconds:.4g} s per inference{items}, "
            f"{self.watts:.1f} W ({self.label}: {self.meter.device}, {self.meter.scope})"
        )

    def _median(self, name: str) -> float | None:
        values = [getattr(window.state, name) for window in self.windows if window.state is not None]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None


def combine_repeats(values: Sequence[float], provenance: Provenance) -> float:
    """Combine repeats of one measurement to one number.

    The median ignores a disturbed window. Disturbances only ever add time, so the minimum repeats best where a clock is
    read.
    """
    return min(values) if isinstance(provenance, Declared | Timed) else statistics.median(values)


def relative_interval(values: Sequence[float]) -> float | None:
    """Half width of the 95 % t-interval of the mean, relative to the mean; None for a single value."""
    if len(values) < 2:
        return None
    quantile = t_quantile(len(values) - 1)
    return quantile * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


@lru_cache(maxsize=64)
def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution, without SciPy, so that a board needs none."""
    low, high = 0.0, 20.0  # 12.7 at one degree of freedom
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _central_probability(middle, freedom) < 0.95 else (low, middle)
    return high


def _central_probability(t: float, freedom: int) -> float:
    """P(|T| < t) as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    square, is_odd = math.cos(angle) ** 2, freedom % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 if not is_odd else 3, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
