from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.methods.ecc.schedule import MAX_UPDATES, PLANS, Schedule


def test_a_schedule_by_hand() -> None:
    schedule = Schedule((1.0,), (0.6,), 1000)
    assert (schedule.ramp_start, schedule.ramp_end, schedule.every) == (20, 620, 4)
    assert schedule.shares(0) == schedule.shares(20) == (1.0,)
    assert schedule.shares(320) == pytest.approx((0.6 + 0.4 / 8,))
    assert schedule.shares(620) == schedule.shares(1000) == (0.6,)
    assert [step for step in range(1001) if schedule.updates_at(step)] == list(range(24, 621, 4))


def test_short_runs_update_at_every_step() -> None:
    schedule = Schedule((1.0,), (0.6,), 100)
    assert [step for step in range(101) if schedule.updates_at(step)] == list(range(3, 63))


def test_the_end_is_planned_at_the_first_and_the_last_update_and_a_few_times_between() -> None:
    schedule = Schedule((1.0,), (0.6,), 1000)
    updates = [step for step in range(1001) if schedule.updates_at(step)]
    plans = [step for step in updates if schedule.plans_at(step)]
    assert plans[0] == updates[0]
    assert plans[-1] == updates[-1]
    assert PLANS <= len(plans) <= PLANS + 2
    short = Schedule((1.0,), (0.6,), 10)
    assert all(short.plans_at(step) for step in range(11) if short.updates_at(step))


def test_long_runs_update_at_most_about_four_hundred_times() -> None:
    schedule = Schedule((1.0,), (0.5,), 20_001)
    updates = [step for step in range(20_001) if schedule.updates_at(step)]
    assert schedule.every == 30
    assert len(updates) <= MAX_UPDATES + 1
    assert updates[-1] == schedule.ramp_end


@given(st.integers(1, 2000), st.floats(0, 0.4), st.floats(0.01, 0.6), st.floats(0.1, 1.2))
def test_every_schedule_falls_to_its_end_in_time(steps: int, warm_up: float, ramp: float, end: float) -> None:
    schedule = Schedule((1.0, 0.9), (end, 0.5), steps, warm_up, ramp)
    updates = [step for step in range(steps + 1) if schedule.updates_at(step)]
    assert updates[-1] == schedule.ramp_end <= steps
    assert updates[0] > schedule.ramp_start >= 0
    shares = [schedule.shares(step) for step in updates]
    assert shares[-1] == (end, 0.5)
    for before, after in pairwise(shares):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def test_what_is_already_within_the_budget_does_not_rise() -> None:
    assert Schedule((0.5,), (0.8,), 10).shares(1) == (0.8,)  # allowed, but nothing comes back


@pytest.mark.parametrize(
    ("steps", "warm_up", "ramp", "words"),
    [(0, 0.02, 0.6, "steps=0 is below 1"), (9, 0.5, 0.6, "shares of the steps"), (9, 0.1, 0.0, "ramp above 0")],
)
def test_impossible_schedules_are_refused(steps: int, warm_up: float, ramp: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule((1.0,), (0.5,), steps, warm_up, ramp)
