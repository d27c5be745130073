"""A network as a user has it in a file: in no recipe, with batches of digits enlarged to 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ecc import Task

BATCH = 256
TRAIN_ITEMS = 1400


class Net(nn.Module):
    """A residual block between two strided convolutions."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(width)
        self.inner = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(2 * width)
        self.outer = nn.Conv2d(2 * width, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.down_norm = nn.BatchNorm2d(2 * width)
        self.last = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of ten classes."""
        x = torch.relu(self.stem_norm(self.stem(images)))
        x = x + self.outer(torch.relu(self.inner_norm(self.inner(x))))
        x = torch.relu(self.down_norm(self.down(torch.relu(x))))
        x = torch.relu(self.last(x))
        return self.head(x.mean(dim=(2, 3)))


def digits(pixels: int = 32) -> tuple[Tensor, Tensor]:
    """All images and labels."""
    bunch = load_digits()
    images = torch.tensor(bunch.images).float().unsqueeze(1) / 16
    return F.interpolate(images, size=(pixels, pixels), mode="bilinear"), torch.tensor(bunch.target)


def _task(name: str, width: int, pixels: int, batch: int) -> Task:
    images, labels = digits(pixels)

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(TRAIN_ITEMS, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, TRAIN_ITEMS - batch + 1, batch):
            chosen = order[start : start + batch]
            yield images[chosen], labels[chosen]

    def score(model: nn.Module) -> float:
        device = next(model.parameters()).device
        with torch.no_grad():
            outputs = model.eval()(images[TRAIN_ITEMS:].to(device))
        return float((outputs.argmax(1).cpu() == labels[TRAIN_ITEMS:]).double().mean())

    torch.manual_seed(0)
    return Task(
        name=name,
        model=Net(width),
        example_input=images[:batch],
        loss=F.cross_entropy,
        train_batches=batches,
        evaluate=score,
    )


def build() -> Task:
    """The network that is measured."""
    return _task("user_net", 96, 32, BATCH)


def build_small() -> Task:
    """A narrow form with small images, for what is not measured."""
    return _task("user_net_small", 16, 12, 64)
