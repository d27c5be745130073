from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ecc.errors import BadFile
from ecc.training import save_state
from ecc.zoo.image_task import NETWORKS
from ecc.zoo.resnet_cifar import resnet20
from ecc.zoo.image_task import load_weights_, read_weights

HEAD = NETWORKS["resnet20"].head


def published(path: Path, outputs: int = 10, half: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = {name: value for name, value in resnet20(outputs).state_dict().items() if "num_batches" not in name}
    if half:
        state = {name: value.half() if name.endswith("conv1.weight") else value for name, value in state.items()}
    save_file(state, path)
    return state


def refusal(path: Path, outputs: int = 10) -> str:
    with pytest.raises(BadFile) as caught:
        load_weights_(resnet20(outputs), path, head=HEAD)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_kinds_of_numbers_come_back_half_precision_as_float32(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    given = {str(dtype): torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in types} | {"none": torch.empty(0, 3)}
    save_file(given, path)
    found = read_weights(path)
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert torch.equal(found[name].double(), tensor.double())
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        assert found[name].dtype == (torch.float32 if half else tensor.dtype)
        assert found[name].shape == tensor.shape


def test_published_weights_are_loaded_and_batch_counts_need_not_be_there(tmp_path: Path) -> None:
    path, told = tmp_path / "a.safetensors", []
    state = published(path, half=True)
    model = resnet20()
    load_weights_(model, path, head=HEAD, tell=told.append)
    assert told == []
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_weights_that_this_program_wrote_are_read_too(tmp_path: Path) -> None:
    model, other = resnet20(), resnet20()
    save_state(tmp_path / "dense.safetensors", model.state_dict())
    load_weights_(other, tmp_path / "dense.safetensors", head=HEAD)
    assert torch.equal(model.conv1.weight, other.conv1.weight)


def test_another_number_of_outputs_leaves_the_head_as_it_is_and_says_so(tmp_path: Path) -> None:
    path, told = tmp_path / "a.safetensors", []
    state = published(path)
    model = resnet20(4)
    before = model.linear.weight.clone()
    load_weights_(model, path, head=HEAD, tell=told.append)
    assert torch.equal(model.linear.weight, before)
    assert torch.equal(model.conv1.weight, state["conv1.weight"])
    (line,) = told
    assert line == (
        "the head of a.safetensors has 10 outputs and the data 4 classes: "
        "it starts anew, and is to be trained first (ecc compress --pretrain-steps N)."
    )


def test_outputs_that_are_classes_of_the_data_are_kept(tmp_path: Path) -> None:
    path, told = tmp_path / "a.safetensors", []
    state = published(path)
    model = resnet20(3)
    load_weights_(model, path, head=HEAD, published={10: (7, 0, 2)}, tell=told.append)
    assert torch.equal(model.linear.weight, state["linear.weight"][[7, 0, 2]])
    assert torch.equal(model.linear.bias, state["linear.bias"][[7, 0, 2]])
    assert told == ["of the 10 outputs in a.safetensors, the 3 that are classes of the data are kept."]


def test_the_outputs_of_a_transposed_convolution_lie_along_its_second_axis(tmp_path: Path) -> None:
    network = NETWORKS["erfnet"]
    state = {name: value for name, value in network.build(20).state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "a.safetensors")
    model = network.build(19)
    load_weights_(model, tmp_path / "a.safetensors", head=network.head, published={20: tuple(range(19))})
    found = model.state_dict()["decoder.output_conv.weight"]
    assert torch.equal(found, state["decoder.output_conv.weight"][:, :19])


def test_weights_of_another_network_are_refused_by_the_name_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    state = published(path)
    save_file({name: value for name, value in state.items() if name != "conv1.weight"}, path)
    assert "lacks conv1.weight: these are weights of another network" in refusal(path)
    save_file(state | {"extra.weight": torch.zeros(1)}, path)
    assert "has, beyond the network's, extra.weight" in refusal(path)
    save_file(state | {"conv1.weight": torch.zeros(16, 3, 5, 5)}, path)
    assert "conv1.weight of shape (16, 3, 5, 5), the network of (16, 3, 3, 3)" in refusal(path)
    save_file({"a": torch.zeros(1)}, path)
    assert "lacks bn1.bias" in refusal(path)


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot read"),
        (b"", "is cut off or no safetensors file"),
        (b"PK\x03\x04 a pickle in a zip file", "is cut off or no safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "is cut off or no safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is damaged"),
        (header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"short"), "is damaged"),
        (header({"a": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]}}, b"x" * 16), "is damaged"),
        (header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}, b"x" * 16), "is damaged"),
        (header({"a": {"dtype": "F7", "shape": [4], "data_offsets": [0, 16]}}, b"x" * 16), "is damaged"),
        (header({"a": {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]}}, b"x" * 16), "is damaged"),
        (header({"a": 3}), "is damaged"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "is damaged"),
    ],
)
def test_a_file_that_is_no_weights_is_refused(data: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if data is not None:
        path.write_bytes(data)
    assert message in refusal(path)
