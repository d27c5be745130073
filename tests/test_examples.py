"""Every example is run as its header says, and prints what it promises."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

ALONE = {
    "quickstart": (r"accuracy 9\d\.\d% -> ([89]\d)\.\d%", r"energy .* \(estimated\)"),
    "own_loop": (r"epoch 5: (4\d|50)% of the dense energy \(estimated\)", r"accuracy 9\d\.\d% -> [89]\d\.\d%"),
    "residual": (r"conv1: 16 channels, written by conv1, layer1\.0\.conv2", r"outputs: \d\.\de-0[678]"),
    "segmentation": (r"macs: (4\d|50)% of", r"params: (3\d|40)% of", r"mean IoU 0\.[89]\d* -> 0\.[89]\d*"),
    "custom_meter": (r"16 channels: .* mJ, .* ms \(estimated\)", r"64 channels: .* mJ"),
    "new_method": (r"tapered +9\d\.\d% of the budget", r"ecc +9\d\.\d% of the budget"),
    "multi_gpu": (r"2 processes, 260 batches in all", r"the same in all processes: True"),
}
"""What each must print."""


def printed(command: list[str], folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ALONE)


@pytest.mark.parametrize("name", ALONE)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert f"examples/{name}.py" in text.partition("from __future__")[0]
    assert text.count("\n") <= 90


TOLD_ELSEWHERE = ("own_loop", "new_method", "custom_meter")
"""What these show, blocks of README.md and docs/extending.md show too, and those are run each time."""
ONCE = [
    pytest.param(name, marks=pytest.mark.thorough if name in TOLD_ELSEWHERE else pytest.mark.slow)
    for name in ALONE
    if name != "multi_gpu"  # two processes run it below
]


@pytest.mark.parametrize("name", ONCE)
def test_an_example_runs_and_prints_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(EXAMPLES / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [file])
    runpy.run_path(file, run_name="__main__")  # here: a process of its own would import torch first
    output = capsys.readouterr().out
    for pattern in ALONE[name]:
        assert re.search(pattern, output), output


@pytest.mark.thorough  # two processes are in test_compress_processes.py, too
def test_two_processes_cut_the_same_channels(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = printed([*torchrun, str(EXAMPLES / "multi_gpu.py"), str(tmp_path / "run")], tmp_path)
    for pattern in ALONE["multi_gpu"]:
        assert re.search(pattern, output), output


@pytest.mark.thorough
def test_the_meter_of_the_example_reads_the_file_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "power1_input").write_text("9000000\n")
    output = printed([str(EXAMPLES / "custom_meter.py"), "power1_input"], tmp_path)
    joules, milliseconds = re.search(r"64 channels: ([\d.]+) mJ, ([\d.]+) ms \(measured\)", output).groups()  # type: ignore[union-attr]
    assert float(joules) / float(milliseconds) == pytest.approx(9.0, rel=0.05)  # watts
