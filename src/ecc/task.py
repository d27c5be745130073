"""`Task`: everything that a user supplies, in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import BadTask

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is called with: one tensor, positional tensors, or tensors by argument name."""

MAX_BATCH_SIZE = 1 << 20
"""In one batch."""


# eq=False: comparing tensors gives tensors, so two tasks are equal only when they are the same object.
@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A network together with the data to train and judge it.

    A model and an example input are enough to trace, profile and slim. Training needs `loss` and
    `train_batches`; reporting accuracy needs `evaluate`; choosing between candidates needs
    `evaluate_held_out`.

    Raises:
        BadTask: If a field has the wrong type, or `train_batches` comes without `loss`.
    """

    name: str
    """Short name for tables and file names."""

    model: nn.Module
    """The dense network, on any device; methods work on a copy of it."""

    example_input: Inputs
    """One batch as measured: a tensor, a tuple (positional arguments) or a dict (keyword arguments)."""

    loss: Callable[[Any, Any], Tensor] | None = None
    """Scalar training loss, called as `loss(outputs, targets)`."""

    train_batches: Callable[[int], Iterable[tuple[Any, Any]]] | None = None
    """`train_batches(epoch)` yields `(inputs, targets)`, always the same for an epoch; seed s begins at 100,000 s."""

    evaluate: Callable[[nn.Module], float] | None = None
    """Score of a model on the test split, higher is better; for reports only."""

    evaluate_held_out: Callable[[nn.Module], float] | None = None
    """Score on a held-out part of the training split, higher is better; for every choice a method makes."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise BadTask(f"name of a task is {self.name!r}; give a non-empty string.")
        if isinstance(self.model, type) and issubclass(self.model, nn.Module):
            raise BadTask(
                f"model of task {self.name!r} is the class {self.model.__name__}; "
                f"give an instance: {self.model.__name__}(...)."
            )
        if not isinstance(self.model, nn.Module):
            raise BadTask(f"model of task {self.name!r} is {_type_name(self.model)}; give a torch.nn.Module instance.")
        _check_example_input(f"example_input of task {self.name!r}", self.example_input)
        for field in ("loss", "train_batches", "evaluate", "evaluate_held_out"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise BadTask(
                    f"{field} of task {self.name!r} is {_type_name(value)}; give a function or leave it None."
                )
        if self.train_batches is not None and self.loss is None:
            raise BadTask(f"task {self.name!r} has train_batches but no loss; training needs both.")


def with_batch_size(example_input: Inputs, batch: int) -> Inputs:
    """The example input at another batch size: its items over and over, or the first of them.

    Args:
        example_input: Its first tensor tells the batch size; tensors with another first axis are left alone.
        batch: Items in the new batch.

    Raises:
        BadTask: If `batch` is below 1, or the input has no axis for it.
    """
    if batch < 1:
        raise BadTask(f"batch {batch} is below 1, the least a network can be run on.")
    if batch > MAX_BATCH_SIZE:
        raise BadTask(f"batch {batch} is above {MAX_BATCH_SIZE}, more than is ever run at once.")
    first = _first_tensor(example_input)
    if first.dim() == 0 or len(first) == 0:
        raise BadTask(f"the example input has shape {tuple(first.shape)}: no batch can be made of it.")
    index = torch.arange(batch) % len(first)

    def changed(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)] if tensor.dim() and len(tensor) == len(first) else tensor

    if isinstance(example_input, Tensor):
        return changed(example_input)
    if isinstance(example_input, tuple):
        return tuple(changed(tensor) for tensor in example_input)
    return {name: changed(tensor) for name, tensor in example_input.items()}


def batch_size_of(example_input: Inputs) -> int:
    """Items in the example input, by the first axis of its first tensor; 1 if it has none."""
    first = _first_tensor(example_input)
    return len(first) if first.dim() else 1


def _first_tensor(example_input: Inputs) -> Tensor:
    if isinstance(example_input, Tensor):
        return example_input
    return example_input[0] if isinstance(example_input, tuple) else next(iter(example_input.values()))


def check_input(example_input: object) -> Inputs:
    """An example input that did not come with a task; a list of positional arguments is as good as a tuple.

    Raises:
        BadTask: If it is neither a tensor nor made of tensors alone.
    """
    given = tuple(example_input) if isinstance(example_input, list) else example_input
    _check_example_input("the example input", given)
    return given  # type: ignore[return-value]  # now known


def _check_example_input(what: str, example_input: object) -> None:
    """Refuses an example input that no model could be called with."""
    if isinstance(example_input, Tensor):
        return
    ways = "give a tensor, a tuple of tensors or a dict of tensors by argument name."
    if not isinstance(example_input, (tuple, dict)):
        raise BadTask(f"{what} is {_type_name(example_input)}; {ways}")
    if not example_input:
        raise BadTask(f"{what} is an empty {_type_name(example_input)}; {ways}")
    entries = example_input.items() if isinstance(example_input, dict) else enumerate(example_input)
    for key, value in entries:
        if isinstance(example_input, dict) and not isinstance(key, str):
            raise BadTask(f"{what} has the key {key!r}, which is no argument name; {ways}")
        if not isinstance(value, Tensor):
            raise BadTask(f"{what} holds {_type_name(value)} at {key!r}; {ways}")


def _type_name(value: object) -> str:
    return type(value).__name__
