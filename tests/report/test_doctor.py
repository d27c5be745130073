from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ecc.measure import (
    CounterProbe,
    Declared,
    DeviceState,
    Estimated,
    Measured,
    Measurement,
    MeasureSettings,
    MeterInfo,
    Window,
)
from ecc.measure.doctor import DoctorReport, MeterFinding, SelfTest
from ecc.measure.registry import FALLBACKS
from ecc.report.doctor import _si, _watts, doctor_view

MACHINE = {
    "ecc": "0.1.0",
    "python": "3.11.7",
    "torch": "2.6.0",
    "system": "Linux x86_64",
    "processor": "Some CPU",
    "cores": "2",
    "cuda": "none",
}
INFO = MeterInfo(
    name="nvml",
    device="NVIDIA H200",
    provenance=Measured(),
    scope="board",
    resolution_joules=1e-3,
    notes=("counts all processes on the card",),
)
COUNTER = CounterProbe(
    moves=True,
    tick_seconds=0.1,
    read_seconds=0.0012,
    idle_watts=76.31,
    idle_state=DeviceState(temperature_celsius=34, clock_mhz=345, other_processes=("process 42",)),
)
NOTHING = DoctorReport(
    machine=MACHINE,
    findings=(
        MeterFinding(spec="nvml", reason="no NVIDIA driver here"),
        MeterFinding(spec="rapl", reason="only root may read it", remedy="sudo chmod a+r /sys/counter"),
    ),
)


def self_test(spread: float, **window: Any) -> SelfTest:
    """Windows of 1 J, give or take the spread."""
    common = {"seconds": 0.004, "window_seconds": 1.0, "inferences": 250, "ticks": 10, "edge_error": 0.001}
    common |= {"polling_share": 0.01, "host_bound_share": 0.0, **window}
    windows = tuple(Window(joules=joules, **common) for joules in (1 - spread, 1.0, 1 + spread))
    result = Measurement(
        joules=1.0,
        seconds=0.004,
        net_joules=0.7,
        idle_watts=76.31,
        relative_ci=0.01,
        batch=256,
        device_type="cuda",
        combined_by="median",
        tick_seconds=0.1,
        windows=windows,
        meter=INFO,
        settings=MeasureSettings(),
    )
    return SelfTest(device="cuda:0", measurement=result)


WORKING = MeterFinding(spec="nvml", reason="NVIDIA H200, board, energy counter", info=INFO, is_meter=True, counter=COUNTER)


def shown(examination: DoctorReport, width: int = 80) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(doctor_view(examination))
    return capture.get()


def words(examination: DoctorReport) -> str:
    """Without line breaks and columns."""
    return " ".join(shown(examination, width=1000).split())


def examined(finding: MeterFinding) -> DoctorReport:
    return DoctorReport(machine=MACHINE, findings=(finding, MeterFinding(spec="rapl", reason="no RAPL here")))


# ---------------------------------------------------------------- nothing works


def test_where_nothing_works_it_says_so_plainly_and_names_every_way_forward() -> None:
    text = words(NOTHING)
    assert "nvml no no NVIDIA driver here" in text
    assert "No energy meter works here: this machine cannot tell how much energy a network uses." in text
    for spec, _ in FALLBACKS:
        assert spec in text
    assert text.endswith("To begin: ecc profile digits --meter platform:jetson-tx2 -o digits.profile")


def test_the_line_that_grants_the_right_is_shown() -> None:
    text = words(NOTHING)
    assert "Or let rapl be read, which works until the next boot: sudo chmod a+r /sys/counter" in text
    without = replace(NOTHING, findings=NOTHING.findings[:1])
    assert "next boot" not in words(without)


def test_a_way_forward_without_words_of_its_own_is_still_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = (*FALLBACKS, ("oracle:NOW", "ask an oracle"))
    monkeypatch.setattr("ecc.report.doctor.FALLBACKS", ways)
    assert "oracle:NOW Ask an oracle." in words(NOTHING)


# ---------------------------------------------------------------- a meter that works


def test_what_is_told_of_a_meter() -> None:
    text = words(examined(replace(WORKING, self_test=self_test(0.003))))
    assert "nvml NVIDIA H200, board: measured" in text
    assert "counter energy counter, moves every 100 ms, in units of 1 mJ, a reading takes 1.2 ms" in text
    assert "idle 76.3 W, 34 °C, 345 MHz, shared with process 42" in text
    assert "at work 250 W" in text
    assert "self-test 1 J and 4 ms for 256 images of a small network on cuda:0, 3 windows of 1 s" in text
    assert "repeats to 0.30% (standard deviation of a window): good; networks that differ by 0.8% can be told" in text
    assert "note counts all processes on the card" in text
    assert text.endswith("Next: ecc profile digits --meter nvml -o digits.profile")
    assert "No energy meter works" not in text


