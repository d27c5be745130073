from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured
from ecc.measure.meters import command
from ecc.measure.meters.command import CommandMeter, open_meter, parse

# --- parsing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("12.5J\n", None, (12.5, "J")),
        ("energy: 3e2 mJ", None, (300, "mJ")),
        ("GPU2 power 41.5 W, limit 250 W", None, (41.5, "W")),
        ("old 1 J\nnew 2 J\n\n", None, (2, "J")),
        ("0.0012 kWh", None, (0.0012, "kWh")),
        ("VDD_IN 4820mW/4711mW", None, (4820, "mW")),
        ("-3 W", None, (-3, "W")),
        ("17", "uJ", (17, "uJ")),
        ("t=5 value 17 W", "W", (17, "W")),
        ("CPU0 17", "W", (17, "W")),
        ("12 µJ", None, (12, "µJ")),
        (".5 W", None, (0.5, "W")),
    ],
)
def test_value_and_unit_are_found(text: str, unit: str | None, value: tuple[float, str]) -> None:
    assert parse(text, unit) == value


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("17", None, r"printed '17', which has no number followed by a unit.*declare the unit"),
        ("17 Watt", None, "no number followed by a unit"),
        ("", None, "printed ''"),
        ("17 mW", "W", "printed '17 mW', but the declared unit is W"),
        ("none", "W", "which has 0 numbers"),
        ("t=5 value 17", "W", "which has 2 numbers; print one"),
        ("1" * 500_000, None, "no number followed by a unit"),  # must take linear time
        ("x" * 500_000, "J", "which has 0 numbers"),
    ],
    ids=range(8),
)
def test_other_output_is_refused(text: str, unit: str | None, message: str) -> None:
    with pytest.raises(BadMeasurement, match=message):
        parse(text, unit)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("read-joules --port 3", (["read-joules", "--port", "3"], None, False)),
        ("mW:adb shell cat /sys/x:y", (["adb", "shell", "cat", "/sys/x:y"], "mW", False)),
        ("stream:J:watch", (["watch"], "J", True)),
        ("W:stream:sh -c 'a | b'", (["sh", "-c", "a | b"], "W", True)),
        ("", "no program given"),
        ("W:", "no program given"),
        ("a 'b", "cannot be split"),
    ],
)
def test_a_spec_has_unit_stream_and_program(argument: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(command, "CommandMeter", lambda argv, *, unit, stream: calls.append((argv, unit, stream)))
    if isinstance(call, str):
        with pytest.raises(NoMeter, match=call):
            open_meter(argument)
    else:
        open_meter(argument)
        assert calls == [call]


# --- running -----------------------------------------------------------------------------------------

Open = Callable[..., CommandMeter]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens a meter for a Python program, and closes it at the end."""
    meters: list[CommandMeter] = []

    def make(text: str, **options: Any) -> CommandMeter:
        path = tmp_path / "meter.py"
        path.write_text(f"import sys, time, pathlib\nhere = pathlib.Path({str(tmp_path)!r})\n{text}")
        meters.append(CommandMeter([sys.executable, "-S", str(path)], **options))
        return meters[-1]

    yield make
    for meter in meters:
        meter.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


COUNTING = """
file = here / "count"
count = int(file.read_text()) + 1 if file.exists() else 100
file.write_text(str(count))
"""


def test_a_program_that_prints_joules_is_run_for_every_reading(opened: Open) -> None:
    meter = opened(COUNTING + "print(count * 1000, 'mJ' if count < 103 else 'J')")
    first = meter.read()
    assert meter.read() == pytest.approx(first + 1)
    info = meter.describe()
    assert (info.name, info.reads, info.provenance) == ("command", "energy counter", Measured())
    assert info.device == Path(sys.executable).name  # no paths in files
    assert len(info.device_id) == 12
    with pytest.raises(BadMeasurement, match="the declared unit is mJ"):  # it changed its unit
        meter.read()
    assert opened("sys.stdout.buffer.write(b'\\xff\\xfe 5')", unit="kJ").read() == 5000


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("print('40 W')", {"period_seconds": 0.001}),
        ("while True:\n    print('power', 25, 'W\\n', flush=True)\n    time.sleep(0.005)", {"stream": True}),
    ],
)
def test_watts_are_integrated(text: str, options: dict[str, Any], opened: Open) -> None:
    meter = opened(text, **options)
    assert meter.describe().reads == "integrated power"
    until(lambda: meter.read() > 0)
    first = meter.read()
    until(lambda: meter.read() > first)


def test_a_stream_of_joules_gives_its_newest_value_until_it_ends(opened: Open) -> None:
    text = "for i in range(3):\n    print(i, 'J', flush=True)\n"
    meter = opened(text + "time.sleep(60)", stream=True)
    until(lambda: meter.read() == 2)
    ended = opened(text + "sys.exit(3)", stream=True)
    with pytest.raises(BadMeasurement, match="ended with exit code 3"):
        until(lambda: ended.read() == 3)


@pytest.mark.parametrize(
    ("text", "stream", "message"),
    [
        ("print('no value')", False, "printed 'no value', which has no number followed"),
        ("print('no value')", True, "printed 'no value', which has no number followed"),
        ("sys.exit('cannot open port 3')", False, "ended with exit code 1: cannot open port 3"),
        ("sys.exit(4)", False, "ended with exit code 4: no message"),
        ("sys.exit(4)", True, "a stream must keep running"),
        ("time.sleep(60)", False, r"did not end within 0\.5 s.*command:stream:PROGRAM"),
        ("time.sleep(60)", True, r"printed nothing for 0\.5 s"),
        ("while True: print('1 J ' * 10_000)", False, "printed more than 1 MiB; print one value"),
        ("while True: print('1' * 10_000, end='')", False, "printed more than 1 MiB; print one value"),
        ("sys.stderr.write('x' * 3_000_000 + '\\nworn out'); sys.exit(5)", False, "exit code 5: worn out"),
    ],
)
def test_a_program_that_fails_is_silent_or_prints_without_end_is_refused(
    text: str, stream: bool, message: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep" in text:
        monkeypatch.setattr(command, "TIMEOUT_SECONDS", 0.5)
    with pytest.raises(NoMeter, match=message):
        opened(text, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_missing_program_is_refused(stream: bool) -> None:
    with pytest.raises(NoMeter, match="'no-such-program' cannot be run"):
        CommandMeter(["no-such-program"], stream=stream)
