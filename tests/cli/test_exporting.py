"""`ecc export`, run as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import ecc
from ecc.cli.app import app
from ecc.zoo import digits
from export.runs import finished_run, small_task
from methods.jobs import digits_model

TASK = """
from export.runs import small_task
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    finished_run(tmp_path / "run", small_task())
    (tmp_path / "net.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "120", "TERMINAL_WIDTH": "120"})


def test_a_run_of_your_own_is_exported_with_your_file(folder: Path) -> None:
    words = ("export", "run", "--task", "net.py:small_task", "--format", "safetensors", "-f", "torchscript")
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "max relative error" in first.stdout
    assert "run/export: slim.safetensors, slim.torchscript, model_card.md" in first.stdout
    assert "writing torchscript" in first.stderr

    facts = run(*words, "--json", "--force")  # torch numbers its classes, so a second TorchScript file differs
    assert (facts.exit_code, facts.stderr) == (0, "")
    files = json.loads(facts.stdout)["files"]
    assert [(file["format"], file["error"], file["tolerance"]) for file in files] == [
        ("safetensors", 0, 1e-4),
        ("torchscript", 0, 1e-4),
    ]
    quiet = run("export", "run", "--task", "net.py:small_task", "-q", "-o", "other", "--license", "mit")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert 'license: "mit"' in (folder / "other" / "model_card.md").read_text()


def test_a_run_does_not_choose_what_is_executed(folder: Path) -> None:
    (folder / "evil.py").write_text("import pathlib\ndef build():\n    pathlib.Path('ran').touch()\n")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    (folder / "run" / "summary.json").write_text(json.dumps({**summary, "task": "evil.py:build"}))
    result = run("export", "run")
    assert result.exit_code == 2
    assert "'evil.py:build', which is not bundled; name it again: --task file.py:function" in result.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("none",), "cannot read none/summary.json"),
        (("run", "--task", "digits"), "compressed the task 'small', and this is 'digits'"),
        (("run", "--task", "net.py:small_task", "-f", "tflite"), "format 'tflite' is unknown"),
        (("run", "--task", "net.py:small_task", "--int8", "static"), "ask for --format onnx as well"),
    ],
)
def test_slips_are_one_line(words: tuple[str, ...], complaint: str, folder: Path) -> None:
    result = run("export", *words)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (folder / "run" / "export").exists()


@pytest.mark.thorough  # a real run, and a real ONNX file; the examples in the help do both as well
def test_digits_from_compress_to_two_lines_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    digits_model().save(tmp_path / "energy.json")
    short = ("--pretrain-steps", "3", "--prune-steps", "12", "--finetune-steps", "2", "--lr", "1e-3", "--device", "cpu", "-q")
    made = run("compress", "digits", "--energy", "energy.json", "--budget", "50%", "-o", "run", *short)
    assert made.exit_code == 0, made.output
    result = run("export", "run", "-f", "safetensors", "-f", "pt2", "-f", "onnx")
    assert result.exit_code == 0, result.output
    assert "Latency is measured here, on this CPU" in result.stdout
    assert "batch 256" in result.stdout

    task = digits()
    slim = ecc.load_slim(task.model, "run/export")
    scores = json.loads((tmp_path / "run" / "summary.json").read_text())["scores"]
    assert task.evaluate is not None
    assert task.evaluate(slim) == pytest.approx(scores["finetuned"])

    fine = ("--granularity", "weight", "--meter", "platform:eyeriss", "--budget", "50%", "-o", "fine")
    assert run("compress", "digits", *fine, *short).exit_code in (0, 2)  # so few steps may miss the budget
    thin = run("export", "fine")
    assert thin.exit_code == 0, thin.output
    assert "fine/export: sparse.safetensors, model_card.md" in thin.stdout
