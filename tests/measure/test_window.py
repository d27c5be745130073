"""Windows from tick to tick: bias, spread, length, faults, and whole measurements."""

from __future__ import annotations

import gc
import itertools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadMeasurement, option_names
from ecc.measure import (
    CounterProbe,
    Declared,
    DeviceState,
    Measured,
    Measurement,
    MeasureSettings,
    Provenance,
    Timed,
    Window,
    close_meter,
    find_meter,
    measure,
    measure_model,
    probe_counter,
)
from ecc.measure.counter import Tick
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.window import WindowAligner, aliasing_error, check_state
from ecc.measure.workload import HostWorkload, Workload
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import SmallNet, run_seconds

RUN_SECONDS = 0.001037  # not commensurable with the periods below


def windows_of(
    board: FakeBoard,
    settings: MeasureSettings,
    *,
    load: Workload | None = None,
    meter: FakeMeter | None = None,
    counter: CounterProbe | None = None,
) -> list[Window]:
    meter = meter or FakeMeter(board)
    load = load or HostWorkload(lambda: board.work(RUN_SECONDS), 4, board.clock)
    counter = counter or probe_counter(meter, load, 1.0, clock=board.clock)
    aligner = WindowAligner(load, 4 * RUN_SECONDS, meter, counter, settings, board.clock)
    aligner.warm_up()
    return list(aligner.windows())


def repeats(count: int, **changes: Any) -> MeasureSettings:
    return MeasureSettings(min_repeats=count, max_repeats=count, **changes)


def known(**changes: Any) -> CounterProbe:
    return CounterProbe(**{"moves": True, "tick_seconds": 0.1, "read_seconds": 1e-5, "idle_watts": 80.0, **changes})


def relative_std(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


# --- bias, spread and length -------------------------------------------------------------------------


def test_half_a_second_on_a_counter_of_100_ms_repeats_within_half_a_percent() -> None:
    windows = windows_of(FakeBoard(tick_seconds=0.1), repeats(60, window_seconds=0.5, min_ticks=5))
    joules = [window.joules for window in windows]
    assert relative_std(joules) < 0.005
    assert statistics.fmean(joules) == pytest.approx(300 * RUN_SECONDS, rel=0.002)
    assert statistics.fmean(w.seconds for w in windows) == pytest.approx(RUN_SECONDS, rel=0.002)
    assert {window.ticks for window in windows} <= {5, 6, 7, 8}
    reported = statistics.fmean(window.edge_error for window in windows)
    assert relative_std(joules) == pytest.approx(reported, rel=0.5)


@pytest.mark.parametrize(
    ("run_seconds", "launch_seconds", "joules", "host_bound"),
    [
        (RUN_SECONDS, 1e-6, 300 * RUN_SECONDS, 0),
        (RUN_SECONDS, 2e-4, 300 * RUN_SECONDS, 0),
        (1e-4, 1e-3, 1e-4 * 300 + 9e-4 * 80, 1),  # 0.1 ms busy, 0.9 ms idle
    ],
)
def test_queued_work_is_as_accurate_and_includes_idle_power_between_launches(
    run_seconds: float, launch_seconds: float, joules: float, host_bound: float
) -> None:
    board = FakeBoard(tick_seconds=0.1, read_seconds=20e-6 if host_bound else 1e-3)
    load = board.queued(run_seconds=run_seconds, launch_seconds=launch_seconds)
    windows = windows_of(board, repeats(5 if host_bound else 30, min_ticks=5), load=load)
    assert relative_std([window.joules for window in windows]) < 0.005
    assert statistics.fmean(w.joules for w in windows) == pytest.approx(joules, rel=0.02 if host_bound else 0.002)
    assert statistics.fmean(w.host_bound_share for w in windows) == pytest.approx(host_bound, abs=0.1 * host_bound)


def test_a_continuous_counter_is_read_rarely() -> None:
    windows = windows_of(FakeBoard(tick_seconds=1e-4, resolution_joules=1e-6), repeats(10))
    joules = [window.joules for window in windows]
    assert relative_std(joules) < 0.002
    assert statistics.fmean(joules) == pytest.approx(300 * RUN_SECONDS, rel=0.002)
    assert windows[0].window_seconds == pytest.approx(0.5, rel=0.1)
    assert windows[0].polling_share < 0.001


def test_windows_repeat_until_they_agree_and_poll_only_when_a_tick_is_due() -> None:
    windows = windows_of(FakeBoard(tick_seconds=0.1), MeasureSettings())
    assert [window.ticks for window in windows] == [10, 10, 10]
    assert windows[0].window_seconds == pytest.approx(1.0, abs=0.01)
    assert windows[0].polling_share < 0.4 * 20e-6 / (4 * RUN_SECONDS)
    assert len(windows_of(FakeBoard(noise=0.2), MeasureSettings())) == 8


def test_the_warm_up_lasts_for_the_settling_time() -> None:
    board = FakeBoard()
    load = HostWorkload(lambda: board.work(RUN_SECONDS), 4, board.clock)
    started = board.now()
    meter = FakeMeter(board, settle_seconds=2.0)
    WindowAligner(load, 0.004, meter, known(), MeasureSettings(), board.clock).warm_up()
    assert board.now() - started >= 2.0


# --- aliasing ----------------------------------------------------------------------------------------


def ticks_of(joules: list[float], tick_seconds: float = 0.1) -> list[Tick]:
    ends = itertools.accumulate(joules, initial=50.0)
    return [Tick(total, k * tick_seconds, 1e-3) for k, total in enumerate(ends)]


def test_the_aliasing_error_is_the_standard_error_of_the_ticks() -> None:
    joules = [50.0, 57.0, 56.0, 55.0]
    expected = statistics.stdev(joules) / 2 / statistics.fmean(joules)
    assert aliasing_error(ticks_of(joules), 0.1) == pytest.approx(expected)
    assert aliasing_error(ticks_of([5.0]), 0.1) == 0.0
    missed = ticks_of([5.0] * 6)
    del missed[3]  # the next tick has the joules of two
    assert aliasing_error(missed, 0.1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 10, 10), (0.2, 15, 15), (0.02, 10, 15)])
