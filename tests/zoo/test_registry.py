"""`find_task`: bundled tasks, networks of other libraries, and functions in files."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ecc.constants import BUNDLED_TASKS
from ecc.errors import BadTask
from ecc.zoo.registry import find_task


def refusal(spec: str, **options: Any) -> str:
    with pytest.raises(BadTask) as caught:
        find_task(spec, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SHAPES = {"digits": (256, 1, 8, 8), "erfnet": (1, 3, 512, 1024), "resnet20": (1, 3, 32, 32), "resnet56": (1, 3, 32, 32)}


@pytest.mark.parametrize("name", BUNDLED_TASKS)
def test_bundled_tasks_are_built_by_name_and_seeded(name: str) -> None:
    before = torch.get_rng_state()
    task: Any = find_task(name)
    assert torch.equal(before, torch.get_rng_state())
    assert task.name == name
    assert task.example_input.shape == SHAPES.get(name, (1, 3, 224, 224))
    for field in (task.loss, task.train_batches, task.evaluate, task.evaluate_held_out):
        assert (field is not None) == (name == "digits")
    if name == "resnet20":
        torch.manual_seed(1)
        other: Any = find_task(name)
        assert torch.equal(task.model.conv1.weight, other.model.conv1.weight)
        assert torch.equal(task.example_input, other.example_input)


# ---------------------------------------------------------------- networks of other libraries


def test_missing_and_incompatible_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, library, None)
        message = refusal(f"{library}:resnet18")
        assert message.startswith(f"task '{library}:resnet18' needs {library}, which cannot be imported (")
        assert message.endswith(f"pip install {library}.")

    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    message = refusal("torchvision:resnet18")
    assert "fails to load (operator torchvision::nms does not exist); reinstall torchvision built for torch" in message


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the few functions that are called, so that neither library need be installed."""

    def build(name: str, **options: Any) -> nn.Module:
        assert name == "resnet18"
        assert options in ({"weights": None}, {"pretrained": False})  # nothing is downloaded
        return nn.Linear(4, 4)

    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    names = ["resnet18", "vgg11"]
    models = module("torchvision.models", list_models=lambda: names, get_model=build)
    module("torchvision", models=models)
    data = module("timm.data", resolve_model_data_config=lambda model: {"input_size": (3, 96, 160)})
    module("timm", data=data, list_models=lambda: names, is_model=lambda name: name in names, create_model=build)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("library", "size"), [("torchvision", (224, 224)), ("timm", (96, 160))])
def test_networks_of_libraries_are_seeded(library: str, size: tuple[int, int]) -> None:
    one, other = find_task(f"{library}:resnet18"), find_task(f"{library}:resnet18")
    assert one.name == "resnet18"
    assert one.example_input.shape == (1, 3, *size)  # type: ignore[union-attr]
    assert torch.equal(one.model.weight, other.model.weight)  # type: ignore[arg-type]
    assert refusal(f"{library}:resnet-18").startswith(
        f"{library} has no network 'resnet-18' (did you mean 'resnet18'?)"
    )


# ---------------------------------------------------------------- the user's own file

PAIR = "import torch\ndef pair():\n    return torch.nn.Linear(2, 3), torch.zeros(1, 2)\n"
TASK = (
    "import torch, ecc\ndef pair(): return ecc.Task(name='own', model=torch.nn.ReLU(), example_input=torch.zeros(1))\n"
)
DATACLASS = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n"
    "@dataclass\nclass Settings:\n    width: int = 3\n"
    "def pair():\n    return torch.nn.Linear(2, Settings().width), torch.zeros(1, 2)\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PAIR, "mine.pair"),
        (TASK, "own"),
        (DATACLASS, "mine.pair"),
        ("import sys\nsys.path.pop(0)\n" + PAIR, "mine.pair"),
    ],
)
def test_a_function_in_a_file_gives_the_task(text: str, name: str, folder: Path) -> None:
    write(folder, text)
    before = list(sys.path)
    assert find_task("mine.py:pair").name == find_task(f"{folder / 'mine.py'}:pair").name == name
    assert sys.path == before


def test_the_file_is_executed_each_time_and_may_import_its_neighbours(folder: Path) -> None:
    write(folder, "import torch\nmodel = torch.nn.ReLU()\n", "neighbour_of_mine.py")
    write(folder, "import neighbour_of_mine, torch\ndef pair(): return neighbour_of_mine.model, torch.zeros(1)\n")
    try:
        assert isinstance(find_task("mine.py:pair").model, nn.ReLU)
    finally:
        sys.modules.pop("neighbour_of_mine", None)
    write(folder, PAIR.replace("Linear(2, 3)", "Linear(2, 345)"))
    assert find_task("mine.py:pair").model.out_features == 345
    write(folder, "import ecc\n" + PAIR, "json.py")
    find_task("json.py:pair")
    assert sys.modules["json"] is json  # a file named like a library does not replace it
