"""NVIDIA Jetson boards: power readings of the INA3221 monitors in sysfs, integrated to joules.

There are two layouts: `ina3221x/*/iio:device*` in JetPack 4 and older (TX1, TX2, Nano, Xavier), and
`ina3221/*/hwmon/hwmon*` in JetPack 5 and newer (Xavier, Orin). Rails feed one another, so the total is the input rail
and never the sum of all rails. AGX Xavier and AGX Orin have no input rail; there the rails listed below are added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ecc.errors import NoMeter
from ecc.measure.meter import DeviceState, Measured, MeterInfo, PowerIntegrator
from ecc.measure.thermal import read_or_empty

INPUT_RAILS = ("VDD_IN", "POM_5V_IN")  # TX1, TX2, Xavier NX, Orin NX and Nano; the first Nano
SUMMED_RAILS = (
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin; VDDQ_VDD2_1V8AO is fed from VIN_SYS_5V0
)
_GPU_CLOCK = re.compile(r"gpu|gm20b|gp10b|gv11b|ga10b")


@dataclass(frozen=True)
class Rail:
    """One channel of a power monitor."""

    name: str
    files: tuple[Path, ...]
    """Milliwatts, or millivolts and milliamperes."""

    def watts(self) -> float:
        """Current power. A channel near zero may read slightly negative."""
        values = [float(file.read_text()) for file in self.files]
        return max(0.0, values[0] * 1e-3 if len(values) == 1 else values[0] * values[1] * 1e-6)


class JetsonMeter:
    """One rail, or the sum of several, integrated in a thread."""

    def __init__(self, rails: list[Rail], *, scope: str, device: str, sys: Path = Path("/sys")) -> None:
        self._rails = rails
        self._scope = scope
        self._device = device
        self._sys = sys
        self._integrator = PowerIntegrator(lambda: sum(rail.watts() for rail in rails), period_seconds=0.01)

    def read(self) -> float:
        """Joules since the meter was opened."""
        return self._integrator.read()

    def describe(self) -> MeterInfo:
        """Scope is the rail or rails."""
        return MeterInfo(
            name="jetson",
            device=self._device,
            provenance=Measured(),
            scope=self._scope,
            reads="integrated power",
            notes=("INA3221 has steps of 8 mV and 40 uV across the shunt; small loads are coarse",),
        )

    def state(self) -> DeviceState:
        """Temperature and clock of the GPU, if the board provides them."""
        zones = self._sys.glob("class/thermal/thermal_zone*/type")
        heat = [_number(zone.with_name("temp")) for zone in zones if "gpu" in read_or_empty(zone).lower()]
        devices = self._sys.glob("class/devfreq/*/cur_freq")
        clocks = [_number(file) for file in devices if _GPU_CLOCK.search(file.parent.name)]
        return DeviceState(
            temperature_celsius=max((h * 1e-3 for h in heat if h is not None), default=None),
            clock_mhz=max((c * 1e-6 for c in clocks if c is not None), default=None),
        )

    def close(self) -> None:
        """Stop the integrator."""
        self._integrator.close()


def find_rails(sys: Path = Path("/sys")) -> dict[str, Rail]:
    """All rails with a name and a power reading, in both layouts."""
    drivers = sys / "bus" / "i2c" / "drivers"
    rails: dict[str, Rail] = {}
    for label in sorted(drivers.glob("ina3221x/*/iio:device*/rail_name_*")):
        n, here = label.name.removeprefix("rail_name_"), label.parent
        power = (here / f"in_power{n}_input",)
        pair = (here / f"in_voltage{n}_input", here / f"in_current{n}_input")
        _add(rails, read_or_empty(label), power if power[0].is_file() else pair)
    for label in sorted(drivers.glob("ina3221/*/hwmon/hwmon*/in*_label")):
        n, here = label.name.removeprefix("in").removesuffix("_label"), label.parent
        _add(rails, read_or_empty(label), (here / f"in{n}_input", here / f"curr{n}_input"))
    return rails


def _add(rails: dict[str, Rail], name: str, files: tuple[Path, ...]) -> None:
    # `NC` is not connected; "sum of shunt voltages" (in7) is not a rail.
    named = name and not name.upper().startswith("NC") and "sum of shunt" not in name.lower()
    if named and all(file.is_file() for file in files):
        rails[name] = Rail(name, files)


def open_meter(argument: str = "", *, sys: Path = Path("/sys")) -> JetsonMeter:
    """Open `jetson` (the whole module), `jetson:VDD_SYS_GPU` (a rail) or `jetson:GPU+SOC` (sum of rails)."""
    rails = find_rails(sys)
    if not rails:
        raise NoMeter(
            f"no INA3221 power monitor under {sys}/bus/i2c/drivers: not a Jetson with power rails. (AGX Thor has an "
            "INA238: use command:uW:cat FILE with its power1_input.)"
        )
    names, scope = _choose_rails(argument, rails)
    chosen = [rails[name] for name in names]
    try:
        for rail in chosen:
            rail.watts()
    except PermissionError as error:
        remedy = f"sudo chmod a+r {error.filename}"
        message = f"cannot read {error.filename}: only root may. Until the next boot: {remedy}"
        raise NoMeter(message, remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise NoMeter(f"a rail of {', '.join(names)} cannot be read: {error}") from error
    board = read_or_empty(sys / "firmware" / "devicetree" / "base" / "model").strip("\0")
    return JetsonMeter(chosen, scope=scope, device=board or "NVIDIA Jetson", sys=sys)


def _choose_rails(argument: str, rails: dict[str, Rail]) -> tuple[tuple[str, ...], str]:
    """Names of the rails to add, and the scope in words."""
    if argument:
        by_upper = {name.upper(): name for name in rails}
        wanted = [name.strip().upper() for name in argument.split("+")]
        missing = [name for name in wanted if name not in by_upper]
        if missing:
            raise NoMeter(f"jetson: no rail {', '.join(missing)}; this board has {', '.join(rails)}.")
        names = tuple(by_upper[name] for name in wanted)
        return names, f"rail {'+'.join(names)}"
    for name in INPUT_RAILS:
        if name in rails:
            return (name,), f"module (input rail {name})"
    for names in SUMMED_RAILS:
        if all(name in rails for name in names):
            return names, f"module (sum of {'+'.join(names)})"
    raise NoMeter(
        f"jetson: the input rail of this module is not known, and adding rails that feed one another counts twice. "
        f"Give jetson:RAIL or jetson:RAIL+RAIL with {', '.join(rails)}."
    )


def _number(file: Path) -> float | None:
    try:
        return float(read_or_empty(file))
    except ValueError:
        return None
