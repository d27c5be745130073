from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.errors import BadWidths, EccError
from ecc.graph import ChannelGraph, ChannelGroup
from ecc.measure.design import sample_widths
from ecc.settings import DESIGNS, Design

FULL = (64, 192, 384, 256, 100)


def graph_of(*widths: int, frozen: tuple[int, ...] = ()) -> ChannelGraph:
    groups = [ChannelGroup(f"g{i}", width, ()) for i, width in enumerate(widths)]
    groups += [ChannelGroup(f"f{i}", width, (), frozen="an output") for i, width in enumerate(frozen)]
    return ChannelGraph(tuple(groups), (), ())


@given(
    full=st.lists(st.integers(1, 600), min_size=1, max_size=8),
    samples=st.integers(1, 40),
    kind=st.sampled_from(DESIGNS),
    seed=st.integers(0, 2**32 - 1),
    width_multiple=st.none() | st.integers(1, 64),
)
def test_widths_are_in_range_and_distinct_and_a_longer_design_begins_with_the_shorter_one(
    full: list[int], samples: int, kind: str, seed: int, width_multiple: int | None
) -> None:
    graph = graph_of(*full)
    try:
        made = sample_widths(graph, samples, kind, seed, width_multiple)
    except BadWidths:
        return  # the network is too small for the design
    for network in made:
        assert list(network) == [f"g{i}" for i in range(len(full))]
        for width, most in zip(network.values(), full, strict=True):
            assert type(width) is int
            assert 1 <= width <= most
            assert width == most or width % (width_multiple or 1) == 0
    assert len({tuple(network.values()) for network in made}) == samples
    short = (samples + 1) // 2
    assert made[:short] == sample_widths(graph, short, kind, seed, width_multiple)


@given(samples=st.integers(9, 60), count=st.integers(1, 9))
def test_shards_are_disjoint_and_cover_the_design(samples: int, count: int) -> None:
    shards = [Design(samples=samples, shard=(number, count)).indices() for number in range(1, count + 1)]
    assert sorted(index for shard in shards for index in shard) == list(range(samples))
    assert Design(samples=30, shard=(3, 8)).indices() == (3, 11, 19, 27)
    assert Design(samples=3).indices() == (0, 1, 2)


def test_designs_are_the_same_on_every_machine() -> None:
    """Literal values: neither hash seeds nor versions of Python or numpy may change them."""
    made = sample_widths(graph_of(*FULL), 6, "mixed", 7)
    assert [tuple(network.values()) for network in made[3:]] == [
        (50, 85, 278, 251, 54),
        (11, 17, 90, 52, 13),
        (59, 41, 174, 239, 3),
    ]
    made = sample_widths(graph_of(*FULL), 2, "uniform", 7, width_multiple=8)
    assert [tuple(network.values()) for network in made] == [(8, 152, 168, 184, 96), (32, 96, 32, 72, 48)]


def test_mixed_begins_with_dense_minimum_and_half() -> None:
    dense, least, half = sample_widths(graph_of(*FULL), 3)
    assert tuple(dense.values()) == FULL
    assert tuple(least.values()) == (1,) * 5
    assert tuple(half.values()) == (32, 96, 192, 128, 50)
    dense, least, half = sample_widths(graph_of(*FULL, 3), 3, width_multiple=8)
    assert tuple(dense.values()) == (*FULL, 3)
    assert tuple(least.values()) == (8, 8, 8, 8, 8, 3)
    assert tuple(half.values()) == (32, 96, 192, 128, 48, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 10**30}, "give a whole number from 1 to 1000000"),
        ({"kind": "corners"}, "design is 'corners'; choose one of mixed, uniform"),
        ({"rounds": 10**6}, "more than 1000000 measurements"),
        ({"shard": (9, 8)}, "shard 9/8 does not exist"),
        ({"samples": 3, "shard": (8, 9)}, "shard 8/9 of 3 samples is empty"),
    ],
)
def test_a_design_out_of_range_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EccError, match=message):
        Design(**changes)


@pytest.mark.parametrize(
    ("graph", "samples", "width_multiple", "message"),
    [
        (graph_of(3, 4), 13, None, r"13 samples requested, but this network has only 12 different widths\. Use"),
        (graph_of(16, 12), 13, 8, r"only 4 different widths in multiples of 8\. Use fewer samples or a smaller"),
        (graph_of(3000), 3000, None, r"3000 samples requested, but this network has hardly more than 29\d\d"),
        (graph_of(frozen=(7,)), 3, None, "this network has no prunable group"),
    ],
)
def test_a_network_with_too_few_widths_is_refused(
    graph: ChannelGraph, samples: int, width_multiple: int | None, message: str
) -> None:
    with pytest.raises(BadWidths, match=message):
        sample_widths(graph, samples, width_multiple=width_multiple)
    assert len(sample_widths(graph_of(3, 4, frozen=(7,)), 12, "uniform")) == 12
