from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from ecc.errors import BadMeasurement
from ecc.measure import Declared, DeviceState, Measured, Measurement, MeasureSettings, MeterInfo, Window
from ecc.measure.measurement import combine, relative_interval


def window(joules: float = 2.0, seconds: float = 0.01, **changes: object) -> Window:
    values = {
        "joules": joules,
        "seconds": seconds,
        "window_seconds": 0.5,
        "inferences": 50.0,
        "ticks": 10,
        "edge_error": 0.001,
        "polling_share": 0.002,
        "host_bound_share": 0.0,
        **changes,
    }
    return Window(**values)  # type: ignore[arg-type]


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


# ---------------------------------------------------------------- settings


def test_settings_default_to_the_protocol() -> None:
    settings = MeasureSettings()
    assert (settings.mode, settings.precision, settings.cudnn_autotune) == ("auto", "fp32", True)
    assert (settings.window_seconds, settings.min_ticks) == (0.5, 10)
    assert (settings.min_repeats, settings.max_repeats, settings.target_relative_ci) == (3, 8, 0.015)
    assert (settings.warmup_seconds, settings.warmup_runs) == (0.3, 10)


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        MeasureSettings().min_ticks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mode", "fast", r"mode='fast' is unknown; give one of \('auto', 'eager', 'graph', 'compile'\)"),
        ("precision", "int8", "precision='int8' is unknown"),
        ("memory_format", "nhwc", "memory_format='nhwc' is unknown"),
        ("input_data", "zeros", "input_data='zeros' is unknown"),
        ("window_seconds", 0, r"window_seconds=0 is below 0\.001"),
        ("min_ticks", 0, "min_ticks=0 is below 1"),
        ("max_window_seconds", 0.1, r"max_window_seconds=0\.1 is below 0\.5"),
        ("target_relative_ci", float("nan"), "target_relative_ci=nan is below"),
        ("max_repeats", 2, "max_repeats=2 is below 3"),
        ("warmup_runs", 0, "warmup_runs=0 is below 1"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(BadMeasurement, match=said):
        MeasureSettings(**{name: value})  # type: ignore[arg-type]


# ---------------------------------------------------------------- windows to one number


def test_the_median_shrugs_off_a_disturbed_window() -> None:
    joules, seconds, rule = combine([window(2.0), window(9.0, 0.05), window(2.1)], Measured())
    assert (joules, seconds, rule) == (2.1, 0.01, "median")


def test_cpu_time_is_combined_by_its_lower_quartile() -> None:
    windows = [window(1.0), window(2.0), window(3.0), window(4.0), window(50.0)]
    joules, _, rule = combine(windows, Declared(15))
    assert (joules, rule) == (2.0, "lower quartile")
    assert combine(windows[:1], Declared(15))[0] == 1.0


def test_the_interval_is_students() -> None:
    # t(0.975, 2) = 4.303; standard deviation 1, mean 10
    assert relative_interval([9.0, 10.0, 11.0]) == pytest.approx(4.3027 / 3**0.5 / 10, rel=1e-4)
    assert relative_interval([5.0]) is None


# ---------------------------------------------------------------- the record


def test_a_measurement_gives_joules_per_item_and_power() -> None:
    result = measurement()
    assert result.joules_per_item == 0.5
    assert result.watts == pytest.approx(200)
    assert result.label == "measured"
    assert result.converged
    assert not measurement(relative_ci=0.02).converged
    assert not measurement(relative_ci=None).converged


def test_a_measurement_reports_its_worst_window() -> None:
    result = measurement(window(), window(ticks=9, edge_error=0.3, polling_share=0.4, host_bound_share=0.5))
    assert (result.ticks, result.edge_error, result.polling_share, result.host_bound_share) == (
        9,
        0.3,
        0.4,
        0.5,
    )


def test_the_state_of_the_device_is_its_median() -> None:
    hot = DeviceState(temperature_celsius=70, clock_mhz=1700, power_watts=610, power_capped=True)
    states = [hot, replace(hot, temperature_celsius=60, power_capped=False), DeviceState()]
    result = measurement(*(window(state=state) for state in states))
    assert (result.temperature_celsius, result.clock_mhz, result.sensor_watts) == (65, 1700, 610)
    assert result.power_capped
    assert measurement().temperature_celsius is None


def test_a_measurement_is_plain_json_with_its_label() -> None:
    values = json.loads(json.dumps(measurement(window(state=DeviceState(clock_mhz=1000))).to_dict()))
    assert values["label"] == "measured"
    assert values["meter"]["provenance"] == {"kind": "measured", "instrument": "sensor"}
    assert values["windows"][0]["state"]["clock_mhz"] == 1000
    assert values["settings"]["mode"] == "auto"
    assert values["joules_per_item"] == 0.5


def test_a_measurement_reads_as_a_sentence() -> None:
    assert str(measurement()) == ("2 J +- 1.0% and 0.01 s an inference of 4, 200.0 W (measured: fake board, board)")
