"""Products of two activations, and attention: heads are units.

After a view as heads, the labels of queries, keys and values change along the head axis, which is a batch axis of the
products. All labels of one head are united: a unit is a head with its rows of the query, key and value projections and
its columns of the output projection. With fewer key heads than query heads, a unit is one key head with all its query
heads. If labels change along the width of a head instead, the product sums over them. The view before is then
interpreted in another way (`Tracer.wants_heads`), and if there is none, the channels are frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ecc.graph.calls import amount
from ecc.graph.labels import (
    Deferred,
    Labels,
    channel_vector,
    collapse,
    compact,
    frozen_labels,
    unfrozen,
    varies,
    varying_axes,
)
from ecc.graph.ops.elementwise import unite_operands
from ecc.graph.ops.head_width import end_scores, inner_product, use_rows

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


def product(trace: Tracer, call: Call, left: Tensor, right: Tensor, numbers: Sequence[float] = ()) -> Labels:
    """(..., m, k) @ (..., k, n) of two activations, times `numbers`."""
    inner = _inner_product(trace, call, left, right)
    if inner is None and trace.attention == "width":
        sides = (left, trace.labels(left), -1), (right, trace.labels(right), -2)
        inner = inner_product(trace, call, sides, numbers)
    if inner is not None:
        trace.record(call, "matmul", call.out.numel(), [inner], [])
        return frozen_labels(call.out.shape)
    result = _contract(trace, call, trace.labels(left), trace.labels(right), call.out.shape)
    elements, repeats = amount(call.out, result)
    trace.record(call, "matmul", left.shape[-1] * repeats, [elements], [])
    return result


def _inner_product(trace: Tracer, call: Call, left: Tensor, right: Tensor) -> Labels:
    """The channels that a product of two matrices sums over, if masked ones are zero (scores of two towers)."""
    sides = trace.labels(left), trace.labels(right)
    if left.dim() != 2 or right.dim() != 2 or sides[0] is None or sides[1] is None:
        return None
    if varying_axes(sides[0]) != [1] or varying_axes(sides[1]) != [0]:
        return None
    if not (trace.is_zero(left) and trace.is_zero(right)):
        return None
    first, second = channel_vector(sides[0], 1, left.shape[1]), channel_vector(sides[1], 0, left.shape[1])
    trace.channel_labels.unite(first, second, call.here)
    trace.channel_labels.zeroed += [first, second]
    return first


def baddbmm(trace: Tracer, call: Call) -> Labels:
    """A batched product plus a tensor."""
    result = product(trace, call, call["batch1"], call["batch2"], [call["alpha"]])
    if call.multiplied and call["beta"]:
        end_scores(call)
        use_rows(trace, call, [call["self"]])
    return unite_operands(trace, call, [trace.labels(call["self"]), result], call.out.shape)


def attention(trace: Tracer, call: Call) -> Labels:
    """softmax(q k' + mask) v."""
    query, key, value = (trace.labels(call[name]) for name in ("query", "key", "value"))
    for name in ("query", "key", "value"):
        if trace.is_deferred(call[name]):
            whole = call[name]._ecc_state
            whole.freeze(trace.channel_labels, f"{call.here} uses all values of {whole.name}")
    if call.get("enable_gqa", False):
        heads = call["query"].shape[-3]
        key, value = _repeated(key, heads), _repeated(value, heads)
    keys = call["key"].shape[-2]
    shape = torch.Size([*call.out.shape[:-1], keys])
    rejected = len(trace.wants_heads)
    if trace.attention == "width" and _sums_over_width(trace, call, query, key):
        scores = frozen_labels(shape)
    else:
        scores = _contract(trace, call, query, None if key is None else key.transpose(-1, -2), shape)
    if len(trace.wants_heads) > rejected and value is not None and varies(value, -1):
        trace.wants_heads.append(compact(value).reshape(-1))  # all three are split alike
    mask = call.get("attn_mask", None)
    if mask is not None:
        state = getattr(mask, "_ecc_state", None)
        if isinstance(state, Deferred):
            state.bind(trace.channel_labels, scores, call.here)
        else:
            scores = cast(Tensor, unite_operands(trace, call, [scores, trace.labels(mask)], shape))
    if call.multiplied:
        scores = frozen_labels(shape)
    result = _contract(trace, call, scores, value, call.out.shape)
    elements, repeats = amount(call["query"], query)
    trace.record(call, "matmul", keys * repeats, [elements], [])
    elements, repeats = amount(call.out, result)
    trace.record(call, "matmul", keys * repeats, [elements], [], traffic=False)
    return result


def _sums_over_width(trace: Tracer, call: Call, query: Labels, key: Labels) -> bool:
    """Whether queries and keys are prunable along the width of heads."""
    scale = call.get("scale", None)
    sides = (call["query"], query, -1), (call["key"], key, -1)
    found = inner_product(trace, call, sides, [] if scale is None else [scale], 0.5 if scale is None else 0.0)
    if found is None:
        return False
    end_scores(call)
    use_rows(trace, call, [call["value"]])
    return True


def _repeated(labels: Labels, heads: int) -> Labels:
    """Labels of key or value heads, one for each query head."""
    if labels is None or labels.shape[-3] == heads:
        return labels
    shape = [*labels.shape[:-3], heads, *labels.shape[-2:]]
    small = compact(labels)
    if varies(labels, -3):
        small = small.repeat_interleave(heads // labels.shape[-3], labels.dim() - 3)
    return small.expand(shape)


def _contract(trace: Tracer, call: Call, first: Labels, second: Labels, shape: torch.Size) -> Tensor:
    """Labels of (..., m, k) @ (..., k, n).

    Channels along k are summed over, and frozen. Channels along a batch axis (heads) of both operands are united per
    index. Channels along m or n pass to the result, unless both operands have some.
    """
    sides = [None if x is None else x[(None,) * (len(shape) - x.dim())] for x in (first, second)]
    first, second = (unfrozen(x) for x in _without_conflicts(trace, call, _without_sums(trace, call, sides)))
    if _heads(first) and _heads(second):
        first, second = cast(Tensor, first), cast(Tensor, second)
        trace.channel_labels.unite(_one_per_head(first), _one_per_head(second), call.here)
        first, second = (first, None) if len(_heads(first)) >= len(_heads(second)) else (second, None)
    elif first is not None and second is not None:
        trace.freeze(first, f"{call.here} sums over it")
        first = None
    if second is not None:
        return collapse(second.narrow(-2, 0, 1)).expand(shape)
    if first is not None:
        return collapse(_one_per_head(first) if _heads(first) else first.narrow(-1, 0, 1)).expand(shape)
    return frozen_labels(shape)


def _without_sums(trace: Tracer, call: Call, sides: list[Labels]) -> list[tuple[Labels, bool]]:
    """Freeze channels that a product sums over. The flag says that an operand had such channels."""
    found: list[tuple[Labels, bool]] = []
    for labels, axis in zip(sides, (-1, -2), strict=True):
        if labels is not None and (varies(labels, axis) or (unfrozen(labels) is not None and not varying_axes(labels))):
            _reject(trace, labels)
            found.append((trace.freeze(labels, _why(trace, call, labels)), True))
        else:
            found.append((labels, False))
    return found


def _without_conflicts(trace: Tracer, call: Call, sides: list[tuple[Labels, bool]]) -> list[Labels]:
    """Freeze heads of one operand that the other does not have."""
    found = [labels for labels, _ in sides]
    stuck = [labels is not None and unfrozen(labels) is None and not summed for labels, summed in sides]
    for this, that in ((0, 1), (1, 0)):
        labels, other = found[this], found[that]
        heads = _heads(labels)
        if labels is None or other is None or not heads:
            continue
        if varies(labels, -1) or varies(labels, -2):
            found[this] = trace.freeze(labels, f"{call.here} has channels on two axes of its input")
        elif stuck[that] and any(other.shape[axis] > 1 for axis in heads):
            _reject(trace, labels)
            found[this] = trace.freeze(labels, f"{call.here} combines it with heads that are not prunable")
        elif unfrozen(other) is not None and not _heads(other):
            _reject(trace, other)
            found[that] = trace.freeze(other, f"{call.here} uses it in several heads")
    return found


def _why(trace: Tracer, call: Call, labels: Tensor) -> str:
    """Why channels are frozen: the product sums over them, and heads were not possible for the reason noted."""
    first = compact(labels).reshape(-1)[:1]
    for known, reason in trace.headless:
        if bool(torch.isin(first, known).any()):
            return f"{call.here} sums over it, and its heads are not prunable: {reason}"
    return f"{call.here} sums over it"


def _reject(trace: Tracer, labels: Tensor) -> None:
    """Ask for another interpretation of the view that put channels on these axes."""
    trace.wants_heads.append(compact(labels).reshape(-1))


def _heads(labels: Labels) -> list[int]:
    """Batch axes of a product along which labels change."""
    return [] if labels is None else [axis for axis in range(labels.dim() - 2) if varies(labels, axis)]


def _one_per_head(labels: Tensor) -> Tensor:
    return labels.narrow(-1, 0, 1).narrow(-2, 0, 1)
