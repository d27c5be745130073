from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.graph.labels import FROZEN, Role
from graph.following import Following, merged

READ, WRITE, CARRY = {Role.CONSUMER}, {Role.PRODUCER}, {Role.PER_CHANNEL}


def sizes(factors: list[Tensor]) -> list[int]:
    return [factor.numel() for factor in factors]


# ---------------------------------------------------------------- convolution


@pytest.mark.parametrize(
    ("convolve", "space", "kernel"),
    [(F.conv1d, (7,), (3,)), (F.conv2d, (7, 7), (3, 3)), (F.conv3d, (7, 7, 7), (3, 3, 3))],
)
def test_a_convolution_reads_axis_1_and_writes_axis_0(convolve: Any, space: Any, kernel: Any) -> None:
    following = Following()
    x, weight = following.channels(2, 4, *space), following.parameter("w", 6, 4, *kernel)
    bias = following.parameter("b", 6)
    out = following.run(convolve, x, weight, bias)
    assert following.roles("w") == {0: WRITE, 1: READ}
    assert following.roles("b") == {0: WRITE}
    assert following.along(out) == following.axis("w", 0)
    expected = merged(following.axis("x", 0), following.axis("w", 1)) + merged(
        following.axis("w", 0), following.axis("b", 0)
    )
    assert following.tied() == sorted(expected)
    positions, taps = torch.Size(out.shape[2:]).numel() * 2, torch.Size(kernel).numel()
    assert (following.record.kind, following.record.macs) == ("conv", positions * taps)
    assert sizes(following.record.factors) == [4, 6]
    assert following.record.tensors == ["w", "b"]


@pytest.mark.parametrize(
    ("convolve", "space"),
    [(F.conv_transpose1d, (5,)), (F.conv_transpose2d, (5, 5)), (F.conv_transpose3d, (5, 5, 5))],
)
def test_a_transposed_convolution_reads_axis_0_and_writes_axis_1(convolve: Any, space: Any) -> None:
    following = Following()
    x, weight = following.channels(2, 4, *space), following.parameter("w", 4, 6, *[2] * len(space))
    out = following.run(convolve, x, weight, None, 2)
    assert following.roles("w") == {0: READ, 1: WRITE}
    assert following.along(out) == following.axis("w", 1)
    assert following.tied() == merged(following.axis("x", 0), following.axis("w", 0))
    assert following.record.macs == 2 * torch.Size(space).numel() * 2 ** len(space)  # each input pixel, each tap


def test_an_image_without_a_batch_is_convolved_alike() -> None:
    following = Following()
    out = following.run(F.conv2d, following.channels(4, 7, 7, axis=0), following.parameter("w", 6, 4, 3, 3))
    assert following.along(out, axis=0) == following.axis("w", 0)


def test_the_first_convolution_cannot_lose_what_it_reads() -> None:
    following = Following()
    following.run(F.conv2d, following.input(2, 3, 7, 7), following.parameter("w", 6, 3, 3, 3))
    assert following.frozen() == dict.fromkeys(following.axis("w", 1), "its input is not prunable")


@pytest.mark.parametrize(("outputs", "per_group"), [(6, 1), (12, 2)])
def test_a_depthwise_convolution_carries_each_channel(outputs: int, per_group: int) -> None:
    following = Following()
    x, weight = following.channels(2, 6, 7, 7), following.parameter("w", outputs, 1, 3, 3)
    out = following.run(F.conv2d, x, weight, None, groups=6)
    assert following.roles("w") == {0: CARRY}
    assert following.along(out) == following.axis("w", 0)
    rows = torch.tensor(following.axis("w", 0)).view(6, per_group).t().tolist()
    assert following.tied() == merged(following.axis("x", 0), *rows)
    assert (following.record.kind, following.record.macs) == ("grouped conv", 2 * 25 * 9)
    assert sizes(following.record.factors) == [outputs]


def test_a_grouped_convolution_ties_each_of_its_groups() -> None:
    following = Following()
    x, weight = following.channels(2, 4, 7, 7), following.parameter("w", 6, 2, 3, 3)
    following.run(F.conv2d, x, weight, following.parameter("b", 6), groups=2)
    ins, rows, bias = following.axis("x", 0), following.axis("w", 0), following.axis("b", 0)
    assert following.tied() == [ins[:2] + rows[:3] + bias[:3], ins[2:] + rows[3:] + bias[3:]]
    assert following.record.macs == 2 * 25 * 9 * 2


