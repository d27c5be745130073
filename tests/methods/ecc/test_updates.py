from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ecc.methods.ecc.updates import (
    project_energy_dual,
    step_widths,
    update_energy_dual,
    update_width_dual,
    width_slope,
)

SEEDS = st.integers(0, 10_000)


def energy(widths: Tensor) -> Tensor:
    return 0.5 + (widths[:-1] * widths[1:]).sum()


def lagrangian(widths: Tensor, y: Tensor, z: Tensor, live: Tensor, budget: float, rho1: float, rho2: float) -> Tensor:
    """L1 + L2 of Sec. 3.3."""
    over, excess = live - widths, energy(widths) - budget
    first = rho1 / 2 * over.clamp(min=0).square().sum() + (y * over).sum()
    return first + rho2 / 2 * excess.clamp(min=0).square() + z * excess


@given(SEEDS, st.sampled_from([0.1, 3.0, 50.0]))
def test_gradients_are_those_of_the_augmented_lagrangian(seed: int, budget: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    widths, y, live = (4 * torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(3))
    z = torch.rand((), generator=generator, dtype=torch.float64)
    variables = [v.requires_grad_() for v in (widths, y, z)]
    by_s, by_y, by_z = torch.autograd.grad(lagrangian(widths, y, z, live, budget, 1.5, 0.7), variables)
    widths, y, z = (v.detach() for v in variables)
    (slope_of_energy,) = torch.autograd.grad(energy(widths.requires_grad_()), widths)
    excess = energy(widths).detach() - budget
    widths = widths.detach()
    slope = width_slope(y, live - widths, excess, slope_of_energy, width_penalty=1.5, energy_penalty=0.7)
    torch.testing.assert_close(slope + z * slope_of_energy, by_s)
    # The duals ascend along their gradients with rates rho, and stop at 0.
    new_y = update_width_dual(y, live, widths, width_penalty=1.5, whole=False)
    torch.testing.assert_close(new_y, (y + 1.5 * by_y).clamp(min=0))
    torch.testing.assert_close(update_energy_dual(z, excess, energy_penalty=0.7), (z + 0.7 * by_z).clamp(min=0))


@given(SEEDS)
def test_the_projected_z_moves_one_width_by_epsilon_and_no_less(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slope = torch.randn(4, generator=generator, dtype=torch.float64)
    energy_slope = torch.rand(4, generator=generator, dtype=torch.float64) + 0.1
    movable = torch.rand(4, generator=generator) > 0.3
    zero = torch.zeros((), dtype=torch.float64)
    z = project_energy_dual(zero, slope, energy_slope, movable, min_energy_slope=1e-3)
    if not movable.any():
        assert z == 0
        return
    gradient = (slope + z * energy_slope)[movable]
    assert gradient.max() >= 1e-3 - 1e-12
    # The least such z where all would have to be pushed: just below, nothing moves by epsilon.
    if (slope[movable] < 0).all():
        torch.testing.assert_close(gradient.max(), torch.tensor(1e-3, dtype=torch.float64))


def test_projection_by_hand_and_its_guards() -> None:
    slope, energy_slope = torch.tensor([-4.0, -1.0, -9.0]), torch.tensor([2.0, 1.0, 0.0])
    z, movable = torch.tensor(0.5), torch.tensor([True, True, True])
    assert project_energy_dual(z, slope, energy_slope, movable, min_energy_slope=0.5) == 1.5
    assert project_energy_dual(torch.tensor(7.0), slope, energy_slope, movable, min_energy_slope=0.5) == 7.0
    first = torch.tensor([True, False, True])  # the third saves nothing: dE = 0
    assert project_energy_dual(z, slope, energy_slope, first, min_energy_slope=0.5) == 2.25
    for stuck in ([False, False, True], [False, False, False]):
        assert project_energy_dual(z, slope, energy_slope, torch.tensor(stuck), min_energy_slope=0.5) == 0.5


def test_widths_never_grow_and_stop_at_their_floors() -> None:
    widths, floors = torch.tensor([5.0, 5.0, 2.0, 1.5]), torch.tensor([1.0, 4.5, 2.0, 2.0])
    slope = torch.tensor([-3.0, 4.0, 1.0, 1.0])
    assert step_widths(widths, slope, floors, width_lr=0.5).tolist() == [5.0, 4.5, 2.0, 1.5]
    assert step_widths(widths, -slope, floors, width_lr=0.5).tolist() == [3.5, 5.0, 2.0, 1.5]


@pytest.mark.parametrize(("max_norm", "expected"), [(None, [7.0, 6.0]), (5.0, [7.0, 6.0]), (1.0, [9.4, 9.2])])
def test_long_gradients_are_shortened(max_norm: float | None, expected: list[float]) -> None:
    widths, slope, floors = torch.tensor([10.0, 10.0]), torch.tensor([3.0, 4.0]), torch.ones(2)
    moved = step_widths(widths, slope, floors, width_lr=1.0, max_norm=max_norm)
    torch.testing.assert_close(moved, torch.tensor(expected))


def test_no_gradient_is_no_step() -> None:
    widths = torch.tensor([3.0, 4.0])
    assert step_widths(widths, torch.zeros(2), torch.ones(2), width_lr=9.0, max_norm=1.0).tolist() == [3.0, 4.0]


def test_y_counts_from_the_whole_part_or_from_s() -> None:
    y, live, widths = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0, 4.0, 2.0]), torch.tensor([4.5, 4.5, 4.0])
    assert update_width_dual(y, live, widths, width_penalty=2.0).tolist() == [3.0, 1.0, 0.0]
    assert update_width_dual(y, live, widths, width_penalty=2.0, whole=False).tolist() == [2.0, 0.0, 0.0]


def test_z_falls_to_zero_and_not_below() -> None:
    assert update_energy_dual(torch.tensor(1.0), torch.tensor(0.5), energy_penalty=2.0) == 2.0
    assert update_energy_dual(torch.tensor(1.0), torch.tensor(-3.0), energy_penalty=2.0) == 0.0
