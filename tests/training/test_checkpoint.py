from __future__ import annotations

import errno
import json
import math
import os
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.training.checkpoint import load_state, save_state, sync_folder, weights_checksum
from ecc.training.rng import rng_state

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def same(one: Any, other: Any) -> bool:
    """Equal in type and in every bit; NaN equals NaN."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
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


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800")
keys = st.text(max_size=5) | st.integers() | st.none() | st.floats(allow_nan=False)
states = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@given(state=states)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_bit_for_bit(path: Path, state: Any) -> None:
    save_state(path, state)
    assert same(load_state(path), state)


def test_a_training_state_comes_back(path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
    save_state(path, state)
    back = load_state(path)
    assert same(back["optimizer"], state["optimizer"])
    assert set(back["optimizer"]["state"]) == {0, 1, 2, 3}
    assert same(back["rng"], state["rng"])
    assert same(back["model"], dict(model.state_dict()))
    optimizer.load_state_dict(back["optimizer"])


def test_a_shared_tensor_is_stored_once_and_is_one_again(path: Path) -> None:
    weight = torch.randn(1000)
    save_state(path, {"encoder": weight, "decoder": weight})
    back = load_state(path)
    assert back["encoder"] is back["decoder"]
    assert path.stat().st_size < 2 * weight.numel() * 4


def test_other_programs_can_read_the_tensors(path: Path) -> None:
    state = {"a": torch.arange(3, dtype=torch.int16), "b": torch.randn(2, 2, dtype=torch.float64), "c": torch.ones(1)}
    save_state(path, {"nested": state})
    read = safetensors.torch.load_file(path)
    assert len(read) == 3
    assert all(same(read[name], tensor) for name, tensor in zip("012", state.values(), strict=True))


def test_a_foreign_file_is_refused(path: Path) -> None:
    safetensors.torch.save_file({"x": torch.ones(3)}, path)
    with pytest.raises(BadFile, match=r"state\.safetensors is not a file of the format 'ecc state 1'"):
        load_state(path)
    path.write_bytes(b"\x80\x04\x95 no pickle is ever opened here")
    with pytest.raises(BadFile, match="is cut off or no safetensors file"):
        load_state(path)


def test_a_missing_file_is_told(path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot read .*: No such file"):
        load_state(path)


def test_a_file_cut_off_anywhere_is_refused(path: Path) -> None:
    save_state(path, {"a": torch.randn(7), "b": [1, 2, "three"]})
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(BadFile) as caught:
            load_state(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(data + b"\0")
    with pytest.raises(BadFile, match="too long"):
        load_state(path)


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    save_state(path, {"a": torch.randn(7), "b": [1, 2, "three"]})
    data = path.read_bytes()
    for position in range(len(data)):
        for bit in (0, 5):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            path.write_bytes(bytes(damaged))
            with pytest.raises(BadFile) as caught:
                load_state(path)
            assert "\n" not in str(caught.value)


def test_a_header_that_asks_for_too_much_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(path, torch.ones(4))
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["0"]["shape"] = [1 << 50]
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("memory was asked for"))
    with pytest.raises(BadFile, match="damaged"):
        load_state(path)


def test_the_old_file_survives_a_failure(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(path, {"step": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BadFile, match=r"cannot write .*: No space left on device"):
            save_state(path, {"step": 2})
    assert load_state(path) == {"step": 1}
    assert list(path.parent.iterdir()) == [path]


def test_a_state_that_cannot_be_held_leaves_no_file(path: Path) -> None:
    with pytest.raises(BadFile, match=r"state\['a'\] is a set"):
        save_state(path, {"a": {1}})
    assert list(path.parent.iterdir()) == []


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot write .*No such file"):
        save_state(tmp_path / "no" / "state", {})


def test_large_tensors_go_through_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecc.training.checkpoint._CHUNK_BYTES", 100)
    state = torch.randn(999)
    save_state(path, state)
    assert same(load_state(path), state)


def test_the_state_of_a_network_keeps_its_names_for_other_programs(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    save_state(tmp_path / "a.safetensors", network.state_dict())
    plain = pytest.importorskip("safetensors.torch").load_file(tmp_path / "a.safetensors")
    twin = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    twin.load_state_dict(plain)
    for name, tensor in network.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor)
        assert torch.equal(load_state(tmp_path / "a.safetensors")[name], tensor)


def test_tied_tensors_have_one_name_and_leave_that_of_others(tmp_path: Path) -> None:
    weight, other = torch.ones(3), torch.zeros(2)
    state = {"first": weight, "second": other, "third": weight, "version": {"a": 1}}
    save_state(tmp_path / "a.safetensors", state)
    plain = pytest.importorskip("safetensors.torch").load_file(tmp_path / "a.safetensors")
    assert set(plain) == {"first", "second"}
    again = load_state(tmp_path / "a.safetensors")
    assert list(again) == list(state)
    assert again["first"] is again["third"]
    save_state(tmp_path / "b.safetensors", {"a": weight, "0": {"a": other}})  # a tensor within: names could collide
    assert set(pytest.importorskip("safetensors.torch").load_file(tmp_path / "b.safetensors")) == {"0", "1"}


def test_a_checksum_tells_weights_apart() -> None:
    state = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    found = weights_checksum(state)
    assert found == weights_checksum({name: value.clone() for name, value in state.items()})
    changed = [{"b": torch.ones(3, 2)}, {"b": torch.ones(2, 3).double()}, {"a": torch.arange(4.0).flip(0)}]
    assert len({found, weights_checksum({}), *(weights_checksum({**state, **change}) for change in changed)}) == 5


@pytest.mark.parametrize(("code", "refused"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_folder_that_cannot_be_synced_is_told_unless_the_system_has_no_such_thing(
    code: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(BadFile, match="Input/output error") if refused else nullcontext():
        sync_folder(tmp_path)
