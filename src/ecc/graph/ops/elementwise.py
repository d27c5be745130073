"""Operators that process each channel by itself: channels that they combine are pruned together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.labels import FROZEN, Labels, channel_vector, compact, frozen_labels, varying_axes
from ecc.graph.masked_norm import can_mask_norm
from ecc.graph.ops.reduce import positions
from ecc.graph.ops.sums import keeps_zero

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


def channel_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Batch and instance norm: statistics per channel."""
    x = call["input"]
    labels = trace.labels(x)
    if labels is not None and any(a != 1 for a in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} normalizes over the channel axis", unusual=True)
    vector = channel_vector(labels, 1, x.shape[1])
    tensors = [call.get(k, None) for k in ("weight", "bias", "running_mean", "running_var")]
    for tensor in tensors:
        if tensor is not None and (own := trace.labels(tensor)) is not None:
            trace.channel_labels.unite(vector, own.reshape(-1), call.here)
    if not any(tensor is not None for tensor in tensors):
        # the module has no tensor from which its size could be set
        trace.channel_labels.attributes[trace.last_path, "num_features"] = vector
    trace.record(call, "norm", 0, [], tensors)
    call.zero = trace.is_zero(x)
    return labels


def layer_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Layer norm: statistics over the last axes. Masked channels are left out of them (`masked_norm.py`)."""
    x, weight, bias = call["input"], call["weight"], call.get("bias", None)
    labels = trace.labels(x)
    trace.record(call, "norm", 0, [], [weight, bias])
    first = x.dim() - len(call["normalized_shape"])
    varying = [] if labels is None else varying_axes(labels)
    if labels is None or not any(axis >= first for axis in varying):
        return labels
    if varying != [x.dim() - 1] or first != x.dim() - 1:
        return trace.freeze(labels, f"{call.here} mixes channels, so removing one would change the output")
    if weight is None:
        return trace.freeze(labels, f"{call.here} has no weight, by which channels are masked")
    if not can_mask_norm(trace.module, weight):
        return trace.freeze(labels, f"the weight of {call.here} is not a parameter of the module that calls it")
    vector = channel_vector(labels, -1, x.shape[-1])
    trace.channel_labels.zeroed.append(vector)
    trace.channel_labels.needs_two.append(vector[vector != FROZEN])  # a single channel minus its mean is zero
    for tensor in (weight, bias):
        if tensor is not None and (own := trace.labels(tensor)) is not None:
            trace.channel_labels.unite(vector, own.reshape(-1), call.here)
    trace.channel_labels.layer_norms[trace.last_path] = vector
    call.zero = True
    return labels


def group_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Group norm: the channels of one group are pruned together, since a group's statistics do not see the others."""
    x = call["input"]
    labels, groups = trace.labels(x), call.get("num_groups", None) or call["group"]
    weights = [call.get("weight", None), call.get("bias", None)]
    trace.record(call, "norm", 0, [], weights)
    if labels is None:
        return None
    if groups == 1 or any(axis != 1 for axis in varying_axes(labels)):
        return trace.freeze(labels, f"{call.here} mixes channels, so removing one would change the output")
    if weights[0] is None:
        return trace.freeze(labels, f"{call.here} has no weight from which its number of groups could be set")
    vector = channel_vector(labels, 1, x.shape[1])
    trace.channel_labels.unite(vector.view(groups, -1)[:, :1], vector.view(groups, -1), call.here)
    for tensor in weights:
        if tensor is not None and (own := trace.labels(tensor)) is not None:
            trace.channel_labels.unite(vector, own.reshape(-1), call.here)
    return [labels, *[None] * (len(call.outs) - 1)]


def prelu(trace: Tracer, call: Call) -> Labels:
    """PReLU: one slope per channel, or one for all."""
    labels = trace.labels(call["self"])
    slope = trace.labels(call["weight"])
    if slope is not None and call["weight"].numel() > 1:
        trace.channel_labels.unite(channel_vector(labels, 1, call["self"].shape[1]), slope.reshape(-1), call.here)
    trace.record(call, "elementwise", 0, [], [call["weight"]])
    call.zero = trace.is_zero(call["self"])
    return labels


