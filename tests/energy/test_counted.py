from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecc.energy import CountedCost, counted_cost
from ecc.energy.counted import MEANINGS, UNITS
from ecc.errors import BadWidths
from ecc.graph import AffineSize, with_widths
from ecc.graph.structure import TensorShape
from energy.cases import (
    NETWORKS,
    autograd,
    finite_differences,
    graph_of,
    named,
    network,
    random_widths,
    skeleton_of,
    slow_extent,
    widths_of,
)

COUNTS = {
    "macs": "macs",
    "params": "parameters",
    "weight_bytes": "weight_bytes",
    "activation_bytes": "activation_bytes",
}
"""The resource, and the name that the graph counts it under."""
MORE = (*NETWORKS, "transformer block", "tied weights", "unet", "squeeze and excite", "mobilenet_v1")


@pytest.mark.parametrize("resource", COUNTS)
@pytest.mark.parametrize("name", MORE)
def test_it_counts_what_the_graph_counts(name: str, resource: str) -> None:
    graph = graph_of(name)
    cost, count = counted_cost(graph, resource), getattr(graph, COUNTS[resource])
    for widths in (*random_widths(graph.structure, 5), graph.structure.full_widths, graph.structure.min_widths):
        vector = torch.tensor(widths, dtype=torch.float64)
        assert float(cost.value(vector)) == float(count(vector))  # whole numbers: no rounding


@pytest.mark.parametrize("resource", COUNTS)
@given(data=st.data())
@settings(max_examples=40)
def test_it_is_the_graph_s_count_between_whole_widths_too(resource: str, data: st.DataObject) -> None:
    graph = graph_of(data.draw(st.sampled_from(NETWORKS)))
    widths = data.draw(widths_of(graph.structure))
    expected = float(getattr(graph, COUNTS[resource])(widths))
    assert float(counted_cost(graph, resource).value(widths)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["chain", "residual", "depthwise", "concat", "grouped"])
def test_parameters_are_those_of_the_network_that_is_really_cut(name: str) -> None:
    model, _, graph = network(name)
    for widths in random_widths(graph.structure, 3):
        small = with_widths(model, graph, named(graph.structure, widths))
        vector = torch.tensor(widths)
        assert float(counted_cost(graph, "params").value(vector)) == sum(p.numel() for p in small.parameters())
        tensors = (*small.parameters(), *small.buffers())
        assert float(counted_cost(graph, "weight_bytes").value(vector)) == sum(t.nbytes for t in tensors)


# ---------------------------------------------------------------- the largest layer


def slow_peak(name: str, widths: Tensor) -> list[float]:
    """Bytes that each layer reads and writes."""
    return [
        layer.item_bytes * (slow_extent(layer.reads, widths) + slow_extent(layer.writes, widths))
        for layer in skeleton_of(name).layers
    ]


@pytest.mark.parametrize("name", MORE)
def test_the_peak_is_the_largest_layer(name: str) -> None:
    cost = counted_cost(graph_of(name), "peak_bytes")
    rows = torch.from_numpy(random_widths(skeleton_of(name), 6))
    assert cost.value(rows).tolist() == [max(slow_peak(name, row)) for row in rows]


@given(data=st.data())
def test_the_slope_of_the_peak_is_that_of_the_largest_layer(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NETWORKS))
    widths = data.draw(widths_of(skeleton_of(name)))
    cost = counted_cost(graph_of(name), "peak_bytes")
    torch.testing.assert_close(cost.gradient(widths), autograd(cost, widths))
    first, second, *_ = sorted(slow_peak(name, widths), reverse=True)
    if first > 1.5 * second:  # away from the kink
        torch.testing.assert_close(cost.gradient(widths), finite_differences(cost, widths, step=1e-3))


def test_layers_of_equal_size_share_the_slope() -> None:
    """The norm and the activation behind it move the same bytes: each has half of the slope, not all of it."""
    graph = graph_of("chain")  # 2 x 64 positions, 4 bytes; bn1 and relu1 move 2 * 8 channels each, others less
    gradient = counted_cost(graph, "peak_bytes").gradient(graph.widths())
    assert gradient.tolist() == [2 * 2 * 64 * 4, 0, 0]


# ---------------------------------------------------------------- what it says and refuses


@pytest.mark.parametrize("resource", UNITS)
def test_every_count_has_a_unit_and_a_meaning(resource: str) -> None:
    assert counted_cost(graph_of("chain"), resource).unit == ("B" if resource.endswith("bytes") else "")
    assert MEANINGS[resource]


@pytest.mark.parametrize("resource", ["energy", "flops", ""])
def test_what_cannot_be_counted_is_refused(resource: Any) -> None:
    with pytest.raises(BadWidths, match=rf"{resource!r} cannot be counted; these can: macs, params, weight_bytes, "):
        counted_cost(graph_of("chain"), resource)


def test_a_tensor_with_three_axes_that_can_be_cut_is_refused() -> None:
    structure = skeleton_of("chain")
    axes = tuple(AffineSize(0, ((group, 1),)) for group in range(3))
    odd = replace(structure, tensors=(*structure.tensors, TensorShape("odd", axes, 4, True)))
    with pytest.raises(BadWidths, match="tensor odd has 3 axes that can be cut; two are the most counted"):
        CountedCost(odd, "params").value(torch.ones(3))


def test_a_network_without_macs_counts_none() -> None:
    idle = replace(skeleton_of("chain"), layers=())
    assert float(CountedCost(idle, "macs").value(torch.ones(3))) == 0
    assert CountedCost(idle, "activation_bytes").gradient(torch.ones(3)).tolist() == [0, 0, 0]
