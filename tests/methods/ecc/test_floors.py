from __future__ import annotations

import pytest
import torch

from ecc.graph import mask_channels_
from ecc.methods.ecc.min_widths import alive_and_floors
from methods.nets import traced

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("min_width_ratio", "width_multiple", "expected"),
    [
        (0.1, 1, [2, 3, 4]),  # 16, 24 and the frozen 4
        (0.0, 1, [1, 1, 4]),
        (1.0, 1, [16, 24, 4]),
        (0.1, 8, [8, 8, 4]),
        (0.5, 5, [10, 15, 4]),
        (0.1, 20, [16, 20, 4]),  # 16 are no wider than 20: they stay
        (0.1, 99, [16, 24, 4]),
    ],
)
def test_floors_are_shares_rounded_up(min_width_ratio: float, width_multiple: int, expected: list[int]) -> None:
    net, _, graph = traced("chain")
    alive, floors = alive_and_floors(net, graph, min_width_ratio, width_multiple, CPU)
    assert floors.tolist() == expected
    assert alive.all()
    assert len(alive) == 16 + 24 + 4


def test_a_third_is_not_rounded_up_by_float_noise() -> None:
    net, _, graph = traced("chain")
    assert alive_and_floors(net, graph, 1 / 3, 1, CPU)[1].tolist() == [6, 8, 4]


def test_what_is_dead_stays_dead_but_a_group_not_yet_trained_is_whole() -> None:
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([3, 5]), "conv2": torch.arange(22)})
    alive, floors = alive_and_floors(net, graph, 0.1, 1, CPU)
    assert (~alive).nonzero().flatten().tolist() == [3, 5]  # conv2 has 2 of 24 left, below its floor of 3
    assert floors.tolist() == [2, 3, 4]


def test_dead_channels_fill_a_group_up_to_a_multiple() -> None:
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([3, 5]), "conv2": torch.arange(3, 8)})
    alive, floors = alive_and_floors(net, graph, 0.1, 5, CPU)
    assert (~alive).nonzero().flatten().tolist() == [5, *range(16 + 4, 16 + 8)]  # 15 of 16, and 20 of 24
    assert floors.tolist() == [5, 5, 4]
    alive, floors = alive_and_floors(net, graph, 0.1, 15, CPU)
    assert alive.tolist() == [True] * 5 + [False] + [True] * (10 + 24 + 4)  # 30 would be more than there are
    assert floors.tolist() == [15, 15, 4]


@pytest.mark.parametrize(("min_width_ratio", "width_multiple"), [(-0.1, 1), (1.1, 1), (0.1, 0)])
def test_settings_out_of_range_are_refused(min_width_ratio: float, width_multiple: int) -> None:
    net, _, graph = traced("chain")
    with pytest.raises(ValueError, match=r"min_width_ratio|width_multiple"):
        alive_and_floors(net, graph, min_width_ratio, width_multiple, CPU)
