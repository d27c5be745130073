"""`find_task`: from what a user types on the command line to a `Task`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ecc.constants import BUNDLED_TASKS
from ecc.errors import BadTask, one_line
from ecc.task import Task
from ecc.zoo.data import find_data
from ecc.zoo.digits import digits
from ecc.zoo.imaging import image_task
from ecc.zoo.networks import NETWORKS

SEED = 0


def find_task(
    spec: str,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    *,
    size: tuple[int, int] | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    tell: Callable[[str], None] = lambda _: None,
) -> Task:
    """The task that a specification names.

    Args:
        spec: One of

            * a bundled name, see `BUNDLED_TASKS`: `digits` can be trained and judged; the others are networks
              with seeded random weights and input, enough to trace and measure, and whole tasks with `data`;
            * `torchvision:NAME` or `timm:NAME`: a network of that library, with seeded random weights;
            * `path/to/file.py:function`: a function without arguments that returns a `Task` or a pair
              `(model, example_input)`. **The file is executed**, like any Python program: name only files
              that you trust. Its folder is on `sys.path` meanwhile, so it can import its neighbours.
        data: A folder that holds a data set, see `find_data`.
        weights: A safetensors file with published weights of a bundled network.
        size: (height, width) of a bundled network's images.
        batch_size: Items in a training batch.
        device: Where data that fits into memory is kept.
        tell: Is told in one line what a user should know.

    Raises:
        BadTask: If there is no such task or it cannot be built; the message says what to do.
        BadFile: If the weights are not those of the network.
    """
    if spec in NETWORKS:
        found = None if data is None else find_data(data)
        return image_task(spec, found, weights=weights, size=size, batch=batch_size, device=device, tell=tell)
    for option, value in (("data", data), ("weights", weights), ("size", size), ("batch size", batch_size)):
        if value is not None and (spec == "digits" or ":" in spec):
            raise BadTask(
                f"task {spec!r} takes no {option}: that is for the bundled networks {', '.join(NETWORKS)}. "
                "A function of yours brings its own."
            )
    if spec == "digits":
        return digits()
    if spec.endswith(".toml"):
        raise BadTask(f"task {spec!r} is a recipe, which `ecc compare` takes; name its network here.")
    if spec.endswith(".py"):
        raise BadTask(f"task {spec!r} names a file but no function; write {spec}:FUNCTION.")
    # From the right, because a path may hold a colon of its own (C:\task.py).
    left, _, right = spec.rpartition(":")
    if left.endswith(".py"):
        return _from_file(Path(left), right)
    if left == "torchvision":
        return _from_torchvision(right)
    if left == "timm":
        return _from_timm(right)
    suggestion = _did_you_mean(left, ("torchvision", "timm")) if left else _did_you_mean(spec, BUNDLED_TASKS)
    raise BadTask(
        f"unknown task {spec!r}{suggestion}; bundled are {', '.join(BUNDLED_TASKS)}; "
        "or write torchvision:NAME, timm:NAME or path/to/file.py:function."
    )


# ---------------------------------------------------------------- networks of other libraries


def _from_torchvision(name: str) -> Task:
    """A network of torchvision at 224x224."""
    models = _import_library("torchvision", f"torchvision:{name}", "torchvision.models")
    names: list[str] = models.list_models()
    if name not in names:
        raise BadTask(
            f"torchvision has no network {name!r}{_did_you_mean(name, names)}; "
            "torchvision.models.list_models() lists them."
        )
    model: nn.Module = _seeded(lambda: models.get_model(name, weights=None))
    return Task(name=name, model=model, example_input=_seeded_input((3, 224, 224)))


def _from_timm(name: str) -> Task:
    """A network of timm at the input size of its configuration."""
    timm = _import_library("timm", f"timm:{name}", "timm")
    if not timm.is_model(name):
        suggestion = _did_you_mean(name, timm.list_models())
        raise BadTask(f"timm has no network {name!r}{suggestion}; timm.list_models() lists them.")
    model: nn.Module = _seeded(lambda: timm.create_model(name, pretrained=False))
    config: dict[str, Any] = timm.data.resolve_model_data_config(model)
    return Task(name=name, model=model, example_input=_seeded_input(config["input_size"]))


def _import_library(package: str, spec: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BadTask(
            f"task {spec!r} needs {package}, which cannot be imported ({one_line(error)}); pip install {package}."
        ) from error
    except RuntimeError as error:
        # A torchvision built for another torch misses its operators; timm imports torchvision.
        raise BadTask(
            f"task {spec!r} needs {package}, which fails to load ({one_line(error)}); "
            f"reinstall torchvision in the build for torch {torch.__version__}."
        ) from error


# ---------------------------------------------------------------- the user's own file


def _from_file(path: Path, function_name: str) -> Task:
    """Runs the user's file, calls the function in it and makes a task of what comes back."""
    spec = f"{path}:{function_name}"
    if not function_name:
        raise BadTask(f"task {spec!r} names no function; write {path}:FUNCTION.")
    if not path.is_file():
        raise BadTask(f"task {spec!r}: there is no file {str(path)!r} in {str(Path.cwd())!r}; check the path.")
    with _on_sys_path(path.resolve().parent):
        module = _execute(path, spec)
        function = _function_in(module, function_name, spec)
        try:
            result = function()
        except (Exception, SystemExit) as error:  # user code: any error becomes one line
            raise BadTask(f"task {spec!r} raised {_one_line(error, path)}") from error
    if isinstance(result, Task):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        model, example_input = result
        return Task(name=f"{path.stem}.{function_name}", model=model, example_input=example_input)
    size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
    raise BadTask(
        f"task {spec!r} returned {type(result).__name__}{size}; return a Task or a pair (model, example_input)."
    )


