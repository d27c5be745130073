"""MobileNet v1, Howard et al., "MobileNets: Efficient CNNs for Mobile Vision Applications" (2017)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STEM_CHANNELS = 32
# Table 1 of the paper: (stride of the depthwise layer, output channels of the pointwise layer).
BLOCKS = (
    (1, 64),
    (2, 128),
    (1, 128),
    (2, 256),
    (1, 256),
    (2, 512),
    *((1, 512),) * 5,
    (2, 1024),
    # Table 1 prints stride 2 here, but keeps 7x7 at input and output: the stride is 1.
    (1, 1024),
)
BATCH_NORM_EPS = 1e-3  # as in the published TensorFlow weights


class MobileNetV1(nn.Module):
    """A stem, 13 depthwise-separable blocks and a classifier; 4.2 M parameters, 569 M MACs at 224x224.

    Block i holds `conv_dw_i`, `conv_dw_i_bn`, `conv_pw_i` and `conv_pw_i_bn`. Layers of stride 2 pad on the
    right and at the bottom only, as TensorFlow does, so that the published TensorFlow weights give the same outputs.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = _conv3x3(3, STEM_CHANNELS, stride=2)
        self.conv1_bn = nn.BatchNorm2d(STEM_CHANNELS, eps=BATCH_NORM_EPS)
        channels = STEM_CHANNELS
        for index, (stride, out_channels) in enumerate(BLOCKS, start=1):
            depthwise = _conv3x3(channels, channels, stride=stride, groups=channels)
            pointwise = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
            self.add_module(f"conv_dw_{index}", depthwise)
            self.add_module(f"conv_dw_{index}_bn", nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS))
            self.add_module(f"conv_pw_{index}", pointwise)
            self.add_module(f"conv_pw_{index}_bn", nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPS))
            channels = out_channels
        self.fc = nn.Linear(channels, num_classes)
        # He et al. (2015): with torch's default initialisation activations vanish over 27 layers.
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(batch, num_classes)` of images `(batch, 3, height, width)`, at least 32x32."""
        x = self._conv_bn_relu6(images, "conv1")
        for index in range(1, len(BLOCKS) + 1):
            x = self._conv_bn_relu6(x, f"conv_dw_{index}")
            x = self._conv_bn_relu6(x, f"conv_pw_{index}")
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        scores: Tensor = self.fc(x)
        return scores

    def _conv_bn_relu6(self, x: Tensor, name: str) -> Tensor:
        """The convolution `name`, its batch norm and ReLU6."""
        conv: nn.Conv2d = getattr(self, name)
        batch_norm: nn.BatchNorm2d = getattr(self, f"{name}_bn")
        if conv.stride == (2, 2):
            x = F.pad(x, (0, 1, 0, 1))  # left, right, top, bottom
        return F.relu6(batch_norm(conv(x)))


def _conv3x3(in_channels: int, out_channels: int, stride: int, groups: int = 1) -> nn.Conv2d:
    """A 3x3 convolution; the one-sided padding of stride 2 is part of the forward pass."""
    return nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size=3,
        stride=stride,
        padding=0 if stride == 2 else 1,
        groups=groups,
        bias=False,
    )
