from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ecc.graph import ChannelGraph, trace_channels, with_widths
from ecc.graph.structure import AffineSize, CostTable, Layer, TensorShape
from ecc.records import from_json, to_json
from graph.cases import CASES, Inputs, call, traced

COSTS = ("macs", "parameters", "weight_bytes", "activation_bytes")


def random_widths(graph: ChannelGraph, seed: int) -> dict[str, int]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: int(torch.randint(g.min_width, g.width + 1, (), generator=generator)) for g in graph.prunable}


# ---------------------------------------------------------------- extents by hand


def test_an_extent_is_a_fixed_part_and_multiples_of_widths() -> None:
    extent = AffineSize(3, ((0, 2), (2, 5)))
    assert extent.at([10, 99, 4]) == 3 + 2 * 10 + 5 * 4
    assert AffineSize(7).at([]) == 7


def test_extents_layers_and_tensors_come_back_from_json() -> None:
    extent = AffineSize(3, ((0, 2), (2, 5)))
    layer = Layer("a.b", "conv", 9, extent, AffineSize(1), AffineSize(2), extent, 4, ("a.b.weight",))
    tensor = TensorShape("a.b.weight", (extent, AffineSize(3)), 2, True)
    assert from_json(to_json(extent), AffineSize, "") == extent
    assert from_json(to_json(layer), Layer, "") == layer
    assert from_json(to_json(tensor), TensorShape, "") == tensor


def test_a_layer_depends_on_the_groups_in_its_macs() -> None:
    layer = Layer(
        "a",
        "conv",
        9,
        AffineSize(0, ((0, 1),)),
        AffineSize(0, ((2, 1),)),
        AffineSize(0, ((3, 1),)),
        AffineSize(1),
        4,
        (),
    )
    assert [layer.depends_on(k) for k in range(4)] == [True, False, True, False]


def test_costs_of_two_layers_by_hand() -> None:
    """A 3 x 3 convolution of 3 channels on 64 positions, then a linear layer: s is the width between them."""
    s = AffineSize(0, ((0, 1),))
    layers = [
        Layer(
            "conv", "conv", 9 * 64, AffineSize(3), s, AffineSize(3 * 64), AffineSize(0, ((0, 64),)), 4, ("conv.weight",)
        ),
        Layer(
            "fc",
            "linear",
            1,
            AffineSize(0, ((0, 64),)),
            AffineSize(5),
            AffineSize(0, ((0, 64),)),
            AffineSize(5),
            2,
            ("fc.weight",),
        ),
    ]
    tensors = [
        TensorShape("conv.weight", (s, AffineSize(3), AffineSize(3), AffineSize(3)), 4, True),
        TensorShape("fc.weight", (AffineSize(5), AffineSize(0, ((0, 64),))), 2, True),
        TensorShape("mean", (s,), 4, False),
    ]
    costs, widths = CostTable(layers, tensors), torch.tensor([7.0])
    assert costs.macs_per_layer(widths).tolist() == [9 * 64 * 3 * 7, 64 * 7 * 5]
    assert costs.macs(widths) == 9 * 64 * 3 * 7 + 64 * 7 * 5
    assert costs.elements_per_tensor(widths).tolist() == [7 * 27, 5 * 64 * 7, 7]
    assert costs.parameters(widths) == 7 * 27 + 5 * 64 * 7
    assert costs.weight_bytes(widths) == 4 * 7 * 27 + 2 * 5 * 64 * 7 + 4 * 7
    assert costs.weight_bytes_per_layer(widths).tolist() == [4 * 7 * 27, 2 * 5 * 64 * 7]  # no layer uses `mean`
    assert costs.activation_bytes_per_layer(widths).tolist() == [4 * (192 + 64 * 7), 2 * (64 * 7 + 5)]
    assert costs.activation_bytes(widths) == 4 * (192 + 64 * 7) + 2 * (64 * 7 + 5)


def test_a_network_of_nothing_costs_nothing() -> None:
    costs = CostTable([], [])
    assert [float(getattr(costs, name)(torch.empty(0))) for name in COSTS] == [0, 0, 0, 0]


# ---------------------------------------------------------------- what a really with_widths network has


def counted_macs(net: nn.Module, inputs: Inputs) -> int:
    # The counter knows no fused attention on the CPU; as plain products it counts it.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call(net.eval(), inputs)
    return int(counter.get_total_flops()) // 2


