from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import NoMeter
from ecc.measure import Measured
from ecc.measure.meters import jetson
from ecc.measure.meters.jetson import find_rails, open_meter


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def iio(sys: Path, address: str, *rails: tuple[str, float], power: bool = True) -> Path:
    """One chip as JetPack 4 shows it; rails are (name, milliwatts)."""
    folder = sys / "bus/i2c/drivers/ina3221x" / address / f"iio:device{address[-1]}"
    for n, (name, milliwatts) in enumerate(rails):
        files = {f"rail_name_{n}": name, f"in_voltage{n}_input": 5000, f"in_current{n}_input": milliwatts / 5}
        if power:
            files[f"in_power{n}_input"] = milliwatts
        write(folder, **files)
    return folder


def hwmon(sys: Path, address: str, *rails: tuple[str, float]) -> Path:
    """One chip as JetPack 5 shows it; rails are (name, milliwatts)."""
    folder = sys / "bus/i2c/drivers/ina3221" / address / "hwmon" / f"hwmon{address[-1]}"
    for n, (name, milliwatts) in enumerate(rails, start=1):
        files = {f"in{n}_label": name, f"in{n}_input": 5000, f"curr{n}_input": milliwatts / 5}
        write(folder, **files)
    write(folder, in7_label="sum of shunt voltages", in7_input=123, curr7_input=1)
    return folder


def tx2(sys: Path, *, power: bool = True) -> None:
    iio(sys, "0-0040", ("VDD_SYS_GPU", 2000), ("VDD_SYS_SOC", 700), ("VDD_4V0_WIFI", 0), power=power)
    iio(sys, "0-0041", ("VDD_IN", 8000), ("VDD_SYS_CPU", 1500), ("VDD_SYS_DDR", 900), power=power)
    write(sys / "firmware/devicetree/base", model="NVIDIA Jetson TX2\0")


def nano(sys: Path) -> None:
    iio(sys, "6-0040", ("POM_5V_IN", 4000), ("POM_5V_GPU", 1000), ("POM_5V_CPU", 800))


def xavier(sys: Path) -> None:
    iio(sys, "1-0040", ("GPU", 1000), ("CPU", 2000), ("SOC", 3000))
    iio(sys, "1-0041", ("CV", 100), ("VDDRQ", 400), ("SYS5V", 1500))


def orin_agx(sys: Path) -> None:
    hwmon(sys, "1-0040", ("VDD_GPU_SOC", 6000), ("VDD_CPU_CV", 2000), ("VIN_SYS_5V0", 4000))
    hwmon(sys, "1-0041", ("NC", 50), ("VDDQ_VDD2_1V8AO", 1200), ("NC", 50))


def orin_nx(sys: Path) -> None:
    hwmon(sys, "1-0040", ("VDD_IN", 7000), ("VDD_CPU_GPU_CV", 2500), ("VDD_SOC", 1500))


# --- rails ------------------------------------------------------------------------------------------


def test_rails_of_the_iio_layout(tmp_path: Path) -> None:
    tx2(tmp_path)
    watts = {name: rail.watts() for name, rail in find_rails(tmp_path).items()}
    assert watts["VDD_IN"] == 8.0
    assert watts["VDD_SYS_GPU"] == 2.0
    assert len(watts) == 6


def test_without_a_power_file_voltage_times_current_is_taken(tmp_path: Path) -> None:
    tx2(tmp_path, power=False)
    rail = find_rails(tmp_path)["VDD_IN"]
    assert len(rail.files) == 2
    assert rail.watts() == pytest.approx(8.0)


def test_rails_of_the_hwmon_layout_without_the_sum_and_the_unconnected(tmp_path: Path) -> None:
    orin_agx(tmp_path)
    watts = {name: rail.watts() for name, rail in find_rails(tmp_path).items()}
    assert watts == pytest.approx({"VDD_GPU_SOC": 6.0, "VDD_CPU_CV": 2.0, "VIN_SYS_5V0": 4.0, "VDDQ_VDD2_1V8AO": 1.2})


def test_a_step_below_zero_is_zero(tmp_path: Path) -> None:
    nano(tmp_path)
    rail = find_rails(tmp_path)["POM_5V_GPU"]
    rail.files[0].write_text("-8\n")
    assert rail.watts() == 0.0


