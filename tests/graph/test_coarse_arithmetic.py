"""Graphs do not depend on the precision of float32 arithmetic: under TF32 and bfloat16 rounding they are the same."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import ecc
from ecc.graph import ChannelGraph
from ecc.zoo.image_task import NETWORKS
from graph.cases import CASES
from graph.coarse import BF16_BITS, TF32_BITS, CoarseArithmetic
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


@BITS
def test_masked_and_slim_differ_by_more_than_float32_explains(bits: int) -> None:
    """In float32 the two agree."""
    net, example = zoo("resnet20")
    graph = ecc.trace_channels(net, example)
    masked, small = masked_and_slim(net, graph, {g.name: [*range(g.width // 3)] for g in graph.prunable})
    assert difference(run(masked, example), run(small, example)) < 1e-5
    with CoarseArithmetic(bits):
        assert difference(run(masked, example), run(small, example)) > 3e-4
