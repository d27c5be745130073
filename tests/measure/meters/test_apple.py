from __future__ import annotations

import platform
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meters.apple import open_meter

M2 = {"cpu_total_mj": 1000, "gpu_mj": 500, "gpu_sram_mj": None, "ane_mj": 20, "dram_mj": 300}


class FakeLibrary:
    """The module zeus_apple_silicon and its monitor."""

    def __init__(self, *, works: bool = True, **counters: int | None) -> None:
        self.counters, self.works = counters, works

    def AppleEnergyMonitor(self) -> FakeLibrary:  # noqa: N802 - name in the library
        return self

    def get_cumulative_energy(self) -> SimpleNamespace:
        if not self.works:
            raise RuntimeError("IOReport is gone")
        return SimpleNamespace(**self.counters)


@pytest.mark.parametrize(
    ("part", "joules", "covers", "scope"),
    [
        ("", 1.82, ("cpu", "mps"), "cpu_total + gpu + ane + dram"),
        ("cpu", 1.0, ("cpu",), "cpu_total"),
        ("gpu", 0.5, ("mps",), "gpu"),
    ],
)
def test_the_parts_are_added_in_joules(part: str, joules: float, covers: tuple[str, ...], scope: str) -> None:
    library = FakeLibrary(**M2)
    meter = open_meter(part, library=library)
    info = meter.describe()
    assert meter.read() == pytest.approx(joules)
    assert (info.scope, info.covers, info.label) == (scope, covers, "measured (on-chip model)")
    library.works = False
    with pytest.raises(BadMeasurement, match="cannot be read: IOReport is gone"):
        meter.read()


@pytest.mark.parametrize(
    ("part", "library", "system", "message"),
    [
        ("", None, ("Linux", "x86_64"), "this is Linux on x86_64, not macOS on Apple silicon"),
        ("", None, ("Darwin", "arm64"), "pip install zeus-apple-silicon"),
        ("ane", None, ("Darwin", "arm64"), "apple:ane is unknown; give apple, apple:cpu or apple:gpu"),
        ("gpu", FakeLibrary(cpu_total_mj=1), ("Darwin", "arm64"), "none of the energy counters gpu_mj"),
        ("", FakeLibrary(works=False), ("Darwin", "arm64"), "cannot read the system's energy .*: IOReport is gone"),
    ],
)
def test_a_machine_without_counters_package_or_permission_is_refused(
    part: str, library: Any, system: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system[0])
    monkeypatch.setattr(platform, "machine", lambda: system[1])
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    with pytest.raises(NoMeter, match=message):
        open_meter(part, library=library)
