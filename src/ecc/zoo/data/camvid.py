"""CamVid as the SegNet tutorial lays it out: `train`, `trainannot`, `val`, `valannot`, `test`, `testannot`.

Each photo `train/NAME.png` has its label map at `trainannot/NAME.png`, with 0 to 10 for the classes and 11 for void.
"""

from __future__ import annotations

from pathlib import Path

from ecc.errors import BadTask
from ecc.zoo.data.images import label_table, photo_size
from ecc.zoo.data.sets import ImageData, Kept, Scenes

CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
TABLE = label_table({label: label for label in range(len(CLASSES))}, {11, 255})
SPLITS = ("train", "val", "test")
BATCH = 12  # Badrinarayanan et al. (2017), whose split this is
# Of Cityscapes' 19 classes and void, in which ERFNet was published, the nearest to each of ours.
FROM_CITYSCAPES = (10, 2, 5, 0, 1, 8, 7, 4, 13, 11, 12)


def is_camvid(root: Path) -> bool:
    """Whether there are a folder of photos and one of label maps."""
    return (root / "train").is_dir() and (root / "trainannot").is_dir()


def read_camvid(root: Path) -> ImageData:
    """The three splits: val is held out for choices, and test is what is reported.

    Raises:
        BadTask: If a split is missing, a photo has no label map, or sizes differ.
    """
    scenes = [_scenes(root, split) for split in SPLITS]
    width, height = photo_size(scenes[0].photos[0])
    train, held_out, test = (Kept(split, (height, width)) for split in scenes)
    return ImageData(
        "camvid",
        CLASSES,
        train,
        held_out,
        test,
        size=(height, width),
        batch=BATCH,
        published={20: FROM_CITYSCAPES},
    )


def _scenes(root: Path, split: str) -> Scenes:
    photos = sorted((root / split).glob("*.png"))
    if not photos:
        raise BadTask(f"{root / split} holds no photo *.png; this layout needs {', '.join(SPLITS)}, each with photos.")
    maps = [root / f"{split}annot" / photo.name for photo in photos]
    for labels in maps:
        if not labels.is_file():
            raise BadTask(f"{labels} is missing, the label map of {split}/{labels.name}.")
    return Scenes(tuple(photos), tuple(maps), TABLE)
