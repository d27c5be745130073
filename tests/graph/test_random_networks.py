"""Pruning is exact: on random networks, the masked and the slim network give the same outputs and gradients.

Verification is off in most tests, so that the trace alone must be right.

One case is a random network with one random cut of it (units of its groups, and branches), and compares the masked with
the slim network. Each network is traced once and cut 1 + `MORE_CUTS` times: the first cut is drawn by Hypothesis and is
compared in outputs, gradients, state, sizes and MACs, the others only in outputs. About 100 networks are drawn in CI,
of which a few have nothing to prune, so that there are more than 1,500 cases.
"""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

import ecc
from ecc import ChannelGraph
from ecc.constants import ATTENTION_UNITS
from ecc.graph import mask_branches_, mask_channels_
from graph.blocks.base import BLOCKS, HARD, LEAKS, NUMERIC
from graph.exactness import assert_same_outputs, assert_same_state, assert_slim_is_exact, checked_groups
from graph.networks import Drawn, block_of, networks, networks_with
from graph.traps.checking import FEW_CALLS, assert_slim_is_masked

MORE_CUTS = 16
"""Random cuts of each network besides the one that Hypothesis draws."""


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


def traced(drawn: Drawn, *, attention: str = "heads", verify: bool = False) -> ChannelGraph:
    """The graph of a drawn network, which the trace does not change."""
    note(str(drawn.plan))
    before, mode = copy.deepcopy(drawn.net.state_dict()), drawn.net.training
    graph = ecc.trace_channels(drawn.net, drawn.example, attention=attention, verify=verify)
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
    assert_more_cuts_are_exact(drawn, graph)


def assert_more_cuts_are_exact(drawn: Drawn, graph: ChannelGraph) -> None:
    """Compare the outputs of the masked and the slim network for several random cuts.

    A cut removes units of one group, of all groups or of some, up to the minimum width, and in every third cut a random
    part of the branches.
    """
    random = Random(drawn.plan.seed)
    groups, branches = checked_groups(graph), [branch.name for branch in graph.branches]
    for number in range(MORE_CUTS if groups or branches else 0):
        some = [groups, random.sample(groups, min(1, len(groups))), [g for g in groups if random.random() < 0.5]]
        dead = {
            group.name: torch.tensor(
                random.sample(range(group.width), random.randint(1, group.width - group.min_width))
            )
            for group in random.choice(some)
        }
        removed = [name for name in branches if random.random() < 0.3] if number % 3 == 0 else []
        masked = ecc.with_widths(drawn.net, graph, {})
        mask_channels_(masked, graph, dead)
        mask_branches_(masked, graph, removed)
        cut = f"{ {name: sorted(units.tolist()) for name, units in dead.items()} } and the branches {removed}"
        assert_same_outputs(masked, ecc.slim(masked, graph), drawn.example, f"outputs without {cut}")


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
@given(networks(without=[*LEAKS, *HARD]), st.sampled_from(ATTENTION_UNITS), st.data())
def test_networks_of_prunable_blocks(drawn: Drawn, attention: str, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn, attention=attention), data)


@examples(50)
@given(networks(without=NUMERIC), st.data())
def test_networks_of_all_blocks(drawn: Drawn, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn), data)


@examples(50)
@given(networks(), st.sampled_from(ATTENTION_UNITS), st.data())
def test_networks_of_all_blocks_verified(drawn: Drawn, attention: str, data: st.DataObject) -> None:
    assert_exact(drawn, traced(drawn, attention=attention, verify=True), data)


@pytest.mark.parametrize("kind", ["Transformer", "Heads"])
def test_the_width_inside_heads(kind: str) -> None:
    @examples(15)
    @given(networks_with(kind), st.data())
    def check(drawn: Drawn, data: st.DataObject) -> None:
        assert_exact(drawn, traced(drawn, attention="width"), data)

    check()
