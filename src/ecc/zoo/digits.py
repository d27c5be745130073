"""The example task: scikit-learn's 8x8 digits and a small network with every kind of channel coupling.

Nothing is downloaded, and training takes seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import import_optional
from ecc.task import Task
from ecc.torch_utils import device_of, eval_mode

SEED = 0
BATCH_SIZE = 64
EXAMPLE_BATCH = 256
"""Items per inference. With fewer, starting the kernels takes most of the energy of a network this small."""
# Fractions of the 1,797 images; the rest is for training.
TEST_SHARE = 0.20
HELD_OUT_SHARE = 0.15


class DigitsNet(nn.Module):
    """A residual and depthwise network for 8x8 grey images; 42 k parameters, 0.9 M MACs.

    It couples channels as larger networks do: by an identity shortcut, a depthwise convolution, a strided
    projection shortcut, and a linear layer behind global pooling.

    Args:
        widths: Channels of the stem and residual block, of the separable block, and of the last stage.
        num_classes: Number of outputs.
    """

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 48), num_classes: int = 10) -> None:
        super().__init__()
        stem, separable, last = widths
        self.stem = nn.Sequential(_conv3x3(1, stem), nn.BatchNorm2d(stem), nn.ReLU())
        self.residual = ResidualBlock(stem, stem)
        self.depthwise = _conv3x3(stem, stem, groups=stem)
        self.depthwise_bn = nn.BatchNorm2d(stem)
        self.pointwise = nn.Conv2d(stem, separable, kernel_size=1, bias=False)
        self.pointwise_bn = nn.BatchNorm2d(separable)
        self.strided = ResidualBlock(separable, last, stride=2)
        self.head = nn.Linear(last, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Class scores `(batch, num_classes)` of images `(batch, 1, 8, 8)`."""
        x = self.residual(self.stem(images))
        x = F.relu(self.depthwise_bn(self.depthwise(x)))
        x = F.relu(self.pointwise_bn(self.pointwise(x)))
        x = self.strided(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        scores: Tensor = self.head(x)
        return scores


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features after the addition and its ReLU."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return F.relu(branch + self.shortcut(x))


class Split(NamedTuple):
    """One split of the data."""

    images: Tensor
    """Grey values in [-1, 1], float32 `(count, 1, 8, 8)`."""

    labels: Tensor
    """Digits 0 to 9, int64 `(count,)`."""


class DigitsSplits(NamedTuple):
    """Three disjoint splits, stratified by digit."""

    train: Split
    """For gradients: about 65 %."""

    held_out: Split
    """For the choices of methods: about 15 %."""

    test: Split
    """For the reported score: about 20 %."""


def digits() -> Task:
    """The example task: an untrained `DigitsNet`, cross-entropy, and accuracy.

    Twelve epochs of Adam at 3e-3 reach 98 to 99 % on the test split, in a few seconds on one core.
    Everything is seeded; the global random state is not changed.
    """
    splits = load_digits_splits()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reseed the GPUs as well
        model = DigitsNet()
    return Task(
        name="digits",
        model=model,
        example_input=splits.train.images[:EXAMPLE_BATCH].clone(),
        loss=F.cross_entropy,
        # Partials of plain functions can be sent to worker processes; closures cannot.
        train_batches=partial(shuffled_batches, splits.train),
        evaluate=partial(accuracy, splits.test),
        evaluate_held_out=partial(accuracy, splits.held_out),
    )


def load_digits_splits() -> DigitsSplits:
    """The images in three splits, the same on every machine."""
    bunch = import_optional("sklearn.datasets", "task 'digits'", package="scikit-learn").load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # raw values are 0 to 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)

    # The stream of RandomState is frozen; other numpy generators may change between versions.
    random = np.random.RandomState(SEED)
    parts: tuple[list[int], list[int], list[int]] = ([], [], [])
    for digit in range(10):
        members = random.permutation(np.flatnonzero(bunch.target == digit))
        test_end = round(TEST_SHARE * len(members))
        held_out_end = test_end + round(HELD_OUT_SHARE * len(members))
        test, held_out, train = np.split(members, [test_end, held_out_end])
        for part, indices in zip(parts, (train, held_out, test), strict=True):
            part.extend(indices.tolist())
    return DigitsSplits(*(Split(images[sorted(part)], labels[sorted(part)]) for part in parts))


def shuffled_batches(split: Split, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Full batches of one epoch, in an order that depends on the epoch alone."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    order = torch.randperm(len(split.labels), generator=generator)
    for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        batch = order[start : start + BATCH_SIZE]
        yield split.images[batch], split.labels[batch]


@torch.no_grad()
def accuracy(split: Split, model: nn.Module) -> float:
    """Top-1 accuracy in eval mode; the mode of the model is restored."""
    with eval_mode(model):
        predicted = model(split.images.to(device_of(model))).argmax(dim=1)
    return float((predicted.cpu() == split.labels).double().mean())


def _conv3x3(in_channels: int, out_channels: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, groups=groups, bias=False)
