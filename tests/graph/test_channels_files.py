from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile
from ecc.graph import ChannelGraph
from graph.by_hand import IRREGULAR, by_hand
from graph.cases import CASES, traced


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


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", CASES)
def test_a_graph_comes_back_from_its_file_bit_by_bit(name: str, tmp_path: Path) -> None:
    _, _, graph = traced(name, verify=True)
    first, second = tmp_path / "first", tmp_path / "second"
    graph.save(first)
    loaded = ChannelGraph.load(first)
    loaded.save(second)
    assert first.read_bytes() == second.read_bytes()
    assert loaded.fingerprint == graph.fingerprint
    assert (loaded.layers, loaded.tensors, loaded.features) == (graph.layers, graph.tensors, graph.features)
    assert loaded.notes == graph.notes
    assert loaded.max_relative_diff == graph.max_relative_diff
    for mine, theirs in zip(loaded.groups, graph.groups, strict=True):
        assert replace(mine, slices=()) == replace(theirs, slices=())
        for one, other in zip(mine.slices, theirs.slices, strict=True):
            assert (one.tensor, one.axis, one.roles) == (other.tensor, other.axis, other.roles)
            assert torch.equal(one.index, other.index)
            assert one.index.dtype == other.index.dtype


def packed_index(path: Path) -> dict[str, Any]:
    place = json.loads(path.read_text())["groups"][0]["slices"][1]
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
    assert torch.equal(ChannelGraph.load(path)["first"].slices[1].index, index)


def test_a_large_network_has_a_small_file(tmp_path: Path) -> None:
    path = saved(tmp_path, traced("flattened chain")[2])
    assert path.stat().st_size < 12_000  # 128 columns of fc1 as four numbers


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


@pytest.mark.parametrize("key", ["groups", "layers", "tensors", "features", "notes", "max_relative_diff", "fingerprint"])
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
    "axis": set_at("groups", 0, "slices", 0, "axis", value=1),
    "role": set_at("groups", 0, "slices", 0, "roles", value=["consumer"]),
    "index": set_at("groups", 0, "slices", 1, "index", value=[[0], [1], [2]]),
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
    "huge index": set_at("groups", 1, "slices", 0, "regular", value=[0, 1, 10**9, 1]),
    "huge offset": set_at("groups", 1, "slices", 0, "regular", value=[HUGE, 1, 1, 1]),
    "half an index": set_at("groups", 1, "slices", 0, "regular", value=[0, 1]),
    "huge number in an index": set_at("groups", 0, "slices", 1, "index", value=[[HUGE], [0], [0]]),
    "ragged index": set_at("groups", 0, "slices", 1, "index", value=[[0], [1, 2], [0]]),
    "index in words": set_at("groups", 0, "slices", 1, "index", value="abc"),
    "unknown role": set_at("groups", 0, "slices", 0, "roles", value=["leaks"]),
    "no axis": set_at("groups", 0, "slices", 0, "axis", value=None),
    "number of groups": set_at("groups", value=3),
    "empty group": set_at("groups", 0, value=None),
    "list of multiply-accumulates": set_at("layers", 0, "macs", value=[]),
    "half an extent": set_at("layers", 0, "incoming", value=[1]),
    "half a multiple": set_at("layers", 0, "incoming", value=[1, [[0]]]),
    "number of axes": set_at("tensors", 0, "axes", value=7),
    "number of notes": set_at("notes", value=5),
    "note that is a number": set_at("notes", value=[5]),
    "proof in words": set_at("max_relative_diff", value="very good"),
    "reason that is a number": set_at("groups", 1, "frozen", value=5),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_file_with_impossible_values_is_refused(name: str, tmp_path: Path) -> None:
    path = edited(saved(tmp_path), IMPOSSIBLE[name])
    assert "is damaged" in refusal(path)


@pytest.mark.parametrize(
    "edit",
    [
        set_at("groups", 0, "slices", 0, "tensor", value="../../etc/passwd"),
        set_at("groups", 0, "slices", 0, "axis", value=2),
        set_at("groups", 0, "slices", 0, "axis", value=-1),
        set_at("groups", 0, "slices", 1, "index", value=[[3], [0], [4]]),
        set_at("groups", 0, "slices", 1, "index", value=[[3], [0], [-1]]),
        set_at("groups", 0, "min_width", value=4),
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
    data["groups"][0]["slices"] = [place] * 1000  # 3 units each: 48 GiB in all
    path.write_text(json.dumps(data))
    assert "is damaged (ValueError)" in refusal(path)
