"""Comparison of a pruned network with the dense one, operator by operator, while both are traced.

Labels show whether channels line up as before. The checks here cover what labels cannot show: code that selects
channels by number (`check_selection`), arithmetic with a channel count (`check_numbers`), code that runs other
operators at another width (`check_order`), and reshapes to other sizes (`check_sizes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ecc.graph.labels import Labels, Misaligned, PrunedLabels, WidthPower, channel_vector, compact, varying_axes

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer

ADDS_EPS = frozenset({"add", "clamp_min", "clamp", "rms_norm"})
"""Operators that add a number to a mean over channels, or limit the mean by it."""
_MASKING = frozenset({"index", "_unsafe_index", "masked_select"})
"""Operators that select values by a boolean mask, if they have one."""


def check_selection(trace: Tracer, call: Call, source: Tensor, found: Sequence[Tensor | None]) -> None:
    """Record which channels a slice, split or index selects. A pruned network must select the remaining ones."""
    vectors = [compact(labels).reshape(-1) for labels in found if labels is not None]
    vector = torch.cat(vectors) if vectors else torch.empty(0, dtype=torch.long)
    trace.selections.append((call.name, vector, [len(part) for part in vectors]))
    trace.selected_from.append(compact(source).reshape(-1))
    if trace.dense is None or not isinstance(trace.channel_labels, PrunedLabels):
        return
    position = len(trace.selections) - 1
    known = trace.dense.selections[position] if position < len(trace.dense.selections) else ("", vector, [])
    name, whole, sizes = known
    alive = trace.channel_labels.alive[whole]
    parts = [int(part.sum()) for part in alive.split(sizes)] if sizes else []
    is_as_large = name == call.name and parts == [len(part) for part in vectors]
    if is_as_large and trace.channel_labels.are_frozen(torch.cat([vector, whole])):
        return  # which of them are selected may depend on values
    if not is_as_large or not torch.equal(vector, whole[alive]):
        line = trace.key(call)
        why = f"{call.described}{trace.at()} selects channels by number.{call.fix}"
        raise Misaligned(torch.cat([vector, whole]), why.rstrip("."), line=line)


def check_numbers(trace: Tracer, call: Call, follows: Labels = None) -> None:
    """Check that Python numbers in elementwise arithmetic do not depend on widths (`x / x.shape[1]`).

    `follows` has the channels whose number they may follow (`ops.head_width`).
    """
    values = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, (int, float))]
    fresh = [t for t in call.tensors if t.numel() == 1 and t.device.type != "meta" and trace.labels(t) is None]
    if trace.attention == "width" and len(fresh) == len(call.tensors):
        return  # arithmetic with numbers, of which the result is compared where it is used
    power = getattr(call.tensors[0], "_ecc_power", None) if call.tensors else None
    found = compare_numbers(trace, call, [float(v) for v in (*values, *fresh)], power, follows=follows)
    call.number_power = -found if call.name == "div" else found


def compare_numbers(
    trace: Tracer, call: Call, numbers: list[float], power: WidthPower | None, *, follows: Labels = None
) -> float:
    """Check that numbers are those of the dense network, or follow a width.

    Args:
        trace: The trace.
        call: The operator.
        numbers: Its numbers.
        power: How much larger its first operand is in a pruned network, which an eps follows.
        follows: The channels whose number d they may follow.

    Returns:
        The power p if the numbers are proportional to `d ** -p`, as an earlier attempt showed, else 0.
    """
    known = trace.width_numbers.get(trace.key(call), 0.0) if trace.width_numbers and follows is not None else 0.0
    trace.numbers.append((call.func, numbers, power, None if follows is None else WidthPower(follows, known)))
    if trace.dense is None or len(trace.numbers) > len(trace.dense.numbers):
        return known
    func, before, whole, scale = trace.dense.numbers[len(trace.numbers) - 1]
    ratio = 1.0
    if power is not None and whole is not None and call.name in ADDS_EPS:
        ratio = (whole.labels.numel() / max(power.labels.numel(), 1)) ** power.power
    elif scale is not None and scale.power:
        known = scale.power
        ratio = _kept_ratio(trace, scale.labels) ** known
    if ratio == 1:
        same = list(map(repr, before)) == list(map(repr, numbers))  # as text, since NaN differs from itself
    else:
        same = np.allclose([number * ratio for number in before], numbers, rtol=1e-9, atol=0.0)
    if func == call.func and same:
        return known
    error = ValueError(f"{before} became {numbers}")
    why = f"{call.here}{trace.at()} uses a number that depends on the channel count"
    stop = trace.stopped(call, error, why)
    if scale is not None and not scale.power and func == call.func:
        stop.number_power = _power_of(before, numbers, _kept_ratio(trace, scale.labels))
    raise stop if power is None else Misaligned(power.labels, str(stop), line=stop.line)


def _kept_ratio(trace: Tracer, dense: Tensor) -> float:
    """Number of some channels in the dense network, divided by their number in the pruned one."""
    kept = _kept(trace)
    return 1.0 if kept is None else dense.numel() / max(int(kept[dense].sum()), 1)


def _power_of(before: list[float], after: list[float], ratio: float) -> float | None:
    """The power of a ratio that takes some numbers to others, if it is a quarter, a half or a whole number."""
    if ratio == 1 or len(before) != len(after):
        return None
    changed = [(b, a) for b, a in zip(before, after, strict=True) if a != b]
    if not changed or any(b * a <= 0 for b, a in changed):
        return None
    powers = {round(4 * math.log(a / b) / math.log(ratio)) / 4 for b, a in changed}
    power = powers.pop()
    exact = all(math.isclose(b * ratio**power, a, rel_tol=1e-9) for b, a in changed)
    return power if not powers and exact and len(changed) == len(before) else None


def check_order(trace: Tracer, call: Call) -> None:
    """Check that a pruned network runs the operators of the dense one, in order and with the same parameters."""
    if trace.dense is not None:
        wanted = trace.dense.sequence[len(trace.sequence) - 1 : len(trace.sequence)]
        func, _, names = trace.sequence[-1]
        if not wanted or wanted[0][0] != func or wanted[0][2] != names:
            why = f"the code runs other operators at another width (first {call.here}{trace.at()})"
            raise trace.stopped(call, RuntimeError(call.name), why)


def check_sizes(trace: Tracer, call: Call, *, is_reshape: bool) -> None:
    """Check that the axes of a result have as many channels as were kept.

    In a pruned network with labels, only a reshape can have other sizes without failing.
    """
    alive = _kept(trace)
    if trace.dense is None or alive is None or not (trace.alive is not None or is_reshape):
        return
    for out, labels in zip(call.outs, trace.dense.results[len(trace.sequence) - 1], strict=False):
        for axis in varying_axes(labels) if isinstance(labels, Tensor) and labels.dim() == out.dim() else ():
            vector = channel_vector(labels, axis, labels.shape[axis])
            if out.shape[axis] != int(alive[vector].sum()):
                stop = trace.stopped(call, ValueError(f"{out.shape[axis]} channels on axis {axis}"))
                stop.confused = confused_channels(trace, call, len(trace.sequence) - 1)
                raise stop


def _kept(trace: Tracer) -> Tensor | None:
    """In a pruned network: by label of the dense network, whether it is kept."""
    return trace.channel_labels.alive if isinstance(trace.channel_labels, PrunedLabels) else trace.alive


def confused_channels(trace: Tracer, call: Call, position: int) -> list[tuple[Tensor, Tensor]]:
    """Channels that a reshape has another number of after pruning, and the latest channels with that number.

    An example is `b, n, c = x.shape; layer(x).reshape(b, n, c)`, where the outputs of `layer` are pruned apart from
    `x`. Both are labels of the dense network, whose operator is at `position`. The same channels follow for other
    modules of this class, which run the same line of code.
    """
    alive, dense = _kept(trace), trace.dense
    if dense is None or alive is None or call.name not in ("view", "reshape", "_unsafe_view"):
        return []
    func = dense.sequence[position][0] if position < len(dense.results) else None
    sizes = call.args[1] if len(call.args) > 1 else ()
    labels = dense.results[position][0] if func == call.func else None
    if not isinstance(labels, Tensor) or len(sizes) != labels.dim():
        return []
    for mine, wanted, axis, behind in _other_sizes(labels, sizes, alive):
        for back in range(1, position + 1):
            for number, other, theirs in _vectors(dense.results[position - back], len(mine)):
                if _may_be_pruned(trace, theirs) and int(alive[theirs].sum()) in wanted:
                    pairs = _same_in_others(trace, position, (axis, behind), (back, number, other))
                    return [(mine, theirs), *pairs]
    return []


def _same_in_others(
    trace: Tracer, position: int, mine: tuple[int, bool], theirs: tuple[int, int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of `confused_channels` where modules of the same class run the same line of code."""
    dense, (axis, behind), (back, number, other) = trace.dense, mine, theirs
    assert dense is not None, "in a pruned network"
    for at, line in dense.lines.items():
        if at == position or line != dense.lines[position] or at < back:
            continue
        labels, found = dense.results[at][0], _vectors(dense.results[at - back], None)
        if isinstance(labels, Tensor) and axis in varying_axes(labels):
            vector = _channels_on(labels, axis, behind=behind)
            yield from (
                (vector, one)
                for n, a, one in found
                if (n, a) == (number, other) and len(one) == len(vector) and _may_be_pruned(trace, one)
            )


