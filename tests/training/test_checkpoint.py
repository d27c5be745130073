from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.training import checkpoint, load_state, save_state, weights_checksum

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit; NaN equals NaN."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bits(one) == bits(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def bits(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    return tensor.transpose(0, 1) if len(shape) > 1 and draw(st.booleans()) else tensor


text = st.text(
    st.sampled_from('ab/._-\\"\0\n \xe9\u2028\U0001f600'), max_size=5
)  # all of Unicode takes seconds to list
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text | st.just("\ud800")
keys = text | st.integers() | st.none() | st.floats(allow_nan=False) | st.just("__metadata__")
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(state=states)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_any_state_comes_back_bit_for_bit(path: Path, state: Any) -> None:
    save_state(path, state)
    assert same(load_state(path), state)


def test_other_programs_read_a_network_by_its_names(path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    save_state(path, network.state_dict())
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).load_state_dict(safetensors.torch.load_file(path))
    save_state(path, {"model": network.state_dict(), "step": 1})
    assert "model.0.weight" in safetensors.torch.load_file(path)


def test_a_shared_tensor_is_stored_once_and_views_apart(path: Path) -> None:
    weight = torch.randn(1000)
    save_state(path, {"encoder": weight, "decoder": weight, "part": weight[:10], "turned": weight.reshape(10, 100).T})
    found = load_state(path)
    assert found["encoder"] is found["decoder"]
    assert set(safetensors.torch.load_file(path)) == {"encoder", "part", "turned"}
    assert torch.equal(found["part"], weight[:10])
    assert torch.equal(found["turned"], weight.reshape(10, 100).T)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1}}, "a is a set; a state holds plain values and tensors only"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({"a": [torch.zeros(2).to_sparse()]}, r"a\.0 is a torch.sparse_coo tensor"),
        ({"a": torch.zeros(2, device="meta")}, "a is a meta tensor"),
        (torch.zeros(2, dtype=torch.complex128), "complex128, which safetensors cannot store"),
        ({"a": "x" * (9 << 20)}, "more than 8 MiB besides its tensors"),
    ],
)
def test_a_state_that_cannot_be_stored_leaves_no_file(path: Path, state: Any, message: str) -> None:
    with pytest.raises(BadFile, match=message):
        save_state(path, state)
    assert list(path.parent.iterdir()) == []


def test_a_state_nested_too_deeply_is_refused(path: Path) -> None:
    state: Any = 1
    for _ in range(200):
        state = [state]
    with pytest.raises(BadFile, match="nested deeper than 100 levels"):
        save_state(path, state)


def test_damage_anywhere_is_detected(path: Path) -> None:
    save_state(path, {"a": torch.randn(7), "b": [1, 2, "three"]})
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    for damaged in [*(data[:end] for end in range(0, len(data), 3)), *flipped, data + b"\0"]:
        path.write_bytes(damaged)
        with pytest.raises(BadFile) as caught:
            load_state(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("failing", ["fsync", "save_file"])
def test_the_old_file_survives_a_full_disk(path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    save_state(path, {"step": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if failing == "fsync" else safetensors.torch, failing, full)
        with pytest.raises(BadFile, match=r"cannot write .*: No space left on device"):
            save_state(path, {"step": 2})
    assert load_state(path) == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_checksum_distinguishes_weights() -> None:
    state = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    found = weights_checksum(state)
    assert found == weights_checksum({name: value.clone() for name, value in state.items()})
    changed = [{"b": torch.ones(3, 2)}, {"b": torch.ones(2, 3).double()}, {"a": torch.arange(4.0).flip(0)}]
    assert len({found, weights_checksum({}), *(weights_checksum({**state, **change}) for change in changed)}) == 5


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(path, {"step": 1})
    load, calls = checkpoint._load, []

    def replaced_meanwhile(file: Path) -> Any:
        calls.append(file)
        if len(calls) == 1:
            save_state(path, {"step": 2})
            raise BadFile("its checksum is wrong")
        return load(file)

    monkeypatch.setattr(checkpoint, "_load", replaced_meanwhile)
    assert load_state(path) == {"step": 2}
    calls.clear()
    monkeypatch.setattr(checkpoint, "_load", lambda file: calls.append(file) or load(Path("missing")))
    with pytest.raises(BadFile):
        load_state(path)
    assert len(calls) == 1  # the file is the same: it is damaged
