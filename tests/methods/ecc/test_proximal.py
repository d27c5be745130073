from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.methods.ecc.proximal import coefficients, keeps, proximal_keep, trimmed_dual

# Quarters up to 8 and powers of two: every sum below is exact, so ties are ties.
QUARTERS = st.integers(0, 32).map(lambda n: n / 4)
PROBLEMS: dict[str, Any] = {
    "weights": st.lists(QUARTERS, min_size=1, max_size=7),
    "bound": QUARTERS,
    "width_dual": QUARTERS,
    "weight_lr": st.sampled_from([0.25, 0.5, 1.0]),
    "width_penalty": st.sampled_from([0.0, 0.5, 1.0, 4.0]),
}


def objective(
    energies: list[float], kept: tuple[bool, ...], bound: float, dual: float, weight_lr: float, penalty: float
) -> float:
    """What the proximal operator minimises, straight from its definition."""
    removed = sum(a for a, stays in zip(energies, kept, strict=True) if not stays)
    excess = max(sum(kept) - bound, 0.0)
    return removed / 2 + weight_lr * (penalty / 2 * excess**2 + dual * (sum(kept) - bound))


@given(metric=st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=7, max_size=7), **PROBLEMS)
def test_no_subset_of_channels_is_better(
    metric: list[float], weights: list[float], bound: float, width_dual: float, weight_lr: float, width_penalty: float
) -> None:
    energies = [w * w * b for w, b in zip(weights, metric, strict=False)]
    step = {"weight_lr": weight_lr, "width_penalty": width_penalty}
    kept = proximal_keep(torch.tensor(energies, dtype=torch.float64), bound, width_dual, trim=False, **step)
    best = min(
        objective(energies, subset, bound, width_dual, weight_lr, width_penalty)
        for subset in product([False, True], repeat=len(energies))
    )
    assert objective(energies, tuple(kept.tolist()), bound, width_dual, weight_lr, width_penalty) == best


@given(**PROBLEMS)
def test_the_trim_keeps_the_best_and_never_fewer_than_the_whole_part_of_s(
    weights: list[float], bound: float, width_dual: float, weight_lr: float, width_penalty: float
) -> None:
    energies = torch.tensor(weights, dtype=torch.float64)
    step = {"weight_lr": weight_lr, "width_penalty": width_penalty}
    kept = proximal_keep(energies, bound, width_dual, **step)
    plain = proximal_keep(energies, bound, width_dual, trim=False, **step)
    assert int(kept.sum()) == max(int(plain.sum()), min(int(bound), len(energies)))
    assert not kept.any() or not (~kept).any() or energies[kept].min() >= energies[~kept].max()


@given(**PROBLEMS)
def test_the_explicit_trim_is_the_one_by_a_smaller_y(
    weights: list[float], bound: float, width_dual: float, weight_lr: float, width_penalty: float
) -> None:
    """The authors lower y until floor(s) channels survive; equal unless two channels tie at the margin."""
    energies = torch.tensor(sorted(set(weights), reverse=True), dtype=torch.float64)
    step = {"weight_lr": weight_lr, "width_penalty": width_penalty}
    kept = proximal_keep(energies, bound, width_dual, **step)
    if 1 <= int(bound) <= len(energies):
        dual = trimmed_dual(torch.tensor(width_dual), energies[int(bound) - 1], weight_lr=weight_lr)
        assert torch.equal(kept, proximal_keep(energies, bound, dual, trim=False, **step))
        assert dual <= width_dual


def test_by_hand() -> None:
    """alpha = 0.5, rho = 4, s = 1.5: the ranks cost 0, 0.5 and 4 more, and y = 0.5 adds 0.5 to each."""
    ranks = torch.tensor([1.0, 2.0, 3.0])
    step = {"weight_lr": 0.5, "width_penalty": 4.0}
    assert coefficients(ranks, 1.5, **step).tolist() == [0.0, 0.5, 4.0]
    energies = torch.tensor([0.9, 1.0, 4.4])  # the best first by rank: 4.4, 1.0, 0.9
    assert proximal_keep(energies, 1.5, 0.5, **step).tolist() == [False, True, True]  # 1.0 ties, and stays
    assert proximal_keep(energies, 1.5, 0.6, **step).tolist() == [False, False, True]
    assert proximal_keep(energies, 1.5, 99.0, **step).tolist() == [False, False, True]  # floor(s) = 1
    assert proximal_keep(energies, 1.5, 99.0, trim=False, **step).tolist() == [False, False, False]


def test_groups_side_by_side_are_groups_alone() -> None:
    first, second = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([9.0, 0.1])
    step = {"weight_lr": 0.5, "width_penalty": 1.0}
    together = keeps(
        torch.cat([first, second]),
        torch.tensor([1, 2, 3, 1, 2]),
        torch.tensor([1.5, 1.5, 1.5, 2.0, 2.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5]),
        **step,
    )
    apart = [proximal_keep(first, 1.5, 1.0, **step), proximal_keep(second, 2.0, 0.5, **step)]
    assert together.tolist() == torch.cat(apart).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_tie_at_the_trim_survives_any_precision(dtype: torch.dtype) -> None:
    energies = torch.tensor([0.3, 0.1, 0.2], dtype=dtype)
    dual = trimmed_dual(torch.tensor(1e6, dtype=torch.float64), energies[2], weight_lr=1e-5)
    kept = proximal_keep(energies, 2.3, dual, weight_lr=1e-5, width_penalty=10.0)
    assert kept.tolist() == [True, False, True]
