from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadTask
from ecc.task import Task, batch_size_of, with_batch_size

MODEL = nn.Linear(2, 3)
INPUT = torch.zeros(1, 2)


def task(**fields: Any) -> Task:
    return Task(**{"name": "toy", "model": MODEL, "example_input": INPUT, **fields})


def refusal(**fields: Any) -> str:
    with pytest.raises(BadTask) as caught:
        task(**fields)
    return str(caught.value)


def test_a_model_and_an_input_are_enough() -> None:
    plain = task()
    assert plain.model is MODEL
    optional = (plain.loss, plain.train_batches, plain.evaluate, plain.evaluate_held_out)
    assert optional == (None, None, None, None)


@pytest.mark.parametrize("example_input", [INPUT, (INPUT,), (INPUT, INPUT), {"x": INPUT}])
def test_inputs_may_be_a_tensor_a_tuple_or_a_dict(example_input: Any) -> None:
    assert task(example_input=example_input).example_input is example_input


def test_a_task_is_frozen_and_equal_to_itself_alone() -> None:
    one, other = task(), task()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "changed"  # type: ignore[misc]
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Task("toy", MODEL, INPUT)  # type: ignore[call-arg]


def test_dataclasses_replace_checks_again() -> None:
    assert dataclasses.replace(task(), name="other").name == "other"
    with pytest.raises(BadTask):
        dataclasses.replace(task(), name="")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("", "''"), ("  ", "'  '"), (None, "None"), (3, "3")],
)
def test_a_bad_name_is_refused(name: Any, shown: str) -> None:
    assert refusal(name=name) == f"name of a task is {shown}; give a non-empty string."


def test_a_class_in_place_of_a_model_is_refused() -> None:
    message = refusal(model=nn.ReLU)
    assert message == "model of task 'toy' is the class ReLU; give an instance: ReLU(...)."


@pytest.mark.parametrize(("model", "shown"), [(torch.relu, "builtin_function_or_method"), (None, "NoneType")])
def test_what_is_no_module_is_refused(model: Any, shown: str) -> None:
    assert refusal(model=model) == f"model of task 'toy' is {shown}; give a torch.nn.Module instance."


WAYS = "give a tensor, a tuple of tensors or a dict of tensors by argument name."


@pytest.mark.parametrize(
    ("example_input", "problem"),
    [
        (None, "is NoneType"),
        ([INPUT], "is list"),
        ((), "is an empty tuple"),
        ({}, "is an empty dict"),
        ((INPUT, 3), "holds int at 1"),
        (((INPUT,),), "holds tuple at 0"),
        ({"x": INPUT, "mask": None}, "holds NoneType at 'mask'"),
        ({0: INPUT}, "has the key 0, which is no argument name"),
    ],
)
def test_a_bad_example_input_is_refused(example_input: Any, problem: str) -> None:
    assert refusal(example_input=example_input) == f"example_input of task 'toy' {problem}; {WAYS}"


@pytest.mark.parametrize("field", ["loss", "train_batches", "evaluate", "evaluate_held_out"])
def test_what_cannot_be_called_is_refused(field: str) -> None:
    message = refusal(**{field: [1, 2]})
    assert message == f"{field} of task 'toy' is list; give a function or leave it None."


def test_batches_without_a_loss_are_refused() -> None:
    message = refusal(train_batches=lambda epoch: [])
    assert message == "task 'toy' has train_batches but no loss; training needs both."


def test_every_field_has_its_line_of_documentation() -> None:
    source = inspect.getsource(Task)
    for field in dataclasses.fields(Task):
        assert re.search(rf'\n    {field.name}: .*\n    """.+"""\n', source), field.name


# ---------------------------------------------------------------- another batch size


def test_items_are_repeated_or_cut_to_a_batch() -> None:
    two = torch.tensor([[1.0], [2.0]])
    assert with_batch_size(two, 5).flatten().tolist() == [1, 2, 1, 2, 1]  # type: ignore[union-attr]
    assert with_batch_size(two, 1).flatten().tolist() == [1]  # type: ignore[union-attr]


def test_only_tensors_with_the_same_first_axis_are_batched() -> None:
    first, table, scalar = torch.ones(2, 3), torch.ones(7, 3), torch.tensor(1.0)
    changed = with_batch_size((first, table, scalar), 4)
    assert [tuple(tensor.shape) for tensor in changed] == [(4, 3), (7, 3), ()]
    named = with_batch_size({"x": first, "table": table}, 4)
    assert isinstance(named, dict)
    assert {name: len(tensor) for name, tensor in named.items()} == {"x": 4, "table": 7}


@pytest.mark.parametrize(
    ("example_input", "batch", "text"),
    [
        (torch.ones(2, 3), 0, "batch 0 is below 1"),
        (torch.ones(2, 3), 10**12, "batch 1000000000000 is above 1048576"),
        (torch.tensor(1.0), 4, r"has shape \(\): no batch can be made of it"),
        (torch.ones(0, 3), 4, r"has shape \(0, 3\)"),
    ],
)
def test_an_impossible_batch_is_refused(example_input: torch.Tensor, batch: int, text: str) -> None:
    with pytest.raises(BadTask, match=text):
        with_batch_size(example_input, batch)


def test_the_batch_of_an_input() -> None:
    assert batch_size_of(torch.ones(5, 3)) == batch_size_of((torch.ones(5, 3), torch.ones(7))) == 5
    assert batch_size_of({"x": torch.ones(2, 3)}) == 2
    assert batch_size_of(torch.tensor(1.0)) == 1
