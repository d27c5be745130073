"""A nested state taken apart: the tensors in a list, and a tree for JSON that says where each belongs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadFile

FILE_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The types that every safetensors reader knows, by their names there. Others are stored as bytes."""

_MAX_DEPTH = 100
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def tree_of(state: Any) -> tuple[Any, list[Tensor]]:
    """The tree of a state, and its tensors without repeats.

    Raises:
        BadFile: If there is something that JSON and tensors cannot hold.
    """
    return (branches := _Branches()).tree(state, "state", 0), branches.tensors


def value_of(tree: Any, tensors: Mapping[int, Tensor]) -> Any:
    """The reverse of `tree_of`.

    Raises:
        KeyError, TypeError, ValueError: If the tree is damaged.
    """
    if isinstance(tree, list):
        return [value_of(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {value_of(key, tensors): value_of(value, tensors) for key, value in content}
    if kind == "tuple":
        return tuple(value_of(item, tensors) for item in content)
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content]
    if kind == "bytes":  # of a tensor whose type the file format does not know
        return as_dtype(tensors[content["tensor"]], _DTYPES[content["dtype"]]).reshape(content["shape"])
    raise ValueError(kind)


def as_dtype(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits, read as another type."""
    return flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)


class _Branches:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._leaves: dict[tuple[Any, ...], Any] = {}

    def tree(self, value: Any, place: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise BadFile(f"{place[:60]}... is nested deeper than {_MAX_DEPTH} levels; a state must be a plain tree.")
        if isinstance(value, Tensor):
            return self._leaf(value, place)
        if isinstance(value, dict):
            return {"dict": [self._entry(key, value[key], place, depth) for key in value]}
        if type(value) in (list, tuple):  # a named tuple would come back as a plain one
            items = [self.tree(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
            return items if type(value) is list else {"tuple": items}
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, str):
            return str(value)
        raise BadFile(f"{place} is a {type(value).__name__}, which a state cannot hold; use plain values and tensors.")

    def _entry(self, key: Any, value: Any, place: str, depth: int) -> list[Any]:
        if not isinstance(key, str | int | float | None):
            raise BadFile(f"{place} has a {type(key).__name__} for a key; use a string or a number.")
        return [self.tree(key, place, depth), self.tree(value, f"{place}[{key!r}]", depth + 1)]

    def _leaf(self, tensor: Tensor, place: str) -> Any:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
            raise BadFile(f"{place} is a {kind} tensor, which a state cannot hold; make it dense.")
        # The same numbers in memory, read in the same way: one tensor.
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same = (*where, tensor.is_conj(), tensor.is_neg())
        if tensor.numel() and same in self._leaves:
            return self._leaves[same]
        self.tensors.append(tensor)
        leaf: Any = {"tensor": len(self.tensors) - 1}
        if tensor.dtype not in FILE_TYPES:
            name = str(tensor.dtype).removeprefix("torch.")
            leaf = {"bytes": {**leaf, "dtype": name, "shape": list(tensor.shape)}}
        self._leaves[same] = leaf
        return leaf