def test_a_window_is_extended_while_its_ticks_differ(noise: float, low: int, high: int) -> None:
    ticks = [window.ticks for window in windows_of(FakeBoard(noise=noise), repeats(4))]
    assert low <= min(ticks) <= max(ticks) <= high


# --- faults ------------------------------------------------------------------------------------------

_last = [0.0]


def _freeze(joules: float, now: float) -> float:
    _last[0] = joules if now < 1006.03 else _last[0]
    return _last[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda joules, now: joules if now < 1006.03 else joules - 5000, "decreased"),
        (lambda joules, now: joules if now < 1006.03 else joules + 100, r"jumped by 1\d\d\.\d+ J within 0\.\d+ s"),
        (_freeze, r"stayed at 13\d\d\d\.\d+ J for 1\.\d s while the device was busy"),
    ],
)
def test_a_counter_that_fails_during_a_window_is_refused(fault: Callable[[float, float], float], message: str) -> None:
    with pytest.raises(BadMeasurement, match=message):
        windows_of(FakeBoard(fault=fault), repeats(8))


@pytest.mark.parametrize(
    ("tick_seconds", "counter", "settings", "info", "message"),
    [
        (0.1, known(moves=False, tick_seconds=None), {}, {}, "did not change while it was probed"),
        (4.0, known(tick_seconds=4.0), {}, {}, r"ticks every 4 s, so 10 ticks take 40 s; a window may take 30 s"),
        (0.9, known(), {"max_window_seconds": 1.0}, {}, r"ticked only \d times in .* needs 10 ticks\. Lower min_ticks"),
        (0.1, None, {}, {"max_watts": 100.0}, r"shows (299|30\d)\.\d W .* limited to 100\.0 W"),
    ],
)
def test_a_counter_that_is_too_slow_or_shows_too_much_power_is_refused(
    tick_seconds: float, counter: CounterProbe | None, settings: dict[str, Any], info: dict[str, Any], message: str
) -> None:
    board = FakeBoard(tick_seconds=tick_seconds)
    with pytest.raises(BadMeasurement, match=message):
        windows_of(board, repeats(1, **settings), meter=FakeMeter(board, **info), counter=counter)


def test_throttling_that_starts_between_windows_is_refused() -> None:
    board = FakeBoard()

    def state() -> DeviceState:
        hot = board.now() > 1006
        return DeviceState(temperature_celsius=91 if hot else 60, throttling=("hardware slowdown",) if hot else ())

    with pytest.raises(BadMeasurement, match=r"fake board throttles at 91 C \(hardware slowdown\)"):
        windows_of(board, repeats(8), meter=FakeMeter(board, state=state))


