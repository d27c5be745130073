"""Graphs do not depend on the precision of float32 arithmetic: under TF32 and bfloat16 rounding they are the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import ecc
from ecc.graph import ChannelGraph
from ecc.zoo.image_task import NETWORKS
from graph.cases import CASES
from graph.coarse import BF16_BITS, TF32_BITS, CoarseArithmetic, round_mantissa
from graph.exactness import difference, masked_and_slim, run
from graph.layers import image
from graph.networks import Drawn, networks
from graph.special_nets import BranchesOnChannels

BITS = pytest.mark.parametrize("bits", [TF32_BITS, BF16_BITS])
SIZES = {"alexnet": 64, "mobilenet_v1": 32, "erfnet": 16, "resnet20": 8, "resnet56": 8}
QUICK = ("resnet20",)
"""Bundled networks in every run."""


def structure(graph: ChannelGraph) -> Any:
    """Everything in a graph but measured differences."""
    groups = [(g.name, g.width, g.min_width, _without_numbers(g.frozen)) for g in graph.groups]
    return graph.fingerprint, groups, graph.features, [_without_numbers(note) for note in graph.notes]


def _without_numbers(text: str | None) -> str | None:
    return text and re.sub(r"\d+(\.\d+)?e[-+]\d+|\d+\.\d+", "#", text)


def assert_same_graphs(net: nn.Module, example: Any) -> None:
    exact = structure(ecc.trace_channels(net, example))
    for bits in (TF32_BITS, BF16_BITS):
        with CoarseArithmetic(bits):
            assert structure(ecc.trace_channels(net, example)) == exact, f"with {bits} mantissa bits"


def zoo(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[name].build(10), torch.randn(1, 3, SIZES[name], SIZES[name])


# ---------------------------------------------------------------- the graphs


@pytest.mark.parametrize("name", list(CASES)[::4])
def test_a_network_of_the_catalogue(name: str) -> None:
    case = CASES[name]
    assert_same_graphs(case.build(), case.inputs())


def test_a_network_whose_code_asks_for_values() -> None:
    assert_same_graphs(BranchesOnChannels(), image()())


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in NETWORKS])
def test_a_network_of_the_zoo(name: str) -> None:
    net, example = zoo(name)
    assert_same_graphs(net, example)


@settings(max_examples=6)
@given(networks(max_steps=3))
def test_random_networks(drawn: Drawn) -> None:
    assert_same_graphs(drawn.net, drawn.example)


@pytest.mark.thorough
@settings(max_examples=80)
@given(networks())
def test_many_random_networks(drawn: Drawn) -> None:
    assert_same_graphs(drawn.net, drawn.example)


@BITS
def test_a_wrong_cut_is_still_found(bits: int) -> None:
    """Arithmetic with the width: no tolerance may accept this."""

    class DividedByWidth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 32, 1), nn.Conv2d(32, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x + 1e-2 * x / x.new_tensor([x.shape[1]]))

    with CoarseArithmetic(bits):
        graph = ecc.trace_channels(DividedByWidth(), image()())
    assert not graph.prunable


# ---------------------------------------------------------------- the mode itself


def test_rounding_to_seven_bits_is_that_of_bfloat16() -> None:
    numbers = torch.cat([torch.randn(4096) * 10.0 ** torch.arange(-20, 12).repeat(128), torch.tensor([0.0, -0.0])])
    ties = (torch.arange(1, 200, 2, dtype=torch.int32) << 15).view(torch.float32)
    for tensor in (numbers, ties, torch.tensor([float("inf"), float("-inf")])):
        assert torch.equal(round_mantissa(tensor, BF16_BITS), tensor.bfloat16().float())
    assert bool(round_mantissa(torch.tensor([float("nan")]), BF16_BITS).isnan().all())


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "conv2d": (F.conv2d, ((2, 3, 9, 9), (5, 3, 3, 3))),
    "transposed convolution": (F.conv_transpose2d, ((2, 3, 5, 5), (3, 5, 2, 2))),
    "linear": (F.linear, ((2, 5), (3, 5))),
    "matmul": (torch.matmul, ((2, 2, 5, 4), (2, 2, 4, 6))),
    "addmm": (lambda a, b: torch.addmm(torch.zeros((), dtype=a.dtype), a, b), ((4, 5), (5, 3))),
    "baddbmm": (lambda a, b: torch.baddbmm(torch.zeros((), dtype=a.dtype), a, b), ((2, 4, 5), (2, 5, 3))),
    "einsum": (lambda a, b: torch.einsum("nij,njk->nik", a, b), ((2, 4, 5), (2, 5, 3))),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), ((2, 2, 4, 6), (2, 2, 4, 6))),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_operands_of_a_product_are_rounded(name: str, inference: bool) -> None:
    function, shapes = PRODUCTS[name]
    operands = [torch.randn(shape) for shape in shapes]
    with torch.inference_mode(inference):
        plain = function(*operands)
        with CoarseArithmetic(TF32_BITS) as mode:
            coarse = function(*operands)
            exact = function(*(operand.double() for operand in operands))
        rounded = function(*(round_mantissa(operand, TF32_BITS) for operand in operands))
        assert mode.rounded > 0
        assert not torch.allclose(coarse, plain, rtol=0, atol=1e-6)
        if name == "attention":  # its inner product is rounded once more when decomposed
            torch.testing.assert_close(coarse, rounded, rtol=2e-3, atol=2e-3)
        else:
            torch.testing.assert_close(coarse, rounded)
        torch.testing.assert_close(exact, function(*(operand.double() for operand in operands)), rtol=0, atol=0)


def test_the_settings_of_torch_turn_it_off_and_come_back() -> None:
    before = torch.get_float32_matmul_precision()
    x, weight, kernel = torch.randn(4, 5), torch.randn(3, 5), torch.randn(5, 3, 1, 1)
    image = torch.randn(1, 3, 4, 4)
    with CoarseArithmetic(TF32_BITS) as mode:
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        F.linear(x, weight)
        with torch.backends.cudnn.flags(allow_tf32=False):
            F.conv2d(image, kernel)
        assert mode.rounded == 0
        F.conv2d(image, kernel)
        torch.set_float32_matmul_precision("high")
        F.linear(x, weight)
        assert mode.rounded == 2
    assert torch.get_float32_matmul_precision() == before


@BITS
def test_masked_and_slim_differ_by_more_than_float32_explains(bits: int) -> None:
    """In float32 the two agree."""
    net, example = zoo("resnet20")
    graph = ecc.trace_channels(net, example)
    masked, small = masked_and_slim(net, graph, {g.name: [*range(g.width // 3)] for g in graph.prunable})
    assert difference(run(masked, example), run(small, example)) < 1e-5
    with CoarseArithmetic(bits):
        assert difference(run(masked, example), run(small, example)) > 3e-4
