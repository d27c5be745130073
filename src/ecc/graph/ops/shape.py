"""Data movement: the operator itself runs on the label tensor, so that index maps are exact.

A reshape that splits a channel axis (heads, channel shuffle) and a split into equal parts tie the parts: each loses the
same number of channels. Which of the new axes shrinks is a guess, which the trace of the pruned network confirms or
refutes. Concatenation and padding place frozen positions beside channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.consistency import check_selection
from ecc.graph.labels import (
    FROZEN,
    PERMUTES,
    Labels,
    collapse,
    compact,
    first_on,
    frozen_labels,
    varies,
    varying_axes,
)
from ecc.graph.ops.elementwise import unite_operands

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


_SELECTING = frozenset("slice narrow split split_with_sizes chunk tensor_split select unbind unfold diagonal".split())
"""Operators that select some positions of their argument."""


def move(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Permute, expand, select, repeat and others: run the operator on the labels."""
    if call.name in PERMUTES and trace.is_deferred(call.tensors[0]) and trace.weight_name(call.tensors[0]) is not None:
        return frozen_labels(call.out.shape)  # only the order of a parameter's axes changes (`Deferred.move`)
    labels = trace.movable(call.tensors[0])
    if labels is None:
        return [None] * len(call.outs)
    if call.name == "squeeze" and call.get("dim", None) is None and varying_axes(labels):
        trace.channel_labels.needs_two.append(compact(labels).reshape(-1))
    out = call.rerun(labels)
    outs = list(out) if isinstance(out, (tuple, list)) else [collapse(out)]
    found = [part.expand(real.shape) for part, real in zip(outs, call.outs, strict=True)]
    if call.name in ("expand", "expand_as", "broadcast_to"):
        call.out._ecc_repeats = call.tensors[0].shape  # type: ignore[attr-defined]
    if call.name in _SELECTING and not trace.is_deferred(call.tensors[0]) and varying_axes(labels):
        check_selection(trace, call, labels, found)
    return found


