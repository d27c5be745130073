"""What the zoo reads: recipes, published weights, photos, label maps, records. As `loaders.py`, for `targets.py`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ecc.cli.options import parse_image_size, recipe_options
from ecc.energy import parse_budgets
from ecc.methods.registry import find_method
from ecc.training import save_state
from ecc.zoo import find_task
from ecc.zoo.image_task import PixelLoss
from ecc.zoo.recipe import read_recipe
from faults import fuzz
from faults.trying import Target
from zoo.data import trees

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE = """task = "resnet20"
data = "cifar"
size = [16, 24]
batch_size = 4
budgets = ["60%", "3mJ"]
methods = ["ecc", "lcp"]
seeds = 2
meter = "none"
[settings]
steps = 7
lr = 1e-3
clip_norm = 2
precision = "fp32"
channels_last = true
"""


def _recipe(folder: Path) -> Path:
    trees.cifar10(folder / "cifar", each=4)
    (folder / "a.toml").write_text(RECIPE)
    return folder / "a.toml"


def _use_recipe(path: Path) -> None:
    """As `ecc compare` does before it traces; a recipe may ask for more batches than a test has time for."""
    recipe = read_recipe(path)
    asked = recipe_options(recipe)
    json.dumps(asked)
    size = parse_image_size(asked["image_size"]) if "image_size" in asked else None
    parse_budgets(recipe.budgets[:1] if recipe.budgets else [])
    for name in recipe.methods or []:
        find_method(name)
    task = find_task(recipe.task, recipe.data, recipe.weights, size=size, batch_size=recipe.batch_size)
    assert task.name


def toml_changed(data: bytes, rng: random.Random) -> bytes:
    """One or two values changed; what JSON and TOML write alike stays TOML."""
    tree = fuzz.changed_tree(tomllib.loads(data.decode()), rng)
    if not isinstance(tree, dict):
        return fuzz.as_json(tree)
    settings = tree.pop("settings", {})
    lines = [f"{key} = {fuzz.as_json(value).decode()}" for key, value in tree.items()]
    if isinstance(settings, dict):
        lines += ["[settings]", *(f"{key} = {fuzz.as_json(value).decode()}" for key, value in settings.items())]
    else:
        lines.insert(0, f"settings = {fuzz.as_json(settings).decode()}")
    return "\n".join(lines).encode("utf-8", errors="surrogatepass") + b"\n"


def _weights(folder: Path) -> Path:
    save_state(folder / "w.safetensors", find_task("resnet20").model.state_dict())
    return folder / "w.safetensors"


def _use_weights(path: Path) -> None:
    model = find_task("resnet20", weights=path).model
    assert all(tensor.shape == other.shape for tensor, other in zip(*_twice(model), strict=True))


def _twice(model: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return list(model.state_dict().values()), list(find_task("resnet20").model.state_dict().values())


def header_changed(data: bytes, rng: random.Random) -> bytes:
    """The header of a safetensors file, and its length; our own have a checksum, those of others have none."""
    length = int.from_bytes(data[:8], "little")
    text = fuzz.as_json(fuzz.changed_tree(json.loads(data[8 : 8 + length]), rng))
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _tree(make: Callable[[Path], Path], file: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        return make(folder / "data") / file

    return made


def _use_data(network: str) -> Callable[[Path], None]:
    def use(path: Path) -> None:
        root = next(parent for parent in path.parents if parent.name == "data")
        task = find_task(network, root, size=(16, 24), batch_size=3)
        assert task.train_batches is not None
        assert task.evaluate is not None
        for images, _ in task.train_batches(0):
            assert images.shape[1:] == (3, 16, 24)
        if isinstance(task.loss, PixelLoss):
            assert task.loss.weights.isfinite().all()
        assert 0 <= task.evaluate(task.model) <= 1

    return use


_PHOTO = "train/n00000000/n00000000_1.JPEG"
TARGETS = (
    Target("recipe", _recipe, _use_recipe, toml_changed),
    Target("published weights", _weights, _use_weights, header_changed),
    Target(
        "photo",
        _tree(lambda root: trees.folders(root, classes=2, train=3, test=1), _PHOTO),
        _use_data("resnet20"),
        None,
    ),
    Target("scene", _tree(trees.camvid, "train/0001TP_000001.png"), _use_data("erfnet"), None),
    Target("label map", _tree(trees.camvid, "trainannot/0001TP_000001.png"), _use_data("erfnet"), None),
    Target(
        "CIFAR records",
        _tree(lambda root: trees.cifar10(root, each=4), "cifar-10-batches-bin/data_batch_2.bin"),
        _use_data("resnet20"),
        None,
    ),
)
