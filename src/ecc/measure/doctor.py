"""What can be measured on this machine: every meter tried, and those that work put to the test.

A meter that works is watched at rest and under a small network, which is then measured window after window: how
far the windows differ is what a single measurement can be trusted to.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from ecc.errors import BadMeasurement, EccError

from .counter import CounterProbe, probe_counter
from .environment import environment
from .measurement import Measurement, MeasureSettings
from .meter import Clock, EnergySource, Meter, MeterInfo, close_meter
from .meters.rapl import processor_name
from .registry import FALLBACKS, find_meter, probe_meters
from .runner import prepare_runner
from .window import measure
from .workload import make_workload

Say = Callable[[str], object]

_ACCELERATORS = ("cuda", "mps", "xpu")
_QUICK_SECONDS = 1.0  # that a counter is watched without a self-test
_MIN_WINDOWS, _MAX_WINDOWS = 5, 30  # a standard deviation of fewer says little
_WARMUP_RUNS = 10


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The small network, measured over and over."""

    device: str
    """Where it ran."""

    measurement: Measurement

    @property
    def repeatability(self) -> float:
        """Relative standard deviation of the joules of one window."""
        joules = [window.joules for window in self.measurement.windows]
        return statistics.stdev(joules) / statistics.fmean(joules)


@dataclass(frozen=True, kw_only=True)
class MeterFinding:
    """One meter: what it is and how well it measures, or why it does not work."""

    spec: str
    """What to say to use it: nvml, rapl, ..."""

    reason: str
    """Why it does not work; or, when it does, what it reads."""

    remedy: str = ""
    """The command that would make it work, where there is one."""

    info: MeterInfo | None = None
    """What it is; None if it does not work."""

    is_meter: bool = False
    """Whether it reads a device; not so for estimates and replays."""

    counter: CounterProbe | None = None
    """How its counter behaves; None if it has none, or could not be watched."""

    self_test: SelfTest | None = None
    """None if it was left out, or failed."""

    trouble: str = ""
    """Why watching the counter or the self-test failed, or could not be done."""

    @property
    def works(self) -> bool:
        """Whether it opened and was read."""
        return self.info is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        test = self.self_test
        return {
            "spec": self.spec,
            "works": self.works,
            "is_meter": self.is_meter,
            "reason": self.reason,
            "remedy": self.remedy,
            "info": None if self.info is None else self.info.to_dict(),
            "counter": None if self.counter is None else asdict(self.counter),
            "self_test": test
            and {
                "device": test.device,
                "repeatability": test.repeatability,
                "measurement": test.measurement.to_dict(),
            },
            "trouble": self.trouble,
        }


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """A machine and its meters."""

    machine: dict[str, str]
    """Versions, processor and GPUs; neither host nor user."""

    findings: tuple[MeterFinding, ...]
    """In the order in which `auto` tries them."""

    @property
    def working(self) -> tuple[MeterFinding, ...]:
        """The meters that work."""
        return tuple(finding for finding in self.findings if finding.works)

    @property
    def can_measure(self) -> bool:
        """Whether a device can be read here."""
        return any(finding.is_meter for finding in self.working)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "can_measure": self.can_measure,
            "machine": self.machine,
            "meters": [finding.to_dict() for finding in self.findings],
            "ways_forward": [{"spec": spec, "what": what} for spec, what in FALLBACKS if spec],
        }


def diagnose(
    spec: str = "auto",
    *,
    seconds: float = 10.0,
    quick: bool = False,
    say: Say = lambda _: None,
    clock: Clock | None = None,
) -> DoctorReport:
    """Tries the meters of this machine, and tests those that work.

    Args:
        spec: `auto` tries every meter that `find_meter` would; otherwise the one to examine.
        seconds: How long the test of each meter takes, about.
        quick: Leaves the test out; counters are only watched at rest.
        say: Is told what is being done.
        clock: The time; the system's by default.

    Raises:
        NoMeter: If a meter was named and it does not work.
    """
    clock = clock or Clock()
    if not seconds >= 1:
        raise BadMeasurement(f"seconds={seconds:g} is below 1, the least a self-test can take; quick leaves it out.")
    say("looking for meters")
    findings: list[MeterFinding] = []
    for name, reason, remedy, source in _sources(spec):
        finding = MeterFinding(spec=name, reason=reason, remedy=remedy)
        if source is not None:
            try:
                finding = replace(finding, info=source.describe(), is_meter=isinstance(source, Meter))
                if isinstance(source, Meter):  # else there is no counter to watch
                    finding = _examined(finding, source, seconds, quick, say, clock)
            finally:
                close_meter(source)
        findings.append(finding)
    return DoctorReport(machine=_machine(), findings=tuple(findings))


