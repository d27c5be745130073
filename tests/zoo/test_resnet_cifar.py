from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.zoo.resnet_cifar import BasicBlock, CifarResNet, PadShortcut, resnet20, resnet56


def macs(model: nn.Module, *input_shape: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2


@pytest.mark.parametrize(
    ("build", "depth", "paper_millions", "count"),
    [(resnet20, 20, 0.27, 269_722), (resnet56, 56, 0.85, 853_018)],
)
def test_parameters_and_depth_are_those_of_the_paper(
    build: Callable[[], CifarResNet], depth: int, paper_millions: float, count: int
) -> None:
    with torch.device("meta"):
        model = build()
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == count  # Table 6
    assert round(parameters / 1e6, 2) == paper_millions


@pytest.mark.parametrize(("build", "blocks", "total"), [(resnet20, 3, 40_551_040), (resnet56, 9, 125_485_696)])
def test_macs_add_up_by_hand(build: Callable[[], CifarResNet], blocks: int, total: int) -> None:
    with torch.device("meta"):
        model = build()
    # Halving the resolution and doubling the channels keeps the cost of a layer, except the first of a stage.
    layer = 32 * 32 * 16 * 16 * 9
    stem_and_head = 32 * 32 * 3 * 16 * 9 + 64 * 10
    assert macs(model, 1, 3, 32, 32) == stem_and_head + (6 * blocks - 2) * layer + 2 * layer // 2 == total


def test_parameters_are_named_as_published_weights_are() -> None:
    state = resnet56().state_dict()
    assert state["conv1.weight"].shape == (16, 3, 3, 3)
    assert state["bn1.running_mean"].shape == (16,)
    assert state["layer1.8.conv2.weight"].shape == (16, 16, 3, 3)
    assert state["layer2.0.conv1.weight"].shape == (32, 16, 3, 3)
    assert state["layer3.8.bn2.bias"].shape == (64,)
    assert state["linear.weight"].shape == (10, 64)
    assert not any("shortcut" in name for name in state)
    assert len(state) == 55 * 6 + 2


def test_weights_without_batch_counts_load_strictly() -> None:
    weights = {name: value for name, value in resnet20().state_dict().items() if "num_batches" not in name}
    assert not any(resnet20().load_state_dict(weights, strict=True))


def test_the_shortcut_keeps_every_second_pixel_in_the_middle_channels() -> None:
    x = torch.randn(1, 16, 8, 8)
    out = PadShortcut(16, 32, stride=2)(x)
    assert out.shape == (1, 32, 4, 4)
    assert (out[:, :8] == 0).all()
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert (out[:, 24:] == 0).all()


def test_an_odd_number_of_new_channels_is_padded_in_full() -> None:
    assert PadShortcut(4, 7, stride=1)(torch.zeros(1, 4, 2, 2)).shape == (1, 7, 2, 2)


def test_only_the_first_block_of_a_wider_stage_pads() -> None:
    model = resnet20()
    padded = [name for name, module in model.named_modules() if isinstance(module, PadShortcut)]
    assert padded == ["layer2.0.shortcut", "layer3.0.shortcut"]


def test_a_silent_branch_leaves_the_input() -> None:
    block = BasicBlock(4, 4).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(1, 4, 6, 6)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("build", [resnet20, resnet56])
def test_outputs_have_one_score_per_class(build: Callable[..., CifarResNet]) -> None:
    assert build()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert build(num_classes=100).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 100)
