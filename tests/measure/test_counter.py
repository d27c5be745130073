"""Workloads keep a device busy; a counter is observed, probed and refused if it misbehaves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ecc.errors import BadMeasurement
from ecc.measure import CounterProbe, Declared, DeviceState, Reading, probe_counter
from ecc.measure.counter import CounterWatch, Tick, check_steps
from ecc.measure.workload import HostWorkload
from measure.fakes import FakeBoard, FakeMeter


def watch_for(watch: CounterWatch, board: FakeBoard, seconds: float) -> list[Tick]:
    ticks: list[Tick] = []
    end = board.now() + seconds
    while board.now() < end:
        tick = watch.poll()
        ticks += [] if tick is None else [tick]
        board.wait(0.001)
    return ticks


def test_ticks_are_found_with_their_time_and_energy() -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=50)
    watch = CounterWatch(FakeMeter(board), board.clock)
    ticks = watch_for(watch, board, 1.0)
    assert len(ticks) == 10
    assert ticks[1].joules - ticks[0].joules == pytest.approx(5.0, abs=0.002)
    assert ticks[1].seconds - ticks[0].seconds == pytest.approx(0.1, abs=0.002)
    assert watch.usual_gap_seconds == pytest.approx(0.00102, abs=1e-5)
    board.wait(0.3)
    tick = watch.poll()
    assert tick is not None
    assert tick.gap_seconds == pytest.approx(0.301, abs=1e-3)
    slow = FakeBoard(tick_seconds=0.01, read_seconds=0.2)
    start, watch = slow.now(), CounterWatch(FakeMeter(slow), slow.clock)
    tick = watch.poll()
    assert tick is not None
    assert tick.seconds == pytest.approx(start + 0.3)  # the middle of the call
    assert watch.read_seconds == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda joules, now: joules if now < 1000.5 else joules - 12_000, r"decreased from 123\d\d\.\d+ J to 3\d\d"),
        (lambda joules, now: 777.0, r"stayed at 777\.000 J for 1\.0 s .*allowed: 1\.0 s.*ecc doctor"),
        (lambda joules, now: math.nan, "returned nan"),
    ],
)
def test_a_counter_that_decreases_stalls_or_is_not_finite_is_refused(
    fault: Callable[[float, float], float], message: str
) -> None:
    board = FakeBoard()
    meter = FakeMeter(board)
    read = meter.read
    meter.read = lambda: fault(read(), board.now())  # type: ignore[method-assign]
    with pytest.raises(BadMeasurement, match=message):
        watch_for(CounterWatch(meter, board.clock, stall_seconds=1.0), board, 2.0)


def steady(count: int = 11, watts: float = 300.0, period: float = 0.1) -> list[Reading]:
    return [Reading(watts * period * i, period * i) for i in range(count)]


def test_plausible_steps_pass() -> None:
    check_steps("fake", steady(), 0.1, max_watts=300)
    missed = steady(21)
    del missed[7], missed[11:13]
    check_steps("fake", missed, 0.1)
    late = steady(21)
    late[7] = Reading(late[7].joules, late[7].seconds + 0.09)  # the next interval then looks like 10 ms
    check_steps("fake", late, 0.1)
    # A counter of CPU time: 1 ms steps of a process that is preempted carry 0, 1 or 3 times the usual energy.
    joules, uneven = 0.0, []
    for i in range(1000):
        joules += (0.0, 0.3, 0.0, 0.9)[i % 4]
        uneven.append(Reading(joules, i * 1e-3))
    check_steps("fake", uneven, 1e-3)


JUMP = [Reading(tick.joules + (70 if k > 5 else 0), tick.seconds) for k, tick in enumerate(steady())]
FEW = [Reading(0, 0), Reading(30, 0.1), Reading(430, 0.2), Reading(460, 3.0)]


@pytest.mark.parametrize(
    ("ticks", "max_watts", "message"),
    [
        (JUMP, None, r"jumped by 100\.000 J within 0\.100 s \(1000 W; at most 900 W"),
        (steady(), 0.7, r"shows 300\.0 W over 1\.00 s.*limited to 0\.7 W.*another unit"),
        (FEW, 400, r"jumped by 430.*at most 1200 W"),
    ],
)
def test_jumps_and_impossible_power_are_refused(ticks: list[Reading], max_watts: float | None, message: str) -> None:
    with pytest.raises(BadMeasurement, match=message):
        check_steps("fake", ticks, 0.1, max_watts=max_watts)


# --- probe -------------------------------------------------------------------------------------------


def test_a_probe_finds_period_power_and_latency() -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=75, busy_watts=400, read_seconds=1e-4)
    meter = FakeMeter(board, state=DeviceState(temperature_celsius=41))
    assert probe_counter(meter, lambda: board.work(0.003), clock=board.clock) == CounterProbe(
        moves=True,
        tick_seconds=pytest.approx(0.1, rel=0.05),
        read_seconds=pytest.approx(1e-4, rel=0.01),
        idle_watts=pytest.approx(75, rel=0.02),
        busy_watts=pytest.approx(393, rel=0.02),  # a reading is not work
        step_joules=pytest.approx(7.5, rel=0.05),
        idle_state=DeviceState(temperature_celsius=41),
    )
    assert probe_counter(meter, seconds=1, clock=board.clock).busy_watts is None
    fixed = FakeBoard(fault=lambda joules, now: 5.0)
    assert probe_counter(FakeMeter(fixed), lambda: fixed.work(0.004), 0.5, clock=fixed.clock) == CounterProbe(
        moves=False,
        tick_seconds=None,
        read_seconds=pytest.approx(20e-6, rel=0.01),
        idle_watts=None,
        idle_state=DeviceState(),
    )


def test_a_probe_handles_slow_and_continuous_counters_and_cpu_time() -> None:
    slow = FakeBoard(tick_seconds=0.9, idle_watts=10)
    found = probe_counter(FakeMeter(slow), seconds=1.0, clock=slow.clock)
    assert (found.tick_seconds, found.idle_watts) == (pytest.approx(0.9, rel=0.01), pytest.approx(10, rel=0.01))
    fast = FakeBoard(tick_seconds=1e-5, resolution_joules=1e-9)
    load = HostWorkload(lambda: fast.work(0.004), 1, fast.clock)
    found = probe_counter(FakeMeter(fast), load, 0.1, clock=fast.clock)
    assert found.tick_seconds is not None
    assert found.tick_seconds < 0.001
    cpu = FakeBoard(tick_seconds=1e-4, idle_watts=3)
    assert probe_counter(FakeMeter(cpu, provenance=Declared(15)), seconds=0.1, clock=cpu.clock).idle_watts == 0.0


# --- workloads ---------------------------------------------------------------------------------------


def test_a_queue_is_filled_to_its_depth_and_a_slow_host_is_noticed() -> None:
    board = FakeBoard()
    load = board.queued(run_seconds=0.001, launch_seconds=1e-5, depth=3)
    assert [load.advance() for _ in range(5)] == [True, True, True, False, False]
    board.wait(0.0042)  # the first chunk is complete
    assert [load.advance() for _ in range(2)] == [True, False]
    assert (load.chunks_done, load.chunks_host_bound) == (1, 2)
    load.drain()
    assert load.chunks_done == 4
    load = board.queued(run_seconds=1e-4, launch_seconds=1e-3)
    for _ in range(20):
        load.advance()
    assert load.chunks_host_bound >= 15


def test_work_is_counted_in_whole_chunks_on_a_host_and_interpolated_in_a_queue() -> None:
    board, waited = FakeBoard(), list[int]()
    host = HostWorkload(lambda: board.work(0.001), 4, board.clock, synchronize=lambda: waited.append(1))
    start = board.now()
    assert [host.advance(), host.advance()] == [True, True]
    assert [host.done_at(start + t) for t in (0, 0.0041, 1)] == [0, 4, 8]
    assert host.chunks_done == len(waited) == 2
    load, start = board.queued(run_seconds=0.001, launch_seconds=0.0), board.now()
    while load.chunks_done < 5:
        if not load.advance():
            board.wait(1e-5)
    assert load.done_at(board.now() + 1) is None  # not known yet
    load.forget_before(start + 0.0137)
    assert load.done_at(start + 0.0137) == pytest.approx(13.7, abs=0.05)
