"""The bundled networks: parameters and MACs of their papers, names of published weights, and structure."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.zoo import AlexNet, DigitsNet, ERFNet, MobileNetV1, resnet20, resnet56
from ecc.zoo.erfnet import Downsampler, NonBottleneck1d, Upsampler
from ecc.zoo.image_task import NETWORKS
from ecc.zoo.resnet_cifar import PadShortcut


def count_macs(model: nn.Module, *shape: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(shape, device="meta"))
    return int(counter.get_total_flops()) // 2


def alexnet_macs() -> int:
    convolutions = 55 * 55 * 64 * (3 * 11 * 11) + 27 * 27 * 192 * (64 * 5 * 5)
    convolutions += 13 * 13 * (384 * 192 + 256 * 384 + 256 * 256) * 9
    return convolutions + 9216 * 4096 + 4096 * 4096 + 4096 * 1000


def erfnet_macs() -> int:
    half, quarter, eighth = 256 * 512, 128 * 256, 64 * 128  # pixels

    def block(channels: int) -> int:
        return 4 * 3 * channels**2  # four layers of three taps, per pixel

    encoder = half * 13 * 3 * 9 + quarter * (48 * 16 * 9 + 5 * block(64)) + eighth * (64 * 64 * 9 + 8 * block(128))
    # Transposed convolutions work at the resolution of their input.
    return (
        encoder + eighth * 128 * 64 * 9 + quarter * (2 * block(64) + 64 * 16 * 9) + half * (2 * block(16) + 16 * 20 * 4)
    )


def resnet_macs(blocks: int) -> int:
    # Halving the resolution and doubling the channels keeps the cost of a layer, except the first of a stage.
    layer = 32 * 32 * 16 * 16 * 9
    return 32 * 32 * 3 * 16 * 9 + 64 * 10 + (6 * blocks - 2) * layer + 2 * layer // 2


@pytest.mark.parametrize(
    ("build", "shape", "parameters", "macs"),
    [
        (AlexNet, (1, 3, 224, 224), 61_100_840, alexnet_macs()),
        (MobileNetV1, (1, 3, 224, 224), 4_231_976, 568_740_352),  # 4.2 M and 569 M in Table 4 of its paper
        (ERFNet, (1, 3, 512, 1024), 2_064_256, erfnet_macs()),  # 2.1 M in Sec. IV of its paper
        (resnet20, (1, 3, 32, 32), 269_722, resnet_macs(3)),  # 0.27 M in Table 6 of its paper
        (resnet56, (1, 3, 32, 32), 853_018, resnet_macs(9)),  # 0.85 M
        (DigitsNet, (1, 1, 8, 8), 42_474, 924_128),
    ],
)
def test_parameters_and_macs_are_those_of_the_papers(
    build: type[nn.Module], shape: tuple[int, ...], parameters: int, macs: int
) -> None:
    with torch.device("meta"):
        model = build().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert count_macs(model, *shape) == macs


PUBLISHED = {
    "alexnet": (16, {"features.0.weight": (64, 3, 11, 11), "classifier.1.weight": (4096, 9216)}),
    "mobilenet_v1": (27 * 6 + 2, {"conv1_bn.running_var": (32,), "conv_dw_12.weight": (512, 1, 3, 3)}),
    "erfnet": (
        17 * (4 * 2 + 2 * 5) + 5 * (2 + 5) + 2,
        {"encoder.initial_block.conv.weight": (13, 3, 3, 3), "encoder.layers.14.conv1x3_2.weight": (128, 128, 1, 3)},
    ),
    "resnet56": (55 * 6 + 2, {"layer1.8.conv2.weight": (16, 16, 3, 3), "linear.weight": (10, 64)}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_tensors_are_named_like_published_weights(name: str) -> None:
    count, shapes = PUBLISHED[name]
    with torch.device("meta"):
        model = NETWORKS[name].build(NETWORKS[name].num_classes)
    state = model.state_dict()
    assert len(state) == count
    assert {key: tuple(state[key].shape) for key in shapes} == shapes
    weights = {key: torch.zeros(value.shape) for key, value in state.items() if "num_batches" not in key}
    assert not any(model.load_state_dict(weights, strict=True, assign=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_head_and_smallest_size_fit_the_network(name: str) -> None:
    network = NETWORKS[name]
    layer, axis = network.head
    side = -(-network.min_side // network.side_multiple) * network.side_multiple
    with torch.device("meta"):
        model = network.build(7).eval()
        assert model.state_dict()[f"{layer}.weight"].shape[axis] == 7
        assert model(torch.empty(2, 3, side, side)).shape == ((2, 7, side, side) if network.for_pixels else (2, 7))
        for size in (network.size, (128, 160)):
            assert model(torch.empty(1, 3, *size)).shape[:2] == (1, 7)


def test_colours_are_normalised_as_for_the_published_weights() -> None:
    assert (NETWORKS["mobilenet_v1"].mean[0], NETWORKS["mobilenet_v1"].std[0]) == (0.5, 0.5)  # RGB / 127.5 - 1
    assert (NETWORKS["erfnet"].mean[0], NETWORKS["erfnet"].std[0]) == (0.0, 1.0)  # RGB in 0..1
    assert NETWORKS["resnet56"].mean == NETWORKS["alexnet"].mean == (0.485, 0.456, 0.406)


# ---------------------------------------------------------------- structure


def test_mobilenet_strides_pad_right_and_bottom_and_relu6_clamps() -> None:
    model = MobileNetV1(num_classes=10).eval()
    layers = dict(model.named_modules())
    strided = [name for name, layer in layers.items() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)]
    assert strided == ["conv1", "conv_dw_2", "conv_dw_4", "conv_dw_6", "conv_dw_12"]
    assert {layer.eps for layer in layers.values() if isinstance(layer, nn.BatchNorm2d)} == {1e-3}
    image = torch.randn(1, 3, 6, 6)
    found = model._conv_bn_relu6(image, "conv1")
    # Every window starts on an even pixel, so the first one lies inside the image.
    first = F.relu6(model.conv1_bn(F.conv2d(image[:, :, :3, :3], model.conv1.weight)))
    assert found.shape == (1, 32, 3, 3)
    torch.testing.assert_close(found[:, :, :1, :1], first)
    assert model._conv_bn_relu6(100 * torch.randn(1, 3, 8, 8), "conv1").max() == 6
    one, other = model(torch.randn(2, 3, 64, 64)).unbind()
    assert (one - other).abs().max() > 1e-2  # random weights let the image through


def test_erfnet_blocks_dilate_drop_and_downsample_as_in_its_paper() -> None:
    with torch.device("meta"):
        blocks = [module for module in ERFNet().modules() if isinstance(module, NonBottleneck1d)]
        assert count_macs(Upsampler(128, 64), 1, 128, 5, 7) == 5 * 7 * 128 * 64 * 9
    dilations = [1] * 5 + [2, 4, 8, 16] * 2 + [1] * 4
    assert [block.conv3x1_2.dilation[0] for block in blocks] == dilations
    assert [block.conv1x3_2.dilation[1] for block in blocks] == dilations
    assert [block.dropout.p for block in blocks] == [0.03] * 5 + [0.3] * 8 + [0.0] * 4
    downsampler = Downsampler(3, 16).eval()
    for parameter in downsampler.conv.parameters():
        nn.init.zeros_(parameter)
    image = torch.rand(1, 3, 8, 8)
    out = downsampler(image)  # the pooled input fills the last channels
    assert (out[:, :13] == 0).all()
    torch.testing.assert_close(out[:, 13:], torch.max_pool2d(image, 2) / (1 + 1e-3) ** 0.5)


def test_resnet_shortcut_keeps_every_second_pixel_in_the_middle_channels() -> None:
    x = torch.randn(1, 16, 8, 8)
    out = PadShortcut(stride=2)(x, 32)
    assert (out[:, :8] == 0).all()
    assert torch.equal(out[:, 8:24], x[:, :, ::2, ::2])
    assert (out[:, 24:] == 0).all()
    assert PadShortcut(stride=1)(torch.zeros(1, 4, 2, 2), 7).shape == (1, 7, 2, 2)
    padded = [name for name, module in resnet20().named_modules() if isinstance(module, PadShortcut)]
    assert padded == ["layer2.0.shortcut", "layer3.0.shortcut"]
