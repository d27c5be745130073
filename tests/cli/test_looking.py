from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ecc.cli.app import app
from ecc.errors import NoMeter
from ecc.measure import Meter, find

PERMISSION = "sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj"


def ecc(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def failing(reason: str, remedy: str = "") -> Callable[[str], Meter]:
    def open_meter(argument: str) -> Meter:
        raise NoMeter(reason, remedy=remedy)

    return open_meter


@pytest.fixture
def nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in find.AUTO:
        monkeypatch.setitem(find.OPENERS, name, failing(f"no {name} here"))
    monkeypatch.setitem(find.OPENERS, "rapl", failing("only root may read it", remedy=PERMISSION))


def test_a_machine_with_nothing_to_measure_with_is_no_error(nothing_works: None) -> None:
    result = ecc("doctor")
    assert result.exit_code == 0
    for name in find.AUTO[:-1]:
        assert f"no {name} here" in result.stdout
    assert "No energy meter works here" in result.stdout
    for spec in ("platform:jetson-tx2", "cputime:15W", "command:PROGRAM", "replay:FILE", "file.py:MyMeter", PERMISSION):
        assert spec in result.stdout


def test_whatever_this_machine_has_the_doctor_ends_well() -> None:
    result = ecc("doctor", "--quick")
    assert result.exit_code == 0
    assert "nvml" in result.stdout


def test_facts_for_programs(nothing_works: None) -> None:
    result = ecc("doctor", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["can_measure"] is False
    assert [meter["spec"] for meter in facts["meters"]] == list(find.AUTO)
    assert facts["meters"][-1]["remedy"] == PERMISSION


def test_a_meter_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "shunt.py"
    file.write_text(
        "import time\n"
        "from ecc.measure import Measured, MeterInfo\n"
        "class MyMeter:\n"
        "    def read(self):\n"
        "        return 5 * round(time.monotonic(), 2)\n"
        "    def describe(self):\n"
        "        return MeterInfo(name='shunt', device='my board', provenance=Measured(), scope='board')\n"
    )
    result = ecc("doctor", "--quick", "--meter", f"{file}:MyMeter")
    assert result.exit_code == 0
    assert "my board, board: measured" in result.stdout
    assert "energy counter, moves every" in result.stdout
    assert "idle" in result.stdout


def test_an_estimate_is_shown_as_one() -> None:
    result = ecc("doctor", "--meter", "platform:gtx-1080-ti")
    assert result.exit_code == 0
    assert "NVIDIA GeForce GTX 1080 Ti, board: estimated" in result.stdout


def test_a_named_meter_that_does_not_work_is_one_line_and_exit_code_2() -> None:
    result = ecc("doctor", "--meter", "platform:jetson-tx1")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: platform 'jetson-tx1' is unknown (did you mean 'jetson-tx2'?)")


def test_the_self_test_takes_at_least_a_second() -> None:
    assert ecc("doctor", "--seconds", "0.1").exit_code == 2


def test_help_has_examples() -> None:
    result = ecc("doctor", "--help")
    assert "ecc doctor --quick" in result.stdout
    assert "doctor    Show which energy meters work here" in ecc("--help").stdout
