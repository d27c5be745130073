"""Any program that prints joules or watts: bench meters, smart plugs, boards behind adb or ssh.

    command:read-joules --port 3            runs for every reading; prints, for example, `1234.5 J`
    command:mW:adb shell cat /sys/power     declares the unit, because the program prints plain numbers
    command:stream:joulescope --watch       starts once; prints a line for every new value

The value is the first number followed by a unit in the last printed line, or its only number if the unit is declared.
Joules must be cumulative; watts are integrated here. No shell is used: for pipes write `sh -c "..."`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ecc.errors import BadMeasurement, EccError, NoMeter
from ecc.measure.meter import Measured, MeterInfo, PowerIntegrator

_JOULES = {"kWh": 3.6e6, "Wh": 3600.0, "mWh": 3.6, "kJ": 1e3, "J": 1.0, "Ws": 1.0, "mJ": 1e-3, "uJ": 1e-6}
_JOULES |= {"µJ": 1e-6, "uWs": 1e-6, "nJ": 1e-9}
_WATTS = {"kW": 1e3, "W": 1.0, "mW": 1e-3, "uW": 1e-6, "µW": 1e-6}
UNITS = {**_JOULES, **_WATTS}
# Without overlapping groups of digits, so that matching a long number takes linear time.
_NUMBER = r"(?<![\w.])([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)"
_WITH_UNIT = re.compile(rf"{_NUMBER}\s*({'|'.join(sorted(UNITS, key=len, reverse=True))})(?![\w])")
_BARE = re.compile(_NUMBER)
TIMEOUT_SECONDS = 20.0
MAX_BYTES = 1 << 20
"""Of what a program prints for one value."""


def parse(text: str, unit: str | None) -> tuple[float, str]:
    """The value in the last nonempty line of an output, and its unit: the declared one, or that in the text if None."""
    line = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    found = _WITH_UNIT.search(line)
    if unit is None:
        if found is None:
            raise BadMeasurement(
                f"printed {line[:80]!r}, which has no number followed by a unit of joules or watts; "
                "declare the unit, as in command:W:PROGRAM."
            )
        return float(found[1]), found[2]
    if found is not None and found[2] != unit:
        raise BadMeasurement(f"printed {line[:80]!r}, but the declared unit is {unit}; use one of the two.")
    if found is not None:
        return float(found[1]), unit
    numbers = _BARE.findall(line)
    if len(numbers) != 1:
        raise BadMeasurement(f"printed {line[:80]!r}, which has {len(numbers)} numbers; print one, or a unit after it.")
    return float(numbers[0]), unit


class CommandMeter:
    """A joule counter behind a program.

    The unit is one of `UNITS`; None reads it from the output. A stream keeps running and prints a line for every value;
    another program is run for every reading, or every `period_seconds` if it prints watts.
    """

    def __init__(
        self, argv: list[str], *, unit: str | None = None, stream: bool = False, period_seconds: float = 0.05
    ) -> None:
        self._argv = argv
        self._unit = unit
        self._counter: PowerIntegrator | _Latest | None = None
        self._stream: _Stream | None = None
        text = " ".join(argv)
        try:
            self._stream = _Stream(argv) if stream else None
            _, first_unit = self._value()
            self._unit = first_unit  # a program that changes its unit is refused
            if first_unit in _WATTS:
                # The integrator waits for the next line of a stream.
                period = 0.0 if stream else period_seconds
                self._counter = PowerIntegrator(self._scaled, period_seconds=period)
            elif stream:
                self._counter = _Latest(self._scaled)
        except EccError as error:
            self.close()
            raise NoMeter(f"command {text!r} {error}") from error
        self._reads = "energy counter" if first_unit in _JOULES else "integrated power"

    def read(self) -> float:
        """Joules, as printed or integrated from watts."""
        try:
            return self._scaled() if self._counter is None else self._counter.read()
        except BadMeasurement as error:
            raise BadMeasurement(f"command {' '.join(self._argv)!r}: {error}") from error

    def describe(self) -> MeterInfo:
        """Scope is what the program measures, which only the user knows."""
        line = " ".join(self._argv)  # may contain host names and paths, so files only contain a digest
        return MeterInfo(
            name="command",
            device=Path(self._argv[0]).name,
            device_id=hashlib.sha256(line.encode()).hexdigest()[:12],
            provenance=Measured(),
            scope="as measured by the command",
            reads=self._reads,
            notes=(f"prints {self._unit}", "scope and accuracy are not known to ECC"),
        )

    def close(self) -> None:
        """End the program and the thread that reads its output."""
        if self._stream is not None:
            self._stream.end()  # first, so that a thread that waits for the next line wakes up
        if self._counter is not None:
            self._counter.close()
        if self._stream is not None:
            self._stream.close()

    def _value(self) -> tuple[float, str]:
        text = self._stream.next_line() if self._stream is not None else _run(self._argv)
        return parse(text, self._unit)

    def _scaled(self) -> float:
        value, unit = self._value()
        return value * UNITS[unit]


class _Stream:
    """A program that keeps running and prints lines."""

    def __init__(self, argv: list[str]) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise BadMeasurement(f"cannot be run: {error}") from error

    def next_line(self) -> str:
        """Wait for the next nonempty line."""
        assert self._process.stdout is not None
        silence = threading.Timer(TIMEOUT_SECONDS, self._process.kill)
        silence.daemon = True
        silence.start()
        try:
            while line := self._process.stdout.readline(MAX_BYTES):
                if line.strip():
                    return line
        finally:
            silence.cancel()
        code = self._process.wait()
        raise BadMeasurement(
            f"ended with exit code {code} or printed nothing for {TIMEOUT_SECONDS:g} s; a stream must keep running."
        )

    def end(self) -> None:
        """End the program."""
        end_process(self._process)

    def close(self) -> None:
        """Close the pipe, after its reader has ended."""
        assert self._process.stdout is not None
        self._process.stdout.close()


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a program, by force if it does not end within two seconds."""
    process.terminate()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Latest:
    """Latest value of a stream of joules."""

    def __init__(self, next_value: Callable[[], float]) -> None:
        self._next_value = next_value
        self._joules = next_value()
        self._failure: EccError | None = None
        self._thread = threading.Thread(target=self._run, name="ecc-command-stream", daemon=True)
        self._thread.start()

    def read(self) -> float:
        """The latest value, or the failure of the stream."""
        if self._failure is not None:
            raise BadMeasurement(str(self._failure)) from self._failure
        return self._joules

    def close(self) -> None:
        """Wait for the thread, which ends with its stream."""
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        try:
            while True:
                self._joules = self._next_value()
        except EccError as failure:
            self._failure = failure


