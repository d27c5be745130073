from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured, close_meter
from ecc.measure.meters import nvml
from ecc.measure.meters.nvml import open_meter

NOT_SUPPORTED, NOT_FOUND, LIBRARY_NOT_FOUND, GPU_IS_LOST = 3, 6, 12, 15
_TEXTS = {
    NOT_SUPPORTED: "Not Supported",
    NOT_FOUND: "Not Found",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    GPU_IS_LOST: "GPU is lost",
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _TEXTS[self.value]


class FakeGpu:
    """A card; what it lacks raises Not Supported, as NVML does."""

    def __init__(self, name: str = "NVIDIA H200", uuid: str = "GPU-8f3a0000-1111", **has: Any) -> None:
        self.name = name
        self.uuid = uuid
        self.energy_mj: int | None = 5_000_250
        self.instant_mw: int | None = 410_000
        self.usage_mw: int | None = 400_000
        self.limit_mw: int | None = 700_000
        self.reasons: int | None = 0
        self.mig: int | None = 0
        self.pids: list[int] = []
        for key, value in has.items():
            setattr(self, key, value)


class FakeNvml:
    """The part of the module pynvml that is used, in its own manner: free functions over handles."""

    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, starts: int | None = None, old: bool = False) -> None:
        self.gpus = gpus or (FakeGpu(),)
        self.starts = starts
        self.old = old
        self.open = 0

    @staticmethod
    def _has(value: Any) -> Any:
        if value is None:
            raise NVMLError(NOT_SUPPORTED)
        return value

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name, as below
        if self.starts is not None:
            raise NVMLError(self.starts)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        if index >= len(self.gpus):
            raise NVMLError(NOT_FOUND)
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str | bytes:  # noqa: N802
        return gpu.uuid.encode() if self.old else gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str | bytes:  # noqa: N802
        return gpu.name.encode() if self.old else gpu.name

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        return [self._has(gpu.mig), gpu.mig or 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:  # noqa: N802
        return int(self._has(gpu.energy_mj))

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:  # noqa: N802
        return int(self._has(gpu.usage_mw))

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
        assert fields == [186]
        missing = gpu.instant_mw is None
        value = SimpleNamespace(uiVal=gpu.instant_mw)
        return [SimpleNamespace(nvmlReturn=NOT_SUPPORTED if missing else 0, value=value)]

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:  # noqa: N802
        return int(self._has(gpu.limit_mw))

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:  # noqa: N802
        assert sensor == 0
        return 61

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:  # noqa: N802
        assert kind == 1
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return int(self._has(gpu.reasons))

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in gpu.pids]


class NewNvml(FakeNvml):
    """With the name of the reasons since driver 535."""

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:  # noqa: N802
        return int(self._has(gpu.reasons))


def opened(library: FakeNvml, argument: str = "", proc: Path = Path("/proc"), **environ: str) -> nvml.NvmlMeter:
    return open_meter(argument, nvml=library, environ=environ, proc=proc)


# --- reading ----------------------------------------------------------------------------------------


def test_the_energy_counter_is_read_in_joules() -> None:
    meter = opened(FakeNvml())
    assert meter.read() == pytest.approx(5000.250)
    info = meter.describe()
    assert (info.name, info.device, info.device_id) == ("nvml", "NVIDIA H200", "GPU-8f3a0000-1111")
    assert (info.scope, info.covers, info.reads) == ("board", ("cuda",), "energy counter")
    assert (info.provenance, info.resolution_joules, info.max_watts) == (Measured(), 1e-3, 700.0)


def test_older_bindings_return_bytes() -> None:
    info = opened(FakeNvml(old=True)).describe()
    assert (info.device, info.device_id) == ("NVIDIA H200", "GPU-8f3a0000-1111")


def test_grace_hopper_counts_the_module() -> None:
    info = opened(FakeNvml(FakeGpu("NVIDIA GH200 480GB"))).describe()
    assert info.scope == "module (GPU, CPU and memory)"


