from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.zoo.erfnet import Downsampler, ERFNet, NonBottleneck1d, Upsampler


@pytest.fixture(scope="module")
def on_meta() -> ERFNet:
    with torch.device("meta"):
        return ERFNet()


def macs(model: nn.Module, *input_shape: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2


def test_parameters_are_those_of_the_paper(on_meta: ERFNet) -> None:
    assert sum(parameter.numel() for parameter in on_meta.parameters()) == 2_064_256  # "2.1 M", Sec. IV


def test_a_transposed_convolution_costs_one_kernel_per_input_pixel() -> None:
    with torch.device("meta"):
        upsampler = Upsampler(128, 64)
    assert macs(upsampler, 1, 128, 5, 7) == 5 * 7 * 128 * 64 * 9


def test_macs_add_up_by_hand(on_meta: ERFNet) -> None:
    half, quarter, eighth = 256 * 512, 128 * 256, 64 * 128  # pixels

    def block(channels: int) -> int:
        return 4 * 3 * channels**2  # four layers of three taps, per pixel

    encoder = half * 13 * 3 * 9 + quarter * (48 * 16 * 9 + 5 * block(64)) + eighth * (64 * 64 * 9 + 8 * block(128))
    # Transposed convolutions work at the resolution of their input.
    decoder = eighth * 128 * 64 * 9 + quarter * (2 * block(64) + 64 * 16 * 9) + half * (2 * block(16) + 16 * 20 * 4)
    assert macs(on_meta, 1, 3, 512, 1024) == encoder + decoder == 26_612_727_808


def test_parameters_are_named_as_published_weights_are(on_meta: ERFNet) -> None:
    state = on_meta.state_dict()
    assert state["encoder.initial_block.conv.weight"].shape == (13, 3, 3, 3)
    assert state["encoder.layers.0.bn.weight"].shape == (64,)
    assert state["encoder.layers.6.conv.weight"].shape == (64, 64, 3, 3)
    assert state["encoder.layers.14.conv1x3_2.weight"].shape == (128, 128, 1, 3)
    assert state["decoder.layers.0.conv.weight"].shape == (128, 64, 3, 3)
    assert state["decoder.layers.5.conv3x1_1.bias"].shape == (16,)
    assert state["decoder.output_conv.weight"].shape == (16, 20, 2, 2)
    assert not any(name.startswith("encoder.output_conv") for name in state)
    # 17 blocks of 4 convolutions and 2 BatchNorms, 5 resamplers of one each, and the output layer.
    assert len(state) == 17 * (4 * 2 + 2 * 5) + 5 * (2 + 5) + 2


def test_blocks_dilate_and_drop_as_in_the_paper(on_meta: ERFNet) -> None:
    blocks = [module for module in on_meta.modules() if isinstance(module, NonBottleneck1d)]
    assert [block.conv3x1_2.dilation[0] for block in blocks] == [1] * 5 + [2, 4, 8, 16] * 2 + [1] * 4
    assert [block.conv1x3_2.dilation[1] for block in blocks] == [1] * 5 + [2, 4, 8, 16] * 2 + [1] * 4
    assert [block.dropout.p for block in blocks] == [0.03] * 5 + [0.3] * 8 + [0.0] * 4


def test_the_pooled_input_fills_the_last_channels() -> None:
    downsampler = Downsampler(3, 16).eval()
    for parameter in downsampler.conv.parameters():
        nn.init.zeros_(parameter)
    image = torch.rand(1, 3, 8, 8)
    out = downsampler(image)
    assert (out[:, :13] == 0).all()
    torch.testing.assert_close(out[:, 13:], torch.max_pool2d(image, 2) / (1 + 1e-3) ** 0.5)


def test_a_silent_branch_leaves_the_input() -> None:
    block = NonBottleneck1d(4, dilation=2).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(1, 4, 6, 6)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize("size", [(8, 16), (360, 480), (512, 1024)])
def test_outputs_have_one_score_per_class_and_pixel(on_meta: ERFNet, size: tuple[int, int]) -> None:
    assert on_meta(torch.empty(2, 3, *size, device="meta")).shape == (2, 20, *size)


def test_the_number_of_classes_can_be_chosen() -> None:
    assert ERFNet(num_classes=11).eval()(torch.rand(1, 3, 16, 24)).shape == (1, 11, 16, 24)
