from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadFile, BadWidths
from ecc.graph import AffineSize, ChannelGraph, StructureSpec, trace_channels
from ecc.graph.structure import width_of
from ecc.records import from_builtins, from_json, to_builtins, to_json
from graph.cases import CASES, traced


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return traced("residual")[2]  # stem 8 and conv1 6 can be cut; head 5 cannot


@pytest.mark.parametrize("name", CASES)
def test_it_counts_what_its_graph_counts(name: str) -> None:
    graph = traced(name)[2]
    structure = graph.structure
    assert structure.fingerprint == graph.fingerprint
    assert structure.groups == tuple(graph.full_widths)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        widths = {g.name: int(torch.randint(g.min_width, g.width + 1, (), generator=generator)) for g in graph.prunable}
        vector = structure.widths(widths)
        assert vector.tolist() == graph.widths(widths).tolist()
        for cost in ("macs", "parameters", "weight_bytes", "activation_bytes"):
            assert float(getattr(structure.costs, cost)(vector)) == float(getattr(graph, cost)(widths))


@pytest.mark.parametrize("name", CASES)
def test_it_comes_back_from_json(name: str) -> None:
    structure = traced(name)[2].structure
    again = from_json(to_json(structure), StructureSpec, "")
    assert again == structure
    assert hash(again) == hash(structure)


@pytest.mark.parametrize("name", CASES)
def test_frozen_groups_have_no_smaller_width(name: str) -> None:
    graph = traced(name)[2]
    structure = graph.structure
    assert [structure.groups[position] for position in structure.prunable] == [
        group.name for group in graph.prunable if group.min_width < group.width
    ]
    for group, least, full in zip(graph.groups, structure.min_widths, structure.full_widths, strict=True):
        assert least == (full if group.frozen is not None else group.min_width)


def test_groups_not_named_keep_their_full_width(graph: ChannelGraph) -> None:
    structure = graph.structure
    assert structure.widths().tolist() == [8, 6, 5]
    assert structure.widths({"conv1": 2.5}).tolist() == [8, 2.5, 5]
    assert structure.widths({}).dtype == torch.float64


@pytest.mark.parametrize(
    ("widths", "said"),
    [
        ({"nothing": 1}, "no channel group is called 'nothing'"),
        ({"stem": 0}, r"width 0 of group 'stem' is outside 1\.\.8"),
        ({"stem": 9}, r"width 9 of group 'stem' is outside 1\.\.8"),
        ({"stem": float("nan")}, r"width nan of group 'stem' is outside 1\.\.8"),
        ({"head": 4}, r"width 4 of group 'head' is outside 5\.\.5"),
    ],
)
def test_widths_that_do_not_fit_are_refused(graph: ChannelGraph, widths: dict[str, float], said: str) -> None:
    with pytest.raises(BadWidths, match=said):
        graph.structure.widths(widths)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"full_widths": (8, 6)}, "3 groups need 3 full widths and 3 minimum widths"),
        ({"min_widths": (1, 1, 5, 1)}, "3 groups need 3 full widths and 3 minimum widths"),
        ({"min_widths": (0, 1, 5)}, r"the minimum width 0 of group 'stem' is outside 1\.\.8"),
        ({"min_widths": (1, 7, 5)}, r"the minimum width 7 of group 'conv1' is outside 1\.\.6"),
        ({"groups": ("a", "b"), "full_widths": (8, 6), "min_widths": (1, 1)}, "refers to a group outside"),
        ({"tensors": ()}, "layer .stem. uses an unknown tensor"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(graph: ChannelGraph, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadWidths, match=said):
        replace(graph.structure, **changes)


def test_negative_sizes_are_refused(graph: ChannelGraph) -> None:
    first, *rest = graph.structure.layers
    for changes in ({"macs": -1}, {"reads": AffineSize(-1)}, {"writes": AffineSize(1, ((0, -1),))}):
        with pytest.raises(BadWidths, match=r"negative|fewer than no"):
            replace(graph.structure, layers=(replace(first, **changes), *rest))


@pytest.mark.parametrize("key", ["fingerprint", "groups", "full_widths", "min_widths", "layers", "tensors"])
def test_damaged_json_is_refused(graph: ChannelGraph, key: str) -> None:
    data = to_builtins(graph.structure)
    with pytest.raises(BadFile, match=key):
        from_builtins({**data, key: None}, StructureSpec, "a.json")
    del data[key]
    with pytest.raises(BadFile, match=key):
        from_builtins(data, StructureSpec, "a.json")


def test_a_width_is_an_extent() -> None:
    assert width_of(3) == AffineSize(0, ((3, 1),))
    assert width_of(1).at([10, 20]) == 20


def test_joined_groups_are_cut_so_that_their_sum_stays_a_multiple() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv2d(3, 13, 3, stride=2, padding=1)
            self.after = nn.Conv2d(16, 20, 1)
            self.head = nn.Conv2d(20, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            joined = torch.cat([self.wide(x), F.max_pool2d(x, 2)], 1)
            y: Tensor = self.head(torch.relu(self.after(joined)))
            return y

    structure = trace_channels(Joined().eval(), torch.randn(1, 3, 8, 8)).structure
    left = dict(zip(structure.groups, structure.width_remainders(8), strict=True))
    assert left["wide"] == 5  # 13 and 5, with 3 beside them, make 16 and 8
    assert left["after"] == 0  # 20 stands alone: 16 and 8
    assert set(structure.width_remainders(1)) == {0}
    for width, wide, after in ((0, 5, 1), (4, 5, 8), (5, 5, 8), (6, 13, 8), (9, 13, 16), (13, 13, 16)):
        padded = dict(zip(structure.groups, structure.padded([width, width, 4], 8), strict=True))
        assert padded == {"wide": wide, "after": after, "head": 4}
    assert structure.padded([13, 17, 4], 8) == [13, 20, 4]  # 24 would be more than there are
    assert structure.padded([3, 17, 4], 1) == [3, 17, 4]