def test_a_grouped_transposed_convolution_ties_each_of_its_groups() -> None:
    following = Following()
    x, weight = following.channels(2, 4, 5, 5), following.parameter("w", 4, 3, 2, 2)
    out = following.run(lambda *a: F.conv_transpose2d(*a, stride=2, groups=2), x, weight)
    ins, rows = following.axis("x", 0), following.axis("w", 0)
    assert following.tied() == [ins[:2] + rows[:2], ins[2:] + rows[2:]]
    assert following.along(out) == [rows[0]] * 3 + [rows[2]] * 3


def test_channels_along_space_cannot_be_convolved() -> None:
    following = Following()
    following.run(F.conv2d, following.channels(2, 3, 7, 7, axis=3), following.parameter("w", 6, 3, 3, 3))
    assert {following.frozen()[label] for label in following.axis("x", 0)} == {"conv2d slides over its axis"}


def test_a_computed_weight_freezes_what_it_reads() -> None:
    following = Following()
    x, weight = following.channels(2, 4, 7, 7), following.channels(6, 4, 3, 3, axis=0, name="made")
    out = following.run(F.conv2d, x, weight)
    assert set(following.frozen().values()) == {"the weight of conv2d is computed"}
    assert sorted(following.frozen()) == following.axis("x", 0) + following.axis("made", 0)
    assert (following.labels(out) == FROZEN).all()


# ---------------------------------------------------------------- linear layers in all their forms


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, int]]] = {
    "linear": (F.linear, (6, 4)),
    "matmul": (torch.matmul, (4, 6)),
    "matmul with a transposed weight": (lambda x, w: x @ w.t(), (6, 4)),
    "matmul with mT": (lambda x, w: x @ w.mT, (6, 4)),
    "linear with a transposed weight": (lambda x, w: F.linear(x, w.transpose(0, 1)), (4, 6)),
}


