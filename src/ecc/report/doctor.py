"""The output of `ecc doctor`: the machine, its meters, and what to do where none works."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ecc.formatting import percent, si
from ecc.measure.doctor import DoctorReport, MeterFinding, SelfTest
from ecc.measure.meter import Declared, DeviceState, Estimated, Timed
from ecc.measure.registry import FALLBACKS

from .terminal import plain

GOOD, FAIR = 0.01, 0.03
"""Relative standard deviations of one window up to which a meter is called good, or fair."""

_DIFFERENCE = 1.96 * math.sqrt(2)  # 95 % of pairs of windows of one network differ by less than this many std

_NO_METER = (
    "No energy meter works on {place}, so ECC cannot measure the energy of a network. That is common in virtual "
    "machines, containers and laptops. ECC never takes an estimate for a meter unless you choose it. "
    "Choose a source, and pass it as --meter:"
)


def doctor_table(report: DoctorReport) -> RenderableType:
    """The machine, its meters, the findings on each that works, and what to do next."""
    parts: list[RenderableType] = [plain(line) for line in _machine_lines(report.machine)]
    parts.append(_meter_table(report) if len(report.meters) > 1 else Text())
    for finding in report.working:
        parts += [_meter_details(finding), Text()]
    if report.working:
        target = f" --target {shlex.quote(report.machine['target'])}" if "target" in report.machine else ""
        meter = shlex.quote(report.working[0].spec)
        parts.append(plain(f"Next: ecc profile digits{target} --meter {meter} -o digits.profile"))
    else:
        parts += _fallbacks(report)
    return Group(*parts)


def _machine_lines(machine: Mapping[str, str]) -> Iterator[str]:
    """Versions, then processor and GPUs. A board (`--target`) may have neither ECC nor PyTorch."""
    names = {"ecc": "ecc", "python": "Python", "torch": "torch", "onnxruntime": "onnxruntime", "openvino": "OpenVINO"}
    versions = [f"{name} {machine[key]}" for key, name in names.items() if key in machine]
    if "cuda" in machine:
        cuda = f" (driver {machine['driver']}, cuDNN {machine['cudnn']})" if "gpus" in machine else ""
        versions.append(f"CUDA: {machine['cuda']}{cuda}")
    yield ", ".join(versions)
    cores = "1 core" if machine["cores"] == "1" else f"{machine['cores']} cores"
    parts = [machine[key] for key in ("target", "board", "system", "processor") if key in machine]
    gpus = f"; {machine['gpus']}" if "gpus" in machine else ""
    yield f"{', '.join([*parts, cores])}{gpus}"


def _meter_table(report: DoctorReport) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("meter", no_wrap=True)
    table.add_column("works")
    table.add_column("what it reads, or why it does not work", overflow="fold")
    for finding in report.meters:
        works = Text("yes", style="green") if finding.works else Text("no")
        is_dim = report.working and not finding.works  # where nothing works, the reasons matter most
        table.add_row(plain(finding.spec), works, plain(finding.reason), style="dim" if is_dim else None)
    return table


def _meter_details(finding: MeterFinding) -> RenderableType:
    info = finding.info
    assert info is not None
    title = Text.assemble((finding.spec, "bold"), f"  {info.device}, {info.scope}: ", (info.label, "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in _meter_lines(finding):
        grid.add_row(name, plain(value))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def _meter_lines(finding: MeterFinding) -> Iterator[tuple[str, str]]:
    info, counter, test = finding.info, finding.counter, finding.self_test
    assert info is not None
    if isinstance(info.provenance, Estimated):
        yield "joules", f"computed from constants: {info.provenance.source}"
    elif counter is None and not finding.trouble:
        yield "joules", info.reads
    if counter is not None:
        parts = [info.reads]
        if counter.tick_seconds is not None:
            parts.append(f"updated every {si(counter.tick_seconds, 's')}")
        if info.resolution_joules is not None:
            parts.append(f"resolution {si(info.resolution_joules, 'J')}")
        parts.append(f"a reading takes {si(counter.read_seconds, 's')}")
        yield "counter", ", ".join(parts)
        if counter.idle_watts is not None and not isinstance(info.provenance, Declared | Timed):
            yield "idle", ", ".join([si(counter.idle_watts, "W"), *_state(counter.idle_state)])
    if test is not None:
        result = test.measurement
        state = DeviceState(temperature_celsius=result.temperature_celsius, clock_mhz=result.clock_mhz)
        capped = ["at its power limit"] if result.power_capped else []
        watts = [si(result.watts, "W")] if info.has_energy else []
        if load := [*watts, *_state(state), *capped]:
            yield "load", ", ".join(load)
        yield "self-test", _self_test(test)
        yield "repeatability", f"std of one window {percent(test.repeatability, 2)}: {_verdict(test.repeatability)}"
    if finding.trouble:
        yield "problem", finding.trouble
    for note in info.notes:
        yield "note", note


def _self_test(test: SelfTest) -> str:
    result = test.measurement
    seconds = sum(window.window_seconds for window in result.windows) / len(result.windows)
    images = "1 image" if result.batch == 1 else f"{result.batch} images"
    joules = f"{si(result.joules, 'J')} and " if result.meter.has_energy else ""
    return (
        f"{joules}{si(result.seconds, 's')} for {images} of a small network on {test.device}, "
        f"{len(result.windows)} windows of {si(seconds, 's')}"
    )


def _verdict(repeatability: float) -> str:
    differ = f"one window distinguishes networks that differ by {percent(_DIFFERENCE * repeatability)}"
    if repeatability <= GOOD:
        return f"good; {differ}"
    if repeatability <= FAIR:
        return f"fair; {differ}; repeat measurements for smaller differences"
    return (
        "poor; another program uses this device, or its clock changes. Close other programs, let the device warm up, "
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


def _fallbacks(report: DoctorReport) -> Iterator[RenderableType]:
    yield Text(_NO_METER.format(place="the board" if "target" in report.machine else "this machine"))
    yield Text()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for spec, what in FALLBACKS:
        grid.add_row(spec, Text(f"{what[0].upper()}{what[1:]}."))
    yield Padding(grid, (0, 0, 0, 2))
    yield Text()
    for finding in report.meters:
        if finding.remedy:
            yield plain(f"Or give read permission for {finding.spec}, which lasts until the next boot:")
            yield Padding(Text(finding.remedy, style="bold", overflow="fold"), (0, 0, 1, 2))
    yield Text("To start: ecc compress digits --budget 50% --meter platform:jetson-tx2 -o run --pretrain-steps 300")
