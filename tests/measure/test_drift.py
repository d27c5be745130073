from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.measure.drift import Drift, Point, _interpolate, log_drift, reference_drift


def points(values: list[float], every: int = 5, session: int = 0) -> list[Point]:
    """References at these values, with samples between them."""
    made = []
    for value in values:
        made.append(Point(session, value, is_reference=True))
        made += [Point(session, 1.0, is_reference=False)] * every
    return made[:-every]


def found(values: list[float]) -> Drift:
    drift = reference_drift(points(values))
    assert drift is not None
    return drift


def test_without_references_there_is_no_drift() -> None:
    samples = [Point(0, 1.0, is_reference=False)] * 3
    assert reference_drift(samples) is None
    assert log_drift(samples) == [0.0] * 3


def test_a_single_reference_shows_no_drift() -> None:
    drift = found([2.0])
    assert (drift.references, drift.cv, drift.span, drift.noise) == (1, 0.0, 0.0, 0.0)
    assert not drift.is_significant
    assert drift.is_steady


def test_equal_references_show_no_drift() -> None:
    drift = found([2.0] * 8)
    assert (drift.cv, drift.noise, drift.is_significant) == (0.0, 0.0, False)
    assert str(drift) == ("reference measured 8 times: std 0.00%, noise 0.00%; no significant drift")


def test_a_slow_rise_is_drift_and_not_noise() -> None:
    drift = found([1.0 + 0.005 * i for i in range(10)])
    assert drift.is_significant
    assert drift.noise < 0.005
    assert drift.cv == pytest.approx(0.0148, abs=0.001)
    assert drift.span == pytest.approx(0.045)
    assert "drift corrected" in str(drift)


def test_noise_is_not_drift() -> None:
    """The test has a level of 5 %."""
    rng = random.Random(0)
    taken = [found([math.exp(rng.gauss(0, 0.01)) for _ in range(26)]) for _ in range(400)]
    assert 0.02 < sum(drift.is_significant for drift in taken) / 400 < 0.09
    assert sum(drift.noise for drift in taken) / 400 == pytest.approx(0.01, rel=0.05)


def test_a_reference_that_varies_by_more_than_three_percent_is_unsteady() -> None:
    assert found([1.0, 1.05, 1.0, 1.05]).is_steady
    assert not found([1.0, 1.07, 1.0, 1.07]).is_steady


def test_drift_is_interpolated_linearly_on_a_log_scale() -> None:
    values = [math.exp(0.01 * i) for i in range(5)]
    drift = log_drift(points(values, every=4))
    assert drift == pytest.approx([0.01 * (i / 5 - 2) for i in range(21)])


def test_outside_the_references_the_nearest_one_counts() -> None:
    sample = Point(0, 1.0, is_reference=False)
    drift = log_drift([sample, sample, *points([math.exp(0.01 * i) for i in range(5)]), sample])
    assert drift[:2] == pytest.approx([-0.02, -0.02])
    assert drift[-1] == pytest.approx(0.02)


def test_drift_is_not_interpolated_across_a_break() -> None:
    before = [*points([1.0 + 0.002 * i for i in range(6)]), Point(0, 1.0, is_reference=False)]
    after = points([0.9 + 0.002 * i for i in range(6)], session=1)
    drift = log_drift(before + after)
    assert drift[len(before) - 1] == drift[len(before) - 2]  # the last of its session, not half-way to the next
    assert math.exp(drift[len(before)] - drift[len(before) - 1]) == pytest.approx(0.9 / 1.01)


def test_a_session_without_a_reference_is_not_corrected() -> None:
    alone = Point(7, 1.0, is_reference=False)
    assert log_drift([*points([1.0 + 0.01 * i for i in range(6)]), alone])[-1] == 0.0


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True).map(sorted),
    st.integers(0, 60),
)
def test_bisection_gives_the_linear_interpolation(positions: list[int], position: int) -> None:
    knots = [(x, math.sin(x)) for x in positions]
    earlier, later = [k for k in knots if k[0] <= position], [k for k in knots if k[0] >= position]
    if not earlier or not later:
        expected = (knots[0] if not earlier else knots[-1])[1]
    else:
        (x0, y0), (x1, y1) = earlier[-1], later[0]
        expected = y0 if x0 == x1 else y0 + (y1 - y0) * (position - x0) / (x1 - x0)
    assert _interpolate(knots, position) == expected


def test_interpolation_takes_logarithmic_time() -> None:
    looked: list[int] = []

    class Knots(list[tuple[int, float]]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(1)
            return super().__getitem__(index)

    knots = Knots((10 * number, 0.001 * number) for number in range(1000))
    assert _interpolate(knots, 5005) == pytest.approx(0.5005)
    assert len(looked) <= 14
