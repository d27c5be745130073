from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy.step_terms import MAX_LEVELS, RISE, Step, StepTerms, levels_of, steps_of
from ecc.graph import AffineSize
from energy.cases import NETWORKS, finite_differences, pairs_of, skeleton_of, widths_of


@given(st.integers(1, 20_000))
def test_levels_are_few_and_in_whole_steps_from_the_full_size(full: int) -> None:
    levels = levels_of(full)
    assert len(levels) <= MAX_LEVELS
    assert list(levels) == sorted(levels)
    assert all(0 < level < full and (full - level) % RISE == 0 for level in levels)
    distances = {full - level for level in levels}
    assert not levels or (min(distances) // RISE).bit_count() == 1  # a power of two


def test_a_size_of_one_step_or_less_has_none() -> None:
    assert levels_of(RISE) == ()
    assert levels_of(RISE + 1) == (1,)


def test_a_step_rises_over_its_channels() -> None:
    step = Step("a", AffineSize(0, ((0, 1),)), 16, (0,))
    assert step.at(np.array([[8.0], [16.0], [20.0], [24.0], [40.0]])).tolist() == [0, 0, 0.5, 1, 1]


def test_joined_branches_have_steps_of_their_sum() -> None:
    names = {step.name for step in steps_of(skeleton_of("concat"))}
    assert any(" + " in name for name in names) or not names  # a small network may have sizes below one step


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_stand_on_channels_that_a_dense_layer_reads_or_writes(name: str) -> None:
    structure = skeleton_of(name)
    for step in steps_of(structure):
        for number in step.layers:
            layer = structure.layers[number]
            assert layer.macs > 0
            assert layer.kind != "grouped conv"
            groups = {group for extent in (layer.incoming, layer.outgoing) for group, _ in extent.multiples}
            assert {group for group, _ in step.size.multiples} <= groups


def stairs(seed: int = 0) -> StepTerms:
    steps = steps_of(skeleton_of("digits"))
    heights = np.random.default_rng(seed).random(len(steps))
    sizes, levels = tuple(step.size for step in steps), tuple(step.level for step in steps)
    return StepTerms(tuple(heights.tolist()), sizes, levels, len(skeleton_of("digits").groups))


@given(pairs_of(skeleton_of("digits")))
def test_stairs_only_rise_and_are_the_sum_of_their_steps(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    small, large = pair
    made = stairs()
    assert 0 <= float(made.value(small)) <= float(made.value(large)) + 1e-12
    slow = sum(
        height * float(step.at(small.numpy()[None])[0])
        for step, height in zip(steps_of(skeleton_of("digits")), made.heights, strict=True)
    )
    assert float(made.value(small)) == pytest.approx(slow)
    both = torch.stack([small, large])
    assert made.value(both).tolist() == pytest.approx([float(made.value(small)), float(made.value(large))])


@given(widths_of(skeleton_of("digits")))
def test_the_gradient_is_that_of_cutting(widths: torch.Tensor) -> None:
    made, step = stairs(), 1e-4
    backward = torch.stack(
        [(made.value(widths) - made.value(widths - step * e)) / step for e in torch.eye(len(widths)).double()]
    )
    near = finite_differences(made, widths, step=step)
    gradient = made.gradient(widths)
    # Between kinks all agree; at a kink the gradient is the one from the left.
    agree = torch.isclose(gradient, backward, atol=1e-6) | torch.isclose(gradient, near, atol=1e-6)
    off = (widths[:, None] - torch.tensor(made.levels, dtype=torch.float64)) / RISE
    at_kink = ((off - off.round()).abs() < 2 * step).any(1)
    assert bool((agree | at_kink).all())


def test_stairs_move_to_another_device() -> None:
    assert stairs().to("cpu") == stairs()
