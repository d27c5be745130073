"""NVIDIA GPUs through NVML: the energy counter of the board (Volta and newer), or its integrated power reading.

The counter covers the whole board and every process on it. Its gain error is up to about 5 % and constant for a card,
which does not matter for budgets relative to the same card. NVML also initialises where it can read nothing, such as on
a Jetson, so a meter is read once before it is used.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meter import DeviceState, Measured, MeterInfo, PowerIntegrator

POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT; nvmlDeviceGetPowerUsage averages over 1 s on Ampere and newer
_TEMPERATURE_GPU, _CLOCK_SM = 0, 1  # NVML_TEMPERATURE_GPU, NVML_CLOCK_SM
_POWER_CAP = 0x4
_THROTTLING = {  # nvmlClocksEventReason*; idle clocks and clocks set by the user do not count
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "external power brake",
}
_MIG_REASON = (
    "NVML counts energy for the whole card, not for a MIG slice. "
    "Measure on the whole card (sudo nvidia-smi -i {index} -mig 0) or choose another GPU."
)


class NvmlMeter:
    """One GPU: its energy counter if it has one, otherwise its integrated power.

    Raises:
        NoMeter: If neither can be read.
    """

    def __init__(self, nvml: Any, handle: Any, *, proc: Path = Path("/proc")) -> None:
        self._nvml = nvml
        self._handle = handle
        self._proc = proc
        self._integrator: PowerIntegrator | None = None
        self._settle_seconds = 0.0
        self._reads = "energy counter"
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            self._integrate_power(error)

    def _integrate_power(self, no_energy: Exception) -> None:
        """Integrate power, for Pascal and older, which have no energy counter."""
        for name, watts, settle in (
            ("integrated instant power", self._instant_watts, 0.1),
            ("integrated power", self._usage_watts, 1.0),
        ):
            try:
                watts()
            except self._nvml.NVMLError as error:
                no_power = error
                continue
            self._reads, self._settle_seconds = name, settle
            self._integrator = PowerIntegrator(watts, period_seconds=0.01)
            return
        raise NoMeter(
            f"NVML finds {self._name()} but can read neither its energy ({no_energy}) nor its power ({no_power}). "
            "On a Jetson, use the meter jetson."
        )

    def read(self) -> float:
        """Joules since the driver was loaded, or since opening if power is integrated.

        Raises:
            BadMeasurement: If the GPU can no longer be read.
        """
        if self._integrator is not None:
            return self._integrator.read()
        try:
            millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except self._nvml.NVMLError as error:
            raise BadMeasurement(f"NVML can no longer read the energy of {self._name()}: {error}") from error
        return float(millijoules) * 1e-3

    def describe(self) -> MeterInfo:
        """Product, UUID and power limit of the card, as of the first call."""
        return self._info

    @cached_property
    def _info(self) -> MeterInfo:  # NVML calls take milliseconds
        limit = self._optional(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        name = self._name()
        return MeterInfo(
            name="nvml",
            device=name,
            device_id=_text(self._nvml.nvmlDeviceGetUUID(self._handle)),
            provenance=Measured(),
            scope="module (GPU, CPU and memory)" if name.startswith(("GH200", "NVIDIA GH200")) else "board",
            covers=("cuda",),
            reads=self._reads,
            resolution_joules=None if self._integrator is not None else 1e-3,
            settle_seconds=self._settle_seconds,
            max_watts=None if limit is None else limit * 1e-3,
            notes=("counts all processes on the card", "gain errors of about 5 % are usual and constant for a card"),
        )

    def state(self) -> DeviceState:
        """Current state of the card; None for values that NVML does not provide."""
        nvml, handle = self._nvml, self._handle
        reasons = self._optional(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if reasons is None:
            reasons = self._optional(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        power = None
        if self._integrator is None:  # integrated power would only be compared with itself
            power = self._optional(self._instant_watts)
            power = self._optional(self._usage_watts) if power is None else power
        return DeviceState(
            temperature_celsius=self._optional(lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_GPU)),
            clock_mhz=self._optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM)),
            power_watts=power,
            throttling=tuple(text for bit, text in _THROTTLING.items() if reasons & bit),
            power_capped=bool(reasons & _POWER_CAP),
            other_processes=self._other_processes(),
        )

    def close(self) -> None:
        """Stop the integrator, if any, and shut NVML down."""
        if self._integrator is not None:
            self._integrator.close()
        self._optional(self._nvml.nvmlShutdown)

    # --- single readings -----------------------------------------------------------------------------

    def _name(self) -> str:
        return _text(self._nvml.nvmlDeviceGetName(self._handle))

    def _instant_watts(self) -> float:
        (value,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [POWER_INSTANT])
        if value.nvmlReturn != 0:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return float(value.value.uiVal) * 1e-3

    def _usage_watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) * 1e-3

    def _other_processes(self) -> tuple[str, ...]:
        """Compute processes other than this one. Graphics processes (a desktop) are ignored.

        In a container, NVML may list process ids of the host, where this process has another id. So if our own id is
        not listed, one listed id that does not exist in the container is taken to be ours.
        """
        listed = self._optional(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or ()
        pids = {int(process.pid) for process in listed}
        threads = (self._proc / "self" / "task").glob("*")  # some drivers list the thread that created the context
        own = {os.getpid(), *(int(thread.name) for thread in threads)}
        others = sorted(pids - own)
        if not pids & own:
            hidden = [pid for pid in others if not (self._proc / str(pid)).exists()]
            if hidden:
                others.remove(hidden[0])
        return tuple(f"process {pid}" for pid in others)

    def _optional(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (self._nvml.NVMLError, AttributeError):  # AttributeError: an older nvidia-ml-py lacks the call
            return None


def open_meter(
    argument: str = "", *, nvml: Any = None, environ: Mapping[str, str] = os.environ, proc: Path = Path("/proc")
) -> NvmlMeter:
    """Open `nvml` (torch's cuda:0), `nvml:1` (cuda:1) or `nvml:GPU-8f3a` (by UUID).

    Raises:
        NoMeter: If the library, driver, GPU or counter is missing, or the GPU is divided into MIG slices.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoMeter(
                "the package nvidia-ml-py is not installed; with an NVIDIA GPU: pip install nvidia-ml-py."
            ) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoMeter(
            f"NVML does not start ({error}): no NVIDIA driver, or the container has no access to it."
        ) from error
    try:
        index = _choose_index(nvml, argument, environ)
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        with suppress(nvml.NVMLError, AttributeError):  # a card or NVML version without MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                raise NoMeter(f"GPU {index} is divided into MIG slices: {_MIG_REASON.format(index=index)}")
        return NvmlMeter(nvml, handle, proc=proc)
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise NoMeter(f"NVML cannot open the GPU: {error}.") from error
    except NoMeter:
        nvml.nvmlShutdown()
        raise


def _choose_index(nvml: Any, argument: str, environ: Mapping[str, str]) -> int:
    """Index of the GPU in NVML, which ignores CUDA_VISIBLE_DEVICES."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    if not uuids:
        raise NoMeter("NVML starts but sees no GPU: there is none, or the container has no access to it.")
    if argument.startswith("MIG-"):
        raise NoMeter(f"nvml:{argument} is a MIG slice: {_MIG_REASON.format(index=0)}")
    if argument.startswith("GPU-"):
        return _by_uuid(argument, uuids)
    if argument and not argument.isdigit():
        raise NoMeter(f"nvml:{argument} is neither an index nor a UUID; give nvml:0 or nvml:GPU-...")
    wanted = int(argument or 0)
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    entries = None if mask is None else [entry.strip() for entry in mask.split(",")]
    visible = list(range(len(uuids))) if entries is None else _visible(entries, uuids)
    if wanted >= len(visible):
        under = "" if mask is None else f" under CUDA_VISIBLE_DEVICES={mask!r}"
        raise NoMeter(
            f"GPU {wanted} is not visible{under}: {len(visible)} of {len(uuids)} GPUs are. "
            "Change CUDA_VISIBLE_DEVICES, or give the UUID of the GPU: nvml:GPU-..."
        )
    models = {_text(nvml.nvmlDeviceGetName(handle)) for handle in handles}
    named = entries is not None and entries[wanted].startswith("GPU-")
    if len(models) > 1 and not named and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise NoMeter(
            f"this machine has different GPUs ({', '.join(sorted(models))}), which CUDA numbers by speed and NVML by "
            "slot, so an index is ambiguous. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or give nvml:GPU-..."
        )
    return visible[wanted]


def _visible(entries: list[str], uuids: list[str]) -> list[int]:
    """NVML indices of the GPUs that CUDA shows; CUDA stops at the first unknown entry."""
    visible: list[int] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            raise NoMeter(f"CUDA_VISIBLE_DEVICES names {entry}, a MIG slice: {_MIG_REASON.format(index=0)}")
        if entry.startswith("GPU-") and any(uuid.startswith(entry) for uuid in uuids):
            visible.append(_by_uuid(entry, uuids))
        elif entry.isdigit() and int(entry) < len(uuids):
            visible.append(int(entry))
        else:
            break
    return visible


def _by_uuid(start: str, uuids: list[str]) -> int:
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(start)]
    if len(found) != 1:
        raise NoMeter(f"{start} matches {len(found)} of the GPUs {', '.join(uuids)}; give a longer UUID.")
    return found[0]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 11.5
