from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.graph.ops import elementwise, linear, reduce, registry, shape
from graph.following import Following

aten = torch.ops.aten

NAMES = [name for names in registry._FAMILIES.values() for name in names]
OPERATORS = {
    name.removeprefix("aten::").partition(".")[0]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("aten::")
}
ONLY_IN_SOME_VERSIONS: set[str] = set()  # names that a supported torch has and this one may not


def rule(func: Any) -> Any:
    return registry.rule_for(func, func._schema.name.removeprefix("aten::"))


# ---------------------------------------------------------------- the table itself


def test_every_name_is_an_operator() -> None:
    unknown = {name for name in NAMES if name not in OPERATORS and f"{name}_" not in OPERATORS}
    assert unknown - ONLY_IN_SOME_VERSIONS == set()


def test_no_operator_has_two_rules() -> None:
    assert [name for name, times in Counter(NAMES).items() if times > 1] == []


def test_names_stand_for_in_place_variants_too() -> None:
    assert [name for name in NAMES if name.endswith("_")] == []


def test_permutations_are_moves() -> None:
    for name in registry.PERMUTES:
        assert registry.is_moving(f"{name}@net.py:1"), name


def test_every_rule_of_moving_and_following_is_in_the_table() -> None:
    assert set(registry._FAMILIES) >= registry.FOLLOWING >= registry.MOVING


# ---------------------------------------------------------------- finding a rule


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.conv2d.default, linear.convolution),
        (aten.linear.default, linear.linear),
        (aten.mm.default, linear.matmul),
        (aten.batch_norm.default, elementwise.channel_norm),
        (aten.mean.dim, reduce.reduction),
        (aten.max.dim, reduce.reduction),
        (aten.max.default, reduce.reduction),
        (aten.softmax.int, reduce.along_axis),
        (aten.max_pool2d.default, reduce.spatial),
        (aten.clone.default, reduce.same),
        (aten.zeros_like.default, reduce.same),
        (aten.permute.default, shape.move),
        (aten.view.default, shape.reshape),
        (aten.cat.default, shape.cat),
        (aten.copy_.default, elementwise.copy_into),
        (aten.squeeze_.dim, shape.move),
        (aten.dropout_.default, reduce.same),
        (aten.fill_.Scalar, reduce.same),
        (aten.index.Tensor, shape.index),
    ],
)
def test_an_operator_finds_its_rule_in_every_overload(func: Any, expected: Any) -> None:
    assert rule(func) is expected


@pytest.mark.parametrize(
    "func",
    [
        aten.relu.default,
        aten.relu_.default,
        aten.add.Tensor,
        aten.add_.Tensor,
        aten.sin.default,
        aten.tanh_.default,
        aten.bitwise_and.Tensor,
        aten.max.other,  # the larger of two tensors, although `max` is a reduction
        aten.min.other,
    ],
)
def test_what_torch_calls_pointwise_needs_no_entry(func: Any) -> None:
    assert torch.Tag.pointwise in func.tags
    assert rule(func) is elementwise.pointwise is registry.POINTWISE


@pytest.mark.parametrize("func", [aten.linalg_qr.default, aten.einsum.default, aten.fft_rfft.default])
def test_other_operators_have_none(func: Any) -> None:
    assert rule(func) is None


@pytest.mark.parametrize(
    ("line", "moves"),
    [
        ("view@net.py:12", True),
        ("chunk@net.py:3", True),
        ("slice@", True),
        ("cat@net.py:1", False),
        ("nope@x:1", False),
    ],
)
def test_lines_of_code_that_only_move_data(line: str, moves: bool) -> None:
    assert registry.is_moving(line) is moves


# ---------------------------------------------------------------- operators that torch takes apart


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        (lambda x: torch.hstack([x, x]), 2),
        (lambda x: F.normalize(x, dim=2), 1),
        (lambda x: F.softmin(x, dim=2), 1),
        (lambda x: x.swapaxes(1, 2).swapaxes(2, 1), 1),
        (lambda x: x.expand_as(x), 1),
        (F.softsign, 1),
    ],
)
def test_composite_operators_pass_channels_through_their_parts(function: Any, copies: int) -> None:
    following = Following()
    out = following.run(function, following.channels(2, 4, 5))
    assert following.along(out) == following.axis("x", 0) * copies
    assert following.frozen() == {}


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (lambda x: F.normalize(x, dim=1), "linalg_vector_norm"),
        (lambda x: F.softmin(x, dim=1), "softmax"),
        (lambda x: F.local_response_norm(x, 3), "avg_pool"),
    ],
)
def test_composite_operators_freeze_channels_in_the_part_that_mixes_them(function: Any, part: str) -> None:
    following = Following()
    following.run(function, following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)
    assert all(part in why for why in following.frozen().values())


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("args", "kwargs", "mixed"),
    [
        ((torch.zeros(2), torch.zeros(2)), {}, False),
        ((torch.zeros(2, device="meta"), 3), {}, False),
        ((torch.zeros(2, device="meta"), torch.zeros(2)), {}, True),
        (([torch.zeros(2, device="meta"), torch.zeros(2)],), {}, True),
        ((torch.zeros(2, device="meta"),), {"other": torch.zeros(2)}, True),
        ((torch.zeros(2, device="meta"), [None, torch.zeros(2)]), {}, True),
        ((), {}, False),
    ],
)
def test_meta_tensors_that_meet_real_ones_are_seen(
    args: tuple[Any, ...], kwargs: dict[str, Tensor], mixed: bool
) -> None:
    assert registry.mixes_devices(args, kwargs) is mixed