def roll(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """roll, flip: nothing to do unless channels move."""
    labels = trace.movable(call.tensors[0])
    dims = call["dims"]
    axes = [dims] if isinstance(dims, int) else list(dims)
    if labels is None or not axes or not any(varies(labels, a) for a in axes):
        return labels if axes else move(trace, call)
    found: Tensor = call.rerun(compact(labels)).expand(call.out.shape)
    if not trace.is_deferred(call.tensors[0]):
        check_selection(trace, call, labels, [found])
    return found


def slice_axis(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """A slice. If it is one of several equal parts (a hand-written chunk), the parts are tied."""
    x = call.tensors[0]
    axis, size = call.get("dim", 0) % x.dim(), x.shape[call.get("dim", 0)]
    part = call.out.shape[axis]
    labels = trace.movable(x)
    if labels is not None and not trace.is_deferred(x) and varies(labels, axis) and 1 < part < size:
        start = call.get("start", 0) or 0
        start = start + size if start < 0 else start
        regular = call.get("step", 1) == 1 and size % part == 0 and start % part == 0
        if regular and trace.choose(call, 2) == 0:
            _tie_parts(trace, call, labels, axis, [part] * (size // part))
    return move(trace, call)


def split(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """chunk, split, tensor_split: equal parts must stay equal."""
    x = call.tensors[0]
    labels = trace.movable(x)
    axis = call.get("dim", 0) % x.dim()
    sizes = [out.shape[axis] for out in call.outs]
    if labels is not None and not trace.is_deferred(x) and varies(labels, axis):
        if len(set(sizes)) == 1:
            _tie_parts(trace, call, labels, axis, sizes)
        elif call.name in ("chunk", "unsafe_chunk", "tensor_split"):  # the bounds depend on the width
            trace.freeze(labels, f"{call.described} splits channels into unequal parts")
            return [frozen_labels(part.shape) for part in call.outs]
    return move(trace, call)


def _tie_parts(trace: Tracer, call: Call, labels: Tensor, axis: int, sizes: list[int]) -> None:
    first, *rest = compact(labels).split(sizes, axis)
    for part in rest:
        trace.channel_labels.unite(first, part, call.here)


def reshape(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """view, reshape, flatten, unflatten: merging axes is exact, splitting a channel axis ties its parts."""
    labels = trace.movable(call.tensors[0])
    if labels is None:
        return None
    return _split_ties(trace, call, reshaped(labels, call.out.shape), deferred=trace.is_deferred(call.tensors[0]))


def reshaped(labels: Tensor, shape: torch.Size) -> Tensor:
    """`labels.reshape(shape)` that copies only the axes whose labels change."""
    blocks = reshape_blocks(labels.shape, shape)
    if blocks is None:
        return collapse(labels.reshape(shape))
    source, target = labels, list(shape)
    for old, new in blocks:
        if not any(varies(labels, a) for a in old):
            for axis in old:
                source = source.narrow(axis, 0, 1)
            for axis in new:
                target[axis] = 1
    return collapse(source.reshape(target)).expand(shape)


def reshape_blocks(old: torch.Size, new: torch.Size) -> list[tuple[list[int], list[int]]] | None:
    """Match axes of two shapes in the smallest blocks of equal size; None for empty tensors.

    >>> reshape_blocks(torch.Size([2, 12, 5]), torch.Size([2, 3, 4, 5]))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    if 0 in old:
        return None
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        a = old[left[0]] if left else 1
        b = new[right[0]] if right else 1
        while a != b:
            if a < b:
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                b, right, j = b * new[j], [*right, j], j + 1
        blocks.append((left, right))
    return blocks


def _split_ties(trace: Tracer, call: Call, labels: Tensor, *, deferred: bool) -> Tensor:
    """If one channel axis became several, guess which of them shrinks, and tie labels across the others.

    With 8 channels viewed as (2, 4), pruning may leave (2, 3) or (1, 4). The guess (2, 3) ties channel k to channel
    4 + k. `Tracer.choose` moves on to the next guess if the pruned network contradicts this one, and freezes at last.
    """
    before = call.tensors[0].shape
    for _, new in reshape_blocks(before, labels.shape) or []:
        axes = [a for a in new if varies(labels, a)]
        if len(axes) < 2 or deferred:
            continue
        # Shuffles and the width of heads first, then heads, then queries, keys and values, or pixel shuffles. If
        # attention rejected the width, but heads cannot be pruned, it is tried once more, since values may still be
        # pruned along it.
        guesses = [*reversed(axes), axes[-1]]
        choice = trace.choose(call, len(guesses) + 1, splits=True)
        if choice >= len(guesses):
            return trace.freeze(labels, f"{call.described} has a hard-coded channel count.{call.fix}".rstrip("."))
        if choice == len(guesses) - 1:
            trace.note_headless(call, labels)
        for axis in axes:
            if axis != guesses[choice]:
                first = labels.narrow(axis, 0, 1)
                trace.channel_labels.unite(compact(first.expand_as(labels)), compact(labels), call.here)
                labels = first.expand(labels.shape)
    return labels


def pixel_shuffle(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """r x r consecutive channels become one: they are pruned together."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return None
    channel = x.dim() - 3
    square = call["upscale_factor"] ** 2
    if any(a > channel for a in varying_axes(labels)):
        trace.freeze(labels, f"{call.here} has channels on a spatial axis", unusual=True)
        return frozen_labels(call.out.shape)
    fine = compact(labels).expand(*compact(labels).shape[:channel], x.shape[channel], 1, 1)
    parts = fine.reshape(*fine.shape[:channel], -1, square)
    trace.channel_labels.unite(parts[..., :1], parts, call.here)
    return collapse(parts[..., 0][..., None, None]).expand(call.out.shape)


def pixel_unshuffle(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Each channel becomes r x r consecutive ones."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return None
    channel = x.dim() - 3
    if any(a > channel for a in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} has channels on a spatial axis", unusual=True)
    many = labels.narrow(-1, 0, 1).narrow(-2, 0, 1).repeat_interleave(call["downscale_factor"] ** 2, dim=channel)
    return collapse(many).expand(call.out.shape)


def channel_shuffle(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """(groups, n) channels become (n, groups): the groups are tied, so that each keeps the same number."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "move", 0, [], [])
    if labels is None or not varies(labels, 1):
        return labels
    part = x.shape[1] // call["groups"]
    _tie_parts(trace, call, labels, 1, [part] * call["groups"])
    small = compact(labels)
    order = torch.arange(x.shape[1]).view(call["groups"], part).t().reshape(-1)
    return small.index_select(1, order).expand(call.out.shape)


def glu(trace: Tracer, call: Call) -> Labels:
    """Gated linear unit: the first half of an axis times the sigmoid of the second. The halves are pruned together."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "elementwise", 0, [], [])
    axis = call["dim"] % x.dim()
    if labels is None or not varies(labels, axis):
        return None if labels is None else labels.narrow(axis, 0, call.out.shape[axis])
    _tie_parts(trace, call, labels, axis, [call.out.shape[axis]] * 2)
    return compact(labels).narrow(axis, 0, call.out.shape[axis]).expand(call.out.shape)


def im2col(trace: Tracer, call: Call) -> Labels:
    """`F.unfold`: each channel becomes as many consecutive ones as a patch has pixels."""
    labels = _feature_map(trace, call, 3)
    if labels is None:
        return frozen_labels(call.out.shape)
    many = labels.repeat_interleave(math.prod(call["kernel_size"]), dim=labels.dim() - 3).squeeze(-1)
    return collapse(many).expand(call.out.shape)


def col2im(trace: Tracer, call: Call) -> Labels:
    """`F.fold`: as many consecutive channels as a patch has pixels become one, and are pruned together."""
    labels = _feature_map(trace, call, 2)
    if labels is None:
        return frozen_labels(call.out.shape)
    parts = labels.unflatten(labels.dim() - 2, (-1, math.prod(call["kernel_size"])))
    trace.channel_labels.unite(parts[..., :1, :], parts, call.here)
    return collapse(parts[..., :1, :]).expand(call.out.shape)


def _feature_map(trace: Tracer, call: Call, axes: int) -> Labels:
    """Labels of the channels of a feature map, which are the first of its last axes, with size 1 on those after it."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return None
    if any(axis > x.dim() - axes for axis in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} has channels on a spatial axis", unusual=True)
    for axis in range(x.dim() - axes + 1, x.dim()):
        labels = labels.narrow(axis, 0, 1)
    return labels.expand([*labels.shape[:-axes], x.shape[-axes], *[1] * (axes - 1)])


def to_complex(trace: Tracer, call: Call) -> Labels:
    """`view_as_complex`: pairs on the last axis become one number."""
    labels = trace.labels(call.tensors[0])
    if labels is not None and varies(labels, labels.dim() - 1):
        labels = trace.freeze(labels, f"{call.here} has channels on the axis of real and imaginary parts", unusual=True)
    return None if labels is None else labels.select(-1, 0)


def to_real(trace: Tracer, call: Call) -> Labels:
    """`view_as_real`: real and imaginary parts on a new last axis."""
    labels = trace.labels(call.tensors[0])
    return None if labels is None else labels.unsqueeze(-1).expand(call.out.shape)


def add_at(trace: Tracer, call: Call) -> Labels:
    """index_add, scatter_add and similar: exact along an axis without channels."""
    x, source, index = call["self"], call.get("source", None), call["index"]
    source = call["src"] if source is None else source
    many = [trace.labels(x), trace.labels(source)]
    trace.record(call, "move", 0, [], [])
    trace.freeze_all([trace.labels(index)], f"{call.here} uses its values as positions")
    axis = call["dim"] % x.dim()
    for number, labels in enumerate(many):
        if labels is None:
            continue
        if varies(labels, axis):
            labels = trace.freeze(labels, f"{call.here} selects channels by a computed index")
        elif any(index.dim() == x.dim() and index.shape[a] > 1 and index.stride(a) for a in varying_axes(labels)):
            labels = trace.freeze(labels, f"{call.here} has positions that may differ between channels")
        many[number] = labels.narrow(axis, 0, 1)
    if many[0] is None and many[1] is None:
        return frozen_labels(call.out.shape)
    shape = torch.Size([1 if a == axis else n for a, n in enumerate(x.shape)])
    if any(labels is not None and labels.shape != shape for labels in many):
        trace.freeze_all(many, f"{call.here} writes it into part of another tensor")
        return frozen_labels(call.out.shape)
    call.zero = trace.is_zero(x) and trace.is_zero(source)
    result = unite_operands(trace, call, many, shape)
    return None if result is None else result.expand(call.out.shape)


def write_at(trace: Tracer, call: Call) -> Labels:
    """x[index] = values: exact for one index along an axis without channels."""
    x, values, indices = call["self"], call["values"], call["indices"]
    many = [trace.labels(x), trace.labels(values)]
    trace.record(call, "move", 0, [], [])
    trace.freeze_all([trace.labels(i) for i in indices], f"{call.here} uses its values as positions")
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    is_row = len(axes) == 1 and indices[axes[0]].dim() == 1 and values.dim() in (0, x.dim())
    is_part = many[0] is None and trace.is_view(x)
    shape = torch.Size([1 if axis in axes else size for axis, size in enumerate(x.shape)])
    known = [labels for labels in many if labels is not None]
    if not known or not is_row or is_part or any(varies(labels, axes[0]) for labels in known if labels.dim()):
        trace.freeze_all(many, f"{call.here} writes it into part of another tensor")
        return frozen_labels(call.out.shape)
    known = [first_on(labels, axes[0]) if labels.dim() else labels for labels in known]
    call.zero = trace.is_zero(x) and trace.is_zero(values)
    result = unite_operands(trace, call, known, shape)
    return None if result is None else result.expand(call.out.shape)


def cat(trace: Tracer, call: Call) -> Labels:
    """Concatenation: along the channel axis labels are concatenated, along another axis the pieces are tied."""
    pieces = [t for t in call.tensors if not (t.dim() == 1 and t.numel() == 0)]
    trace.record(call, "move", 0, [], [])
    labels = [trace.labels(t) for t in pieces]
    if all(label is None for label in labels):  # ones beside zeros: positions differ
        return frozen_labels(call.out.shape) if len(pieces) > 1 else None
    axis = call.get("dim", 0) % call.out.dim()
    # A constant beside channels, or beside the input's channels on the usual axis of images (a convolutional LSTM).
    beside = any(label is not None and varies(label, axis) for label in labels)
    beside |= axis == 1 and call.out.dim() > 3 and not any(x is not None and varying_axes(x) for x in labels)
    full = [
        _constant_piece(trace, call, piece, axis, beside) if label is None else label
        for piece, label in zip(pieces, labels, strict=True)
    ]
    if any(varies(label, axis) for label in full) or not any(varying_axes(label) for label in full):
        call.zero = all(trace.is_zero(piece) for piece in pieces)
        return collapse(_joined(full, axis)).expand(call.out.shape)
    call.zero = all(trace.is_zero(piece) for piece in pieces)
    return _tied(trace, call, [label.narrow(axis, 0, 1) for label in labels if label is not None], axis)


def _constant_piece(trace: Tracer, call: Call, piece: Tensor, axis: int, beside: bool) -> Tensor:
    """Labels of a constant that is concatenated with channels."""
    if not beside:
        return frozen_labels(piece.shape)
    ones = [piece.shape[axis] if a == axis else 1 for a in range(piece.dim())]
    return trace.constant_labels(call, piece.shape[axis]).reshape(ones).expand(piece.shape)


def _joined(labels: list[Tensor], axis: int) -> Tensor:
    """`torch.cat` that copies only the axes along which some piece's labels change."""
    dims = labels[0].dim()
    for other in range(dims):
        if other != axis and not any(varies(label, other) for label in labels):
            labels = [label.narrow(other, 0, 1) for label in labels]
    return torch.cat([label.contiguous() for label in labels], axis)


def _tied(trace: Tracer, call: Call, labels: list[Tensor], axis: int) -> Labels:
    """Pieces side by side on an axis without channels: their channels are pruned together."""
    if not labels:
        return frozen_labels(call.out.shape)
    shape = torch.Size([1 if a == axis else n for a, n in enumerate(call.out.shape)])
    result = unite_operands(trace, call, labels, shape)
    return None if result is None else result.expand(call.out.shape)


def stack(trace: Tracer, call: Call) -> Labels:
    """Pieces side by side on a new axis: their channels are pruned together."""
    axis = call.get("dim", 0) % call.out.dim()
    trace.record(call, "move", 0, [], [])
    labels = [trace.labels(t) for t in call.tensors]
    call.zero = all(trace.is_zero(tensor) for tensor in call.tensors)
    return _tied(trace, call, [label.unsqueeze(axis) for label in labels if label is not None], axis)


def pad(trace: Tracer, call: Call) -> Labels:
    """Constant padding. New positions on the channel axis belong to the channels that they are combined with.

    If both sides get equally many, code may compute each side as half of the total (option A of ResNet). They are tied,
    so that they stay equal.
    """
    labels = trace.labels(call.tensors[0])
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return frozen_labels(call.out.shape)
    amounts = list(call["pad"])
    call.zero = trace.is_zero(call.tensors[0]) and not call.get("value", 0)
    dims = labels.dim()
    for axis in range(dims):
        k = 2 * (dims - 1 - axis)
        if k >= len(amounts) or not (amounts[k] or amounts[k + 1]):
            continue
        if varies(labels, axis) and amounts[k] >= 0 and amounts[k + 1] >= 0:
            labels = _padded(trace, call, compact(labels), axis, amounts[k], amounts[k + 1])
            amounts[k] = amounts[k + 1] = 0
        elif not varies(labels, axis):
            amounts[k] = amounts[k + 1] = 0
            labels = labels.narrow(axis, 0, 1)
    padded = torch.nn.functional.pad(compact(labels), amounts, value=FROZEN) if any(amounts) else compact(labels)
    return collapse(padded).expand(call.out.shape)


def _padded(trace: Tracer, call: Call, labels: Tensor, axis: int, before: int, behind: int) -> Tensor:
    """Labels with constants before and behind those of one axis."""
    first = trace.constant_labels(call, before) if before else None
    last = first if before == behind else trace.constant_labels(call, behind) if behind else None
    shape = [1 if a == axis else n for a, n in enumerate(labels.shape)]
    column = [-1 if a == axis else 1 for a in range(labels.dim())]
    sides = [None if side is None else side.reshape(column) for side in (first, last)]
    full = [None if side is None else side.expand(torch.broadcast_shapes(side.shape, shape)) for side in sides]
    return torch.cat([part for part in (full[0], labels, full[1]) if part is not None], axis)


def index(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """x[index tensors]: exact for a known index. A computed index into channels freezes them."""
    x = call.tensors[0]
    labels = trace.movable(x)
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return None
    trace.freeze_others(call, x)
    indices = list(call["indices"])
    hidden = [i is not None and i.device.type == "meta" for i in indices]
    if not trace.is_deferred(x) and any(varies(labels, a) for a in _axes_by_computed(trace, indices)):
        trace.freeze(labels, f"{call.here} selects channels by a computed index")
        return frozen_labels(call.out.shape)
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    if len(axes) == 1 and indices[axes[0]].dim() == 1 and not varies(labels, axes[0]):
        found = first_on(labels, axes[0]).expand(call.out.shape)
    else:
        known = [
            torch.zeros(i.shape, dtype=torch.long) if unknown else (i.cpu() if i is not None else None)
            for i, unknown in zip(indices, hidden, strict=True)
        ]
        found = collapse(torch.ops.aten.index.Tensor(labels.contiguous(), known)).expand(call.out.shape)
    if not trace.is_deferred(x) and varying_axes(labels):
        check_selection(trace, call, labels, [found])
    return found


def _axes_by_computed(trace: Tracer, indices: Sequence[Tensor | None]) -> Iterator[int]:
    """The axes from which a computed index selects. A mask selects from several."""
    first = 0
    for index in indices:
        count = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None and trace.is_computed(index):
            yield from range(first, first + count)
        first += count


def gather(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """gather, index_select and similar: along an axis without channels, labels stay the same."""
    x = call.tensors[0]
    labels = trace.labels(x)
    trace.record(call, "move", 0, [], [])
    if labels is None:
        return None
    trace.freeze_others(call, x)
    call.zero = trace.is_zero(x)
    axis = call["dim"] % x.dim()
    if call.name == "index_select" and not trace.is_computed(call["index"]):
        found = collapse(call.rerun(labels.contiguous()))
        check_selection(trace, call, labels, [found])
        return found
    if varies(labels, axis):
        labels = trace.freeze(labels, f"{call.here} selects channels by a computed index")
    labels = labels.narrow(axis, 0, 1)
    for other, size in enumerate(call.out.shape):
        if other != axis and labels.shape[other] != size:
            labels = labels.narrow(other, 0, size)
    return labels.expand(call.out.shape)
