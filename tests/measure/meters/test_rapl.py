from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured
from ecc.measure.meters import rapl
from ecc.measure.meters.rapl import open_meter

WRAP_UJ = 262_143_328_850


def zone(folder: Path, name: str, energy_uj: int = 1_000_000, **files: object) -> Path:
    folder.mkdir(parents=True)
    for file, value in {
        "name": name,
        "energy_uj": energy_uj,
        "max_energy_range_uj": WRAP_UJ,
        **files,
    }.items():
        (folder / file).write_text(f"{value}\n")
    return folder


def count(folder: Path, energy_uj: int) -> None:
    (folder / "energy_uj").write_text(f"{energy_uj}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two packages with all that must not be counted twice: psys, mmio, subzones inside and beside."""
    zone(tmp_path / "intel-rapl:0", "package-0", constraint_0_power_limit_uw=125_000_000)
    zone(tmp_path / "intel-rapl:0" / "intel-rapl:0:0", "core", 900_000)
    zone(tmp_path / "intel-rapl:0" / "intel-rapl:0:1", "dram", 500_000)
    zone(tmp_path / "intel-rapl:0:0", "core", 900_000)
    zone(tmp_path / "intel-rapl:0:1", "dram", 500_000)
    zone(tmp_path / "intel-rapl:1", "package-1", constraint_0_power_limit_uw=125_000_000)
    zone(tmp_path / "intel-rapl:2", "psys", 5_000_000)
    zone(tmp_path / "intel-rapl-mmio:0", "package-0", 1_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def test_packages_are_added_and_nothing_is_counted_twice(root: Path) -> None:
    meter = open_meter(root=root)
    assert meter.read() == 0
    for name, energy_uj in {
        "intel-rapl:0": 3_000_000,
        "intel-rapl:1": 2_500_000,
        "intel-rapl:2": 99_000_000,
        "intel-rapl-mmio:0": 99_000_000,
        "intel-rapl:0:0": 99_000_000,
        "intel-rapl:0/intel-rapl:0:0": 99_000_000,
        "intel-rapl:0/intel-rapl:0:1": 99_000_000,
    }.items():
        count(root / name, energy_uj)
    assert meter.read() == pytest.approx(3.5)


def test_memory_is_added_on_request(root: Path) -> None:
    meter = open_meter("dram", root=root)
    count(root / "intel-rapl:0/intel-rapl:0:1", 700_000)
    assert meter.read() == pytest.approx(0.2)
    assert meter.describe().scope == "package-0 + package-1 + dram"


def test_dies_count_as_packages(tmp_path: Path) -> None:
    zone(tmp_path / "intel-rapl:0", "package-0-die-0")
    zone(tmp_path / "intel-rapl:1", "package-0-die-1")
    assert open_meter(root=tmp_path).describe().scope == "package-0-die-0 + package-0-die-1"


def test_a_counter_that_wraps_is_unwrapped(tmp_path: Path) -> None:
    package = zone(tmp_path / "intel-rapl:0", "package-0", WRAP_UJ - 1_000_000)
    meter = open_meter(root=tmp_path)
    readings = []
    for energy_uj in (WRAP_UJ - 500_000, 250_000, WRAP_UJ - 1, 7):
        count(package, energy_uj)
        readings.append(meter.read())
    whole = WRAP_UJ * 1e-6
    assert readings == pytest.approx([0.5, 1.25, whole + 1 - 1e-6, whole + 1 + 7e-6])
    assert readings == sorted(readings)


def test_the_description_has_the_power_limit(root: Path) -> None:
    info = open_meter(root=root).describe()
    assert (info.name, info.scope, info.covers) == ("rapl", "package-0 + package-1", ("cpu",))
    assert (info.provenance, info.max_watts) == (Measured(), 250.0)


def test_a_missing_power_limit_is_none(tmp_path: Path) -> None:
    package = zone(tmp_path / "intel-rapl:0", "package-0")
    assert open_meter(root=tmp_path).describe().max_watts is None
    (package / "constraint_0_power_limit_uw").write_text("unknown")
    assert open_meter(root=tmp_path).describe().max_watts is None


# --- refusals ---------------------------------------------------------------------------------------


def test_no_powercap(tmp_path: Path) -> None:
    with pytest.raises(NoMeter, match=r"missing does not exist: a virtual machine.*sudo modprobe intel_rapl_msr"):
        open_meter(root=tmp_path / "missing")


def test_no_package(tmp_path: Path) -> None:
    zone(tmp_path / "intel-rapl:0", "psys")
    with pytest.raises(NoMeter, match=r"has no processor package; it has intel-rapl:0 \(psys\)"):
        open_meter(root=tmp_path)


def test_no_memory_counter(tmp_path: Path) -> None:
    zone(tmp_path / "intel-rapl:0", "package-0")
    with pytest.raises(NoMeter, match=r"has no dram counter \(AMD has none\); give rapl"):
        open_meter("dram", root=tmp_path)


def test_missing_permission_is_explained(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: rapl.Zone) -> int:
        raise PermissionError(13, "Permission denied", str(self.path / "energy_uj"))

    monkeypatch.setattr(rapl.Zone, "_raw", denied)
    with pytest.raises(NoMeter) as caught:
        open_meter(root=root)
    message = str(caught.value)
    assert message.startswith(f"cannot read {root}/intel-rapl:0/energy_uj: only root may read it")
    assert f"sudo chmod a+r {root}/intel-rapl:*/energy_uj" in message
    assert caught.value.remedy == f"sudo chmod a+r {root}/intel-rapl:*/energy_uj"
    assert "/etc/udev/rules.d/90-rapl.rules" in message
    assert 'SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", ACTION=="add", RUN+="/bin/chmod a+r' in message


def test_a_damaged_counter_is_refused(tmp_path: Path) -> None:
    package = zone(tmp_path / "intel-rapl:0", "package-0")
    (package / "max_energy_range_uj").write_text("much")
    with pytest.raises(NoMeter, match="cannot read the counters"):
        open_meter(root=tmp_path)


def test_a_counter_that_disappears_is_reported(tmp_path: Path) -> None:
    package = zone(tmp_path / "intel-rapl:0", "package-0")
    meter = open_meter(root=tmp_path)
    (package / "energy_uj").unlink()
    with pytest.raises(BadMeasurement, match="RAPL counter can no longer be read"):
        meter.read()


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor : 0\nmodel name\t: AMD EPYC 9654\n", "AMD EPYC 9654"), ("nothing", "processor")],
)
def test_the_processor_is_named(text: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert rapl.processor_name(tmp_path / "cpuinfo") == name
    assert rapl.processor_name(tmp_path / "missing") == "processor"
