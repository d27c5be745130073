from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ecc.graph.calls import Call, quick_result


class Twins(TorchDispatchMode):
    """Runs every operator and works its result out as well."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, Tensor, Tensor | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        call = Call(func, name.rstrip("_"), args, kwargs or {}, None, name, name.endswith("_"))
        quick = quick_result(call)
        result = func(*args, **(kwargs or {}))
        self.pairs.append((name, result, quick))
        return result


def twins(function: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    tensors = [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]
    with torch.inference_mode(), Twins() as seen:
        function(*tensors)
    return seen.pairs


KNOWN: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "relu": (F.relu, [(2, 4, 5)]),
    "relu in place": (lambda x: x.relu_(), [(2, 4, 5)]),
    "gelu": (F.gelu, [(2, 4)]),
    "batch norm": (F.batch_norm, [(2, 4, 5, 5), (4,), (4,)]),
    "layer norm": (lambda x: F.layer_norm(x, (5,)), [(2, 4, 5)]),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), [(2, 4)]),
    "add": (torch.add, [(2, 4, 5), (2, 4, 5)]),
    "add that broadcasts": (torch.add, [(2, 4, 5), (4, 1)]),
    "mul that broadcasts both": (torch.mul, [(2, 1, 5), (4, 1)]),
    "sub": (torch.sub, [(2, 4), (4,)]),
    "add in place": (lambda x, y: x.add_(y), [(2, 4), (4,)]),
    "conv2d": (F.conv2d, [(2, 3, 9, 8), (6, 3, 3, 3)]),
    "conv2d of stride 2": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 3, 9, 8), (6, 3, 3, 3)]),
    "conv2d dilated": (lambda x, w: F.conv2d(x, w, dilation=(2, 1)), [(2, 3, 9, 8), (6, 3, 3, 2)]),
    "conv2d grouped": (lambda x, w: F.conv2d(x, w, groups=3), [(2, 6, 5, 5), (9, 2, 1, 1)]),
    "conv2d uneven": (lambda x, w: F.conv2d(x, w, padding=(0, 2), stride=(3, 1)), [(1, 3, 9, 8), (6, 3, 2, 5)]),
    "linear": (F.linear, [(2, 4), (6, 4)]),
    "linear on a sequence": (F.linear, [(2, 5, 4), (6, 4)]),
    "linear on a vector": (F.linear, [(4,), (6, 4)]),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 4, 8, 8)]),
    "adaptive pooling without a batch": (lambda x: F.adaptive_avg_pool2d(x, 1), [(4, 8, 8)]),
    "adaptive pooling of a line": (lambda x: F.adaptive_avg_pool1d(x, 3), [(2, 4, 8)]),
    "mean": (lambda x: x.mean((2, 3)), [(2, 4, 5, 6)]),
    "mean that keeps": (lambda x: x.mean((-1, 1), keepdim=True), [(2, 4, 5, 6)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_worked_out_is_what_torch_gives(name: str, dtype: torch.dtype) -> None:
    function, shapes = KNOWN[name]
    ((_, result, quick),) = twins(function, *shapes, dtype=dtype)
    assert quick is not None
    assert (quick.shape, quick.dtype, quick.device) == (result.shape, result.dtype, result.device)


@pytest.mark.parametrize("function", [lambda x: x.relu_(), lambda x: x.add_(x)])
def test_an_operator_in_place_gives_its_argument(function: Any) -> None:
    ((_, result, quick),) = twins(function, (2, 4))
    assert quick is result


UNUSUAL: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "add of a number": (lambda x: x + 1, [(2, 4)]),
    "mean of everything": (lambda x: x.mean(), [(2, 4)]),
    "mean in another precision": (lambda x: x.mean((1,), dtype=torch.float64), [(2, 4)]),
    "adaptive pooling of one axis": (lambda x: F.adaptive_avg_pool2d(x, (2, None)), [(2, 4, 8, 8)]),
    "conv2d with padding by name": (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 9, 8), (6, 3, 3, 3)]),
    "conv1d": (F.conv1d, [(2, 3, 9), (6, 3, 3)]),
    "sin": (torch.sin, [(2, 4)]),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_the_unusual_is_left_to_torch_or_worked_out_alike(name: str) -> None:
    function, shapes = UNUSUAL[name]
    for _, result, quick in twins(function, *shapes):
        assert quick is None or (quick.shape, quick.dtype) == (result.shape, result.dtype)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.conv2d, [(2, 5, 9, 8), (6, 3, 3, 3)]),  # channels that do not fit
        (F.conv2d, [(2, 3, 2, 2), (6, 3, 3, 3)]),  # a kernel larger than the image
        (F.linear, [(2, 5), (6, 4)]),
        (torch.add, [(2, 4), (3,)]),
    ],
)
def test_what_torch_refuses_is_not_worked_out(function: Any, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError):
        twins(function, *shapes)


def test_real_tensors_and_whole_numbers_are_left_to_torch() -> None:
    with torch.inference_mode(), Twins() as seen:
        F.relu(torch.zeros(2, 4))
        torch.add(torch.zeros(2, device="meta", dtype=torch.long), torch.zeros(2, device="meta"))
        torch.add(torch.zeros(2, device="meta"), torch.zeros(2, device="meta", dtype=torch.float64))
    assert [quick for _, _, quick in seen.pairs[-1:]] == [None]
    assert all(quick is None for name, _, quick in seen.pairs if name in ("relu", "add"))
