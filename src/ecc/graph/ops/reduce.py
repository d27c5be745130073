"""Reductions, pooling, copies, and operators without a rule: they pass channels on or freeze them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ecc.graph.labels import Labels, first_on, frozen_labels, varies
from ecc.graph.ops.sums import channel_sum

if TYPE_CHECKING:
    from torch import Tensor

    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


def reduction(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Sums, means, maxima: channels on a reduced axis are frozen, others pass."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "reduction", 0, [], [])
    if labels is None:
        return None
    axes = _axes(call.get("dim", None), x.dim())
    if any(varies(labels, a) for a in axes):
        if channel_sum(trace, call, x, labels, axes):
            return [frozen_labels(out.shape) for out in call.outs]
        call.pending = (labels, f"{call.here} reduces over the channel axis")
        return [frozen_labels(out.shape) for out in call.outs]
    call.zero = call.name not in ("logsumexp", "any", "all") and trace.is_zero(x)
    for axis in sorted(axes, reverse=True):
        labels = labels.narrow(axis, 0, 1) if call.get("keepdim", False) else labels.select(axis, 0)
    return [labels.expand(out.shape) for out in call.outs]


def along_axis(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Softmax, cumulative sums, sorting: they keep the shape and mix positions of one axis."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "reduction", 0, [], [])
    if labels is None:  # a running sum of ones is different at each position
        return [frozen_labels(out.shape) for out in call.outs]
    axes = _axes(call.get("dim", -1), x.dim())
    if any(varies(labels, a) for a in axes):
        labels = trace.freeze(labels, f"{call.here} mixes channels")
    for axis in axes:
        labels = first_on(labels, axis)
    return [labels.expand(out.shape) for out in call.outs]


def spatial(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Pooling, interpolation, reflection padding: per channel over the last axes."""
    x = call.tensors[0]
    digit = re.search(r"([123])d", call.name)
    pooled = range(x.dim() - (int(digit.group(1)) if digit else 2), x.dim())
    labels = _pooled(trace, call, x, pooled)
    return None if labels is None else [labels.expand(out.shape) for out in call.outs]


def regions(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Pooling of regions (`roi_align`): per channel, from an image for each region."""
    labels = _pooled(trace, call, call.tensors[0], (0, 2, 3))
    if labels is None:
        return None
    return [labels.expand(call.outs[0].shape), *(frozen_labels(out.shape) for out in call.outs[1:])]


def _pooled(trace: Tracer, call: Call, x: Tensor, axes: Sequence[int]) -> Labels:
    """Labels of the first argument with size 1 on the axes that are pooled; channels there are frozen."""
    labels = trace.labels(x)
    trace.record(call, "pool", 0, [], [])
    if labels is None:
        return None
    trace.freeze_others(call, x)
    if any(varies(labels, axis) for axis in axes):
        labels = trace.freeze(labels, f"{call.here} pools along the channel axis", unusual=True)
    call.zero = trace.is_zero(x)
    for axis in axes:
        labels = first_on(labels, axis)
    return labels


def _axes(dim: Any, count: int) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(count))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % max(count, 1) for d in dims})


def same(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Copies, casts, dropout: same shape, same positions."""
    labels = trace.movable(call.tensors[0])
    if call.outs and call.outs[0] is not call.tensors[0]:
        trace.record(call, "move", 0, [], [])
    return [labels] * len(call.outs)


def constant(_: Tracer, call: Call) -> Labels | list[Labels]:
    """A new tensor with the same value at every position."""
    return [None] * len(call.outs)


def positions(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """A grid of positions, or those of nonzero values: its arguments are frozen."""
    trace.freeze_all([trace.labels(t) for t in call.tensors], f"{call.here} uses its values as positions")
    trace.record(call, "other", 0, [], [])
    return [frozen_labels(out.shape) for out in call.outs]


def unknown(trace: Tracer, call: Call) -> list[Labels]:
    """An operator without a rule: its arguments and results are frozen."""
    trace.freeze_all([trace.labels(t) for t in call.tensors], f"operator {call.here} is not supported")
    trace.record(call, "other", 0, [], [])
    return [frozen_labels(out.shape) for out in call.outs]


def unknown_labels(trace: Tracer, call: Call) -> Labels:
    """`unknown` for an operator with one output."""
    return unknown(trace, call)[0]
