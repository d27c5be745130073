from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadFile, BadWidths
from ecc.graph import ChannelGraph, ChannelGroup, Extent, Layer, Place, Role, trace_channels
from ecc.graph.channels import TensorShape
from graph.cases import CASES, Residual, chain, named, traced

# ---------------------------------------------------------------- a graph made by hand

IRREGULAR = torch.tensor([[3], [0], [2]])  # no offset and step gives these


def by_hand(index: torch.Tensor = IRREGULAR, **changes: Any) -> ChannelGraph:
    """Two layers with a group of 3 units between them and 2 outputs."""
    middle = ChannelGroup(
        "first",
        3,
        (
            Place("first.weight", 0, (Role.WRITE,), torch.arange(3)[:, None]),
            Place("last.weight", 1, (Role.READ,), index),
        ),
    )
    outputs = ChannelGroup(
        "last", 2, (Place("last.weight", 0, (Role.WRITE,), torch.arange(2)[:, None]),), "it is a network output"
    )
    s, t = Extent(0, ((0, 1),)), Extent(0, ((1, 1),))
    each = index.shape[1]
    columns = Extent(each % 2, ((0, each),))  # with one for each unit, another column belongs to no group
    layers = (
        Layer("first", "linear", 1, Extent(5), s, Extent(5), s, 4, ("first.weight",)),
        Layer("last", "linear", 1, s, t, s, t, 4, ("last.weight",)),
    )
    tensors = (
        TensorShape("first.weight", (s, Extent(5)), 4, True),
        TensorShape("last.weight", (t, columns), 4, True),
    )
    fields: dict[str, Any] = {"groups": (middle, outputs), "layers": layers, "tensors": tensors, **changes}
    return ChannelGraph(**fields)


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
        ({"conv3": 3}, "group 'conv3' cannot be cut: it is a network output."),
    ],
)
def test_widths_that_do_not_fit_are_refused(widths: dict[str, float], message: str) -> None:
    _, _, graph = traced("chain")
    with pytest.raises(BadWidths) as caught:
        graph.widths(widths)
    assert str(caught.value) == message


def test_a_group_has_a_least_width() -> None:
    first, last = by_hand().groups
    graph = by_hand(groups=(replace(first, least=2), last))
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
    assert graph["first"].layers(Role.READ) == ("last",)
    assert graph["first"].layers(Role.CARRY) == ()


# ---------------------------------------------------------------- places


def test_full_shapes_are_the_extents_at_full_width() -> None:
    assert by_hand().full_shapes == {"first.weight": (3, 5), "last.weight": (2, 4)}


@pytest.mark.parametrize("name", CASES)
def test_every_place_lies_in_its_tensor_and_belongs_to_one_unit(name: str) -> None:
    net, _, graph = traced(name)
    tensors = dict(net.state_dict())
    seen: set[tuple[str, int, int]] = set()
    for group in graph.groups:
        for place in group.places:
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
    assert lines[1:] == ["  first: 3 units, read by last", "  last: 2 units, frozen: it is a network output"]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", CASES)
def test_a_graph_comes_back_from_its_file_bit_by_bit(name: str, tmp_path: Path) -> None:
    _, _, graph = traced(name, proven=True)
    first, second = tmp_path / "first", tmp_path / "second"
    graph.save(first)
    loaded = ChannelGraph.load(first)
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert loaded.fingerprint == graph.fingerprint
    assert (loaded.layers, loaded.tensors, loaded.features) == (graph.layers, graph.tensors, graph.features)
    assert loaded.notes == graph.notes
    assert loaded.proof == graph.proof
    for mine, theirs in zip(loaded.groups, graph.groups, strict=True):
        assert replace(mine, places=()) == replace(theirs, places=())
        for one, other in zip(mine.places, theirs.places, strict=True):
            assert (one.tensor, one.axis, one.roles) == (other.tensor, other.axis, other.roles)
            assert torch.equal(one.index, other.index)
            assert one.index.dtype == other.index.dtype


def packed_index(path: Path) -> dict[str, Any]:
    place = json.loads(path.read_text())["groups"][0]["places"][1]
    return {key: place[key] for key in place if key in ("regular", "index")}


