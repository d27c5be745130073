"""The proof of an export: the file is run by its own program, and its outputs are compared with the network's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ecc.errors import CannotExport
from ecc.graph.numerics import ALLOWED_FLOAT32 as TOLERANCE
from ecc.graph.numerics import allowed_difference, outputs_of, relative_error
from ecc.task import Inputs, batch_size_of, with_batch_size

from .formats import Runner

__all__ = ["TOLERANCE", "ExportVerification", "verify_export"]


@dataclass(frozen=True)
class ExportVerification:
    """How far outputs were from the network's, at most."""

    error: float
    """Relative to the largest output; of integer outputs, the share that differs."""
    batches: tuple[int, ...]
    """Batch sizes that were compared."""
    tolerance: float | None = TOLERANCE
    """What was allowed: `TOLERANCE`, or more where outputs are of half precision; None where nothing is claimed."""


def batches_of(example_input: Inputs) -> tuple[int, ...]:
    """One item, the example, and a batch that it was not exported with."""
    example = batch_size_of(example_input)
    return tuple(sorted({1, example, example + 3}))


def verify_export(
    model: nn.Module, run: Runner, example_input: Inputs, *, is_exact: bool = True, what: str = "the file"
) -> ExportVerification:
    """Compares a file with the network that it was made of, at several batch sizes.

    Args:
        model: The network.
        run: Runs the file.
        example_input: At any batch size.
        is_exact: Whether the file is to compute the same; False where a difference is meant, as after quantising.
        what: Is called so in the message.

    Raises:
        CannotExport: If the outputs are further apart, or the file cannot be run.
    """
    worst, allowed, batches = 0.0, TOLERANCE, batches_of(example_input)
    for batch in batches:
        inputs = with_batch_size(example_input, batch)
        wanted = outputs_of(model, inputs)
        allowed = _allowed(wanted)
        try:
            found = run(inputs)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise CannotExport(f"{what} cannot be run at batch {batch}: {reason[:300]}") from error
        worst = max(worst, _difference(wanted, found))
    if is_exact and not worst <= allowed:
        raise CannotExport(
            f"{what} differs from the network by {worst:.2g} of the largest output, more than {allowed:g}; "
            "it is not kept."
        )
    return ExportVerification(worst, batches, allowed if is_exact else None)


def _allowed(outputs: list[Tensor]) -> float:
    """`TOLERANCE`, or more where outputs are of a coarser type than float32."""
    single = torch.finfo(torch.float32).eps
    return allowed_difference(single, *(torch.finfo(o.dtype).eps for o in outputs if o.is_floating_point()))


def _difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    if len(wanted) != len(found):
        return float("inf")
    whole = [(left, right) for left, right in zip(wanted, found, strict=True) if not left.is_floating_point()]
    shares = [
        float((left != right).double().mean()) if left.shape == right.shape else float("inf")
        for left, right in whole
        if left.numel()
    ]
    return max(relative_error(wanted, found), *shares, 0.0)
