"""`Task`: a network together with the data to train and evaluate it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import BadTask
from ecc.torch_utils import eval_mode

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is called with: one tensor, a tuple of positional arguments, or a dict of keyword arguments."""

Batch = Any
"""A training batch: `(inputs, targets)`, or a dict of keyword arguments of the model (Hugging Face). With a loss of the
form `loss(model, batch)` it may be anything."""

MAX_BATCH_SIZE = 1 << 20

WORKLOADS = ("decode", "prefill")
"""Workloads of a language model, in the order in which a budget without a name refers to them."""


@dataclass(frozen=True, kw_only=True)
class TokenWorkload:
    """What a language model is measured on: it reads a prompt (prefill), or generates tokens (decode).

    Raises:
        BadTask: If the name is unknown, or a number is below 1.
    """

    name: str
    """One of `WORKLOADS`."""
    batch: int = 1
    """Sequences that are processed at once."""
    length: int = 128
    """Prefill: tokens of the prompt. Decode: tokens in the KV cache when the next one is generated."""

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise BadTask(f"workload {self.name!r} is unknown; choose one of {', '.join(WORKLOADS)}.")
        if not 1 <= self.batch <= MAX_BATCH_SIZE or self.length < 1:
            raise BadTask(f"workload {self.name!r} has batch {self.batch} and length {self.length}; give 1 or more.")

    @property
    def tokens(self) -> int:
        """Tokens that one run processes, by which joules per token are computed."""
        return self.batch * self.length if self.name == "prefill" else self.batch

    @property
    def resources(self) -> dict[str, str]:
        """Names of its energy and of its latency in budgets and results."""
        return {"energy": self.name, "latency": f"{self.name}_latency"}


# eq=False: comparing tensors gives tensors, so two tasks are equal only when they are the same object.
@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A network together with the data to train and evaluate it.

    A model and an example input are enough to trace, profile and slim. Training needs `train_batches`, and `loss`
    unless the model returns its loss; scores in reports need `evaluate`; methods that choose between candidates need
    `evaluate_held_out`.

    Raises:
        BadTask: If a field has the wrong type.
    """

    name: str
    """Short name for tables and file names."""

    model: nn.Module
    """The dense network, on any device; methods work on a copy of it."""

    example_input: Inputs
    """One batch as measured: a tensor, a tuple (positional arguments) or a dict (keyword arguments)."""

    loss: Callable[..., Tensor] | None = None
    """Scalar training loss, a mean over the items of a batch: `loss(outputs, targets)`, or `loss(model, batch)` if its
    first parameter is named `model`. None if batches are dicts and the model returns its loss, as Hugging Face's do."""

    train_batches: Callable[[int], Iterable[Batch]] | Iterable[Batch] | None = None
    """A DataLoader or another re-iterable, or a function of the epoch that returns an iterable of batches, always the
    same for an epoch (seed s starts with epoch 100,000 s)."""

    evaluate: Callable[[nn.Module], float] | None = None
    """Score of a model on the test split, higher is better; for reports only."""

    evaluate_held_out: Callable[[nn.Module], float] | None = None
    """Score on a held-out part of the training split, higher is better; for every choice a method makes."""

    metric: str = "score"
    """What the scores are: `score`, or `perplexity` if they are the mean log-likelihood of a token."""

    workloads: tuple[TokenWorkload, ...] = ()
    """Workloads of a language model, each with its own profile and budgets; empty for other networks."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise BadTask(f"name of a task is {self.name!r}; give a non-empty string.")
        where = f"of task {self.name!r}"
        check_model(self.model, f"model {where}")
        _check_inputs(f"example_input {where}", self.example_input)
        for field in ("loss", "evaluate", "evaluate_held_out"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise BadTask(f"{field} {where} is {_type_name(value)}; give a function or None.")
        batches = self.train_batches
        if isinstance(batches, Iterator):
            raise BadTask(
                f"train_batches {where} is {_type_name(batches)}, an iterator that ends after one epoch; give a "
                "DataLoader, a list, or a function of the epoch."
            )
        if batches is not None and not callable(batches) and not hasattr(batches, "__iter__"):
            raise BadTask(
                f"train_batches {where} is {_type_name(batches)}; give a DataLoader, another iterable of batches, or a "
                "function of the epoch."
            )

    def workload_of(self, resource: str) -> TokenWorkload | None:
        """The workload that a resource such as `decode_latency` belongs to; None for those of the example input."""
        return next((one for one in self.workloads if resource in one.resources.values()), None)

    def epoch_batches(self, epoch: int) -> Iterable[Batch]:
        """Batches of one epoch, as the user supplies them. `ecc.training.BatchStream` seeds and counts them.

        Raises:
            BadTask: If the task has no training batches.
        """
        if self.train_batches is None:
            raise BadTask(f"task {self.name!r} has no train_batches.")
        return self.train_batches(epoch) if callable(self.train_batches) else self.train_batches


def check_model(model: object, what: str = "model") -> None:
    """Refuse what looks like a model and is not one, such as `ultralytics.YOLO`, whose `train()` starts a training.

    Raises:
        BadTask: If it is not an instance of `torch.nn.Module`, or only wraps one.
    """
    kind = _type_name(model)
    if isinstance(model, type):
        raise BadTask(f"{what} is the class {model.__name__}; give an instance, such as {model.__name__}().")
    is_module = isinstance(model, nn.Module) and "mode" in inspect.signature(model.train).parameters
    if not is_module and isinstance(getattr(model, "model", None), nn.Module):
        raise BadTask(f"{what} is a {kind}, which only wraps a torch.nn.Module; pass `{kind.lower()}.model`.")
    if not isinstance(model, nn.Module):
        raise BadTask(f"{what} is {kind}; give a torch.nn.Module instance.")


def takes_model(loss: Callable[..., Any] | None) -> bool:
    """Whether a loss has the form `loss(model, batch)`: its first parameter is named `model`."""
    if loss is None:
        return False
    try:
        return next(iter(inspect.signature(loss).parameters), "") == "model"
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with one tensor, a tuple or list of positional arguments, or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Inputs of the model and targets of a batch.

    All of a dict is the input of the model; its targets are its `labels`, None if it has none.

    Raises:
        BadTask: If the batch is neither a pair nor a dict.
    """
    if isinstance(batch, Mapping):
        return dict(batch), batch.get("labels")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)} items" if isinstance(batch, tuple | list) else ""
    raise BadTask(
        f"a batch is a {_type_name(batch)}{size}; give pairs (inputs, targets), dicts of keyword arguments of the "
        "model, or a loss of the form loss(model, batch)."
    )


