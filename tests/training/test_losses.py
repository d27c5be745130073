from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ecc.training import losses
from ecc.training.losses import Losses, all_finite


def numbers(count: int) -> list[Tensor]:
    return list(torch.rand(count, generator=torch.Generator().manual_seed(0)))


def test_the_sum_does_not_depend_on_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MOST", 7)
    seen, once = Losses(), Losses()
    for step, loss in enumerate(numbers(40), start=1):
        seen.append(loss, step)
        once.append(loss, step)
        if step % 3 == 0:
            seen.add_up()
    seen.add_up()
    once.add_up()
    assert (seen.total, seen.count) == (once.total, once.count) == (sum(float(x) for x in numbers(40)), 40)


def test_a_loss_is_not_read_before_it_is_asked_for() -> None:
    """In place of a device that would be waited for: a tensor without values."""
    found = Losses()
    found.append(torch.empty((), device="meta"), 1)
    assert found.count == 0
    with pytest.raises(NotImplementedError):
        found.add_up()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_not_finite_is_named(bad: float) -> None:
    found = Losses()
    for step, loss in enumerate([1.0, 2.0, bad, 3.0, math.nan], start=11):
        found.append(torch.tensor(loss), step)
    found.add_up()
    assert found.first_bad == 13
    found.append(torch.tensor(math.nan), 16)
    found.add_up()
    assert found.first_bad == 13


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_weight_that_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 4), torch.zeros(0), torch.randn(5, 2, 3, 3).to(dtype), torch.tensor(2.0)]
    assert all_finite(tensors)
    tensors[2][3, 1, 0, 2] = bad
    assert not all_finite(tensors)


def test_large_numbers_are_finite() -> None:
    assert all_finite([torch.full((1000,), torch.finfo(torch.float32).max)])
    assert all_finite([])