def _may_be_pruned(trace: Tracer, dense: Tensor) -> bool:
    """In a pruned network: whether channels of the dense network are prunable, as far as is known."""
    if isinstance(trace.channel_labels, PrunedLabels):
        return trace.channel_labels.are_prunable(dense)
    return trace.alive is not None and not bool(trace.alive[dense].all())


def _other_sizes(labels: Tensor, sizes: Sequence[int], alive: Tensor) -> Iterator[tuple[Tensor, range, int, bool]]:
    """Channels of the dense result of a reshape that the code has another number of, and the possible numbers.

    They are on one axis, or on an axis of heads and the axis behind it: with 12 heads of 32 channels,
    `reshape(b, n, heads, c // heads)` takes the 384 channels from elsewhere. Also yields this axis, and whether the
    axis behind it belongs to them.
    """
    axes = varying_axes(labels)
    for axis in axes:
        mine, size = _channels_on(labels, axis, behind=False), sizes[axis]
        if size not in (-1, int(alive[mine].sum())):
            yield mine, range(size, size + 1), axis, False
        last = axis + 1
        if last < labels.dim() and last not in axes and size > 0 and sizes[last] not in (-1, labels.shape[last]):
            yield (
                _channels_on(labels, axis, behind=True),
                range(size * sizes[last], size * (sizes[last] + 1)),
                axis,
                True,
            )


