from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured, close_meter
from ecc.measure.meters import nvml
from ecc.measure.meters.nvml import NvmlMeter, open_meter

ERRORS = {3: "Not Supported", 12: "NVML Shared Library Not Found"}
READINGS = {
    "Name": "NVIDIA H200",
    "UUID": "GPU-8f3a0000-1111",
    "MigMode": [0, 0],
    "TotalEnergyConsumption": 5_000_250,
    "PowerUsage": 400_000,
    "EnforcedPowerLimit": 700_000,
    "Temperature": 61,
    "ClockInfo": 1980,
    "CurrentClocksThrottleReasons": 0,
    "ComputeRunningProcesses": [],
}
OLD_REASONS, NEW_REASONS = "CurrentClocksThrottleReasons", "CurrentClocksEventReasons"  # renamed in driver 535


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(ERRORS[value])
        self.value = value


def gpu(instant_mw: int | None = 410_000, **readings: Any) -> dict[str, Any]:
    """A card: what `nvmlDeviceGetNAME` returns by NAME; None raises Not Supported, as NVML does."""
    power = SimpleNamespace(nvmlReturn=3 if instant_mw is None else 0, value=SimpleNamespace(uiVal=instant_mw))
    return {**READINGS, "FieldValues": [power], **readings}


class FakeNvml:
    """The part of pynvml that is used: free functions over handles. A handle is a card."""

    NVMLError = NVMLError

    def __init__(self, *gpus: dict[str, Any], fails: int | None = None) -> None:
        self.gpus, self.fails, self.open = gpus or (gpu(),), fails, 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name, as below
        if self.fails is not None:
            raise NVMLError(self.fails)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        return self.gpus[index]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        key = name.removeprefix("nvmlDeviceGet")
        if not any(key in card for card in self.__dict__["gpus"]):
            raise AttributeError(name)

        def read(card: dict[str, Any], *_: object) -> Any:
            if card[key] is None:
                raise NVMLError(3)
            return card[key]

        return read


def opened(library: FakeNvml, argument: str = "", proc: Path = Path("/proc"), **environ: str) -> NvmlMeter:
    return open_meter(argument, nvml=library, environ=environ, proc=proc)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({}, {"device": "NVIDIA H200", "reads": "energy counter", "resolution_joules": 1e-3, "max_watts": 700.0}),
        ({"Name": b"NVIDIA H200", "UUID": b"GPU-8f3a0000-1111"}, {"device": "NVIDIA H200"}),  # older bindings
        ({"Name": "NVIDIA GH200 480GB"}, {"scope": "module (GPU, CPU and memory)"}),
        ({"EnforcedPowerLimit": None, "MigMode": None}, {"max_watts": None}),
        ({"TotalEnergyConsumption": None}, {"reads": "integrated instant power", "settle_seconds": 0.1}),
        ({"TotalEnergyConsumption": None, "instant_mw": None}, {"reads": "integrated power", "settle_seconds": 1.0}),
    ],
    ids=["counter", "bytes", "grace", "no limit", "instant power", "average power"],
)
def test_energy_is_read_and_described(card: dict[str, Any], expected: dict[str, Any]) -> None:
    library = FakeNvml(gpu(**card))
    meter = opened(library)
    info = meter.describe()
    assert {name: getattr(info, name) for name in expected} == expected
    assert (info.name, info.device_id, info.covers) == ("nvml", "GPU-8f3a0000-1111", ("cuda",))
    assert (info.provenance, info.label) == (Measured(), "measured")
    if info.reads == "energy counter":
        assert meter.read() == pytest.approx(5000.250)
        library.gpus[0]["TotalEnergyConsumption"] = None
        with pytest.raises(BadMeasurement, match=r"no longer read the energy of NVIDIA G?H200.*: Not Supported"):
            meter.read()
    else:
        assert meter.read() >= 0
        assert meter.state().power_watts is None  # it would be compared with itself
    close_meter(meter)
    assert library.open == 0


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ({}, {"temperature_celsius": 61, "clock_mhz": 1980, "power_watts": 410.0, "throttling": ()}),
        ({OLD_REASONS: 0x8 | 0x40 | 0x4}, {"throttling": ("hardware slowdown", "hardware thermal slowdown")}),
        ({NEW_REASONS: 0x20 | 0x4}, {"throttling": ("software thermal slowdown",), "power_capped": True}),
        ({OLD_REASONS: 0x1 | 0x2 | 0x10 | 0x100}, {"throttling": (), "power_capped": False}),  # idle, user clocks
        ({"instant_mw": None}, {"power_watts": 400.0}),
        ({"instant_mw": None, "PowerUsage": None, OLD_REASONS: None}, {"power_watts": None, "throttling": ()}),
    ],
)
def test_the_state_is_read_as_far_as_the_card_has_it(card: dict[str, Any], expected: dict[str, Any]) -> None:
    state = opened(FakeNvml(gpu(**card))).state()
    assert {name: getattr(state, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([], ()),
        ([os.getpid()], ()),
        ([900, 500], ("process 500",)),  # some drivers list the thread that made the context
        ([os.getpid(), 77], ("process 77",)),
        ([os.getpid(), 424242], ("process 424242",)),
        ([77], ("process 77",)),
        ([424242], ()),  # in a container: our own process, under the host's id
        ([424242, 424243], ("process 424243",)),
    ],
)
def test_other_processes_are_distinguished_from_our_own(
    pids: list[int], others: tuple[str, ...], tmp_path: Path
) -> None:
    """This process has the threads 900 and 901; process 77 is another one."""
    for name in ("self/task/900", "self/task/901", "77"):
        (tmp_path / name).mkdir(parents=True)
    library = FakeNvml(gpu(ComputeRunningProcesses=[SimpleNamespace(pid=pid) for pid in pids]))
    assert opened(library, proc=tmp_path).state().other_processes == others
    if pids == [os.getpid()]:  # a system without /proc
        assert opened(library, proc=tmp_path / "missing").state().other_processes == ()


