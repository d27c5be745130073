"""Pruning is exact: on random networks, the masked and the slim network give the same outputs and gradients.

Verification is off in most tests, so that the trace alone must be right.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

import ecc
from ecc import ChannelGraph
from ecc.graph import mask_branches_
from graph.blocks.base import BLOCKS, HARD, LEAKS, NUMERIC
from graph.exactness import assert_same_outputs, assert_same_state, assert_slim_is_exact, checked_groups
from graph.networks import Drawn, block_of, networks, networks_with
from graph.traps.checking import FEW_CALLS, assert_slim_is_masked


def examples(of_a_hundred: int) -> Any:
    """A share of the profile's examples, so that `explore` looks longer at everything."""
    count = max(1, settings.default.max_examples * of_a_hundred // 100)
    return settings(max_examples=count, phases=set(Phase) - {Phase.explain})


@st.composite
def dead_units(draw: Any, graph: ChannelGraph) -> dict[str, list[int]]:
    """For each prunable group, some units; often all but the minimum width."""
    dead = {}
    for group in checked_groups(graph):
        units, most = range(group.width), group.width - group.min_width
        some = st.sets(st.sampled_from(units), max_size=most)
        many = st.sets(st.sampled_from(units), min_size=most, max_size=most)
        dead[group.name] = sorted(draw(some | many))
    return dead


def traced(drawn: Drawn, *, verify: bool = False) -> ChannelGraph:
    """The graph of a drawn network, which the trace does not change."""
    note(str(drawn.plan))
    before, mode = copy.deepcopy(drawn.net.state_dict()), drawn.net.training
    graph = ecc.trace_channels(drawn.net, drawn.example, verify=verify)
    note(str(graph))
    assert_same_state(before, drawn.net.state_dict())
    assert drawn.net.training == mode
    return graph


def assert_exact(drawn: Drawn, graph: ChannelGraph, data: st.DataObject) -> None:
    dead = data.draw(dead_units(graph), "dead units")
    assert_slim_is_exact(drawn.net, drawn.example, graph, dead, macs=drawn.net.is_plain)
    assert_slim_is_masked(drawn.net, graph, dead, (drawn.example, drawn.net.example(2)), FEW_CALLS)
    if graph.branches:
        names = st.sampled_from([branch.name for branch in graph.branches])
        assert_removed_exactly(drawn, graph, sorted(data.draw(st.sets(names, min_size=1), "branches")))


def assert_removed_exactly(drawn: Drawn, graph: ChannelGraph, names: list[str]) -> None:
    """Compare the networks with masked and with removed branches."""
    masked = ecc.with_widths(drawn.net, graph, {})
    mask_branches_(masked, graph, names)
    for example in (drawn.example, drawn.net.example(2)):
        assert_same_outputs(masked, ecc.slim(masked, graph), example, "outputs without branches")
    small = ecc.slim(masked, graph)
    counted = graph.parameters({group: 0 for name in names for group in graph.branch(name).groups})
    assert sum(parameter.numel() for parameter in small.parameters()) == int(counted)


def assert_found(graph: ChannelGraph, tensor: str, expected: int | str) -> None:
    """Check that this number of units of an axis is prunable, or none for the expected reason."""
    name, _, axis = tensor.partition(":")
    groups = [g for g in graph.groups for p in g.slices if (p.tensor, p.axis) == (name, int(axis or 0))]
    prunable = sum(g.width for g in groups if g.frozen is None)
    if isinstance(expected, int):
        assert prunable == (expected if expected > 1 else 0), f"{tensor}: {prunable} units are prunable"
    else:
        assert prunable == 0, f"{tensor} is prunable in spite of {expected}"
        assert any(expected in str(g.frozen) for g in groups), [g.frozen for g in groups]


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_a_block_between_two_convolutions(kind: str) -> None:
    @examples(10)
    @given(networks_with(kind), st.data())
    def check(drawn: Drawn, data: st.DataObject) -> None:
        graph = traced(drawn, verify=kind in NUMERIC)
        path, block = block_of(drawn.net)
        for tensor, expected in block.expects.items():
            assert_found(graph, "blocks.0.layer.weight" if tensor == "in" else f"{path}.{tensor}", expected)
        assert_exact(drawn, graph, data)

    check()


@examples(80)
@given(networks(without=[*LEAKS, *HARD]), st.data())
def test_networks_of_prunable_blocks(drawn: Drawn, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn), data)


@examples(50)
@given(networks(without=NUMERIC), st.data())
def test_networks_of_all_blocks(drawn: Drawn, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn), data)


@examples(50)
@given(networks(), st.data())
def test_networks_of_all_blocks_verified(drawn: Drawn, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn, verify=True), data)