@pytest.mark.parametrize(
    ("index", "packed"),
    [
        (IRREGULAR, {"index": [[3], [0], [2]]}),
        (torch.tensor([[0], [1], [3]]), {"index": [[0], [1], [3]]}),
        (torch.tensor([[1], [2], [3]]), {"regular": [1, 1, 1, 0]}),
        (torch.tensor([[3], [2], [1]]), {"regular": [3, -1, 1, 0]}),
        (torch.tensor([[0, 3], [1, 4], [2, 5]]), {"regular": [0, 1, 2, 3]}),
        (torch.tensor([[0, 3], [1, 5], [2, 4]]), {"index": [[0, 3], [1, 5], [2, 4]]}),
    ],
)
def test_regular_indices_are_packed_and_irregular_ones_written_in_full(
    index: torch.Tensor, packed: dict[str, Any], tmp_path: Path
) -> None:
    path = saved(tmp_path, by_hand(index))
    assert packed_index(path) == packed
    assert torch.equal(ChannelGraph.load(path)["first"].places[1].index, index)


def test_a_large_network_has_a_small_file(tmp_path: Path) -> None:
    path = saved(tmp_path, traced("flattened chain")[2])
    assert path.stat().st_size < 12_000  # 128 columns of fc1 as four numbers


# ---------------------------------------------------------------- fingerprints


def test_equal_networks_have_equal_fingerprints() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert trace_channels(chain(), images).fingerprint == trace_channels(chain(), images + 1).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        lambda: trace_channels(chain(), torch.randn(2, 3, 9, 9), proven=False),  # another resolution
        lambda: trace_channels(chain(), torch.randn(1, 3, 8, 8), proven=False),  # another batch
        lambda: trace_channels(chain().double(), torch.randn(2, 3, 8, 8).double(), proven=False),
        lambda: trace_channels(chain(), torch.randn(2, 3, 8, 8), proven=False, freeze=["conv1"]),
        lambda: trace_channels(Residual(), torch.randn(2, 3, 8, 8), proven=False),
    ],
)
def test_another_structure_has_another_fingerprint(other: Callable[[], ChannelGraph]) -> None:
    assert other().fingerprint != trace_channels(chain(), torch.randn(2, 3, 8, 8), proven=False).fingerprint


def test_wording_notes_and_proof_are_no_structure() -> None:
    graph = by_hand()
    groups = (graph.groups[0], replace(graph.groups[1], frozen="another wording"))
    assert by_hand(groups=groups, notes=("a note",), proof=1e-7).fingerprint == graph.fingerprint


def test_an_index_is_structure() -> None:
    assert by_hand(IRREGULAR.flip(0)).fingerprint != by_hand().fingerprint


# ---------------------------------------------------------------- files that are not what they seem


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.graph") == f"cannot read {tmp_path / 'none.graph'}: No such file or directory."


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"cannot read {tmp_path}: Is a directory."


def test_a_folder_that_does_not_exist_is_no_place_to_save_to(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "net.graph"
    with pytest.raises(BadFile, match=r"cannot write .*net\.graph: No such file or directory"):
        by_hand().save(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b'{"format": "ecc channel graph, version 1"',
        b"\xff\xfe\x00",
        b"\x80\x04\x95",  # how a pickle begins
        b"[" * 100_000,
        b"1" * 5_000,  # more digits than Python turns into a number
    ],
)
def test_what_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.graph"
    path.write_bytes(content)
    assert "is damaged" in refusal(path)


