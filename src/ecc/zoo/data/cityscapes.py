"""Cityscapes in its official layout, with fine labels.

leftImg8bit/train/CITY/CITY_000000_000019_leftImg8bit.png
gtFine/train/CITY/CITY_000000_000019_gtFine_labelIds.png
... and val; the labels of test are not given out, so val is what is reported.
"""

from __future__ import annotations

from pathlib import Path

from ecc.errors import BadTask
from ecc.zoo.data.images import label_table
from ecc.zoo.data.sets import ImageData, Scenes, every_tenth

# The 19 classes that count, each with its id in the label maps; all other ids are void.
CLASSES = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
VOID_IDS = (set(range(34)) - set(CLASSES.values())) | {255}  # 255: the license plate, whose id is -1
TABLE = label_table({value: label for label, value in enumerate(CLASSES.values())}, VOID_IDS)
SIZE = (512, 1024)  # half of the photos', as ERFNet and the paper
BATCH = 4  # Sec. 4.1
_PHOTO, _MAP = "_leftImg8bit.png", "_gtFine_labelIds.png"


def is_cityscapes(root: Path) -> bool:
    """Whether the two folders of the official layout are there."""
    return (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir()


def read_cityscapes(root: Path) -> ImageData:
    """Training photos but every tenth, those, and the validation photos.

    Raises:
        BadTask: If a split is missing or a photo has no label map.
    """
    photos, maps = _pairs(root, "train")
    kept, held = every_tenth(len(photos))
    parts = [
        Scenes(tuple(photos[row] for row in rows), tuple(maps[row] for row in rows), TABLE) for rows in (kept, held)
    ]
    test_photos, test_maps = _pairs(root, "val")
    return ImageData(
        "cityscapes",
        tuple(CLASSES),
        parts[0],
        parts[1],
        Scenes(tuple(test_photos), tuple(test_maps), TABLE),
        size=SIZE,
        batch=BATCH,
        published={len(CLASSES) + 1: tuple(range(len(CLASSES)))},  # ERFNet's last output is void
    )


def _pairs(root: Path, split: str) -> tuple[list[Path], list[Path]]:
    photos = sorted((root / "leftImg8bit" / split).glob(f"*/*{_PHOTO}"))
    if not photos:
        raise BadTask(f"{root / 'leftImg8bit' / split} holds no photo CITY/*{_PHOTO}; unpack leftImg8bit_trainvaltest.")
    maps = [root / "gtFine" / split / photo.parent.name / (photo.name.removesuffix(_PHOTO) + _MAP) for photo in photos]
    for photo, labels in zip(photos, maps, strict=True):
        if not labels.is_file():
            raise BadTask(f"{labels} is missing, the label map of {photo.name}; unpack gtFine_trainvaltest.")
    return photos, maps
