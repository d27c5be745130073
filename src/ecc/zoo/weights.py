"""Published weights from a `.safetensors` file, into one of the bundled networks.

The format is a length, a header in JSON, and the numbers one after the other; nothing in it can run.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.io import MAX_BYTES, read_bytes

_MOST_FILE_BYTES = 4 << 30  # the largest bundled network has 250 MB
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load_weights_(
    model: nn.Module,
    path: str | Path,
    *,
    head: tuple[str, int],
    published: Mapping[int, tuple[int, ...]] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Loads weights in place. Where the outputs are others, those that we know of are taken, or none.

    Args:
        model: The network.
        path: The file.
        head: The last layer, and the axis of its weight that counts outputs.
        published: By the number of outputs in the file: which of them are ours, in our order.
        tell: Is told in one line what became of outputs that do not match.

    Raises:
        BadFile: If it is no such file, or belongs to another network.
    """
    weights = read_weights(path)
    layer, axis = head
    ours, theirs = model.state_dict(), weights.get(f"{layer}.bias")
    count = len(ours[f"{layer}.bias"])
    if theirs is not None and theirs.dim() == 1 and len(theirs) != count:
        rows = (published or {}).get(len(theirs))
        if rows is None:
            tell(
                f"the head of {Path(path).name} has {len(theirs)} outputs and the data {count} classes: "
                "it starts anew, and is to be trained first (ecc compress --pretrain-steps N)."
            )
        else:
            tell(
                f"of the {len(theirs)} outputs in {Path(path).name}, the {count} that are classes of the data are kept."
            )
        for name, along in ((f"{layer}.weight", axis), (f"{layer}.bias", 0)):
            if name in weights:
                whole = weights[name]
                weights[name] = ours[name] if rows is None else whole.index_select(along, torch.tensor(rows))
    _check(ours, weights, path)
    model.load_state_dict(weights, strict=False)


def _check(ours: Mapping[str, Tensor], weights: Mapping[str, Tensor], path: str | Path) -> None:
    needed = {name for name in ours if not name.endswith("num_batches_tracked")}
    for names, what in ((needed - set(weights), "lacks"), (set(weights) - set(ours), "has, beyond the network's,")):
        if names:
            raise BadFile(f"{path} {what} {min(names)}: these are weights of another network.")
    for name in sorted(needed):
        here, there = tuple(ours[name].shape), tuple(weights[name].shape)
        if here != there:
            raise BadFile(f"{path} has {name} of shape {there}, the network of {here}: weights of another network.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, float16 and bfloat16 as float32.

    Raises:
        BadFile: If it is missing, damaged, or of another format.
    """
    path = Path(path)
    data = read_bytes(path, _MOST_FILE_BYTES)
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else len(data)
    if length > min(MAX_BYTES, len(data) - 8):
        raise BadFile(f"{path} is cut off or no safetensors file; save the state dict with safetensors.")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        if sum(max(0, end - start) for start, end in (entry["data_offsets"] for entry in entries.values())) > len(data):
            raise ValueError("tensors that overlap")  # a few bytes could stand for any number of tensors
        return {name: _tensor(entry, data, 8 + length) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
        raise BadFile(f"{path} is damaged ({type(error).__name__}); fetch it again.") from None


def _tensor(entry: Mapping[str, Any], data: bytes, base: int) -> Tensor:
    start, end = entry["data_offsets"]
    dtype, shape = _TYPES[entry["dtype"]], [int(side) for side in entry["shape"]]
    count = math.prod(shape)
    if min(shape, default=0) < 0 or not 0 <= start <= end <= len(data) - base or count * dtype.itemsize != end - start:
        raise ValueError("data_offsets")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    found = torch.frombuffer(bytearray(data[base + start : base + end]), dtype=dtype).reshape(shape)
    return found.float() if dtype in (torch.float16, torch.bfloat16) else found
