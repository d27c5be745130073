from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ecc.constants import BUNDLED_TASKS
from ecc.errors import BadTask
from ecc.task import Task
from ecc.zoo.registry import find_task
from zoo.data.trees import cifar10


def refusal(spec: str) -> str:
    with pytest.raises(BadTask) as caught:
        find_task(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- bundled names


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("digits", (1, 1, 8, 8)),
        ("alexnet", (1, 3, 224, 224)),
        ("mobilenet_v1", (1, 3, 224, 224)),
        ("erfnet", (1, 3, 512, 1024)),
        ("resnet20", (1, 3, 32, 32)),
        ("resnet56", (1, 3, 32, 32)),
    ],
)
def test_bundled_names_give_a_task_of_that_name(name: str, shape: tuple[int, ...]) -> None:
    task = find_task(name)
    assert task.name == name
    assert isinstance(task.example_input, torch.Tensor)
    assert task.example_input.shape == shape
    can_train = name == "digits"
    for field in (task.loss, task.train_batches, task.evaluate, task.evaluate_held_out):
        assert (field is not None) == can_train


def test_the_bundled_names_are_listed() -> None:
    assert BUNDLED_TASKS == ("digits", "alexnet", "mobilenet_v1", "erfnet", "resnet20", "resnet56")


def test_weights_and_input_are_seeded_and_the_global_random_state_is_left() -> None:
    before = torch.get_rng_state()
    one = find_task("resnet20")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    other = find_task("resnet20")
    assert torch.equal(one.model.conv1.weight, other.model.conv1.weight)  # type: ignore[union-attr, arg-type]
    assert torch.equal(one.example_input, other.example_input)  # type: ignore[arg-type]
    assert abs(float(one.example_input.std()) - 1) < 0.1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spec", "suggestion"),
    [
        ("mobilenet", " (did you mean 'mobilenet_v1'?)"),
        ("AlexNet", " (did you mean 'alexnet'?)"),
        ("resnet-20", " (did you mean 'resnet20'?)"),
        ("transformer", ""),
        ("", ""),
        ("keras:resnet50", ""),
        ("torchvison:resnet18", " (did you mean 'torchvision'?)"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(spec: str, suggestion: str) -> None:
    assert refusal(spec) == (
        f"unknown task {spec!r}{suggestion}; bundled are digits, alexnet, mobilenet_v1, erfnet, resnet20, "
        "resnet56; or write torchvision:NAME, timm:NAME or path/to/file.py:function."
    )


@pytest.mark.parametrize(
    ("spec", "option", "value"),
    [("digits", "data", "."), ("timm:x", "weights", "w"), ("a.py:f", "size", (8, 8)), ("digits", "batch_size", 3)],
)
def test_data_and_weights_are_for_bundled_networks(spec: str, option: str, value: Any) -> None:
    with pytest.raises(BadTask, match=f"takes no {option.replace('_', ' ')}: that is for the bundled networks alexnet"):
        find_task(spec, **{option: value})


def test_a_bundled_network_with_a_folder_of_data_can_be_trained(tmp_path: Path) -> None:
    task = find_task("resnet20", cifar10(tmp_path), batch_size=4)
    assert task.name == "resnet20-cifar10"
    assert task.train_batches is not None
    inputs, targets = next(iter(task.train_batches(0)))
    assert (inputs.shape, targets.shape) == ((4, 3, 32, 32), (4,))


# ---------------------------------------------------------------- networks of other libraries


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_missing_library_says_what_to_install(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    message = refusal(f"{library}:resnet18")
    assert message.startswith(f"task '{library}:resnet18' needs {library}, which cannot be imported (")
    assert message.endswith(f"); pip install {library}.")


def test_a_library_built_for_another_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert refusal("torchvision:resnet18") == (
        "task 'torchvision:resnet18' needs torchvision, which fails to load "
        "(operator torchvision::nms does not exist); "
        f"reinstall torchvision in the build for torch {torch.__version__}."
    )


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

    models = module("torchvision.models", list_models=lambda: ["resnet18", "vgg11"], get_model=build)
    module("torchvision", models=models)
    data = module("timm.data", resolve_model_data_config=lambda model: {"input_size": (3, 96, 160)})
    module(
        "timm",
        data=data,
        list_models=lambda: ["resnet18", "vgg11"],
        is_model=lambda name: name.partition(".")[0] in {"resnet18", "vgg11"},
        create_model=build,
    )


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("library", "size"), [("torchvision", (224, 224)), ("timm", (96, 160))])
def test_a_network_of_a_library_is_seeded(library: str, size: tuple[int, int]) -> None:
    before = torch.get_rng_state()
    one, other = find_task(f"{library}:resnet18"), find_task(f"{library}:resnet18")
    assert torch.equal(before, torch.get_rng_state())
    assert one.name == "resnet18"
    assert one.example_input.shape == (1, 3, *size)  # type: ignore[union-attr]
    assert torch.equal(one.model.weight, other.model.weight)  # type: ignore[arg-type]


@pytest.mark.usefixtures("libraries")
def test_an_unknown_network_of_a_library_gets_a_suggestion() -> None:
    assert refusal("torchvision:resnet-18") == (
        "torchvision has no network 'resnet-18' (did you mean 'resnet18'?); "
        "torchvision.models.list_models() lists them."
    )
    assert refusal("timm:qqq") == "timm has no network 'qqq'; timm.list_models() lists them."


# ---------------------------------------------------------------- the user's own file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


PAIR = "import torch\ndef pair():\n    return torch.nn.Linear(2, 3), torch.zeros(1, 2)\n"


def test_a_function_may_return_a_pair(folder: Path) -> None:
    write(folder, PAIR)
    task = find_task("mine.py:pair")
    assert task.name == "mine.pair"
    assert isinstance(task.model, nn.Linear)
    assert task.example_input.shape == (1, 2)  # type: ignore[union-attr]


def test_a_function_may_return_a_task_and_the_path_may_be_absolute(folder: Path) -> None:
    write(
        folder,
        "import torch\nfrom ecc.task import Task\n"
        "def task():\n"
        "    return Task(name='own', model=torch.nn.ReLU(), example_input=torch.zeros(1))\n",
    )
    task = find_task(f"{folder / 'mine.py'}:task")
    assert isinstance(task, Task)
    assert task.name == "own"


def test_the_file_may_import_its_neighbours_now_and_later(folder: Path) -> None:
    write(folder, "import torch\nmodel = torch.nn.ReLU()\n", "neighbour_of_mine.py")
    write(folder, "import torch\nexample = torch.zeros(1)\n", "other_neighbour_of_mine.py")
    write(
        folder,
        "import neighbour_of_mine\n"
        "def pair():\n"
        "    import other_neighbour_of_mine\n"
        "    return neighbour_of_mine.model, other_neighbour_of_mine.example\n",
    )
    before = list(sys.path)
    try:
        assert isinstance(find_task("mine.py:pair").model, nn.ReLU)
    finally:
        sys.modules.pop("neighbour_of_mine", None)
        sys.modules.pop("other_neighbour_of_mine", None)
    assert sys.path == before


def test_a_file_called_like_a_library_hides_nothing(folder: Path) -> None:
    write(folder, "import ecc\n" + PAIR, "json.py")
    import json

    find_task("json.py:pair")
    assert sys.modules["json"] is json


def test_dataclasses_in_the_file_work(folder: Path) -> None:
    write(
        folder,
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport torch\n"
        "@dataclass\nclass Settings:\n    width: int = 3\n"
        "def pair():\n    return torch.nn.Linear(2, Settings().width), torch.zeros(1, 2)\n",
    )
    assert find_task("mine.py:pair").model.out_features == 3


def test_an_edited_file_is_read_again(folder: Path) -> None:
    write(folder, PAIR)
    find_task("mine.py:pair")
    write(folder, PAIR.replace("Linear(2, 3)", "Linear(2, 345)"))
    assert find_task("mine.py:pair").model.out_features == 345


def test_a_file_without_a_function_is_refused(folder: Path) -> None:
    write(folder, PAIR)
    assert refusal("mine.py") == "task 'mine.py' names a file but no function; write mine.py:FUNCTION."
    assert refusal("mine.py:") == "task 'mine.py:' names no function; write mine.py:FUNCTION."


def test_a_missing_file_is_refused(folder: Path) -> None:
    message = refusal("sub/mine.py:pair")
    path = str(Path("sub/mine.py"))
    assert message == f"task '{path}:pair': there is no file {path!r} in {str(folder)!r}; check the path."


def test_a_missing_function_lists_those_there(folder: Path) -> None:
    write(folder, "from pathlib import Path\nfrom json import dumps\n" + PAIR + "def other():\n    pass\n")
    assert refusal("mine.py:pare") == (
        "task 'mine.py:pare': no function 'pare' (did you mean 'pair'?); the file defines pair, other."
    )
    write(folder, "x = 1\n", "empty.py")
    assert refusal("empty.py:pair") == "task 'empty.py:pair': no function 'pair'; the file defines no function."


def test_what_is_no_function_is_refused(folder: Path) -> None:
    write(folder, "pair = 3\n")
    assert refusal("mine.py:pair") == (
        "task 'mine.py:pair': pair is int; make it a function that returns a Task or a pair (model, example_input)."
    )


def test_a_function_that_wants_arguments_is_refused(folder: Path) -> None:
    write(folder, "def pair(width):\n    pass\n")
    assert refusal("mine.py:pair") == (
        "task 'mine.py:pair': pair is called without arguments; missing a required argument: 'width'; "
        "give it a default."
    )


def test_a_callable_that_hides_its_arguments_is_called(folder: Path) -> None:
    write(folder, "pair = dict\n")
    assert refusal("mine.py:pair").startswith("task 'mine.py:pair' returned dict; ")


def test_a_function_that_raises_says_what_and_where(folder: Path) -> None:
    write(folder, "def deep():\n    raise ValueError('too wide\\nsee the manual')\ndef pair():\n    deep()\n")
    assert (
        refusal("mine.py:pair") == "task 'mine.py:pair' raised ValueError at mine.py, line 2: too wide see the manual"
    )


def test_an_error_inside_a_library_is_placed_in_the_users_file(folder: Path) -> None:
    write(folder, "import torch\ndef pair():\n    return torch.zeros(2) @ torch.zeros(3)\n")
    assert refusal("mine.py:pair").startswith("task 'mine.py:pair' raised RuntimeError at mine.py, line 3: ")


def test_an_error_without_a_message_still_has_a_place(folder: Path) -> None:
    write(folder, "def pair():\n    raise KeyError\n")
    assert refusal("mine.py:pair").endswith("raised KeyError at mine.py, line 2: no message")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\nimport no_such_module_at_all\n", "ModuleNotFoundError at mine.py, line 2: No module named"),
        ("def pair(:\n    pass\n", "SyntaxError at mine.py, line 1: invalid syntax"),
        ("import sys\nsys.exit('usage: mine')\n", "SystemExit at mine.py, line 2: usage: mine"),
    ],
)
def test_a_file_that_does_not_run_says_what_and_where(folder: Path, text: str, problem: str) -> None:
    write(folder, text)
    modules = set(sys.modules)
    assert refusal("mine.py:pair").startswith(f"task 'mine.py:pair': running the file raised {problem}")
    assert set(sys.modules) == modules


@pytest.mark.parametrize(
    ("returned", "shown"),
    [("None", "NoneType"), ("[1, 2]", "list of 2"), ("(1, 2, 3)", "tuple of 3"), ("'resnet'", "str")],
)
def test_a_wrong_return_value_is_refused(folder: Path, returned: str, shown: str) -> None:
    write(folder, f"def pair():\n    return {returned}\n")
    assert refusal("mine.py:pair") == (
        f"task 'mine.py:pair' returned {shown}; return a Task or a pair (model, example_input)."
    )


def test_a_pair_of_the_wrong_things_is_refused(folder: Path) -> None:
    write(folder, "def pair():\n    return 1, 2\n")
    assert refusal("mine.py:pair") == ("model of task 'mine.pair' is int; give a torch.nn.Module instance.")


def test_a_folder_taken_off_the_path_by_the_user_does_no_harm(folder: Path) -> None:
    write(folder, "import sys\nsys.path.pop(0)\n" + PAIR)
    before = list(sys.path)
    find_task("mine.py:pair")
    assert sys.path == before


def test_the_docstring_warns_that_the_file_is_executed() -> None:
    assert "**The file is executed**" in (find_task.__doc__ or "")
