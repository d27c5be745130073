from __future__ import annotations

import math

import pytest

from ecc.errors import BadMeasurement
from ecc.measure import CounterProbe, Declared, DeviceState, Reading, probe
from ecc.measure.counter import CounterWatch, check_steps
from ecc.measure.workload import HostWorkload
from measure.fakes import FakeBoard, FakeMeter


def watch_for(watch: CounterWatch, board: FakeBoard, seconds: float) -> list[Reading]:
    ticks: list[Reading] = []
    end = board.now() + seconds
    while board.now() < end:
        tick = watch.poll()
        if tick is not None:
            ticks.append(tick)
        board.wait(0.001)
    return ticks


# ---------------------------------------------------------------- watching


def test_ticks_are_seen_when_they_come() -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=50)
    watch = CounterWatch(FakeMeter(board), board.clock)
    ticks = watch_for(watch, board, 1.0)
    assert len(ticks) == 10
    assert ticks[1].joules - ticks[0].joules == pytest.approx(5.0, abs=0.002)
    assert ticks[1].seconds - ticks[0].seconds == pytest.approx(0.1, abs=0.002)
    assert watch.usual_gap_seconds == pytest.approx(0.00102, abs=1e-5)


def test_a_tick_knows_how_closely_it_was_seen() -> None:
    board = FakeBoard(tick_seconds=0.1)
    watch = CounterWatch(FakeMeter(board), board.clock)
    board.wait(0.3)
    tick = watch.poll()
    assert tick is not None
    assert tick.gap_seconds == pytest.approx(0.3, abs=1e-3)


def test_a_reading_belongs_to_the_middle_of_the_call() -> None:
    board = FakeBoard(tick_seconds=0.01, read_seconds=0.2)
    start = board.now()
    watch = CounterWatch(FakeMeter(board), board.clock)
    tick = watch.poll()
    assert tick is not None
    assert tick.seconds == pytest.approx(start + 0.3)
    assert watch.read_seconds == pytest.approx(0.4)


def test_a_counter_that_goes_back_is_refused() -> None:
    board = FakeBoard(fault=lambda joules, now: joules if now < 1000.5 else joules - 12_000)
    watch = CounterWatch(FakeMeter(board), board.clock)
    with pytest.raises(BadMeasurement, match=r"fake went back from 123\d\d\.\d+ J to 3\d\d\.\d+ J.*reset.*wrapped"):
        watch_for(watch, board, 1.0)


def test_a_counter_that_stands_still_is_refused() -> None:
    board = FakeBoard(fault=lambda joules, now: 777.0)
    watch = CounterWatch(FakeMeter(board), board.clock, stall_seconds=1.0)
    with pytest.raises(BadMeasurement, match=r"stood still at 777\.000 J for 1\.0 s.*ecc doctor"):
        watch_for(watch, board, 2.0)


def test_a_counter_that_reads_no_number_is_refused() -> None:
    board = FakeBoard()
    meter = FakeMeter(board)
    meter.read = lambda: math.nan  # type: ignore[method-assign]
    with pytest.raises(BadMeasurement, match="read nan"):
        CounterWatch(meter, board.clock)


# ---------------------------------------------------------------- steps


def steady(count: int = 11, watts: float = 300.0, period: float = 0.1) -> list[Reading]:
    return [Reading(watts * period * i, period * i) for i in range(count)]


def test_steady_steps_pass() -> None:
    check_steps("fake", steady(), 0.1, max_watts=300)


def test_a_jump_is_refused() -> None:
    ticks = steady()
    ticks[6:] = [Reading(tick.joules + 70, tick.seconds) for tick in ticks[6:]]
    with pytest.raises(
        BadMeasurement, match=r"jumped by 100\.000 J within 0\.100 s, as if by 1000 W, where 300 W is usual"
    ):
        check_steps("fake", ticks, 0.1)


def test_two_ticks_seen_as_one_are_no_jump() -> None:
    ticks = steady(21)
    del ticks[7], ticks[11:13]
    check_steps("fake", ticks, 0.1)


