"""The bundled networks: how each is built, what it wants its images like, and where its outputs are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ecc.zoo.alexnet import AlexNet
from ecc.zoo.erfnet import ERFNet
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.resnet_cifar import resnet20, resnet56

Colour = tuple[float, float, float]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Network:
    """One of the bundled networks."""

    build: Callable[[int], nn.Module]
    """From the number of classes."""
    outputs: int
    """Without data, as in its paper."""
    size: tuple[int, int]
    """(height, width) of its images, as the paper measured them."""
    head: tuple[str, int]
    """Name of the last layer, and the axis of its weight that counts the outputs."""
    batch: int
    """Of training, as in the paper of ECC where it says so."""
    least: int = 8
    """Pixels of a side, at least."""
    step: int = 1
    """Sides are multiples of this."""
    for_pixels: bool = False
    """Whether it labels every pixel."""
    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD


NETWORKS = {
    "alexnet": Network(AlexNet, 1000, (224, 224), ("classifier.6", 0), 128, least=63),
    "mobilenet_v1": Network(
        MobileNetV1, 1000, (224, 224), ("fc", 0), 128, least=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    ),
    "erfnet": Network(
        ERFNet,
        20,
        (512, 1024),
        ("decoder.output_conv", 1),
        4,
        step=8,
        for_pixels=True,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    ),
    "resnet20": Network(resnet20, 10, (32, 32), ("linear", 0), 128),
    "resnet56": Network(resnet56, 10, (32, 32), ("linear", 0), 128),
}
