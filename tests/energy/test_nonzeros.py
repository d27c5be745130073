from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ecc.energy import Cost, NonzeroCost, nonzero_cost, parse_budget
from ecc.errors import BadWidths
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure.meters.platform import PLATFORMS, Platform
from graph.cases import conv, named
from methods.nets import NETS, traced


@cache
def cost_of(name: str, platform: str = "eyeriss", tile: int = 1) -> NonzeroCost:
    return nonzero_cost(traced(name)[2], Platform(platform, tile=tile))


# ---------------------------------------------------------------- beside the platform


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", NETS)
def test_the_dense_network_costs_what_the_platform_says(name: str, platform: str) -> None:
    graph = traced(name)[2]
    for options in ({}, {"tile": 8}, {"noise": 0.1}):
        cost = nonzero_cost(graph, Platform(platform, **options))  # type: ignore[arg-type]
        truth = Platform(platform, tile=options.get("tile", 1)).truth(graph, {}).joules  # type: ignore[arg-type]
        full = torch.tensor(cost.full_widths)
        assert cost.dense == pytest.approx(truth, rel=1e-9)
        assert float(cost.value(full)) == pytest.approx(truth, rel=1e-9)
        assert cost.base >= 0


@pytest.mark.parametrize("name", NETS)
def test_the_weights_of_all_convolutions_and_linear_layers_are_priced_and_nothing_else(name: str) -> None:
    net, _, _ = traced(name)
    matrices = {key: value.numel() for key, value in net.named_parameters() if value.dim() > 1}
    cost = cost_of(name)
    assert dict(zip(cost.groups, cost.full_widths, strict=True)) == matrices
    assert all(coefficient > 0 for coefficient in cost.coefficients)


def test_prices_by_hand() -> None:
    """A 3x3 convolution on 4x4 images, two of them: each weight is used 32 times. A linear weight: twice."""
    net = named(conv=conv(3, 5), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(5, 7))
    cost = nonzero_cost(trace_channels(net, torch.randn(2, 3, 4, 4), verify=False), Platform("eyeriss"))
    c = PLATFORMS["eyeriss"]
    stored = 2 * c.joules_per_weight_byte  # 16 bits
    assert cost.groups == ("conv.weight", "fc.weight")
    assert cost.full_widths == (135, 35)
    assert cost.coefficients == pytest.approx((32 * c.joules_per_mac + stored, 2 * c.joules_per_mac + stored))
    # All else: 2 images of 3x4x4 in, 5x4x4 out and into the pool, 5 out of it and into fc, 7 out; biases of 5 and 7.
    values = 2 * (48 + 80 + 80 + 5 + 5 + 7)
    bytes_moved = 2 * c.joules_per_activation_byte * values + stored * (5 + 7)
    assert cost.base == pytest.approx(bytes_moved, rel=1e-9)


def test_static_power_and_kernels_are_part_of_the_base() -> None:
    """In fp32 with kernels and static power: the base is what is left of the whole once MACs and weights are off."""
    graph = traced("chain")[2]
    c = PLATFORMS["jetson-tx2"]
    cost = cost_of("chain", "jetson-tx2")
    macs, weights = float(graph.macs()), sum(cost.full_widths)
    rest = Platform("jetson-tx2").truth(graph, {}).joules
    rest -= macs * c.joules_per_mac + 4 * weights * c.joules_per_weight_byte
    assert cost.base == pytest.approx(rest, rel=1e-9)
    assert cost.base > len(graph.layers) * c.joules_per_kernel


def test_a_tensor_that_two_layers_use_costs_both() -> None:
    tied, c = cost_of("tied"), PLATFORMS["eyeriss"]
    assert tied.groups.count("weight") == 1
    coefficient = dict(zip(tied.groups, tied.coefficients, strict=True))["weight"]
    once = 2 * 5 * c.joules_per_mac + 2 * c.joules_per_weight_byte  # two rows of five tokens
    assert coefficient == pytest.approx(2 * once)


def test_layers_that_cost_nothing_are_not_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform("eyeriss")
    platform.constants = replace(platform.constants, folded=("norm", "elementwise", "linear"))
    cost = nonzero_cost(traced("residual")[2], platform)
    assert "head.weight" not in cost.groups
    assert cost.dense == pytest.approx(platform.truth(traced("residual")[2], {}).joules, rel=1e-9)


# ---------------------------------------------------------------- a cost


def test_it_is_a_cost_in_joules_and_called_an_estimate() -> None:
    cost = cost_of("digits")
    assert isinstance(cost, Cost)
    assert (cost.resource, cost.unit, cost.label) == ("energy", "J", "estimated")
    assert cost.network == traced("digits")[2].fingerprint
    assert parse_budget("40%").limit(cost) == pytest.approx(0.4 * cost.dense)
    moved = cost.to("cpu")
    assert moved == cost
    assert moved.value(torch.tensor(cost.full_widths)) == cost.value(torch.tensor(cost.full_widths))


@given(st.data())
def test_it_is_linear_and_never_falls_when_weights_come_back(data: st.DataObject) -> None:
    cost = cost_of("residual")
    few = torch.tensor([data.draw(st.integers(0, full)) for full in cost.full_widths])
    more = few + torch.tensor(
        [data.draw(st.integers(0, full - int(n))) for full, n in zip(cost.full_widths, few, strict=True)]
    )
    low, high = cost.value(torch.stack([few, more])).tolist()
    assert cost.base <= low <= high <= cost.dense * (1 + 1e-12)
    slope = cost.gradient(few)
    assert torch.equal(slope, cost.gradient(more))
    assert high - low == pytest.approx(float(((more - few).double() * slope).sum()), rel=1e-9, abs=1e-9 * cost.dense)
    slow = math.fsum([cost.base, *(p * int(n) for p, n in zip(cost.coefficients, few, strict=True))])
    assert low == pytest.approx(slow, rel=1e-12)


def test_networks_without_such_layers_are_refused() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    graph: ChannelGraph = trace_channels(net, torch.randn(2, 3, 4, 4), verify=False)
    with pytest.raises(BadWidths, match="no convolution or linear layer"):
        nonzero_cost(graph, Platform("eyeriss"))
    with pytest.raises(BadWidths, match="2 weight tensors need as many"):
        NonzeroCost("x", 0.0, ("a", "b"), (1,), (1.0, 2.0))
