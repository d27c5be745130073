"""Layers that mix channels: they consume the channels of their input and produce new ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.labels import (
    Labels,
    Role,
    channel_vector,
    collapse,
    compact,
    frozen_labels,
    unfrozen,
    varies,
    varying_axes,
)
from ecc.graph.ops.attention import product
from ecc.graph.ops.reduce import unknown, unknown_labels

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


def convolution(trace: Tracer, call: Call) -> Labels:
    """Convolution and transposed convolution, dense, grouped and depthwise."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    transposed = "transpose" in call.name or bool(call.get("transposed", False))
    groups: int = call["groups"]
    spatial = weight.dim() - 2
    channel = x.dim() - spatial - 1
    labels = trace.labels(x)
    name = trace.weight_name(weight)
    positions = x.numel() // x.shape[channel] if transposed else call.out.numel() // call.out.shape[channel]
    kernel = math.prod(weight.shape[2:]) * positions
    if name is None:
        return _computed(trace, call, x, weight, kernel * weight.shape[0] * weight.shape[1])
    if labels is not None and any(varies(labels, a) for a in range(channel + 1, x.dim())):
        labels = trace.freeze(labels, f"{call.here} convolves along the channel axis", unusual=True)
    if groups == 1 and not trace.channel_labels.is_grouped(name):
        result = _mix(trace, call, labels, channel, weight, (0, 1) if transposed else (1, 0), bias, kernel)
        return result.expand(call.out.shape)
    if trace.axis_order(weight)[0] != 0:
        return _computed(trace, call, x, weight, kernel * weight.shape[0] * weight.shape[1])
    incoming = channel_vector(labels, channel, x.shape[channel])
    out_size = call.out.shape[channel]
    rows = trace.channel_labels.axis(name, 0, weight.shape[0], Role.PER_CHANNEL)
    if transposed:  # (in, out / groups, ...): rows are input channels
        trace.channel_labels.unite(incoming, rows, call.here)
        outgoing = rows.view(groups, -1)[:, :1].expand(groups, out_size // groups).reshape(-1)
    else:
        outgoing = rows
    # All input and output channels of one convolution group are pruned together.
    lead = incoming.view(groups, -1)[:, :1]
    trace.channel_labels.unite(lead, incoming.view(groups, -1), call.here)
    trace.channel_labels.unite(lead, rows.view(groups, -1), call.here)
    _bind_bias(trace, call, outgoing, bias, Role.PER_CHANNEL)
    call.zero = bias is None or trace.is_zero(bias)
    trace.record(call, "grouped conv", kernel * (x.shape[channel] // groups), [outgoing], [weight, bias])
    return _along(outgoing, channel, call.out.shape)


def linear(trace: Tracer, call: Call) -> Labels:
    """x @ weight.T + bias on the last axis."""
    return _dense(trace, call, call["input"], call["weight"], call["bias"], in_axis=1)


def matmul(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """A product with a parameter is a linear layer. A product of two activations sums over an axis of both."""
    left, right = (call["self"], call["other"]) if call.name == "matmul" else (call["self"], call["mat2"])
    if left.dim() < 2 or right.dim() < 2:
        if trace.is_deferred(right) and right.dim() == 2:
            return _dense(trace, call, left, right, None, in_axis=0)
        return unknown(trace, call)
    for weight, x, axes in ((right, left, (-2, -1)), (left, right, (-1, -2))):
        is_matrix = all(size == 1 for size in weight.shape[:-2])
        if is_matrix and trace.is_deferred(weight) and not trace.is_deferred(x):
            return _matrix_product(trace, call, x, weight, axes)
    return product(trace, call, left, right)


def _matrix_product(trace: Tracer, call: Call, x: Tensor, weight: Tensor, axes: tuple[int, int]) -> Tensor:
    """x @ weight or weight @ x for one matrix, which may have axes of size one before it (einsum).

    Args:
        trace: The trace.
        call: The product.
        x: The activation.
        weight: The parameter.
        axes: The axis of the weight that is summed over, and the other one.
    """
    channel = x.dim() - 1 if axes == (-2, -1) else x.dim() - 2
    inside = (axes[0] + weight.dim(), axes[1] + weight.dim())
    positions = call.out.numel() // weight.shape[axes[1]]
    labels = trace.labels(x)
    if any(trace.weight_axis(weight, axis, role) is None for axis, role in zip(inside, _IN_OUT, strict=True)):
        return _computed(trace, call, x, weight, positions * weight.numel())
    return _mix(trace, call, labels, channel, weight, inside, None, positions).expand(call.out.shape)


def addmm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """bias + left @ right, the form of `F.linear` in older torch versions."""
    if trace.weight_name(call["mat2"]) is not None and call["self"].dim() == 1:
        return _dense(trace, call, call["mat1"], call["mat2"], call["self"], in_axis=0)
    return unknown(trace, call)


_IN_OUT = (Role.CONSUMER, Role.PRODUCER)
_ALIGNED = 8
"""Channels in 16 bytes of a half-precision type."""


def grouped_mm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """`grouped_mm`: one matrix of a three-dimensional parameter for each part of the rows (a mixture of experts).

    Its kernels need rows of a multiple of 16 bytes, so eight neighbouring channels are pruned together.
    """
    x, weight = call["self"], call["mat2"]
    name, order = trace.weight_name(weight), trace.axis_order(weight)
    if name is None or weight.dim() != 3 or x.dim() != 2 or len(order) != 3 or call.get("bias", None) is not None:
        return unknown(trace, call)
    trace.freeze_all([trace.labels(call.get("offs", None))], f"{call.here} uses its values as positions")
    for axis, role in ((1, Role.CONSUMER), (2, Role.PRODUCER)):
        vector = trace.channel_labels.axis(name, order[axis], weight.shape[axis], role)
        if vector.numel() % _ALIGNED:
            why = f"{call.here} needs multiples of {_ALIGNED} channels. Use another implementation of the experts"
            trace.channel_labels.freeze(vector, why)
        else:
            blocks = vector.view(-1, _ALIGNED)
            trace.channel_labels.unite(blocks[:, :1], blocks, call.here)
    rows = x.shape[0]
    result = _mix(trace, call, trace.labels(x), 1, weight, (1, 2), None, rows)
    return result.expand(call.out.shape)


def _dense(trace: Tracer, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, *, in_axis: int) -> Labels:
    """A linear layer on the last axis of x. `in_axis` is the axis of the weight that is summed over."""
    labels = trace.labels(x)
    axes = (in_axis, 1 - in_axis)
    known = weight.dim() == 2 and all(
        trace.weight_axis(weight, axis, role) is not None for axis, role in zip(axes, _IN_OUT, strict=True)
    )
    if not known:
        return _computed(trace, call, x, weight, call.out.numel() * x.shape[-1])
    positions = call.out.numel() // weight.shape[1 - in_axis]
    return _mix(trace, call, labels, x.dim() - 1, weight, axes, bias, positions).expand(call.out.shape)


def _computed(trace: Tracer, call: Call, x: Tensor, weight: Tensor, macs: int) -> Tensor:
    """A layer whose weight is computed by the network, which makes its channels not prunable."""
    trace.freeze_all([trace.labels(x), trace.labels(weight)], f"the weight of {call.here} is computed, not a parameter")
    trace.record(call, "conv" if weight.dim() > 2 else "linear", macs, [], [])
    return frozen_labels(call.out.shape)


def _mix(
    trace: Tracer,
    call: Call,
    labels: Labels,
    channel: int,
    weight: Tensor,
    axes: tuple[int, int],
    bias: Tensor | None,
    macs_per_pair: int,
) -> Tensor:
    """Every dense layer: consume the channels of x, produce those of the weight's output axis.

    `axes` are the axes of `weight` that are summed over and produced.
    """
    in_size, out_size = (weight.shape[axis] for axis in axes)
    reads, writes = (trace.weight_axis(weight, axis, role) for axis, role in zip(axes, _IN_OUT, strict=True))
    assert reads is not None, "called for a parameter"
    assert writes is not None, "called for a parameter"
    elsewhere = [a for a in varying_axes(labels) if a != channel] if labels is not None else []
    if labels is not None and elsewhere and varies(labels, channel):
        labels, elsewhere = trace.freeze(labels, f"{call.here} has channels on two axes of its input"), []
    if labels is not None and elsewhere:
        # The layer runs along another axis (token mixing): channels pass through, the layer is not prunable.
        trace.channel_labels.freeze(reads, f"{call.here} runs along another axis than the channels")
        trace.channel_labels.freeze(writes, f"{call.here} runs along another axis than the channels")
        beside = compact(labels).reshape(-1)
        macs = macs_per_pair // beside.numel() * in_size * out_size
        trace.record(call, "linear", macs, [beside], [weight, bias])
        call.zero = bias is None and trace.is_zero(call.tensors[0])
        return labels.narrow(channel, 0, 1)
    if labels is not None and unfrozen(labels) is None:
        trace.channel_labels.freeze(reads, "its input is not prunable")
    elif labels is not None:  # else it is a constant, such as the initial state of a recurrent layer
        trace.channel_labels.unite(channel_vector(labels, channel, in_size), reads, call.here)
    _bind_bias(trace, call, writes, bias)
    call.zero = bias is None or trace.is_zero(bias)
    trace.record(call, "conv" if weight.dim() > 2 else "linear", macs_per_pair, [reads, writes], [weight, bias])
    shape = [1] * call.out.dim()
    shape[channel] = out_size
    if trace.attention == "width":
        parts = [writes] if bias is None else [writes, trace.labels(bias, Role.PRODUCER)]
        call.rows = tuple(part.reshape(shape) for part in parts if part is not None)
    return writes.view(shape)


def _bind_bias(trace: Tracer, call: Call, outgoing: Tensor, bias: Tensor | None, role: Role = Role.PRODUCER) -> None:
    if bias is not None and (labels := trace.labels(bias, role)) is not None:
        trace.channel_labels.unite(outgoing, labels.reshape(-1), f"the bias of {call.here}")


def embedding(trace: Tracer, call: Call) -> Labels:
    """Embedding: the columns of the table are channels."""
    name = trace.weight_name(call["weight"])
    if name is None:
        return unknown_labels(trace, call)
    trace.freeze_others(call, call["weight"])
    trace.record(call, "move", 0, [], [call["weight"]])
    writes = trace.channel_labels.axis(name, 1, call["weight"].shape[1], Role.PRODUCER)
    call.zero = True
    return writes.expand(call.out.shape)


def bilinear(trace: Tracer, call: Call) -> Labels:
    """`nn.Bilinear`: out_k = sum over i, j of x_i weight_kij y_j. It consumes the channels of both inputs."""
    weight, bias = call["weight"], call["bias"]
    name = trace.weight_name(weight)
    if name is None or trace.axis_order(weight) != (0, 1, 2):
        return unknown_labels(trace, call)
    writes = trace.channel_labels.axis(name, 0, weight.shape[0], Role.PRODUCER)
    consumed: list[Tensor] = []
    for axis, x in ((1, call["input1"]), (2, call["input2"])):
        reads = trace.channel_labels.axis(name, axis, weight.shape[axis], Role.CONSUMER)
        labels = trace.labels(x)
        if labels is not None and any(a != x.dim() - 1 for a in varying_axes(labels)):
            labels = trace.freeze(labels, f"{call.here} runs along another axis than the channels")
        if consumed and unfrozen(labels) is not None:
            # The cost would be a product of three widths. Costs are products of two.
            labels = trace.freeze(labels, f"{call.here} multiplies its width by two others")  # type: ignore[arg-type]
        if unfrozen(labels) is None:
            trace.channel_labels.freeze(reads, "its input is not prunable")
            continue
        trace.channel_labels.unite(channel_vector(labels, x.dim() - 1, x.shape[-1]), reads, call.here)
        consumed.append(reads)
    _bind_bias(trace, call, writes, bias)
    fixed = weight.shape[1] * weight.shape[2] // math.prod(reads.numel() for reads in consumed)
    macs = call.out.numel() // weight.shape[0] * fixed
    trace.record(call, "linear", macs, [*consumed, writes], [weight, bias])
    return writes.expand(call.out.shape)


def _along(vector: Tensor, axis: int, shape: torch.Size) -> Tensor:
    """A vector of labels along one axis of a shape."""
    ones = [1] * len(shape)
    ones[axis] = vector.numel()
    return collapse(vector.reshape(ones)).expand(shape)