def counted_bytes(net: nn.Module) -> int:
    tensors = {id(t): t for t in (*net.parameters(), *net.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("name", CASES)
def test_macs_and_sizes_are_those_of_the_resized_network(name: str) -> None:
    net, inputs, graph = traced(name)
    for widths in ({}, random_widths(graph, 1), {g.name: g.min_width for g in graph.prunable}):
        small = with_widths(net, graph, widths)
        assert int(graph.macs(widths)) == counted_macs(small, inputs)
        assert int(graph.parameters(widths)) == sum(p.numel() for p in small.parameters())
        assert int(graph.weight_bytes(widths)) == counted_bytes(small)


def counted_activation_bytes(net: nn.Module, inputs: Inputs) -> int:
    """What each layer of a plain chain is given and gives, as its hooks see it."""
    total = 0

    def count(module: nn.Module, args: Any, result: Tensor) -> None:
        nonlocal total
        total += sum(t.numel() * t.element_size() for t in (*args, result))

    for layer in net.children():
        if not isinstance(layer, nn.Flatten):  # a view moves nothing
            layer.register_forward_hook(count)
    call(net.eval(), inputs)
    return total


@pytest.mark.parametrize("name", ["chain", "flattened chain", "conv1d", "conv3d", "transposed", "depthwise", "grouped"])
def test_activation_bytes_of_a_chain_are_what_its_layers_read_and_write(name: str) -> None:
    net, inputs, graph = traced(name)
    for widths in ({}, random_widths(graph, 2)):
        small = with_widths(net, graph, widths)
        assert int(graph.activation_bytes(widths)) == counted_activation_bytes(small, inputs)


def test_an_addition_reads_both_of_its_operands() -> None:
    _, _, graph = traced("layer scale")  # batch 2, 64 positions, 8 channels: 1,024 elements a tensor
    added = [layer for layer in graph.layers if layer.kind == "elementwise"]
    full = graph.widths().tolist()
    assert [(layer.reads.at(full), layer.writes.at(full)) for layer in added] == [(1024, 1024), (2048, 1024)]


def test_bytes_follow_the_precision() -> None:
    net, inputs, graph = traced("chain")
    double = trace_channels(net.double(), inputs.double(), verify=False)
    assert double.activation_bytes() == 2 * graph.activation_bytes()
    assert double.macs() == graph.macs()


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", ["chain", "residual", "shared module", "grouped", "concat", "transformer block"])
def test_gradients_are_the_finite_differences(name: str, cost: str) -> None:
    """Costs are polynomials of degree two in the widths, so central differences with step 1 are exact."""
    _, _, graph = traced(name)
    function = getattr(graph, cost)
    widths = graph.widths() - 0.5
    (slope,) = torch.autograd.grad(function(widths.requires_grad_()), widths)
    steps = torch.eye(len(widths), dtype=torch.float64)
    differences = torch.stack([(function(widths + step) - function(widths - step)) / 2 for step in steps])
    torch.testing.assert_close(slope, differences.detach(), rtol=1e-12, atol=1e-9)
    assert slope.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_widths_of_any_precision_give_exact_costs(dtype: torch.dtype) -> None:
    _, _, graph = traced("chain")
    cost = graph.macs(graph.widths().to(dtype))
    assert cost.dtype == torch.float64
    assert cost == graph.macs()


# ---------------------------------------------------------------- weights by layer


def test_weight_bytes_belong_to_the_layers_that_use_them() -> None:
    """A tied weight is stored once but fetched by both layers; a buffer that no layer uses is not fetched."""
    s = AffineSize(0, ((0, 1),))
    layers = [
        Layer("up", "linear", 1, AffineSize(3), s, AffineSize(3), s, 4, ("weight", "bias")),
        Layer("relu", "elementwise", 0, AffineSize(0), AffineSize(0), s, s, 4, ()),
        Layer("down", "linear", 1, s, AffineSize(3), s, AffineSize(3), 4, ("weight",)),
    ]
    tensors = [
        TensorShape("bias", (s,), 2, True),
        TensorShape("unused", (AffineSize(100),), 4, False),
        TensorShape("weight", (s, AffineSize(3)), 4, True),
    ]
    costs, widths = CostTable(layers, tensors), torch.tensor([7.0])
    assert costs.weight_bytes_per_layer(widths).tolist() == [4 * 21 + 2 * 7, 0, 4 * 21]
    assert CostTable([], []).weight_bytes_per_layer(torch.empty(0)).tolist() == []


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_used_by_some_layer(name: str) -> None:
    _, _, graph = traced(name)
    widths = graph.widths(random_widths(graph, 3))
    used = {tensor for layer in graph.layers for tensor in layer.tensors}
    sizes = graph.costs.elements_per_tensor(widths).tolist()
    stored = sum(n * t.item_bytes for t, n in zip(graph.tensors, sizes, strict=True) if t.name in used)
    assert float(graph.costs.weight_bytes_per_layer(widths).sum()) >= stored > 0