class _Called(Exception):
    """Raised by the model when it is called."""

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs


@torch.no_grad()
def model_inputs_of(model: nn.Module, batch: Batch, loss: Callable[..., Any] | None) -> Any:
    """Inputs of the model of a batch, for `call_model`.

    Of a batch that is neither a pair nor a dict, they are what a loss of the form `loss(model, batch)` calls the model
    with first. The model is not run.

    Raises:
        BadTask: If the batch does not fit the form of the loss, or the loss does not call the model.
    """
    try:
        return split_batch(batch)[0]
    except BadTask:
        if not takes_model(loss):
            raise
    assert loss is not None

    def end_loss(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and kwargs:
            raise _Called(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        raise _Called(kwargs or args)

    hook = model.register_forward_pre_hook(end_loss, with_kwargs=True, prepend=True)
    try:
        with eval_mode(model):  # it may call a part of the model first
            loss(model, batch)
    except _Called as called:
        return called.inputs
    finally:
        hook.remove()
    raise BadTask(
        f"a batch is a {_type_name(batch)}, and the loss does not call the model itself, so the inputs of the model "
        "are unknown; give pairs (inputs, targets), dicts of keyword arguments of the model, or use method ecc."
    )


def with_batch_size(example_input: Inputs, batch_size: int, *, start: int = 0) -> Inputs:
    """The example input at another batch size: its items are repeated, or the first ones are taken.

    Args:
        example_input: Its first tensor determines the batch size; tensors with another first axis stay as they are.
        batch_size: Items in the new batch.
        start: The first item to take.

    Raises:
        BadTask: If `batch_size` is out of range, or the input has no batch axis.
    """
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise BadTask(f"batch size {batch_size} is outside 1..{MAX_BATCH_SIZE}.")
    first = _first_tensor(example_input)
    if first.dim() == 0 or len(first) == 0:
        raise BadTask(f"the example input has shape {tuple(first.shape)}, without items to make a batch of.")
    index = (start + torch.arange(batch_size)) % len(first)

    def resize(tensor: Tensor) -> Tensor:
        return tensor[index.to(tensor.device)] if tensor.dim() and len(tensor) == len(first) else tensor

    resized: Inputs = tree_map_only(Tensor, resize, example_input)
    return resized


def batch_size_of(example_input: Inputs) -> int:
    """Batch size of the example input: the first axis of its first tensor; 1 if it has none."""
    first = _first_tensor(example_input)
    return len(first) if first.dim() else 1


def _first_tensor(example_input: Inputs) -> Tensor:
    if isinstance(example_input, Tensor):
        return example_input
    return example_input[0] if isinstance(example_input, tuple) else next(iter(example_input.values()))


def check_input(example_input: object) -> Inputs:
    """Check an example input that does not belong to a task. A list of positional arguments becomes a tuple.

    Raises:
        BadTask: If it is neither a tensor nor a tuple or dict of tensors.
    """
    inputs = tuple(example_input) if isinstance(example_input, list) else example_input
    _check_inputs("the example input", inputs)
    return inputs  # type: ignore[return-value]  # checked


def _check_inputs(what: str, inputs: object) -> None:
    if isinstance(inputs, Tensor):
        return
    expected = "give a tensor, a tuple of tensors or a dict of tensors by argument name."
    if not isinstance(inputs, tuple | dict):
        raise BadTask(f"{what} is {_type_name(inputs)}; {expected}")
    if not inputs:
        raise BadTask(f"{what} is an empty {_type_name(inputs)}; {expected}")
    for key, value in inputs.items() if isinstance(inputs, dict) else enumerate(inputs):
        if isinstance(inputs, dict) and not isinstance(key, str):
            raise BadTask(f"{what} has the key {key!r}, which is not an argument name; {expected}")
        if not isinstance(value, Tensor):
            raise BadTask(f"{what} holds {_type_name(value)} at {key!r}; {expected}")


def _type_name(value: object) -> str:
    return type(value).__name__
