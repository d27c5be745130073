"""`ecc compress --granularity weight`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_compressing import SHORT, assert_refused, ecc
from ecc.training import load_state

FINE = ("--granularity", "weight", "--meter", "platform:eyeriss")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_told_shown_again_and_given_to_programs(folder: Path) -> None:
    words = ("digits", *FINE, "--budget", "40%", "-o", "run", *SHORT)
    first = ecc(*words)
    assert first.exit_code == 0, first.output
    assert "What the budgets ask for" in first.stderr
    assert "solving for the budget, 12 steps" in first.stderr
    assert "tuning the nonzero weights, 2 steps" in first.stderr
    assert "digits on Eyeriss-like accelerator, 65 nm, 16 bit, single weights" in first.stdout
    assert "energy (estimated)" in first.stdout
    assert "no GPU works so" in " ".join(first.stdout.split())

    again = ecc(*words)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert "solving" not in again.stderr

    facts = ecc(*words, "--json")
    assert (facts.exit_code, facts.stderr) == (0, "")
    summary = json.loads(facts.stdout)
    assert summary == json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["label"], summary["granularity"], summary["met"]) == ("estimated", "weight", True)
    state = load_state(folder / "run" / "sparse.safetensors")
    assert {name: int(state[name].count_nonzero()) for name in summary["nonzeros"]} == summary["nonzeros"]

    quiet = ecc(*words, "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


B = ("--budget", "40%")
O = ("-o", "run")  # noqa: E741 - beside B
BAD: dict[str, tuple[list[str], str]] = {
    "unknown granularity": (["digits", *B, *O, "--granularity", "wight"], "there are channel and weight"),
    "channels without a model": (["digits", *B, *O, "--meter", "platform:eyeriss"], "--energy is missing"),
    "no platform": (["digits", *B, *O, "--granularity", "weight"], "'auto' is none: GPUs and processors save no"),
    "a meter": (["digits", *B, *O, "--granularity", "weight", "--meter", "nvml"], "Give platform:eyeriss"),
    "a GPU's platform": (
        ["digits", *B, *O, "--granularity", "weight", "--meter", "platform:jetson-tx2"],
        "NVIDIA Jetson TX2 is none",
    ),
    "unknown platform": (["digits", *B, *O, *FINE[:3], "platform:eyeris"], "did you mean 'eyeriss'?"),
    "an energy model": (["digits", *FINE, *B, *O, "--energy", "e.json"], "--energy is for channels"),
    "freeze": (["digits", *FINE, *B, *O, "--freeze", "stem"], "--freeze is for channels"),
    "rounding": (["digits", *FINE, *B, *O, "--width-multiple", "8"], "width_multiple=8 is for widths"),
    "another budget": (["digits", *FINE, "--budget", "params=20k", *O], "one budget of energy"),
    "budget out of reach": (["digits", *FINE, "--budget", "5%", *O], "the least this network can use"),
    "unknown task": (["digit", *FINE, *B, *O], "did you mean 'digits'?"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_trained(folder: Path, name: str) -> None:
    words, message = BAD[name]
    assert_refused(words, message)
    assert not (folder / "run").exists()


def test_a_run_of_channels_is_not_taken_up_as_one_of_weights(folder: Path) -> None:
    run = folder / "run"
    assert ecc("digits", *FINE, *B, *O, *SHORT, "--quiet").exit_code == 0
    kept = (run / "summary.json").read_bytes()
    config = json.loads((run / "config.json").read_text())
    del config["config"]["granularity"]  # as channels have it
    (run / "config.json").write_text(json.dumps(config))
    result = ecc("digits", *FINE, *B, *O, *SHORT, "--quiet")
    assert result.exit_code == 2
    assert "granularity" in result.stderr
    assert (run / "summary.json").read_bytes() == kept
