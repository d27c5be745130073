"""The width inside attention heads: products of queries and keys that sum over it, and their scale.

A product of queries and keys does not change without a column that is zero in one of them, so masking a unit sets its
rows of the query projection to zero (`Role.FACTOR`). If queries are not linear in parameters, those of the key
projection, or all of its slices. But the scale of the softmax must stay that of the dense network, and code often
computes it from the width: `F.scaled_dot_product_attention` does by default. Then scores of a network with d' of d
columns are `(d / d') ** 0.5` times as large, and the rows of the query and key projections that are left are multiplied
by `(d' / d) ** 0.25` each. Two facts are followed from operator to operator for this:

* `Rows`: slices of parameters in which a tensor is linear, so that they can take up a factor;
* `Scores`: the product that a tensor of scores comes from, and the factor that code has multiplied it by since.

`ChannelLabels.fold_scores` collects the factors at the end of a trace, and freezes what cannot be folded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.consistency import compare_numbers
from ecc.graph.labels import InnerProduct, Labels, channel_vector, collapse, compact, varying_axes
from ecc.graph.ops.shape import reshaped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


COPIES = frozenset("clone contiguous detach alias to _to_copy type_as dropout native_dropout requires_grad".split())
RESHAPES = frozenset("view reshape flatten unflatten _unsafe_view view_as reshape_as".split())


@dataclass(frozen=True)
class Rows:
    """Slices of parameters in which a tensor is linear: if all of them are multiplied by a number, so is the tensor."""

    parts: tuple[Tensor, ...]
    """Labels of these slices: of each element, with the shape of the tensor, or of the whole tensor if `is_set`."""
    is_set: bool = False
    power: float = 0.0
    """The tensor is `(d / d') ** power` times as large with d' of d channels, since code multiplies by a number."""

    def flat(self) -> Tensor:
        """All labels."""
        found: Tensor = torch.cat([compact(part).reshape(-1) for part in self.parts]).unique()
        return found


@dataclass(frozen=True)
class Scores:
    """A tensor of scores."""

    product: InnerProduct
    power: float = 0.0
    """It is `(d / d') ** power` times as large with d' of d channels."""


def inner_product(
    trace: Tracer,
    call: Call,
    sides: Sequence[tuple[Tensor, Labels, int]],
    numbers: Sequence[float] = (),
    power: float = 0,
) -> Labels:
    """The channels that a product of queries and keys sums over; None if they are not prunable along them.

    Args:
        trace: The trace.
        call: The product.
        sides: For both operands the tensor, its labels, and the axis that is summed over.
        numbers: Scales among its arguments.
        power: Its result is `(d / d') ** power` times as large with d' of d channels, besides these numbers.
    """
    vectors = []
    for tensor, labels, axis in sides:
        if labels is None or varying_axes(labels) != [axis % labels.dim()]:
            return None
        vectors.append(channel_vector(labels, axis, tensor.shape[axis]))
    rows = [rows_of(tensor) for tensor, _, _ in sides]
    factor = rows[0] or rows[1]
    if vectors[0].numel() != vectors[1].numel():
        return None
    if factor is not None:
        trace.channel_labels.factors.append(factor.flat())
    elif any(trace.is_zero(tensor) for tensor, _, _ in sides):
        trace.channel_labels.zeroed += vectors
    else:
        return None
    trace.channel_labels.unite(vectors[0], vectors[1], call.here)
    known = None if None in rows else [one for one in rows if one is not None]
    product = InnerProduct(vectors[0], None if known is None else torch.cat([one.flat() for one in known]), call.here)
    trace.channel_labels.inner_products.append(product)
    power += sum(one.power for one in known or ())
    if numbers:
        power += compare_numbers(trace, call, list(numbers), None, follows=vectors[0])
    call.scores, call.multiplied = Scores(product, power), True
    return vectors[0]


def end_scores(call: Call) -> None:
    """The result of a product is not scores: something was added to them, or they were used already."""
    call.scores.product.powers.add(call.scores.power)
    call.scores = None


def rows_of(tensor: Tensor) -> Rows | None:
    """The slices of parameters in which a tensor is linear, if they are known."""
    return getattr(tensor, "_ecc_rows", None)


def scores_of(tensor: Tensor) -> Scores | None:
    """The product that a tensor of scores comes from, if it is one."""
    return getattr(tensor, "_ecc_scores", None)


def followed_channels(trace: Tracer, call: Call) -> Labels:
    """The channels whose number a number of the code may follow: those that scores are summed over, or of a query."""
    for tensor in call.tensors:
        if (scores := scores_of(tensor)) is not None:
            return scores.product.labels
        labels = trace.labels(tensor, defer=True)
        if rows_of(tensor) is not None and labels is not None and len(varying_axes(labels)) == 1:
            axis = varying_axes(labels)[0]
            return channel_vector(labels, axis, labels.shape[axis])
    return None