@pytest.mark.parametrize(
    ("state", "option", "message"),
    [
        (DeviceState(other_processes=("process 42", "process 43")), "allow_shared", "process 42, process 43"),
        (DeviceState(throttling=("software thermal slowdown",)), "allow_throttling", "software thermal slowdown"),
    ],
)
def test_a_shared_or_throttling_device_is_refused_unless_allowed(state: DeviceState, option: str, message: str) -> None:
    info = FakeMeter(FakeBoard()).describe()
    with pytest.raises(BadMeasurement, match=f"{message}.*{option}=True"):
        check_state(state, info, MeasureSettings())
    with option_names(), pytest.raises(BadMeasurement, match=f"with --{option.replace('_', '-')}\\."):
        check_state(state, info, MeasureSettings())
    check_state(state, info, MeasureSettings(**{option: True}))  # type: ignore[arg-type]
    check_state(DeviceState(power_capped=True), info, MeasureSettings())


# --- measure -----------------------------------------------------------------------------------------


def measured(board: FakeBoard, meter: FakeMeter | None = None, **settings: Any) -> Measurement:
    meter = meter or FakeMeter(board)
    return measure(lambda: board.work(RUN_SECONDS), meter, MeasureSettings(**settings), clock=board.clock)


def test_a_function_is_measured_gross_and_net() -> None:
    result = measured(FakeBoard(idle_watts=80, busy_watts=300))
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.seconds == pytest.approx(RUN_SECONDS, rel=0.005)
    assert result.idle_watts == pytest.approx(80, rel=0.02)
    assert result.net_joules == pytest.approx(220 * RUN_SECONDS, rel=0.01)
    assert (result.converged, result.combined_by, len(result.windows)) == (True, "median", 3)
    assert result.tick_seconds == pytest.approx(0.1, rel=0.05)
    slow = measured(FakeBoard(tick_seconds=0.2, read_seconds=0.05))  # a slow meter gets longer chunks
    assert 0.05 < slow.polling_share < 0.25
    assert slow.windows[0].window_seconds > 2.0


def test_several_inferences_per_run_are_divided_and_a_known_counter_is_not_probed() -> None:
    board, run_seconds = FakeBoard(), 8 * RUN_SECONDS
    started = board.now()
    result = measure(
        lambda: board.work(run_seconds),
        FakeMeter(board),
        MeasureSettings(min_repeats=1, max_repeats=1, warmup_runs=1),
        inferences_per_run=8,
        counter=known(idle_watts=None),
        clock=board.clock,
    )
    assert board.now() - started < 0.3 + 0.1 + 1.0 + 0.1  # warm-up, wait for a tick, window, rest
    assert result.joules == result.windows[0].joules == pytest.approx(300 * RUN_SECONDS, rel=0.01)
    assert (result.relative_ci, result.converged, result.net_joules) == (None, False, None)


def test_declared_watts_are_labelled_and_combined_by_the_minimum() -> None:
    board = FakeBoard(tick_seconds=1e-4, resolution_joules=1e-6, idle_watts=0)
    result = measured(board, FakeMeter(board, provenance=Declared(15)))
    assert (result.combined_by, result.label) == ("minimum", "CPU time x declared 15 W")
    assert result.net_joules == result.joules


def test_garbage_collection_is_off_during_windows() -> None:
    board, enabled = FakeBoard(), []

    def run() -> None:
        enabled.append(gc.isenabled())
        board.work(RUN_SECONDS)

    measure(run, FakeMeter(board), counter=known(), clock=board.clock)
    assert not any(enabled)
    assert gc.isenabled()


def test_a_gpu_is_measured_through_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard(read_seconds=5e-4)

    class Event:
        def record(self) -> None:
            self.query = board.mark()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", board.synchronize)
    result = measure(lambda: board.queue(RUN_SECONDS, 1e-4), FakeMeter(board), device="cuda", clock=board.clock)
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.seconds == pytest.approx(RUN_SECONDS, rel=0.005)
    assert result.host_bound_share == 0
    assert board.mark()()  # the queue is empty
    result = measure(lambda: board.queue(1e-4, 1e-3), FakeMeter(board), device="cuda", clock=board.clock)
    assert result.joules == pytest.approx(1e-4 * 300 + 9e-4 * 80, rel=0.05)
    assert result.host_bound_share > 0.9
    assert result.polling_share < 0.05


@pytest.mark.parametrize(
    ("busy_watts", "sensor_watts", "agrees"),
    [(300.0, 90.0, False), (300.0, 600.0, False), (300.0, 330.0, True), (300.0, 150.0, True), (2.0, 5.0, True)],
)
def test_a_counter_must_agree_with_the_power_reading(busy_watts: float, sensor_watts: float, agrees: bool) -> None:
    board = FakeBoard(idle_watts=0.5, busy_watts=busy_watts)
    meter = FakeMeter(board, state=DeviceState(power_watts=sensor_watts))
    if agrees:
        assert measured(board, meter).sensor_watts == sensor_watts
    else:
        with pytest.raises(BadMeasurement, match=rf"shows (299|30\d)\.\d W, and the power reading .* {sensor_watts}"):
            measured(board, meter)


