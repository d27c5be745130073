from __future__ import annotations

import json
import math
from typing import Any

import pytest
from ecc.measure.samples import Sample, sample_line

from ecc.errors import BadFile
from measure.profile_cases import reference, sample

FULL = (16, 12)
EVERYTHING = Sample(
    index=3,
    round=1,
    session=2,
    widths=(4, 3),
    joules=0.1,
    seconds=0.2,
    relative_ci=0.01,
    edge_error=0.002,
    ticks=5,
    temperature_celsius=-3.5,
    clock_mhz=1980.0,
    power_capped=False,
    host_bound_share=0.0,
    measured_at="2026-01-01T00:00:00.000+00:00",
)


@pytest.mark.parametrize("one", [EVERYTHING, sample(0), reference(2.0)])
def test_a_row_comes_back_as_it_was(one: Sample) -> None:
    assert Sample.from_dict(json.loads(sample_line(one)), FULL) == one


def test_what_is_not_known_is_not_written() -> None:
    assert sample_line(sample(7)) == (
        '{"sample": 7, "reference": false, "round": 0, "session": 0, "widths": [4, 3], "joules": 1.0, "seconds": 0.001}\n'
    )


def test_references_have_no_number_but_say_what_they_are() -> None:
    assert reference(2.0).is_reference
    assert json.loads(sample_line(reference(2.0)))["reference"] is True
    assert json.loads(sample_line(reference(2.0)))["sample"] is None


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("joules", 0, "joules is 0; it must be a number above 0"),
        ("joules", -1.5, "joules is -1.5"),
        ("joules", math.nan, "joules is nan"),
        ("joules", math.inf, "joules is inf"),
        ("joules", "1", "joules is '1'"),
        ("joules", True, "joules is True"),
        ("joules", None, "joules is None"),
        ("seconds", 0, "seconds is 0"),
        ("sample", -1, "sample is -1; it must be a whole number of at least 0"),
        ("sample", 1.5, "sample is 1.5"),
        ("sample", None, "reference is False, although sample is None"),
        ("reference", True, "reference is True, although sample is 3"),
        ("round", None, "round is None"),
        ("session", True, "session is True"),
        ("widths", [4], r"widths is \[4\]; it must be a list of 2 whole numbers"),
        ("widths", None, "widths is None"),
        ("widths", [4, 13], r"widths holds 13; it must be a whole number in 1\.\.12"),
        ("widths", [0, 3], r"widths holds 0; .* in 1\.\.16"),
        ("widths", [4, 3.0], r"widths holds 3\.0"),
        ("relative_ci", -0.1, "relative_ci is -0.1; it must be a number of at least 0"),
        ("ticks", 0, "ticks is 0; it must be a whole number of at least 1"),
        ("power_capped", 1, "power_capped is 1; it must be a bool"),
        ("measured_at", 5, "measured_at is 5; it must be a str"),
        ("measured_at", "noon", "measured_at is 'noon'; it must be a time such as"),
        ("measured_at", "2026-01-01T00:00:00", "it must be a time such as"),  # of no zone
        ("temperature_celsius", "hot", "temperature_celsius is 'hot'; it must be a number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any, text: str) -> None:
    with pytest.raises(BadFile, match=text):
        Sample.from_dict({**json.loads(sample_line(EVERYTHING)), field: value}, FULL)
