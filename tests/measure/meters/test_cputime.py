from __future__ import annotations

import pytest

from ecc.errors import NoMeter
from ecc.measure import Declared
from ecc.measure.meters.cputime import CpuTimeMeter, open_meter


@pytest.mark.parametrize(
    ("argument", "watts"), [("15W", 15), ("15", 15), ("7.5 W", 7.5), ("250mW", 0.25), ("1e1W", 10)]
)
def test_cpu_time_is_multiplied_by_declared_watts(argument: str, watts: float) -> None:
    info = open_meter(argument).describe()
    assert info.provenance == Declared(pytest.approx(watts))
    assert (info.label, info.covers) == (f"CPU time x declared {watts:g} W", ("cpu",))
    assert CpuTimeMeter(watts, cpu_seconds=lambda: 3.0).read() == 3 * watts
    assert open_meter(argument).read() > 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("x", r"'x' is not a power; give the power of one busy core, such as cputime:15W"),
        ("lots", "'lots' is not a power"),
        ("-5W", "'-5W' is not a power"),
        ("1.2.3W", "'1.2.3W' is not a power"),
        ("0W", r"declared power is 0\.0 W; give a positive number"),
    ],
)
def test_wrong_watts_are_refused(argument: str, message: str) -> None:
    with pytest.raises(NoMeter, match=message):
        open_meter(argument)
