"""Bundled networks on data sets in their official layouts, run as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from click.testing import CliRunner, Result

from ecc.cli.app import app
from ecc.energy import EnergyModel
from ecc.graph import trace_channels
from ecc.task import with_batch_size
from ecc.training import load_state
from ecc.zoo import find_task
from energy.cases import origin
from methods.jobs import true_model
from zoo.data import trees

SHORT = (
    "--prune-steps",
    "3",
    "--finetune-steps",
    "1",
    "--batch-size",
    "2",
    "--meter",
    "none",
    "--budget",
    "70%",
    "--device",
    "cpu",
)


def ecc(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})


def energy(tmp_path: Path, name: str, tree: Path, size: tuple[int, int]) -> Path:
    task = find_task(name, tree, size=size)
    graph = trace_channels(task.model, with_batch_size(task.example_input, origin().batch), verify=False)
    true_model(graph).save(tmp_path / "energy.json")
    return tmp_path / "energy.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "size", "head"),
    [
        ("mobilenet_v1", trees.folders, (32, 32), "fc.bias"),
        ("erfnet", trees.cityscapes, (16, 32), "decoder.output_conv.bias"),
        pytest.param("alexnet", trees.folders, (63, 63), "classifier.6.bias", marks=pytest.mark.thorough),
    ],
)
def test_the_papers_networks_are_compressed_on_their_data(
    name: str, make: Any, size: tuple[int, int], head: str, tmp_path: Path
) -> None:
    tree = make(tmp_path / "tree")
    words = ("--data", str(tree), "--size", f"{size[0]}x{size[1]}", "--energy", str(energy(tmp_path, name, tree, size)))
    result = ecc("compress", name, *words, *SHORT, "-o", str(tmp_path / "run"), "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["met"]
    assert summary["task"] == f"{name}-{'cityscapes' if name == 'erfnet' else 'tree'}"
    assert set(summary["scores"]) == {"dense", "pruned", "finetuned"}
    outputs = {"erfnet": 19}.get(name, 3)
    assert load_state(tmp_path / "run" / "slim.safetensors")[head].shape == (outputs,)


def test_profile_fit_and_inspect_see_the_network_that_the_data_asks_for(tmp_path: Path) -> None:
    tree = str(trees.cifar10(tmp_path / "tree"))
    words = ("resnet20", "--data", tree)
    found = ecc("inspect", *words, "--json", "--no-verify")
    assert found.exit_code == 0, found.output
    profile, model = tmp_path / "a.profile", tmp_path / "energy.json"
    done = ecc("profile", *words, "--meter", "platform:jetson-tx2", "--samples", "12", "-o", str(profile), "--quiet")
    assert done.exit_code == 0, done.output
    assert ecc("fit", str(profile), "-o", str(model)).exit_code == 0
    task = find_task("resnet20", tree)
    EnergyModel.load(model).check(trace_channels(task.model, task.example_input, verify=False))


def test_a_head_that_starts_anew_is_told_on_stderr(tmp_path: Path) -> None:
    state = find_task("resnet20").model.state_dict()
    save_file({name: value for name, value in state.items() if value.dim()}, tmp_path / "w.safetensors")
    words = ("--data", str(trees.folders(tmp_path / "tree")), "--weights", str(tmp_path / "w.safetensors"))
    result = ecc("inspect", "resnet20", *words, "--no-verify", "--json")
    assert result.exit_code == 0
    assert result.stderr == (
        "the head of w.safetensors has 10 outputs and the data 3 classes: "
        "it starts anew, and is to be trained first (ecc compress --pretrain-steps N).\n"
    )
    assert json.loads(result.stdout)


def test_a_broken_photo_ends_a_run_in_one_line(tmp_path: Path) -> None:
    tree = trees.folders(tmp_path / "tree", classes=2)
    file = energy(tmp_path, "resnet20", tree, (16, 16))
    (tree / "val" / "n00000001" / "n00000001_0.JPEG").write_bytes(b"")
    words = ("--data", str(tree), "--size", "16", "--energy", str(file), *SHORT, "-o", str(tmp_path / "run"))
    result = ecc("compress", "resnet20", *words)
    assert result.exit_code == 2
    assert "n00000001_0.JPEG cannot be decoded" in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "resnet20", "--data", "nowhere"), "there is no folder 'nowhere' of data"),
        (("inspect", "resnet20", "--data", "."), "has none of the layouts that are known: leftImg8bit/"),
        (("inspect", "resnet20", "--weights", "nothing.safetensors"), "cannot read nothing.safetensors"),
        (("inspect", "resnet20", "--size", "large"), "size 'large' cannot be read; write 128, or height x width"),
        (("inspect", "resnet20", "--size", "4"), "images of 4x4 do not fit resnet20"),
        (("inspect", "digits", "--data", "."), "task 'digits' takes no data: that is for the bundled networks"),
        (("profile", "timm:resnet18", "--weights", "x", "-o", "p"), "task 'timm:resnet18' takes no weights"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ecc(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())


def test_a_size_reads_height_first(tmp_path: Path) -> None:
    result = ecc("inspect", "erfnet", "--size", "16x32", "--no-verify", "--json", "-o", str(tmp_path / "graph.json"))
    assert result.exit_code == 0, result.output
    task = find_task("erfnet", size=(16, 32))
    assert isinstance(task.example_input, torch.Tensor)
    assert task.example_input.shape == (1, 3, 16, 32)
