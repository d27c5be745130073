from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ecc.errors import BadTask
from ecc.zoo.data.layouts import CLASSES, TABLE, is_cityscapes, read_cityscapes
from ecc.zoo.data.images import VOID, whole_scene
from ecc.zoo.data.sets import Scenes
from zoo.data.trees import cityscapes, noise, save


def test_photos_meet_their_labels_and_every_tenth_is_held_out(tmp_path: Path) -> None:
    data = read_cityscapes(cityscapes(tmp_path, train=12, val=3))
    assert (data.name, len(data.classes), data.has_pixels) == ("cityscapes", 19, True)
    assert (len(data.train), len(data.held_out), len(data.test)) == (10, 2, 3)
    assert (data.size, data.batch) == ((512, 1024), 4)
    for split in (data.train, data.held_out, data.test):
        assert isinstance(split, Scenes)
        for photo, labels in zip(split.photos, split.maps, strict=True):
            assert photo.name.removesuffix("_leftImg8bit.png") == labels.name.removesuffix("_gtFine_labelIds.png")


def test_ids_become_the_nineteen_classes_and_all_others_void(tmp_path: Path) -> None:
    # From the table of labels that comes with the data set.
    assert list(CLASSES.values()) == [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    photo = save(tmp_path / "photo.png", noise(2, 17, 3))
    labels = save(tmp_path / "map.png", np.arange(34, dtype=np.uint8).reshape(2, 17))
    _, found = whole_scene(photo, labels, TABLE, None)
    assert found.flatten().tolist() == [
        *[VOID] * 7, 0, 1, VOID, VOID, 2, 3, 4, VOID, VOID, VOID, 5, VOID, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        VOID, VOID, 16, 17, 18,
    ]  # fmt: skip


def test_of_the_published_outputs_all_but_void_are_ours(tmp_path: Path) -> None:
    assert read_cityscapes(cityscapes(tmp_path)).published == {20: tuple(range(19))}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    root = cityscapes(tmp_path)
    assert is_cityscapes(root)
    assert not is_cityscapes(root / "gtFine")
    next((root / "gtFine" / "val").rglob("*_labelIds.png")).unlink()
    with pytest.raises(BadTask, match=r"gtFine_labelIds\.png is missing, the label map of lindau_"):
        read_cityscapes(root)
    for photo in (root / "leftImg8bit" / "train").rglob("*.png"):
        photo.unlink()
    with pytest.raises(BadTask, match=r"leftImg8bit/train holds no photo CITY"):
        read_cityscapes(root)


def test_an_id_that_cityscapes_does_not_have_is_refused(tmp_path: Path) -> None:
    root = cityscapes(tmp_path)
    labels = min((root / "gtFine" / "train").rglob("*_labelIds.png"))
    Image.fromarray(np.full((32, 64), 40, np.uint8)).save(labels)
    data = read_cityscapes(root)
    split = data.held_out
    assert isinstance(split, Scenes)
    with pytest.raises(BadTask, match=r"labelIds\.png has the label 40"):
        whole_scene(split.photos[0], split.maps[0], split.table, None)
