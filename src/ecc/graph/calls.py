"""One operator call of a trace: its arguments, its description for users, and the shape of its result."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ecc.graph.labels import compact, frozen_labels


@dataclass
class OpRecord:
    """One operator that does work, with its factors, reads and writes as labels."""

    path: str
    kind: str
    macs: int
    factors: list[Tensor]
    reads: list[tuple[Tensor, int]]
    writes: list[tuple[Tensor, int]]
    tensors: list[str]
    item_bytes: int


@dataclass
class Call:
    """One operator call, with its arguments by the names of the operator's schema."""

    func: OpOverload
    name: str
    """Name of the operator without overload and trailing underscore."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    path: str
    """The module that runs it."""
    in_place: bool
    zero: bool = False
    """Whether the channels of masked units are zero in its results."""
    power: Any = None
    """How much larger its results are in a pruned network (`ops.sums.WidthPower`)."""
    pending: tuple[Tensor, str] | None = None
    """Channels to freeze, and why, if its result is used. Averaged attention weights often are not."""
    summed: tuple[Tensor, ...] = ()
    """Channels that a single number is the sum of."""
    rows: tuple[Tensor, ...] | None = None
    """Labels of the slices of its parameters that its result is linear in (`ops.head_width.Rows`)."""
    scores: Any = None
    """The product that its result is scores of (`ops.head_width.Scores`)."""
    multiplied: bool = False
    """Whether it is a product of queries and keys that sums over their channels."""
    number_power: float = 0.0
    """Its result is `(d / d') ** number_power` times as large in a pruned network, since a number follows the width."""
    absorbed: set[str] = field(default_factory=set)
    """Parameters that absorb such a factor."""

    def __getitem__(self, key: str) -> Any:
        position, default = _parameters(self.func)[key]
        if position is not None and position < len(self.args):
            return self.args[position]
        return self.kwargs.get(key, default)

    def get(self, key: str, default: Any) -> Any:
        """An argument, or `default` if the operator has no such parameter."""
        return self[key] if key in _parameters(self.func) else default

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensor arguments in order, including those in lists."""
        found: list[Tensor] = []
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(v for v in value if isinstance(v, Tensor))
        return found

    @cached_property
    def outs(self) -> list[Tensor]:
        """The tensors that it returned."""
        many = self.result if isinstance(self.result, (list, tuple)) else [self.result]
        return [t for t in many if isinstance(t, Tensor)]

    @property
    def out(self) -> Tensor:
        """Its first result."""
        return self.outs[0]

    def rerun(self, first: Tensor) -> Any:
        """The same call with another first tensor argument."""
        return self.func(first, *self.args[1:], **self.kwargs)

    @property
    def here(self) -> str:
        """Operator and module, for messages: `` `add` in layer1.0 ``."""
        return self._in_module(self.name)

    @property
    def described(self) -> str:
        """As `here`, with the arguments: `` `view(-1, 256, 6, 6)` in features.12 ``."""
        return self._in_module(self._source())

    @property
    def fix(self) -> str:
        """How to rewrite a call that has a hard-coded channel count; empty if there is no advice."""
        x = self.tensors[0] if self.tensors else None
        if x is None:
            return ""
        if self.name in ("view", "reshape", "_unsafe_view"):
            sizes = [size for size in self.args[1] if isinstance(size, int)]
            return f" Use {_flexible_view(sizes, x.shape)} to make it prunable."
        if self.name in ("split", "split_with_sizes", "unsafe_split"):
            sizes, dim = self.args[1], self.get("dim", 0)
            if isinstance(sizes, (list, tuple)) and len(set(sizes)) == 1:
                return f" Use `chunk({len(sizes)}, {dim})` to make it prunable."
            return f" Compute the sizes from `x.shape[{dim}]`, or use `chunk`, to make it prunable."
        if self.name in ("slice", "narrow"):
            return f" Compute the bounds from `x.shape[{self.get('dim', 0)}]`, or use `chunk`, to make it prunable."
        return ""

    def _in_module(self, text: str) -> str:
        return f"`{text}` in {self.path}" if self.path else f"`{text}`"

    def _source(self) -> str:
        """The call as a user would write it."""
        if self.name == "slice":
            start, end = self.get("start", None) or "", self.get("end", None)
            before, stop = ":, " * int(self.get("dim", 0)), "" if end in (None, sys.maxsize) else end
            return f"x[{before}{start}:{stop}]"
        values = [value for value in self.args if not isinstance(value, Tensor)]
        if len(values) == 1 and isinstance(values[0], (list, tuple)) and "split" not in self.name:
            values = list(values[0])
        if any(not isinstance(v, (int, float, list, tuple, torch.Size)) or "Tensor" in repr(v) for v in values):
            return self.name
        name = "split" if self.name == "split_with_sizes" else self.name.lstrip("_")
        return f"{name}({', '.join(map(str, values))})"


