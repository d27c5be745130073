from __future__ import annotations

import pytest

from ecc.report.markup import (
    Html,
    amount,
    exact,
    join,
    more,
    pairs,
    percent,
    score,
    section,
    table,
    tag,
    text,
    three_digits,
)
from report.folders import HOSTILE


def test_nothing_that_is_given_survives_as_markup() -> None:
    for made in (
        text(HOSTILE),
        tag("p", HOSTILE, title=HOSTILE, data_x=HOSTILE),
        join([HOSTILE, 1]),
        table(HOSTILE, [HOSTILE], [[HOSTILE, HOSTILE]]),
        pairs([(HOSTILE, HOSTILE)]),
        section("a", HOSTILE, HOSTILE),
        more(HOSTILE, HOSTILE),
        exact(1.0, HOSTILE),
    ):
        assert isinstance(made, Html)
        assert "<script" not in made
        assert "<img" not in made


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "a < b"), class_="c", id=None) == '<p class="c"><b>a &lt; b</b></p>'


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.01898, "J", "19.0 mJ"),
        (3.669e-5, "J", "36.7 µJ"),
        (123.4, "J", "123 J"),
        (0.0, "J", "0 J"),
        (42474, "", "42.5 k"),
        (None, "J", "\N{EN DASH}"),
    ],
)
def test_amounts(value: float | None, unit: str, shown: str) -> None:
    assert amount(value, unit).replace("\N{NO-BREAK SPACE}", " ") == shown


def test_shares_and_scores() -> None:
    assert percent(-0.505, sign=True) == "\N{MINUS SIGN}50.5\N{NO-BREAK SPACE}%"
    assert percent(0.00001, sign=True) == "±0.0\N{NO-BREAK SPACE}%"
    assert percent(-0.00001) == "0.0\N{NO-BREAK SPACE}%"
    assert percent(None) == score(None) == "\N{EN DASH}"
    assert score(0.98607) == "0.9861"
    assert (three_digits(0.001234), three_digits(-19.0)) == ("0.00123", "\N{MINUS SIGN}19.0")


def test_a_number_carries_itself() -> None:
    assert exact(0.1 + 0.2, "0.3") == '<data value="0.30000000000000004">0.3</data>'
    assert exact(None, "none") == "none"


def test_a_table_has_caption_and_scopes() -> None:
    made = table("Scores", ("a", "b"), [("x", 1)])
    assert "<caption><span>Scores</span></caption>" in made
    assert '<th scope="row">x</th><td>1</td>' in made
    assert 'aria-label="Scores"' in made
