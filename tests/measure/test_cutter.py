from __future__ import annotations

import itertools
import random
import statistics

import pytest
from ecc.measure.tick_alignment import WindowAligner, check_state, tick_error

from ecc.errors import BadMeasurement
from ecc.measure import CounterProbe, DeviceState, MeasureSettings, Window, probe
from ecc.measure.counter import Tick
from ecc.measure.workload import HostWorkload, Workload
from measure.fakes import FakeBoard, FakeMeter

RUN_SECONDS = 0.001037  # shares no period with any counter below


def windows_of(
    board: FakeBoard,
    settings: MeasureSettings,
    *,
    workload: Workload | None = None,
    meter: FakeMeter | None = None,
    counter: CounterProbe | None = None,
) -> list[Window]:
    meter = meter or FakeMeter(board)
    load = load or HostWorkload(lambda: board.work(RUN_SECONDS), 4, board.clock)
    counter = counter or probe(meter, load, 1.0, clock=board.clock)
    aligner = WindowAligner(load, 4 * RUN_SECONDS, meter, counter, settings, board.clock)
    aligner.warm_up()
    return list(aligner.windows())


def repeats(count: int, **changes: object) -> MeasureSettings:
    return MeasureSettings(min_repeats=count, max_repeats=count, **changes)  # type: ignore[arg-type]


def relative_sd(values: list[float]) -> float:
    return statistics.stdev(values) / statistics.fmean(values)


# ---------------------------------------------------------------- bias and spread


def test_half_a_second_on_a_counter_of_100_ms_repeats_within_half_a_percent() -> None:
    board = FakeBoard(tick_seconds=0.1)
    windows = windows_of(board, repeats(100, window_seconds=0.5, min_ticks=5))
    joules = [window.joules for window in windows]
    assert relative_sd(joules) < 0.005
    assert statistics.fmean(joules) == pytest.approx(300 * RUN_SECONDS, rel=0.002)
    assert statistics.fmean(w.seconds for w in windows) == pytest.approx(RUN_SECONDS, rel=0.002)
    assert {window.ticks for window in windows} <= {5, 6, 7, 8}


def test_the_same_window_without_alignment_is_off_by_several_percent() -> None:
    # Some 0.5 s of inferences, the counter read right before and after: what a timer does.
    draw = random.Random(0)
    joules = []
    for _ in range(200):
        board, runs = FakeBoard(tick_seconds=0.1, phase=draw.random()), draw.randint(430, 530)
        board.work(0.3)
        before = board.read()
        for _ in range(runs):
            board.work(RUN_SECONDS)
        joules.append((board.read() - before) / runs)
    assert relative_sd(joules) == pytest.approx(0.41 * 0.1 / 0.5, rel=0.15)  # 8 %


def test_the_edge_error_that_is_reported_is_the_spread_that_is_seen() -> None:
    windows = windows_of(FakeBoard(tick_seconds=0.1), repeats(100, min_ticks=5))
    reported = statistics.fmean(window.edge_error for window in windows)
    assert relative_sd([window.joules for window in windows]) == pytest.approx(reported, rel=0.5)


@pytest.mark.parametrize("launch_seconds", [1e-6, 2e-4])
def test_queued_work_is_measured_as_exactly(launch_seconds: float) -> None:
    board = FakeBoard(tick_seconds=0.1, read_seconds=1e-3)
    load = board.queued(run_seconds=RUN_SECONDS, launch_seconds=launch_seconds)
    windows = windows_of(board, repeats(40, min_ticks=5), load=load)
    joules = [window.joules for window in windows]
    assert relative_sd(joules) < 0.005
    assert statistics.fmean(joules) == pytest.approx(300 * RUN_SECONDS, rel=0.002)
    assert max(window.host_bound_share for window in windows) == 0  # the host was always ahead


def test_work_limited_by_launches_says_so() -> None:
    board = FakeBoard(tick_seconds=0.1)
    load = board.queued(run_seconds=1e-4, launch_seconds=1e-3)
    windows = windows_of(board, repeats(5, min_ticks=5), load=load)
    assert min(window.host_bound_share for window in windows) > 0.9
    # 0.1 ms busy and 0.9 ms idle: the idle watts in between are part of what an inference costs.
    expected = 1e-4 * 300 + 9e-4 * 80
    assert statistics.fmean(w.joules for w in windows) == pytest.approx(expected, rel=0.02)


def test_a_counter_that_moves_all_the_time_is_measured_too() -> None:
    board = FakeBoard(tick_seconds=1e-4, resolution_joules=1e-6)
    windows = windows_of(board, repeats(20))
    joules = [window.joules for window in windows]
    assert relative_sd(joules) < 0.002
    assert statistics.fmean(joules) == pytest.approx(300 * RUN_SECONDS, rel=0.002)
    assert windows[0].window_seconds == pytest.approx(0.5, rel=0.1)
    assert windows[0].polling_share < 0.001  # it is not read more often than faults need


