"""`find_task`: builds a `Task` from its name on the command line."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ecc.constants import BUNDLED_TASKS
from ecc.errors import BadTask, did_you_mean, import_optional, one_line
from ecc.io import execute_file
from ecc.task import Task
from ecc.zoo.data import find_data
from ecc.zoo.digits import digits
from ecc.zoo.image_task import NETWORKS, image_task, seeded, seeded_images
from ecc.zoo.language import language_task
from ecc.zoo.vision import image_classifier_task, is_image_classifier


def find_task(
    spec: str,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    *,
    image_size: tuple[int, int] | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    text: Sequence[str | Path] = (),
    test_text: Sequence[str | Path] = (),
    length: int | None = None,
    batch: int | None = None,
    gradient_checkpointing: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Task:
    """Build the task with a name.

    Args:
        spec: One of

            * a bundled name, see `BUNDLED_TASKS`. `digits` is a complete task; the others are networks with seeded
              random weights and input, enough to trace and measure, and complete tasks with `data`;
            * `torchvision:NAME` or `timm:NAME`: a network of that library with seeded random weights;
            * `hf:FOLDER` or `hf:NAME`: a model of transformers: a causal language model or an encoder of text, see
              `language_task`, or an image classifier, see `image_classifier_task`;
            * `path/to/file.py:function`: a function without arguments that returns a `Task` or a pair
              `(model, example_input)`. **The file is executed**: name only files that you trust. Its folder is on
              `sys.path` while it runs.
        data: Folder with a data set, see `find_data`.
        weights: Safetensors file with published weights of a bundled network.
        image_size: (height, width) of the images of a bundled network.
        batch_size: Training batch size.
        device: Device that holds data which fits into memory.
        text: Text files to train a Hugging Face model on.
        test_text: Text files for its score.
        length: Tokens per sequence of a Hugging Face model.
        batch: Sequences at once in prefill and decode.
        gradient_checkpointing: Compute activations of a Hugging Face model again in the backward pass.
        log: Called with one-line notes for the user.
    """
    if spec.startswith("hf:"):
        _refuse_options(spec, "the folder has its weights", weights=weights)
        path = spec.removeprefix("hf:")
        if not is_image_classifier(path):
            _refuse_options(spec, "give text files with --text", data=data, image_size=image_size)
            return language_task(
                path, text, test_text=test_text, length=length, batch_size=batch_size, batch=batch or 1,
                gradient_checkpointing=gradient_checkpointing, log=log,
            )  # fmt: skip
        if text or test_text or length is not None or gradient_checkpointing:
            raise BadTask(f"task {spec!r} classifies images and takes no text; give a data set with --data.")
        images = None if data is None else find_data(data)
        return image_classifier_task(path, images, image_size=image_size, batch_size=batch_size, device=device, log=log)
    if gradient_checkpointing:
        raise BadTask(
            f"task {spec!r} has no gradient checkpointing; only tasks hf:FOLDER and hf:NAME do. Use --micro-batch."
        )
    if text or test_text or length is not None:
        raise BadTask(f"task {spec!r} takes no text; only tasks hf:FOLDER and hf:NAME do.")
    if spec in NETWORKS:
        found = None if data is None else find_data(data)
        return image_task(
            spec, found, weights=weights, image_size=image_size, batch_size=batch_size, device=device, log=log
        )
    if spec == "digits" or ":" in spec:
        way = f"only the bundled networks {', '.join(NETWORKS)} do. Your own function sets it itself"
        _refuse_options(spec, way, data=data, weights=weights, image_size=image_size, batch_size=batch_size)
    return digits() if spec == "digits" else _from_library_or_file(spec)


def _from_library_or_file(spec: str) -> Task:
    if spec.endswith(".toml"):
        raise BadTask(f"task {spec!r} is a recipe; give it to `ecc compare`, or name its network here.")
    if spec.endswith(".py"):
        raise BadTask(f"task {spec!r} names a file but no function; write {spec}:FUNCTION.")
    library, _, name = spec.partition(":")
    if library == "torchvision":
        return _from_torchvision(name)
    if library == "timm":
        return _from_timm(name)
    # From the right, because a path may hold a colon of its own (C:\task.py).
    left, _, right = spec.rpartition(":")
    if left.endswith(".py"):
        return _from_file(Path(left), right)
    suggestion = did_you_mean(left, ("torchvision", "timm", "hf")) if left else did_you_mean(spec, BUNDLED_TASKS)
    raise BadTask(
        f"unknown task {spec!r}{suggestion}; choose one of {', '.join(BUNDLED_TASKS)}, "
        "torchvision:NAME, timm:NAME, hf:FOLDER or path/to/file.py:function."
    )


def _refuse_options(spec: str, way: str, **options: object) -> None:
    """Refuse options that a task does not take."""
    for name, value in options.items():
        if value is not None:
            raise BadTask(f"task {spec!r} takes no {name.replace('_', ' ')}; {way}.")


# ---------------------------------------------------------------- networks of other libraries


def _from_torchvision(name: str) -> Task:
    """A network of torchvision at 224x224."""
    models = _import_library("torchvision.models", f"torchvision:{name}")
    names: list[str] = models.list_models()
    if name not in names:
        raise BadTask(
            f"torchvision has no network {name!r}{did_you_mean(name, names)}; "
            "torchvision.models.list_models() lists them."
        )
    model: nn.Module = seeded(lambda: models.get_model(name, weights=None))
    return Task(name=name, model=model, example_input=seeded_images((3, 224, 224)))


def _from_timm(name: str) -> Task:
    """A network of timm at the input size of its configuration."""
    timm = _import_library("timm", f"timm:{name}")
    if not timm.is_model(name):
        suggestion = did_you_mean(name, timm.list_models())
        raise BadTask(f"timm has no network {name!r}{suggestion}; timm.list_models() lists them.")
    model: nn.Module = seeded(lambda: timm.create_model(name, pretrained=False))
    config: dict[str, Any] = timm.data.resolve_model_data_config(model)
    return Task(name=name, model=model, example_input=seeded_images(config["input_size"]))


def _import_library(module: str, spec: str) -> Any:
    try:
        return import_optional(module, f"task {spec!r}")
    except RuntimeError as error:
        # A torchvision built for another torch misses its operators; timm imports torchvision.
        raise BadTask(
            f"task {spec!r} needs {module.partition('.')[0]}, which fails to load ({one_line(error)}); "
            f"reinstall torchvision built for torch {torch.__version__}."
        ) from error


# ---------------------------------------------------------------- the user's own file


def _from_file(path: Path, function_name: str) -> Task:
    """Execute the user's file and build a task from the result of its function."""
    spec = f"{path}:{function_name}"
    if not function_name:
        raise BadTask(f"task {spec!r} names no function; write {path}:FUNCTION.")
    if not path.is_file():
        raise BadTask(f"task {spec!r}: there is no file {str(path)!r} in {str(Path.cwd())!r}.")
    with _on_sys_path(path.resolve().parent):
        try:
            module = execute_file(path)
        except (Exception, SystemExit) as error:  # user code: any error becomes one line
            raise BadTask(f"task {spec!r}: running the file raised {_one_line(error, path)}") from error
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


