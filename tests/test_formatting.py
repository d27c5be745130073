"""Numbers for people."""

from __future__ import annotations

import pytest

from ecc.formatting import duration, percent, si, si_scale


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0247, "J", "24.7 mJ"),
        (0.019, "J", "19.0 mJ"),
        (0.9996, "J", "1.00 J"),
        (999.6, "J", "1.00 kJ"),
        (-0.0247, "J", "-24.7 mJ"),
        (3.2e-6, "s", "3.20 µs"),
        (4e-14, "J", "0.0000000000000400 J"),
        (0, "J", "0 J"),
        (714e6, "", "714 M"),
        (256, "", "256"),
        (0.5, "", "0.500"),
    ],
)
def test_si_shows_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    assert si(value, unit) == text
    factor, shown = si_scale(value, unit)
    assert shown.endswith(unit)
    if unit and abs(value) > 1e-12:
        assert 0.999 < abs(value) / factor < 1000


def test_percent_and_duration() -> None:
    assert [percent(0.4949), percent(-0.01, sign=True), percent(1e-5, sign=True), percent(-1e-5)] == [
        "49.5 %",
        "-1.0 %",
        "±0.0 %",
        "0.0 %",
    ]
    assert [duration(45), duration(720), duration(12600)] == ["45 s", "12 min", "3.5 h"]