def _flexible_view(sizes: Sequence[int], shape: torch.Size) -> str:
    """A view of the same form without the hard-coded channel count, for a pruned input of this shape.

    The channel count is the first size that can be free: without it, the others divide the number of elements.
    """
    batch = shape[0] if len(shape) and len(sizes) and sizes[0] in (-1, shape[0]) else 1
    for position, size in enumerate(sizes):
        others = prod(n for k, n in enumerate(sizes) if k != position and n != -1)
        others *= batch if sizes[0] == -1 else 1
        if size > 1 and size not in shape and others and prod(shape) % others == 0:
            text = ["x.shape[0]" if n == -1 and k == 0 else str(n) for k, n in enumerate(sizes)]
            text[position] = "-1"
            if text.count("-1") == 1:
                return f"`view({', '.join(text)})`"
    return "`x.shape` or -1 for the channel count"


@cache
def _parameters(func: OpOverload) -> dict[str, tuple[int | None, Any]]:
    """Name -> (position, or None if keyword-only; default) from the operator's schema."""
    table: dict[str, tuple[int | None, Any]] = {}
    for position, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        table[argument.name] = (None if argument.kwarg_only else position, default)
    return table


def amount(tensor: Tensor, labels: Tensor | None) -> tuple[Tensor, int]:
    """The elements of a tensor as labels of one slice and the number of times that it repeats."""
    if labels is None:
        return frozen_labels(torch.Size([1])), tensor.numel()
    small = compact(labels).reshape(-1)
    return small, tensor.numel() // max(small.numel(), 1)


# --- shapes of results ---------------------------------------------------------------------------
#
# torch's meta kernels are written in Python and would take most of the time of a trace. Some also import dynamo, which
# takes seconds. The few operators that make up most of a network are computed here, which makes a trace three times
# faster.

