from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator

import pytest

from ecc.errors import BadMeasurement
from ecc.measure import (
    Analytic,
    Declared,
    Estimated,
    Measured,
    Meter,
    MeterInfo,
    PowerIntegrator,
    Provenance,
    Reading,
    close_meter,
)
from ecc.measure.meter import HasState
from measure.fakes import FakeBoard, FakeMeter

# ---------------------------------------------------------------- where joules come from


@pytest.mark.parametrize(
    ("provenance", "label"),
    [
        (Measured(), "measured"),
        (Measured(instrument="on-chip model"), "measured (on-chip model)"),
        (Estimated(source="a table"), "estimated"),
        (Declared(watts=15), "CPU time x declared 15 W"),
        (Declared(watts=2.5), "CPU time x declared 2.5 W"),
    ],
)
def test_every_number_carries_a_label(provenance: Provenance, label: str) -> None:
    info = MeterInfo(name="x", device="y", provenance=provenance, scope="board")
    assert info.label == label


def test_measured_and_estimated_are_never_equal() -> None:
    kinds = [Measured(), Estimated(source=""), Declared(watts=1)]
    assert [[a == b for b in kinds] for a in kinds] == [[i == j for j in range(3)] for i in range(3)]


def test_a_word_is_no_provenance() -> None:
    with pytest.raises(TypeError, match=r"provenance of meter 'x' is 'measured'; give Measured\(\)"):
        MeterInfo(name="x", device="y", provenance="measured", scope="board")  # type: ignore[arg-type]


@pytest.mark.parametrize("provenance", [Measured(), Estimated(source="table 3"), Declared(watts=15)])
def test_a_description_survives_json(provenance: Provenance) -> None:
    info = MeterInfo(
        name="nvml", device="GPU", provenance=provenance, scope="board", covers=("cuda",), notes=("a", "b")
    )
    values = json.loads(json.dumps(info.to_dict()))
    assert MeterInfo.from_dict({**values, "field_of_a_later_version": 1}) == info


# ---------------------------------------------------------------- the plug-in


class Mine:
    """The whole of a user's meter."""

    def read(self) -> float:
        return 1.0

    def describe(self) -> MeterInfo:
        return MeterInfo(name="mine", device="board", provenance=Measured(), scope="board")


def test_two_methods_make_a_meter() -> None:
    assert isinstance(Mine(), Meter)
    assert not isinstance(Mine(), HasState)
    assert isinstance(FakeMeter(FakeBoard()), HasState)


def test_closing_is_optional() -> None:
    close_meter(Mine())
    closed = []
    meter = Mine()
    meter.close = lambda: closed.append(1)  # type: ignore[attr-defined]
    close_meter(meter)
    assert closed == [1]


# ---------------------------------------------------------------- watts to joules


def values(*numbers: float) -> Iterator[float]:
    yield from numbers


def test_power_is_integrated_by_trapezoids() -> None:
    time, watts = values(0.0, 1.0, 3.0), values(10.0, 20.0, 40.0)
    counter = PowerIntegrator(lambda: next(watts), now=lambda: next(time), start=False)
    assert counter.read() == 0
    counter.sample()
    assert counter.read() == pytest.approx(15)
    counter.sample()
    assert counter.read() == pytest.approx(15 + 60)


def test_the_thread_samples_by_itself_until_it_is_closed() -> None:
    sampled = threading.Semaphore(0)

    def watts() -> float:
        sampled.release()
        return 50.0

    counter = PowerIntegrator(watts, period_seconds=0.001)
    for _ in range(5):
        assert sampled.acquire(timeout=10)
    first = counter.read()
    for _ in range(5):
        assert sampled.acquire(timeout=10)
    assert counter.read() > first
    counter.close()
    with pytest.raises(BadMeasurement, match="closed"):
        counter.read()


def test_a_failure_in_the_thread_is_raised_at_the_next_reading() -> None:
    failed = threading.Event()
    calls = iter([50.0])

    def watts() -> float:
        try:
            return next(calls)
        except StopIteration:
            failed.set()
            raise OSError("sensor unplugged") from None

    counter = PowerIntegrator(watts, period_seconds=0.001)
    assert failed.wait(timeout=10)
    counter._thread.join(timeout=10)
    with pytest.raises(BadMeasurement, match="the power reading failed: sensor unplugged"):
        counter.read()
    counter.close()


@pytest.mark.parametrize("watts", [-1.0, math.nan, math.inf])
def test_power_that_cannot_be_is_refused_at_once(watts: float) -> None:
    with pytest.raises(BadMeasurement, match="at least 0"):
        PowerIntegrator(lambda: watts, start=False)


# ---------------------------------------------------------------- what needs no run


class Table:
    def cost(self, graph: object, widths: object) -> Reading:
        return Reading(1.0, 2.0)

    def describe(self) -> MeterInfo:
        return MeterInfo(name="table", device="chip", provenance=Estimated("a table"), scope="chip")


def test_an_analytic_source_is_never_a_meter() -> None:
    assert isinstance(Table(), Analytic)
    assert not isinstance(Table(), Meter)
    assert not isinstance(FakeMeter(FakeBoard()), Analytic)
    close_meter(Table())  # there is nothing to end
