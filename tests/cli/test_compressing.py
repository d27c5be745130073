"""`ecc compress`, run as a user runs it."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ecc.cli.app import app
from ecc.cli.compress import compress
from ecc.methods import CompressSettings
from ecc.methods.landing import BAND
from ecc.training import load_state
from methods.jobs import digits_model

SHORT = ("--pretrain-steps", "3", "--prune-steps", "12", "--finetune-steps", "2", "--lr", "1e-3", "--device", "cpu")

NET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(1, 3, 8, 8)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digits_model().save(tmp_path / "energy.json")
    digits_model(resource="latency").save(tmp_path / "latency.json")
    (tmp_path / "net.py").write_text(NET)
    other = json.loads((tmp_path / "energy.json").read_text())
    other["network"]["fingerprint"] = "0123456789abcdef"
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ecc(*words: str) -> Result:
    return CliRunner().invoke(app, ["compress", *words], env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})


def test_a_run_is_told_shown_again_and_given_to_programs(folder: Path) -> None:
    words = ("digits", "--energy", "energy.json", "--budget", "50%", "-o", "run", *SHORT)
    first = ecc(*words)
    assert first.exit_code == 0, first.output
    assert "What the budgets ask for" in first.stderr
    assert "solving for the budget, 12 steps" in first.stderr
    assert "random weights" not in first.stderr
    assert "digits by ecc on NVIDIA Jetson TX2" in first.stdout
    assert "energy (estimated)" in first.stdout

    again = ecc(*words)
    assert again.exit_code == 0
    assert again.stdout == first.stdout
    assert "solving" not in again.stderr

    facts = ecc(*words, "--json")
    assert (facts.exit_code, facts.stderr) == (0, "")
    summary = json.loads(facts.stdout)
    assert summary == json.loads((folder / "run" / "summary.json").read_text())
    assert (summary["label"], summary["met"], summary["batch"]) == ("estimated", True, 256)
    row = summary["budgets"]["energy"]
    assert row["result"] <= row["limit"]
    assert row["result"] >= BAND[0] * row["limit"] or summary["note"]
    assert f"{row['result'] / row['limit']:.1%}" in first.stdout
    assert load_state(folder / "run" / "slim.safetensors")["head.bias"].shape == (10,)

    quiet = ecc(*words, "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_curves_for_tensorboard_are_those_of_the_history(folder: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ("digits", "--energy", "energy.json", "--budget", "50%", "-o", "run", *SHORT, "--quiet")
    for _ in range(2):  # the second time, the run is finished
        assert ecc(*words, "--tensorboard", "board").exit_code == 0
        found = loading.EventAccumulator("board").Reload()
        lines = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
        for phase in ("dense", "solve", "tune"):
            told = [(facts["total"], facts["loss"]) for facts in lines if facts["phase"] == phase]
            shown = [(point.step, point.value) for point in found.Scalars(f"{phase}/loss")]
            assert shown == [(step, pytest.approx(loss)) for step, loss in told]
        (score,) = found.Scalars("score/after tuning")
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert (score.step, score.value) == (17, pytest.approx(summary["scores"]["finetuned"]))
        assert found.Scalars("weighing/weighed/energy")[-1].value == pytest.approx(
            summary["budgets"]["energy"]["result"]
        )


def test_energy_latency_and_parameters_at_once(folder: Path) -> None:
    budgets = ("--budget", "60%", "--budget", "latency=80%", "--budget", "params=30k")
    result = ecc(
        "digits", "--energy", "energy.json", "--energy", "latency.json", *budgets, "-o", "run", *SHORT, "--json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["budgets"]
    assert {name: row["label"] for name, row in rows.items()} == {
        "energy": "estimated",
        "latency": "estimated",
        "params": "counted",
    }
    assert all(row["result"] <= row["limit"] for row in rows.values())
    assert rows["params"]["limit"] == 30_000


def test_without_a_meter_the_label_says_predicted(folder: Path) -> None:
    words = ("digits", "--energy", "energy.json", "--budget", "60%", "-o", "run", "--meter", "none", "--json")
    summary = json.loads(ecc(*words, *SHORT).stdout)
    assert summary["label"] == "predicted"
    assert summary["budgets"]["energy"]["label"] == "predicted"


def test_a_budget_that_is_not_met_is_an_error_and_the_result_is_kept(folder: Path) -> None:
    """A single step, after which the scales show more than the model said."""
    words = (
        "digits",
        "--energy",
        "wrong.json",
        "--budget",
        "9 mJ",
        "-o",
        "run",
        "--prune-steps",
        "1",
        "--finetune-steps",
        "0",
    )
    data = json.loads((folder / "energy.json").read_text())
    for term in data["model"]["terms"]:
        term["coefficient"] *= 0.7
    (folder / "wrong.json").write_text(json.dumps(data))
    result = ecc(*words, "--device", "cpu")
    assert result.exit_code == 2
    assert "NOT MET" in result.stdout
    assert "note: digits starts from random weights; give --pretrain-steps N to train it first." in result.stderr
    assert "error: the budget is not met: the result lies at 1" in result.stderr
    assert "no steps are left" in result.stderr
    assert (folder / "run" / "slim.safetensors").exists()


E = ("--energy", "energy.json")
B = ("--budget", "50%")
O = ("-o", "run")  # noqa: E741 - beside E and B
BAD: dict[str, tuple[list[str], str]] = {
    "unknown task": (["digit", *E, *B, *O], "did you mean 'digits'?"),
    "missing energy file": (["digits", "--energy", "none.json", *B, *O], "cannot read none.json"),
    "no energy model": (["digits", "--energy", "net.py", *B, *O], "net.py"),
    "no energy option": (["digits", *B, *O], "--energy"),
    "model of another network": (["digits", "--energy", "other.json", *B, *O], "belongs to network 0123456789abcdef"),
    "task that cannot train": (["net.py:build", *E, *B, *O], "has no train_batches and loss"),
    "budget out of reach": (["digits", *E, "--budget", "2%", *O], "the least this network can use"),
    "second budget out of reach": (["digits", *E, *B, "--budget", "params=5", *O], "budget 5 of params is below"),
    "latency without a model": (["digits", *E, "--budget", "latency=1ms", *O], "no model of it. Fit one: ecc fit"),
    "two budgets of one resource": (["digits", *E, *B, "--budget", "9 mJ", *O], "two budgets of energy"),
    "two models of one resource": (["digits", *E, *E, *B, *O], "about the same resource"),
    "no budget": (["digits", *E, "--budget", "sixty", *O], "starts with no number"),
    "round-to 0": (["digits", *E, *B, *O, "--width-multiple", "0"], "width_multiple=0 is below 1"),
    "round-to of words": (["digits", *E, *B, *O, "--width-multiple", "eight"], "--width-multiple"),
    "no steps": (["digits", *E, *B, *O, "--prune-steps", "0"], "steps=0 is below 1"),
    "negative steps": (["digits", *E, *B, *O, "--finetune-steps", "-1"], "finetune_steps=-1 is below 0"),
    "min-share above 1": (["digits", *E, *B, *O, "--min-width-ratio", "2"], "min_width_ratio=2.0 is a share"),
    "rate of 0": (["digits", *E, *B, *O, "--lr", "0"], "lr=0.0 is outside 0..1"),
    "distillation above 1": (["digits", *E, *B, *O, "--kd-weight", "3"], "weight of distillation is 3.0"),
    "metric for a rival": (["digits", *E, *B, *O, "--importance", "adam_norm", "--method", "uniform"], "what ECC ranks"),
    "temperature, no teacher": (["digits", *E, *B, *O, "--kd-weight", "0", "--kd-temperature", "2"], "there is none"),
    "a graph on the CPU": (["digits", *E, *B, *O, "--cuda-graph", "--device", "cpu"], "--cuda-graph is for GPUs"),
    "a recipe": (["mine.toml", *E, *B, *O], "is a recipe, which `ecc compare` takes"),
    "nothing frozen": (["digits", *E, *B, *O, "--freeze", ""], "freeze pattern '' matches no module"),
    "budget without a unit": (["digits", *E, "--budget", "0.5", *O], "write 0.5 J, or 50%"),
    "unknown precision": (["digits", *E, *B, *O, "--precision", "fp8"], "precision is 'fp8'"),
    "unknown device": (["digits", *E, *B, *O, "--device", "abacus"], "device 'abacus' cannot be used here"),
    "unknown meter": (["digits", *E, *B, *O, "--meter", "sundial"], "sundial"),
    "unknown platform": (["digits", *E, *B, *O, "--meter", "platform:jetson-tx1"], "did you mean 'jetson-tx2'?"),
    "meter of another device": (["digits", *E, *B, *O, "--meter", "platform:eyeriss"], "fitted on NVIDIA Jetson TX2"),
    "curves into a file": (["digits", *E, *B, *O, "--tensorboard", "file"], "cannot make the folder file for Tensor"),
    "run folder that is a file": (["digits", *E, *B, "-o", "file"], "file is a file; a run needs a folder"),
    "run folder of something else": (["digits", *E, *B, "-o", "."], "and is no run; it is left as it is"),
}


def assert_refused(words: list[str], message: str) -> None:
    """In one line; the steps are so many that the test would never end if they were begun."""
    result = ecc(*words, "--quiet", "--pretrain-steps", "1000000")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_trained(folder: Path, name: str) -> None:
    words, message = BAD[name]
    assert_refused(words, message)
    assert not (folder / "run").exists()
    assert (folder / "file").read_text() == "mine"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_gpu_that_is_not_there_is_refused(folder: Path) -> None:
    result = ecc("digits", *E, *B, *O, "--device", "cuda", "--quiet")
    assert result.exit_code == 2
    assert "device 'cuda' cannot be used here" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_another_run_in_the_folder_is_refused_by_the_field(folder: Path) -> None:
    words = ("digits", *E, "-o", "run", "--prune-steps", "2", "--finetune-steps", "0", "--device", "cpu", "--quiet")
    assert ecc(*words, "--budget", "70%").exit_code == 0
    result = ecc(*words, "--budget", "70%", "--seed", "5")
    assert result.exit_code == 2
    assert "was begun with settings.seed = 0, and now settings.seed = 5" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.thorough  # faults/test_interruptions.py sends it, too
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_saves_and_the_same_command_goes_on(folder: Path) -> None:
    words = ["digits", *E, *B, "-o", "run", "--prune-steps", "30", "--finetune-steps", "2", "--device", "cpu", "--lr", "1e-3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ecc", "compress", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "solving" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, rest
    assert "stopped by signal 2" in rest
    assert "Give the same command again to go on." in rest
    assert "Traceback" not in rest
    assert not (folder / "run" / "summary.json").exists()
    result = ecc(*words)
    assert result.exit_code == 0, result.output
    assert (folder / "run" / "summary.json").exists()


def test_the_defaults_of_the_command_are_those_of_the_package() -> None:
    defaults = {name: one.default for name, one in inspect.signature(compress).parameters.items()}
    settings = CompressSettings()
    shared = [name for name in vars(settings) if name in defaults]
    assert len(shared) > 12
    assert {name: defaults[name] for name in shared} == {name: getattr(settings, name) for name in shared}


@pytest.mark.parametrize("change", [{"budgets": 5}, {"budgets": {"energy": {}}}, {"widths": []}, {"device": "\x1b[2J"}])
def test_a_damaged_summary_of_a_finished_run_is_one_line(folder: Path, change: dict[str, object]) -> None:
    words = ("digits", *E, *B, *O, *SHORT)
    assert ecc(*words).exit_code == 0
    file = folder / "run" / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    result = ecc(*words)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "summary.json" in result.stderr.splitlines()[-1]
