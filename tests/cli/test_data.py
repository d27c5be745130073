"""Recipes, and bundled networks on data sets in their official layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import nn

from cli.command import ecc, from_json, run_ok
from ecc.cli.compare import QUICK
from ecc.energy import EnergyModel
from ecc.graph import trace_channels
from ecc.task import with_batch_size
from ecc.zoo import AlexNet, find_data, find_task, image_task
from ecc.zoo.image_task import NETWORKS
from ecc.zoo.recipe import read_recipe
from ecc.zoo.resnet_cifar import CifarResNet
from energy.cases import origin
from methods.jobs import digits_model, true_model
from zoo.data import trees
from zoo.test_recipe import ALL, RECIPES

SHORT = (
    *("--prune-steps", "3", "--finetune-steps", "1", "--batch-size", "2", "--meter", "none"),
    *("--budget", "70%", "--device", "cpu"),
)


def save_model(folder: Path, name: str, tree: Path, size: tuple[int, int]) -> str:
    """An energy model of a bundled network; the file."""
    task = image_task(name, find_data(tree), image_size=size)
    example = with_batch_size(task.example_input, origin().batch)
    true_model(trace_channels(task.model, example, verify=False)).save(folder / "energy.json")
    return str(folder / "energy.json")


# ---------------------------------------------------------------- data sets


def test_every_verb_builds_the_network_for_the_data(tmp_path: Path) -> None:
    tree = str(trees.cifar10(tmp_path / "tree"))
    words = ("resnet20", "--data", tree)
    assert from_json(ecc("inspect", *words, "--json", "--no-verify"))["groups"]
    profile, model = str(tmp_path / "a.profile"), str(tmp_path / "energy.json")
    run_ok("profile", *words, "--meter", "platform:jetson-tx2", "--samples", "12", "-o", profile, "--quiet")
    run_ok("fit", profile, "-o", model)
    task = find_task("resnet20", tree)
    EnergyModel.load(model).check(trace_channels(task.model, task.example_input, verify=False))


def test_a_head_with_other_classes_is_replaced_with_a_note(tmp_path: Path) -> None:
    state = find_task("resnet20").model.state_dict()
    save_file({name: value for name, value in state.items() if value.dim()}, tmp_path / "w.safetensors")
    words = ("--data", str(trees.folders(tmp_path / "tree")), "--weights", str(tmp_path / "w.safetensors"))
    result = run_ok("inspect", "resnet20", *words, "--no-verify", "--json")
    assert "10 outputs" in result.stderr
    assert "--pretrain-steps" in result.stderr
    assert json.loads(result.stdout)


def test_a_damaged_photo_ends_a_run_with_one_message(tmp_path: Path) -> None:
    tree = trees.folders(tmp_path / "tree", classes=2)
    model = save_model(tmp_path, "resnet20", tree, (16, 16))
    (tree / "val" / "n00000001" / "n00000001_0.JPEG").write_bytes(b"")
    words = ("--data", str(tree), "--image-size", "16", "--energy", model, *SHORT, "-o", str(tmp_path / "run"))
    result = ecc("compress", "resnet20", *words)
    assert result.exit_code == 2
    assert "n00000001_0.JPEG cannot be decoded" in result.stderr


# ---------------------------------------------------------------- recipes

TREES: dict[str, tuple[Any, tuple[int, int]]] = {
    "alexnet": (trees.folders, (63, 63)),
    "mobilenet_v1": (trees.folders, (32, 32)),
    "erfnet": (trees.camvid, (16, 24)),
    "resnet56": (trees.cifar10, (32, 32)),
}


def thin_alexnet(classes: int) -> nn.Module:
    """AlexNet with narrow fully connected layers."""
    net = AlexNet(classes)
    for place, inputs, outputs in ((1, 9216, 64), (4, 64, 64), (6, 64, classes)):
        net.classifier[place] = nn.Linear(inputs, outputs)
    return net


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (not name.startswith("resnet56"))) for name in ALL],
)
def test_a_bundled_recipe_runs_for_a_few_steps_on_a_tiny_data_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name_of_net, build in (("alexnet", thin_alexnet), ("resnet56", lambda classes: CifarResNet(1, classes))):
        monkeypatch.setitem(NETWORKS, name_of_net, replace(NETWORKS[name_of_net], build=build))
    recipe = read_recipe(RECIPES / name)
    make, size = TREES[recipe.task]
    tree = trees.cityscapes(tmp_path / "data") if "cityscapes" in name else make(tmp_path / "data")
    model = save_model(tmp_path, recipe.task, tree, size)
    few = ("--prune-steps", "3", "--finetune-steps", "1", "--pretrain-steps", "1", "--batch-size", "2")
    rows = from_json(
        ecc(
            *("compare", str(RECIPES / name), "--quick", "--data", str(tree), "--energy", model, *few),
            *("--image-size", f"{size[0]}x{size[1]}", "--meter", "none", "--methods", "ecc", "--budgets", "70%"),
            *("-o", str(tmp_path / "runs"), "--json"),
        )
    )
    assert [(row["method"], row["budget"], row["failures"]) for row in rows] == [("ecc", "70%", [])]
    grid = json.loads((tmp_path / "runs" / "grid.json").read_text())
    assert (grid["settings"]["precision"], grid["settings"]["solver"], grid["settings"]["prune_steps"]) == (
        recipe.settings.train.precision,
        recipe.settings.solver,
        3,
    )
    assert grid["freeze"] == (recipe.freeze or [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digits_model().save(tmp_path / "energy.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'task = "digits"\nbudgets = ["70%"]\nmethods = ["uniform"]\nseeds = 1\nfreeze = ["stem.0"]\n'
        "[settings]\nprune_steps = 4\nfinetune_steps = 2\npretrain_steps = 3\nkd_weight = 0.25\nlr = 1e-3\n"
        "min_width_ratio = 0.2\n"
    )
    return tmp_path


def test_typed_options_win_over_quick_and_quick_over_the_recipe(folder: Path) -> None:
    typed = ("--quick", "--pretrain-steps", "0", "--prune-steps", "9", "--freeze", "pointwise", "--budgets", "65%")
    cases = [
        ((), (4, 2, 0.25, 1e-3, 0.2), ["stem.0"], "70%"),
        (typed, (9, QUICK["finetune_steps"], 0.25, 1e-3, 0.2), ["pointwise"], "65%"),
    ]
    for number, (more, expected, frozen, budget) in enumerate(cases):
        place = str(number)
        rows = from_json(ecc("compare", "mine.toml", "--energy", "energy.json", "--json", "-o", place, *more))
        grid = json.loads((folder / place / "grid.json").read_text())
        names = ("prune_steps", "finetune_steps", "kd_weight", "lr", "min_width_ratio")
        assert tuple(grid["settings"][name] for name in names) == expected
        assert (grid["freeze"], {row["budget"] for row in rows}) == (frozen, {budget})


def test_compress_takes_a_recipe_or_a_config_file(folder: Path) -> None:
    words = ("--energy", "energy.json", "--device", "cpu", "-q")
    run_ok("compress", "mine.toml", "-o", "a", *words)
    (folder / "config.toml").write_text((folder / "mine.toml").read_text().replace('task = "digits"\n', ""))
    run_ok("compress", "digits", "--config", "config.toml", "--prune-steps", "6", "-o", "b", *words)
    for place, steps in (("a", 4), ("b", 6)):
        config = json.loads((folder / place / "config.json").read_text())["config"]
        assert (config["settings"]["prune_steps"], config["settings"]["kd_weight"]) == (steps, 0.25)
        summary = json.loads((folder / place / "summary.json").read_text())
        assert summary["budgets"]["energy"]["met"]
