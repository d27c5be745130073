from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meters import apple
from ecc.measure.meters.apple import open_meter


class FakeMonitor:
    def __init__(self, **counters: int | None) -> None:
        self.counters = counters
        self.works = True

    def get_cumulative_energy(self) -> SimpleNamespace:
        if not self.works:
            raise RuntimeError("IOReport is gone")
        return SimpleNamespace(**self.counters)


def library(monitor: FakeMonitor) -> Any:
    return SimpleNamespace(AppleEnergyMonitor=lambda: monitor)


def m2() -> FakeMonitor:
    return FakeMonitor(cpu_total_mj=1000, gpu_mj=500, gpu_sram_mj=None, ane_mj=20, dram_mj=300)


def test_the_parts_are_added_in_joules() -> None:
    meter = open_meter(library=library(m2()))
    assert meter.read() == pytest.approx(1.82)
    info = meter.describe()
    assert info.scope == "cpu_total + gpu + ane + dram"
    assert info.covers == ("cpu", "mps")


@pytest.mark.parametrize(("part", "joules", "covers"), [("cpu", 1.0, ("cpu",)), ("gpu", 0.5, ("mps",))])
def test_a_part_can_be_chosen(part: str, joules: float, covers: tuple[str, ...]) -> None:
    meter = open_meter(part, library=library(m2()))
    assert meter.read() == pytest.approx(joules)
    assert meter.describe().covers == covers


def test_the_label_names_the_on_chip_model() -> None:
    assert open_meter(library=library(m2())).describe().label == "measured (on-chip model)"


def test_a_counter_that_disappears_is_reported() -> None:
    monitor = m2()
    meter = open_meter(library=library(monitor))
    monitor.works = False
    with pytest.raises(BadMeasurement, match="cannot be read: IOReport is gone"):
        meter.read()


def test_other_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(NoMeter, match="this is Linux on x86_64, not macOS on Apple silicon"):
        open_meter()


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(apple.importlib, "import_module", missing)
    with pytest.raises(NoMeter, match="pip install zeus-apple-silicon"):
        open_meter()


def test_an_unknown_part() -> None:
    with pytest.raises(NoMeter, match="apple:ane is unknown; give apple, apple:cpu or apple:gpu"):
        open_meter("ane")


def test_a_chip_without_counters_is_refused() -> None:
    with pytest.raises(NoMeter, match="none of the energy counters gpu_mj"):
        open_meter("gpu", library=library(FakeMonitor(cpu_total_mj=1)))


def test_a_system_without_permission_is_refused() -> None:
    monitor = m2()
    monitor.works = False
    with pytest.raises(NoMeter, match="cannot read the system's energy counters: IOReport is gone"):
        open_meter(library=library(monitor))
