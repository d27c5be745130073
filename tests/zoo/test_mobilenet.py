from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.zoo.mobilenet import MobileNetV1


@pytest.fixture(scope="module")
def on_meta() -> MobileNetV1:
    with torch.device("meta"):
        return MobileNetV1()


def macs(model: nn.Module, *input_shape: int) -> int:
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(input_shape, device="meta"))
    return int(counter.get_total_flops()) // 2


def test_parameters_are_those_of_the_paper(on_meta: MobileNetV1) -> None:
    assert sum(parameter.numel() for parameter in on_meta.parameters()) == 4_231_976  # 4.2 M in Table 4


def test_macs_are_those_of_the_paper(on_meta: MobileNetV1) -> None:
    assert macs(on_meta, 1, 3, 224, 224) == 568_740_352  # 569 M in Table 4


def test_macs_at_128_pixels_are_those_of_the_paper(on_meta: MobileNetV1) -> None:
    assert macs(on_meta, 1, 3, 128, 128) == pytest.approx(186e6, rel=0.01)  # 186 M in Table 7


def test_parameters_are_named_as_published_weights_are(on_meta: MobileNetV1) -> None:
    state = on_meta.state_dict()
    assert state["conv1.weight"].shape == (32, 3, 3, 3)
    assert state["conv1_bn.running_var"].shape == (32,)
    assert state["conv_dw_1.weight"].shape == (32, 1, 3, 3)
    assert state["conv_pw_1_bn.weight"].shape == (64,)
    assert state["conv_dw_12.weight"].shape == (512, 1, 3, 3)
    assert state["conv_pw_13.weight"].shape == (1024, 1024, 1, 1)
    assert state["conv_dw_13_bn.bias"].shape == (1024,)
    assert state["fc.weight"].shape == (1000, 1024)
    # 27 convolutions, each with the five tensors of its BatchNorm; then weight and bias of fc.
    assert len(state) == 27 * 6 + 2


def test_weights_without_batch_counts_load_strictly() -> None:
    model = MobileNetV1(num_classes=7)
    weights = {name: value for name, value in model.state_dict().items() if "num_batches" not in name}
    assert not any(MobileNetV1(num_classes=7).load_state_dict(weights, strict=True))


def test_strides_and_batch_norms_are_those_of_the_published_weights(on_meta: MobileNetV1) -> None:
    layers = dict(on_meta.named_modules())
    strided = [name for name, layer in layers.items() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)]
    assert strided == ["conv1", "conv_dw_2", "conv_dw_4", "conv_dw_6", "conv_dw_12"]
    assert {layer.eps for layer in layers.values() if isinstance(layer, nn.BatchNorm2d)} == {1e-3}


def test_strided_layers_pad_right_and_bottom_only() -> None:
    model = MobileNetV1().eval()
    image = torch.randn(1, 3, 6, 6)
    seen = model._conv_bn_relu6(image, "conv1")
    # Every window starts on an even pixel, so the first one lies wholly inside the image.
    first = F.conv2d(image[:, :, :3, :3], model.conv1.weight)
    expected = F.relu6(model.conv1_bn(first))
    assert seen.shape == (1, 32, 3, 3)
    torch.testing.assert_close(seen[:, :, :1, :1], expected)


def test_activations_stop_at_six() -> None:
    model = MobileNetV1().eval()
    assert model._conv_bn_relu6(100 * torch.randn(1, 3, 8, 8), "conv1").max() == 6


@pytest.mark.parametrize("size", [32, 128, 160, 224])
def test_outputs_have_one_score_per_class(on_meta: MobileNetV1, size: int) -> None:
    assert on_meta(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)


def test_random_weights_let_the_image_through() -> None:
    model = MobileNetV1(num_classes=10).eval()
    first, second = model(torch.randn(2, 3, 64, 64)).unbind()
    assert (first - second).abs().max() > 1e-2