def _execute(path: Path, spec: str) -> ModuleType:
    """Imports the file under a name of its own, so that `torch.py` or two `task.py` do no harm."""
    name = f"ecc_task_{path.stem}_{zlib.crc32(bytes(path.resolve())):08x}"
    module_spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert module_spec is not None  # the path ends in .py
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # where dataclasses look a class's module up
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code: any error becomes one line
        del sys.modules[name]
        raise BadTask(f"task {spec!r}: running the file raised {_one_line(error, path)}") from error
    return module


def _function_in(module: ModuleType, function_name: str, spec: str) -> Callable[[], object]:
    """The function of that name, if it is one that can be called without arguments."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not hasattr(module, function_name):
        there = f"the file defines {', '.join(own)}" if own else "the file defines no function"
        raise BadTask(f"task {spec!r}: no function {function_name!r}{_did_you_mean(function_name, own)}; {there}.")
    function: Callable[[], object] = getattr(module, function_name)
    if not callable(function):
        raise BadTask(
            f"task {spec!r}: {function_name} is {type(function).__name__}; "
            "make it a function that returns a Task or a pair (model, example_input)."
        )
    try:
        with suppress(ValueError):  # some built-in callables do not tell their arguments
            inspect.signature(function).bind()
    except TypeError as error:
        raise BadTask(
            f"task {spec!r}: {function_name} is called without arguments; {error}; give it a default."
        ) from error
    return function


@contextmanager
def _on_sys_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code took it off already
            sys.path.remove(str(folder))


def _one_line(error: BaseException, path: Path) -> str:
    """An exception's type, place and first words; the place is in the user's file where possible."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path.resolve()]
    if isinstance(error, SyntaxError):
        filename, line, message = error.filename or str(path), error.lineno, error.msg
    else:
        frame = own[-1] if own else frames[-1]
        filename, line, message = frame.filename, frame.lineno, one_line(error)
    return f"{type(error).__name__} at {Path(filename).name}, line {line}: {message}"


# ---------------------------------------------------------------- small things shared above


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a network with weights from our seed and leaves the global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reseed the GPUs as well
        return build()


def _seeded_input(shape: tuple[int, int, int]) -> Tensor:
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(SEED))


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
