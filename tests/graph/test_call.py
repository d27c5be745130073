from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph.calls import Call, amount
from ecc.graph.labels import FROZEN
from ecc.torch_utils import tensors_in

aten = torch.ops.aten


def make(func: Any, *args: Any, result: Any = None, **kwargs: Any) -> Call:
    name = func._schema.name.removeprefix("aten::")
    return Call(func, name, args, kwargs, result, name, name.endswith("_"))


# ---------------------------------------------------------------- arguments by name


def test_arguments_are_found_by_position_keyword_or_default() -> None:
    x, weight = torch.zeros(1, 3, 4, 4), torch.zeros(2, 3, 1, 1)
    call = make(aten.conv2d.default, x, weight, None, [2, 2])
    assert call["input"] is x
    assert call["bias"] is None
    assert call["stride"] == [2, 2]
    assert call["groups"] == 1  # the default of the schema
    assert make(aten.cat.default, [x, x], dim=1)["dim"] == 1
    assert make(aten.sum.dim_IntList, x, [1], dtype=torch.float64)["dtype"] is torch.float64
    assert make(aten.sum.dim_IntList, x, [1])["keepdim"] is False


def test_an_argument_that_an_overload_lacks_has_a_stand_in() -> None:
    x = torch.zeros(2, 3)
    assert make(aten.sum.default, x).get("dim", "none") == "none"
    assert make(aten.sum.dim_IntList, x, [1]).get("dim", "none") == [1]
    with pytest.raises(KeyError):
        make(aten.sum.default, x)["dim"]


def test_tensors_are_collected_from_lists_too() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))
    assert [id(t) for t in make(aten.cat.default, [a, b]).tensors] == [id(a), id(b)]
    assert [id(t) for t in make(aten.index.Tensor, a, [None, b]).tensors] == [id(a), id(b)]
    assert [id(t) for t in make(aten.where.self, a, b, other=c).tensors] == [id(a), id(b), id(c)]
    assert make(aten.zeros.default, [2]).tensors == []


def test_results_are_tensors_whatever_holds_them() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    assert make(aten.relu.default, a, result=b).out is b
    assert len(make(aten.max.dim, a, 0, result=(a, b)).outs) == 2
    assert len(make(aten.split.Tensor, a, 1, result=[a, b]).outs) == 2
    assert make(aten.native_layer_norm.default, a, [2], None, None, 1e-5, result=(a, None, 3)).outs == [a]
    assert make(aten.item.default, a, result=2.0).outs == []


def test_a_call_can_be_run_on_another_tensor() -> None:
    call = make(aten.permute.default, torch.zeros(2, 3, 4), [2, 0, 1])
    labels = torch.arange(24).view(2, 3, 4)
    assert torch.equal(call.rerun(labels), labels.permute(2, 0, 1))


# ---------------------------------------------------------------- amounts


def test_an_amount_is_one_slice_and_its_repetitions() -> None:
    tensor = torch.zeros(2, 4, 5)
    labels, times = amount(tensor, torch.arange(10, 14).view(1, 4, 1).expand(2, 4, 5))
    assert (labels.tolist(), times) == ([10, 11, 12, 13], 10)


def test_a_tensor_without_channels_is_all_repetition() -> None:
    labels, times = amount(torch.zeros(2, 4, 5), None)
    assert (labels.tolist(), times) == ([FROZEN], 40)
    labels, times = amount(torch.zeros(()), None)
    assert (labels.tolist(), times) == ([FROZEN], 1)


# ---------------------------------------------------------------- nested results


@dataclass
class Detections:
    boxes: Tensor
    extra: dict[str, Tensor]
    name: str = "plain"


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


Pair = namedtuple("Pair", "left right")
A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    "value",
    [
        (A, B),
        [A, (B,)],
        {"x": A, "y": [B]},
        OrderedDict(x=A, y=B),
        Pair(A, B),
        Detections(A, {"more": B}),
        Plain([A, Plain(B)]),
        [A, None, 3, "text", B],
    ],
)
def test_every_tensor_of_a_nested_result_is_found(value: Any) -> None:
    assert [id(t) for t in tensors_in(value)] == [id(A), id(B)]


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, Detections, nn.Linear(2, 2), lambda x: x])
def test_what_holds_no_result_gives_none(value: Any) -> None:
    assert list(tensors_in(value)) == []


def test_objects_that_hold_themselves_come_to_an_end() -> None:
    loop = Plain(A)
    loop.again = loop  # type: ignore[attr-defined]
    assert {id(t) for t in tensors_in(loop)} == {id(A)}