def pointwise(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Elementwise operators: channels that they combine are pruned together."""
    tensors = call.tensors
    if call.name == "where" and len(tensors) == 1:
        return positions(trace, call)
    labels = [_before_expand(t, trace.labels(t, defer=True)) for t in tensors]
    bare = {number for number, t in enumerate(tensors) if hasattr(t, "_ecc_name")}
    result = unite_operands(trace, call, labels, call.out.shape, bare)
    for tensor in filter(trace.is_deferred, tensors):
        bound = tensor._ecc_state.bind(trace.channel_labels, result, call.here)  # type: ignore[attr-defined]
        tensor._ecc_zero = bound  # type: ignore[attr-defined]
    call.zero = keeps_zero(trace, call, result)
    if trace.attention == "width" and result is not None and any(map(trace.is_scores, tensors)):
        result = trace.freeze(result, f"{call.here} uses it in all heads, of which the width is pruned")
    if call.in_place and trace.labels(tensors[0]) is None and result is not None and trace.is_view(tensors[0]):
        result = trace.freeze(result, f"{call.here} writes it into part of another tensor")
    trace.record(call, "elementwise", 0, [], [])
    return result


def _before_expand(tensor: Tensor, labels: Labels) -> Labels:
    """Labels of a value before `expand` repeated it along an axis, on which it belongs to no position."""
    shape = getattr(tensor, "_ecc_repeats", None)
    if labels is None or shape is None:
        return labels
    for axis, size in enumerate([*[1] * (labels.dim() - len(shape)), *shape]):
        if size == 1:
            labels = labels.narrow(axis, 0, 1)
    return labels


def copy_into(trace: Tracer, call: Call) -> Labels:
    """An assignment into an existing tensor."""
    target, source = trace.labels(call["self"]), trace.labels(call["src"])
    if target is None and source is not None:
        trace.freeze(source, f"{call.here} writes it into part of another tensor")
        return frozen_labels(call.out.shape)
    return unite_operands(trace, call, [x for x in (target, source) if x is not None], call.out.shape)


def unite_operands(
    trace: Tracer, call: Call, many: Sequence[Labels], shape: torch.Size, bare: Collection[int] = ()
) -> Labels:
    """Unite the labels of the operands of an elementwise operator, and return those of the result.

    `bare` has the positions of operands that are parameters. A parameter stays whole if its channels lie on another
    axis than those of the other operand.
    """
    result: Labels = None
    for number, labels in enumerate(many):
        if labels is not None:
            labels = labels[(None,) * (len(shape) - labels.dim())]
            result = labels if result is None else _meet(trace, call, result, labels, number in bare)
    return None if result is None else result.expand(shape)


def _meet(trace: Tracer, call: Call, left: Tensor, right: Tensor, right_is_bare: bool) -> Tensor:
    """Unite the labels of two operands, or freeze the one that is broadcast over channels of the other."""
    if right_is_bare:
        left, right = right, left
    shape = [max(one, other) if min(one, other) else 0 for one, other in zip(left.shape, right.shape, strict=True)]
    left_axes, right_axes = set(varying_axes(left)), set(varying_axes(right))
    sides = ((left, right, right_axes - left_axes), (right, left, left_axes - right_axes))
    # A gate of width one, or one value per token, belongs to no single channel and stays whole.
    whole = [(mine, other) for mine, other, axes in sides if any(mine.shape[a] == 1 for a in axes)]
    whole += [(mine, other) for mine, other, axes in sides if axes and not bool((compact(mine) == FROZEN).any())]
    for mine, other in whole[:1]:
        trace.freeze(mine, f"{call.here} broadcasts it over other channels")
        return other.expand(shape)
    left, right = left.expand(shape), right.expand(shape)
    first, second = (right, left) if right_is_bare else (left, right)
    wide = first if len(varying_axes(first)) >= len(varying_axes(second)) else second
    for axis in set(range(len(shape))) - left_axes - right_axes:
        left, right = left.narrow(axis, 0, 1), right.narrow(axis, 0, 1)
    trace.channel_labels.unite(left, right, call.here)
    return wide
