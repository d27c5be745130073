"""Meters are found by name; without any, the message is short and lists the choices."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ecc.errors import NoMeter, option_names
from ecc.measure import Analytic, Attempt, Meter, find_meter, probe_meters, registry
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.meters.platform import Platform
from measure.fakes import FakeBoard, FakeMeter


def failing(reason: str, remedy: str = "") -> Callable[[str], Meter]:
    def open_meter(argument: str) -> Meter:
        raise NoMeter(reason, remedy=remedy)

    return open_meter


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.AUTO:
        monkeypatch.setitem(registry.OPENERS, name, failing(f"no {name} here"))


def test_without_a_meter_the_message_lists_the_choices(nothing_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPENERS, "rapl", failing("only root", "sudo chmod a+r counter"))
    gpu = FakeMeter(FakeBoard(), covers=("cuda",))
    monkeypatch.setitem(registry.OPENERS, "nvml", lambda argument: gpu)
    with pytest.raises(NoMeter) as caught, option_names():
        find_meter("auto", device_type="cpu")
    first, rest = str(caught.value).split("\n", 1)
    tried = "nvml (meters cuda), jetson, amd, apple, rapl"
    assert first == f"No energy meter works here for cpu. Tried: {tried}. `ecc doctor` explains why."
    assert rest == textwrap.dedent("""\
        Choose a source of joules with --meter:
          platform:jetson-tx2  estimate from published constants (also jetson-orin-nano, h100, eyeriss, ...)
          cputime:15W          CPU time of this process x the power of a busy core, declared by you
          cputime              latency in CPU time, without energy (wall: in wall-clock time)
          command:PROGRAM      any program that prints joules or watts
          replay:FILE          numbers of a profile that was measured elsewhere
          file.py:MyMeter      your own class with read() and describe()
        Or allow rapl: sudo chmod a+r counter""")


def test_a_meter_of_another_device_is_skipped(nothing_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = (FakeMeter(FakeBoard(), covers=(kind,)) for kind in ("cuda", "cpu"))
    closed: list[str] = []
    gpu.close = lambda: closed.append("gpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(registry.OPENERS, "nvml", lambda argument: gpu)
    monkeypatch.setitem(registry.OPENERS, "rapl", lambda argument: cpu)
    attempts = probe_meters()
    assert [attempt.name for attempt in attempts] == list(registry.AUTO)
    assert attempts[:2] == [
        Attempt("nvml", "fake board, board, energy counter", gpu),
        Attempt("jetson", "no jetson here"),
    ]
    assert find_meter() is gpu
    assert closed == []
    assert find_meter(device_type="cpu") is cpu
    assert closed == ["gpu"]
    assert probe_meters(device_type="cpu")[0].reason == "fake board works, but meters cuda, not cpu."


def test_a_spec_opens_its_meter_with_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    meter = FakeMeter(FakeBoard())
    monkeypatch.setitem(registry.OPENERS, "nvml", lambda argument: (given.append(argument), meter)[1])
    find_meter("nvml")
    find_meter("nvml:GPU-8f3a:x")
    assert given == ["", "GPU-8f3a:x"]
    assert isinstance(find_meter("cputime:15W"), CpuTimeMeter)
    assert isinstance(find_meter("platform:eyeriss,tile=4"), Platform)


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (lambda: float("nan"), "returned nan; it must return cumulative joules"),
        (lambda: "12", "returned '12'"),
        (lambda: True, "returned True"),
        (lambda: 1 / 0, "opened but cannot be read: ZeroDivisionError"),
    ],
)
def test_a_meter_that_cannot_be_read_is_refused(
    reading: Callable[[], float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = FakeMeter(FakeBoard())
    meter.read = reading  # type: ignore[method-assign]
    monkeypatch.setitem(registry.OPENERS, "nvml", lambda argument: meter)
    with pytest.raises(NoMeter, match=message):
        find_meter("nvml")


MINE = """
from ecc.measure import Estimated, Measured, MeterInfo, Reading

class MyMeter:
    def read(self):
        return 42.0
    def describe(self):
        return MeterInfo(name="mine", device="my board", provenance=Measured(), scope="board")

ready = MyMeter()

class NoRead:
    def describe(self):
        return None

class NoInfo(MyMeter):
    def describe(self):
        return "a meter"

class Broken(MyMeter):
    def __init__(self):
        raise OSError("no such port")

class MyDevice:
    def cost(self, graph, widths):
        return Reading(1.0, 2.0)
    def describe(self):
        return MeterInfo(name="mine", device="my chip", provenance=Estimated("my table"), scope="chip")

ready_device = MyDevice()

class WrongLabel(MyDevice):
    def describe(self):
        return MeterInfo(name="mine", device="my chip", provenance=Measured(), scope="chip")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def test_a_meter_of_your_own_is_loaded_from_a_file(file: str) -> None:
    for name in ("MyMeter", "ready"):
        meter = find_meter(f"{file}:{name}")
        assert isinstance(meter, Meter)
        assert meter.read() == 42
    for name in ("MyDevice", "ready_device"):
        device = find_meter(f"{file}:{name}")
        assert isinstance(device, Analytic)
        assert device.describe().label == "estimated"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongLabel", r"has cost\(\) and no read\(\), so its provenance must be Estimated"),
        ("Missing", "has no Missing; it has .*MyMeter"),
        ("NoRead", r"has no method read\(\)"),
        ("NoInfo", "returned str; it must return a MeterInfo"),
        ("Broken", "cannot be created: OSError: no such port"),
    ],
)
def test_a_faulty_meter_of_your_own_is_refused(file: str, name: str, message: str) -> None:
    with pytest.raises(NoMeter, match=message):
        find_meter(f"{file}:{name}")
