"""Channel graphs: widths, costs, fingerprints and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ecc.errors import BadFile, BadWidths
from ecc.graph import AffineSize, ChannelGraph, Layer, Role, StructureSpec, trace_channels, with_widths
from ecc.graph.structure import CostTable, TensorShape, width_of
from ecc.records import from_json, to_json
from graph.by_hand import IRREGULAR, by_hand
from graph.cases import CASES, Residual, call, chain, graph_of, named, traced

COSTS = ("macs", "parameters", "weight_bytes", "activation_bytes")


def random_widths(graph: ChannelGraph, seed: int) -> dict[str, int]:
    generator = torch.Generator().manual_seed(seed)
    return {g.name: int(torch.randint(g.min_width, g.width + 1, (), generator=generator)) for g in graph.prunable}


# ---------------------------------------------------------------- widths


def test_widths_are_in_the_order_of_the_groups() -> None:
    graph = graph_of("chain")
    for owner in (graph, graph.structure):
        assert owner.widths().tolist() == [8, 6, 4]
        assert owner.widths({"conv1": 2.5, "conv3": 4}).tolist() == [2.5, 6, 4]
        assert owner.widths().dtype == torch.float64
    assert graph.full_widths == {"conv1": 8, "conv2": 6, "conv3": 4}
    assert graph["conv1"] is graph.groups[0]
    assert graph["conv1"].layers(Role.CONSUMER) == ("conv2",)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"conv9": 1}, "no channel group is called 'conv9'. Groups: conv1, conv2, conv3."),
        *(({"conv1": w}, f"width {w} of group 'conv1' is outside 1..8.") for w in (0, 9, float("nan"), float("inf"))),
        ({"conv3": 3}, "group 'conv3' is not prunable: it is an output of the network."),
    ],
)
def test_wrong_widths_are_refused(widths: dict[str, float], message: str) -> None:
    graph = graph_of("chain")
    with pytest.raises(BadWidths) as caught:
        graph.widths(widths)
    assert str(caught.value) == message
    with pytest.raises(BadWidths):
        graph.structure.widths(widths)


def test_a_group_has_a_minimum_width() -> None:
    first, last = by_hand().groups
    graph = by_hand(groups=(replace(first, min_width=2), last))
    assert graph.widths({"first": 2}).tolist() == [2, 2]
    with pytest.raises(BadWidths, match=r"width 1 of group 'first' is outside 2\.\.3\."):
        graph.widths({"first": 1})
    with pytest.raises(BadWidths, match=r"widths has shape \(3,\), expected \(2,\)."):
        graph.macs(torch.ones(3))


@pytest.mark.parametrize("name", CASES)
def test_every_index_is_in_range_and_belongs_to_one_unit(name: str) -> None:
    net, _, graph = traced(name)
    tensors = dict(net.state_dict())
    seen: set[tuple[str, int, int]] = set()
    for group in graph.groups:
        for one in group.slices:
            assert len(one.index) == group.width
            assert 0 <= int(one.index.min()) <= int(one.index.max()) < tensors[one.tensor].shape[one.axis]
            indices = {(one.tensor, one.axis, k) for k in one.index.flatten().tolist()}
            assert len(indices) == one.index.numel()
            assert not indices & seen
            seen |= indices
    assert all(graph.full_shapes[key] == tensors[key].shape for key in graph.full_shapes)
    for group, least, full in zip(graph.groups, graph.structure.min_widths, graph.structure.full_widths, strict=True):
        assert least == (full if group.frozen is not None else group.min_width)


# ---------------------------------------------------------------- costs


def test_costs_of_layers_by_hand() -> None:
    """A 3 x 3 convolution of 3 channels on 64 positions, then a linear layer; s is the width between them."""
    s, columns, three = AffineSize(0, ((0, 1),)), AffineSize(0, ((0, 64),)), AffineSize(3)
    layers = [
        Layer("conv", "conv", 9 * 64, three, s, AffineSize(192), columns, 4, ("conv.weight",)),
        Layer("fc", "linear", 1, columns, AffineSize(5), columns, AffineSize(5), 2, ("fc.weight",)),
        Layer("again", "linear", 1, columns, AffineSize(5), columns, AffineSize(5), 2, ("fc.weight",)),
    ]
    tensors = [
        TensorShape("conv.weight", (s, three, three, three), 4, True),
        TensorShape("fc.weight", (AffineSize(5), columns), 2, True),
        TensorShape("mean", (s,), 4, False),
    ]
    costs, widths = CostTable(layers, tensors), torch.tensor([7.0])
    assert costs.macs_per_layer(widths).tolist() == [9 * 64 * 3 * 7, 64 * 7 * 5, 64 * 7 * 5]
    assert costs.elements_per_tensor(widths).tolist() == [7 * 27, 5 * 64 * 7, 7]
    assert costs.parameters(widths) == 7 * 27 + 5 * 64 * 7
    assert costs.weight_bytes(widths) == 4 * 7 * 27 + 2 * 5 * 64 * 7 + 4 * 7
    # A shared weight is stored once and used by both layers; no layer uses `mean`.
    assert costs.weight_bytes_per_layer(widths).tolist() == [4 * 7 * 27, *[2 * 5 * 64 * 7] * 2]
    assert costs.activation_bytes_per_layer(widths).tolist() == [4 * (192 + 64 * 7), *[2 * (64 * 7 + 5)] * 2]
    assert [layers[0].depends_on(k) for k in range(2)] == [True, False]
    assert [float(getattr(CostTable([], []), name)(torch.empty(0))) for name in COSTS] == [0, 0, 0, 0]
    assert AffineSize(3, ((0, 2), (2, 5))).at([10, 99, 4]) == 3 + 2 * 10 + 5 * 4
    assert width_of(1).at([10, 20]) == 20


def counted_macs(net: nn.Module, inputs: Any) -> int:
    # The counter does not know fused attention on the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call(net.eval(), inputs)
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize("name", CASES)
def test_costs_are_those_of_the_network_at_these_widths(name: str) -> None:
    net, inputs, graph = traced(name)
    structure = graph.structure
    for widths in ({}, random_widths(graph, 1), {g.name: g.min_width for g in graph.prunable}):
        small = with_widths(net, graph, widths)
        tensors = {id(t): t for t in (*small.parameters(), *small.buffers())}
        assert int(graph.macs(widths)) == counted_macs(small, inputs)
        assert int(graph.parameters(widths)) == sum(p.numel() for p in small.parameters())
        assert int(graph.weight_bytes(widths)) == sum(t.numel() * t.element_size() for t in tensors.values())
        for cost in COSTS:
            assert float(getattr(structure.costs, cost)(structure.widths(widths))) == float(
                getattr(graph, cost)(widths)
            )


@pytest.mark.parametrize("name", ["chain", "flattened chain", "conv1d", "conv3d", "transposed", "depthwise", "grouped"])
def test_activation_bytes_of_a_chain_are_what_its_layers_read_and_write(name: str) -> None:
    net, inputs, graph = traced(name)
    for widths in ({}, random_widths(graph, 2)):
        small, total = with_widths(net, graph, widths), 0

        def count(module: nn.Module, args: Any, result: Tensor) -> None:
            nonlocal total
            total += sum(t.numel() * t.element_size() for t in (*args, result))

        for layer in small.children():
            if not isinstance(layer, nn.Flatten):  # a view moves nothing
                layer.register_forward_hook(count)
        call(small.eval(), inputs)
        assert int(graph.activation_bytes(widths)) == total


def test_an_addition_reads_both_operands() -> None:
    graph = graph_of("layer scale")  # batch 2, 64 positions, 8 channels: 1,024 elements per tensor
    added = [layer for layer in graph.layers if layer.kind == "elementwise"]
    full = graph.widths().tolist()
    assert [(layer.reads.at(full), layer.writes.at(full)) for layer in added] == [(1024, 1024), (2048, 1024)]


def test_bytes_depend_on_the_precision_and_macs_do_not() -> None:
    net, inputs, graph = traced("chain")
    double = trace_channels(net.double(), inputs.double(), verify=False)
    assert double.activation_bytes() == 2 * graph.activation_bytes()
    assert double.macs() == graph.macs() == graph.macs(graph.widths().float())
    assert graph.macs(graph.widths().float()).dtype == torch.float64


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", ["residual", "shared module", "grouped", "concat", "transformer block"])
def test_gradients_are_the_finite_differences(name: str, cost: str) -> None:
    """Costs are polynomials of degree two in the widths, so central differences with step 1 are exact."""
    graph = graph_of(name)
    function = getattr(graph, cost)
    widths = graph.widths() - 0.5
    (slope,) = torch.autograd.grad(function(widths.requires_grad_()), widths)
    steps = torch.eye(len(widths), dtype=torch.float64)
    differences = torch.stack([(function(widths + step) - function(widths - step)) / 2 for step in steps])
    torch.testing.assert_close(slope, differences.detach(), rtol=1e-12, atol=1e-9)
    assert slope.abs().max() > 0


def test_the_share_of_macs_of_a_group_includes_its_depthwise_layer() -> None:
    graph = graph_of("depthwise")
    conv1, dw, pw, head = 9 * 3 * 8, 9 * 8, 8 * 6, 6 * 4
    total = conv1 + dw + pw + head
    assert graph.share_of_macs(graph["conv1"]) == pytest.approx((conv1 + dw + pw) / total)
    assert graph.share_of_macs(graph["pw"]) == pytest.approx((pw + head) / total)
    table = trace_channels(named(table=nn.Embedding(10, 8)), torch.tensor([[1, 2]]))
    assert table.share_of_macs(table["table"]) == 0


class Joined(nn.Module):
    """13 channels and 3 of the input are concatenated to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 13, 3, stride=2, padding=1)
        self.after, self.head = nn.Conv2d(16, 20, 1), nn.Conv2d(20, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.wide(x), F.max_pool2d(x, 2)], 1)
        y: Tensor = self.head(torch.relu(self.after(joined)))
        return y


