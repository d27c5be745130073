"""The runner of `make gpu` with checks made up for it, and the checks that a CPU can run in a short form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_acceptance as acceptance
import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_acceptance.py"
MADE_UP = """
import time
from gpu_checks.common import Check, Outcome

def good(context):
    (context.folder / "file").write_text("")
    return Outcome(True, f"ran on {context.device}", {"count": 3, "ratio": float("inf"), "share": 0.123456789})

def bad(context):
    return Outcome(False, "2 of 3 agree", {"agree": 2})

def raises(context):
    raise ValueError("first line\\nsecond line")

def hangs(context):
    time.sleep(60)

CHECKS = (
    Check("good", "a good one", good, 60, phase=0),
    Check("bad", "a bad one", bad, 60),
    Check("raises", "one that raises", raises, 60),
    Check("hangs", "one that hangs", hangs, 1),
)
"""


def called(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "made_up.py").write_text(MADE_UP)
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), str(folder)]
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# ---------------------------------------------------------------- the runner


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "make gpu needs a CUDA device, and torch finds none here; run it on a machine with one."
    ]


def test_the_checks_are_listed_and_unknown_ones_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "prepare_path", lambda vendor: [])
    assert acceptance.main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"tests", "tracing", "settings", "own_loop", "command_line", "resume", "amp"} < set(listed)
    assert acceptance.main(["--device", "cpu", "--only", "setings"]) == 2
    assert "--only setings: no such check; there are tests," in capsys.readouterr().err


def test_packages_that_changed_since_the_record_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    facts = acceptance.environment("cpu")
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"environment": facts}))
    assert acceptance.main(["--changed", "--out", str(file)]) == 0
    assert capsys.readouterr().out.startswith("no package changed since the record of ")
    facts["source"]["graph"] = "0" * 16
    file.write_text(json.dumps({"environment": facts}))
    assert acceptance.main(["--changed", "--out", str(file)]) == 1
    assert capsys.readouterr().out.endswith(": graph\n")


@pytest.mark.thorough
def test_every_check_is_recorded_and_one_failure_fails_all(tmp_path: Path) -> None:
    out = tmp_path / "made.json"
    common = ("--checks", "made_up", "--device", "cpu", "--vendor", str(tmp_path / "none"), "--out", str(out))
    found = called(*common, folder=tmp_path)
    assert found.returncode == 1, found.stderr
    record = json.loads(out.read_text())
    assert record["passed"] is False
    assert {"commit", "torch", "python", "date", "command", "cpu"} <= set(record["environment"])
    checks = record["checks"]
    assert list(checks) == ["good", "bad", "raises", "hangs"]
    assert checks["good"]["passed"]
    assert checks["good"]["numbers"] == {"count": 3, "ratio": "inf", "share": 0.12346}
    assert checks["good"]["summary"] == "ran on cpu"
    assert (checks["bad"]["passed"], checks["bad"]["numbers"]) == (False, {"agree": 2})
    assert checks["raises"]["summary"] == "ValueError: first line"
    assert "second line" in checks["raises"]["error"]
    assert checks["hangs"]["summary"].startswith("stopped after ")
    assert "FAILED  bad" in found.stdout
    assert "1 of 4 checks passed" in found.stdout
    kept = called(*common, "--only", "good", "--keep", folder=tmp_path)
    assert kept.returncode == 0, kept.stdout + kept.stderr
    record = json.loads(out.read_text())
    assert list(record["checks"]) == ["good", "bad", "raises", "hangs"]
    assert record["passed"] is False
    alone = called(*common, "--only", "good", folder=tmp_path)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert list(json.loads(out.read_text())["checks"]) == ["good"]


# ---------------------------------------------------------------- checks on the CPU


def test_a_column_that_differs_or_a_setting_that_changes_fails() -> None:
    from gpu_checks.settings import judge

    good = {"count": "3/4", "same_groups": True, "changed": []}
    assert judge({"net": {"cpu": good, "defaults": good}}).passed
    assert not judge({"net": {"cpu": good, "defaults": good | {"count": "0/4", "same_groups": False}}}).passed
    changed = judge({"net": {"cpu": good, "defaults": good | {"changed": ["cuDNN TF32"]}}})
    assert not changed.passed
    assert changed.numbers["not_restored"] == ["net defaults: cuDNN TF32"]
    assert not judge({}).passed


def test_all_columns_of_a_small_network_are_equal() -> None:
    from gpu_checks.settings import COLUMNS, row_of

    def make() -> nn.Module:
        first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)
        return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), nn.Linear(6 * 16, 5))

    cells = row_of(make, 8, "cpu")
    assert tuple(cells) == COLUMNS
    assert {cell["count"] for cell in cells.values()} == {"2/3"}
    assert all(cell["same_groups"] and not cell["changed"] for cell in cells.values())


@pytest.mark.slow
def test_mixed_precision_runs_on_the_cpu(tmp_path: Path) -> None:
    from gpu_checks.common import Context
    from gpu_checks.loops import amp_with_grad_scaler

    found = amp_with_grad_scaler(Context("cpu", tmp_path, small=True))
    assert found.passed, found
    assert found.numbers["share_of_macs"] <= 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["own_loop", "resume", "command_line", "two_processes"])
def test_a_check_passes_on_the_cpu_in_its_short_form(name: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    found = called("--device", "cpu", "--small", "--only", name, "--out", str(out), folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert json.loads(out.read_text())["checks"][name]["passed"]
