from __future__ import annotations

import pytest
import torch

from ecc.graph import mask_channels_
from ecc.methods.base import magnitudes
from methods.jobs import WIDE
from methods.works import work_of


def test_widths_are_rounded_down_to_the_lattice_and_not_below_floors() -> None:
    work = work_of("chain", width_multiple=8)
    full = [group.width for group in work.graph.groups]
    assert work.round_widths(full) == full
    halves = work.round_widths([0.49 * width for width in full])
    for group, width, floor in zip(work.graph.groups, halves, work.min_widths(), strict=True):
        if group.frozen is None:
            assert width % 8 == 0
            assert floor <= width <= max(floor, 0.49 * group.width)
    assert work.round_widths([1.0] * len(full)) == work.min_widths()


def test_dead_channels_count_as_far_as_they_make_widths_round() -> None:
    work = work_of("chain", width_multiple=8)
    mask_channels_(work.model, work.graph, {"conv1": torch.arange(6), "conv2": torch.arange(8, 24)})
    assert work.widths() == [96, 48, 4]  # 90 and 48 live


@pytest.mark.parametrize("name", WIDE)
def test_the_channels_of_highest_score_are_kept(name: str) -> None:
    work = work_of(name)
    scores = magnitudes(work)
    widths = work.round_widths([0.5 * group.width for group in work.graph.groups])
    work.keep_channels_(work.model, scores, widths)
    assert work.widths() == widths
    after = magnitudes(work)
    for group, width in zip(work.graph.groups, widths, strict=True):
        if group.frozen is None:
            kept = after[group.name] > 0
            assert int(kept.sum()) == width
            assert width == group.width or scores[group.name][kept].min() >= scores[group.name][~kept].max()


def test_magnitudes_are_sums_of_squares_of_what_reads_a_channel() -> None:
    work = work_of("chain")
    weight = dict(work.model.named_parameters())["conv2.weight"]
    torch.testing.assert_close(magnitudes(work)["conv1"], weight.detach().square().sum((0, 2, 3)))
