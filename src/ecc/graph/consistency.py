"""Comparing a cut network with the dense one while it runs.

Labels tell whether channels meet as they should. These checks are for what labels cannot show: code that takes
channels by number, whose arithmetic knows a width, or that goes another way at another width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ecc.graph.labels import Misaligned, PrunedLabels, compact

if TYPE_CHECKING:
    from ecc.graph.call import Call
    from ecc.graph.tracer import Tracer


def note_taken(trace: Tracer, call: Call, source: Tensor, found: Sequence[Tensor | None]) -> None:
    """Which channels a slice, split or index took. A cut network must take those that are left of them."""
    vectors = [compact(labels).reshape(-1) for labels in found if labels is not None]
    vector = torch.cat(vectors) if vectors else torch.empty(0, dtype=torch.long)
    trace.landmarks.append((call.name, vector))
    trace.handled.append(compact(source).reshape(-1))
    if trace.dense is None or not isinstance(trace.book, PrunedLabels):
        return
    name, whole = (*trace.dense.landmarks, *[("", vector)] * len(trace.landmarks))[len(trace.landmarks) - 1]
    wanted = whole[trace.book.alive[whole]]
    if name != call.name or not torch.equal(vector, wanted):
        line = f"{call.name}@{trace.line()}"
        raise Misaligned(torch.cat([vector, whole]), f"{call.here} takes fixed channels", line=line)


def check_numbers(trace: Tracer, call: Call) -> None:
    """Numbers in the network's arithmetic must not depend on its widths (x / x.shape[1])."""
    values = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, (int, float))]
    fresh = [t for t in call.tensors if t.numel() == 1 and t.device.type != "meta" and trace.labels(t) is None]
    numbers = tuple(repr(float(v)) for v in (*values, *fresh))  # as text, since NaN differs from itself
    trace.numbers.append((call.func, numbers))
    if trace.dense is None or len(trace.numbers) > len(trace.dense.numbers):
        return
    func, before = trace.dense.numbers[len(trace.numbers) - 1]
    if func != call.func or before != numbers:
        raise trace.stopped(call, ValueError(f"{before} became {numbers}"), "depends on its width")


def check_way(trace: Tracer, call: Call) -> None:
    """A cut network must run the operators of the dense one, in their order and with the same parameters."""
    if trace.dense is not None:
        wanted = trace.dense.sequence[len(trace.sequence) - 1 : len(trace.sequence)]
        func, _, names = trace.sequence[-1]
        if not wanted or wanted[0][0] != func or wanted[0][2] != names:
            raise trace.stopped(call, RuntimeError(call.name), "runs only at another width")
