from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ecc.errors import NoMeter
from ecc.measure import Measured
from ecc.measure.meters import jetson
from ecc.measure.meters.jetson import JetsonMeter, find_rails, open_meter


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def iio(sys: Path, address: str, power: bool = True, **rails: float) -> None:
    """One chip as JetPack 4 shows it; rails in milliwatts."""
    folder = sys / "bus/i2c/drivers/ina3221x" / address / f"iio:device{address[-1]}"
    for n, (name, milliwatts) in enumerate(rails.items()):
        files = {f"rail_name_{n}": name, f"in_voltage{n}_input": 5000, f"in_current{n}_input": milliwatts / 5}
        write(folder, **files, **({f"in_power{n}_input": milliwatts} if power else {}))


def hwmon(sys: Path, address: str, **rails: float) -> None:
    """One chip as JetPack 5 shows it; rails in milliwatts."""
    folder = sys / "bus/i2c/drivers/ina3221" / address / "hwmon" / f"hwmon{address[-1]}"
    for n, (name, milliwatts) in enumerate(rails.items(), start=1):
        write(folder, **{f"in{n}_label": name, f"in{n}_input": 5000, f"curr{n}_input": milliwatts / 5})
    write(folder, in7_label="sum of shunt voltages", in7_input=123, curr7_input=1)


def tx2(sys: Path, power: bool = True) -> None:
    iio(sys, "0-0040", power, VDD_SYS_GPU=2000, VDD_SYS_SOC=700, VDD_4V0_WIFI=-8)
    iio(sys, "0-0041", power, VDD_IN=8000, VDD_SYS_CPU=1500, VDD_SYS_DDR=900)
    write(sys / "firmware/devicetree/base", model="NVIDIA Jetson TX2\0")
    write(sys / "class/thermal/thermal_zone0", type="BCPU-therm", temp=60000)
    write(sys / "class/thermal/thermal_zone1", type="GPU-therm", temp=48500)
    write(sys / "class/devfreq/17000000.gp10b", cur_freq=1300500000)
    write(sys / "class/devfreq/15340000.vic", cur_freq=9)


def tx2_without_power(sys: Path) -> None:
    tx2(sys, power=False)


def nano(sys: Path) -> None:
    iio(sys, "6-0040", POM_5V_IN=4000, POM_5V_GPU=1000, POM_5V_CPU=800)


def xavier(sys: Path) -> None:
    iio(sys, "1-0040", GPU=1000, CPU=2000, SOC=3000)
    iio(sys, "1-0041", CV=100, VDDRQ=400, SYS5V=1500)


def orin_agx(sys: Path) -> None:
    hwmon(sys, "1-0040", VDD_GPU_SOC=6000, VDD_CPU_CV=2000, VIN_SYS_5V0=4000)
    hwmon(sys, "1-0041", NC=50, VDDQ_VDD2_1V8AO=1200)


def orin_nx(sys: Path) -> None:
    hwmon(sys, "1-0040", VDD_IN=7000, VDD_CPU_GPU_CV=2500, VDD_SOC=1500)


def unknown(sys: Path) -> None:
    hwmon(sys, "1-0040", VDD_NEW=1000, VDD_OTHER=2000)


def broken(sys: Path) -> None:
    nano(sys)
    find_rails(sys)["POM_5V_IN"].files[0].write_text("n/a\n")


Board = Callable[[Path], None]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[Board, str], JetsonMeter]]:
    meters: list[JetsonMeter] = []

    def make(board: Board, argument: str) -> JetsonMeter:
        board(tmp_path)
        meters.append(open_meter(argument, sys=tmp_path))
        return meters[0]

    yield make
    for meter in meters:
        meter.close()


@pytest.mark.parametrize(
    ("board", "argument", "watts", "scope"),
    [
        (tx2, "", 8.0, "module (input rail VDD_IN)"),
        (tx2_without_power, "", 8.0, "module (input rail VDD_IN)"),  # voltage times current
        (nano, "", 4.0, "module (input rail POM_5V_IN)"),
        (orin_nx, "", 7.0, "module (input rail VDD_IN)"),
        (xavier, "", 8.0, "module (sum of GPU+CPU+SOC+CV+VDDRQ+SYS5V)"),
        (orin_agx, "", 12.0, "module (sum of VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0)"),
        (tx2, "vdd_sys_gpu", 2.0, "rail VDD_SYS_GPU"),
        (tx2, "VDD_SYS_GPU+VDD_SYS_DDR", 2.9, "rail VDD_SYS_GPU+VDD_SYS_DDR"),
        (tx2, "VDD_4V0_WIFI", 0.0, "rail VDD_4V0_WIFI"),  # a step below zero
    ],
)
def test_power_is_that_of_the_input_rail_the_known_sum_or_the_chosen_rails(
    board: Board, argument: str, watts: float, scope: str, opened: Callable[[Board, str], JetsonMeter]
) -> None:
    meter = opened(board, argument)
    info, state = meter.describe(), meter.state()
    assert meter._integrator._watts == pytest.approx(watts)
    assert meter.read() >= 0
    assert (info.scope, info.provenance, info.reads) == (scope, Measured(), "integrated power")
    if board in (tx2, tx2_without_power):
        assert (info.device, state.temperature_celsius, state.clock_mhz) == ("NVIDIA Jetson TX2", 48.5, 1300.5)
    else:
        assert (info.device, state.temperature_celsius, state.clock_mhz) == ("NVIDIA Jetson", None, None)


def test_the_sum_of_shunts_and_unconnected_channels_are_not_rails(tmp_path: Path) -> None:
    orin_agx(tmp_path)
    assert set(find_rails(tmp_path)) == {"VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"}


@pytest.mark.parametrize(
    ("board", "argument", "message"),
    [
        (lambda sys: None, "", r"no INA3221 power monitor under .*not a Jetson.*INA238.*command:uW:"),
        (nano, "VDD_IN", "no rail VDD_IN; this board has POM_5V_IN, POM_5V_GPU, POM_5V_CPU"),
        (unknown, "", r"input rail of this module is not known.*counts twice.*VDD_NEW, VDD_OTHER"),
        (broken, "", "a rail of POM_5V_IN cannot be read"),
    ],
)
def test_a_board_without_readable_rails_is_refused(board: Board, argument: str, message: str, tmp_path: Path) -> None:
    board(tmp_path)
    with pytest.raises(NoMeter, match=message):
        open_meter(argument, sys=tmp_path)


def test_missing_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: jetson.Rail) -> float:
        raise PermissionError(13, "Permission denied", str(self.files[0]))

    nano(tmp_path)
    monkeypatch.setattr(jetson.Rail, "watts", denied)
    message = r"only root may\. Until the next boot: sudo chmod a\+r .*in_power0_input"
    with pytest.raises(NoMeter, match=message) as caught:
        open_meter(sys=tmp_path)
    assert caught.value.remedy.startswith("sudo chmod a+r ")
