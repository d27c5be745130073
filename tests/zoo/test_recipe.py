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
from ecc.zoo.recipe import Recipe, is_recipe, read_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ALL = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.toml"))


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_experiment_has_its_recipe() -> None:
    assert ALL == [
        "alexnet-imagenette.toml",
        "erfnet-camvid.toml",
        "mobilenet-imagenette.toml",
        "paper/alexnet-imagenet.toml",
        "paper/erfnet-cityscapes.toml",
        "paper/mobilenet-imagenet.toml",
        "resnet56-cifar10.toml",
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_bundled_recipe_asks_for_what_there_is(name: str) -> None:
    found = read_recipe(RECIPES / name)
    assert found.task in BUNDLED_TASKS
    assert found.methods is not None
    assert set(found.methods) <= {*METHODS, SCRATCH}
    assert found.budgets is not None
    for budget in found.budgets:
        assert parse_budgets([budget])[0].is_relative
    assert found.data is None  # where data lies is not the recipe's to say
    assert found.weights is None


@pytest.mark.parametrize(
    ("name", "batch", "steps", "finetune_steps", "penalty"),
    [
        ("mobilenet-imagenet", 128, 300_000, 400_000, 10),
        ("alexnet-imagenet", 128, 300_000, 100_000, 10),
        ("erfnet-cityscapes", 4, 30_000, 10_000, 1),
    ],
)
def test_the_papers_recipes_have_the_papers_numbers(
    name: str, batch: int, steps: int, finetune_steps: int, penalty: float
) -> None:
    found = read_recipe(RECIPES / "paper" / f"{name}.toml")
    settings = found.settings
    assert (found.batch_size, settings.steps, settings.finetune_steps) == (batch, steps, finetune_steps)
    assert (settings.lr, settings.weight_decay, settings.distill) == (1e-5, 1e-4, 0.5)
    assert (settings.solver, settings.penalty) == ("admm", penalty)
    assert found.methods == ["ecc", "netadapt", "amc"]


def test_the_papers_erfnet_has_51_layers_that_can_be_cut() -> None:
    found, net = read_recipe(RECIPES / "paper" / "erfnet-cityscapes.toml"), ERFNet(20)
    assert found.freeze is not None
    graph = trace_channels(net, torch.zeros(1, 3, 64, 64), freeze=found.freeze, verify=False)
    assert len(graph.prunable) == 51
    assert len(trace_channels(net, torch.zeros(1, 3, 64, 64), verify=False).prunable) > 51


def test_our_experiments_compare_all_methods_at_the_same_budgets() -> None:
    for name in ALL:
        if not name.startswith("paper/"):
            found = read_recipe(RECIPES / name)
            assert found.methods == ["ecc", "netadapt", "amc", "eap", "lcp", "uniform", "scratch"]
            assert found.budgets == ["80%", "65%", "50%", "35%"] + (
                ["25%"] if found.task in ("mobilenet_v1", "alexnet") else []
            )
            assert found.seeds == (3 if found.task == "mobilenet_v1" else 2)


def test_what_is_left_out_is_left_to_whoever_runs_it(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, 'task = "digits"')) == Recipe(task="digits")
    assert is_recipe("a/b.toml")
    assert not is_recipe("net.py:build")


def test_all_keys_are_read_and_paths_start_at_the_recipe(tmp_path: Path) -> None:
    text = """
        task = "resnet20"
        data = "cifar"
        weights = "w.safetensors"
        size = [32, 48]
        batch_size = 16
        budgets = ["50%", "3 mJ"]
        methods = ["ecc"]
        seeds = 2
        meter = "none"
        [settings]
        steps = 7
        lr = 1e-3
        min_width_ratio = 0
        clip_norm = 2
        channels_last = true
        precision = "bf16"
    """
    found = read_recipe(recipe(tmp_path, text))
    assert found == Recipe(
        task="resnet20",
        data=str(tmp_path / "cifar"),
        weights=str(tmp_path / "w.safetensors"),
        size=[32, 48],
        batch_size=16,
        budgets=["50%", "3 mJ"],
        methods=["ecc"],
        seeds=2,
        meter="none",
        settings=settings_from(CompressSettings, dict(
            prune_steps=7, lr=1e-3, min_width_ratio=0, clip_norm=2, channels_last=True, precision="bf16"
        )),
        given=("steps", "lr", "min_width_ratio", "clip_norm", "channels_last", "precision"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task = ", "is no TOML"),
        ("", "has no key task"),
        ('task = "x"\nsteps = 3', "has the key steps, which is unknown; there are task, data"),
        ('task = "x"\n[settings]\nstep = 3', "has the key settings.step, which is unknown; there are pretrain_steps"),
        ("task = 3", "task is 3; it must be a text in quotes"),
        ('task = "x"\nseeds = "three"', "seeds is 'three'; it must be a whole number"),
        ('task = "x"\nseeds = true', "seeds is True; it must be a whole number"),
        ('task = "x"\nbudgets = "50%"', "budgets is '50%'; it must be a list, each a text in quotes"),
        ('task = "x"\nbudgets = [50]', "budgets is [50]; it must be a list"),
        ('task = "x"\nsize = [1, 2, 3]', "size is [1, 2, 3]; give [height, width]"),
        ('task = "x"\nsettings = 3', "settings is 3; write them below a line [settings]"),
        ('task = "x"\n[settings]\nlr = "fast"', "settings.lr is 'fast'; it must be a number"),
        ('task = "x"\n[settings]\nchannels_last = 1', "settings.channels_last is 1; it must be true or false"),
        ('task = "x"\n[settings]\nsteps = 2.5', "settings.steps is 2.5; it must be a whole number"),
        ('task = "x"\n[settings]\nsteps = 0', "settings.steps=0 is below 1"),
        ("seeds = " + "9" * 5000, "is no TOML"),
        ("seeds = " + "[" * 100_000, "is no TOML"),
        ('task = "net.py:build"', "task is 'net.py:build', which would be run"),
        ('task = "a.PY:build"', "which would be run"),
        ('task = "x"\nmeter = "command:touch hacked"', "meter is 'command:touch hacked', which would be run"),
        ('task = "x"\nmeter = "meters.py:Mine"', "give it as --meter"),
    ],
)
def test_a_wrong_key_is_named_with_its_file(text: str, message: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(BadFile) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="cannot read"):
        read_recipe(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadFile, match="is no TOML"):
        read_recipe(tmp_path / "bytes.toml")
