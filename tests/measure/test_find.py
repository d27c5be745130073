from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ecc.errors import NoMeter
from ecc.measure import Analytic, Attempt, Meter, close_meter, find, find_meter
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.meters.platform import Platform
from measure.fakes import FakeBoard, FakeMeter


def failing(reason: str) -> Callable[[str], Meter]:
    def open_meter(argument: str) -> Meter:
        raise NoMeter(reason)

    return open_meter


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in find.AUTO:
        monkeypatch.setitem(find.OPENERS, name, failing(f"no {name} here"))


# ---------------------------------------------------------------- auto


def test_auto_tries_real_meters_in_order_and_none_that_estimates() -> None:
    assert find.AUTO == ("nvml", "jetson", "amd", "apple", "rapl")


def test_auto_takes_the_first_that_works(nothing_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = FakeMeter(FakeBoard())
    monkeypatch.setitem(find.OPENERS, "amd", lambda argument: meter)
    monkeypatch.setitem(find.OPENERS, "rapl", lambda argument: pytest.fail("tried past the first that works"))
    assert find_meter() is meter


def test_auto_never_falls_back_in_silence(nothing_works: None) -> None:
    with pytest.raises(NoMeter) as caught:
        find_meter("auto")
    assert str(caught.value) == textwrap.dedent("""\
        no energy meter works here. Tried:
          nvml    no nvml here
          jetson  no jetson here
          amd     no amd here
          apple   no apple here
          rapl    no rapl here
        Ways forward:
          - repair one of the above, as its line says
          - read an external meter with any program that prints joules or watts: command:PROGRAM
          - count CPU time of this process at watts that you declare: cputime:15W
          - estimate from the published constants of another device: platform:jetson-tx2
          - take the numbers of a profile that was measured elsewhere: replay:FILE
          - write a class with read() and describe() and name it: file.py:MyMeter""")


def test_what_was_tried_can_be_asked_for(nothing_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = FakeMeter(FakeBoard())
    monkeypatch.setitem(find.OPENERS, "jetson", lambda argument: meter)
    attempts = probe_meters()
    assert [attempt.name for attempt in attempts] == list(find.AUTO)
    assert attempts[0] == Attempt("nvml", ok=False, reason="no nvml here")
    assert attempts[1] == Attempt("jetson", ok=True, reason="fake board, board, energy counter", meter=meter)


def test_auto_passes_over_a_meter_that_does_not_see_the_network(
    nothing_works: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, cpu = (FakeMeter(FakeBoard(), covers=(kind,)) for kind in ("cuda", "cpu"))
    monkeypatch.setitem(find.OPENERS, "nvml", lambda argument: gpu)
    monkeypatch.setitem(find.OPENERS, "rapl", lambda argument: cpu)
    assert find_meter() is gpu
    assert find_meter(device_type="cpu") is cpu
    assert probe_meters(device_type="cpu")[0].reason == "fake board works, but it meters cuda and not cpu."


def test_auto_on_this_machine_finds_a_meter_or_says_why_not() -> None:
    for attempt in probe_meters():
        assert attempt.reason
        assert attempt.ok == (attempt.meter is not None)
        if attempt.meter is not None:
            close_meter(attempt.meter)


# ---------------------------------------------------------------- by name


def test_a_spec_opens_its_meter_with_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def open_meter(argument: str) -> Meter:
        asked.append(argument)
        return FakeMeter(FakeBoard())

    monkeypatch.setitem(find.OPENERS, "nvml", open_meter)
    find_meter("nvml")
    find_meter("nvml:GPU-8f3a:x")
    assert asked == ["", "GPU-8f3a:x"]


def test_every_entry_of_the_table_reaches_its_file() -> None:
    assert isinstance(find_meter("cputime:15W"), CpuTimeMeter)
    with pytest.raises(NoMeter, match="no program is given"):
        find_meter("command:")
    with pytest.raises(NoMeter):
        find_meter("nvml:nonsense")
    with pytest.raises(NoMeter):
        find_meter("jetson:nonsense")
    with pytest.raises(NoMeter):
        find_meter("amd:nonsense")
    with pytest.raises(NoMeter, match="apple:nonsense is unknown"):
        find_meter("apple:nonsense")
    with pytest.raises(NoMeter, match="rapl:nonsense is unknown"):
        find_meter("rapl:nonsense")
    assert isinstance(find_meter("platform:eyeriss,tile=4"), Platform)
    with pytest.raises(NoMeter, match="replay: no file is named"):
        find_meter("replay:")


def test_what_needs_no_run_is_no_meter_and_never_found_by_auto() -> None:
    platform = find_meter("platform:jetson-tx2")
    assert isinstance(platform, Analytic)
    assert not isinstance(platform, Meter)
    assert not {"platform", "replay", "cputime", "command"} & set(find.AUTO)


def test_an_unknown_spec_names_the_known_ones() -> None:
    with pytest.raises(NoMeter, match=r"meter 'wattmeter' is unknown; give one of auto, nvml, .*cputime"):
        find_meter("wattmeter")
    with pytest.raises(NoMeter, match=r"'Platforms:tx2' is unknown \(did you mean 'platform'\?\)"):
        find_meter("Platforms:tx2")


def test_a_remedy_reaches_the_attempt(nothing_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(argument: str) -> Meter:
        raise NoMeter("only root may read it", remedy="sudo chmod a+r counter")

    monkeypatch.setitem(find.OPENERS, "rapl", refused)
    assert [attempt.remedy for attempt in probe_meters()] == ["", "", "", "", "sudo chmod a+r counter"]


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (lambda: float("nan"), "gave nan; it must give cumulative joules"),
        (lambda: "12", "gave '12'"),
        (lambda: True, "gave True"),
        (lambda: 1 / 0, "opened but cannot be read: ZeroDivisionError"),
    ],
)
def test_a_meter_that_cannot_be_read_is_no_meter(
    reading: Callable[[], float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = FakeMeter(FakeBoard())
    meter.read = reading  # type: ignore[method-assign]
    monkeypatch.setitem(find.OPENERS, "nvml", lambda argument: meter)
    with pytest.raises(NoMeter, match=said):
        find_meter("nvml")


# ---------------------------------------------------------------- from a file

MINE = """
from ecc.measure import Estimated, Measured, MeterInfo, Reading

class MyMeter:
    def read(self):
        return 42.0
    def describe(self):
        return MeterInfo(name="mine", device="my board", provenance=Measured(), scope="board")

ready = MyMeter()

class Deaf:
    def describe(self):
        return None

class Vague(MyMeter):
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

class Pretender(MyDevice):
    def describe(self):
        return MeterInfo(name="mine", device="my chip", provenance=Measured(), scope="chip")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


@pytest.mark.parametrize("name", ["MyMeter", "ready"])
def test_a_meter_from_a_file(file: str, name: str) -> None:
    meter = find_meter(f"{file}:{name}")
    assert meter.read() == 42
    assert meter.describe().device == "my board"


@pytest.mark.parametrize("name", ["MyDevice", "ready_device"])
def test_an_analytic_device_from_a_file(file: str, name: str) -> None:
    device = find_meter(f"{file}:{name}")
    assert isinstance(device, Analytic)
    assert device.describe().label == "estimated"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Pretender", r"has cost\(\) and no read\(\), so its provenance must be Estimated"),
        ("Missing", "has no Missing; it has .*MyMeter"),
        ("Deaf", r"has no method read\(\)"),
        ("Vague", "gave str; it must give a MeterInfo"),
        ("Broken", "cannot be made: OSError: no such port"),
    ],
)
def test_a_meter_from_a_file_that_does_not_work(file: str, name: str, said: str) -> None:
    with pytest.raises(NoMeter, match=said):
        find_meter(f"{file}:{name}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(NoMeter, match=r"the file nowhere\.py does not exist"):
        find_meter("nowhere.py:MyMeter")