def follow_rows(trace: Tracer, call: Call, *, moves: bool, keeps_scores: bool) -> None:
    """Set `Rows` and `Scores` of the results of a call, and note which slices and scores it uses in another way.

    Args:
        trace: The trace.
        call: The operator.
        moves: Whether it only moves or copies its argument.
        keeps_scores: Whether it gives scores from scores.
    """
    if call.scores is None and (scores := _followed_scores(call, moves=moves)) is not None:
        call.scores = scores
    else:
        for scores in (scores_of(tensor) for tensor in call.tensors):
            if scores is not None:
                scores.product.powers.add(scores.power)
    made = None if call.rows is None else Rows(call.rows)
    found = [made] * len(call.outs) if made is not None else _followed_rows(trace, call, moves=moves)
    if not call.multiplied and all(one is None for one in found):
        use_rows(trace, call, call.tensors)
    stays = call.multiplied or (keeps_scores and any(map(trace.is_scores, call.tensors)))
    for out, rows in zip(call.outs, found, strict=True):
        out._ecc_scores, out._ecc_is_scores = call.scores, stays  # type: ignore[attr-defined]
        if rows is not None and not rows.is_set:
            rows = replace(rows, parts=tuple(part.expand(out.shape) for part in rows.parts))
        out._ecc_rows = rows  # type: ignore[attr-defined]
    if call.in_place:
        _forget_written(trace, call)


def use_rows(trace: Tracer, call: Call, tensors: Sequence[Tensor]) -> None:
    """Note that an operator uses tensors in another way than a linear one."""
    for tensor in tensors:
        if (rows := rows_of(tensor)) is not None:
            trace.channel_labels.used_rows.append(rows.flat())
            if rows.power and (labels := trace.labels(tensor)) is not None:
                trace.freeze(labels, f"{call.here} uses it after code multiplied it by a number that follows its width")


def _forget_written(trace: Tracer, call: Call) -> None:
    """Forget the rows of a tensor of which an operator wrote a part."""
    base = getattr(call.out, "_ecc_base", None)
    while base is not None:
        use_rows(trace, call, [base])
        base._ecc_rows = None
        base = getattr(base, "_ecc_base", None)


def _followed_scores(call: Call, *, moves: bool) -> Scores | None:
    """The scores of a result that is a view or a multiple of scores."""
    scores = scores_of(call.tensors[0]) if call.tensors else None
    if scores is None or len(call.outs) != 1:
        return None
    if moves:
        return scores
    if (
        call.name in ("mul", "div")
        and call.args[0] is call.tensors[0]
        and all(t.numel() == 1 for t in call.tensors[1:])
    ):
        return replace(scores, power=scores.power + call.number_power)
    return None


def _followed_rows(trace: Tracer, call: Call, *, moves: bool) -> list[Rows | None]:
    """The rows of results that are linear in the arguments."""
    nothing: list[Rows | None] = [None] * len(call.outs)
    known = [rows_of(tensor) for tensor in call.tensors]
    some = [rows for rows in known if rows is not None]
    if not some:
        return nothing
    if moves and known[0] is not None:
        return _moved(trace, call, known[0])
    full = [rows for rows, tensor in zip(known, call.tensors, strict=True) if tensor.numel()]
    if call.name in ("mul", "div", "neg") and len(some) == 1 and (call.name != "div" or known[0] is not None):
        return [replace(some[0], power=some[0].power + call.number_power)]
    numbers = [value for value in call.args if isinstance(value, (int, float))]
    if call.name in ("add", "sub") and numbers:
        return nothing
    if call.name in ("add", "sub", "cat", "stack") and None not in full and len({rows.power for rows in some}) == 1:
        return [Rows((torch.cat([rows.flat() for rows in some]).unique(),), is_set=True, power=some[0].power)]
    return nothing


def _moved(trace: Tracer, call: Call, rows: Rows) -> list[Rows | None]:
    """The rows after a view, a transposition, a slice or a copy."""
    if rows.is_set:
        before = trace.labels(call.tensors[0])
        same = [before is not None and _same_channels(before, trace.labels(out)) for out in call.outs]
        return [rows if one else None for one in same]
    parts = [_moved_labels(call, part) for part in rows.parts]
    return [replace(rows, parts=tuple(part[number] for part in parts)) for number in range(len(call.outs))]


def _moved_labels(call: Call, labels: Tensor) -> list[Tensor]:
    """The labels of each result of an operator that moves data."""
    if call.name in COPIES:
        return [labels] * len(call.outs)
    if call.name in RESHAPES:
        return [reshaped(labels, call.out.shape)]
    found = call.rerun(labels)
    return [collapse(one) for one in (found if isinstance(found, (tuple, list)) else [found])]


def _same_channels(before: Tensor, after: Labels) -> bool:
    return after is not None and torch.equal(compact(before).unique(), compact(after).unique())
