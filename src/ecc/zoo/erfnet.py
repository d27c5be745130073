"""ERFNet, Romera et al., "ERFNet: Efficient Residual Factorized ConvNet" (T-ITS 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH_NORM_EPS = 1e-3  # as in the published weights


class ERFNet(nn.Module):
    """Encoder-decoder for segmentation; 2.06 M parameters, 26.6 G MACs at 512x1024 and 20 classes.

    Parameters are named as in the authors' release, without its encoder-only head.
    """

    def __init__(self, num_classes: int = 20) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `(batch, num_classes, height, width)`; height and width must be multiples of 8."""
        scores: Tensor = self.decoder(self.encoder(images))
        return scores


class Encoder(nn.Module):
    """Layers 1-16 of Table I: down to an eighth of the resolution, then growing dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.initial_block = Downsampler(3, 16)
        dilated = [NonBottleneck1d(128, dilation=d, dropout=0.3) for d in (2, 4, 8, 16) * 2]
        self.layers = nn.Sequential(
            Downsampler(16, 64),
            *(NonBottleneck1d(64, dropout=0.03) for _ in range(5)),
            Downsampler(64, 128),
            *dilated,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Features `(batch, 128, height / 8, width / 8)`."""
        features: Tensor = self.layers(self.initial_block(images))
        return features


class Decoder(nn.Module):
    """Layers 17-23 of Table I: back to full resolution by three transposed convolutions."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Upsampler(128, 64),
            NonBottleneck1d(64),
            NonBottleneck1d(64),
            Upsampler(64, 16),
            NonBottleneck1d(16),
            NonBottleneck1d(16),
        )
        self.output_conv = nn.ConvTranspose2d(16, num_classes, kernel_size=2, stride=2)

    def forward(self, features: Tensor) -> Tensor:
        """Scores per pixel at eight times the resolution of the features."""
        scores: Tensor = self.output_conv(self.layers(features))
        return scores


class Downsampler(nn.Module):
    """Halves the resolution: a strided 3x3 convolution and a max-pool of the input, concatenated."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # The pooled input fills the last in_channels of the output.
        self.conv = nn.Conv2d(in_channels, out_channels - in_channels, kernel_size=3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.bn = nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Features of twice the stride."""
        both = torch.cat([self.conv(x), self.pool(x)], dim=1)
        return F.relu(self.bn(both))


class Upsampler(nn.Module):
    """Doubles the resolution by a strided 3x3 transposed convolution."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1, output_padding=1)
        self.bn = nn.BatchNorm2d(out_channels, eps=BATCH_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Features of half the stride."""
        return F.relu(self.bn(self.conv(x)))


class NonBottleneck1d(nn.Module):
    """Residual block of two 3x3 convolutions, each split into a 3x1 and a 1x3 (Fig. 2c); the second pair is dilated."""

    def __init__(self, channels: int, dilation: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        d = dilation
        self.conv3x1_1 = nn.Conv2d(channels, channels, (3, 1), padding=(1, 0))
        self.conv1x3_1 = nn.Conv2d(channels, channels, (1, 3), padding=(0, 1))
        self.bn1 = nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)
        self.conv3x1_2 = nn.Conv2d(channels, channels, (3, 1), padding=(d, 0), dilation=(d, 1))
        self.conv1x3_2 = nn.Conv2d(channels, channels, (1, 3), padding=(0, d), dilation=(1, d))
        self.bn2 = nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same shape."""
        branch = F.relu(self.conv3x1_1(x))
        branch = F.relu(self.bn1(self.conv1x3_1(branch)))
        branch = F.relu(self.conv3x1_2(branch))
        branch = self.dropout(self.bn2(self.conv1x3_2(branch)))
        return F.relu(branch + x)
