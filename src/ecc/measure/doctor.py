"""`diagnose`: which meters work on this machine, and how well they repeat.

Each meter that works is observed on the idle device and under a small network. The network is then measured in many
windows; their standard deviation shows how far a single measurement can be trusted.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ecc.errors import BadMeasurement, EccError, first_line, option_hint
from ecc.records import from_builtins
from ecc.settings import MeasureSettings

from .counter import CounterProbe, probe_counter
from .environment import environment
from .measurement import Measurement
from .meter import Clock, Meter, MeterInfo, close_meter
from .meters.rapl import processor_name
from .registry import FALLBACKS, attempt_of, find_meter, probe_meters
from .runners import prepare_runner
from .window import has_uuid, measure, visible_device_type
from .workload import make_workload

_QUICK_SECONDS = 1.0  # observation of a counter without self-test
_MIN_WINDOWS, _MAX_WINDOWS = 5, 30
_WARMUP_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """Repeated measurement of a small network."""

    device: str
    """Where it ran."""
    measurement: Measurement

    repeatability: float
    """Relative standard deviation of the energy of one window."""


@dataclass(frozen=True, kw_only=True)
class MeterFinding:
    """One meter: how well it measures, or why it does not work."""

    spec: str
    """Name to pass as meter: nvml, rapl, ..."""
    works: bool = False
    """Whether it was opened and read."""
    is_meter: bool = False
    """Whether it reads a device; false for estimates and replays."""
    reason: str
    """What it reads if it works; otherwise why it does not."""
    remedy: str = ""
    """A command that would make it work, if there is one."""
    info: MeterInfo | None = None
    """Description; None if it does not work."""
    counter: CounterProbe | None = None
    """Properties of its counter; None if it has none, or could not be observed."""
    self_test: SelfTest | None = None
    """None if it was skipped, or failed."""
    trouble: str = ""
    """Why the counter could not be observed, or the self-test failed."""


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """A machine and its meters."""

    can_measure: bool
    """Whether a meter that reads a device works here."""
    machine: dict[str, str]
    """Versions, processor and GPUs, without host and user names."""
    meters: tuple[MeterFinding, ...]
    """Findings in the order of `auto`."""
    fallbacks: dict[str, str]
    """Other sources of joules, with a description."""

    @property
    def working(self) -> tuple[MeterFinding, ...]:
        """The meters that work."""
        return tuple(finding for finding in self.meters if finding.works)


def diagnose(
    spec: str = "auto",
    *,
    seconds: float = 10.0,
    quick: bool = False,
    report: Callable[[str], object] = lambda _: None,
    clock: Clock | None = None,
) -> DoctorReport:
    """Try the meters of this machine, and test those that work.

    Args:
        spec: `auto` tries every meter of `find_meter`; otherwise the meter to test.
        seconds: Approximate duration of the self-test of each meter.
        quick: Skip the self-test; counters are only observed on the idle device.
        report: Called with a line of progress.
        clock: Time functions; those of the system by default.
    """
    clock = clock or Clock()
    if not seconds >= 1:
        raise BadMeasurement(
            f"seconds is {seconds:g}; a self-test takes at least 1 second. Skip it with {option_hint('quick', True)}."
        )
    report("looking for meters")
    findings: list[MeterFinding] = []
    attempts = probe_meters() if spec == "auto" else [attempt_of(spec, find_meter(spec))]
    for attempt in attempts:
        finding, source = MeterFinding(spec=attempt.name, reason=attempt.reason, remedy=attempt.remedy), attempt.meter
        if source is not None:
            try:
                finding = replace(finding, works=True, info=source.describe(), is_meter=isinstance(source, Meter))
                if isinstance(source, Meter):
                    finding = _test(finding, source, seconds, quick, report, clock)
            finally:
                close_meter(source)
        findings.append(finding)
    return _report(_machine(), findings)


def _report(machine: dict[str, str], findings: Sequence[MeterFinding]) -> DoctorReport:
    can_measure = any(finding.works and finding.is_meter for finding in findings)
    return DoctorReport(can_measure=can_measure, machine=machine, meters=tuple(findings), fallbacks=dict(FALLBACKS))


def diagnose_target(target: str, spec: str = "auto") -> DoctorReport:
    """Try the meters of a board (`ssh://user@host[:port]`), and observe the counters of those that work."""
    from .remote.client import ANALYTIC, Board
    from .remote.target import Target

    if spec.startswith(ANALYTIC):
        raise EccError(f"{spec} is computed from a formula and needs no board. Leave {option_hint('target')} out.")
    board = Board(Target.parse(target), "")
    try:
        found = board.call_again("doctor", meter=spec, limit_seconds=120.0)
    finally:
        board.close()
    machine = {"target": target, **{str(name): str(text) for name, text in found["machine"].items()}}
    return _report(machine, [from_builtins(one, MeterFinding, f"the meters of {target}") for one in found["findings"]])


def _test(
    finding: MeterFinding, meter: Meter, seconds: float, quick: bool, report: Callable[[str], object], clock: Clock
) -> MeterFinding:
    """The finding with the results of observing and testing the meter."""
    info = meter.describe()
    device = _device_for(info)
    try:
        if quick or device is None:
            report(f"{finding.spec}: observing the idle counter")
            finding = replace(finding, counter=probe_counter(meter, None, _QUICK_SECONDS, clock=clock))
            if quick:
                return finding
            trouble = (
                f"no self-test: the meter sees {' and '.join(info.covers)}, and torch {torch.__version__} cannot "
                "compute there. Install the build of torch for this device (https://pytorch.org/get-started)."
            )
            return replace(finding, trouble=trouble)
        with prepare_runner(*_small_network(device)) as runner:
            started = clock.now()
            for _ in range(_WARMUP_RUNS):
                runner.run()
            load, _ = make_workload(runner.run, device.type, clock, is_asynchronous=runner.is_asynchronous)
            report(f"{finding.spec}: observing the counter, idle and busy")
            counter = probe_counter(meter, load, min(2.0, seconds / 10), clock=clock)
            finding = replace(finding, counter=counter)
            if not counter.moves or counter.tick_seconds is None:
                trouble = f"its counter did not change while a network ran: it does not count work on {device}."
                return replace(finding, trouble=trouble)
            # As many windows of the usual length as there is time for.
            settings = MeasureSettings(runner=runner.runner)
            window_seconds = max(settings.window_seconds, settings.min_ticks * counter.tick_seconds)
            left = seconds - (clock.now() - started) - settings.warmup_seconds
            repeats = min(max(int(left / window_seconds), _MIN_WINDOWS), _MAX_WINDOWS)
            settings = replace(settings, min_repeats=repeats, max_repeats=repeats)
            report(f"{finding.spec}: measuring a small network {settings.max_repeats} times")
            result = measure(
                runner.run, meter, settings, device=device, batch=runner.batch, counter=counter, clock=clock
            )
            joules = [window.joules for window in result.windows]
            repeatability = statistics.stdev(joules) / statistics.fmean(joules)
            test = SelfTest(device=str(device), measurement=result, repeatability=repeatability)
            return replace(finding, self_test=test)
    except EccError as error:
        return replace(finding, trouble=str(error))
    except (RuntimeError, OSError) as error:  # from torch or a driver
        return replace(finding, trouble=first_line(error))


def _small_network(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Five convolutions of 29 M MACs per image, and a batch that is large enough for a GPU."""
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
            nn.Conv2d(128, 128, 3, padding=1),
        )
        images = torch.randn(1 if device.type == "cpu" else 256, 3, 32, 32)
    return model.to(device), images


def _device_for(info: MeterInfo) -> torch.device | None:
    """The device whose work the meter sees; None if torch cannot compute there."""
    kind = visible_device_type(info, ("cuda", "mps", "xpu"))
    if kind == "cuda" and info.device_id:
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        return next((gpu for gpu in gpus if has_uuid(gpu, info.device_id)), torch.device(kind))
    return None if kind is None else torch.device(kind)


def _machine() -> dict[str, str]:
    """Versions, processor and GPUs."""
    has_cuda = torch.cuda.is_available()
    found = environment("cuda" if has_cuda else None)
    name = processor_name()
    found["processor"] = name if name != "processor" else platform.processor() or platform.machine()
    found["cores"] = str(os.cpu_count() or 1)
    if has_cuda:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["gpus"] = ", ".join(names)
    else:
        found["cuda"] = f"{torch.version.cuda}, no usable GPU" if torch.version.cuda else "none"
    return found
