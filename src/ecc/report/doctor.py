"""What can be measured on a machine, for people: each meter, how good it is or why it does not work, what next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ecc.measure.doctor import DoctorReport, MeterFinding, SelfTest
from ecc.measure.meter import Declared, DeviceState, Estimated
from ecc.measure.registry import FALLBACKS

GOOD, FAIR = 0.01, 0.03
"""Relative standard deviations of one window up to which a meter is called good, or fair."""

_TELL_APART = 1.96 * math.sqrt(2)  # times that: what two windows of one network stay within, 19 times of 20


def doctor_view(examination: DoctorReport) -> RenderableType:
    """Machine, meters, the findings on each that works, and what to do next."""
    parts: list[RenderableType] = [Text(line) for line in _machine(examination.machine)]
    parts.append(_table(examination) if len(examination.findings) > 1 else Text())
    for finding in examination.working:
        parts += [_finding(finding), Text()]
    if examination.working:
        spec = shlex.quote(examination.working[0].spec)
        parts.append(Text(f"Next: ecc profile digits --meter {spec} -o digits.profile"))
    else:
        parts += _nothing(examination)
    return Group(*parts)


# ---------------------------------------------------------------- machine and meters


def _machine(machine: dict[str, str]) -> Iterator[str]:
    cuda = machine["cuda"]
    if "gpus" in machine:
        cuda += f" (driver {machine['driver']}, cuDNN {machine['cudnn']})"
    yield f"ecc {machine['ecc']}, Python {machine['python']}, torch {machine['torch']}, CUDA: {cuda}"
    cores = "1 core" if machine["cores"] == "1" else f"{machine['cores']} cores"
    gpus = f"; {machine['gpus']}" if "gpus" in machine else ""
    yield f"{machine['system']}, {machine['processor']}, {cores}{gpus}"


def _table(examination: DoctorReport) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("meter", no_wrap=True)
    table.add_column("works")
    table.add_column("what it reads, or why it does not work", overflow="fold")
    for finding in examination.findings:
        works = Text("yes", style="green") if finding.works else Text("no")
        beside = examination.working and not finding.works  # where nothing works, the reasons are what matters
        table.add_row(finding.spec, works, Text(finding.reason), style="dim" if beside else None)
    return table


# ---------------------------------------------------------------- one meter


def _finding(finding: MeterFinding) -> RenderableType:
    assert finding.info is not None
    info = finding.info
    title = Text.assemble((finding.spec, "bold"), f"  {info.device}, {info.scope}: ", (info.label, "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in _lines(finding):
        grid.add_row(name, Text(value))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def _lines(finding: MeterFinding) -> Iterator[tuple[str, str]]:
    info, counter, test = finding.info, finding.counter, finding.self_test
    assert info is not None
    if isinstance(info.provenance, Estimated):
        yield "joules", f"computed from constants: {info.provenance.source}"
    elif counter is None and not finding.trouble:
        yield "joules", info.reads
    if counter is not None:
        parts = [info.reads]
        if counter.tick_seconds is not None:
            parts.append(f"moves every {_si(counter.tick_seconds, 's')}")
        if info.resolution_joules is not None:
            parts.append(f"in units of {_si(info.resolution_joules, 'J')}")
        parts.append(f"a reading takes {_si(counter.read_seconds, 's')}")
        yield "counter", ", ".join(parts)
        if counter.idle_watts is not None and not isinstance(info.provenance, Declared):
            yield "idle", ", ".join([_watts(counter.idle_watts), *_state(counter.idle_state)])
    if test is not None:
        result = test.measurement
        state = DeviceState(temperature_celsius=result.temperature_celsius, clock_mhz=result.clock_mhz)
        capped = ["at its power limit"] if result.power_capped else []
        yield "at work", ", ".join([_watts(result.watts), *_state(state), *capped])
        yield "self-test", _test(test)
        yield "repeats to", f"{test.repeatability:.2%} (standard deviation of a window): {_verdict(test.repeatability)}"
    if finding.trouble:
        yield "trouble", finding.trouble
    for note in info.notes:
        yield "note", note


def _test(test: SelfTest) -> str:
    result = test.measurement
    lengths = sum(window.window_seconds for window in result.windows) / len(result.windows)
    images = "1 image" if result.batch == 1 else f"{result.batch} images"
    return (
        f"{_si(result.joules, 'J')} and {_si(result.seconds, 's')} for {images} of a small network on {test.device}, "
        f"{len(result.windows)} windows of {_si(lengths, 's')}"
    )


def _verdict(repeatability: float) -> str:
    differ = f"networks that differ by {_TELL_APART * repeatability:.1%} can be told apart in one window"
    if repeatability <= GOOD:
        return f"good; {differ}"
    if repeatability <= FAIR:
        return f"fair; {differ}, and repeats average the rest out"
    return (
        "poor; something else runs on this device, or its clock changes. Close other programs, let it warm up, "
        "and run `ecc doctor` again"
    )


def _state(state: DeviceState | None) -> Iterator[str]:
    if state is None:
        return
    if state.temperature_celsius is not None:
        yield f"{state.temperature_celsius:.0f} °C"
    if state.clock_mhz is not None:
        yield f"{state.clock_mhz:.0f} MHz"
    yield from (f"throttled: {reason}" for reason in state.throttling)
    yield from (f"shared with {process}" for process in state.other_processes)


# ---------------------------------------------------------------- nothing works

_NOTHING = (
    "No energy meter works here: this machine cannot tell how much energy a network uses. That is usual in virtual "
    "machines, in containers and on many laptops. ECC never makes joules up, so it asks you to choose where they "
    "come from. Give one of these wherever a command takes --meter:"
)
_IN_WORDS = {
    "platform:jetson-tx2": "Computes joules from published constants of a device (also gtx-1080-ti, eyeriss). Needs "
    "nothing, takes seconds; every number is labelled as estimated. The best way to try ECC.",
    "cputime:15W": "Counts the CPU time of your network and multiplies it by the watts that you say one busy core "
    "draws. Ranks networks for a CPU.",
    "command:PROGRAM": "Runs any program that prints joules or watts: a smart plug, a bench meter, a phone behind "
    "adb, a board behind ssh.",
    "replay:FILE": "Takes the numbers of a profile that was measured on another machine.",
    "file.py:MyMeter": "Your own Python class with two methods, read() and describe().",
}


def _nothing(examination: DoctorReport) -> Iterator[RenderableType]:
    yield Text(_NOTHING)
    yield Text()
    ways = Table.grid(padding=(0, 2))
    ways.add_column(no_wrap=True, style="bold")
    ways.add_column(overflow="fold")
    known = {spec: what for spec, what in FALLBACKS if spec}
    for spec in [*_IN_WORDS, *(spec for spec in known if spec not in _IN_WORDS)]:
        ways.add_row(spec, Text(_IN_WORDS.get(spec) or f"{known[spec].capitalize()}."))
    yield Padding(ways, (0, 0, 0, 2))
    yield Text()
    remedies = [finding for finding in examination.findings if finding.remedy]
    for finding in remedies:
        yield Text(f"Or let {finding.spec} be read, which works until the next boot:")
        yield Padding(Text(finding.remedy, style="bold", overflow="fold"), (0, 0, 1, 2))
    yield Text("To begin: ecc profile digits --meter platform:jetson-tx2 -o digits.profile")


# ---------------------------------------------------------------- numbers


def _watts(watts: float) -> str:
    return f"{watts:.0f} W" if watts >= 100 else f"{watts:.1f} W" if watts >= 10 else f"{watts:.2f} W"


def _si(value: float, unit: str) -> str:
    """Three figures and a prefix: 0.0153 J is 15.3 mJ."""
    for scale, prefix in ((1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if value >= 0.9995 * scale:
            return f"{float(f'{value / scale:.3g}'):g} {prefix}{unit}"
    return f"{value * 1e9:.3g} n{unit}"
