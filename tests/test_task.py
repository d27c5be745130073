from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ecc.errors import BadTask
from ecc.task import (
    Task,
    batch_size_of,
    call_model,
    check_input,
    model_inputs_of,
    split_batch,
    takes_model,
    with_batch_size,
)

MODEL = nn.Linear(2, 3)
INPUT = torch.zeros(1, 2)
EXPECTED = "give a tensor, a tuple of tensors or a dict of tensors by argument name."


def task(**fields: Any) -> Task:
    return Task(**{"name": "toy", "model": MODEL, "example_input": INPUT, **fields})


@pytest.mark.parametrize("example_input", [INPUT, (INPUT, INPUT), {"x": INPUT}])
def test_a_model_and_an_example_input_are_enough(example_input: Any) -> None:
    made = task(example_input=example_input)
    assert made.example_input is example_input
    assert (made.loss, made.train_batches, made.evaluate, made.evaluate_held_out) == (None, None, None, None)
    assert check_input([INPUT]) == (INPUT,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name of a task is ''; give a non-empty string."),
        ({"name": 3}, "name of a task is 3; give a non-empty string."),
        ({"model": nn.ReLU}, "model of task 'toy' is the class ReLU; give an instance, such as ReLU()."),
        ({"model": None}, "model of task 'toy' is NoneType; give a torch.nn.Module instance."),
        ({"example_input": [INPUT]}, f"example_input of task 'toy' is list; {EXPECTED}"),
        ({"example_input": ()}, f"example_input of task 'toy' is an empty tuple; {EXPECTED}"),
        ({"example_input": (INPUT, 3)}, f"example_input of task 'toy' holds int at 1; {EXPECTED}"),
        ({"example_input": {"m": None}}, f"example_input of task 'toy' holds NoneType at 'm'; {EXPECTED}"),
        (
            {"example_input": {0: INPUT}},
            f"example_input of task 'toy' has the key 0, which is not an argument name; {EXPECTED}",
        ),
        ({"loss": [1]}, "loss of task 'toy' is list; give a function or None."),
        ({"evaluate": 1}, "evaluate of task 'toy' is int; give a function or None."),
        (
            {"train_batches": iter([])},
            "train_batches of task 'toy' is list_iterator, an iterator that ends after one epoch; give a DataLoader, a "
            "list, or a function of the epoch.",
        ),
        (
            {"train_batches": TensorDataset(INPUT)},
            "train_batches of task 'toy' is TensorDataset; give a DataLoader, another iterable of batches, or a "
            "function of the epoch.",
        ),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadTask) as caught:
        task(**fields)
    assert str(caught.value) == message


def test_batches_come_from_a_function_or_a_loader() -> None:
    loader = DataLoader(TensorDataset(INPUT))
    assert task(train_batches=loader).epoch_batches(7) is loader
    assert task(train_batches=lambda epoch: [epoch]).epoch_batches(7) == [7]
    with pytest.raises(BadTask, match="'toy' has no train_batches"):
        task().epoch_batches(0)


def test_a_loss_takes_the_model_if_its_first_parameter_says_so() -> None:
    class Loss:
        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return INPUT

    assert takes_model(lambda model, batch: INPUT)
    assert takes_model(Loss())
    for loss in (None, nn.functional.cross_entropy, nn.CrossEntropyLoss(), lambda outputs, model: INPUT, max):
        assert not takes_model(loss)


class Difference(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_models_are_called_as_their_inputs_say() -> None:
    a, b = torch.tensor(3.0), torch.tensor(1.0)
    assert call_model(Difference(), (a, b)) == call_model(Difference(), {"b": b, "a": a}) == 2
    assert call_model(nn.Identity(), a) is a
    assert split_batch([a, b]) == (a, b)
    assert split_batch({"a": a, "labels": b}) == ({"a": a, "labels": b}, b)
    assert split_batch({"a": a}) == ({"a": a}, None)


class Unrun(Difference):
    def forward(self, a: Any, b: Any) -> Any:
        raise AssertionError("it runs")


def test_inputs_of_any_batch_are_those_that_the_loss_calls_the_model_with() -> None:
    a, b = torch.tensor(3.0), torch.tensor(1.0)
    model = Unrun()
    for loss, found in (
        (lambda model, batch: model(*batch[:2]), (a, b)),
        (lambda model, batch: model(a=batch[0], b=batch[1]), {"a": a, "b": b}),
        (lambda model, batch: model(batch[0], b=batch[1]), {"a": a, "b": b}),
    ):
        assert model_inputs_of(model, (a, b, "name"), loss) == found
    assert model_inputs_of(model, (a, b), lambda model, batch: model(*batch)) is a  # as for every pair
    assert not model._forward_pre_hooks
    with pytest.raises(BadTask, match="the loss does not call the model itself"):
        model_inputs_of(model, (a, b, "name"), lambda model, batch: batch[0])
    with pytest.raises(BadTask, match="a batch is a tuple of 3 items"):
        model_inputs_of(model, (a, b, "name"), lambda outputs, targets: outputs)


def test_another_batch_size_repeats_or_leaves_out_items() -> None:
    two = torch.tensor([[1.0], [2.0]])
    assert with_batch_size(two, 5).flatten().tolist() == [1, 2, 1, 2, 1]  # type: ignore[union-attr]
    assert with_batch_size(two, 1).flatten().tolist() == [1]  # type: ignore[union-attr]
    first, table, scalar = torch.ones(2, 3), torch.ones(7, 3), torch.tensor(1.0)
    changed = with_batch_size((first, table, scalar), 4)
    assert [tuple(tensor.shape) for tensor in changed] == [(4, 3), (7, 3), ()]
    named = with_batch_size({"x": first, "table": table}, 4)
    assert isinstance(named, dict)
    assert {name: len(tensor) for name, tensor in named.items()} == {"x": 4, "table": 7}
    assert [batch_size_of(one) for one in (first, (table, first), named, scalar)] == [2, 7, 4, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("example_input", "batch_size", "message"),
    [
        (torch.ones(2, 3), 0, r"batch size 0 is outside 1\.\.1048576"),
        (torch.ones(2, 3), 10**12, "batch size 1000000000000 is outside"),
        (torch.tensor(1.0), 4, r"has shape \(\), without items"),
        (torch.ones(0, 3), 4, r"has shape \(0, 3\)"),
    ],
)
def test_an_impossible_batch_size_is_refused(example_input: Tensor, batch_size: int, message: str) -> None:
    with pytest.raises(BadTask, match=message):
        with_batch_size(example_input, batch_size)
