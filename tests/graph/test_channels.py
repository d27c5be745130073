from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from ecc.errors import BadWidths
from ecc.graph import ChannelGraph, Role, trace_channels
from graph.by_hand import IRREGULAR, by_hand
from graph.cases import CASES, Residual, chain, named, traced

# ---------------------------------------------------------------- widths


def test_widths_come_in_the_order_of_the_groups() -> None:
    _, _, graph = traced("chain")
    assert graph.widths().tolist() == [8, 6, 4]
    assert graph.widths({"conv2": 5}).tolist() == [8, 5, 4]
    assert graph.widths({"conv1": 2.5, "conv3": 4}).tolist() == [2.5, 6, 4]
    assert graph.widths().dtype == torch.float64
    assert graph.full_widths == {"conv1": 8, "conv2": 6, "conv3": 4}


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"conv9": 1}, "no channel group is called 'conv9'. Groups: conv1, conv2, conv3."),
        ({"conv1": 0}, "width 0 of group 'conv1' is outside 1..8."),
        ({"conv1": 9}, "width 9 of group 'conv1' is outside 1..8."),
        ({"conv1": -1}, "width -1 of group 'conv1' is outside 1..8."),
        ({"conv1": float("nan")}, "width nan of group 'conv1' is outside 1..8."),
        ({"conv1": float("inf")}, "width inf of group 'conv1' is outside 1..8."),
        ({"conv3": 3}, "group 'conv3' cannot be cut: it is an output of the network."),
    ],
)
def test_widths_that_do_not_fit_are_refused(widths: dict[str, float], message: str) -> None:
    _, _, graph = traced("chain")
    with pytest.raises(BadWidths) as caught:
        graph.widths(widths)
    assert str(caught.value) == message


def test_a_group_has_a_least_width() -> None:
    first, last = by_hand().groups
    graph = by_hand(groups=(replace(first, min_width=2), last))
    assert graph.widths({"first": 2}).tolist() == [2, 2]
    with pytest.raises(BadWidths, match=r"width 1 of group 'first' is outside 2\.\.3\."):
        graph.widths({"first": 1})


def test_a_long_list_of_groups_is_cut_short() -> None:
    groups = tuple(replace(by_hand().groups[0], name=f"g{k}") for k in range(9))
    with pytest.raises(BadWidths, match=r"Groups: g0, g1, g2, g3, g4, g5 and 3 more\."):
        by_hand(groups=groups)["g9"]


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    _, _, graph = traced("chain")
    with pytest.raises(BadWidths, match=r"widths has shape \(2,\), expected \(3,\)."):
        graph.macs(torch.ones(2))


def test_groups_are_found_by_name() -> None:
    graph = by_hand()
    assert graph["first"] is graph.groups[0]
    assert graph.prunable == graph.groups[:1]
    assert graph["first"].layers(Role.CONSUMER) == ("last",)
    assert graph["first"].layers(Role.PER_CHANNEL) == ()


# ---------------------------------------------------------------- places


def test_full_shapes_are_the_extents_at_full_width() -> None:
    assert by_hand().full_shapes == {"first.weight": (3, 5), "last.weight": (2, 4)}


@pytest.mark.parametrize("name", CASES)
def test_every_place_lies_in_its_tensor_and_belongs_to_one_unit(name: str) -> None:
    net, _, graph = traced(name)
    tensors = dict(net.state_dict())
    seen: set[tuple[str, int, int]] = set()
    for group in graph.groups:
        for place in group.slices:
            assert len(place.index) == group.width
            assert 0 <= int(place.index.min()) <= int(place.index.max()) < tensors[place.tensor].shape[place.axis]
            indices = {(place.tensor, place.axis, k) for k in place.index.flatten().tolist()}
            assert len(indices) == place.index.numel()
            assert not indices & seen
            seen |= indices
    assert all(graph.full_shapes[key] == tensors[key].shape for key in graph.full_shapes)


# ---------------------------------------------------------------- shares


def test_the_share_of_macs_is_that_of_the_layers_around_a_group() -> None:
    graph = by_hand()  # 5 x 3 + 3 x 2 multiply-accumulates
    assert graph.share_of_macs(graph["first"]) == 1
    assert graph.share_of_macs(graph["last"]) == pytest.approx(6 / 21)


def test_the_share_of_a_carried_group_counts_its_depthwise_layer() -> None:
    _, _, graph = traced("depthwise")
    conv1, dw, pw, head = 9 * 3 * 8, 9 * 8, 8 * 6, 6 * 4
    total = conv1 + dw + pw + head
    assert graph.share_of_macs(graph["conv1"]) == pytest.approx((conv1 + dw + pw) / total)
    assert graph.share_of_macs(graph["pw"]) == pytest.approx((pw + head) / total)


def test_the_share_is_zero_where_nothing_is_multiplied() -> None:
    graph = trace_channels(named(table=nn.Embedding(10, 8)), torch.tensor([[1, 2]]))
    assert graph.share_of_macs(graph["table"]) == 0


def test_the_text_names_every_group_and_its_readers() -> None:
    lines = str(by_hand()).splitlines()
    assert lines[0].endswith(": 1 of 2 channel groups can be cut; 23 parameters, 21 MACs")
    assert lines[1:] == ["  first: 3 units, read by last", "  last: 2 units, frozen: it is an output of the network"]


# ---------------------------------------------------------------- fingerprints


def test_equal_networks_have_equal_fingerprints() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert trace_channels(chain(), images).fingerprint == trace_channels(chain(), images + 1).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        lambda: trace_channels(chain(), torch.randn(2, 3, 9, 9), verify=False),  # another resolution
        lambda: trace_channels(chain(), torch.randn(1, 3, 8, 8), verify=False),  # another batch
        lambda: trace_channels(chain().double(), torch.randn(2, 3, 8, 8).double(), verify=False),
        lambda: trace_channels(chain(), torch.randn(2, 3, 8, 8), verify=False, freeze=["conv1"]),
        lambda: trace_channels(Residual(), torch.randn(2, 3, 8, 8), verify=False),
    ],
)
def test_another_structure_has_another_fingerprint(other: Callable[[], ChannelGraph]) -> None:
    assert other().fingerprint != trace_channels(chain(), torch.randn(2, 3, 8, 8), verify=False).fingerprint


def test_wording_notes_and_proof_are_no_structure() -> None:
    graph = by_hand()
    groups = (graph.groups[0], replace(graph.groups[1], frozen="another wording"))
    assert by_hand(groups=groups, notes=("a note",), max_relative_diff=1e-7).fingerprint == graph.fingerprint


def test_an_index_is_structure() -> None:
    assert by_hand(IRREGULAR.flip(0)).fingerprint != by_hand().fingerprint


def test_its_repr_fits_a_line() -> None:
    _, _, graph = traced("unet")
    assert repr(graph).startswith(f"<ChannelGraph {graph.fingerprint}: {len(graph.prunable)} of ")
    assert len(repr(graph)) < 120