def test_a_meter_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match=r"runs on cpu, but meter fake \(fake board\) only sees cuda"):
        measured(board, FakeMeter(board, covers=("cuda",)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8f3a"))
    meter = FakeMeter(board, name="nvml", device_id="GPU-77b1", covers=("cuda",))
    with pytest.raises(BadMeasurement, match=r"is GPU-8f3a, but the meter reads GPU-77b1. Choose nvml:GPU-8f3a"):
        measure(lambda: None, meter, device="cuda:0")


def test_an_analytic_source_is_refused_before_anything_runs() -> None:
    platform: Any = find_meter("platform:jetson-tx2")
    message = r"platform \(NVIDIA Jetson TX2\) computes joules without running anything.*cost\(graph, widths\)"
    with pytest.raises(BadMeasurement, match=message):
        measure(lambda: pytest.fail("it ran"), platform)
    with pytest.raises(BadMeasurement, match=message):
        measure_model(nn.Linear(2, 2), torch.zeros(1, 2), platform)


def test_a_model_is_measured_per_batch_and_per_item() -> None:
    board = FakeBoard()
    result = measure_model(SmallNet(board), torch.ones(16, 3, 6, 6), FakeMeter(board), clock=board.clock)
    joules = 300 * run_seconds(16, 12)
    assert (result.joules, result.joules_per_item) == pytest.approx((joules, joules / 16), rel=0.005)
    assert (result.batch, result.device_type, result.settings.runner) == (16, "cpu", "eager")


@pytest.mark.parametrize("provenance", [Measured(), Timed("CPU time")])
def test_windows_of_a_clock_are_not_longer_than_set(provenance: Provenance) -> None:
    """A counter with ticks needs longer ones, since its ticks are seen late."""
    board = FakeBoard(tick_seconds=0.004, resolution_joules=1e-9)
    settings = MeasureSettings(window_seconds=0.02, min_repeats=2, max_repeats=2, target_relative_ci=0.005)
    result = measure(
        lambda: board.work(0.003), FakeMeter(board, provenance=provenance), settings, clock=board.clock
    )  # fmt: skip
    is_clock = isinstance(provenance, Timed)
    assert all((window.window_seconds < 0.04) is is_clock for window in result.windows)
    assert (result.edge_error == 0.0) is is_clock


# --- real hardware -----------------------------------------------------------------------------------


@pytest.mark.gpu  # CPU time on a loaded machine may be refused
def test_a_real_model_is_measured_by_cpu_time() -> None:
    settings = MeasureSettings(
        window_seconds=0.05, warmup_seconds=0.05, probe_seconds=0.05, max_repeats=3, target_relative_ci=1.0
    )
    result = measure_model(nn.Linear(64, 64), torch.ones(8, 64), CpuTimeMeter(15.0), settings)
    assert result.joules > 0
    assert (result.net_joules, result.batch) == (result.joules, 8)


def gpu_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()).cuda()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # from torch.compile
@pytest.mark.parametrize("runner", ["eager", "cuda-graph", "compile"])
def test_a_real_gpu_is_measured(runner: str) -> None:
    meter = find_meter()
    try:
        result = measure_model(gpu_model(), torch.ones(32, 3, 64, 64), meter, MeasureSettings(runner=runner))
    finally:
        close_meter(meter)
    assert result.converged, result
    assert result.ticks >= 10
    assert result.idle_watts is not None
    assert result.idle_watts < result.watts < (result.meter.max_watts or 1e9)
    assert result.edge_error < 0.005
    assert result.polling_share < 0.2  # an NVML reading takes some milliseconds
    assert result.temperature_celsius is not None
    assert result.clock_mhz is not None


@pytest.mark.gpu
def test_a_real_gpu_repeats_within_a_percent() -> None:
    model, example, meter = gpu_model(), torch.ones(32, 3, 64, 64), find_meter()
    settings = MeasureSettings(min_ticks=5, min_repeats=1, max_repeats=1)
    try:
        counter = probe_counter(meter)
        joules = [measure_model(model, example, meter, settings, counter=counter).joules for _ in range(10)]
    finally:
        close_meter(meter)
    assert relative_std(joules[1:]) < 0.01, joules
