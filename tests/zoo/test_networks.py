from __future__ import annotations

import pytest
import torch

from ecc.zoo.image_task import NETWORKS


@pytest.mark.parametrize("name", NETWORKS)
def test_the_head_is_where_the_outputs_are_counted(name: str) -> None:
    network = NETWORKS[name]
    layer, axis = network.head
    with torch.device("meta"):
        for outputs in (network.outputs, 7):
            state = network.build(outputs).state_dict()
            assert state[f"{layer}.weight"].shape[axis] == outputs
            assert state[f"{layer}.bias"].shape == (outputs,)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_least_size_is_enough_for_the_network(name: str) -> None:
    network = NETWORKS[name]
    side = -(-network.least // network.step) * network.step
    with torch.device("meta"):
        found = network.build(5).eval()(torch.empty(2, 3, side, side))
    assert found.shape == ((2, 5, side, side) if network.for_pixels else (2, 5))


def test_colours_are_those_of_the_published_weights() -> None:
    assert (NETWORKS["mobilenet_v1"].mean[0], NETWORKS["mobilenet_v1"].std[0]) == (0.5, 0.5)  # RGB / 127.5 - 1
    assert (NETWORKS["erfnet"].mean[0], NETWORKS["erfnet"].std[0]) == (0.0, 1.0)  # RGB in 0..1
    assert NETWORKS["resnet56"].mean == NETWORKS["alexnet"].mean == (0.485, 0.456, 0.406)
