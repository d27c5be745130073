"""`save_state` and `load_state`: a nested state in one safetensors file.

Tensors are stored by name, such as `model.conv1.weight`; everything around them is JSON in the metadata. Reading runs
no code from the file. A checksum detects damage, and files are replaced atomically.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ecc.errors import BadFile
from ecc.io import MAX_BYTES, open_to_read, replace_file

FORMAT = "ecc state 2"
_MAX_DEPTH = 100


def save_state(path: str | Path, state: Any) -> None:
    """Write a state atomically; it is on the disk when this returns.

    Args:
        path: The file.
        state: Nested dicts, lists and tuples of tensors, strings, numbers, booleans and None. A tensor that occurs
            twice is stored once, and is one tensor again when it is read. A dict of tensors keeps their names.

    Raises:
        BadFile: If the state holds anything else, or the file cannot be written.
    """
    flat = _Flattened()
    layout = json.dumps(flat.add(state, ()))
    if len(layout) + 200 * len(flat.tensors) > MAX_BYTES:
        raise BadFile(
            f"the state for {path} has more than {MAX_BYTES >> 20} MiB besides its tensors; keep long lists of numbers "
            "as tensors."
        )
    # One key: safetensors writes several keys in random order, and equal states would give different files.
    about = {"format": FORMAT, "layout": layout, "crc32": _checksum(flat.tensors, layout)}
    metadata = {"ecc": json.dumps(about)}
    with replace_file(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(flat.tensors, temporary, metadata)
        except SafetensorError as error:
            raise OSError(str(error).removeprefix("Error while serializing: ")) from None
        except KeyError as error:
            raise BadFile(f"the state for {path} has a tensor of {error}, which safetensors cannot store.") from None
        temporary.chmod(mode)  # safetensors makes files that only their owner can read


def load_state(path: str | Path) -> Any:
    """Read a file of `save_state`; the tensors are on the CPU and equal bit for bit.

    Raises:
        BadFile: If it is missing, damaged, or not a file of `save_state`.
    """
    path = Path(path)
    before = _version(path)
    try:
        return _load(path)
    except BadFile:
        if _version(path) == before:
            raise
        return _load(path)  # another process replaced the file while it was read


def _version(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns


def _load(path: Path) -> Any:
    advice = "restore it from a copy or start a new run."
    try:
        _check_header(path)
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("ecc", "{}"))
            if metadata.get("format") != FORMAT:
                raise BadFile(f"{path} is not a file of the format {FORMAT!r}; give a file that this version wrote.")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
        if _checksum(tensors, metadata["layout"]) != metadata["crc32"]:
            raise BadFile(f"{path} is damaged: its checksum is wrong; {advice}")
        return _rebuild(json.loads(metadata["layout"]), tensors)
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror or error}.") from None
    except SafetensorError as error:
        raise BadFile(f"{path} is cut off, damaged or not a safetensors file ({error}); {advice}") from None
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise BadFile(f"{path} is damaged ({type(error).__name__}); {advice}") from None


def weights_checksum(state: Mapping[str, Any]) -> str:
    """A checksum of a network's weights, the same on every device."""
    return _checksum({name: value for name, value in state.items() if isinstance(value, Tensor)}, "")


def _check_header(path: Path) -> None:
    """Refuse pipes, and headers that would need gigabytes of memory; safetensors allows headers of 100 MB."""
    with open_to_read(path) as file:
        size = file.read(8)
    if len(size) == 8 and struct.unpack("<Q", size)[0] > MAX_BYTES:
        raise BadFile(f"{path} is damaged or not a file of ECC: its header is longer than {MAX_BYTES >> 20} MiB.")


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    found = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        if tensor.numel():
            found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


class _Flattened:
    """Collects the tensors of a nested state by name, and describes the rest as JSON values.

    A dict becomes `{"dict": [[key, value], ...]}`, since keys need not be strings; a tuple `{"tuple": [...]}`; a tensor
    `{"tensor": name}`. Lists, strings, numbers, booleans and None stay as they are.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[Any, str] = {}  # by memory and layout, to find tensors that occur twice
        self._storages: set[int] = set()

    def add(self, value: Any, path: tuple[str, ...]) -> Any:
        where = ".".join(path[:6]) or "state"
        if len(path) > _MAX_DEPTH:
            raise BadFile(f"{where}... is nested deeper than {_MAX_DEPTH} levels.")
        if isinstance(value, Tensor):
            return {"tensor": self._add_tensor(value, where, path)}
        if isinstance(value, dict):
            bad = next((key for key in value if not isinstance(key, str | int | float | None)), None)
            if bad is not None:
                raise BadFile(f"{where} has the key {bad!r}; use strings or numbers as keys.")
            return {"dict": [[key, self.add(item, (*path, str(key)))] for key, item in value.items()]}
        if type(value) in (list, tuple):  # a named tuple would come back as a plain one
            items = [self.add(item, (*path, str(index))) for index, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise BadFile(f"{where} is a {type(value).__name__}; a state holds plain values and tensors only.")

    def _add_tensor(self, tensor: Tensor, where: str, path: tuple[str, ...]) -> str:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise BadFile(f"{where} is a {kind} tensor; a state holds dense tensors only.")
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
        memory = (tensor.device, tensor.data_ptr(), *layout) if tensor.numel() else object()
        if memory in self._names:
            return self._names[memory]
        name = ".".join(path).encode("utf-8", "replace").decode() or "state"
        while name in self.tensors or name == "__metadata__":
            name += "'"
        dense = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        storage = dense.untyped_storage().data_ptr()
        # Two views of one memory are stored as two tensors: safetensors refuses tensors that share memory.
        self.tensors[name] = dense.clone() if storage in self._storages else dense
        self._storages.add(storage)
        self._names[memory] = name
        return name


def _rebuild(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_rebuild(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _rebuild(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple(_rebuild(item, tensors) for item in content)
    raise ValueError(kind)
