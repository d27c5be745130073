"""A proof compares at several batch sizes, and a file that differs anywhere does not pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import CannotExport
from ecc.export.verification import TOLERANCE, batches_of, verify_export
from ecc.task import Inputs

NET = nn.Linear(4, 3)
EXAMPLE = torch.randn(2, 4)


def running(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], list[Tensor]]:
    def run(inputs: Inputs) -> list[Tensor]:
        assert isinstance(inputs, Tensor)
        with torch.no_grad():
            return [change(NET(inputs))]

    return run


def test_the_same_outputs_pass_at_three_batches() -> None:
    proof = verify_export(NET, running(lambda y: y), EXAMPLE)
    assert (proof.error, proof.batches) == (0, (1, 2, 5))
    assert batches_of(torch.zeros(1, 4)) == (1, 4)


def test_a_small_error_is_told_and_a_large_one_refused() -> None:
    proof = verify_export(NET, running(lambda y: y * (1 + 1e-5)), EXAMPLE)
    assert 5e-6 < proof.error < TOLERANCE
    with pytest.raises(CannotExport, match=r"slim\.x differs from the network by 0\.01 of the largest output"):
        verify_export(NET, running(lambda y: y * 1.01), EXAMPLE, what="slim.x")
    assert verify_export(NET, running(lambda y: y * 1.01), EXAMPLE, is_exact=False).error == pytest.approx(
        0.01, rel=1e-3
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y[:1],
        lambda y: y * float("nan"),
        lambda y: y + (1.0 if len(y) == 5 else 0.0),  # wrong at one batch size only
    ],
)
def test_other_shapes_and_what_is_no_number_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CannotExport, match="differs from the network"):
        verify_export(NET, running(change), EXAMPLE)


def test_a_missing_output_is_refused() -> None:
    with pytest.raises(CannotExport, match="inf of the largest output"):
        verify_export(NET, lambda _: [], EXAMPLE)


def test_integers_are_compared_too() -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    right = verify_export(Classes(), lambda x: [x.argmax(1)], EXAMPLE)  # type: ignore[union-attr]
    assert right.error == 0
    with pytest.raises(CannotExport, match="differs"):
        verify_export(Classes(), lambda x: [x.argmin(1)], EXAMPLE)  # type: ignore[union-attr]


def test_a_file_that_cannot_run_says_at_which_batch() -> None:
    def run(inputs: Inputs) -> list[Tensor]:
        if len(inputs) == 5:
            raise RuntimeError("fixed size\nand pages more")
        return running(lambda y: y)(inputs)

    with pytest.raises(CannotExport, match=r"the file cannot be run at batch 5: fixed size$"):
        verify_export(NET, run, EXAMPLE)
