from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.measure.drift import Drift, Point, _interpolate, log_drift, reference_drift

SAMPLE = Point(0, 1.0, is_reference=False)


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


@pytest.mark.parametrize(
    ("values", "cv", "span", "is_significant", "is_steady", "text"),
    [
        ([2.0], 0, 0, False, True, "measured 1 times"),
        ([2.0] * 8, 0, 0, False, True, "measured 8 times: std 0.00%, noise 0.00%; no significant drift"),
        ([1.0 + 0.005 * i for i in range(10)], 0.0148, 0.045, True, True, "drift corrected"),
        ([1.0, 1.05, 1.0, 1.05], 0.028, 0.05, False, True, "no significant drift"),
        ([1.0, 1.07, 1.0, 1.07], 0.039, 0.07, False, False, "no significant drift"),
    ],
)
def test_variation_of_the_reference_is_described(
    values: list[float], cv: float, span: float, is_significant: bool, is_steady: bool, text: str
) -> None:
    drift = found(values)
    assert (drift.cv, drift.span) == (pytest.approx(cv, abs=0.001), pytest.approx(span))
    assert (drift.is_significant, drift.is_steady) == (is_significant, is_steady)
    assert text in str(drift)


def test_drift_is_interpolated_on_a_log_scale_and_constant_outside_the_references() -> None:
    drifting = points([math.exp(0.01 * i) for i in range(5)], every=4)
    expected = [0.01 * (i / 5 - 2) for i in range(21)]
    assert log_drift([SAMPLE, SAMPLE, *drifting, SAMPLE]) == pytest.approx([-0.02, -0.02, *expected, 0.02])
    assert reference_drift([SAMPLE] * 3) is None
    assert log_drift([SAMPLE] * 3) == [0.0] * 3
    assert log_drift([*drifting, Point(7, 1.0, is_reference=False)])[-1] == 0.0  # a session without a reference


def test_drift_is_not_interpolated_across_a_break() -> None:
    before = [*points([1.0 + 0.002 * i for i in range(6)]), SAMPLE]
    after = points([0.9 + 0.002 * i for i in range(6)], session=1)
    steps = reference_drift([*points([1.0, 1.0]), *points([2.0, 2.0], session=1)])
    assert steps is not None
    assert (steps.noise, steps.span) == (0.0, 1.0)
    drift = log_drift(before + after)
    assert drift[len(before) - 1] == drift[len(before) - 2]  # the last of its session, not half-way to the next
    assert math.exp(drift[len(before)] - drift[len(before) - 1]) == pytest.approx(0.9 / 1.01)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True).map(sorted), st.integers(0, 60))
def test_bisection_gives_the_linear_interpolation(positions: list[int], position: int) -> None:
    knots = [(x, math.sin(x)) for x in positions]
    earlier, later = [k for k in knots if k[0] <= position], [k for k in knots if k[0] >= position]
    if not earlier or not later:
        expected = (knots[0] if not earlier else knots[-1])[1]
    else:
        (x0, y0), (x1, y1) = earlier[-1], later[0]
        expected = y0 if x0 == x1 else y0 + (y1 - y0) * (position - x0) / (x1 - x0)
    assert _interpolate(knots, position) == expected
