"""CIFAR-10 from its official binary files: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.

Each record is a byte for the class and 3,072 for the image, a colour after the other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecc.errors import BadFile, BadTask
from ecc.io import read_bytes
from ecc.zoo.data.sets import ImageData, Packed, every_tenth

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
INNER = "cifar-10-batches-bin"
SIDE = 32
_RECORD = 1 + 3 * SIDE * SIDE
_MOST_BYTES = 256 << 20  # an official file has 30 MB


def is_cifar10(root: Path) -> bool:
    """Whether one of the files is there, or in the folder that the official archive unpacks to."""
    return any((folder / TEST_FILE).is_file() for folder in (root, root / INNER))


def read_cifar10(root: Path) -> ImageData:
    """All of it, in memory; every tenth training image of each class is held out.

    Raises:
        BadTask: If a file is missing, cut off, or has a class above 9.
    """
    folder = root if (root / TEST_FILE).is_file() else root / INNER
    parts = [_read(folder / name) for name in TRAIN_FILES]
    images, labels = (torch.cat([part[which] for part in parts]) for which in (0, 1))
    test_images, test_labels = _read(folder / TEST_FILE)
    kept, held = stratified(labels)
    return ImageData(
        "cifar10",
        CLASSES,
        Packed(images[kept], labels[kept]),
        Packed(images[held], labels[held]),
        Packed(test_images, test_labels),
    )


def stratified(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train with, and every tenth row of each class."""
    kept, held = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        ours, theirs = every_tenth(len(rows))
        kept.append(rows[ours])
        held.append(rows[theirs])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        data = np.frombuffer(bytearray(read_bytes(path, _MOST_BYTES)), np.uint8)
    except BadFile as error:
        raise BadTask(f"{str(error).rstrip('.')}; unpack cifar-10-binary.tar.gz.") from None
    if len(data) == 0 or len(data) % _RECORD:
        raise BadTask(f"{path} has {len(data)} bytes, not a whole number of records of {_RECORD}; fetch it again.")
    records = torch.from_numpy(data).view(-1, _RECORD)
    labels = records[:, 0].long()
    if int(labels.max()) >= len(CLASSES):
        bad = int((labels >= len(CLASSES)).nonzero()[0])
        raise BadTask(f"{path} has the class {int(labels[bad])} at record {bad}; classes are 0 to 9. Fetch it again.")
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE).contiguous(), labels
