from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured
from ecc.measure.meters import command
from ecc.measure.meters.command import CommandMeter, open_meter, parse

# --- parsing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("12.5 J", None, (12.5, "J")),
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
        ("17 W", "W", (17, "W")),
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
    ],
)
def test_other_output_is_refused(text: str, unit: str | None, message: str) -> None:
    with pytest.raises(BadMeasurement, match=message):
        parse(text, unit)


@pytest.mark.parametrize(("unit", "joules"), [("kWh", 3.6e6), ("Wh", 3600), ("mJ", 1e-3), ("Ws", 1)])
def test_units_of_energy(unit: str, joules: float) -> None:
    assert pytest.approx(joules) == command.UNITS[unit]


# --- running ----------------------------------------------------------------------------------------

Program = Callable[[str], list[str]]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Writes a Python program and gives its command line."""

    def write(text: str) -> list[str]:
        path = tmp_path / "meter.py"
        path.write_text(f"import sys, time, pathlib\nhere = pathlib.Path({str(tmp_path)!r})\n{text}")
        return [sys.executable, "-S", str(path)]

    return write


@pytest.fixture
def close() -> Iterator[Callable[[CommandMeter], CommandMeter]]:
    opened: list[CommandMeter] = []
    yield lambda meter: (opened.append(meter), meter)[1]
    for meter in opened:
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


def test_a_program_that_prints_joules_is_run_for_every_reading(program: Program) -> None:
    meter = CommandMeter(program(COUNTING + "print(count * 1000, 'mJ')"))
    first = meter.read()
    assert meter.read() == pytest.approx(first + 1)
    info = meter.describe()
    assert (info.name, info.reads, info.provenance) == ("command", "energy counter", Measured())
    assert info.device == Path(sys.executable).name  # no paths in files
    assert len(info.device_id) == 12


def test_a_unit_can_be_declared(program: Program) -> None:
    assert CommandMeter(program("print(5)"), unit="kJ").read() == 5000


def test_a_program_that_prints_watts_is_integrated(
    program: Program, close: Callable[[CommandMeter], CommandMeter]
) -> None:
    meter = close(CommandMeter(program("print('40 W')"), period_seconds=0.001))
    assert meter.describe().reads == "integrated power"
    until(lambda: meter.read() > 0)


def test_a_stream_of_joules_gives_its_newest_value(
    program: Program, close: Callable[[CommandMeter], CommandMeter]
) -> None:
    text = "for i in range(3):\n    print(i, 'J', flush=True)\ntime.sleep(60)"
    meter = close(CommandMeter(program(text), stream=True))
    until(lambda: meter.read() == 2)
    assert meter.read() == 2


def test_a_stream_of_watts_is_integrated_line_by_line(
    program: Program, close: Callable[[CommandMeter], CommandMeter]
) -> None:
    text = "while True:\n    print('power', 25, 'W\\n', flush=True)\n    time.sleep(0.005)"
    meter = close(CommandMeter(program(text), stream=True))
    until(lambda: meter.read() > 0)
    first = meter.read()
    until(lambda: meter.read() > first)
    assert meter.read() > first


def test_a_stream_that_ends_is_told_at_the_next_reading(
    program: Program, close: Callable[[CommandMeter], CommandMeter]
) -> None:
    meter = close(CommandMeter(program("print('1 J')\nprint('2 J')\nsys.exit(3)"), stream=True))
    with pytest.raises(BadMeasurement, match="ended with exit code 3"):
        until(lambda: meter.read() == 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('no value')", "printed 'no value', which has no number followed"),
        ("sys.exit('cannot open port 3')", "ended with exit code 1: cannot open port 3"),
        ("sys.exit(4)", "ended with exit code 4: no message"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_program_that_fails_is_refused(text: str, message: str, stream: bool, program: Program) -> None:
    if stream and "exit" in text:
        message = "a stream must keep running"
    with pytest.raises(NoMeter, match=message):
        CommandMeter(program(text), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_program_that_is_not_there(stream: bool) -> None:
    with pytest.raises(NoMeter, match="'no-such-program' cannot be run"):
        CommandMeter(["no-such-program"], stream=stream)


def test_a_program_that_never_ends_is_refused(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(NoMeter, match=r"did not end within 0\.2 s.*command:stream:PROGRAM"):
        CommandMeter(program("time.sleep(60)"))


def test_a_silent_stream_times_out(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(NoMeter, match=r"printed nothing for 0\.2 s"):
        CommandMeter(program("time.sleep(60)"), stream=True)


def test_a_program_that_changes_its_unit_is_refused(program: Program) -> None:
    meter = CommandMeter(program(COUNTING + "print(count, 'J' if count < 101 else 'mJ')"))
    with pytest.raises(BadMeasurement, match="the declared unit is J"):
        meter.read()


# --- specs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("read-joules --port 3", (["read-joules", "--port", "3"], None, False)),
        ("mW:adb shell cat /sys/x:y", (["adb", "shell", "cat", "/sys/x:y"], "mW", False)),
        ("stream:J:watch", (["watch"], "J", True)),
        ("W:stream:sh -c 'a | b'", (["sh", "-c", "a | b"], "W", True)),
    ],
)
def test_a_spec_says_unit_and_stream(
    argument: str, call: tuple[list[str], str | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(command, "CommandMeter", lambda argv, *, unit, stream: calls.append((argv, unit, stream)))
    open_meter(argument)
    assert calls == [call]


@pytest.mark.parametrize(
    ("argument", "message"),
    [("", "no program given"), ("W:", "no program given"), ("a 'b", "cannot be split")],
)
def test_a_spec_without_a_program(argument: str, message: str) -> None:
    with pytest.raises(NoMeter, match=message):
        open_meter(argument)


def test_a_very_long_number_is_refused_quickly() -> None:
    """Tried in every way to cut it in two, half a million digits would take hours."""
    with pytest.raises(BadMeasurement, match="no number followed by a unit"):
        parse("1" * 500_000, None)
    with pytest.raises(BadMeasurement, match="which has 0 numbers"):
        parse("x" * 500_000, "J")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("while True: print('1 J ' * 10_000)", "printed more than 1 MiB; print one value"),
        ("while True: print('1' * 10_000, end='')", "printed more than 1 MiB; print one value"),
        ("sys.stderr.write('x' * 3_000_000 + '\\nworn out'); sys.exit(5)", "ended with exit code 5: worn out"),
    ],
)
def test_a_program_that_prints_without_end_is_ended(text: str, message: str, program: Program) -> None:
    with pytest.raises(NoMeter, match=message):
        CommandMeter(program(text))


def test_bytes_that_are_no_text_do_no_harm(program: Program) -> None:
    assert CommandMeter(program("sys.stdout.buffer.write(b'\\xff\\xfe 1.5 J')")).read() == 1.5
