"""How to measure (`MeasureSettings`) and what comes out (`Measurement`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.special import stdtrit

from ecc.errors import BadMeasurement

from .meter import Declared, DeviceState, MeterInfo, Provenance
from .runner import (
    INPUT_DATA,
    MEMORY_FORMATS,
    MODES,
    PRECISIONS,
    InputData,
    MemoryFormat,
    Mode,
    Precision,
)


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a network is run, and how long it is measured.

    Raises:
        BadMeasurement: If a value is out of its range.
    """

    mode: Mode = "auto"
    """`eager`, `graph` (CUDA graph) or `compile` (torch.compile). `auto` runs a CUDA graph where the network can be
    captured, because one launch for all kernels repeats better than many, and eager elsewhere. What it chose stands in
    the result."""

    precision: Precision = "fp32"
    """`fp32` (no TF32), `tf32`, `fp16` or `bf16`."""

    memory_format: MemoryFormat = "contiguous"
    """`contiguous` or `channels_last`."""

    cudnn_autotune: bool = True
    """Lets cuDNN choose its algorithms by trying them, during the warm-up."""

    input_data: InputData = "random"
    """`random` measures on normal random numbers of the example's shape, `example` on the example itself."""

    window_seconds: float = 0.5
    """The least length of a window."""

    min_ticks: int = 10
    """The least number of counter ticks in a window, whatever its length."""

    max_window_seconds: float = 30.0
    """A counter too slow for `min_ticks` in this time is refused."""

    target_relative_ci: float = 0.015
    """Windows are repeated until the 95 % interval of the mean is narrower than this, to either side."""

    min_repeats: int = 3
    """The least number of windows."""

    max_repeats: int = 8
    """The most windows; the interval that was reached is reported, whatever it is."""

    warmup_seconds: float = 0.3
    """Under load before the first window; longer if the sensor remembers longer."""

    warmup_runs: int = 10
    """Inferences before anything is timed: algorithms are chosen, memory is allocated."""

    probe_seconds: float = 2.0
    """How long the counter is watched, idle and busy, when no `CounterProbe` is given."""

    allow_shared: bool = False
    """Measures although other processes compute on the device."""

    allow_throttling: bool = False
    """Measures although the device protects itself from heat."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", MODES),
            ("precision", PRECISIONS),
            ("memory_format", MEMORY_FORMATS),
            ("input_data", INPUT_DATA),
        ):
            if getattr(self, name) not in allowed:
                raise BadMeasurement(f"{name}={getattr(self, name)!r} is unknown; give one of {allowed}.")
        for name, least in (
            ("window_seconds", 0.001),
            ("min_ticks", 1),
            ("max_window_seconds", self.window_seconds),
            ("target_relative_ci", 1e-6),
            ("min_repeats", 1),
            ("max_repeats", self.min_repeats),
            ("warmup_seconds", 0),
            ("warmup_runs", 1),
            ("probe_seconds", 0.001),
        ):
            if not getattr(self, name) >= least:
                raise BadMeasurement(f"{name}={getattr(self, name)} is below {least}, the least it may be.")


@dataclass(frozen=True, kw_only=True)
class Window:
    """One window, from a tick to a tick."""

    joules: float
    """Per inference, gross."""

    seconds: float
    """Per inference."""

    window_seconds: float
    """Its length."""

    inferences: float
    """Done within it; a fraction where the device was amid a chunk."""

    ticks: int
    """Counter ticks within it."""

    edge_error: float
    """Relative standard error from how closely its first and last tick were seen."""

    polling_share: float
    """Share of its time that the host spent reading the counter."""

    host_bound_share: float
    """Share of its chunks before which the host was never ahead: near 1 where launches set the pace."""

    state: DeviceState | None = None
    """The device at its end."""

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Energy and time of one inference of one batch, with all that is needed to trust or doubt them."""

    joules: float
    """Per inference, gross: what the meter says. The number that budgets are about."""

    seconds: float
    """Per inference."""

    net_joules: float | None
    """Per inference, less what the device draws idle in the same time; None without an idle reading."""

    idle_watts: float | None
    """The idle power that was taken off for `net_joules`."""

    relative_ci: float | None
    """Half the width of the 95 % interval of the mean, relative; None with a single window."""

    batch: int
    """Items in one inference."""

    device_type: str
    """Where the network ran: cpu, cuda, ..."""

    combined_by: str
    """How windows became one number: `median`, or `lower quartile` where CPU time is metered."""

    tick_seconds: float
    """Period of the counter."""

    windows: tuple[Window, ...]
    meter: MeterInfo
    settings: MeasureSettings

    @property
    def label(self) -> str:
        """Measured, estimated or declared: belongs beside every number."""
        return self.meter.label

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds

    @property
    def joules_per_item(self) -> float:
        """Gross, of one item of the batch: joules per image."""
        return self.joules / self.batch

    @property
    def converged(self) -> bool:
        """Whether the windows agree as closely as was asked for."""
        return self.relative_ci is not None and self.relative_ci <= self.settings.target_relative_ci

    @property
    def ticks(self) -> int:
        """Counter ticks of the window that had the fewest."""
        return min(window.ticks for window in self.windows)

    @property
    def edge_error(self) -> float:
        """The largest of the windows: relative standard error from how closely their ticks were seen."""
        return max(window.edge_error for window in self.windows)

    @property
    def polling_share(self) -> float:
        """The largest of the windows: share of the time that the host spent reading the counter."""
        return max(window.polling_share for window in self.windows)

    @property
    def host_bound_share(self) -> float:
        """The largest of the windows: near 1 where launches, not the device, set the pace."""
        return max(window.host_bound_share for window in self.windows)

    @property
    def temperature_celsius(self) -> float | None:
        """Median over the windows."""
        return _median(self.windows, "temperature_celsius")

    @property
    def clock_mhz(self) -> float | None:
        """Median over the windows."""
        return _median(self.windows, "clock_mhz")

    @property
    def sensor_watts(self) -> float | None:
        """The device's own power reading, median over the windows; agrees with `watts` or is refused."""
        return _median(self.windows, "power_watts")

    @property
    def power_capped(self) -> bool:
        """Whether the device ran at its power limit in any window."""
        return any(window.state is not None and window.state.power_capped for window in self.windows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, derived ones included."""
        values = {**asdict(self), "meter": self.meter.to_dict()}
        return {**values, **{name: getattr(self, name) for name in _DERIVED}}

    def __str__(self) -> str:
        spread = "" if self.relative_ci is None else f" +- {self.relative_ci:.1%}"
        return (
            f"{self.joules:.4g} J{spread} and {self.seconds:.4g} s an inference of {self.batch}, "
            f"{self.watts:.1f} W ({self.label}: {self.meter.device}, {self.meter.scope})"
        )


_DERIVED = tuple(name for name, value in vars(Measurement).items() if isinstance(value, property))


# ---------------------------------------------------------------- windows to one number


def combine(windows: Sequence[Window], provenance: Provenance) -> tuple[float, float, str]:
    """Joules and seconds per inference over all windows, and the name of the rule."""
    rule = "lower quartile" if isinstance(provenance, Declared) else "median"
    joules = combined([window.joules for window in windows], provenance)
    return joules, combined([window.seconds for window in windows], provenance), rule


def combined(values: Sequence[float], provenance: Provenance) -> float:
    """One number for repeats of one measurement.

    The median shrugs off a disturbed window. Where CPU time is metered, disturbances only ever add, so the
    lower quartile repeats better.
    """
    return _lower_quartile(values) if isinstance(provenance, Declared) else statistics.median(values)


def relative_interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % t-interval of the mean, relative to the mean; None for a single value."""
    if len(values) < 2:
        return None
    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def _median(windows: Sequence[Window], name: str) -> float | None:
    values = [getattr(window.state, name) for window in windows if window.state is not None]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
