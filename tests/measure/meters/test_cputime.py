from __future__ import annotations

import pytest

from ecc.errors import NoMeter
from ecc.measure import Declared
from ecc.measure.meters.cputime import CpuTimeMeter, open_meter


def test_cpu_time_times_declared_watts() -> None:
    assert CpuTimeMeter(15.0, cpu_seconds=lambda: 3.0).read() == 45.0


def test_the_label_says_that_the_watts_are_declared() -> None:
    info = CpuTimeMeter(15.0).describe()
    assert info.provenance == Declared(15.0)
    assert info.label == "CPU time x declared 15 W"
    assert info.covers == ("cpu",)


@pytest.mark.parametrize(
    ("argument", "watts"), [("15W", 15), ("15", 15), ("7.5 W", 7.5), ("250mW", 0.25), ("1e1W", 10)]
)
def test_watts_are_parsed(argument: str, watts: float) -> None:
    assert open_meter(argument).describe().provenance == Declared(pytest.approx(watts))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", r"no power is declared; give the power of one busy core, such as cputime:15W"),
        ("lots", "'lots' is not a power"),
        ("-5W", "'-5W' is not a power"),
        ("1.2.3W", "'1.2.3W' is not a power"),
        ("0W", r"declared power is 0\.0 W; give a positive number"),
    ],
)
def test_wrong_watts_are_refused(argument: str, message: str) -> None:
    with pytest.raises(NoMeter, match=message):
        open_meter(argument)


def test_real_cpu_time_grows() -> None:
    meter = open_meter("15W")
    before = meter.read()
    while meter.read() <= before:
        sum(range(1000))
    assert meter.read() > before
