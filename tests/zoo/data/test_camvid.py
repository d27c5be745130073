from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ecc.errors import BadTask
from ecc.zoo.data.layouts import CLASSES, FROM_CITYSCAPES, is_camvid, read_camvid
from ecc.zoo.data.layouts import CLASSES as CITYSCAPES
from ecc.zoo.data.images import VOID
from ecc.zoo.data.sets import Kept
from zoo.data.trees import camvid, noise, save


def test_the_three_splits_are_kept_in_memory_as_bytes(tmp_path: Path) -> None:
    data = read_camvid(camvid(tmp_path))
    assert (data.name, len(data.classes), data.size, data.has_pixels) == ("camvid", 11, (24, 32), True)
    assert (len(data.train), len(data.held_out), len(data.test)) == (3, 2, 2)
    assert isinstance(data.test, Kept)
    packed = data.test.packed
    assert (packed.images.dtype, packed.images.shape) == (torch.uint8, (2, 3, 24, 32))
    assert (packed.images[1].permute(1, 2, 0).numpy() == noise(24, 32, 3, seed=1)).all()
    labels = noise(24, 32, seed=1, below=12)
    assert (packed.labels[1].numpy() == np.where(labels == 11, VOID, labels)).all()


def test_the_nearest_classes_of_cityscapes_are_named_alike() -> None:
    names = list(CITYSCAPES)
    pairs = {ours: names[row] for ours, row in zip(CLASSES, FROM_CITYSCAPES, strict=True)}
    assert pairs == {
        "sky": "sky",
        "building": "building",
        "pole": "pole",
        "road": "road",
        "pavement": "sidewalk",
        "tree": "vegetation",
        "sign": "traffic sign",
        "fence": "fence",
        "car": "car",
        "pedestrian": "person",
        "bicyclist": "rider",
    }


def test_what_is_missing_or_of_another_size_is_named(tmp_path: Path) -> None:
    root = camvid(tmp_path / "a")
    assert is_camvid(root)
    (root / "valannot" / "0001TP_000001.png").unlink()
    with pytest.raises(BadTask, match=r"valannot/0001TP_000001\.png is missing"):
        read_camvid(root)
    root = camvid(tmp_path / "b", counts=(2, 2, 0))
    with pytest.raises(BadTask, match=r"test holds no photo"):
        read_camvid(root)
    root = camvid(tmp_path / "c")
    for folder in ("testannot", "test"):
        save(root / folder / "0001TP_000000.png", noise(8, 8, 3))
        with pytest.raises(BadTask, match=rf"{folder}/0001TP_000000\.png has 8x8 pixels; all images of .* have 32x24"):
            read_camvid(root)
    root = camvid(tmp_path / "d")
    Image.fromarray(np.full((24, 32), 12, np.uint8)).save(root / "testannot" / "0001TP_000000.png")
    data = read_camvid(root)
    assert isinstance(data.test, Kept)
    with pytest.raises(BadTask, match=r"testannot/0001TP_000000\.png has the label 12"):
        _ = data.test.packed