def test_concatenated_groups_are_pruned_so_that_the_sum_stays_a_multiple() -> None:
    structure = trace_channels(Joined().eval(), torch.randn(1, 3, 8, 8)).structure
    assert dict(zip(structure.groups, structure.width_remainders(8), strict=True)) == {"wide": 5, "after": 0, "head": 0}
    assert set(structure.width_remainders(1)) == {0}
    for width, wide, after in ((0, 5, 1), (4, 5, 8), (5, 5, 8), (6, 13, 8), (9, 13, 16), (13, 13, 16)):
        assert structure.padded([width, width, 4], 8) == [wide, after, 4]
    assert structure.padded([13, 17, 4], 8) == [13, 20, 4]  # 24 is more than the full width
    assert structure.padded([3, 17, 4], 1) == [3, 17, 4]


# ---------------------------------------------------------------- fingerprints


def test_a_fingerprint_depends_on_structure_only() -> None:
    images = torch.randn(2, 3, 8, 8)
    fingerprint = trace_channels(chain(), images, verify=False).fingerprint
    assert trace_channels(chain(), images + 1).fingerprint == fingerprint
    others = [
        trace_channels(chain(), torch.randn(2, 3, 9, 9), verify=False),  # another resolution
        trace_channels(chain(), torch.randn(1, 3, 8, 8), verify=False),  # another batch size
        trace_channels(chain().double(), images.double(), verify=False),
        trace_channels(chain(), images, verify=False, freeze=["conv1"]),
        trace_channels(Residual(), images, verify=False),
    ]
    assert len({fingerprint, *(other.fingerprint for other in others)}) == 6
    graph = by_hand()
    groups = (graph.groups[0], replace(graph.groups[1], frozen="another wording"))
    assert by_hand(groups=groups, notes=("a note",), max_relative_diff=1e-7).fingerprint == graph.fingerprint
    assert by_hand(IRREGULAR.flip(0)).fingerprint != graph.fingerprint
    assert graph.fingerprint_if(["last"]) == graph.fingerprint != graph.fingerprint_if([])