@pytest.mark.parametrize(
    ("spread", "verdict"), [(0.005, "good; networks"), (0.02, "fair; networks"), (0.1, "poor; something else")]
)
def test_the_verdict_on_repeatability(spread: float, verdict: str) -> None:
    assert f"(standard deviation of a window): {verdict}" in words(
        examined(replace(WORKING, self_test=self_test(spread)))
    )


def test_state_at_work() -> None:
    state = DeviceState(temperature_celsius=61, clock_mhz=1980, power_capped=True)
    text = words(examined(replace(WORKING, self_test=self_test(0.001, state=state))))
    assert "at work 250 W, 61 °C, 1980 MHz, at its power limit" in text


def test_throttling_is_told() -> None:
    counter = replace(COUNTER, idle_state=DeviceState(throttling=("hardware thermal slowdown",)))
    assert "idle 76.3 W, throttled: hardware thermal slowdown" in words(examined(replace(WORKING, counter=counter)))


def test_trouble_is_told() -> None:
    text = words(examined(replace(WORKING, trouble="the device is shared with process 42.")))
    assert "trouble the device is shared with process 42." in text
    assert "self-test" not in text


def test_declared_watts_have_no_idle_and_estimates_no_counter() -> None:
    info = replace(INFO, provenance=Declared(15))
    text = words(examined(replace(WORKING, info=info, counter=replace(COUNTER, idle_watts=0.0))))
    assert "CPU time x declared 15 W" in text
    assert "idle" not in text
    estimate = replace(WORKING, info=replace(INFO, provenance=Estimated("a table of 2019")), counter=None)
    text = words(DoctorReport(machine=MACHINE, findings=(estimate,)))
    assert "nvml NVIDIA H200, board: estimated joules computed from constants: a table of 2019" in text
    replayed = replace(WORKING, info=replace(INFO, reads="replay of h200.profile"), counter=None)
    assert "joules replay of h200.profile" in words(DoctorReport(machine=MACHINE, findings=(replayed,)))


def test_a_counter_that_told_little() -> None:
    counter = CounterProbe(moves=False, tick_seconds=None, read_seconds=0.001, idle_watts=None)
    text = words(examined(replace(WORKING, info=replace(INFO, resolution_joules=None), counter=counter)))
    assert "counter energy counter, a reading takes 1 ms note" in text


def test_a_spec_with_blanks_is_quoted() -> None:
    finding = replace(WORKING, spec="command:read-joules --port 3")
    assert "--meter 'command:read-joules --port 3' -o" in words(DoctorReport(machine=MACHINE, findings=(finding,)))


# ---------------------------------------------------------------- the machine, and the page


def test_the_machine() -> None:
    text = words(NOTHING)
    assert text.startswith("ecc 0.1.0, Python 3.11.7, torch 2.6.0, CUDA: none Linux x86_64, Some CPU, 2 cores meter")
    gpu = {**MACHINE, "cuda": "12.8", "gpus": "NVIDIA H200", "driver": "570.1", "cudnn": "91002", "cores": "1"}
    text = words(replace(NOTHING, machine=gpu))
    assert "CUDA: 12.8 (driver 570.1, cuDNN 91002) Linux x86_64, Some CPU, 1 core; NVIDIA H200" in text


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("examination", [NOTHING, examined(replace(WORKING, self_test=self_test(0.1)))])
def test_it_fits_the_terminal_and_loses_no_word(examination: DoctorReport, width: int) -> None:
    text = shown(examination, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "…" not in text
    assert sorted(text.split()) == sorted(shown(examination, 1000).split())


def test_markup_in_a_reason_is_text() -> None:
    finding = MeterFinding(spec="nvml", reason="field [bold]186[/bold] is not supported")
    assert "field [bold]186[/bold] is not supported" in words(replace(NOTHING, findings=(finding, *NOTHING.findings)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2 J"),
        (0.9999, "1 J"),
        (0.0153, "15.3 mJ"),
        (1.526e-5, "15.3 uJ"),
        (3e-9, "3 nJ"),
        (0.0, "0 nJ"),
        (1234.0, "1230 J"),
    ],
)
def test_numbers_with_a_prefix(value: float, text: str) -> None:
    assert _si(value, "J") == text


@pytest.mark.parametrize(("watts", "text"), [(412.3, "412 W"), (76.31, "76.3 W"), (0.153, "0.15 W")])
def test_watts(watts: float, text: str) -> None:
    assert _watts(watts) == text
