"""AMD GPUs through the optional package amdsmi, which comes with ROCm. Scope is the board.

On MI100 and MI210 with older ROCm the counter may not change or may disagree with the power reading, so both are
compared for half a second when the meter is opened.
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
        """Joules since the driver was loaded."""
        try:
            count = self._smi.amdsmi_get_energy_count(self._handle)
        except self._smi.AmdSmiException as error:
            raise BadMeasurement(f"amdsmi cannot read the energy counter: {error}") from error
        ticks = count.get("energy_accumulator", count.get("power"))  # named `power` before amdsmi 6.2.1
        return float(ticks) * float(count["counter_resolution"]) * 1e-6

    def power_watts(self) -> float | None:
        """Current power reading, or else the average; None if the card has neither."""
        info = self._optional(lambda: self._smi.amdsmi_get_power_info(self._handle)) or {}
        for name in ("current_socket_power", "average_socket_power"):
            watts = info.get(name)
            if isinstance(watts, int | float) and watts > 0:  # "N/A" where there is none
                return float(watts)
        return None

    def state(self) -> DeviceState:
        """Power reading, to check the counter."""
        return DeviceState(power_watts=self.power_watts())

    def describe(self) -> MeterInfo:
        """Product and UUID of the card."""
        asic = self._optional(lambda: self._smi.amdsmi_get_gpu_asic_info(self._handle)) or {}
        uuid = self._optional(lambda: self._smi.amdsmi_get_gpu_device_uuid(self._handle))
        return MeterInfo(
            name="amd",
            device=str(asic.get("market_name", f"AMD GPU {self._index}")),
            device_id=str(uuid or ""),
            provenance=Measured(),
            scope="board",
            covers=("cuda",),  # torch's name for AMD GPUs too
            resolution_joules=15.3e-6,
            notes=("on MI250 the even die counts both dies of the card",),
        )

    def close(self) -> None:
        """Shut the library down."""
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
    """Open `amd` (the first visible GPU) or `amd:1` (amdsmi's index)."""
    smi = _import_library() if smi is None else smi
    index = _index(argument, environ)
    try:
        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        raise NoMeter(f"amdsmi finds no working AMD driver: {error}") from error
    if index >= len(handles):
        smi.amdsmi_shut_down()
        raise NoMeter(f"amd:{index} does not exist: amdsmi sees {len(handles)} GPUs.")
    meter = AmdMeter(smi, handles[index], index)
    try:
        _cross_check(meter, now, sleep)
    except (BadMeasurement, NoMeter) as error:
        meter.close()
        raise NoMeter(str(error)) from error
    return meter


def _import_library() -> Any:
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
            raise NoMeter(f"amd:{argument} is not a number; give the index of the GPU, such as amd:0.")
        return int(argument)
    masks = {name: environ[name] for name in _VISIBLE if name in environ}
    if not masks:
        return 0
    first = next(iter(masks.values())).split(",")[0].strip()
    if len(masks) > 1 or not first.isdigit():
        given = ", ".join(f"{name}={value}" for name, value in masks.items())
        raise NoMeter(f"{given} does not identify one GPU for amdsmi; give its index: amd:0.")
    return int(first)


def _cross_check(meter: AmdMeter, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """Refuse a counter that does not change, or disagrees with the power reading."""
    before, started = meter.read(), now()
    sleep(CHECK_SECONDS)
    seconds = now() - started
    counted = (meter.read() - before) / seconds
    if counted <= 0:
        raise NoMeter(
            f"the energy counter stayed at {before:.1f} J for {seconds:.1f} s (known for MI100 and MI210 with older "
            "ROCm, odd dies of MI250, and virtual machines); update ROCm or choose another GPU."
        )
    power = meter.power_watts()
    if power is not None and not 1 / MAX_DISAGREEMENT < counted / power < MAX_DISAGREEMENT:
        raise NoMeter(
            f"the energy counter shows {counted:.1f} W and the power reading {power:.1f} W, more than a factor of "
            f"{MAX_DISAGREEMENT:g} apart; update ROCm."
        )
