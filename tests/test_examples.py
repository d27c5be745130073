"""Every script in examples/ runs and prints what it promises."""

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

SHORT = {
    "cnn": (r"Channel groups of Sequential", r"energy .* per batch of 128 \(estimated, .*: met", r"score .* -> 0\.\d+"),
    "hugging_face": (r"macs .* \(counted\), budget .*: met",),
    "detector": (r"macs .* \(counted\), budget .*: met", r"params .*: met"),
}
"""Scripts of at most thirty lines that use only `ecc.compress` and `ecc.inspect`, and what they print."""

LONG = {
    "own_loop": (r"epoch 5: (4\d|50)% of the dense energy \(estimated\)", r"accuracy 9\d\.\d% -> [89]\d\.\d%"),
    "custom_meter": (r"16 channels: .* mJ, .* ms \(estimated\)", r"64 channels: .* mJ"),
    "new_method": (r"tapered +9\d\.\d% of the budget", r"ecc +9\d\.\d% of the budget"),
    "multi_gpu": (r"2 processes, 260 batches in all", r"the same in all processes: True"),
}
"""Scripts for experts."""


def test_every_script_is_listed_here_and_says_how_to_run_it() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, *LONG}
    for name in (*SHORT, *LONG):
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert f"examples/{name}.py" in text
        assert text.count("\n") <= (30 if name in SHORT else 90)
    for name in SHORT:
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert set(re.findall(r"\becc\.(\w+)", text)) <= {"compress", "inspect"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in SHORT]
    + [pytest.param(name, marks=pytest.mark.thorough) for name in LONG if name != "multi_gpu"],
)
def test_a_script_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "hugging_face":
        pytest.importorskip("transformers")
    file = EXAMPLES / f"{name}.py"
    if name in SHORT:  # with fewer steps
        text = re.sub(r"epochs=\d+", "epochs=2", file.read_text(encoding="utf-8")).replace("_steps=60", "_steps=20")
        file = tmp_path / file.name
        file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")
    output = capsys.readouterr().out
    for pattern in {**SHORT, **LONG}[name]:
        assert re.search(pattern, output), output


@pytest.mark.thorough
def test_two_processes_prune_the_same_channels(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*torchrun, str(EXAMPLES / "multi_gpu.py"), str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    for pattern in LONG["multi_gpu"]:
        assert re.search(pattern, found.stdout), found.stdout
