"""Recipes, run as a user runs them."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.cli.compare import compare
from ecc.cli.recipes import QUICK
from ecc.graph import trace_channels
from ecc.methods import CompressSettings
from ecc.task import with_batch_size
from ecc.zoo import AlexNet, find_data, image_task
from ecc.zoo.networks import NETWORKS
from ecc.zoo.recipe import read_recipe
from energy.cases import origin
from methods.jobs import digits_model, true_model
from zoo.data import trees
from zoo.test_recipe import ALL, RECIPES

TREES: dict[str, tuple[Any, str]] = {
    "alexnet": (trees.folders, "63"),
    "mobilenet_v1": (trees.folders, "32"),
    "erfnet": (trees.camvid, "16x24"),
    "resnet56": (trees.cifar10, "32"),
}


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *words])
    return result.exit_code, result.output


def thin_alexnet(classes: int) -> nn.Module:
    """AlexNet with fully connected layers that are quickly trained and saved; the rest as it is."""
    net = AlexNet(classes)
    for place, inputs, outputs in ((1, 9216, 64), (4, 64, 64), (6, 64, classes)):
        net.classifier[place] = nn.Linear(inputs, outputs)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_bundled_recipe_runs_for_a_few_steps_on_a_tiny_tree(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETWORKS, "alexnet", replace(NETWORKS["alexnet"], build=thin_alexnet))
    recipe = read_recipe(RECIPES / name)
    make, size = TREES[recipe.task]
    tree = trees.cityscapes(tmp_path / "data") if "cityscapes" in name else make(tmp_path / "data")
    height, _, width = size.partition("x")
    task = image_task(recipe.task, find_data(tree), size=(int(height), int(width or height)))
    example = with_batch_size(task.example_input, origin().batch)
    true_model(trace_channels(task.model, example, verify=False)).save(tmp_path / "energy.json")
    # A few steps of what a recipe is about; its methods are tested with theirs.
    few = ("--prune-steps", "3", "--finetune-steps", "1", "--pretrain-steps", "1", "--batch-size", "2", "--size", size)
    code, text = run(
        *(str(RECIPES / name), "--quick", "--data", str(tree), "--energy", str(tmp_path / "energy.json"), *few),
        *("--meter", "none", "--methods", "ecc", "--budgets", "70%", "-o", str(tmp_path / "runs"), "--json"),
    )
    assert code == 0, text
    rows = json.loads(text)
    assert [(row["method"], row["budget"], row["batches_total"]) for row in rows] == [("ecc", "70%", 4)]
    assert rows[0]["failed"] == []
    assert 0 <= rows[0]["after"][0] <= 1
    asked = json.loads((tmp_path / "runs" / "grid.json").read_text())
    assert asked["task"] == task.name
    assert asked["settings"]["precision"] == recipe.settings.precision
    assert asked["settings"]["solver"] == recipe.settings.solver
    assert asked["settings"]["steps"] == 3
    assert asked["freeze"] == (recipe.freeze or [])


def test_modules_are_frozen_by_the_recipe_or_by_hand(folder: Path) -> None:
    recipe = (folder / "mine.toml").read_text()
    (folder / "mine.toml").write_text('freeze = ["stem.0"]\n' + recipe)
    for place, more, frozen in (("a", (), ["stem.0"]), ("b", ("--freeze", "pointwise"), ["pointwise"])):
        code, text = run("mine.toml", "--energy", "energy.json", "-o", place, *more)
        assert code == 0, text
        assert json.loads((folder / place / "grid.json").read_text())["freeze"] == frozen
        widths = json.loads((folder / place / "seed-0" / "uniform-70" / "widths.json").read_text())
        full = digits_model().at()
        assert digits_model().at(widths) < full
        assert all(widths[name] == digits_model().full_widths[digits_model().groups.index(name)] for name in frozen)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    digits_model().save(tmp_path / "energy.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(
        'task = "digits"\nbudgets = ["70%"]\nmethods = ["uniform"]\nseeds = 1\n'
        "[settings]\nsteps = 4\ntune_steps = 2\ntrain_steps = 3\ndistill = 0.25\nlr = 1e-3\n"
    )
    return tmp_path


def test_what_is_typed_wins_over_quick_and_quick_over_the_recipe(folder: Path) -> None:
    words = ("mine.toml", "--energy", "energy.json", "--json")
    for place, more, expected in (
        ("a", (), (4, 2, 0.25, 1e-3)),
        ("b", ("--quick", "--pretrain-steps", "0", "--prune-steps", "9"), (9, QUICK["finetune_steps"], 0.25, QUICK["lr"])),
        ("c", ("--finetune-steps", "0", "--quick", "--prune-steps", "5"), (5, 0, 0.25, QUICK["lr"])),
        ("d", ("--prune-steps", "5"), (5, 2, 0.25, 1e-3)),
    ):
        code, text = run(*words, "-o", place, *more)
        assert code == 0, text
        asked = json.loads((folder / place / "grid.json").read_text())["settings"]
        assert (asked["steps"], asked["finetune_steps"], asked["distill"], asked["lr"]) == expected
        budgets = {"65%", "40%"} if "--quick" in more else {"70%"}
        assert {(row["method"], row["budget"]) for row in json.loads(text)} == {("uniform", one) for one in budgets}


def test_without_a_recipe_the_defaults_are_the_settings_own() -> None:
    defaults, parameters = CompressSettings(), inspect.signature(compare).parameters
    shared = [name for name in vars(defaults) if name in parameters]
    assert {
        "steps",
        "finetune_steps",
        "pretrain_steps",
        "lr",
        "pretrain_lr",
        "min_width_ratio",
        "width_multiple",
        "micro_batch",
    } <= {*shared}
    for name in shared:
        assert parameters[name].default == getattr(defaults, name)


def test_floors_and_rounding_are_those_of_the_recipe_unless_typed(folder: Path) -> None:
    with (folder / "mine.toml").open("a") as recipe:
        recipe.write("min_width_ratio = 0.2\nround_to = 2\nmicro_batch = 16\n")
    for place, more, expected in (
        ("a", (), (0.2, 2)),
        ("b", ("--min-width-ratio", "0.3", "--width-multiple", "1"), (0.3, 1)),
    ):
        code, text = run("mine.toml", "--energy", "energy.json", "-o", place, *more)
        assert code == 0, text
        asked = json.loads((folder / place / "grid.json").read_text())["settings"]
        assert (asked["min_width_ratio"], asked["width_multiple"]) == expected
        assert "micro_batch" not in asked  # it may change


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('task = "digits"\nstep = 3', "mine.toml has the key step, which is unknown"),
        ('task = "digits"\n[settings]\nlr = "x"', "mine.toml: settings.lr is 'x'; it must be a number"),
        ('task = "digits"\nmethods = ["magic"]', "there is no method 'magic'"),
        ('task = "digits"\ndata = "."', "task 'digits' takes no data"),
        ('task = "alexnet"\ndata = "nowhere"', "there is no folder 'nowhere' of data"),
    ],
)
def test_a_wrong_recipe_is_said_in_one_line(text: str, message: str, folder: Path) -> None:
    (folder / "mine.toml").write_text(text)
    code, output = run("mine.toml", "--energy", "energy.json", "-o", "runs")
    assert code == 2
    assert message in " ".join(output.split())
    assert "Traceback" not in output
    assert not (folder / "runs").exists()