# --- totals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("board", "watts", "scope"),
    [
        (tx2, 8.0, "module (input rail VDD_IN)"),
        (nano, 4.0, "module (input rail POM_5V_IN)"),
        (orin_nx, 7.0, "module (input rail VDD_IN)"),
        (xavier, 8.0, "module (sum of GPU+CPU+SOC+CV+VDDRQ+SYS5V)"),
        (orin_agx, 12.0, "module (sum of VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0)"),
    ],
)
def test_the_total_is_the_input_rail_or_else_the_known_sum(
    board: object, watts: float, scope: str, tmp_path: Path
) -> None:
    board(tmp_path)  # type: ignore[operator]
    meter = open_meter(sys=tmp_path)
    try:
        assert meter._integrator._watts == pytest.approx(watts)
        info = meter.describe()
        assert (info.scope, info.provenance, info.reads) == (scope, Measured(), "integrated power")
        assert meter.read() >= 0
    finally:
        meter.close()


@pytest.mark.parametrize(
    ("argument", "watts", "scope"),
    [
        ("VDD_SYS_GPU", 2.0, "rail VDD_SYS_GPU"),
        ("vdd_sys_gpu", 2.0, "rail VDD_SYS_GPU"),
        ("VDD_SYS_GPU+VDD_SYS_DDR", 2.9, "rail VDD_SYS_GPU+VDD_SYS_DDR"),
    ],
)
def test_rails_can_be_chosen(argument: str, watts: float, scope: str, tmp_path: Path) -> None:
    tx2(tmp_path)
    meter = open_meter(argument, sys=tmp_path)
    try:
        assert meter._integrator._watts == pytest.approx(watts)
        assert meter.describe().scope == scope
        assert meter.describe().device == "NVIDIA Jetson TX2"
    finally:
        meter.close()


# --- refusals ---------------------------------------------------------------------------------------


def test_no_jetson(tmp_path: Path) -> None:
    with pytest.raises(NoMeter, match=r"no INA3221 power monitor under .*not a Jetson.*INA238.*command:uW:"):
        open_meter(sys=tmp_path)


def test_an_unknown_rail_names_those_there_are(tmp_path: Path) -> None:
    nano(tmp_path)
    with pytest.raises(NoMeter, match="no rail VDD_IN; this board has POM_5V_IN, POM_5V_GPU, POM_5V_CPU"):
        open_meter("VDD_IN", sys=tmp_path)


def test_rails_of_an_unknown_board_are_not_added(tmp_path: Path) -> None:
    hwmon(tmp_path, "1-0040", ("VDD_NEW", 1000), ("VDD_OTHER", 2000))
    with pytest.raises(NoMeter, match=r"input rail of this module is not known.*counts twice.*VDD_NEW, VDD_OTHER"):
        open_meter(sys=tmp_path)


def test_a_rail_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nano(tmp_path)

    def denied(self: jetson.Rail) -> float:
        raise PermissionError(13, "Permission denied", str(self.files[0]))

    monkeypatch.setattr(jetson.Rail, "watts", denied)
    with pytest.raises(
        NoMeter, match=r"only root may\. Until the next boot: sudo chmod a\+r .*in_power0_input"
    ) as caught:
        open_meter(sys=tmp_path)
    assert caught.value.remedy.startswith("sudo chmod a+r ")


def test_a_rail_that_gives_no_number(tmp_path: Path) -> None:
    nano(tmp_path)
    find_rails(tmp_path)["POM_5V_IN"].files[0].write_text("n/a\n")
    with pytest.raises(NoMeter, match="a rail of POM_5V_IN cannot be read"):
        open_meter(sys=tmp_path)


# --- state ------------------------------------------------------------------------------------------


def test_temperature_and_clock_of_the_gpu(tmp_path: Path) -> None:
    tx2(tmp_path)
    write(tmp_path / "class/thermal/thermal_zone0", type="BCPU-therm", temp=60000)
    write(tmp_path / "class/thermal/thermal_zone1", type="GPU-therm", temp=48500)
    write(tmp_path / "class/devfreq/17000000.gp10b", cur_freq=1300500000)
    write(tmp_path / "class/devfreq/15340000.vic", cur_freq=9)
    meter = open_meter(sys=tmp_path)
    try:
        state = meter.state()
        assert state.temperature_celsius == pytest.approx(48.5)
        assert state.clock_mhz == pytest.approx(1300.5)
    finally:
        meter.close()


def test_a_board_that_tells_nothing_of_itself(tmp_path: Path) -> None:
    nano(tmp_path)
    meter = open_meter(sys=tmp_path)
    try:
        assert meter.state().temperature_celsius is None
        assert meter.describe().device == "NVIDIA Jetson"
    finally:
        meter.close()
