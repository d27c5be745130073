from __future__ import annotations

import pytest

from ecc.measure.workload import CHUNK_SECONDS, HostWorkload, Workload, make_workload, queue_depth
from measure.fakes import FakeBoard


def test_host_work_is_counted_when_its_chunk_is_over() -> None:
    board = FakeBoard()
    load = HostWorkload(lambda: board.work(0.001), 4, board.clock)
    start = board.now()
    assert load.advance()
    assert load.advance()
    assert load.done_at(start) == 0
    assert load.done_at(start + 0.0041) == 4
    assert load.done_at(board.now()) == 8
    assert load.chunks_done == 2


def test_host_work_can_wait_for_a_device_after_each_chunk() -> None:
    waited = []
    load = HostWorkload(lambda: None, 3, FakeBoard().clock, synchronize=lambda: waited.append(1))
    load.advance()
    load.drain()
    assert waited == [1]


def test_the_queue_is_kept_as_deep_as_asked_for_and_no_deeper() -> None:
    board = FakeBoard()
    load = board.queued(run_seconds=0.001, launch_seconds=1e-5, depth=3)
    assert [load.advance() for _ in range(5)] == [True, True, True, False, False]
    board.wait(0.0042)  # the first chunk is over
    assert [load.advance() for _ in range(2)] == [True, False]
    assert load.chunks_done == 1
    assert load.chunks_host_bound == 2  # the first two; from then on there was enough to work on


@pytest.mark.parametrize(
    ("chunk_seconds", "read_seconds", "depth"),
    [(0.004, 0.0, 6), (0.004, 0.0025, 6), (0.004, 0.005, 11), (0.01, 0.0025, 3), (0.5, 0.0025, 2)],
)
def test_the_device_has_work_for_as_long_as_the_host_may_be_held_up(
    chunk_seconds: float, read_seconds: float, depth: int
) -> None:
    assert queue_depth(chunk_seconds, read_seconds) == depth


def test_a_host_that_computes_reads_a_slow_counter_less_often() -> None:
    board = FakeBoard()
    _, chunk_seconds = make_workload(lambda: board.work(0.001), "cpu", board.clock, read_seconds=0.01)
    assert chunk_seconds == pytest.approx(0.03, rel=0.01)


def test_queued_work_is_interpolated_within_its_chunk() -> None:
    board = FakeBoard()
    load = board.queued(run_seconds=0.001, launch_seconds=0.0)
    start = board.now()
    while load.chunks_done < 5:
        if not load.advance():
            board.wait(1e-5)
    assert load.done_at(start + 0.010) == pytest.approx(10, abs=0.05)
    assert load.done_at(start + 0.0137) == pytest.approx(13.7, abs=0.05)
    assert load.done_at(board.now() + 1) is None  # not known yet
    load.forget_before(start + 0.0137)
    assert load.done_at(start + 0.0137) == pytest.approx(13.7, abs=0.05)


def test_a_host_that_cannot_keep_up_is_noticed() -> None:
    board = FakeBoard()
    load = board.queued(run_seconds=1e-4, launch_seconds=1e-3)  # launches take ten times as long
    for _ in range(20):
        load.advance()
    assert load.chunks_host_bound >= 15


def test_drain_waits_for_what_is_queued() -> None:
    board = FakeBoard()
    load = board.queued(run_seconds=0.01, launch_seconds=0.0)
    load.advance()
    load.drain()
    assert load.chunks_done == 1
    assert load.done_at(board.now()) == 4


@pytest.mark.parametrize(("run_seconds", "runs"), [(0.0001, 40), (0.001, 4), (0.5, 1)])
def test_chunks_are_calibrated_to_some_milliseconds(run_seconds: float, runs: int) -> None:
    board = FakeBoard()
    load, chunk_seconds = make_workload(lambda: board.work(run_seconds), "cpu", board.clock)
    assert isinstance(load, Workload)
    assert chunk_seconds == pytest.approx(max(run_seconds, CHUNK_SECONDS), rel=0.01)
    load.advance()
    assert load.done_at(board.now()) == runs


def test_a_run_that_takes_no_time_at_all_is_survived() -> None:
    load, chunk_seconds = make_workload(lambda: None, "cpu", FakeBoard().clock)
    assert chunk_seconds > 0
    load.advance()


def test_a_plain_function_is_no_load() -> None:
    assert not isinstance(lambda: None, Workload)
