"""AlexNet, the one-tower form of Krizhevsky, "One weird trick for parallelizing CNNs" (2014)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions and three fully connected layers; 61.1 M parameters, 714 M MACs at 224x224.

    Parameters are named `features.0.weight` ... `classifier.6.bias`, as in torchvision, so that its
    published weights load. The one-tower form has no local response normalisation.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        # 224x224 images are 6x6 here already; other sizes are pooled to what fc6 expects.
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),  # fc6
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),  # fc7
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),  # fc8
        )
        # He et al. (2015): with torch's default initialisation the scores hardly depend on the image.
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(batch, num_classes)` of images `(batch, 3, height, width)`, at least 63x63."""
        x: Tensor = self.avgpool(self.features(images))
        scores: Tensor = self.classifier(torch.flatten(x, 1))
        return scores
