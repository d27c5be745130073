"""`find_meter`: open a meter by name.

auto            the first real meter that works: nvml, jetson, amd, apple, rapl
nvml, nvml:1    NVIDIA GPU; torch's index, or a UUID: nvml:GPU-8f3a
jetson          NVIDIA Jetson, whole module; jetson:VDD_SYS_GPU for one rail
amd, amd:1      AMD GPU
apple           Apple silicon; apple:gpu for the GPU alone
rapl            Intel or AMD processor; rapl:dram adds the memory
command:...     any program that prints joules or watts
cputime:15W     CPU time of this process x a power that you declare
cputime, wall   latency in CPU time or wall-clock time; no energy
platform:NAME   estimate from published constants: jetson-tx2, jetson-orin-nano, raspberry-pi-5, h100, ...
replay:FILE     numbers of a recorded profile
file.py:MyMeter your own class with read() and describe(), or cost() and describe() for an estimate
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, overload

from ecc.errors import EccError, NoMeter, did_you_mean, option_hint
from ecc.io import execute_file

from .meter import Analytic, EnergySource, Estimated, Meter, MeterInfo, close_meter

AUTO = ("nvml", "jetson", "amd", "apple", "rapl")
"""Meters that `auto` tries, in this order. All of them read a device."""

FALLBACKS = (
    ("platform:jetson-tx2", "estimate from published constants (also jetson-orin-nano, h100, eyeriss, ...)"),
    ("cputime:15W", "CPU time of this process x the power of a busy core, declared by you"),
    ("cputime", "latency in CPU time, without energy (wall: in wall-clock time)"),
    ("command:PROGRAM", "any program that prints joules or watts"),
    ("replay:FILE", "numbers of a profile that was measured elsewhere"),
    ("file.py:MyMeter", "your own class with read() and describe()"),
)
"""What to use where no meter works: (spec, description)."""


def _open_module(name: str, argument: str) -> EnergySource:
    """Open a meter of `meters/`. Device libraries are imported here, not before."""
    source: EnergySource = importlib.import_module(f".meters.{name}", __package__).open_meter(argument)
    return source


OPENERS: dict[str, Callable[[str], EnergySource]] = {
    name: partial(_open_module, name) for name in (*AUTO, "command", "cputime", "wall", "platform", "replay")
}
"""Functions that open `NAME:ARGUMENT`. They raise `NoMeter` with the reason if that fails."""


@dataclass(frozen=True)
class Attempt:
    """Result of trying one meter."""

    name: str
    """Its spec."""
    reason: str
    """What it reads if it works; otherwise why it does not."""
    meter: EnergySource | None = None
    """The open meter, if it works."""
    remedy: str = ""
    """A command that would make it work, if there is one."""
    covers: tuple[str, ...] = ()
    """torch device types of a meter that works, but does not see the given device."""


@overload
def find_meter(spec: Literal["auto"] = "auto", *, device_type: str | None = None) -> Meter: ...


@overload
def find_meter(spec: str, *, device_type: str | None = None) -> EnergySource: ...


def find_meter(spec: str = "auto", *, device_type: str | None = None) -> EnergySource:
    """Open a meter. `auto` never gives an estimate.

    Args:
        spec: A line of the table at the top of this module.
        device_type: torch device type on which the model runs. `auto` then skips meters that do not see it, such as
            the meter of a GPU for a network on the CPU.

    Raises:
        NoMeter: If no meter can be opened.
    """
    if spec != "auto":
        return _open(spec)
    failed = []
    for attempt in _attempts(device_type):
        if isinstance(attempt.meter, Meter):
            return attempt.meter
        failed.append(attempt)
    raise NoMeter("\n".join(_no_meter_message(failed, device_type)))


def probe_meters(*, device_type: str | None = None) -> list[Attempt]:
    """Try every meter of `auto`. Close those that opened."""
    return list(_attempts(device_type))


def attempt_of(spec: str, source: EnergySource) -> Attempt:
    """The result of opening this meter."""
    info = source.describe()
    return Attempt(spec, f"{info.device}, {info.scope}, {info.reads}", source)


def _attempts(device_type: str | None) -> Iterator[Attempt]:
    for spec in AUTO:
        try:
            meter = _open(spec)
        except EccError as error:
            yield Attempt(spec, str(error), remedy=getattr(error, "remedy", ""))
            continue
        assert isinstance(meter, Meter), f"{spec} does not read a device"
        info = meter.describe()
        if device_type is not None and info.covers and device_type not in info.covers:
            close_meter(meter)
            covers = " and ".join(info.covers)
            yield Attempt(spec, f"{info.device} works, but meters {covers}, not {device_type}.", covers=info.covers)
            continue
        yield attempt_of(spec, meter)


def _no_meter_message(failed: list[Attempt], device_type: str | None) -> Iterator[str]:
    where = "" if device_type is None else f" for {device_type}"
    tried = ", ".join(
        f"{attempt.name} (meters {' and '.join(attempt.covers)})" if attempt.covers else attempt.name
        for attempt in failed
    )
    yield f"No energy meter works here{where}. Tried: {tried}. `ecc doctor` explains why."
    yield f"Choose a source of joules with {option_hint('meter')}:"
    width = max(len(spec) for spec, _ in FALLBACKS)
    yield from (f"  {spec:<{width}}  {what}" for spec, what in FALLBACKS)
    yield from (f"Or allow {attempt.name}: {attempt.remedy}" for attempt in failed if attempt.remedy)


def _open(spec: str) -> EnergySource:
    if ".py:" in spec:
        source = _check_readable(_load_from_file(spec), spec)
        if isinstance(source, Meter) or isinstance(source.describe().provenance, Estimated):
            return source
        raise NoMeter(f"meter {spec!r} has cost() and no read(), so its provenance must be Estimated(source=...).")
    name, _, argument = spec.partition(":")
    if name not in OPENERS:
        known = ", ".join(("auto", *OPENERS))
        suggestion = did_you_mean(name, OPENERS)
        raise NoMeter(f"meter {spec!r} is unknown{suggestion}; give one of {known}, or file.py:MyMeter.")
    return _check_readable(OPENERS[name](argument.strip()), spec)


def _check_readable(source: object, spec: str) -> EnergySource:
    """Return the meter after reading it once: some devices open but cannot be read."""
    if not isinstance(source, Meter | Analytic):
        missing = next(name for name in ("read", "describe") if not callable(getattr(source, name, None)))
        raise NoMeter(f"meter {spec!r} has no method {missing}(); a meter needs read() and describe().")
    try:
        info = source.describe()
        joules = source.read() if isinstance(source, Meter) else 0.0
    except EccError:
        raise
    except Exception as error:
        raise NoMeter(f"meter {spec!r} opened but cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(info, MeterInfo):
        raise NoMeter(f"describe() of meter {spec!r} returned {type(info).__name__}; it must return a MeterInfo.")
    if isinstance(joules, bool) or not isinstance(joules, int | float) or not math.isfinite(joules):
        raise NoMeter(f"read() of meter {spec!r} returned {joules!r}; it must return cumulative joules, a number.")
    return source


def _load_from_file(spec: str) -> object:
    """The meter `file.py:MyMeter`: a class or function called without arguments, or an instance."""
    path_text, _, attribute = spec.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise NoMeter(f"meter {spec!r}: the file {path_text} does not exist.")
    try:
        module = execute_file(path)
        found = getattr(module, attribute, None)
        if found is None:
            names = [name for name in vars(module) if not name.startswith("_")]
            raise NoMeter(f"meter {spec!r}: {path_text} has no {attribute}; it has {', '.join(names)}.")
        is_instance = isinstance(found, Meter | Analytic) and not isinstance(found, type)
        return found if is_instance else found()
    except EccError:
        raise
    except Exception as error:
        raise NoMeter(f"meter {spec!r} cannot be created: {type(error).__name__}: {error}") from error
