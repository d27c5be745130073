"""Slimming must keep outputs, costs, shapes, and the dense network."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain, combinations, islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import ecc
from ecc.graph import ChannelGraph, ChannelGroup

TOLERANCE = 1e-4
"""Allowed difference of float32 sums in another order, relative to the largest output."""


def run(net: nn.Module, example: Any, *, training: bool = False) -> list[Tensor]:
    """All tensors of the output."""
    args = example if isinstance(example, tuple) else (example,)
    args, kwargs = ((), example) if isinstance(example, dict) else (args, {})
    torch.manual_seed(0)
    net.train(training)
    with torch.no_grad():
        result = net(*[a.clone() for a in args], **{k: v.clone() for k, v in kwargs.items()})
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def assert_same_outputs(left: nn.Module, right: nn.Module, example: Any, what: str, *, training: bool = False) -> None:
    """In float32, or in float64 if sums cancel."""
    if difference(run(left, example, training=training), run(right, example, training=training)) > TOLERANCE:
        left, right = copy.deepcopy(left).double(), copy.deepcopy(right).double()
        example = tree_map_only(Tensor, Tensor.double, example)
        worst = difference(run(left, example, training=training), run(right, example, training=training))
        assert worst <= TOLERANCE, f"{what} differ by {worst:.2g}"


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest difference of two outputs, relative to the largest value."""
    assert [t.shape for t in left] == [t.shape for t in right]
    worst = 0.0
    for a, b in zip(left, right, strict=True):
        assert bool(a.isfinite().all())
        worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)))
    return worst


def assert_same_state(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert list(left) == list(right)
    assert all(torch.equal(left[name], right[name]) for name in left)


def without_dropout(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def masked_and_slim(net: nn.Module, graph: ChannelGraph, dead: Mapping[str, list[int]]) -> tuple[nn.Module, nn.Module]:
    """The network with some units masked, and the one without them."""
    masked = copy.deepcopy(net)
    ecc.graph.mask_channels_(masked, graph, {name: torch.tensor(units) for name, units in dead.items() if units})
    return masked, ecc.slim(masked, graph)


def assert_slim_is_exact(
    net: nn.Module, example: Any, graph: ChannelGraph, dead: Mapping[str, list[int]], *, macs: bool
) -> None:
    """Compare the slim network with its graph in size and MACs, and with a network built at those widths.

    `traps.checking.assert_slim_is_masked` compares it with the masked network.
    """
    _, small = masked_and_slim(net, graph, dead)
    widths = {name: graph[name].width - len(units) for name, units in dead.items()}
    assert sum(p.numel() for p in small.parameters()) == graph.parameters(widths)
    if macs:
        with FlopCounterMode(display=False) as counter:
            run(small, example)
        assert counter.get_total_flops() == 2 * graph.macs(widths)

    built = ecc.with_widths(net, graph, widths)
    shapes = {name: tensor.shape for name, tensor in small.state_dict().items()}
    assert {name: tensor.shape for name, tensor in built.state_dict().items()} == shapes
    built.load_state_dict(small.state_dict(), strict=True)
    assert_same_outputs(small, built, example, "outputs of a loaded network")


def checked_groups(graph: ChannelGraph) -> list[ChannelGroup]:
    """The prunable groups. Without verification, groups of two units are not checked, as a note says."""
    return [group for group in graph.prunable if group.width > 2 or graph.max_relative_diff is not None]


def all_masks(graph: ChannelGraph, limit: int = 300) -> Iterator[dict[str, list[int]]]:
    """Every choice of masked units that leaves the minimum width, up to `limit`."""
    groups = checked_groups(graph)
    choices = [
        list(chain.from_iterable(combinations(range(g.width), n) for n in range(g.width - g.min_width + 1)))
        for g in groups
    ]
    for dead in islice(product(*choices), limit):
        yield {group.name: list(units) for group, units in zip(groups, dead, strict=True)}