def test_inferences_longer_than_a_period_get_longer_windows() -> None:
    board = FakeBoard(tick_seconds=0.1)
    load = HostWorkload(lambda: board.work(0.313), 1, board.clock)
    windows = windows_of(board, repeats(20), load=load)
    assert windows[0].window_seconds == pytest.approx(0.41 * 0.1 / 0.005, rel=0.1)  # edges blurred by a period
    assert relative_sd([window.joules for window in windows]) < 0.01


def test_noise_of_the_counter_shows_in_the_spread() -> None:
    board = FakeBoard(tick_seconds=0.1, noise=0.05)
    windows = windows_of(board, repeats(100))
    assert 0.5 * 0.05 / 15**0.5 < relative_sd([window.joules for window in windows]) < 1.1 * 0.05 / 10**0.5


def test_uneven_ticks_are_survived() -> None:
    # every second period is 60 ms, the others 140 ms: ticks come while the host is not looking
    board = FakeBoard(tick_seconds=0.02, fault=lambda joules, now: joules)
    latched = {"value": 0.0, "index": -1}

    def uneven(joules: float, now: float) -> float:
        cycle, rest = divmod(now - 1000.0, 0.2)
        index = 2 * int(cycle) + (rest >= 0.06)
        if index != latched["index"]:
            latched.update(value=joules, index=index)
        return latched["value"]

    board.fault = uneven
    windows = windows_of(board, repeats(20, min_ticks=5))
    assert statistics.fmean(w.joules for w in windows) == pytest.approx(300 * RUN_SECONDS, rel=0.03)


# ---------------------------------------------------------------- length and repeats


def test_a_window_lasts_ten_ticks_even_if_half_a_second_is_asked_for() -> None:
    windows = windows_of(FakeBoard(tick_seconds=0.1), repeats(3))
    assert [window.ticks for window in windows] == [10, 10, 10]
    assert windows[0].window_seconds == pytest.approx(1.0, abs=0.01)


def test_windows_stop_when_they_agree() -> None:
    assert len(windows_of(FakeBoard(), MeasureSettings())) == 3


def test_windows_that_do_not_agree_are_repeated_up_to_the_most() -> None:
    assert len(windows_of(FakeBoard(noise=0.2), MeasureSettings())) == 8


def test_the_host_looks_away_while_no_tick_is_due() -> None:
    board = FakeBoard(tick_seconds=0.1)
    (window,) = windows_of(board, repeats(1))
    assert window.polling_share < 0.4 * 20e-6 / (4 * RUN_SECONDS)


def test_the_warm_up_lasts_until_the_sensor_is_settled() -> None:
    board = FakeBoard()
    meter = FakeMeter(board, settle_seconds=2.0)
    load = HostWorkload(lambda: board.work(RUN_SECONDS), 4, board.clock)
    counter = probe(meter, load, 1.0, clock=board.clock)
    aligner = WindowAligner(load, 0.004, meter, counter, MeasureSettings(), board.clock)
    started = board.now()
    aligner.warm_up()
    assert board.now() - started >= 2.0


# ---------------------------------------------------------------- faults


def faulty(joules_more: float) -> FakeBoard:
    """A counter that goes wrong at second 6, amid the windows."""
    return FakeBoard(fault=lambda joules, now: joules if now < 1006.03 else joules + joules_more)


def test_a_counter_that_goes_back_amid_a_window_is_refused() -> None:
    with pytest.raises(BadMeasurement, match="went back"):
        windows_of(faulty(-5000.0), repeats(8))


def test_a_counter_that_jumps_amid_a_window_is_refused() -> None:
    with pytest.raises(
        BadMeasurement, match=r"jumped by 1\d\d\.\d+ J within 0\.\d+ s, as if by \d{4} W, where 30\d W is"
    ):
        windows_of(faulty(100.0), repeats(8))


def test_a_counter_that_stops_amid_a_window_is_refused() -> None:
    seen = [0.0]

    def frozen(joules: float, now: float) -> float:
        seen[0] = joules if now < 1006.03 else seen[0]
        return seen[0]

    with pytest.raises(BadMeasurement, match=r"stood still at 13\d\d\d\.\d+ J for 1\.\d s while the device"):
        windows_of(FakeBoard(fault=frozen), repeats(8))


def test_a_counter_that_stood_still_in_the_probe_is_refused() -> None:
    still = CounterProbe(moves=False, tick_seconds=None, read_seconds=1e-5, idle_watts=None)
    with pytest.raises(BadMeasurement, match="stood still while it was probed"):
        windows_of(FakeBoard(), repeats(1), counter=still)