def test_a_tick_seen_late_is_no_jump() -> None:
    ticks = steady(21)
    ticks[7] = Reading(ticks[7].joules, ticks[7].seconds + 0.09)  # then the next one seems to take 10 ms
    check_steps("fake", ticks, 0.1)


def test_more_than_the_device_can_draw_is_refused() -> None:
    with pytest.raises(BadMeasurement, match=r"says 300\.0 W over 1\.00 s.*limited to 0\.7 W.*another unit"):
        check_steps("fake", steady(), 0.1, max_watts=0.7)


def test_a_jump_is_also_held_against_the_limit_of_the_device() -> None:
    ticks = [Reading(0, 0), Reading(30, 0.1), Reading(430, 0.2), Reading(460, 3.0)]
    with pytest.raises(BadMeasurement, match=r"jumped by 430.*400 W is usual or allowed"):
        check_steps("fake", ticks, 0.1, max_watts=400)


def test_a_continuous_counter_is_judged_over_longer_steps() -> None:
    # 1 ms steps that carry 0, 1 or 6 times the usual joules, as CPU time of a process that is preempted does
    joules = 0.0
    ticks = []
    for i in range(1000):
        joules += (0.0, 0.3, 0.0, 0.9)[i % 4]
        ticks.append(Reading(joules, i * 1e-3))
    check_steps("fake", ticks, 1e-3)


# ---------------------------------------------------------------- probing


def test_probe_finds_period_idle_power_and_latency() -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=75, busy_watts=400, read_seconds=1e-4)
    found = probe(FakeMeter(board), lambda: board.work(0.003), clock=board.clock)
    assert found.moves
    assert found.tick_seconds == pytest.approx(0.1, rel=0.05)
    assert found.idle_watts == pytest.approx(75, rel=0.02)
    assert found.busy_watts == pytest.approx(393, rel=0.02)  # the reading itself is not work
    assert found.read_seconds == pytest.approx(1e-4, rel=0.01)
    assert found.step_joules == pytest.approx(7.5, rel=0.05)


def test_probe_without_a_load_watches_at_rest_only() -> None:
    board = FakeBoard(idle_watts=75)
    meter = FakeMeter(board, state=DeviceState(temperature_celsius=41))
    found = probe(meter, seconds=1, clock=board.clock)
    assert found.moves
    assert found.busy_watts is None
    assert found.idle_state == DeviceState(temperature_celsius=41)


def test_probe_says_when_a_counter_does_not_move() -> None:
    board = FakeBoard(fault=lambda joules, now: 5.0)
    found = probe(FakeMeter(board), lambda: board.work(0.004), seconds=0.5, clock=board.clock)
    assert found == CounterProbe(
        moves=False,
        tick_seconds=None,
        read_seconds=pytest.approx(20e-6, rel=0.01),
        idle_watts=None,
        busy_watts=None,
        step_joules=None,
        idle_state=DeviceState(),
    )


def test_probe_waits_longer_for_a_slow_counter() -> None:
    board = FakeBoard(tick_seconds=0.9, idle_watts=10)
    found = probe(FakeMeter(board), seconds=1.0, clock=board.clock)
    assert found.tick_seconds == pytest.approx(0.9, rel=0.01)
    assert found.idle_watts == pytest.approx(10, rel=0.01)


def test_a_counter_that_always_moves_has_a_period_near_zero() -> None:
    board = FakeBoard(tick_seconds=1e-5, resolution_joules=1e-9)
    found = probe(FakeMeter(board), HostWorkload(lambda: board.work(0.004), 1, board.clock), 0.5, clock=board.clock)
    assert found.tick_seconds is not None
    assert found.tick_seconds < 0.001


def test_cpu_time_spent_on_polling_is_not_idle_power() -> None:
    board = FakeBoard(tick_seconds=1e-4, idle_watts=3)
    found = probe(FakeMeter(board, provenance=Declared(15)), seconds=0.5, clock=board.clock)
    assert found.idle_watts == 0.0