def _sources(spec: str) -> list[tuple[str, str, str, EnergySource | None]]:
    """(spec, reason, remedy, open source) of what is to be examined."""
    if spec == "auto":
        return [(attempt.name, attempt.reason, attempt.remedy, attempt.meter) for attempt in probe_meters()]
    source = find_meter(spec)
    info = source.describe()
    return [(spec, f"{info.device}, {info.scope}, {info.reads}", "", source)]


def _examined(finding: MeterFinding, meter: Meter, seconds: float, quick: bool, say: Say, clock: Clock) -> MeterFinding:
    """The finding, with what watching and testing the meter has shown."""
    info = meter.describe()
    device = _device_of(info)
    try:
        if quick or device is None:
            say(f"{finding.spec}: watching the counter at rest")
            finding = replace(finding, counter=probe_counter(meter, None, _QUICK_SECONDS, clock=clock))
            return finding if quick else replace(finding, trouble=_no_device(info))
        with prepare_runner(*_small_network(device)) as ready:
            started = clock.now()
            for _ in range(_WARMUP_RUNS):
                ready.run()
            load, _ = make_workload(ready.run, device.type, clock)
            say(f"{finding.spec}: watching the counter, at rest and at work")
            counter = probe_counter(meter, load, min(2.0, seconds / 10), clock=clock)
            finding = replace(finding, counter=counter)
            if not counter.moves or counter.tick_seconds is None:
                stood = "its counter stood still while a network ran: it does not count what runs on"
                return replace(finding, trouble=f"{stood} {device}.")
            left = seconds - (clock.now() - started)
            settings = replace(_settings(counter.tick_seconds, left), mode=ready.mode)
            say(f"{finding.spec}: measuring a small network {settings.max_repeats} times")
            result = measure(ready.run, meter, settings, device=device, batch=ready.batch, counter=counter, clock=clock)
            return replace(finding, self_test=SelfTest(device=str(device), measurement=result))
    except EccError as error:
        return replace(finding, trouble=str(error))
    except (RuntimeError, OSError) as error:  # torch's, or a driver's
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return replace(finding, trouble=f"{type(error).__name__}: {first}")


def _settings(tick_seconds: float, left_seconds: float) -> MeasureSettings:
    """As many windows as there is time for, each as long as those of any measurement."""
    usual = MeasureSettings()
    window_seconds = max(usual.window_seconds, usual.min_ticks * tick_seconds)
    windows = int((left_seconds - usual.warmup_seconds) / window_seconds)
    repeats = min(max(windows, _MIN_WINDOWS), _MAX_WINDOWS)
    return MeasureSettings(min_repeats=repeats, max_repeats=repeats)


# ---------------------------------------------------------------- what the test runs, and where


def _small_network(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    """Five convolutions, 29 M MACs an image: small enough for any device, in a batch large enough for a GPU."""
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        model = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()),
            nn.Conv2d(128, 128, 3, padding=1),
        )
        images = torch.randn(1 if device.type == "cpu" else 256, 3, 32, 32)
    return model.to(device), images


def _device_of(info: MeterInfo) -> torch.device | None:
    """The device whose work the meter sees; None if torch cannot compute there."""
    kinds = info.covers or (*_ACCELERATORS, "cpu")
    kind = next((kind for kind in (*_ACCELERATORS, "cpu") if kind in kinds and _available(kind)), None)
    if kind == "cuda" and info.device_id:
        for index in range(torch.cuda.device_count()):
            uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # since torch 2.4
            if uuid is not None and str(uuid).removeprefix("GPU-") == info.device_id.removeprefix("GPU-"):
                return torch.device("cuda", index)
    return None if kind is None else torch.device(kind)


def _available(kind: str) -> bool:
    if kind == "cpu":
        return True
    backend: Any = getattr(torch.backends if kind == "mps" else torch, kind, None)
    return backend is not None and bool(backend.is_available())


def _no_device(info: MeterInfo) -> str:
    return (
        f"no self-test: the meter sees {' and '.join(info.covers)}, and torch {torch.__version__} cannot compute "
        f"there. Install the build of torch for this device (https://pytorch.org/get-started)."
    )


def _machine() -> dict[str, str]:
    """Versions, processor and GPUs."""
    has_cuda = _available("cuda")
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