@pytest.mark.parametrize(
    ("instant_mw", "reads", "settle"),
    [(250_000, "integrated instant power", 0.1), (None, "integrated power", 1.0)],
)
def test_cards_before_volta_integrate_power(instant_mw: int | None, reads: str, settle: float) -> None:
    gpu = FakeGpu("NVIDIA GeForce GTX 1080 Ti", energy_mj=None, instant_mw=instant_mw, usage_mw=250_000)
    meter = opened(FakeNvml(gpu))
    try:
        info = meter.describe()
        assert (info.reads, info.settle_seconds) == (reads, settle)
        assert meter.read() >= 0
        assert meter.state().power_watts is None  # it would be compared with itself
    finally:
        close_meter(meter)


def test_a_jetson_is_refused_by_nvml() -> None:
    library = FakeNvml(FakeGpu("Orin (nvgpu)", energy_mj=None, instant_mw=None, usage_mw=None, mig=None))
    with pytest.raises(NoMeter, match=r"finds Orin .* energy \(Not Supported\) nor its power .* meter jetson"):
        opened(library)
    assert library.open == 0


def test_a_lost_gpu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    meter = opened(library)

    def lost(gpu: FakeGpu) -> int:
        raise NVMLError(GPU_IS_LOST)

    monkeypatch.setattr(library, "nvmlDeviceGetTotalEnergyConsumption", lost)
    with pytest.raises(BadMeasurement, match=r"no longer read the energy of NVIDIA H200: GPU is lost"):
        meter.read()


def test_no_driver() -> None:
    with pytest.raises(NoMeter, match=r"NVML does not start \(NVML Shared Library Not Found\): no NVIDIA driver"):
        opened(FakeNvml(starts=LIBRARY_NOT_FOUND))


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(nvml.importlib, "import_module", missing)
    with pytest.raises(NoMeter, match="pip install nvidia-ml-py"):
        open_meter()


def test_closing_shuts_nvml_down() -> None:
    library = FakeNvml()
    meter = opened(library)
    assert library.open == 1
    meter.close()
    assert library.open == 0


# --- which GPU --------------------------------------------------------------------------------------

A, B, C = (FakeGpu(uuid=f"GPU-{start}") for start in ("aaaa-1", "bbbb-2", "bbcc-3"))


@pytest.mark.parametrize(
    ("mask", "argument", "uuid"),
    [
        (None, "", A.uuid),
        (None, "1", B.uuid),
        ("2,0", "", C.uuid),
        ("2,0", "1", A.uuid),
        (" 1 , 2 ", "1", C.uuid),
        ("GPU-bbbb-2", "", B.uuid),
        ("GPU-bbb", "0", B.uuid),
        ("GPU-bbc,GPU-a", "1", A.uuid),
        ("1,-1,0", "", B.uuid),
        ("0", "GPU-bbcc", C.uuid),  # a UUID is found whether visible or not
    ],
)
def test_the_index_is_that_of_torch(mask: str | None, argument: str, uuid: str) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert opened(FakeNvml(A, B, C), argument, **environ).describe().device_id == uuid


@pytest.mark.parametrize(
    ("mask", "argument", "message"),
    [
        ("", "", r"GPU 0 is not visible under CUDA_VISIBLE_DEVICES='': 0 of 3 GPUs are"),
        ("-1", "", "0 of 3 GPUs are"),
        ("0,7,1", "1", r"GPU 1 is not visible under CUDA_VISIBLE_DEVICES='0,7,1': 1 of 3"),
        ("GPU-zz", "", "0 of 3 GPUs are"),
        ("GPU-bb", "", r"GPU-bb matches 2 of the GPUs GPU-aaaa-1, GPU-bbbb-2, GPU-bbcc-3"),
        (None, "3", r"GPU 3 is not visible: 3 of 3 GPUs are"),
        (None, "first", "nvml:first is neither an index nor a UUID"),
        (None, "GPU-zz", "GPU-zz matches 0 of the GPUs"),
        (None, "MIG-1", "nvml:MIG-1 is a MIG slice: NVML counts energy for the whole card"),
        ("MIG-5a", "", "CUDA_VISIBLE_DEVICES names MIG-5a, a MIG slice: NVML counts energy for the whole"),
    ],
)
def test_an_ambiguous_or_missing_gpu_is_refused(mask: str | None, argument: str, message: str) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    library = FakeNvml(A, B, C)
    with pytest.raises(NoMeter, match=message):
        opened(library, argument, **environ)
    assert library.open == 0


