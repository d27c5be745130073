"""The CIFAR ResNets of He et al., "Deep Residual Learning for Image Recognition" (2016), Sec. 4.2."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STAGE_CHANNELS = (16, 32, 64)


def resnet20(num_classes: int = 10) -> CifarResNet:
    """ResNet-20: 0.27 M parameters, 40.6 M MACs at 32x32."""
    return CifarResNet(blocks_per_stage=3, num_classes=num_classes)


def resnet56(num_classes: int = 10) -> CifarResNet:
    """ResNet-56: 0.85 M parameters, 125.5 M MACs at 32x32."""
    return CifarResNet(blocks_per_stage=9, num_classes=num_classes)


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of basic blocks, global pooling and a linear layer: 6n + 2 layers."""

    def __init__(self, blocks_per_stage: int, num_classes: int = 10) -> None:
        super().__init__()
        first, second, third = STAGE_CHANNELS
        self.conv1 = nn.Conv2d(3, first, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.layer1 = _stage(first, first, blocks_per_stage, stride=1)
        self.layer2 = _stage(first, second, blocks_per_stage, stride=2)
        self.layer3 = _stage(second, third, blocks_per_stage, stride=2)
        self.linear = nn.Linear(third, num_classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # as in the paper

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(batch, num_classes)` of images `(batch, 3, height, width)`."""
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        scores: Tensor = self.linear(x)
        return scores


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = None if same_shape else PadShortcut(stride)

    def forward(self, x: Tensor) -> Tensor:
        """Features after the addition and its ReLU."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return F.relu(branch + (x if self.shortcut is None else self.shortcut(x, branch.shape[1])))


class PadShortcut(nn.Module):
    """Option A of the paper: keep every stride-th pixel and fill the new channels with zeros.

    The input fills the middle channels. The paper does not specify the position; published weights expect this one.
    The number of channels is that of the branch, so that both can be pruned.
    """

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor, channels: int) -> Tensor:
        """The input in the shape of the block's output, which has this number of channels."""
        kept = x[:, :, :: self.stride, :: self.stride]
        before = (channels - x.shape[1]) // 2
        return F.pad(kept, (0, 0, 0, 0, before, channels - x.shape[1] - before))


def _stage(in_channels: int, out_channels: int, blocks: int, stride: int) -> nn.Sequential:
    """Blocks of one width; the first changes width and resolution."""
    first = BasicBlock(in_channels, out_channels, stride)
    return nn.Sequential(first, *(BasicBlock(out_channels, out_channels) for _ in range(blocks - 1)))