@pytest.mark.parametrize("shape", [(2, 4), (2, 5, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize("name", FORMS)
def test_a_linear_layer_reads_and_writes_the_last_axis(name: str, shape: tuple[int, ...]) -> None:
    function, weight_shape = FORMS[name]
    following = Following()
    out = following.run(
        function, following.channels(*shape, axis=len(shape) - 1), following.parameter("w", *weight_shape)
    )
    writes, reads = (0, 1) if weight_shape == (6, 4) else (1, 0)
    assert following.roles("w") == {writes: WRITE, reads: READ}
    assert following.along(out, axis=-1) == following.axis("w", writes)
    assert following.tied() == merged(following.axis("x", 0), following.axis("w", reads))
    (record,) = [r for r in following.tracer.records if r.kind == "linear"]
    assert record.macs == torch.Size(shape[:-1]).numel()
    assert sizes(record.factors) == [4, 6]


@pytest.mark.parametrize(
    "function",
    [
        F.linear,
        lambda x, w, b: torch.addmm(b, x, w.t()),
        lambda x, w, b: x @ w.t() + b,
    ],
)
def test_a_bias_is_written_with_its_row(function: Callable[..., Tensor]) -> None:
    following = Following()
    x, w, b = following.channels(2, 4), following.parameter("w", 6, 4), following.parameter("b", 6)
    following.run(function, x, w, b)
    assert merged(following.axis("w", 0), following.axis("b", 0))[0] in following.tied()
    assert len(following.tied()) == 4 + 6


def test_a_layer_along_another_axis_than_the_channels_passes_them_and_stays_whole() -> None:
    following = Following()
    x, w = following.channels(2, 6, 4), following.parameter("w", 5, 4)  # token mixing: channels on axis 1
    out = following.run(F.linear, x, w)
    assert out.shape == (2, 6, 5)
    assert following.along(out) == following.axis("x", 0)
    assert sorted(following.frozen()) == sorted(following.axis("w", 0) + following.axis("w", 1))
    assert set(following.frozen().values()) == {"linear runs along another axis than the channels"}


def test_a_layer_over_channels_that_lie_on_two_axes_freezes_them() -> None:
    following = Following()
    following.run(F.linear, following.distinct(2, 4), following.parameter("w", 5, 4))
    assert {following.frozen()[label] for label in following.axis("x", 0)} == {"linear mixes it along two axes"}


def test_a_linear_layer_with_a_computed_weight_freezes_its_input() -> None:
    following = Following()
    x, w = following.channels(2, 4), following.channels(6, 4, axis=0, name="made")
    following.run(F.linear, x, w)
    assert sorted(following.frozen()) == following.axis("x", 0) + following.axis("made", 0)


# ---------------------------------------------------------------- products of activations


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm])
@pytest.mark.parametrize(
    ("left_axis", "right_axis", "survivor"), [(2, 0, None), (1, 0, "a"), (0, 1, None), (0, 2, "b"), (0, 0, None)]
)
def test_channels_pass_a_product_beside_the_summed_axis(
    product: Any, left_axis: int, right_axis: int, survivor: str | None
) -> None:
    """(batch, m, k) @ (batch, k, n); axis 0 means that this factor has no channels."""
    following = Following()
    a = following.channels(2, 3, 4, axis=left_axis, name="a") if left_axis else following.input(2, 3, 4)
    b = following.channels(2, 4, 5, axis=right_axis, name="b") if right_axis else following.input(2, 4, 5)
    out = following.run(product, a, b)
    if survivor is None:
        assert (following.labels(out) == FROZEN).all()
        assert set(following.frozen().values()) <= {f"it is multiplied away in {product.__name__}"}
        assert len(following.frozen()) == (4 if left_axis or right_axis else 0)
    else:
        assert following.along(out, axis=1 if survivor == "a" else 2) == following.axis(survivor, 0)
        assert following.frozen() == {}


def test_of_two_factors_with_channels_one_is_frozen() -> None:
    following = Following()
    a, b = following.channels(2, 3, 4, axis=1, name="a"), following.channels(2, 4, 5, axis=2, name="b")
    out = following.run(torch.bmm, a, b)
    assert sorted(following.frozen()) == following.axis("a", 0)
    assert following.along(out, axis=2) == following.axis("b", 0)


def test_the_work_of_a_product_shrinks_with_the_channels_that_pass_it() -> None:
    following = Following()
    following.run(torch.bmm, following.input(2, 3, 4), following.channels(2, 4, 5, axis=2, name="b"))
    assert following.record.macs * 5 == 2 * 3 * 4 * 5
    assert [factor.tolist() for factor in following.record.factors] == [following.axis("b", 0)]


def test_attention_sums_query_and_key_away_and_passes_the_value() -> None:
    following = Following()
    query, key, value = (following.channels(2, 3, 5, 4, axis=3, name=name) for name in "qkv")
    out = following.run(F.scaled_dot_product_attention, query, key, value)
    assert following.along(out, axis=3) == following.axis("v", 0)
    assert sorted(following.frozen()) == following.axis("q", 0) + following.axis("k", 0)


def test_heads_of_the_value_pass_attention() -> None:
    following = Following()
    out = following.run(
        F.scaled_dot_product_attention,
        following.input(2, 3, 5, 4),
        following.input(2, 3, 5, 4),
        following.channels(2, 3, 5, 4, axis=1, name="v"),
    )
    assert following.along(out, axis=1) == following.axis("v", 0)
    assert following.frozen() == {}


def test_baddbmm_unites_what_is_added_with_the_product() -> None:
    following = Following()
    added = following.channels(2, 3, 5, axis=2, name="c")
    following.run(torch.baddbmm, added, following.input(2, 3, 4), following.channels(2, 4, 5, axis=2, name="b"))
    assert following.tied() == merged(following.axis("c", 0), following.axis("b", 0))


# ---------------------------------------------------------------- tables


def test_the_columns_of_an_embedding_are_channels() -> None:
    following = Following()
    index = torch.zeros(2, 5, dtype=torch.long)
    out = following.run(F.embedding, index, following.parameter("w", 10, 4))
    assert out.shape == (2, 5, 4)
    assert following.along(out, axis=2) == following.axis("w", 1)
    assert following.roles("w") == {1: WRITE}