def _channels_on(labels: Tensor, axis: int, *, behind: bool) -> Tensor:
    """Labels along an axis, repeated for the axis behind it if that belongs to the channels."""
    vector = channel_vector(labels, axis, labels.shape[axis])
    return vector.repeat_interleave(labels.shape[axis + 1]) if behind and axis + 1 < labels.dim() else vector


def _vectors(results: Sequence[Any], size: int | None) -> Iterator[tuple[int, int, Tensor]]:
    """Labels along each axis with channels, of this size if it is given, with the number of the result and the axis."""
    for number, labels in enumerate(results):
        for axis in varying_axes(labels) if isinstance(labels, Tensor) else ():
            if size is None or labels.shape[axis] == size:
                yield number, axis, channel_vector(labels, axis, labels.shape[axis])


def run_selection(trace: Tracer, call: Call) -> Any:
    """Run an operator whose result has a size that depends on values, such as `nonzero` or a boolean mask.

    A pruned network has other values. It selects what the dense network selected, so that sizes can be compared.
    """
    masks = [t for t in call.tensors if t.dtype in (torch.bool, torch.uint8)]
    if call.name in _MASKING:
        known = _selected_before(trace, call, masks)
        for mask, before in zip(masks, known or (), strict=False):
            mask.copy_(before)
        trace.selected.append((call.func, [mask.shape for mask in masks], [mask.clone() for mask in masks]))
        return call.func(*call.args, **call.kwargs)
    known = _selected_before(trace, call, call.tensors)
    result = call.func(*call.args, **call.kwargs) if known is None else known
    positions = tree_map_only(Tensor, torch.clone, result)
    is_known = not any(t.is_floating_point() for t in (result if isinstance(result, (list, tuple)) else [result]))
    trace.selected.append((call.func, [t.shape for t in call.tensors], positions if is_known else None))
    return tree_map_only(Tensor, torch.clone, result)


def _selected_before(trace: Tracer, call: Call, computed_from: Sequence[Tensor]) -> Any:
    """What the dense network selected in the same call; None if the shapes differ."""
    dense = trace.dense.selected[len(trace.selected) :][:1] if trace.dense is not None else []
    for func, shapes, found in dense:
        if func == call.func and shapes == [tensor.shape for tensor in computed_from]:
            return found
    return None