def _function_in(module: ModuleType, function_name: str, spec: str) -> Callable[[], object]:
    """The function, if it can be called without arguments."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not hasattr(module, function_name):
        there = f"the file defines {', '.join(own)}" if own else "the file defines no function"
        raise BadTask(f"task {spec!r}: no function {function_name!r}{did_you_mean(function_name, own)}; {there}.")
    function: Callable[[], object] = getattr(module, function_name)
    if not callable(function):
        raise BadTask(
            f"task {spec!r}: {function_name} is {type(function).__name__}; "
            "make it a function that returns a Task or a pair (model, example_input)."
        )
    try:
        with suppress(ValueError):  # some built-in callables have no signature
            inspect.signature(function).bind()
    except TypeError as error:
        raise BadTask(
            f"task {spec!r}: {function_name} is called without arguments, but {error}; give it a default."
        ) from error
    return function


@contextmanager
def _on_sys_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code removed it
            sys.path.remove(str(folder))


def _one_line(error: BaseException, path: Path) -> str:
    """Type, location and message of an exception; the location is in the user's file if possible."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path.resolve()]
    if isinstance(error, SyntaxError):
        filename, line, message = error.filename or str(path), error.lineno, error.msg
    else:
        frame = own[-1] if own else frames[-1]
        filename, line, message = frame.filename, frame.lineno, one_line(error)
    return f"{type(error).__name__} at {Path(filename).name}, line {line}: {message}"
