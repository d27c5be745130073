"""What each operator does to channel labels.

Data movement needs no rule of its own: the operator itself runs on the label tensor, so its index map is exact.
The rules here are for the operators that make labels (convolution, linear, embedding), bind them (elementwise,
norms, grouped convolution) or leak them (reductions, attention, softmax). Rules are optimistic about sizes that
may or may not be written into the network's code: the cut network is traced again afterwards, and whatever does
not follow the cut is frozen then (`check.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ecc.graph.labels import (
    FROZEN,
    Role,
    channel_vector,
    compact,
    frozen_labels,
    settled,
    varies,
    varying_axes,
)

if TYPE_CHECKING:
    from ecc.graph.tracer import Call, Tracer

Labels = Tensor | None
"""Labels of one tensor; None for a value that belongs to no channel and no position (a constant, a scalar)."""

Rule = Callable[["Tracer", "Call"], "Labels | list[Labels]"]


# --- layers that mix channels -----------------------------------------------------------------------------------


def convolution(trace: Tracer, call: Call) -> Labels:
    """Convolution and transposed convolution, dense, grouped and depthwise."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    transposed = "transpose" in call.name or bool(call.get("transposed", False))
    groups: int = call["groups"]
    spatial = weight.dim() - 2
    channel = x.dim() - spatial - 1
    labels = trace.labels(x)
    name = trace.weight_name(weight)
    if name is None:
        trace.freeze_all([labels, trace.labels(weight)], f"the weight of {call.here} is computed")
        return frozen_labels(call.out.shape)
    if labels is not None and any(varies(labels, a) for a in range(channel + 1, x.dim())):
        labels = trace.freeze(labels, f"{call.here} slides over its axis")
    positions = call.out.numel() // call.out.shape[channel]
    if transposed:
        positions = x.numel() // x.shape[channel]
    kernel = weight[0, 0].numel() * positions
    if groups == 1 and not trace.book.is_grouped(name):
        in_axis, out_axis = (0, 1) if transposed else (1, 0)
        result = _mix(trace, call, labels, channel, name, weight, in_axis, out_axis, bias, kernel)
        return result.expand(call.out.shape)
    incoming = channel_vector(labels, channel, x.shape[channel])
    out_size = call.out.shape[channel]
    rows = trace.book.axis(name, 0, weight.shape[0], Role.CARRY)
    if transposed:  # (in, out / groups, ...): rows are the incoming channels
        trace.book.unite(incoming, rows, call.here)
        outgoing = rows.view(groups, -1)[:, :1].expand(groups, out_size // groups).reshape(-1)
    else:
        outgoing = rows
    # The channels of one convolution group live and die together, its incoming ones with its outgoing ones.
    lead = incoming.view(groups, -1)[:, :1]
    trace.book.unite(lead, incoming.view(groups, -1), call.here)
    trace.book.unite(lead, rows.view(groups, -1), call.here)
    _bind_bias(trace, call, outgoing, bias)
    trace.record(call, "grouped conv", kernel * (x.shape[channel] // groups), [outgoing], [weight, bias])
    return _along(outgoing, channel, call.out.shape)


def linear(trace: Tracer, call: Call) -> Labels:
    """x @ weight.T + bias on the last axis."""
    return _dense(trace, call, call["input"], call["weight"], call["bias"], in_axis=1)


def matmul(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """A product with a parameter is a linear layer; of two activations, a leak along the summed axis."""
    left, right = (call["self"], call["other"]) if call.name == "matmul" else (call["self"], call["mat2"])
    if trace.weight_name(right) is not None and right.dim() == 2:
        return _dense(trace, call, left, right, None, in_axis=0)
    if left.dim() < 2 or right.dim() < 2:
        return unknown(trace, call)
    return _product(trace, call, left, right)


def addmm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """bias + left @ right, the form `F.linear` takes in older torch versions."""
    if trace.weight_name(call["mat2"]) is not None:
        return _dense(trace, call, call["mat1"], call["mat2"], call["self"], in_axis=0)
    return unknown(trace, call)


def baddbmm(trace: Tracer, call: Call) -> Labels:
    """A batched product plus a tensor."""
    product = _product(trace, call, call["batch1"], call["batch2"])
    return united(trace, call, [trace.labels(call["self"]), product], call.out.shape)


def _dense(
    trace: Tracer, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *, in_axis: int
) -> Labels:
    """A linear layer on the last axis of x; `in_axis` is the summed axis of the weight as it is passed."""
    labels = trace.labels(x)
    name = trace.weight_name(weight)
    if name is None or weight.dim() != 2:
        trace.freeze_all([labels, trace.labels(weight)], f"the weight of {call.here} is computed")
        return frozen_labels(call.out.shape)
    order = trace.axis_order(weight)
    positions = call.out.numel() // weight.shape[1 - in_axis]
    result = _mix(
        trace, call, labels, x.dim() - 1, name, weight, order[in_axis], order[1 - in_axis], bias, positions
    )
    return result.expand(call.out.shape)


def _mix(
    trace: Tracer,
    call: Call,
    labels: Labels,
    channel: int,
    name: str,
    weight: Tensor,
    in_axis: int,
    out_axis: int,
    bias: Tensor | None,
    macs_per_pair: int,
) -> Tensor:
    """The one rule of every dense layer: read the channels of x, write those of the weight's output axis."""
    order = trace.axis_order(weight)
    in_size, out_size = weight.shape[order.index(in_axis)], weight.shape[order.index(out_axis)]
    reads = trace.book.axis(name, in_axis, in_size, Role.READ)
    writes = trace.book.axis(name, out_axis, out_size, Role.WRITE)
    elsewhere = [a for a in varying_axes(labels) if a != channel] if labels is not None else []
    if labels is not None and elsewhere and varies(labels, channel):
        labels, elsewhere = trace.freeze(labels, f"{call.here} mixes it along two axes"), []
    if labels is not None and elsewhere:
        # The layer runs along another axis than the channels (token mixing): they pass through, it stays whole.
        trace.book.freeze(reads, f"{call.here} runs along another axis than the channels")
        trace.book.freeze(writes, f"{call.here} runs along another axis than the channels")
        trace.record(call, "linear", macs_per_pair, [reads, writes], [weight, bias])
        return labels.narrow(channel, 0, 1)
    if _loose(labels) is None:
        trace.book.freeze(reads, "no layer that can be cut writes it")
    else:
        trace.book.unite(channel_vector(labels, channel, in_size), reads, call.here)
    _bind_bias(trace, call, writes, bias)
    trace.record(
        call, "conv" if weight.dim() > 2 else "linear", macs_per_pair, [reads, writes], [weight, bias]
    )
    shape = [1] * call.out.dim()
    shape[channel] = out_size
    return writes.view(shape)


def _bind_bias(trace: Tracer, call: Call, outgoing: Tensor, bias: Tensor | None) -> None:
    if bias is not None and (labels := trace.labels(bias, Role.WRITE)) is not None:
        trace.book.unite(outgoing, labels.reshape(-1), f"the bias of {call.here}")


def _product(trace: Tracer, call: Call, left: Tensor, right: Tensor) -> Labels:
    """(..., m, k) @ (..., k, n) of two activations: channels may pass along m or n, never along k."""
    why = f"it is multiplied away in {call.here}"
    first, second = trace.labels(left), trace.labels(right)
    if first is not None and varies(first, left.dim() - 1):
        first = trace.freeze(first, why)
    if second is not None and varies(second, right.dim() - 2):
        second = trace.freeze(second, why)
    trace.record(call, "matmul", left.shape[-1], [trace.elements(call.out)], [])
    first, second = _loose(first), _loose(second)
    if first is not None and second is not None:
        trace.freeze(first, why)
        first = None
    if second is not None:
        return second.narrow(-2, 0, 1).expand(call.out.shape)
    if first is not None:
        return first.narrow(-1, 0, 1).expand(call.out.shape)
    return frozen_labels(call.out.shape)


def attention(trace: Tracer, call: Call) -> Labels:
    """softmax(q k') v: the channels of q and k are summed away, those of v pass through to the output."""
    query, key, value = (trace.labels(call[k]) for k in ("query", "key", "value"))
    trace.freeze_all([query, key, trace.labels(call.get("attn_mask", None))], f"{call.here} sums it away")
    length = call["query"].shape[-1] + call["value"].shape[-1]
    pairs = call["query"].numel() // call["query"].shape[-1] * call["key"].shape[-2]
    trace.record(call, "matmul", pairs * length, [], [])
    value = _loose(value)
    if value is None or varies(value, value.dim() - 2):
        trace.freeze_all([value], f"{call.here} sums it away")
        return frozen_labels(call.out.shape)
    return value.narrow(-2, 0, 1).expand(call.out.shape)


def embedding(trace: Tracer, call: Call) -> Labels:
    """Rows of a table: its columns are the channels."""
    name = trace.weight_name(call["weight"])
    if name is None:
        return unknown_labels(trace, call)
    writes = trace.book.axis(name, 1, call["weight"].shape[1], Role.WRITE)
    return writes.expand(call.out.shape)


# --- layers that carry channels ---------------------------------------------------------------------------------


def channel_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Batch and instance norm: statistics of each channel by itself."""
    x = call["input"]
    labels = trace.labels(x)
    if labels is not None and any(a != 1 for a in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} takes statistics across it")
    vector = channel_vector(labels, 1, x.shape[1])
    tensors = [call.get(k, None) for k in ("weight", "bias", "running_mean", "running_var")]
    for tensor in tensors:
        if tensor is not None and (own := trace.labels(tensor)) is not None:
            trace.book.unite(vector, own.reshape(-1), call.here)
    trace.record(call, "norm", 0, [], tensors)
    return labels


def layer_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Statistics over the last axes: a dead channel would still count in them."""
    labels = trace.labels(call["input"])
    first = call["input"].dim() - len(call["normalized_shape"])
    if labels is not None and any(a >= first for a in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} normalises over it, so a dead channel would leak")
    trace.record(call, "norm", 0, [], [call["weight"], call.get("bias", None)])
    return labels


def group_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Statistics over groups of channels."""
    labels = trace.labels(call["input"])
    if labels is not None:
        labels = trace.freeze(labels, f"{call.here} normalises over it, so a dead channel would leak")
    trace.record(call, "norm", 0, [], [call.get("weight", None), call.get("bias", None)])
    return labels


def prelu(trace: Tracer, call: Call) -> Labels:
    """One slope for each channel, or one for all."""
    labels = trace.labels(call["self"])
    slope = trace.labels(call["weight"])
    if slope is not None and call["weight"].numel() > 1:
        trace.book.unite(channel_vector(labels, 1, call["self"].shape[1]), slope.reshape(-1), call.here)
    trace.record(call, "elementwise", 0, [], [call["weight"]])
    return labels


def pointwise(trace: Tracer, call: Call) -> Labels:
    """Elements that meet in an elementwise operator live and die together."""
    tensors = call.tensors
    labels = [trace.labels(t, defer=True) for t in tensors]
    result = united(trace, call, [label for label in labels if label is not None], call.out.shape)
    for tensor in tensors:
        if trace.is_deferred(tensor):
            trace.bind(tensor, result, call)
    if (
        call.in_place
        and trace.labels(tensors[0]) is None
        and result is not None
        and trace.is_view(tensors[0])
    ):
        result = trace.freeze(result, f"{call.here} writes it into part of another tensor")
    trace.record(call, "elementwise", 0, [], [])
    return result


def copy_into(trace: Tracer, call: Call) -> Labels:
    """An assignment into an existing tensor."""
    target, source = trace.labels(call["self"]), trace.labels(call["src"])
    if target is None and source is not None:
        trace.freeze(source, f"{call.here} writes it into part of another tensor")
        return frozen_labels(call.out.shape)
    return united(trace, call, [x for x in (target, source) if x is not None], call.out.shape)


def united(trace: Tracer, call: Call, many: Sequence[Labels], shape: torch.Size) -> Labels:
    """Labels of an elementwise result: those of its operands, united where they meet."""
    result: Labels = None
    for labels in many:
        if labels is not None:
            labels = labels[(None,) * (len(shape) - labels.dim())]
            result = labels if result is None else _meet(trace, call, result, labels)
    return None if result is None else result.expand(shape)


def _meet(trace: Tracer, call: Call, left: Tensor, right: Tensor) -> Tensor:
    """Unite the labels of two operands, or freeze the one that is used by many channels of the other."""
    shape = torch.broadcast_shapes(left.shape, right.shape)
    left_axes, right_axes = set(varying_axes(left)), set(varying_axes(right))
    for mine, other, axes in ((left, right, right_axes - left_axes), (right, left, left_axes - right_axes)):
        # A gate of width one, a value for each token: it belongs to no single channel and stays whole.
        if any(mine.shape[a] == 1 for a in axes) or (axes and not bool((compact(mine) == FROZEN).any())):
            trace.freeze(mine, f"{call.here} broadcasts it over other channels")
            return other.expand(shape)
    left, right = left.expand(shape), right.expand(shape)
    wide = left if len(left_axes) >= len(right_axes) else right
    for axis in set(range(len(shape))) - left_axes - right_axes:
        left, right = left.narrow(axis, 0, 1), right.narrow(axis, 0, 1)
    trace.book.unite(left, right, call.here)
    return wide


# --- operators that leak or pass channels -----------------------------------------------------------------------


def reduction(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Sums, means, maxima: channels summed over leak; channels beside them pass."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "reduction", 0, [], [])
    if labels is None:
        return None
    axes = _axes(call.get("dim", None), x.dim())
    if any(varies(labels, a) for a in axes):
        labels = trace.freeze(labels, f"{call.here} reduces over it")
    for axis in sorted(axes, reverse=True):
        labels = labels.narrow(axis, 0, 1) if call.get("keepdim", False) else labels.select(axis, 0)
    return [labels.expand(out.shape) for out in call.outs]


def along_axis(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Softmax, cumulative sums, sorting: shape kept, positions of one axis mixed."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "reduction", 0, [], [])
    if labels is None:
        return None
    axes = _axes(call.get("dim", -1), x.dim())
    if any(varies(labels, a) for a in axes):
        labels = trace.freeze(labels, f"{call.here} mixes along it")
    for axis in axes:
        labels = labels.narrow(axis, 0, 1)
    return [labels.expand(out.shape) for out in call.outs]


def spatial(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Pooling, interpolation, padding by reflection: each channel by itself over its last axes."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "pool", 0, [], [])
    if labels is None:
        return None
    digit = re.search(r"([123])d", call.name)
    first = x.dim() - (int(digit.group(1)) if digit else 2)
    if any(a >= first for a in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} slides over its axis")
    for axis in range(first, x.dim()):
        labels = labels.narrow(axis, 0, 1)
    return [labels.expand(out.shape) for out in call.outs]


def _axes(dim: Any, count: int) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(count))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % max(count, 1) for d in dims})


def same(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Operators that keep shape and place: copies, casts, dropout."""
    labels = trace.labels(call.tensors[0])
    if call.outs and call.outs[0] is not call.tensors[0]:
        trace.record(call, "move", 0, [], [])
    return [labels] * len(call.outs)


def constant(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """A fresh tensor whose value is the same at every position."""
    return [None] * len(call.outs)


def unknown(trace: Tracer, call: Call) -> list[Labels]:
    """An operator without a rule: nothing that reaches it is cut, and neither is what it makes."""
    trace.freeze_all(
        [trace.labels(t) for t in call.tensors], f"operator {call.name} ({call.here}) has no rule"
    )
    trace.record(call, "other", 0, [], [])
    return [frozen_labels(out.shape) for out in call.outs]


def unknown_labels(trace: Tracer, call: Call) -> Labels:
    """`unknown` for an operator of one output."""
    return unknown(trace, call)[0]


def _loose(labels: Labels) -> Labels:
    """Labels that may still be cut; None for positions that cannot."""
    return None if labels is None or bool((compact(labels) == FROZEN).all()) else labels


def _along(vector: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """A vector of labels laid along one axis of a shape."""
    ones = [1] * len(shape)
    ones[axis] = vector.numel()
    return settled(vector.reshape(ones)).expand(shape)
