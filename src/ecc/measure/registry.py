"""Opens a meter by name. None is chosen in silence: what was tried, and why it failed, is always told.

auto            the first real meter that works: nvml, jetson, amd, apple, rapl
nvml, nvml:1    NVIDIA GPU; the index is torch's, or give a UUID: nvml:GPU-8f3a
jetson          NVIDIA Jetson, whole module; jetson:VDD_SYS_GPU for one rail
amd, amd:1      AMD GPU
apple           Apple silicon; apple:gpu for the GPU alone
rapl            Intel or AMD processor; rapl:dram adds the memory
command:...     any program that prints joules or watts
cputime:15W     CPU time of this process x watts that you declare
platform:NAME   no meter but an estimate from published constants: jetson-tx2, gtx-1080-ti, eyeriss
replay:FILE     no meter but the numbers that a profile holds
file.py:MyMeter your own class with read() and describe(), or cost() and describe() for an estimate
"""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from ecc.errors import EccError, NoMeter

from .meter import Analytic, EnergySource, Estimated, Meter, MeterInfo, close_meter

# ---------------------------------------------------------------- the table of specs
# One entry a spec `NAME` or `NAME:ARGUMENT`. An opener gets the argument ("" when there is none), reads its
# device once, and raises NoMeter with the reason if that fails. Device libraries are imported on opening.
# The last two need no device: they are no meters, and `measure` refuses them.


def _open_nvml(argument: str) -> Meter:
    from .meters import nvml

    return nvml.open_meter(argument)


def _open_jetson(argument: str) -> Meter:
    from .meters import jetson

    return jetson.open_meter(argument)


def _open_amd(argument: str) -> Meter:
    from .meters import amd

    return amd.open_meter(argument)


def _open_apple(argument: str) -> Meter:
    from .meters import apple

    return apple.open_meter(argument)


def _open_rapl(argument: str) -> Meter:
    from .meters import rapl

    return rapl.open_meter(argument)


def _open_command(argument: str) -> Meter:
    from .meters import command

    return command.open_meter(argument)


def _open_cputime(argument: str) -> Meter:
    from .meters import cputime

    return cputime.open_meter(argument)


def _open_platform(argument: str) -> Analytic:
    from .meters import platform

    return platform.open_meter(argument)


def _open_replay(argument: str) -> Analytic:
    from .meters import replay

    return replay.open_meter(argument)


OPENERS: dict[str, Callable[[str], EnergySource]] = {
    "nvml": _open_nvml,
    "jetson": _open_jetson,
    "amd": _open_amd,
    "apple": _open_apple,
    "rapl": _open_rapl,
    "command": _open_command,
    "cputime": _open_cputime,
    "platform": _open_platform,
    "replay": _open_replay,
}

AUTO = ("nvml", "jetson", "amd", "apple", "rapl")
"""What `auto` tries, in this order: meters that read the device, and none that estimates."""

FALLBACKS = (
    ("", "repair one of the above, as its line says"),
    ("command:PROGRAM", "read an external meter with any program that prints joules or watts"),
    ("cputime:15W", "count CPU time of this process at watts that you declare"),
    ("platform:jetson-tx2", "estimate from the published constants of another device"),
    ("replay:FILE", "take the numbers of a profile that was measured elsewhere"),
    ("file.py:MyMeter", "write a class with read() and describe() and name it"),
)
"""What to do where no meter works: (spec, in words)."""


# ---------------------------------------------------------------- trying


@dataclass(frozen=True)
class Attempt:
    """One meter that was tried."""

    name: str
    """The spec."""

    ok: bool
    """Whether it can be read."""

    reason: str
    """Why not; or, when it works, what it reads."""

    meter: Meter | None = None
    """The open meter, when it works."""

    remedy: str = ""
    """The command that would make it work, where there is one."""


@overload
def find_meter(spec: Literal["auto"] = "auto", *, device_type: str | None = None) -> Meter: ...


@overload
def find_meter(spec: str, *, device_type: str | None = None) -> EnergySource: ...


