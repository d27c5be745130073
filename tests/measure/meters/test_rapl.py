from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured
from ecc.measure.meters import rapl
from ecc.measure.meters.rapl import open_meter

WRAP_UJ = 262_143_328_850
LIMIT = {"constraint_0_power_limit_uw": 125_000_000}


def zone(folder: Path, name: str, energy_uj: int = 1_000_000, **files: object) -> Path:
    folder.mkdir(parents=True)
    values = {"name": name, "energy_uj": energy_uj, "max_energy_range_uj": WRAP_UJ, **files}
    for file, value in values.items():
        (folder / file).write_text(f"{value}\n")
    return folder


def one_package(folder: Path, name: str = "package-0", energy_uj: int = 1_000_000, **files: object) -> Path:
    return zone(folder / "intel-rapl:0", name, energy_uj, **files)


def server(folder: Path) -> None:
    """Two packages with all that must not be counted twice: psys, mmio, subzones inside and beside."""
    zone(folder / "intel-rapl:0", "package-0", **LIMIT)
    zone(folder / "intel-rapl:0" / "intel-rapl:0:0", "core")
    zone(folder / "intel-rapl:0" / "intel-rapl:0:1", "dram")
    zone(folder / "intel-rapl:0:0", "core")
    zone(folder / "intel-rapl:0:1", "dram")
    zone(folder / "intel-rapl:1", "package-1", **LIMIT)
    zone(folder / "intel-rapl:2", "psys")
    zone(folder / "intel-rapl-mmio:0", "package-0")
    (folder / "intel-rapl").mkdir()


def dies(folder: Path) -> None:
    zone(folder / "intel-rapl:0", "package-0-die-0", constraint_0_power_limit_uw="unknown")
    zone(folder / "intel-rapl:1", "package-0-die-1", **LIMIT)


@pytest.mark.parametrize(
    ("machine", "argument", "scope", "joules", "max_watts"),
    [
        (server, "", "package-0 + package-1", 2 + 4, 250.0),
        (server, "dram", "package-0 + package-1 + dram", 2 + 4 + 1, None),
        (dies, "", "package-0-die-0 + package-0-die-1", 2 + 4, None),
    ],
)
def test_packages_are_added_and_nothing_is_counted_twice(
    machine: Callable[[Path], None], argument: str, scope: str, joules: float, max_watts: float | None, tmp_path: Path
) -> None:
    machine(tmp_path)
    meter = open_meter(argument, root=tmp_path)
    assert meter.read() == 0
    counted = {"intel-rapl:0": 3, "intel-rapl:1": 5, "intel-rapl:0/intel-rapl:0:1": 2}
    for file in tmp_path.rglob("energy_uj"):
        file.write_text(f"{counted.get(str(file.parent.relative_to(tmp_path)), 99) * 1_000_000}\n")
    assert meter.read() == pytest.approx(joules)
    info = meter.describe()
    assert (info.name, info.scope, info.covers, info.provenance) == ("rapl", scope, ("cpu",), Measured())
    assert info.max_watts == max_watts


def test_a_counter_that_wraps_is_unwrapped_and_one_that_disappears_is_reported(tmp_path: Path) -> None:
    counter = one_package(tmp_path, energy_uj=WRAP_UJ - 1_000_000) / "energy_uj"
    meter = open_meter(root=tmp_path)
    readings = []
    for energy_uj in (WRAP_UJ - 500_000, 250_000, WRAP_UJ - 1, 7):
        counter.write_text(f"{energy_uj}\n")
        readings.append(meter.read())
    whole = WRAP_UJ * 1e-6
    assert readings == pytest.approx([0.5, 1.25, whole + 1 - 1e-6, whole + 1 + 7e-6])
    counter.unlink()
    with pytest.raises(BadMeasurement, match="RAPL counter can no longer be read"):
        meter.read()


@pytest.mark.parametrize(
    ("argument", "package", "message"),
    [
        ("", None, r"missing does not exist: a virtual machine.*sudo modprobe intel_rapl_msr"),
        ("", {"name": "psys"}, r"has no processor package; it has intel-rapl:0 \(psys\)"),
        ("dram", {}, r"has no dram counter \(AMD has none\); give rapl"),
        ("", {"max_energy_range_uj": "much"}, "cannot read the counters"),
        ("core", {}, "rapl:core is unknown"),
    ],
)
def test_a_machine_without_counters_is_refused(
    argument: str, package: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    if package is not None:
        one_package(tmp_path, **package)
    with pytest.raises(NoMeter, match=message):
        open_meter(argument, root=tmp_path if package is not None else tmp_path / "missing")


def test_missing_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: rapl.Zone) -> int:
        raise PermissionError(13, "Permission denied", str(self.path / "energy_uj"))

    server(tmp_path)
    monkeypatch.setattr(rapl.Zone, "_raw", denied)
    with pytest.raises(NoMeter) as caught:
        open_meter(root=tmp_path)
    message, remedy = str(caught.value), f"sudo chmod a+r {tmp_path}/intel-rapl:*/energy_uj"
    assert message.startswith(f"cannot read {tmp_path}/intel-rapl:0/energy_uj: only root may read it")
    assert caught.value.remedy == remedy
    udev = 'SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", ACTION=="add", RUN+="/bin/chmod a+r'
    assert all(part in message for part in (remedy, "/etc/udev/rules.d/90-rapl.rules", udev))


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor : 0\nmodel name\t: AMD EPYC 9654\n", "AMD EPYC 9654"), ("nothing", "processor"), (None, "processor")],
)
def test_the_processor_is_named(text: str | None, name: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert rapl.processor_name(tmp_path / "cpuinfo") == name
