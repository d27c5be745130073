from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.graph.labels import FROZEN, Role
from graph.following import Following, merged

# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("space", [(), (5,), (5, 5), (5, 5, 5)])
def test_batch_norm_carries_each_channel_with_its_four_numbers(space: tuple[int, ...], training: bool) -> None:
    following = Following()
    x = following.channels(2, 4, *space)
    mean, var, weight, bias = (following.parameter(name, 4) for name in ("mean", "var", "weight", "bias"))
    out = following.run(F.batch_norm, x, mean, var, weight, bias, training)
    assert following.along(out) == following.axis("x", 0)
    names = ("x", "weight", "bias", "mean", "var")
    assert following.tied() == merged(*(following.axis(name, 0) for name in names))
    assert following.roles("weight") == {0: {Role.PER_CHANNEL}}
    assert (following.record.kind, following.record.macs) == ("norm", 0)


def test_batch_norm_without_parameters_lets_channels_pass() -> None:
    following = Following()
    x = following.channels(2, 4, 5)
    mean, var = following.parameter("mean", 4), following.parameter("var", 4)
    out = following.run(F.batch_norm, x, mean, var)
    assert following.along(out) == following.axis("x", 0)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_statistics_across_the_channels_freeze_them(norm: Any) -> None:
    following = Following()
    mean, var = following.parameter("mean", 3), following.parameter("var", 3)
    following.run(norm, following.channels(2, 3, 6, axis=2), mean, var)
    assert all("takes statistics across it" in following.frozen()[label] for label in following.axis("x", 0))


def test_instance_norm_carries_each_channel() -> None:
    following = Following()
    weight, bias = following.parameter("weight", 4), following.parameter("bias", 4)
    out = following.run(F.instance_norm, following.channels(2, 4, 6), None, None, weight, bias)
    assert following.along(out) == following.axis("x", 0)
    assert following.tied() == merged(*(following.axis(name, 0) for name in ("x", "weight", "bias")))


@pytest.mark.parametrize(("axis", "frozen"), [(1, False), (2, True)])
def test_layer_norm_freezes_the_channels_it_normalises_over(axis: int, frozen: bool) -> None:
    following = Following()
    x = following.channels(2, 4, 6, axis=axis)
    out = following.run(F.layer_norm, x, (6,), following.parameter("weight", 6), following.parameter("bias", 6))
    if frozen:
        assert set(following.frozen().values()) == {
            "layer_norm normalises over it, so a dead channel would leak",
        }
        assert sorted(following.frozen()) == following.axis("x", 0)
    else:
        assert following.along(out, axis) == following.axis("x", 0)
        assert following.frozen() == {}


def test_rms_norm_freezes_too() -> None:
    following = Following()
    following.run(F.rms_norm, following.channels(2, 6), (6,), following.parameter("weight", 6))
    assert sorted(following.frozen()) == following.axis("x", 0)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_freezes_its_channels(groups: int) -> None:
    following = Following()
    following.run(F.group_norm, following.channels(2, 6, 5), groups)
    assert sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- slopes


def test_prelu_with_a_slope_for_each_channel_carries_them() -> None:
    following = Following()
    out = following.run(F.prelu, following.channels(2, 4, 5), following.parameter("slope", 4))
    assert following.along(out) == following.axis("x", 0)
    assert following.tied() == merged(following.axis("x", 0), following.axis("slope", 0))


def test_prelu_with_one_slope_ties_nothing() -> None:
    following = Following()
    out = following.run(F.prelu, following.channels(2, 4, 5), following.parameter("slope", 1))
    assert following.along(out) == following.axis("x", 0)
    assert following.tied() == []


# ---------------------------------------------------------------- elementwise


OF_ONE: list[Any] = [
    *(F.relu, F.gelu, F.silu, F.hardswish, F.elu, F.leaky_relu, F.softplus, F.mish, F.logsigmoid, F.dropout),
    *(torch.sigmoid, torch.tanh, torch.exp, torch.neg),
    *(lambda x: x * 2, lambda x: 1 - x, lambda x: x**2, lambda x: x.clamp(0, 6), lambda x: x.relu_()),
    *(lambda x: torch.where(x > 0, x, 0.0), lambda x: x.masked_fill(x < 0, 0.0)),
]
OF_TWO: list[Any] = [
    *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.max, torch.pow, torch.atan2),
    *(lambda a, b: a.add_(b), lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.lerp(a, b, 0.5)),
    *(lambda a, b: torch.addcmul(a, a, b), lambda a, b: a.copy_(b)),
]


@pytest.mark.parametrize("function", OF_ONE)
def test_functions_of_one_tensor_pass_channels(function: Any) -> None:
    following = Following()
    out = following.run(function, following.channels(2, 4, 5))
    assert following.along(out) == following.axis("x", 0)
    assert following.tied() == []
    assert following.frozen() == {}