def test_a_counter_too_slow_for_ten_ticks_is_refused() -> None:
    slow = CounterProbe(moves=True, tick_seconds=4.0, read_seconds=1e-5, idle_watts=80.0)
    with pytest.raises(
        BadMeasurement, match=r"ticks every 4 s, so that 10 ticks take 40 s, but .*max_window_seconds=30"
    ):
        windows_of(FakeBoard(tick_seconds=4.0), repeats(1), counter=slow)


def test_a_counter_that_slows_down_after_the_probe_is_refused() -> None:
    probed = CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-5, idle_watts=80.0)
    with pytest.raises(BadMeasurement, match=r"ticked only \d times in .* needs 10"):
        windows_of(FakeBoard(tick_seconds=0.9), repeats(1, max_window_seconds=1.0), counter=probed)


def test_more_than_the_power_limit_is_refused() -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match=r"says (299|30\d)\.\d W .* limited to 100\.0 W"):
        windows_of(board, repeats(1), meter=FakeMeter(board, max_watts=100.0))


def test_throttling_that_begins_between_windows_is_refused() -> None:
    board = FakeBoard()

    def state() -> DeviceState:
        hot = board.now() > 1006
        return DeviceState(temperature_celsius=91 if hot else 60, throttling=("hardware slowdown",) if hot else ())

    with pytest.raises(BadMeasurement, match=r"fake board throttles at 91 C \(hardware slowdown\)"):
        windows_of(board, repeats(8), meter=FakeMeter(board, state=state))


def test_a_neighbour_is_refused_unless_allowed() -> None:
    info = FakeMeter(FakeBoard()).describe()
    shared = DeviceState(other_processes=("process 42", "process 43"))
    with pytest.raises(BadMeasurement, match=r"shared with process 42, process 43.*allow_shared=True"):
        check_state(shared, info, MeasureSettings())
    check_state(shared, info, MeasureSettings(allow_shared=True))


def test_throttling_is_refused_unless_allowed() -> None:
    info = FakeMeter(FakeBoard()).describe()
    hot = DeviceState(throttling=("software thermal slowdown",))
    with pytest.raises(BadMeasurement, match=r"throttles \(software thermal slowdown\).*allow_throttling=True"):
        check_state(hot, info, MeasureSettings())
    check_state(hot, info, MeasureSettings(allow_throttling=True))


def test_a_power_cap_is_no_fault() -> None:
    check_state(DeviceState(power_capped=True), FakeMeter(FakeBoard()).describe(), MeasureSettings())


# ---------------------------------------------------------------- ticks that differ


def ticks_of(joules: list[float], tick_seconds: float = 0.1) -> list[Tick]:
    ends = itertools.accumulate(joules, initial=50.0)
    return [Tick(total, k * tick_seconds, 1e-3) for k, total in enumerate(ends)]


def test_the_error_of_a_window_is_told_by_its_ticks() -> None:
    assert tick_error(ticks_of([5.0] * 6), 0.1) == pytest.approx(0, abs=1e-12)
    joules = [50.0, 57.0, 56.0, 55.0]
    expected = statistics.stdev(joules) / 2 / statistics.fmean(joules)
    assert tick_error(ticks_of(joules), 0.1) == pytest.approx(expected)
    assert tick_error(ticks_of([5.0]), 0.1) == 0.0
    seen = ticks_of([5.0] * 6)
    del seen[3]  # was missed: the next one holds the joules of two
    assert tick_error(seen, 0.1) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 10, 10), (0.2, 15, 15), (0.02, 10, 15)])
def test_a_window_goes_on_while_its_ticks_differ(noise: float, least: int, most: int) -> None:
    ticks = [window.ticks for window in windows_of(FakeBoard(noise=noise), repeats(4))]
    assert least <= min(ticks) <= max(ticks) <= most


def test_longer_windows_help_where_the_sensor_sees_a_small_part_of_the_time() -> None:
    tick, seen, draw = 0.1, 0.006, random.Random(0)

    def watts(start: float, run: float) -> float:
        """Mean over what the sensor sees of a load that draws 700 W in the first third of a run, then 400 W."""
        steps = [start + seen * (k + 0.5) / 400 for k in range(400)]
        return statistics.fmean(700 if (t / run) % 1 < 1 / 3 else 400 for t in steps)

    def error_of(most: int) -> float:
        errors = []
        for _ in range(150):
            run, phase = draw.uniform(0.003, 0.006), draw.uniform(0, 1)
            joules = [watts(phase + k * tick, run) for k in range(5)]
            while len(joules) < most and tick_error(ticks_of(joules), tick) > 0.005:
                joules.append(watts(phase + len(joules) * tick, run))
            errors.append(abs(statistics.fmean(joules) / 500 - 1))
        return statistics.median(errors)  # a run of which a tick holds a whole number is seen at one phase for ever

    assert error_of(10) < 0.75 * error_of(5)