# ---------------------------------------------------------------- files


def saved(tmp_path: Path, graph: ChannelGraph | None = None) -> Path:
    path = tmp_path / "net.graph"
    (graph or by_hand()).save(path)
    return path


def edited(path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadFile) as caught:
        ChannelGraph.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_the_same_after_saving_and_loading(name: str, tmp_path: Path) -> None:
    graph = replace(graph_of(name), max_relative_diff=1e-7)
    first, second = tmp_path / "first", tmp_path / "second"
    graph.save(first)
    loaded = ChannelGraph.load(first)
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert loaded.fingerprint == graph.fingerprint
    for field in ("layers", "tensors", "features", "notes", "max_relative_diff"):
        assert getattr(loaded, field) == getattr(graph, field)
    for mine, theirs in zip(loaded.groups, graph.groups, strict=True):
        assert replace(mine, slices=()) == replace(theirs, slices=())
        for one, other in zip(mine.slices, theirs.slices, strict=True):
            assert (one.tensor, one.axis, one.roles) == (other.tensor, other.axis, other.roles)
            assert torch.equal(one.index, other.index)
            assert one.index.dtype == other.index.dtype
    structure = graph.structure
    again = from_json(to_json(structure), StructureSpec, "")
    assert (again, hash(again)) == (structure, hash(structure))


@pytest.mark.parametrize(
    ("index", "regular"),
    [
        (IRREGULAR, None),
        (torch.tensor([[0], [1], [3]]), None),
        (torch.tensor([[1], [2], [3]]), [1, 1, 1, 0]),
        (torch.tensor([[3], [2], [1]]), [3, -1, 1, 0]),
        (torch.tensor([[0, 3], [1, 4], [2, 5]]), [0, 1, 2, 3]),
        (torch.tensor([[0, 3], [1, 5], [2, 4]]), None),
    ],
)
def test_regular_indices_are_stored_as_four_numbers(index: Tensor, regular: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, by_hand(index))
    record = json.loads(path.read_text())["groups"][0]["slices"][1]
    assert record["regular"] == regular
    assert record["index"] == (None if regular else index.tolist())
    assert torch.equal(ChannelGraph.load(path)["first"].slices[1].index, index)


def set_at(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return edit


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "width": (set_at("groups", 1, "width", value=3), "was changed"),
    "index": (set_at("groups", 0, "slices", 1, "index", value=[[0], [1], [2]]), "was changed"),
    "unknown tensor": (set_at("groups", 0, "slices", 0, "tensor", value="../../etc/passwd"), "is damaged"),
    "index out of range": (set_at("groups", 0, "slices", 1, "index", value=[[3], [0], [4]]), "is damaged"),
    "huge size": (set_at("tensors", 0, "axes", 1, value=[1 << 62, []]), "is damaged"),
    "memory of 48 GiB": (
        set_at(
            *("groups", 0, "slices"),
            value=[{"tensor": "first.weight", "axis": 0, "roles": [], "regular": [0, 0, 1 << 21, 0]}] * 1000,
        ),
        "is damaged (ValueError)",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_or_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    edit, message = EDITS[name]
    assert message in refusal(edited(saved(tmp_path), edit))
