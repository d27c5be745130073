"""Tiny data sets in the true layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def noise(*shape: int, seed: int = 0, below: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def folders(root: Path, classes: int = 3, train: int = 4, test: int = 2, side: int = 40) -> Path:
    """`train/CLASS/photo.JPEG` and `val/CLASS/photo.JPEG`; each class has a colour of its own."""
    for label in range(classes):
        name = f"n{label:08d}"
        for split, count in (("train", train), ("val", test)):
            for number in range(count):
                photo = noise(side, side + 8, 3, seed=number, below=60)
                photo[..., label % 3] += 150
                save(root / split / name / f"{name}_{number}.JPEG", photo)
    return root


def cityscapes(root: Path, train: int = 3, val: int = 2, size: tuple[int, int] = (32, 64)) -> Path:
    """Two cities; the label maps hold official ids, void ones among them."""
    ids = np.array([0, 7, 11, 17, 21, 23, 24, 26, 33], dtype=np.uint8)
    for split, count, city in (("train", train, "aachen"), ("val", val, "lindau")):
        for number in range(count):
            stem = f"{city}_{number:06d}_000019"
            save(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", noise(*size, 3, seed=number))
            labels = ids[noise(*size, seed=number, below=len(ids))]
            save(root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png", labels)
    return root


def camvid(root: Path, counts: tuple[int, int, int] = (3, 2, 2), size: tuple[int, int] = (24, 32)) -> Path:
    for split, count in zip(("train", "val", "test"), counts, strict=True):
        for number in range(count):
            name = f"0001TP_{number:06d}.png"
            save(root / split / name, noise(*size, 3, seed=number))
            save(root / f"{split}annot" / name, noise(*size, seed=number, below=12))
    return root


def cifar10(root: Path, each: int = 8) -> Path:
    """The official six files, with few records; the first byte of each is its class."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
        records = noise(each, 3073, seed=number)
        records[:, 0] = (np.arange(each) + number * each) % 10
        records.tofile(folder / name)
    return root
