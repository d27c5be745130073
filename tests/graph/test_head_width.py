"""With `attention="width"`, the columns of all heads are units: exact, with the scale of the dense network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import ecc
from ecc.errors import BadWidths
from ecc.export import load_slim, save_slim
from ecc.graph import ChannelGraph, Role, mask_channels_, slim, slim_optimizer, trace_channels, with_widths

from .attention_nets import FROZEN, PRUNABLE, Block, Fused, Grouped, Multihead, Rotary, Sdpa, SdpaInner, SizesFromInput
from .test_attention import difference_after_a_cut, example, heads
from .width_nets import NO_FACTOR, WIDTH, ScaleArgument, Scaled

HEADS_INSTEAD = {"cross": 4, "talking heads": 4}
"""Modules of `PRUNABLE` whose code fixes the width of heads: the heads are pruned."""
COLUMNS = {"rotary": 3, "nn.MultiheadAttention": 3, "as many heads as tokens": 2, **HEADS_INSTEAD}
"""Number of prunable columns, or pairs of columns, where it is not 5."""


def traced(attention: nn.Module, **options: bool) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    net = Block(attention).eval()
    return net, trace_channels(net, example(), attention="width", **options)


@pytest.mark.parametrize("name", PRUNABLE)
def test_the_width_of_heads_is_prunable_and_exact(name: str) -> None:
    net, graph = traced(PRUNABLE[name][0]())
    assert set(heads(graph)) == {COLUMNS.get(name, 5)}, [(g.name, g.width, g.frozen) for g in graph.groups]
    for seed in range(3):
        assert difference_after_a_cut(net, graph, seed) < 1e-9
    assert traced(PRUNABLE[name][0](), verify=False)[1].fingerprint == graph.fingerprint


@pytest.mark.parametrize("name", WIDTH)
def test_the_scale_stays_that_of_the_dense_network(name: str) -> None:
    build, columns = WIDTH[name]
    net, graph = traced(build())
    query = next(g for g in graph.groups if g.name == "attention.query")
    assert (query.width, query.frozen) == (columns, None), [(g.name, g.width, g.frozen) for g in graph.groups]
    for seed in range(2):
        assert difference_after_a_cut(net, graph, seed) < 1e-9
    assert traced(build(), verify=False)[1].fingerprint == graph.fingerprint


@pytest.mark.parametrize("name", NO_FACTOR)
def test_heads_are_pruned_where_no_parameter_can_take_up_the_factor(name: str) -> None:
    for verify in (True, False):
        net, graph = traced(NO_FACTOR[name](), verify=verify)
        query = next(g for g in graph.groups if g.name == "attention.query")
        assert query.width == 4 or query.frozen is not None, query
        assert not any("verification" in str(group.frozen) for group in graph.groups)
        assert difference_after_a_cut(net, graph, 0) < 1e-9


@pytest.mark.parametrize("name", FROZEN)
def test_code_with_fixed_heads(name: str) -> None:
    for verify in (True, False):
        net, graph = traced(FROZEN[name][0](), verify=verify)
        assert not any("verification" in str(group.frozen) for group in graph.groups)
        assert difference_after_a_cut(net, graph, 0) < 1e-9


def test_the_width_of_heads_that_comes_from_the_input() -> None:
    net, graph = traced(SizesFromInput())
    assert difference_after_a_cut(net, graph, 0) < 1e-9


def test_a_unit_has_the_same_column_of_all_heads() -> None:
    _, graph = traced(Grouped("sdpa", heads=6, kv_heads=3))
    (group,) = (group for group in graph.prunable if group.name.startswith("attention"))
    rows = {one.tensor: one.index for one in group.slices if one.tensor.endswith("weight")}
    assert rows["attention.query.weight"].tolist() == [[5 * head + column for head in range(6)] for column in range(5)]
    assert rows["attention.key.weight"].tolist() == [[5 * head + column for head in range(3)] for column in range(5)]
    assert rows["attention.out.weight"].tolist() == rows["attention.query.weight"].tolist()


def test_rotary_pairs_stay_together_and_frequencies_follow() -> None:
    net, graph = traced(Rotary())
    (group,) = (group for group in graph.prunable if group.name.startswith("attention"))
    rows = {one.tensor: one.index for one in group.slices}
    assert rows["attention.query.weight"][1].tolist() == [1, 4, 7, 10, 13, 16, 19, 22]
    assert rows["attention.frequencies"].tolist() == [[0], [1], [2]]
    mask_channels_(net, graph, {group.name: [1]})
    small = slim(net, graph)
    assert torch.equal(small.attention.frequencies, net.attention.frequencies[[0, 2]])


def test_queries_and_keys_are_separate_from_values_where_the_code_allows_it() -> None:
    _, graph = traced(SdpaInner())
    query, value = graph["attention.query"], graph["attention.value"]
    assert [(one.tensor, one.roles) for one in query.masked_slices] == [
        ("attention.query.weight", (Role.PRODUCER, Role.FACTOR)),
        ("attention.query.bias", (Role.PRODUCER, Role.FACTOR)),
    ]
    assert [one.tensor for one in value.masked_slices] == ["attention.out.weight"]
    assert query.ranked_slices == query.masked_slices


def test_queries_and_keys_share_the_factor() -> None:
    net, graph = traced(Sdpa())
    small = with_widths(net, graph, {"attention.query": 2})
    factor = (2 / 5) ** 0.25
    for name in ("query", "key"):
        dense, new = getattr(net.attention, name), getattr(small.attention, name)
        for before, after in ((dense.weight, new.weight), (dense.bias, new.bias)):
            torch.testing.assert_close(after, before.unflatten(0, (4, 5))[:, :2].flatten(0, 1) * factor)
    assert torch.equal(
        small.attention.value.weight, net.attention.value.weight.unflatten(0, (4, 5))[:, :2].flatten(0, 1)
    )


def test_only_queries_and_keys_of_a_fused_projection_change() -> None:
    net, graph = traced(Fused("chunk"))
    assert {(scale.target, scale.ranges) for scale in graph.scales} == {
        ("attention.qkv.weight", ((0, 40),)),
        ("attention.qkv.bias", ((0, 40),)),
    }
    small = with_widths(net, graph, {"attention.qkv": 3})
    kept = net.attention.qkv.bias.view(3, 4, 5)[:, :, :3]
    wanted = torch.cat([kept[:2] * (3 / 5) ** 0.25, kept[2:]])
    torch.testing.assert_close(small.attention.qkv.bias, wanted.flatten())


def test_a_graph_and_a_network_survive_a_file(tmp_path: Path) -> None:
    net, graph = traced(Fused("split"))
    graph.save(tmp_path / "net.graph")
    graph = ChannelGraph.load(tmp_path / "net.graph")
    mask_channels_(net, graph, {"attention.qkv": [1, 4]})
    small = slim(net, graph)
    x = example()
    torch.testing.assert_close(small(x), net(x))
    save_slim(small, tmp_path / "slim.safetensors")
    loaded = load_slim(Block(Fused("split")), tmp_path / "slim.safetensors").eval()
    assert torch.equal(loaded(x), small(x))


def test_multihead_attention_has_all_heads_of_a_smaller_width(tmp_path: Path) -> None:
    net, graph = traced(Multihead())
    mask_channels_(net, graph, {"attention.attention": [0], "embed": range(4)})
    small = slim(net, graph)
    layer = small.attention.attention
    assert (layer.num_heads, layer.head_dim, layer.embed_dim) == (4, 2, 8)
    x = example()
    torch.testing.assert_close(small(x), net(x))
    save_slim(small, tmp_path / "slim.safetensors")
    loaded = load_slim(Block(Multihead()), tmp_path / "slim.safetensors").eval()
    assert torch.equal(loaded(x), small(x))


@pytest.mark.parametrize("build", [Sdpa, SdpaInner, Rotary, Multihead, ScaleArgument, lambda: Scaled("scores")])
def test_costs_count_the_width(build: Callable[[], nn.Module]) -> None:
    net, graph = traced(build())
    groups = [group for group in graph.prunable if group.name.startswith("attention")]
    for widths in ({}, {group.name: 2 for group in groups}):
        small = with_widths(net, graph, widths)
        assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(widths))
        assert int(graph.macs(widths)) == int(trace_channels(small, example(), verify=False).macs())
        if isinstance(net.attention, Scaled):  # kernels of scaled_dot_product_attention are not counted on a CPU
            with FlopCounterMode(display=False) as counter:
                small(example())
            assert counter.get_total_flops() == 2 * int(graph.macs(widths))


def test_the_state_of_an_optimizer_follows_the_factor() -> None:
    """A step of the slim network is a step of the masked one: its gradient is divided by the factor."""
    net, graph = traced(Fused("chunk"))
    net, x = net.double(), example(torch.float64)
    mask_channels_(net, graph, {"attention.qkv": [2]})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(x).square().sum().backward()
    optimizer.step()
    mask_channels_(net, graph, {"attention.qkv": [2]})
    small = slim(net, graph)
    new = slim_optimizer(optimizer, net, small, graph)
    state = optimizer.state[net.attention.qkv.weight]["momentum_buffer"].view(3, 4, 5, 12)[:, :, [0, 1, 3, 4]]
    state = torch.cat([state[:2] / (4 / 5) ** 0.25, state[2:]]).flatten(0, 2)
    torch.testing.assert_close(new.state[small.attention.qkv.weight]["momentum_buffer"], state)


def test_the_default_is_heads_and_other_words_are_refused() -> None:
    net = Block(Sdpa()).eval()
    assert heads(trace_channels(net, example())) == [4]
    assert heads(ecc.inspect(net, example(), attention="width").graph) == [5]
    with pytest.raises(BadWidths, match="attention='columns' is none of heads, width"):
        trace_channels(net, example(), attention="columns")


def test_a_width_of_one() -> None:
    net, graph = traced(Scaled("queries"))
    mask_channels_(net, graph, {g.name: range(1, g.width) for g in graph.prunable if g.name.startswith("attention")})
    small = slim(net, graph)
    assert small.attention.query.out_features == 4
    x = example()
    torch.testing.assert_close(small(x), net(x))
