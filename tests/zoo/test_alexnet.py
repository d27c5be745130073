from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.zoo.alexnet import AlexNet


@pytest.fixture(scope="module")
def alexnet() -> AlexNet:
    with torch.device("meta"):  # shapes without the 244 MB
        return AlexNet()


def macs(model: nn.Module, *input_shape: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2


def test_parameters_are_those_of_the_paper(alexnet: AlexNet) -> None:
    assert sum(parameter.numel() for parameter in alexnet.parameters()) == 61_100_840


def test_macs_are_those_of_the_paper(alexnet: AlexNet) -> None:
    convolutions = (
        55 * 55 * 64 * (3 * 11 * 11) + 27 * 27 * 192 * (64 * 5 * 5) + 13 * 13 * (384 * 192 + 256 * 384 + 256 * 256) * 9
    )
    fully_connected = 9216 * 4096 + 4096 * 4096 + 4096 * 1000
    assert macs(alexnet, 1, 3, 224, 224) == convolutions + fully_connected == 714_188_480


def test_widths_follow_the_one_tower_form(alexnet: AlexNet) -> None:
    convolutions = [layer for layer in alexnet.modules() if isinstance(layer, nn.Conv2d)]
    linears = [layer for layer in alexnet.modules() if isinstance(layer, nn.Linear)]
    assert [layer.out_channels for layer in convolutions] == [64, 192, 384, 256, 256]
    assert [layer.out_features for layer in linears] == [4096, 4096, 1000]


def test_published_weights_would_load(alexnet: AlexNet) -> None:
    state = alexnet.state_dict()
    assert state["features.0.weight"].shape == (64, 3, 11, 11)
    assert state["features.10.bias"].shape == (256,)
    assert state["classifier.1.weight"].shape == (4096, 9216)
    assert state["classifier.6.bias"].shape == (1000,)
    assert len(state) == 16


@pytest.mark.parametrize("size", [63, 128, 224])
def test_outputs_have_one_score_per_class(alexnet: AlexNet, size: int) -> None:
    assert alexnet(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)


def test_the_number_of_classes_can_be_chosen() -> None:
    with torch.device("meta"):
        model = AlexNet(num_classes=10)
        assert model(torch.empty(1, 3, 64, 64)).shape == (1, 10)