@pytest.mark.parametrize("function", OF_TWO)
def test_what_meets_lives_and_dies_together(function: Any) -> None:
    following = Following()
    a, b = following.channels(2, 4, 5, name="a"), following.channels(2, 4, 5, name="b")
    following.run(function, a, b)
    assert following.tied() == merged(following.axis("a", 0), following.axis("b", 0))
    assert following.frozen() == {}


def test_a_gate_for_each_channel_is_tied_to_it() -> None:
    following = Following()
    x, gate = following.channels(2, 4, 5, 5), following.channels(2, 4, 1, 1, name="gate")
    out = following.run(torch.mul, gate, x)
    assert following.along(out) in (following.axis("x", 0), following.axis("gate", 0))
    assert following.tied() == merged(following.axis("x", 0), following.axis("gate", 0))


def test_what_meets_the_network_input_is_frozen() -> None:
    following = Following()
    following.run(torch.add, following.channels(2, 4, 5), following.input(2, 4, 5))
    assert following.frozen() == dict.fromkeys(following.axis("x", 0), "it meets something that cannot be cut in add")


def test_what_meets_one_value_for_each_pixel_passes() -> None:
    following = Following()
    out = following.run(torch.mul, following.channels(2, 4, 5), following.input(2, 1, 5))
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}


def test_a_single_channel_that_scales_many_is_frozen() -> None:
    following = Following()
    x, gate = following.channels(2, 4, 5), following.channels(2, 1, 5, name="gate")
    out = following.run(torch.mul, x, gate)
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == dict.fromkeys(following.axis("gate", 0), "mul broadcasts it over other channels")


def test_channels_of_two_axes_that_cross_are_not_tied() -> None:
    following = Following()
    rows, columns = following.channels(2, 4, 1, name="rows"), following.channels(2, 1, 5, axis=2, name="columns")
    out = following.run(torch.mul, rows, columns)
    assert following.tied() == []
    assert len(following.frozen()) in (4, 5)  # one of the two goes on
    assert out.shape == (2, 4, 5)


def test_numbers_belong_to_no_channel() -> None:
    following = Following()
    out = following.run(lambda x: x * torch.ones(()) + torch.zeros(1), following.channels(2, 4, 5))
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}


# ---------------------------------------------------------------- writing into tensors


def test_writing_into_an_empty_tensor_freezes() -> None:
    following = Following()

    def fill(x: Tensor) -> Tensor:
        out = torch.zeros(2, 8, 5)
        out[:, :4] = x
        return out

    following.run(fill, following.channels(2, 4, 5))
    assert all("writes it into part of another tensor" in why for why in following.frozen().values())
    assert sorted(following.frozen()) == following.axis("x", 0)


def test_adding_into_part_of_an_empty_tensor_freezes() -> None:
    following = Following()

    def fill(x: Tensor) -> Tensor:
        out = torch.zeros(2, 8, 5)
        out[:, :4] += x
        return out

    following.run(fill, following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)


def test_a_tensor_that_was_written_into_keeps_its_new_labels() -> None:
    following = Following()
    x = following.channels(2, 4, 5)

    def fill(x: Tensor) -> Tensor:
        out = torch.empty(x.shape)
        out.copy_(x)
        return out + 0

    out = following.run(fill, x)
    labels = following.labels(out)
    assert labels is not None
    assert (labels == FROZEN).all()
    assert sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- parameters that meet channels


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((4, 1, 1), 0), ((1, 4, 1, 1), 1), ((4, 5, 5), 0), ((1, 4, 5, 5), 1)],
)
def test_a_parameter_that_meets_channels_carries_them_on_the_right_axis(shape: tuple[int, ...], axis: int) -> None:
    following = Following()
    out = following.run(torch.mul, following.channels(2, 4, 5, 5), following.parameter("scale", *shape))
    assert following.along(out) == following.axis("x", 0)
    assert following.roles("scale") == {axis: {Role.PER_CHANNEL}}
    assert following.tied() == merged(following.axis("x", 0), following.axis("scale", axis))


def test_a_parameter_that_was_permuted_carries_channels_on_its_own_axis() -> None:
    following = Following()
    out = following.run(
        lambda x, p: x + p.permute(2, 0, 1), following.channels(2, 4, 5, 6), following.parameter("table", 5, 6, 4)
    )
    assert following.along(out) == following.axis("x", 0)
    assert following.roles("table") == {2: {Role.PER_CHANNEL}}


def test_a_parameter_beside_the_channels_stays_whole() -> None:
    following = Following()
    out = following.run(torch.add, following.channels(2, 4, 5, 5), following.parameter("position", 5, 5))
    assert following.along(out) == following.axis("x", 0)
    assert following.roles("position") == {}
    assert following.frozen() == {}
