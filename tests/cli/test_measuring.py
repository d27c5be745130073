from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ecc.cli.app import app
from ecc.measure import Profile

NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1))
    return net, torch.randn(1, 3, 6, 6)
"""

METERS = """
import time
from ecc.measure import Declared, Estimated, Measured, MeterInfo, Reading

class Prices:
    wait = 0.0

    def cost(self, graph, widths):
        time.sleep(self.wait)
        return Reading(1e-3 + 1e-6 * float(graph.macs(widths)), 1e-4)

    def describe(self):
        return MeterInfo(name="coefficients", device="paper", provenance=Estimated("made up"), scope="all")

class Slow(Prices):
    wait = 0.05

class Dear(Prices):
    def cost(self, graph, widths):
        return Reading(1.0 + 1e-6 * float(graph.macs(widths)), 1e-4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "meters.py").write_text(METERS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ecc(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def profiled(*words: str, meter: str = "meters.py:Prices", output: str = "a.profile") -> Result:
    return ecc("profile", "net.py:build", "--meter", meter, "-o", output, *words)


def test_a_profile_is_made_told_and_found_finished(folder: Path) -> None:
    first = profiled("--samples", "20")
    assert first.exit_code == 0, first.output
    assert "a.profile: 20 networks, estimated: paper, batch 1" in first.stdout
    assert "10 of 20 networks" in first.stderr
    assert "(estimated)" in first.stderr
    before = (folder / "a.profile").read_bytes()
    again = profiled("--samples", "20")
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    assert (folder / "a.profile").read_bytes() == before


def test_the_promise_of_the_readme(folder: Path) -> None:
    words = ["profile", "digits", "--meter", "platform:jetson-tx2", "-o", "digits.profile", "--json"]
    facts = json.loads(ecc(*words).stdout)
    assert (facts["networks"], facts["label"], facts["device"]) == (250, "estimated", "NVIDIA Jetson TX2")
    whole = (folder / "digits.profile").read_bytes()
    (folder / "digits.profile").write_bytes(whole[: len(whole) // 2])  # as if the power had gone
    assert json.loads(ecc(*words).stdout) == facts
    assert (folder / "digits.profile").read_bytes() == whole


def test_facts_come_as_json_alone(folder: Path) -> None:
    result = profiled("--samples", "12", "--json")
    facts = json.loads(result.stdout)
    assert result.stderr == ""
    assert (facts["file"], facts["label"], facts["networks"], facts["device"]) == (
        "a.profile",
        "estimated",
        12,
        "paper",
    )


def test_quiet_says_nothing(folder: Path) -> None:
    result = profiled("--samples", "12", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert len(Profile.load("a.profile").design_samples) == 12


def test_design_and_batch_reach_the_header(folder: Path) -> None:
    words = "--samples 9 --design uniform --seed 3 --width-multiple 4 --batch 5 --rounds 2 --shard 2/3"
    result = profiled(*words.split())
    assert result.exit_code == 0, result.output
    header = Profile.load("a.profile").header
    assert (header.batch, header.input_shapes) == (5, {"0": (5, 3, 6, 6)})
    design = header.design
    assert (design.kind, design.seed, design.width_multiple, design.rounds, design.shard) == (
        "uniform",
        3,
        4,
        2,
        (2, 3),
    )
    assert header.groups == ("0", "2")
    assert profiled("--samples", "5", "--freeze", "0", output="b.profile").exit_code == 0
    assert Profile.load("b.profile").header.groups == ("2",)


def test_it_stops_early(folder: Path) -> None:
    result = profiled("--samples", "80", "--target-error", "2%")
    assert "stopped early: the error of the fit is 0.00%, below 2.00%, with 50 networks." in result.stderr
    assert len(Profile.load("a.profile").design_samples) == 50


@pytest.mark.gpu  # a real meter: CPU time on a loaded machine may be refused
def test_this_machine_is_measured_by_cpu_time(folder: Path) -> None:
    words = "--samples 2 --device cpu --window 0.05 --memory-format channels_last --no-autotune"
    result = profiled(*words.split(), meter="cputime:15W")
    assert result.exit_code == 0, result.output
    assert "CPU time x declared 15 W" in result.stdout
    settings = Profile.load("a.profile").header.settings
    assert settings is not None
    assert (settings.window_seconds, settings.memory_format, settings.cudnn_autotune) == (0.05, "channels_last", False)
    assert settings.mode == "eager"


def test_shards_are_merged(folder: Path) -> None:
    for number in "12":
        assert profiled("--samples", "20", "--shard", f"{number}/3", output=f"{number}.profile").exit_code == 0
    result = ecc("merge", "1.profile", "2.profile", "-o", "all.profile.gz")
    assert result.exit_code == 0, result.output
    assert "all.profile.gz: 13 networks, estimated: paper, batch 1" in result.stdout
    assert "7 rows of the design are in none of the files, such as row 0." in result.stdout
    assert len(Profile.load("all.profile.gz").corrected()) == 13


def test_devices_that_differ_need_rescaling(folder: Path) -> None:
    profiled("--samples", "8", "--shard", "1/2", output="1")
    text = (folder / "1").read_text()
    profiled("--samples", "8", "--shard", "2/2", output="2", meter="meters.py:Dear")
    refused = ecc("merge", "1", "2", "-o", "all")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: the devices differ: the dense reference takes ")
    assert len(refused.stderr.splitlines()) == 1
    assert ecc("merge", "1", "2", "-o", "all", "--rescale").exit_code == 0
    assert (folder / "1").read_text() == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--samples", "0"], "samples=0 is below 1"),
        (["--samples", "1000"], "this network has only 192 different widths"),
        (["--design", "corners"], "design 'corners' is unknown"),
        (["--shard", "3"], "shard '3' is not written as K/N"),
        (["--shard", "9/8"], "shard 9/8 does not exist"),
        (["--target-error", "soon"], "'soon' is not a share"),
        (["--target-error", "200%"], "target_error=2.0 is not a share between 0 and 1"),
        (["--batch", "0"], "batch 0 is below 1"),
        (["--mode", "graph"], "mode was chosen, but coefficients runs nothing here: its numbers are estimated"),
        (["--device", "cpu"], "device was chosen, but coefficients runs nothing here"),
        (["--meter", "nonsense"], "meter 'nonsense' is unknown"),
        (["--meter", "cputime:15W", "--mode", "warp"], "mode='warp' is unknown"),
        (["--meter", "cputime:15W", "--mode", "graph", "--device", "cpu"], "needs a CUDA device"),
        (["--meter", "cputime:15W", "--device", "warp"], "device 'warp' cannot be used here"),
        (["-o", "missing/a.profile"], "cannot write missing/a.profile"),
        (["-o", "net.py"], "net.py is not a profile, and is left as it is"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, words: list[str], text: str) -> None:
    result = profiled("--samples", "12", *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert (folder / "net.py").read_text() == NET


def test_another_setting_is_refused_in_one_line(folder: Path) -> None:
    profiled("--samples", "5")
    result = profiled("--samples", "5", "--seed", "1")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: a.profile cannot be continued: its design.seed is 0, and now it is 1. "
        "Measure as before, or give another file.\n"
    )


def test_help_has_examples() -> None:
    text = ecc("profile", "--help").output
    assert "ecc profile digits --meter platform:jetson-tx2 -o digits.profile" in text
    assert 'pandas.read_json("digits.profile", lines=True)' in text
    assert "ecc merge" in ecc("merge", "--help").output


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_leaves_a_file_that_goes_on_and_says_so(folder: Path) -> None:
    command = [sys.executable, "-m", "ecc", "profile", "net.py:build", "--meter", "meters.py:Slow", "-o", "a.profile"]
    run = subprocess.Popen([*command, "--samples", "100"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run:
        for _ in range(600):
            time.sleep(0.1)
            if Path("a.profile").exists() and len(Path("a.profile").read_text().splitlines()) > 4:
                break
        os.kill(run.pid, signal.SIGINT)
        _, told = run.communicate(timeout=60)
    assert run.returncode == 130
    done = len(Profile.load("a.profile").design_samples)
    assert told.strip().endswith(
        f"stopped; {done} of 100 networks are in a.profile; the same command goes on from there."
    )
    assert "Traceback" not in told
    profiled("--samples", "8", "--quiet", meter="meters.py:Prices")
    whole = Profile.load("a.profile")
    assert set(range(8)) <= {row.index for row in whole.design_samples}
