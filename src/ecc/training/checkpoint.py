"""A nested state in one safetensors file: tensors as they are, everything around them as JSON in the header.

Any program that reads safetensors can read the file; reading it here runs no code that the file could choose.
A checksum tells a damaged file from a whole one, and the file takes its name only when it is complete on the
disk, so that the one before survives whatever happens. Tensors are written and read one at a time: beside the
state itself, memory for the largest of them is enough.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from ecc.errors import BadFile
from ecc.io import MAX_BYTES, umask

from .state_tree import FILE_TYPES, as_dtype, tree_of, value_of

FORMAT = "ecc state 1"

_TYPES = {name: dtype for dtype, name in FILE_TYPES.items()}
_MAX_HEADER_BYTES = MAX_BYTES  # safetensors itself allows 100 MB, which would unfold into gigabytes
_CHUNK_BYTES = 1 << 24
_NO_CHECKSUM = "00000000"
_CHECKSUM = re.compile(rb'"crc32":"([0-9a-f]{8})"')  # quotes inside the tree are escaped, so this is the field


def save_state(path: str | Path, state: Any) -> None:
    """Writes a state whole or not at all; it is on the disk when this returns.

    Args:
        path: The file; one that is there stays until the new one is complete.
        state: Dicts, lists, tuples, strings, numbers, booleans, None and dense tensors, nested as they come. A
            tensor that occurs twice is stored once, and is one tensor again when it is read. The tensors of a plain
            dict of tensors, such as a network's state, keep their names in the file (of several, the first).

    Raises:
        BadFile: If the state holds anything else, or the file cannot be written.
    """
    tree, tensors = tree_of(state)
    # Wide types first, as safetensors does it: then every tensor is aligned to its own size.
    order = sorted(range(len(tensors)), key=lambda number: -_stored_type(tensors[number]).itemsize)
    names = _names(state, tree, len(tensors))
    metadata = {"format": FORMAT, "crc32": _NO_CHECKSUM, "tree": json.dumps(tree), "names": json.dumps(names)}
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for number in order:
        tensor = tensors[number]
        native = tensor.dtype in FILE_TYPES
        end = start + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape) if native else [end - start]
        header[names[number]] = {
            "dtype": FILE_TYPES[_stored_type(tensor)],
            "shape": shape,
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise BadFile(
            f"the state for {path} has {len(text)} bytes around its tensors, more than the {_MAX_HEADER_BYTES} that "
            "are read back; keep long lists of numbers as tensors."
        )
    with _replacing(Path(path)) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        checksum = zlib.crc32(text)
        for number in order:
            for part in _parts(_bytes_of(tensors[number])):
                checksum = zlib.crc32(part, checksum)
                file.write(part)
        file.seek(8)
        file.write(text.replace(b'"crc32":"00000000"', b'"crc32":"%08x"' % checksum, 1))


def _names(state: Any, tree: Any, count: int) -> list[str]:
    """What each tensor is called in the file: its first key in a plain dict of tensors, otherwise its number."""
    numbered = [str(number) for number in range(count)]
    if not isinstance(state, dict) or "__metadata__" in state or not all(isinstance(key, str) for key in state):
        return numbered
    names: dict[int, str] = {}
    for (key, value), (_, leaf) in zip(state.items(), tree["dict"], strict=True):
        if isinstance(value, Tensor):
            names.setdefault((leaf.get("bytes") or leaf)["tensor"], key)
    return [names[number] for number in range(count)] if len(names) == count else numbered


def weights_checksum(state: Mapping[str, Any]) -> str:
    """A short number for a network's weights: the same for the same ones, on any device, and for hardly any others."""
    found = 0
    for name, value in state.items():
        if isinstance(value, Tensor):
            found = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), found)
            for part in _parts(_bytes_of(value.detach())):
                found = zlib.crc32(part, found)
    return f"{found:08x}"


def load_state(path: str | Path) -> Any:
    """Reads what `save_state` wrote: equal bit for bit, on the CPU.

    Raises:
        BadFile: If it is missing, damaged, cut off, or no state of ours.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise BadFile("is not a plain file; give one.")
        with path.open("rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)  # of this file, though another may take its place
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from None
    except BadFile as error:
        raise BadFile(f"{path} {error}") from None
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError) as error:
        raise BadFile(f"{path} is damaged ({type(error).__name__}); restore it from a copy or start anew.") from None


def _read(file: BufferedReader, size: int) -> Any:
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise BadFile("is cut off or no safetensors file; restore it from a copy or start anew.")
    text = file.read(length)
    found = _CHECKSUM.search(text)
    if found is None or b'"format":"%s"' % FORMAT.encode() not in text:
        raise BadFile(f"is not a file of the format {FORMAT!r}; give a file that this ecc wrote.")
    header = json.loads(text)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if 8 + length + sum(end - start for start, end in _offsets(entries)) != size:
        raise BadFile("is cut off or too long; restore it from a copy or start anew.")
    checksum = zlib.crc32(text[: found.start(1)] + _NO_CHECKSUM.encode() + text[found.end(1) :])
    tensors = {}
    numbers = {name: number for number, name in enumerate(json.loads(header["__metadata__"]["names"]))}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        if math.prod(entry["shape"]) * _TYPES[entry["dtype"]].itemsize != end - start:
            raise ValueError(name)
        tensors[numbers[name]] = tensor = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]])
        data = _bytes_of(tensor)
        if file.readinto(data) != len(data):
            raise ValueError(name)
        for part in _parts(data):
            checksum = zlib.crc32(part, checksum)
    if checksum != int(found[1], 16):
        raise BadFile("is damaged: its checksum is wrong; restore it from a copy or start anew.")
    return value_of(json.loads(header["__metadata__"]["tree"]), tensors)


def _offsets(entries: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Where each tensor lies; in our files one follows the other."""
    before = 0
    for entry in entries.values():
        start, end = entry["data_offsets"]
        if start != before or end < start:
            raise ValueError("data_offsets")
        yield start, end
        before = end


def _stored_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in FILE_TYPES else torch.uint8


def _bytes_of(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as they lie in memory; a copy only of what is strided or on another device."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return as_dtype(flat, torch.uint8).numpy().data


def _parts(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """As `ecc.io.write_bytes`, for what is too large to be held twice. The new name is on the disk too."""
    temporary = ""
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as file:
            temporary = file.name
            os.fchmod(file.fileno(), 0o666 & ~umask())  # as any other new file; temporary ones are private
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        sync_folder(path.parent)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BadFile(f"cannot write {path}: {error.strerror}.") from None
        raise


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system can do it.

    Raises:
        BadFile: If the disk is full or fails.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing for folders
            raise BadFile(f"cannot write {folder}: {error.strerror}.") from None
    finally:
        os.close(descriptor)
