from __future__ import annotations

import sys
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

    def __init__(self, board: FakeBoard | None = None, *, power: Any = 82, works: bool = True, old: bool = False):
        self.board = board or FakeBoard(tick_seconds=0.001)
        self.power, self.works, self.open = power, works, 0
        self.field = "power" if old else "energy_accumulator"

    def amdsmi_init(self) -> None:
        if not self.works:
            raise AmdSmiException("driver not loaded")
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, float]:
        if not self.works:
            raise AmdSmiException("gone")
        return {self.field: (self.board.read() + 1000 * handle) * 1e6 / 15.3, "counter_resolution": 15.3}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {"current_socket_power": "N/A", "average_socket_power": self.power}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X"}


def opened(smi: FakeSmi, argument: str = "", **environ: str) -> AmdMeter:
    clock = smi.board.clock
    return open_meter(argument, smi=smi, environ=environ, now=clock.now, sleep=clock.sleep)


@pytest.mark.parametrize(
    ("smi", "argument", "environ", "index", "watts"),
    [
        (FakeSmi(), "", {}, 0, 82),
        (FakeSmi(old=True), "1", {}, 1, 82),
        (FakeSmi(power="N/A"), "", {"HIP_VISIBLE_DEVICES": "1,0"}, 1, None),
        (FakeSmi(), "0", {"HIP_VISIBLE_DEVICES": "1"}, 0, 82),
    ],
)
def test_the_accumulator_of_the_chosen_gpu_is_read(
    smi: FakeSmi, argument: str, environ: dict[str, str], index: int, watts: float | None
) -> None:
    meter = opened(smi, argument, **environ)
    assert meter.read() == pytest.approx(12_345.678 + 40 + 1000 * index, rel=1e-3)  # half a second at 80 W has passed
    info = meter.describe()
    assert (info.name, info.device, info.scope, info.covers) == ("amd", "AMD Instinct MI300X", "board", ("cuda",))
    assert (info.provenance, meter.state().power_watts) == (Measured(), watts)
    smi.works = False
    with pytest.raises(BadMeasurement, match="amdsmi cannot read the energy counter: gone"):
        meter.read()
    meter.close()
    assert smi.open == 0


@pytest.mark.parametrize(
    ("smi", "argument", "environ", "message"),
    [
        (FakeSmi(FakeBoard(fault=lambda *_: 7.0)), "", {}, r"stayed at 7\.0 J for 0\.5 s \(known for MI100.*update"),
        (FakeSmi(power=400), "", {}, r"counter shows (79|80)\.\d W and the power reading 400\.0 W"),
        (FakeSmi(power=10), "", {}, r"counter shows (79|80)\.\d W and the power reading 10\.0 W"),
        (FakeSmi(works=False), "", {}, "no working AMD driver: driver not loaded"),
        (FakeSmi(), "7", {}, "amd:7 does not exist: amdsmi sees 2 GPUs"),
        (FakeSmi(), "x", {}, "amd:x is not a number"),
        (FakeSmi(), "", {"HIP_VISIBLE_DEVICES": "GPU-1"}, "HIP_VISIBLE_DEVICES=GPU-1 does not identify one GPU"),
        (FakeSmi(), "", {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1"}, "give its index: amd:0"),
    ],
)
def test_a_faulty_ambiguous_or_missing_gpu_is_refused(
    smi: FakeSmi, argument: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(NoMeter, match=message):
        opened(smi, argument, **environ)
    assert smi.open == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('Unable')\nraise KeyError('libamd_smi.so')\n", r"\(KeyError: 'libamd_smi.so'\): ROCm is missing"),
        ("raise ImportError\n", "pip install amdsmi"),
    ],
)
def test_output_and_errors_of_the_import_are_contained(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    (tmp_path / "amdsmi.py").write_text(text)
    with pytest.raises(NoMeter, match=message):
        open_meter()
    assert capsys.readouterr() == ("", "")