@pytest.mark.parametrize("data", [[], {}, 3, None, {"format": "ecc channel graph, version 0"}, {"format": ["x"]}])
def test_another_format_is_refused(data: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.graph"
    path.write_text(json.dumps(data))
    assert refusal(path) == f"{path} is not a channel graph of this version ('ecc channel graph, version 1')."


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(part: float, tmp_path: Path) -> None:
    path = saved(tmp_path)
    text = path.read_text().rstrip()
    path.write_text(text[: int(len(text) * part)])
    assert "is damaged (JSONDecodeError)" in refusal(path)


@pytest.mark.parametrize("key", ["groups", "layers", "tensors", "features", "notes", "proof", "fingerprint"])
def test_a_missing_part_is_refused(key: str, tmp_path: Path) -> None:
    path = edited(saved(tmp_path), lambda data: data.pop(key))
    assert "Trace the network again" in refusal(path)


def set_at(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return edit


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "width": set_at("groups", 1, "width", value=3),
    "name": set_at("groups", 0, "name", value="other"),
    "thawed group": set_at("groups", 1, "frozen", value=None),
    "axis": set_at("groups", 0, "places", 0, "axis", value=1),
    "role": set_at("groups", 0, "places", 0, "roles", value=["reads"]),
    "index": set_at("groups", 0, "places", 1, "index", value=[[0], [1], [2]]),
    "multiply-accumulates": set_at("layers", 0, "macs", value=2),
    "extent": set_at("layers", 0, "incoming", value=[6, []]),
    "bytes": set_at("tensors", 0, "item_bytes", value=2),
    "parameter": set_at("tensors", 0, "is_parameter", value=False),
    "fingerprint": set_at("fingerprint", value="0" * 16),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_is_refused(name: str, tmp_path: Path) -> None:
    path = edited(saved(tmp_path), EDITS[name])
    assert refusal(path) == f"{path} was changed after it was written. Trace the network again."


HUGE = 10**30
IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], None]] = {
    "width of other than its index": set_at("groups", 0, "width", value=4),
    "huge width and full index": set_at("groups", 0, "width", value=HUGE),
    "huge width": set_at("groups", 1, "width", value=HUGE),
    "width zero": set_at("groups", 1, "width", value=0),
    "negative width": set_at("groups", 1, "width", value=-2),
    "endless width": set_at("groups", 0, "width", value=float("inf")),
    "width in words": set_at("groups", 0, "width", value="three"),
    "huge index": set_at("groups", 1, "places", 0, "regular", value=[0, 1, 10**9, 1]),
    "huge offset": set_at("groups", 1, "places", 0, "regular", value=[HUGE, 1, 1, 1]),
    "half an index": set_at("groups", 1, "places", 0, "regular", value=[0, 1]),
    "huge number in an index": set_at("groups", 0, "places", 1, "index", value=[[HUGE], [0], [0]]),
    "ragged index": set_at("groups", 0, "places", 1, "index", value=[[0], [1, 2], [0]]),
    "index in words": set_at("groups", 0, "places", 1, "index", value="abc"),
    "unknown role": set_at("groups", 0, "places", 0, "roles", value=["leaks"]),
    "no axis": set_at("groups", 0, "places", 0, "axis", value=None),
    "number of groups": set_at("groups", value=3),
    "empty group": set_at("groups", 0, value=None),
    "list of multiply-accumulates": set_at("layers", 0, "macs", value=[]),
    "half an extent": set_at("layers", 0, "incoming", value=[1]),
    "half a multiple": set_at("layers", 0, "incoming", value=[1, [[0]]]),
    "number of axes": set_at("tensors", 0, "axes", value=7),
    "number of notes": set_at("notes", value=5),
    "note that is a number": set_at("notes", value=[5]),
    "proof in words": set_at("proof", value="very good"),
    "reason that is a number": set_at("groups", 1, "frozen", value=5),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_file_with_impossible_values_is_refused(name: str, tmp_path: Path) -> None:
    path = edited(saved(tmp_path), IMPOSSIBLE[name])
    assert "is damaged" in refusal(path)


@pytest.mark.parametrize(
    "edit",
    [
        set_at("groups", 0, "places", 0, "tensor", value="../../etc/passwd"),
        set_at("groups", 0, "places", 0, "axis", value=2),
        set_at("groups", 0, "places", 0, "axis", value=-1),
        set_at("groups", 0, "places", 1, "index", value=[[3], [0], [4]]),
        set_at("groups", 0, "places", 1, "index", value=[[3], [0], [-1]]),
        set_at("groups", 0, "least", value=4),
        set_at("groups", 1, "name", value="first"),
        set_at("tensors", 1, "name", value="first.weight"),
        set_at("tensors", 0, "axes", 1, value=[-5, []]),
        set_at("layers", 0, "incoming", value=[5, [[2, 1]]]),
        set_at("layers", 0, "macs", value=-1),
        set_at("layers", 0, "tensors", value=["none"]),
    ],
)
def test_parts_that_do_not_fit_are_refused_also_under_a_fingerprint_that_does(
    edit: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = edited(saved(tmp_path), edit)
    data = json.loads(path.read_text())
    data["fingerprint"] = ChannelGraph._from_json(data).fingerprint
    path.write_text(json.dumps(data))
    assert "is damaged" in refusal(path)


def test_many_large_places_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = json.loads(path.read_text())
    place = {"tensor": "first.weight", "axis": 0, "roles": [], "regular": [0, 0, 1 << 21, 0]}
    data["groups"][0]["places"] = [place] * 1000  # 3 units each: 48 GiB in all
    path.write_text(json.dumps(data))
    assert "is damaged (ValueError)" in refusal(path)
