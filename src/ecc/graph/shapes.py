"""Result shapes of the commonest operators on meta tensors.

torch's meta kernels are written in Python and take most of the time of a pass over meta tensors; the handful of
operators that make up most of a network is worked out here. Anything unusual returns None, and torch does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ecc.graph.call import Call

_LIKE_FIRST = frozenset(
    "batch_norm instance_norm layer_norm group_norm rms_norm relu relu6 hardswish hardsigmoid hardtanh silu gelu elu "
    "sigmoid tanh leaky_relu mish dropout prelu".split()
)
_ARITHMETIC = frozenset({"add", "sub", "mul"})
_POOLS = {"adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3}


def quick_result(call: Call) -> Tensor | None:
    """The result of an operator on meta tensors, None where torch should work it out."""
    first = call.args[0] if call.args else None
    if not isinstance(first, Tensor) or first.device.type != "meta" or not first.is_floating_point():
        return None
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
    if name in _POOLS and None not in (size := call["output_size"]):
        return [*first.shape[: -_POOLS[name]], *size]
    if name == "mean" and isinstance(dims := call.get("dim", None), (list, tuple)) and dims and not call["dtype"]:
        axes = {d % first.dim() for d in dims}
        if call["keepdim"]:
            return [1 if a in axes else n for a, n in enumerate(first.shape)]
        return [n for a, n in enumerate(first.shape) if a not in axes]
    return None


def _broadcast(call: Call, first: Tensor) -> Sequence[int] | None:
    second = call.args[1]
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
