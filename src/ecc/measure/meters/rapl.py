"""Intel and AMD processors: the RAPL counters of Linux under /sys/class/powercap.

Only packages are counted. `psys` and the `mmio` zones overlap with them, and the subzones `core` and `uncore` are part
of them, so adding these would count joules twice. `dram` is not part of the package and is added on request. The
hardware counters have 32 bits and wrap within minutes; they are unwrapped here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meter import Measured, MeterInfo

POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"package-\d+(-die-\d+)?")
_REMEDY = "sudo chmod a+r {root}/intel-rapl:*/energy_uj"
_PERMISSION = (
    "only root may read it since CVE-2020-8694. Until the next boot: {remedy} ; permanently, add this line to "
    "/etc/udev/rules.d/90-rapl.rules and reboot: "
    'SUBSYSTEM=="powercap", KERNEL=="intel-rapl:*", ACTION=="add", RUN+="/bin/chmod a+r /sys%p/energy_uj" '
    "(on a shared machine, allow a group instead: the counter reveals what others compute)."
)


@dataclass
class Zone:
    """A microjoule counter that wraps, and its unwrapped total."""

    path: Path
    name: str
    wraps_at_uj: int
    total_uj: int = 0
    last_uj: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.last_uj = self._raw()

    def advance(self) -> int:
        """Microjoules since the zone was opened. It must be called at least once per wrap."""
        raw = self._raw()
        step = raw - self.last_uj
        self.total_uj += step if step >= 0 else step + self.wraps_at_uj
        self.last_uj = raw
        return self.total_uj

    def _raw(self) -> int:
        return int((self.path / "energy_uj").read_text())


class RaplMeter:
    """Sum of all processor packages, and optionally of their memory."""

    def __init__(self, zones: list[Zone]) -> None:
        self._zones = zones
        limits = [_power_limit(zone.path) for zone in zones]
        self._max_watts = sum(limits) if all(limits) else None

    def read(self) -> float:
        """Joules since the meter was opened."""
        try:
            return sum(zone.advance() for zone in self._zones) * 1e-6
        except (OSError, ValueError) as error:
            raise BadMeasurement(f"a RAPL counter can no longer be read: {error}") from error

    def describe(self) -> MeterInfo:
        """Scope is the packages that were found."""
        shortest = min(zone.wraps_at_uj for zone in self._zones) * 1e-6
        return MeterInfo(
            name="rapl",
            device=processor_name(),
            provenance=Measured(),
            scope=" + ".join(zone.name for zone in self._zones),
            covers=("cpu",),
            resolution_joules=2.0**-16,  # 15.3 uJ, the unit of most processors; some count in 61 uJ
            max_watts=self._max_watts,
            notes=(
                "counts every process on the processor, not only this one",
                f"wraps every {shortest:.0f} J; unwrapped, so read it at least once per wrap",
                "on AMD processors the counter is an on-chip model, not a sensor",
            ),
        )


def open_meter(argument: str = "", *, root: Path = POWERCAP) -> RaplMeter:
    """Open `rapl` (packages) or `rapl:dram` (packages and memory)."""
    if argument not in ("", "package", "dram"):
        raise NoMeter(f"rapl:{argument} is unknown; give rapl (packages) or rapl:dram (packages and memory).")
    if not root.is_dir():
        raise NoMeter(
            f"{root} does not exist: a virtual machine, not Linux, or the module is not loaded (sudo modprobe "
            "intel_rapl_msr)."
        )
    packages = [path for path in _zone_paths(root, "intel-rapl:*") if _PACKAGE.fullmatch(_name(path))]
    if not packages:
        found = ", ".join(f"{path.name} ({_name(path)})" for path in _zone_paths(root, "*")) or "nothing"
        raise NoMeter(f"{root} has no processor package; it has {found}.")
    paths = list(packages)
    if argument == "dram":
        memory = [sub for path in packages for sub in _zone_paths(path, "intel-rapl:*") if _name(sub) == "dram"]
        if not memory:
            raise NoMeter("rapl:dram: this processor has no dram counter (AMD has none); give rapl.")
        paths += memory
    try:
        zones = [Zone(path, _name(path), int((path / "max_energy_range_uj").read_text())) for path in paths]
    except PermissionError as error:
        remedy = _REMEDY.format(root=root)
        raise NoMeter(f"cannot read {error.filename}: {_PERMISSION.format(remedy=remedy)}", remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise NoMeter(f"cannot read the counters under {root}: {error}") from error
    return RaplMeter(zones)


def _zone_paths(folder: Path, pattern: str) -> list[Path]:
    # `intel-rapl:0:0` exists both next to `intel-rapl:0` and inside it: only take names one level deeper.
    depth = folder.name.count(":") + 1
    return sorted(p for p in folder.glob(pattern) if p.name.count(":") == depth and (p / "name").is_file())


def _name(path: Path) -> str:
    return (path / "name").read_text().strip()


def _power_limit(path: Path) -> float:
    """Highest power limit of the zone in watts; 0 if there is none."""
    try:
        limits = [int(file.read_text()) for file in path.glob("constraint_*_power_limit_uw")]
    except (OSError, ValueError):
        limits = []  # only skips one check of the counter
    return max(limits, default=0) * 1e-6


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor from Linux; `processor` if unknown."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else "processor"