def find_meter(spec: str = "auto", *, device_type: str | None = None) -> EnergySource:
    """Opens the meter that `spec` names; `auto` never gives an `Analytic`.

    Args:
        spec: A line of the table at the top of this file.
        device_type: The torch device type that the model runs on. `auto` then passes over meters that do not
            see its work, such as a GPU's meter for a network on the CPU.

    Raises:
        NoMeter: If it cannot be opened, with everything that was tried and why each failed.
    """
    if spec != "auto":
        return _open(spec)
    failed = []
    for attempt in _attempts(AUTO, device_type):
        if attempt.meter is not None:
            return attempt.meter
        failed.append(attempt)
    raise NoMeter("\n".join(_complaint(failed)))


def probe_meters(*, device_type: str | None = None) -> list[Attempt]:
    """Tries every meter that `auto` would, past the first that works. Close those that opened."""
    return list(_attempts(AUTO, device_type))


def _attempts(specs: tuple[str, ...], device_type: str | None) -> Iterator[Attempt]:
    for spec in specs:
        try:
            meter = _open(spec)
        except EccError as error:
            yield Attempt(spec, ok=False, reason=str(error), remedy=getattr(error, "remedy", ""))
            continue
        assert isinstance(meter, Meter), f"{spec} reads no device, so it has no place in AUTO"
        info = meter.describe()
        if device_type is not None and info.covers and device_type not in info.covers:
            close_meter(meter)
            covers = " and ".join(info.covers)
            yield Attempt(spec, ok=False, reason=f"{info.device} works, but it meters {covers} and not {device_type}.")
            continue
        yield Attempt(spec, ok=True, reason=f"{info.device}, {info.scope}, {info.reads}", meter=meter)


def _complaint(failed: list[Attempt]) -> Iterator[str]:
    yield "no energy meter works here. Tried:"
    width = max(len(attempt.name) for attempt in failed)
    for attempt in failed:
        yield f"  {attempt.name:<{width}}  {attempt.reason}"
    yield "Ways forward:"
    yield from (f"  - {way}: {spec}" if spec else f"  - {way}" for spec, way in FALLBACKS)


def _open(spec: str) -> EnergySource:
    if ".py:" in spec:
        source = _proved(_from_file(spec), spec)
        if isinstance(source, Meter) or isinstance(source.describe().provenance, Estimated):
            return source
        raise NoMeter(f"meter {spec!r} has cost() and no read(), so its provenance must be Estimated(source=...).")
    name, _, argument = spec.partition(":")
    if name not in OPENERS:
        known = ", ".join(("auto", *OPENERS))
        close = difflib.get_close_matches(name.lower(), OPENERS, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        raise NoMeter(f"meter {spec!r} is unknown{suggestion}; give one of {known}, or file.py:MyMeter.")
    return _proved(OPENERS[name](argument.strip()), spec)


def _proved(source: object, spec: str) -> EnergySource:
    """Returns the meter once it has been read: a device that opens but cannot be read is no meter."""
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
        raise NoMeter(f"describe() of meter {spec!r} gave {type(info).__name__}; it must give a MeterInfo.")
    if isinstance(joules, bool) or not isinstance(joules, int | float) or not math.isfinite(joules):
        raise NoMeter(f"read() of meter {spec!r} gave {joules!r}; it must give cumulative joules, a number.")
    return source


def _from_file(spec: str) -> object:
    """The meter `file.py:MyMeter`: a class or function called without arguments, or a ready instance."""
    path_text, _, attribute = spec.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise NoMeter(f"meter {spec!r}: the file {path_text} does not exist.")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise NoMeter(f"meter {spec!r}: {path_text} cannot be imported as Python.")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        found = getattr(module, attribute, None)
        if found is None:
            names = [name for name in vars(module) if not name.startswith("_")]
            raise NoMeter(f"meter {spec!r}: {path_text} has no {attribute}; it has {', '.join(names)}.")
        ready = isinstance(found, Meter | Analytic) and not isinstance(found, type)
        return found if ready else found()
    except EccError:
        raise
    except Exception as error:
        raise NoMeter(f"meter {spec!r} cannot be made: {type(error).__name__}: {error}") from error