_LIKE_FIRST = frozenset(
    "batch_norm instance_norm layer_norm group_norm rms_norm relu relu6 hardswish hardsigmoid hardtanh silu gelu elu "
    "sigmoid tanh leaky_relu mish dropout prelu neg abs exp sqrt rsqrt erf sin cos roll".split()
)
_ARITHMETIC = frozenset({"add", "sub", "mul", "div"})
_POOLS = {"adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3}


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Gates of recurrent layers: blocks of rows of their weights."""


def quick_result(call: Call) -> Any:
    """The result of an operator on meta tensors, or None if torch should compute it."""
    first = call.args[0] if call.args else None
    if call.name == "cat":
        return _concatenated(call)
    if not isinstance(first, Tensor) or first.device.type != "meta" or not first.is_floating_point():
        return None
    if call.name in GATES:
        return _recurrent(call, first)
    shape = _shape(call, first)
    if shape is None:
        return None
    if call.in_place:
        return first if list(first.shape) == list(shape) else None
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _shape(call: Call, first: Tensor) -> Sequence[int] | None:
    name = call.name
    if name in _LIKE_FIRST:
        return first.shape
    if name in _ARITHMETIC:
        return _broadcast(call, first)
    if name == "conv2d" and not isinstance(call["padding"], str):
        return _convolved(call, first)
    if name == "linear" and call["weight"].dim() == 2 and call["weight"].shape[1] == first.shape[-1]:
        return [*first.shape[:-1], call["weight"].shape[0]]
    if name == "scaled_dot_product_attention":
        return _attended(call, first)
    if name == "masked_fill" and first.shape == call["mask"].shape:
        return first.shape
    if name.startswith("upsample_"):
        return _resized(call, first)
    if name in _POOLS and None not in (size := call["output_size"]):
        return [*first.shape[: -_POOLS[name]], *size]
    if name == "mean" and isinstance(dims := call.get("dim", None), (list, tuple)) and dims and not call["dtype"]:
        axes = {d % first.dim() for d in dims}
        if call["keepdim"]:
            return [1 if a in axes else n for a, n in enumerate(first.shape)]
        return [n for a, n in enumerate(first.shape) if a not in axes]
    return None


def _resized(call: Call, first: Tensor) -> Sequence[int] | None:
    """The shape of an interpolated image: of a given size, or of a size by given factors."""
    old, size, factors = first.shape[2:], call.get("output_size", None), call.get("scale_factors", None)
    if size is None and factors is not None:
        size = [math.floor(n * factor) for n, factor in zip(old, factors, strict=False)]
    if size is None or len(size) != len(old) or not old or min((*size, *old)) < 1:
        return None
    return [*first.shape[:2], *size]


def _concatenated(call: Call) -> Tensor | None:
    tensors, axis = call["tensors"], call["dim"]
    first = tensors[0]
    if not isinstance(axis, int) or not -first.dim() <= axis < first.dim() or not first.is_floating_point():
        return None
    axis %= first.dim()
    sizes = [list(tensor.shape) for tensor in tensors]
    others = {
        (tensor.dtype, tensor.device.type, *size[:axis], *size[axis + 1 :])
        for tensor, size in zip(tensors, sizes, strict=True)
    }
    if len(others) != 1 or first.device.type != "meta" or any(len(size) != first.dim() for size in sizes):
        return None
    total = sum(size[axis] for size in sizes)
    return torch.empty([*sizes[0][:axis], total, *sizes[0][axis + 1 :]], dtype=first.dtype, device="meta")


def _broadcast(call: Call, first: Tensor) -> Sequence[int] | None:
    second = call.args[1]
    if type(second) in (int, float):
        return first.shape
    if not isinstance(second, Tensor) or second.device.type != "meta" or second.dtype != first.dtype:
        return None
    return first.shape if first.shape == second.shape else torch.broadcast_shapes(first.shape, second.shape)


def _convolved(call: Call, first: Tensor) -> Sequence[int] | None:
    weight, groups = call["weight"], call["groups"]
    if first.dim() != 4 or first.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        return None
    sizes = [first.shape[0], weight.shape[0]]
    for axis in range(2):
        stride, pad, dilation = (v[axis % len(v)] for v in (call["stride"], call["padding"], call["dilation"]))
        covered = dilation * (weight.shape[2 + axis] - 1) + 1
        size = (first.shape[2 + axis] + 2 * pad - covered) // stride + 1
        if size < 1:
            return None
        sizes.append(size)
    return sizes


def _attended(call: Call, query: Tensor) -> Sequence[int] | None:
    """The shape of plain attention, in which all tensors have the same batch and heads."""
    key, value, mask = call["key"], call["value"], call["attn_mask"]
    if any(t.device.type != "meta" or t.dtype != query.dtype for t in (key, value)) or query.dim() < 3:
        return None
    if query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1] or key.shape[:-2] != query.shape[:-2]:
        return None
    if mask is not None and (
        mask.dim() > query.dim()
        or any(
            size not in (1, whole)
            for size, whole in zip(reversed(mask.shape), (key.shape[-2], *reversed(query.shape[:-1])), strict=False)
        )
    ):
        return None
    return [*query.shape[:-1], value.shape[-1]]


def _recurrent(call: Call, first: Tensor) -> tuple[Tensor, ...] | None:
    """Output and final states of a recurrent layer. torch would compute them step by step."""
    states = call["hx"] if call.name == "lstm" else [call["hx"]]
    batched = call.func._overloadname == "input"
    rows, columns = call["params"][0].shape
    sizes = {state.shape for state in states}
    directions = 2 if call["bidirectional"] else 1
    count = directions * call["num_layers"]
    is_plain = len(sizes) == 1 and len(call["params"]) == count * (4 if call["has_biases"] else 2)
    fits = first.shape[-1] == columns and states[0].shape[-1] * GATES[call.name] == rows and states[0].shape[0] == count
    if not (is_plain and fits and first.dim() == (3 if batched else 2)):
        return None
    out = [*first.shape[:-1], directions * states[0].shape[-1]]
    return tuple(torch.empty(size, dtype=first.dtype, device="meta") for size in (out, *[s.shape for s in states]))