def _run(argv: list[str]) -> str:
    """Output of a program. A program that runs too long or prints too much is ended."""
    try:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BadMeasurement(f"cannot be run: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(TIMEOUT_SECONDS, end)
    last: deque[bytes] = deque(maxlen=64)  # the end of its error output
    chunks = iter(partial(process.stderr.read1, 4096), b"")  # type: ignore[attr-defined]  # it is a buffered reader
    listener = threading.Thread(target=last.extend, args=(chunks,), name="ecc-command-errors", daemon=True)
    with process:
        timer.start()
        listener.start()
        try:
            data = process.stdout.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise BadMeasurement(f"printed more than {MAX_BYTES >> 20} MiB; print one value.")
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            listener.join()
    if late.is_set():
        raise BadMeasurement(
            f"did not end within {TIMEOUT_SECONDS:g} s; if it keeps printing, use command:stream:PROGRAM."
        )
    if code != 0:
        lines = (b"".join(last) or data).decode("utf-8", errors="replace").strip().splitlines()
        raise BadMeasurement(f"ended with exit code {code}: {lines[-1] if lines else 'no message'}")
    return data.decode("utf-8", errors="replace")


def open_meter(argument: str) -> CommandMeter:
    """Open `command:[stream:][UNIT:]PROGRAM ARGUMENTS`."""
    unit, stream, rest = None, False, argument
    while True:
        word, colon, after = rest.partition(":")
        if colon and word == "stream":
            stream, rest = True, after
        elif colon and word in UNITS:
            unit, rest = word, after
        else:
            break
    try:
        argv = shlex.split(rest)
    except ValueError as error:
        raise NoMeter(f"command: {rest!r} cannot be split into words: {error}.") from error
    if not argv:
        raise NoMeter("command: no program given; write command:PROGRAM with a program that prints joules or watts.")
    return CommandMeter(argv, unit=unit, stream=stream)