# --- which GPU ---------------------------------------------------------------------------------------

A, B, C = (gpu(UUID=f"GPU-{start}") for start in ("aaaa-1", "bbbb-2", "bbcc-3"))
T4 = gpu(Name="NVIDIA T4", UUID="GPU-t4")
SAME, MIXED = (A, B, C), (A, T4)


@pytest.mark.parametrize(
    ("gpus", "mask", "argument", "uuid"),
    [
        (SAME, None, "", "GPU-aaaa-1"),
        (SAME, None, "1", "GPU-bbbb-2"),
        (SAME, "2,0", "", "GPU-bbcc-3"),
        (SAME, " 1 , 2 ", "1", "GPU-bbcc-3"),
        (SAME, "GPU-bbb", "0", "GPU-bbbb-2"),
        (SAME, "GPU-bbc,GPU-a", "1", "GPU-aaaa-1"),
        (SAME, "1,-1,0", "", "GPU-bbbb-2"),
        (SAME, "0", "GPU-bbcc", "GPU-bbcc-3"),  # a UUID is found whether visible or not
        (MIXED, "GPU-t4", "", "GPU-t4"),
        (MIXED, None, "GPU-t4", "GPU-t4"),
    ],
)
def test_the_index_is_that_of_torch(
    gpus: tuple[dict[str, Any], ...], mask: str | None, argument: str, uuid: str
) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    assert opened(FakeNvml(*gpus), argument, **environ).describe().device_id == uuid


JETSON = gpu(Name="Orin (nvgpu)", TotalEnergyConsumption=None, instant_mw=None, PowerUsage=None, MigMode=None)


@pytest.mark.parametrize(
    ("library", "mask", "argument", "message"),
    [
        (FakeNvml(*SAME), "", "", r"GPU 0 is not visible under CUDA_VISIBLE_DEVICES='': 0 of 3 GPUs are"),
        (FakeNvml(*SAME), "-1", "", "0 of 3 GPUs are"),
        (FakeNvml(*SAME), "0,7,1", "1", r"GPU 1 is not visible under CUDA_VISIBLE_DEVICES='0,7,1': 1 of 3"),
        (FakeNvml(*SAME), "GPU-zz", "", "0 of 3 GPUs are"),
        (FakeNvml(*SAME), "GPU-bb", "", r"GPU-bb matches 2 of the GPUs GPU-aaaa-1, GPU-bbbb-2, GPU-bbcc-3"),
        (FakeNvml(*SAME), None, "3", r"GPU 3 is not visible: 3 of 3 GPUs are"),
        (FakeNvml(*SAME), None, "first", "nvml:first is neither an index nor a UUID"),
        (FakeNvml(*SAME), None, "GPU-zz", "GPU-zz matches 0 of the GPUs"),
        (FakeNvml(*SAME), None, "MIG-1", "nvml:MIG-1 is a MIG slice: NVML counts energy for the whole card"),
        (FakeNvml(*SAME), "MIG-5a", "", "CUDA_VISIBLE_DEVICES names MIG-5a, a MIG slice: NVML counts energy"),
        (FakeNvml(A, gpu(MigMode=[1, 1])), None, "1", r"GPU 1 is divided into MIG slices: .*nvidia-smi -i 1 -mig 0"),
        (FakeNvml(*MIXED), None, "", r"different GPUs \(NVIDIA H200, NVIDIA T4\).*CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        (FakeNvml(JETSON), None, "", r"finds Orin .* energy \(Not Supported\) nor its power .* meter jetson"),
        (FakeNvml(fails=12), None, "", r"NVML does not start \(NVML Shared Library Not Found\): no NVIDIA driver"),
    ],
)
def test_an_ambiguous_missing_or_unreadable_gpu_is_refused(
    library: FakeNvml, mask: str | None, argument: str, message: str
) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    with pytest.raises(NoMeter, match=message):
        opened(library, argument, **environ)
    assert library.open == 0


def test_different_gpus_are_accepted_in_the_order_of_the_bus() -> None:
    assert opened(FakeNvml(*MIXED), CUDA_DEVICE_ORDER="PCI_BUS_ID").describe().device_id == "GPU-aaaa-1"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoMeter, match="pip install nvidia-ml-py"):
        open_meter()


# --- the real library --------------------------------------------------------------------------------


def test_the_real_library_has_every_used_name() -> None:
    library = pytest.importorskip("pynvml")
    used = ["nvmlInit", "nvmlShutdown", *(f"nvmlDeviceGet{name}" for name in (*gpu(), "Count", "HandleByIndex"))]
    assert [name for name in used if not hasattr(library, name)] == []
    assert (library.NVML_TEMPERATURE_GPU, library.NVML_CLOCK_SM) == (0, 1)
    assert library.NVML_FI_DEV_POWER_INSTANT == nvml.POWER_INSTANT
    kinds = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
    assert {getattr(library, f"nvmlClocksEventReason{kind}") for kind in kinds} == set(nvml._THROTTLING)
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
