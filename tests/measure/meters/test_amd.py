from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import Measured
from ecc.measure.meters.amd import AmdMeter, open_meter
from measure.fakes import FakeBoard


class AmdSmiException(Exception):
    pass


class FakeSmi:
    """The part of the module amdsmi that is used; each handle is a board."""

    AmdSmiException = AmdSmiException

    def __init__(self, *boards: FakeBoard, power: Any = 82, works: bool = True, old: bool = False) -> None:
        self.boards = boards or (FakeBoard(tick_seconds=0.001),)
        self.power = power
        self.works = works
        self.old = old
        self.open = 0

    def amdsmi_init(self) -> None:
        if not self.works:
            raise AmdSmiException("driver not loaded")
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[FakeBoard]:
        return list(self.boards)

    def amdsmi_get_energy_count(self, board: FakeBoard) -> dict[str, float]:
        if not self.works:
            raise AmdSmiException("gone")
        name = "power" if self.old else "energy_accumulator"
        return {name: board.read() * 1e6 / 15.3, "counter_resolution": 15.3}

    def amdsmi_get_power_info(self, board: FakeBoard) -> dict[str, Any]:
        return {"current_socket_power": "N/A", "average_socket_power": self.power}

    def amdsmi_get_gpu_asic_info(self, board: FakeBoard) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X"}


def opened(smi: FakeSmi, argument: str = "", **environ: str) -> AmdMeter:
    clock = smi.boards[0].clock
    return open_meter(argument, smi=smi, environ=environ, now=clock.now, sleep=clock.sleep)


@pytest.mark.parametrize("old", [False, True])
def test_the_accumulator_is_read_in_joules(old: bool) -> None:
    meter = opened(FakeSmi(old=old))
    assert meter.read() == pytest.approx(12_345.678 + 40, rel=1e-3)  # half a second at 80 W has passed
    info = meter.describe()
    assert (info.name, info.device, info.scope, info.covers) == (
        "amd",
        "AMD Instinct MI300X",
        "board",
        ("cuda",),
    )
    assert info.provenance == Measured()
    assert meter.state().power_watts == 82


def test_closing_shuts_the_library_down() -> None:
    smi = FakeSmi()
    opened(smi).close()
    assert smi.open == 0


def test_a_counter_that_does_not_change_is_refused() -> None:
    smi = FakeSmi(FakeBoard(fault=lambda joules, now: 7.0))
    with pytest.raises(NoMeter, match=r"stayed at 7\.0 J for 0\.5 s \(known for MI100.*update ROCm"):
        opened(smi)
    assert smi.open == 0


@pytest.mark.parametrize("power", [400, 10])
def test_a_counter_that_disagrees_with_power_is_refused(power: int) -> None:
    with pytest.raises(NoMeter, match=rf"counter shows (79|80)\.\d W and the power reading {power}\.0 W"):
        opened(FakeSmi(power=power))


def test_without_a_power_reading_there_is_nothing_to_compare() -> None:
    assert opened(FakeSmi(power="N/A")).state().power_watts is None


def test_a_counter_that_disappears_is_reported() -> None:
    smi = FakeSmi()
    meter = opened(smi)
    smi.works = False
    with pytest.raises(BadMeasurement, match="amdsmi cannot read the energy counter: gone"):
        meter.read()


def test_no_driver() -> None:
    with pytest.raises(NoMeter, match="no working AMD driver: driver not loaded"):
        opened(FakeSmi(works=False))


@pytest.mark.parametrize(
    ("argument", "environ", "index"),
    [
        ("", {}, 0),
        ("1", {}, 1),
        ("", {"HIP_VISIBLE_DEVICES": "1,0"}, 1),
        ("0", {"HIP_VISIBLE_DEVICES": "1"}, 0),
    ],
)
def test_the_gpu_is_chosen_by_index_or_environment(argument: str, environ: dict[str, str], index: int) -> None:
    first = FakeBoard(tick_seconds=0.001)
    boards = (first, FakeBoard(tick_seconds=0.001))
    boards[1].clock = first.clock
    boards[1].read = lambda: first.read() + 1000  # type: ignore[method-assign]
    assert opened(FakeSmi(*boards), argument, **environ)._index == index


@pytest.mark.parametrize(
    ("argument", "environ", "message"),
    [
        ("7", {}, "amd:7 does not exist: amdsmi sees 1 GPUs"),
        ("x", {}, "amd:x is not a number"),
        ("", {"HIP_VISIBLE_DEVICES": "GPU-1"}, "HIP_VISIBLE_DEVICES=GPU-1 does not identify one GPU"),
        ("", {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, "give its index: amd:0"),
    ],
)
def test_an_ambiguous_or_missing_gpu_is_refused(argument: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(NoMeter, match=message):
        opened(FakeSmi(), argument, **environ)


# --- the import of amdsmi ---------------------------------------------------------------------------

Plant = Callable[[str], None]


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Puts a package amdsmi in front of the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    return lambda text: (tmp_path / "amdsmi.py").write_text(text) and None


def test_output_and_errors_of_the_import_are_contained(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant("print('Unable to find libamd_smi.so')\nraise KeyError('libamd_smi.so')\n")
    with pytest.raises(NoMeter, match=r"cannot be imported \(KeyError: 'libamd_smi.so'\): ROCm is missing"):
        open_meter()
    assert capsys.readouterr() == ("", "")


def test_no_package(plant: Plant) -> None:
    plant("raise ImportError\n")
    with pytest.raises(NoMeter, match="pip install amdsmi"):
        open_meter()