def test_a_gpu_with_mig_slices_is_refused() -> None:
    with pytest.raises(NoMeter, match=r"GPU 1 is divided into MIG slices: .*sudo nvidia-smi -i 1 -mig 0"):
        opened(FakeNvml(A, FakeGpu(mig=1)), "1")


def test_a_card_without_mig_is_accepted() -> None:
    assert opened(FakeNvml(FakeGpu(mig=None))).read() > 0


def test_different_gpus_need_an_unambiguous_order() -> None:
    library = FakeNvml(A, FakeGpu("NVIDIA T4", uuid="GPU-t4"))
    with pytest.raises(NoMeter, match=r"different GPUs \(NVIDIA H200, NVIDIA T4\).*CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        opened(library)
    assert opened(library, CUDA_DEVICE_ORDER="PCI_BUS_ID").describe().device_id == A.uuid
    assert opened(library, CUDA_VISIBLE_DEVICES="GPU-t4").describe().device_id == "GPU-t4"
    assert opened(library, "GPU-t4").describe().device_id == "GPU-t4"


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [FakeNvml, NewNvml])
def test_the_state_is_read(library: Callable[..., FakeNvml]) -> None:
    state = opened(library(FakeGpu(reasons=0x8 | 0x40 | 0x4 | 0x1))).state()
    assert (state.temperature_celsius, state.clock_mhz, state.power_watts) == (61, 1980, 410.0)
    assert state.throttling == ("hardware slowdown", "hardware thermal slowdown")
    assert state.power_capped
    assert state.other_processes == ()


def test_idle_and_user_clocks_are_not_throttling() -> None:
    state = opened(FakeNvml(FakeGpu(reasons=0x1 | 0x2 | 0x10 | 0x100))).state()
    assert state.throttling == ()
    assert not state.power_capped


def test_missing_readings_are_none() -> None:
    gpu = FakeGpu(instant_mw=None, usage_mw=None, limit_mw=None, reasons=None)
    meter = opened(FakeNvml(gpu))
    assert meter.state().power_watts is None
    assert meter.state().throttling == ()
    assert meter.describe().max_watts is None


def test_power_falls_back_to_the_average() -> None:
    assert opened(FakeNvml(FakeGpu(instant_mw=None))).state().power_watts == 400.0


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which this process has the threads 900 and 901, and process 77 lives next door."""
    for name in ("self/task/900", "self/task/901", "77"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([], ()),
        ([os.getpid()], ()),
        ([900], ()),  # some drivers list the thread that made the context
        ([os.getpid(), 77], ("process 77",)),
        ([os.getpid(), 424242], ("process 424242",)),
        ([77], ("process 77",)),
        ([424242], ()),  # in a container: our own process, under the host's id
        ([424242, 424243], ("process 424243",)),
    ],
)
def test_other_processes_are_distinguished_from_our_own(pids: list[int], others: tuple[str, ...], proc: Path) -> None:
    assert opened(FakeNvml(FakeGpu(pids=pids)), proc=proc).state().other_processes == others


def test_a_system_without_proc_works(tmp_path: Path) -> None:
    meter = opened(FakeNvml(FakeGpu(pids=[os.getpid()])), proc=tmp_path / "missing")
    assert meter.state().other_processes == ()


# --- the real library -------------------------------------------------------------------------------


def test_the_real_library_has_every_used_name() -> None:
    library = pytest.importorskip("pynvml")
    used = [name for name in dir(NewNvml) if name.startswith("nvml")]
    assert [name for name in used if not hasattr(library, name)] == []
    assert library.NVML_FI_DEV_POWER_INSTANT == nvml.POWER_INSTANT
    assert library.NVML_TEMPERATURE_GPU == 0
    assert library.NVML_CLOCK_SM == 1
    assert {
        library.nvmlClocksEventReasonHwSlowdown,
        library.nvmlClocksEventReasonSwThermalSlowdown,
        library.nvmlClocksEventReasonHwThermalSlowdown,
        library.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    } == set(nvml._THROTTLING)
    assert library.nvmlClocksEventReasonSwPowerCap == nvml._POWER_CAP


@pytest.mark.gpu
def test_a_real_gpu_counts_joules() -> None:
    meter = open_meter()
    try:
        assert meter.read() > 0
        assert meter.describe().device_id.startswith("GPU-")
        assert meter.state().temperature_celsius is not None
    finally:
        meter.close()
