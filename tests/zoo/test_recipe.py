"""Recipes: the bundled ones, all keys, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ecc.constants import BUNDLED_TASKS, SCRATCH
from ecc.energy import parse_budgets
from ecc.errors import BadFile
from ecc.graph import trace_channels
from ecc.methods import CompressSettings
from ecc.methods.registry import METHODS
from ecc.options import settings_from
from ecc.zoo import ERFNet
from ecc.zoo.recipe import Recipe, read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.toml"))


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ALL)
def test_bundled_recipes_name_known_tasks_methods_and_budgets(name: str) -> None:
    found = read_recipe(RECIPES / name)
    assert len(ALL) == 7
    assert found.task in BUNDLED_TASKS
    assert all(parse_budgets(budget)[0].is_relative for budget in found.budgets or ["?"])
    assert set(found.methods or ["?"]) <= {*METHODS, SCRATCH}
    assert (found.data, found.weights) == (None, None)
    if not name.startswith("paper/"):
        assert found.methods == ["ecc", "netadapt", "amc", "eap", "lcp", "uniform", "scratch"]
        tight = ["25%"] if found.task in ("mobilenet_v1", "alexnet") else []
        assert found.budgets == ["80%", "65%", "50%", "35%", *tight]
        assert found.seeds == (3 if found.task == "mobilenet_v1" else 2)


@pytest.mark.parametrize(
    ("name", "batch", "steps", "finetune_steps", "penalty"),
    [
        ("mobilenet-imagenet", 128, 300_000, 400_000, 10),
        ("alexnet-imagenet", 128, 300_000, 100_000, 10),
        ("erfnet-cityscapes", 4, 30_000, 10_000, 1),
    ],
)
def test_recipes_of_the_paper_have_its_numbers(
    name: str, batch: int, steps: int, finetune_steps: int, penalty: float
) -> None:
    found = read_recipe(RECIPES / "paper" / f"{name}.toml")
    settings = found.settings
    assert (found.batch_size, settings.prune_steps, settings.finetune_steps) == (batch, steps, finetune_steps)
    assert (settings.lr, settings.train.weight_decay, settings.distill.weight) == (1e-5, 1e-4, 0.5)
    constants = settings.paper_constants
    assert (settings.solver, constants.width_penalty, constants.energy_penalty) == ("paper", penalty, penalty)
    assert found.methods == ["ecc", "netadapt", "amc"]


def test_erfnet_of_the_paper_has_51_prunable_layers() -> None:
    found, net = read_recipe(RECIPES / "paper" / "erfnet-cityscapes.toml"), ERFNet(20)
    inputs = torch.zeros(1, 3, 64, 64)
    assert len(trace_channels(net, inputs, freeze=found.freeze or (), verify=False).prunable) == 51
    assert len(trace_channels(net, inputs, verify=False).prunable) > 51


def test_all_keys_are_read_and_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, 'task = "digits"')) == Recipe(task="digits")
    text = """
        task = "resnet20"
        data = "cifar"
        weights = "w.safetensors"
        image_size = [32, 48]
        batch_size = 16
        budgets = ["50%", "3 mJ"]
        methods = ["ecc"]
        seeds = 2
        meter = "none"
        freeze = ["layer1.*"]
        [settings]
        prune_steps = 7
        min_width_ratio = 0
        clip_norm = 2
        precision = "bf16"
    """
    settings = {"prune_steps": 7, "min_width_ratio": 0, "clip_norm": 2, "precision": "bf16"}
    assert read_recipe(recipe(tmp_path, text)) == Recipe(
        task="resnet20",
        data=str(tmp_path / "cifar"),
        weights=str(tmp_path / "w.safetensors"),
        image_size=(32, 48),
        batch_size=16,
        budgets=["50%", "3 mJ"],
        methods=["ecc"],
        seeds=2,
        meter="none",
        freeze=["layer1.*"],
        settings=settings_from(CompressSettings, settings),
        given=tuple(settings),
    )


def test_a_file_of_config_needs_no_task(tmp_path: Path) -> None:
    found = read_recipe(recipe(tmp_path, "[settings]\nprune_steps = 3"), needs_task=False)
    assert (found.task, found.settings.prune_steps, found.given) == ("", 3, ("prune_steps",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = ", "is not valid TOML"),
        ("", "has no key task"),
        ('task = "x"\nsteps = 3', "unknown key 'steps'; known keys: task, data"),
        ('task = "x"\nprune_steps = 3', "prune_steps is a setting; write it below a line [settings]"),
        ('task = "x"\n[settings]\nprune_step = 3', "unknown setting 'prune_step'; did you mean 'prune_steps'?"),
        ("task = 3", "Expected `str`, got `int` - at `$.task`"),
        ('task = "x"\nbudgets = [50]', "Expected `str`, got `int` - at `$.budgets[0]`"),
        ('task = "x"\nsettings = 3', "settings is 3; write a table [settings]"),
        ('task = "x"\n[settings]\nprune_steps = -1', "prune_steps is -1; give a whole number of at least 0"),
        ("seeds = " + "[" * 100_000, "is not valid TOML"),
        ('task = "net.py:build"', "task is 'net.py:build', which would be executed"),
        ('task = "a:b/net.py:build"', "task is 'a:b/net.py:build', which would be executed"),
        ('task = "x"\nmeter = "a:b/meters.py:Mine"', "which would be executed; give it with --meter"),
        ('task = "x"\n[settings]\nrunner = "own.py:Mine"', "which would be executed; give it with --runner"),
        ('task = "x"\n[settings]\nrunner = "own.py:Mine:3"', "runner is 'own.py:Mine:3', which would be executed"),
        ('task = "x"\nmeter = "command:touch hacked"', "which would be executed; give it with --meter"),
        ('task = "x"\nmeter = "meters.py:Mine"', "which would be executed; give it with --meter"),
    ],
)
def test_wrong_recipes_are_refused_by_file_and_key(text: str, message: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(BadFile) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
