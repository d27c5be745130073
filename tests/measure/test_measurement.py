"""Records of meters and measurements, and the power integrator."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from ecc.errors import BadMeasurement
from ecc.measure import (
    Declared,
    DeviceState,
    Measured,
    Measurement,
    MeasureSettings,
    MeterInfo,
    PowerIntegrator,
    Window,
)
from ecc.measure.measurement import combine_repeats, relative_interval
from ecc.records import from_json, to_json


def window(joules: float = 2.0, seconds: float = 0.01, **changes: Any) -> Window:
    values: dict[str, Any] = {
        "window_seconds": 0.5,
        "inferences": 50.0,
        "ticks": 10,
        "edge_error": 0.001,
        "polling_share": 0.002,
        "host_bound_share": 0.0,
    }
    return Window(joules=joules, seconds=seconds, **{**values, **changes})


def measurement(*windows: Window, relative_ci: float | None = 0.01) -> Measurement:
    return Measurement(
        joules=2.0,
        seconds=0.01,
        net_joules=1.2,
        idle_watts=80.0,
        relative_ci=relative_ci,
        batch=4,
        device_type="cpu",
        combined_by="median",
        tick_seconds=0.1,
        windows=windows or (window(),),
        meter=MeterInfo(name="fake", device="fake board", provenance=Measured(), scope="board"),
        settings=MeasureSettings(),
    )


# --- meters ------------------------------------------------------------------------------------------


# --- power integrator --------------------------------------------------------------------------------


def test_power_is_integrated_by_the_trapezoidal_rule() -> None:
    time, watts = iter((0.0, 1.0, 3.0)), iter((10.0, 20.0, 40.0))
    counter = PowerIntegrator(lambda: next(watts), now=lambda: next(time), start=False)
    found = [counter.read()]
    for _ in range(2):
        counter.sample()
        found.append(counter.read())
    assert found == pytest.approx([0, 15, 75])


def test_the_thread_samples_until_it_is_closed_or_the_source_fails() -> None:
    sampled, works = threading.Semaphore(0), True

    def watts() -> float:
        sampled.release()
        if not works:
            raise OSError("sensor unplugged")
        return 50.0

    counter = PowerIntegrator(watts, period_seconds=0.001)
    reads = []
    for _ in range(10):
        assert sampled.acquire(timeout=10)
        reads.append(counter.read())
    assert reads[-1] > reads[0]
    counter.close()
    with pytest.raises(BadMeasurement, match="closed"):
        counter.read()
    counter = PowerIntegrator(watts, period_seconds=0.001)
    works = False
    counter._thread.join(timeout=10)
    with pytest.raises(BadMeasurement, match="the power reading failed: sensor unplugged"):
        counter.read()
    counter.close()


@pytest.mark.parametrize("watts", [-1.0, math.nan, math.inf])
def test_impossible_power_is_refused(watts: float) -> None:
    with pytest.raises(BadMeasurement, match="at least 0"):
        PowerIntegrator(lambda: watts, start=False)


# --- settings and results ----------------------------------------------------------------------------


def test_repeats_are_combined_by_the_median_or_the_minimum() -> None:
    assert combine_repeats([2.0, 9.0, 2.1], Measured()) == 2.1
    assert combine_repeats([2.0, 1.0, 3.0, 50.0], Declared(15)) == 1.0
    assert combine_repeats([1.0], Declared(15)) == 1.0
    assert relative_interval([9.0, 10.0, 11.0]) == pytest.approx(4.3027 / 3**0.5 / 10, rel=1e-4)  # Student's
    assert relative_interval([5.0]) is None


def test_a_measurement_summarises_its_windows() -> None:
    hot = DeviceState(temperature_celsius=70, clock_mhz=1700, power_watts=610, power_capped=True)
    cool = replace(hot, temperature_celsius=60, power_capped=False)
    worst = window(ticks=9, edge_error=0.3, polling_share=0.4, host_bound_share=0.5, state=DeviceState())
    result = measurement(window(state=hot), window(state=cool), worst)
    assert (result.joules_per_item, result.watts, result.label) == (0.5, 200, "measured")
    assert [measurement(relative_ci=ci).converged for ci in (0.01, 0.02, None)] == [True, False, False]
    assert (result.ticks, result.edge_error, result.polling_share, result.host_bound_share) == (9, 0.3, 0.4, 0.5)
    assert (result.temperature_celsius, result.clock_mhz, result.sensor_watts) == (65, 1700, 610)
    assert result.power_capped
    assert measurement().temperature_celsius is None
    assert (
        str(measurement()) == "2 J +- 1.0% and 0.01 s per inference of 4 items, 200.0 W (measured: fake board, board)"
    )
    assert from_json(to_json(result), Measurement, "file") == result
