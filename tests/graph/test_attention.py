"""Heads of attention are units, in every style of code; where they cannot be, the reason is true."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ecc.export import load_slim, save_slim
from ecc.graph import ChannelGraph, mask_channels_, slim, trace_channels, with_widths
from ecc.graph.trace import first_equal_modules

from .attention_nets import FROZEN, PRUNABLE, Block, Fused, Grouped, LiteralHeads, Sdpa, SizesFromInput


def example(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 7, 3, dtype=dtype)


def traced(attention: nn.Module, **options: bool) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    net = Block(attention).eval()
    return net, trace_channels(net, example(), **options)


def difference_after_a_cut(net: nn.Module, graph: ChannelGraph, seed: int, share: float = 0.4) -> float:
    """Largest difference between the masked and the slim network in float64."""
    net = with_widths(net, graph, {}).double()
    generator = torch.Generator().manual_seed(seed)
    for group in graph.prunable:
        gone = torch.randperm(group.width, generator=generator)[: max(1, int(share * group.width))]
        mask_channels_(net, graph, {group.name: gone[: group.width - group.min_width]})
    small = slim(net, graph)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())
    worst = 0.0
    for training in (False, True):
        x = example(torch.float64)
        worst = max(worst, float((net.train(training)(x) - small.train(training)(x)).abs().max().detach()))
    return worst


def heads(graph: ChannelGraph) -> list[int]:
    return [group.width for group in graph.prunable if group.name.startswith("attention")]


@pytest.mark.parametrize("name", PRUNABLE)
def test_heads_are_prunable_and_exact(name: str) -> None:
    build, count = PRUNABLE[name]
    net, graph = traced(build())
    assert set(heads(graph)) == {count}, [(group.name, group.width, group.frozen) for group in graph.groups]
    assert graph["mlp.0"].frozen is None
    for seed in range(3):
        assert difference_after_a_cut(net, graph, seed) < 1e-9
    assert traced(build(), verify=False)[1].fingerprint == graph.fingerprint  # the trace alone finds it


def test_heads_whose_width_comes_from_the_input_are_pruned_with_its_channels() -> None:
    for verify in (True, False):
        net, graph = traced(SizesFromInput(), verify=verify)
        both = [g for g in graph.prunable if any(one.tensor.startswith("attention") for one in g.slices)]
        assert both, [(group.name, group.width, group.frozen) for group in graph.groups]
        assert all(any(not one.tensor.startswith("attention") for one in group.slices) for group in both)
        assert difference_after_a_cut(net, graph, 0) < 1e-9


@pytest.mark.parametrize("name", FROZEN)
def test_heads_that_cannot_be_pruned_have_a_reason(name: str) -> None:
    build, why = FROZEN[name]
    for verify in (True, False):
        net, graph = traced(build(), verify=verify)
        reasons = [group.frozen for group in graph.groups if group.name.startswith("attention")]
        assert any(reason is not None and why in reason for reason in reasons), reasons
        assert not any(reason is not None and "verification" in reason for reason in reasons), reasons
        assert graph["mlp.0"].frozen is None
        assert difference_after_a_cut(net, graph, 0) < 1e-9


def test_a_key_head_goes_with_its_query_heads() -> None:
    _, graph = traced(Grouped("sdpa", heads=6, kv_heads=3))
    (group,) = (group for group in graph.prunable if group.name.startswith("attention"))
    sizes = {(one.tensor, one.axis): one.index.shape[1] for one in group.slices}
    rows = {name: sizes[f"attention.{name}.weight", 0] for name in ("query", "key", "value")}
    assert rows == {"query": 10, "key": 5, "value": 5}
    assert sizes["attention.out.weight", 1] == 10


def test_attributes_follow_the_heads_and_survive_a_file(tmp_path: Path) -> None:
    net, graph = traced(Fused("split"))
    assert {(path, name) for path, name, _ in graph.features} == {
        ("attention", "num_heads"),
        ("attention", "inner_dim"),
    }
    graph.save(tmp_path / "net.graph")
    graph = ChannelGraph.load(tmp_path / "net.graph")
    mask_channels_(net, graph, {"attention.qkv": [1]})
    small = slim(net, graph)
    assert (small.attention.num_heads, small.attention.inner_dim, small.attention.head_dim) == (3, 15, 5)
    assert (net.attention.num_heads, net.attention.inner_dim) == (4, 20)
    save_slim(small, tmp_path / "slim.safetensors")
    loaded = load_slim(Block(Fused("split")), tmp_path / "slim.safetensors").eval()
    x = example()
    assert torch.equal(loaded(x), small(x))
    again = trace_channels(loaded, x)
    assert heads(again) == [3]


def test_costs_count_the_heads() -> None:
    net, graph = traced(Sdpa())
    for widths in ({}, {"attention.query": 1}):
        small = with_widths(net, graph, widths)
        assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(widths))
        assert int(graph.macs(widths)) == int(trace_channels(small, example(), verify=False).macs())


class TwoBlocks(nn.Module):
    """Equal attention in two blocks, of which only one has its heads written in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Sdpa(), LiteralHeads(), Sdpa())
        self.embed, self.head = nn.Linear(3, 12), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


def test_code_that_stops_in_one_module_stops_no_other() -> None:
    graph = trace_channels(TwoBlocks().eval(), example())
    prunable = {group.name: group.width for group in graph.prunable}
    assert prunable["blocks.0.query"] == prunable["blocks.2.query"] == 4
    assert not any("blocks.1.query" in name for name in prunable)


def test_equal_modules_are_found() -> None:
    found = first_equal_modules(TwoBlocks())
    assert found["blocks.2"] == found["blocks.0"] == "blocks.0"
    assert found["blocks.1"] == "blocks.1"
    assert found["blocks.2.query"] == "blocks.0.query"
