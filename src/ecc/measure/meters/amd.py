"""AMD GPUs through the optional package amdsmi, which comes with ROCm. Board scope, microjoule counter.

Counters that stand still or disagree with power are known on MI100 and MI210 with older ROCm, so the counter
is compared with the power reading for half a second before it is trusted.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meter import DeviceState, Measured, MeterInfo

CHECK_SECONDS = 0.5
MAX_DISAGREEMENT = 3.0
_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


class AmdMeter:
    """The energy accumulator of one GPU."""

    def __init__(self, smi: Any, handle: Any, index: int) -> None:
        self._smi = smi
        self._handle = handle
        self._index = index

    def read(self) -> float:
        """Joules since the driver was loaded.

        Raises:
            BadMeasurement: If the counter can no longer be read.
        """
        try:
            count = self._smi.amdsmi_get_energy_count(self._handle)
        except self._smi.AmdSmiException as error:
            raise BadMeasurement(f"amdsmi cannot read the energy counter: {error}") from error
        ticks = count.get("energy_accumulator", count.get("power"))  # named `power` before amdsmi 6.2.1
        return float(ticks) * float(count["counter_resolution"]) * 1e-6

    def power_watts(self) -> float | None:
        """The power reading, current or else average; None when the card gives neither."""
        info = self._optional(lambda: self._smi.amdsmi_get_power_info(self._handle)) or {}
        for name in ("current_socket_power", "average_socket_power"):
            watts = info.get(name)
            if isinstance(watts, int | float) and watts > 0:  # "N/A" where there is none
                return float(watts)
        return None

    def state(self) -> DeviceState:
        """Only the power reading, to check the counter against."""
        return DeviceState(power_watts=self.power_watts())

    def describe(self) -> MeterInfo:
        """Names the card by its market name."""
        asic = self._optional(lambda: self._smi.amdsmi_get_gpu_asic_info(self._handle)) or {}
        uuid = self._optional(lambda: self._smi.amdsmi_get_gpu_device_uuid(self._handle))
        return MeterInfo(
            name="amd",
            device=str(asic.get("market_name", f"AMD GPU {self._index}")),
            device_id=str(uuid or ""),
            provenance=Measured(),
            scope="board",
            covers=("cuda",),  # what torch calls an AMD GPU, too
            resolution_joules=15.3e-6,
            notes=("on MI250 the even die counts both dies of the card",),
        )

    def close(self) -> None:
        """Lets go of the library."""
        self._optional(self._smi.amdsmi_shut_down)

    def _optional(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (self._smi.AmdSmiException, AttributeError):  # AttributeError: an older amdsmi lacks the call
            return None


def open_meter(
    argument: str = "",
    *,
    smi: Any = None,
    environ: Mapping[str, str] = os.environ,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> AmdMeter:
    """Opens `amd` (the first visible GPU) or `amd:1` (by amdsmi's own numbering).

    Raises:
        NoMeter: If amdsmi, the GPU or a trustworthy counter is missing.
    """
    smi = _imported() if smi is None else smi
    index = _index(argument, environ)
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        raise NoMeter(f"amdsmi finds no working AMD driver: {error}") from error
    if index >= len(handles):
        raise NoMeter(f"amd:{index} asks for GPU {index}, but amdsmi sees {len(handles)} GPUs.")
    meter = AmdMeter(smi, handles[index], index)
    try:
        _cross_check(meter, now, sleep)
    except (BadMeasurement, NoMeter) as error:
        meter.close()
        raise NoMeter(str(error)) from error
    return meter


def _imported() -> Any:
    # Without ROCm, amdsmi prints to stdout and raises KeyError, OSError or AttributeError on import.
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ImportError:
        raise NoMeter("the package amdsmi is not installed; with an AMD GPU: pip install amdsmi.") from None
    except Exception as error:
        raise NoMeter(
            f"amdsmi cannot be imported ({type(error).__name__}: {error}): ROCm is missing, or its version "
            "differs from that of amdsmi."
        ) from error


def _index(argument: str, environ: Mapping[str, str]) -> int:
    if argument:
        if not argument.isdigit():
            raise NoMeter(f"amd:{argument} is not a number; give the GPU's index, such as amd:0.")
        return int(argument)
    masks = {name: environ[name] for name in _VISIBLE if name in environ}
    if not masks:
        return 0
    first = next(iter(masks.values())).split(",")[0].strip()
    if len(masks) > 1 or not first.isdigit():
        said = ", ".join(f"{name}={value}" for name, value in masks.items())
        raise NoMeter(f"{said} does not say which GPU amdsmi should read; name it: amd:0.")
    return int(first)


def _cross_check(meter: AmdMeter, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Refuses a counter that stands still or is off by a factor."""
    before, started = meter.read(), now()
    sleep(CHECK_SECONDS)
    seconds = now() - started
    counted = (meter.read() - before) / seconds
    if counted <= 0:
        raise NoMeter(
            f"the energy counter stood still at {before:.1f} J for {seconds:.1f} s (known of MI100 and MI210 "
            "with older ROCm, odd dies of MI250, and virtual machines); update ROCm or pick another GPU."
        )
    power = meter.power_watts()
    if power is not None and not 1 / MAX_DISAGREEMENT < counted / power < MAX_DISAGREEMENT:
        raise NoMeter(
            f"the energy counter says {counted:.1f} W and the power reading {power:.1f} W, more than "
            f"a factor {MAX_DISAGREEMENT:g} apart; one of them is wrong: update ROCm."
        )
