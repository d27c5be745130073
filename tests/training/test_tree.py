from __future__ import annotations

import json
from collections import OrderedDict, namedtuple

import pytest
import torch

from ecc.errors import BadFile
from ecc.training.state_tree import FILE_TYPES, as_dtype, tree_of, value_of


def test_a_tree_is_json_and_says_where_each_tensor_belongs() -> None:
    weight = torch.ones(2)
    tree, tensors = tree_of({"a": [weight, 1, None], 3: (True, float("inf")), "b": {"again": weight}})
    assert tree == {
        "dict": [
            ["a", [{"tensor": 0}, 1, None]],
            [3, {"tuple": [True, {"float": "inf"}]}],
            ["b", {"dict": [["again", {"tensor": 0}]]}],
        ]
    }
    assert len(tensors) == 1
    back = value_of(json.loads(json.dumps(tree, allow_nan=False)), dict(enumerate(tensors)))
    assert back["a"][0] is back["b"]["again"] is tensors[0]
    assert back[3] == (True, float("inf"))
    assert type(back[3]) is tuple


def test_a_view_of_the_same_memory_is_another_tensor() -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    for other in (weight.t(), weight[:1], weight.view(torch.int32), weight.reshape(4)):
        assert len(tree_of([weight, other])[1]) == 2
    assert len(tree_of([weight, weight.detach(), torch.nn.Parameter(weight)])[1]) == 1


def test_empty_tensors_are_not_confused() -> None:
    tree, tensors = tree_of([torch.empty(0, 3), torch.empty(0, 2)])
    assert [tuple(tensor.shape) for tensor in value_of(tree, dict(enumerate(tensors)))] == [(0, 3), (0, 2)]


def test_types_that_files_do_not_know_are_kept_as_bytes() -> None:
    value = torch.tensor([[1 + 2j, 3j]], dtype=torch.complex128)
    assert value.dtype not in FILE_TYPES
    tree, (tensor,) = tree_of(value)
    assert tree == {"bytes": {"tensor": 0, "dtype": "complex128", "shape": [1, 2]}}
    assert torch.equal(value_of(tree, {0: as_dtype(tensor.reshape(-1), torch.uint8)}), value)


def test_an_ordered_dict_comes_back_as_a_dict() -> None:
    tree, _ = tree_of(OrderedDict(b=1, a=2))
    assert list(value_of(tree, {}).items()) == [("b", 1), ("a", 2)]


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set, which a state cannot hold"),
        ({"a": Pair(1, 2)}, r"state\['a'\] is a Pair"),
        ([lambda: 0], r"state\[0\] is a function"),
        ({(1, 2): 3}, "state has a tuple for a key"),
        ([torch.eye(2).to_sparse()], r"state\[0\] is a torch.sparse_coo tensor, .*; make it dense"),
        ([torch.empty(2, device="meta")], r"state\[0\] is a meta tensor"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(state: object, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        tree_of(state)


def test_a_circle_is_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(BadFile, match="deeper than 100 levels"):
        tree_of(circle)


@pytest.mark.parametrize("tree", [{"exec": "rm"}, {"tensor": 4}, {"dict": [], "tuple": []}, {"bytes": {"tensor": 0}}])
def test_a_damaged_tree_is_an_error(tree: object) -> None:
    with pytest.raises((KeyError, ValueError)):
        value_of(tree, {0: torch.zeros(1, dtype=torch.uint8)})
