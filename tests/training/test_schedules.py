from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.errors import EccError
from ecc.training.schedules import PAPER_FINE_TUNING_LR, Constant, Cosine


def test_a_constant_rate_is_the_optimizers() -> None:
    assert [Constant().lr(0.1, step, 10) for step in (0, 5, 9)] == [0.1, 0.1, 0.1]


def test_the_papers_fine_tuning_decays_from_3e_5() -> None:
    schedule = Cosine(start_lr=PAPER_FINE_TUNING_LR)
    rates = [schedule.lr(1.0, step, 100) for step in range(100)]
    assert rates[0] == 3e-5
    assert rates[50] == pytest.approx(1.5e-5)
    assert rates[25] == pytest.approx(3e-5 * (1 + math.sqrt(0.5)) / 2)
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[99] < 1e-8


def test_a_cosine_ends_at_its_share_of_the_optimizers_rate() -> None:
    schedule = Cosine(final_ratio=0.1)
    assert schedule.lr(2.0, 0, 10) == 2.0
    assert schedule.lr(2.0, 10, 10) == pytest.approx(0.2)
    assert schedule.lr(2.0, 99, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", [Constant(warmup_steps=3), Cosine(warmup_steps=3)])
def test_a_warm_up_rises_evenly_to_the_full_rate(schedule: Constant | Cosine) -> None:
    assert [schedule.lr(4.0, step, 1000) for step in range(4)] == [1.0, 2.0, 3.0, 4.0]


def test_the_cosine_begins_after_the_warm_up() -> None:
    schedule = Cosine(warmup_steps=10)
    assert schedule.lr(1.0, 10, 110) == 1.0
    assert schedule.lr(1.0, 60, 110) == pytest.approx(0.5)


def test_the_cosine_begins_after_what_is_held() -> None:
    schedule = Cosine(warmup_steps=10, hold_steps=20)
    assert [schedule.lr(1.0, step, 130) for step in (10, 20, 30)] == [1.0, 1.0, 1.0]
    assert schedule.lr(1.0, 80, 130) == pytest.approx(0.5)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.integers(0, 5), st.integers(0, 60))
def test_a_fall_in_parts_is_the_fall_in_one(before: int, steps: int, after: int, warmup: int, hold: int) -> None:
    part = Cosine(start_lr=0.3, warmup_steps=warmup, hold_steps=hold, steps_before=before, steps_after=after)
    whole = Cosine(start_lr=0.3, warmup_steps=warmup, hold_steps=hold)
    rates = [part.lr(1.0, step, steps) for step in range(steps)]
    assert rates == [whole.lr(1.0, before + step, before + steps + after) for step in range(steps)]


def test_a_cosine_over_no_steps_is_defined() -> None:
    assert Cosine(warmup_steps=5).lr(1.0, 0, 0) == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: Cosine(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: Cosine(steps_before=-1), "before is -1"),
        (lambda: Cosine(steps_after=-2), "after is -2"),
        (lambda: Cosine(hold_steps=-3), "hold_steps is -3"),
        (lambda: Cosine(start_lr=0), "start_lr is 0"),
        (lambda: Cosine(final_ratio=1.1), "final_ratio is 1.1"),
    ],
)
def test_values_out_of_range_are_told(make: object, message: str) -> None:
    with pytest.raises(EccError, match=message):
        make()  # type: ignore[operator]
