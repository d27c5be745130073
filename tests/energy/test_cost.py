"""The promises of every cost, the closed forms, exact counts and nonzero weights."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecc.budget import COUNTED_UNITS as UNITS
from ecc.energy import Cost, CountedCost, NonzeroCost, counted_cost, nonzero_cost, parse_budget
from ecc.energy.cost import BilinearForm, StepTerms
from ecc.energy.families import candidate_steps
from ecc.errors import BadWidths
from ecc.graph import AffineSize, trace_channels
from ecc.graph.structure import TensorShape
from ecc.measure.meters.platform import PLATFORMS, Platform
from energy.cases import (
    NETWORKS,
    TERMS,
    autograd,
    finite_differences,
    graph_of,
    pairs_of,
    random_model,
    random_widths,
    slow_size,
    structure_of,
    widths_of,
)
from graph.cases import conv
from graph.cases import named as module_of
from methods.nets import NETS, traced

COSTS = (*TERMS, *UNITS)


@cache
def cost_of(name: str, network: str, seed: int = 0) -> Any:
    return counted_cost(graph_of(network), name) if name in UNITS else random_model(name, network, seed)


def draw_cost(data: st.DataObject, name: str) -> tuple[Any, Any]:
    network = data.draw(st.sampled_from(NETWORKS))
    return cost_of(name, network, data.draw(st.integers(0, 3))), structure_of(network)


# ---------------------------------------------------------------- every cost


@pytest.mark.parametrize("name", COSTS)
def test_attributes_types_and_devices(name: str) -> None:
    cost = cost_of(name, "chain")
    assert isinstance(cost, Cost)
    assert (cost.groups, cost.full_widths) == (("conv1", "conv2", "conv3"), (8, 6, 4))
    assert cost.resource == ("energy" if name in TERMS else name)
    assert cost.unit == {"energy": "J", "macs": "", "params": ""}.get(cost.resource, "B")
    assert cost.label == ("estimated" if name in TERMS else "counted")
    whole = torch.tensor([5, 4, 3])
    for widths in (whole, whole.float()):
        assert float(cost.value(widths)) == float(cost.value(whole.double()))
        assert cost.gradient(widths).tolist() == cost.gradient(whole.double()).tolist()
    assert cost.to("cpu") is cost
    assert torch.device(cost.to("meta").device).type == "meta"


@pytest.mark.parametrize("name", COSTS)
@given(data=st.data())
@settings(max_examples=30)
def test_fewer_channels_never_cost_more_and_rows_are_independent(name: str, data: st.DataObject) -> None:
    cost, structure = draw_cost(data, name)
    fewer, more = data.draw(pairs_of(structure))
    small, large = float(cost.value(fewer)), float(cost.value(more))
    assert 0 <= small <= large * (1 + 1e-12)
    assert (cost.gradient(more) >= 0).all()
    assert cost.value(torch.stack([fewer, more])).tolist() == pytest.approx([small, large], rel=1e-14)


@pytest.mark.parametrize("name", [name for name in COSTS if name != "peak_bytes"])
@given(data=st.data())
@settings(max_examples=30)
def test_gradient_matches_finite_differences_and_autograd(name: str, data: st.DataObject) -> None:
    cost, structure = draw_cost(data, name)
    widths = data.draw(widths_of(structure))
    gradient = cost.gradient(widths)
    rounding = 1e-13 * float(cost.value(widths)) / 0.25
    torch.testing.assert_close(gradient, finite_differences(cost, widths), rtol=1e-9, atol=20 * rounding)
    torch.testing.assert_close(gradient, autograd(cost, widths), rtol=1e-12, atol=1e-12 * float(gradient.max()))
    assert not gradient.requires_grad


# ---------------------------------------------------------------- closed forms

GROUPS = 4
_SIZES = st.builds(
    AffineSize, st.integers(0, 50), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=5).map(tuple)
)  # a group may occur twice in a size
_TERMS = st.lists(st.tuples(st.floats(0, 1e3), _SIZES, _SIZES), max_size=6)


def form_of(base: float, terms: list[tuple[float, AffineSize, AffineSize]]) -> BilinearForm:
    coefficients, lefts, rights = (tuple(term[k] for term in terms) for k in range(3))
    return BilinearForm(base, coefficients, lefts, rights, GROUPS)  # type: ignore[arg-type] # columns


@given(st.floats(0, 1e3), _TERMS, st.lists(st.floats(0, 100), min_size=GROUPS, max_size=GROUPS))
def test_bilinear_form_is_the_sum_of_its_terms(
    base: float, terms: list[tuple[float, AffineSize, AffineSize]], widths: list[float]
) -> None:
    form, vector = form_of(base, terms), torch.tensor(widths, dtype=torch.float64)
    expected = [c * slow_size(left, widths) * slow_size(right, widths) for c, left, right in terms]
    assert form.terms(vector).tolist() == pytest.approx(expected, rel=1e-12)
    assert float(form.value(vector)) == pytest.approx(base + sum(expected), rel=1e-12)
    value = float(form.value(vector + 1))
    differences = finite_differences(form, vector + 1)
    torch.testing.assert_close(form.gradient(vector + 1), differences, rtol=1e-9, atol=1e-11 * (1 + value))


def test_bilinear_form_by_hand() -> None:
    """0.5 + 2 * (1 + 3 a) * b + 5 * a * a, at a = 2 and b = 10."""
    a, b = AffineSize(0, ((0, 1),)), AffineSize(0, ((1, 1),))
    form = form_of(0.5, [(2.0, AffineSize(1, ((0, 3),)), b), (5.0, a, a)])
    widths = torch.tensor([2.0, 10.0, 7.0, 7.0], dtype=torch.float64)
    assert float(form.value(widths)) == 0.5 + 2 * 7 * 10 + 5 * 4
    assert form.gradient(widths).tolist() == [2 * 3 * 10 + 5 * 2 * 2, 2 * 7, 0, 0]
    assert form.terms(widths.expand(3, 4)).tolist() == [[140, 20]] * 3
    assert "parts" not in vars(form_of(0.5, []))  # dense matrices are only built for `terms`


def steps_of_digits() -> StepTerms:
    steps = candidate_steps(structure_of("digits"))
    heights = np.random.default_rng(0).random(len(steps))
    sizes, levels = tuple(step.size for step in steps), tuple(step.level for step in steps)
    rises, multiples = tuple(step.rise for step in steps), tuple(step.multiple for step in steps)
    return StepTerms(tuple(heights.tolist()), sizes, levels, rises, multiples, len(structure_of("digits").groups))


@given(st.deferred(lambda: pairs_of(structure_of("digits"))))
def test_steps_only_rise_and_equal_their_definition(pair: tuple[Tensor, Tensor]) -> None:
    """Except for those of sizes that are not a multiple."""
    made = steps_of_digits()
    parts = list(zip(made.heights, made.sizes, made.levels, made.rises, made.multiples, strict=True))
    small, large = (made.terms(widths) for widths in pair)
    for before, after, (height, size, level, rise, multiple) in zip(small.tolist(), large.tolist(), parts, strict=True):
        channels = slow_size(size, pair[0].tolist())
        if multiple:
            assert before == (height if round(channels) % multiple else 0)
        else:
            assert before == pytest.approx(height * min(1.0, max(0.0, (channels - level) / rise)))
            assert 0 <= before <= after + 1e-12
    assert any(made.multiples)
    assert float(made.value(pair[0])) == pytest.approx(float(small.sum()))


@given(st.deferred(lambda: widths_of(structure_of("digits"))), st.booleans())
def test_gradient_of_steps_is_the_derivative_towards_smaller_widths(widths: Tensor, at_kinks: bool) -> None:
    widths = widths.round() if at_kinks else widths
    made, step = steps_of_digits(), 1e-4
    made = replace(made, heights=tuple(h * (m == 0) for h, m in zip(made.heights, made.multiples, strict=True)))
    basis = torch.eye(len(widths)).double()
    towards_smaller = torch.stack([(made.value(widths) - made.value(widths - step * e)) / step for e in basis])
    off = widths - widths.round()  # kinks are at whole numbers of channels
    just_above_a_kink = (off > 0) & (off < step)
    close = torch.isclose(made.gradient(widths), towards_smaller, atol=1e-6)
    assert bool((close | just_above_a_kink).all())


# ---------------------------------------------------------------- counts

COUNTS = {name: name for name in ("macs", "weight_bytes", "activation_bytes")} | {"params": "parameters"}
MORE = (*NETWORKS, "transformer block", "tied weights", "unet", "squeeze and excite", "mobilenet_v1")


def slow_layer_bytes(name: str, widths: Tensor) -> list[float]:
    """Bytes that each layer reads and writes."""
    layers = structure_of(name).layers
    return [one.item_bytes * (slow_size(one.reads, widths) + slow_size(one.writes, widths)) for one in layers]


@pytest.mark.parametrize("name", MORE)
def test_counts_equal_those_of_the_graph(name: str) -> None:
    graph, structure = graph_of(name), structure_of(name)
    for widths in (*random_widths(structure, 5), structure.full_widths, structure.min_widths):
        vector = torch.tensor(widths, dtype=torch.float64)
        for resource, method in COUNTS.items():
            assert float(counted_cost(graph, resource).value(vector)) == float(getattr(graph, method)(vector))
        assert float(counted_cost(graph, "peak_bytes").value(vector)) == max(slow_layer_bytes(name, vector))


@given(data=st.data())
def test_gradient_of_the_peak_is_that_of_the_largest_layer(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NETWORKS))
    widths = data.draw(widths_of(structure_of(name)))
    cost = counted_cost(graph_of(name), "peak_bytes")
    torch.testing.assert_close(cost.gradient(widths), autograd(cost, widths))
    first, second, *_ = sorted(slow_layer_bytes(name, widths), reverse=True)
    if first > 1.5 * second:  # away from the kink
        torch.testing.assert_close(cost.gradient(widths), finite_differences(cost, widths, step=1e-3))


def test_layers_of_equal_size_share_the_gradient_of_the_peak() -> None:
    graph = graph_of("chain")  # 2 x 64 positions of 4 bytes; bn1 and relu1 each move 2 * 8 channels, others fewer
    assert counted_cost(graph, "peak_bytes").gradient(graph.widths()).tolist() == [2 * 2 * 64 * 4, 0, 0]


def test_counts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(BadWidths, match="'flops' cannot be counted; choose one of macs, params, weight_bytes, "):
        counted_cost(graph_of("chain"), "flops")
    axes = tuple(AffineSize(0, ((group, 1),)) for group in range(3))
    structure = structure_of("chain")
    cube = replace(structure, tensors=(*structure.tensors, TensorShape("cube", axes, 4, True)))
    with pytest.raises(BadWidths, match="tensor cube has 3 prunable axes; at most two can be counted"):
        CountedCost(cube, "params").value(torch.ones(3))
    idle = replace(structure, layers=())
    assert float(CountedCost(idle, "macs").value(torch.ones(3))) == 0


# ---------------------------------------------------------------- nonzero weights


@cache
def nonzeros_of(name: str, platform: str = "eyeriss") -> NonzeroCost:
    return nonzero_cost(traced(name)[2], Platform(platform))


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", NETS)
def test_dense_weights_cost_what_the_platform_says(name: str, platform: str) -> None:
    net, _, graph = traced(name)
    for noise in (0.0, 0.1):
        cost = nonzero_cost(graph, Platform(platform, noise=noise))
        truth = Platform(platform).truth(graph, {}).joules
        assert cost.dense == pytest.approx(truth, rel=1e-9)
        assert float(cost.value(torch.tensor(cost.full_widths))) == pytest.approx(truth, rel=1e-9)
    matrices = {key: value.numel() for key, value in net.named_parameters() if value.dim() > 1}
    assert dict(zip(cost.groups, cost.full_widths, strict=True)) == matrices
    assert min(cost.coefficients) > 0 <= cost.base


def test_joules_per_weight_by_hand() -> None:
    """A 3x3 convolution on 4x4 images, two of them: each weight is used 32 times. A linear weight: twice."""
    net = module_of(conv=conv(3, 5), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(5, 7))
    cost = nonzero_cost(trace_channels(net, torch.randn(2, 3, 4, 4), verify=False), Platform("eyeriss"))
    c = PLATFORMS["eyeriss"]
    stored = 2 * c.joules_per_weight_byte  # 16 bits
    assert (cost.groups, cost.full_widths) == (("conv.weight", "fc.weight"), (135, 35))
    assert cost.coefficients == pytest.approx((32 * c.joules_per_mac + stored, 2 * c.joules_per_mac + stored))
    # The rest: 2 images of 3x4x4 in, 5x4x4 out and into the pool, 5 out of it and into fc, 7 out; biases of 5 and 7.
    values = 2 * (48 + 80 + 80 + 5 + 5 + 7)
    assert cost.base == pytest.approx(2 * c.joules_per_activation_byte * values + stored * (5 + 7), rel=1e-9)


def test_a_tensor_shared_by_two_layers_is_paid_twice() -> None:
    tied, c = nonzeros_of("tied"), PLATFORMS["eyeriss"]
    assert tied.groups.count("weight") == 1
    once = 2 * 5 * c.joules_per_mac + 2 * c.joules_per_weight_byte  # two rows of five tokens
    assert dict(zip(tied.groups, tied.coefficients, strict=True))["weight"] == pytest.approx(2 * once)


def test_folded_layers_and_networks_without_weights() -> None:
    platform = Platform("eyeriss")
    platform.constants = replace(platform.constants, folded=("norm", "elementwise", "linear"))
    assert "head.weight" not in nonzero_cost(traced("residual")[2], platform).groups
    net = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())
    with pytest.raises(BadWidths, match="no convolution or linear layer"):
        nonzero_cost(trace_channels(net, torch.randn(2, 3, 4, 4), verify=False), Platform("eyeriss"))
    with pytest.raises(BadWidths, match="2 weight tensors need as many"):
        NonzeroCost("x", 0.0, ("a", "b"), (1,), (1.0, 2.0))


@given(st.data())
def test_nonzero_cost_is_linear(data: st.DataObject) -> None:
    cost = nonzeros_of("residual")
    assert isinstance(cost, Cost)
    assert (cost.resource, cost.unit, cost.label) == ("energy", "J", "estimated")
    assert parse_budget("40%").limit(cost) == pytest.approx(0.4 * cost.dense)
    few = torch.tensor([data.draw(st.integers(0, full)) for full in cost.full_widths])
    slow = math.fsum([cost.base, *(p * int(n) for p, n in zip(cost.coefficients, few, strict=True))])
    assert float(cost.to("cpu").value(few)) == pytest.approx(slow, rel=1e-12)
    assert cost.gradient(few).tolist() == list(cost.coefficients)
