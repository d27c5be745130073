"""Data sets on disk in their official layouts; `find_data` recognises a folder by its contents.

Cityscapes   leftImg8bit/SPLIT/CITY/*_leftImg8bit.png, gtFine/SPLIT/CITY/*_gtFine_labelIds.png
CamVid       train, trainannot, val, valannot, test, testannot, as in the SegNet tutorial
CIFAR-10     data_batch_1.bin to data_batch_5.bin and test_batch.bin
ImageNet     train/CLASS/*.jpg, val/CLASS/*.jpg; any other data set with one folder per class
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecc.errors import BadFile, BadTask
from ecc.io import read_bytes
from ecc.zoo.data.images import SUFFIXES, label_table, photo_size
from ecc.zoo.data.sets import CachedScenes, ImageData, Packed, Photos, Scenes, every_tenth


def find_data(root: str | Path) -> ImageData:
    """The data set in a folder."""
    root = Path(root)
    if not root.is_dir():
        raise BadTask(f"there is no data folder {str(root)!r}; check the path.")
    try:
        if (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir():
            return _cityscapes(root)
        if (root / "train").is_dir() and (root / "trainannot").is_dir():
            return _camvid(root)
        for folder in (root, root / CIFAR_FOLDER):
            if (folder / CIFAR_TEST).is_file():
                return _cifar10(folder)
        if (root / "train").is_dir() and any(child.is_dir() for child in (root / "train").iterdir()):
            return _class_folders(root)
    except OSError as error:  # a folder that may not be listed
        raise BadTask(f"cannot read {error.filename}: {error.strerror}.") from None
    raise BadTask(
        f"{root} has no known layout: leftImg8bit/ and gtFine/ (Cityscapes); train/ and trainannot/ (CamVid); "
        "data_batch_1.bin (CIFAR-10); train/CLASS/ and val/CLASS/ (ImageNet and others)."
    )


# ---------------------------------------------------------------- Cityscapes

# The 19 evaluated classes with their ids in the label maps; all other ids are void.
CITYSCAPES_CLASSES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26,
    "truck": 27, "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
_CITYSCAPES_VOID = (set(range(34)) - set(CITYSCAPES_CLASSES.values())) | {255}  # 255: license plates, whose id is -1
CITYSCAPES_TABLE = label_table(
    {value: label for label, value in enumerate(CITYSCAPES_CLASSES.values())}, _CITYSCAPES_VOID
)
_PHOTO, _MAP = "_leftImg8bit.png", "_gtFine_labelIds.png"


def _cityscapes(root: Path) -> ImageData:
    """Every tenth training photo is held out. The labels of test are not public, so val is the test split."""
    whole = _cityscapes_scenes(root, "train")
    train, held_out = (
        Scenes(tuple(whole.photos[row] for row in rows), tuple(whole.maps[row] for row in rows), CITYSCAPES_TABLE)
        for rows in every_tenth(len(whole))
    )
    return ImageData(
        "cityscapes",
        tuple(CITYSCAPES_CLASSES),
        train,
        held_out,
        _cityscapes_scenes(root, "val"),
        size=(512, 1024),  # half of the photos' size, as in the papers of ERFNet and ECC
        batch_size=4,  # Sec. 4.1 of the paper
        published={len(CITYSCAPES_CLASSES) + 1: tuple(range(len(CITYSCAPES_CLASSES)))},  # ERFNet's last output is void
    )


def _cityscapes_scenes(root: Path, split: str) -> Scenes:
    photos = sorted((root / "leftImg8bit" / split).glob(f"*/*{_PHOTO}"))
    if not photos:
        raise BadTask(f"{root / 'leftImg8bit' / split} has no photo CITY/*{_PHOTO}; unpack leftImg8bit_trainvaltest.")
    maps = [root / "gtFine" / split / photo.parent.name / (photo.name.removesuffix(_PHOTO) + _MAP) for photo in photos]
    return _scenes(photos, maps, CITYSCAPES_TABLE, "; unpack gtFine_trainvaltest")


def _scenes(photos: list[Path], maps: list[Path], table: bytes, advice: str = "") -> Scenes:
    for photo, labels in zip(photos, maps, strict=True):
        if not labels.is_file():
            raise BadTask(f"{labels} is missing, the label map of {photo.parent.name}/{photo.name}{advice}.")
    return Scenes(tuple(photos), tuple(maps), table)


# ---------------------------------------------------------------- CamVid

CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
CAMVID_TABLE = label_table({label: label for label in range(len(CAMVID_CLASSES))}, {11, 255})
CAMVID_FROM_CITYSCAPES = (10, 2, 5, 0, 1, 8, 7, 4, 13, 11, 12)
"""For each class, the nearest output of a network for Cityscapes."""


def _camvid(root: Path) -> ImageData:
    """Label maps hold 0 to 10 for the classes and 11 for void. val is held out."""
    scenes = [_camvid_scenes(root, split) for split in ("train", "val", "test")]
    width, height = photo_size(scenes[0].photos[0])
    train, held_out, test = (CachedScenes(split, (height, width)) for split in scenes)
    return ImageData(
        "camvid",
        CAMVID_CLASSES,
        train,
        held_out,
        test,
        size=(height, width),
        batch_size=12,  # Badrinarayanan et al. (2017), whose split this is
        published={20: CAMVID_FROM_CITYSCAPES},
    )


def _camvid_scenes(root: Path, split: str) -> Scenes:
    photos = sorted((root / split).glob("*.png"))
    if not photos:
        raise BadTask(f"{root / split} has no photo *.png; this layout needs photos in train, val and test.")
    return _scenes(photos, [root / f"{split}annot" / photo.name for photo in photos], CAMVID_TABLE)


# ---------------------------------------------------------------- CIFAR-10

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_FOLDER = "cifar-10-batches-bin"  # of the official archive
_SIDE = 32
_RECORD = 1 + 3 * _SIDE * _SIDE  # a byte for the class, then one colour after the other
_MAX_CIFAR_BYTES = 256 << 20  # an official file has 30 MB


def _cifar10(folder: Path) -> ImageData:
    """All images in memory; every tenth training image of each class is held out."""
    parts = [_cifar_records(folder / name) for name in CIFAR_TRAIN]
    images, labels = (torch.cat([part[which] for part in parts]) for which in (0, 1))
    kept, held = stratified(labels)
    train, held_out = (Packed(images[rows], labels[rows]) for rows in (kept, held))
    return ImageData("cifar10", CIFAR_CLASSES, train, held_out, Packed(*_cifar_records(folder / CIFAR_TEST)))


def stratified(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train with, and every tenth row of each class."""
    kept, held = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero().flatten()
        ours, theirs = every_tenth(len(rows))
        kept.append(rows[ours])
        held.append(rows[theirs])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values


def _cifar_records(path: Path) -> tuple[Tensor, Tensor]:
    try:
        data = np.frombuffer(bytearray(read_bytes(path, _MAX_CIFAR_BYTES)), np.uint8)
    except BadFile as error:
        raise BadTask(f"{str(error).rstrip('.')}; unpack cifar-10-binary.tar.gz.") from None
    if len(data) == 0 or len(data) % _RECORD:
        raise BadTask(f"{path} has {len(data)} bytes, not a multiple of {_RECORD}; download it again.")
    records = torch.from_numpy(data).view(-1, _RECORD)
    labels = records[:, 0].long()
    if int(labels.max()) >= len(CIFAR_CLASSES):
        bad = int((labels >= len(CIFAR_CLASSES)).nonzero()[0])
        raise BadTask(f"{path} has class {int(labels[bad])} at record {bad}; classes are 0 to 9. Download it again.")
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).contiguous(), labels


# ---------------------------------------------------------------- one folder per class


def _class_folders(root: Path) -> ImageData:
    """Classes in alphabetical order, which for ImageNet is the order of published weights.

    Every tenth training photo of each class is held out; the test split is val, or test if there is no val.
    """
    classes = tuple(sorted(child.name for child in (root / "train").iterdir() if child.is_dir()))
    test_folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if test_folder is None:
        raise BadTask(f"{root} has the folder train, but neither val nor test; put the test photos into val.")
    _check_class_folders(test_folder, classes)
    splits: tuple[list[tuple[Path, int]], ...] = ([], [], [])
    for label, name in enumerate(classes):
        photos = _photos(root / "train" / name)
        kept, held = every_tenth(len(photos))
        parts = ([photos[row] for row in kept], [photos[row] for row in held], _photos(test_folder / name))
        for split, part in zip(splits, parts, strict=True):
            split += [(path, label) for path in part]
    name = "".join(letter if letter.isprintable() else "_" for letter in root.resolve().name)  # no terminal codes
    train, held_out, test = (Photos(tuple(p for p, _ in split), tuple(x for _, x in split)) for split in splits)
    return ImageData(name, classes, train, held_out, test)


def _check_class_folders(folder: Path, classes: tuple[str, ...]) -> None:
    there = {child.name for child in folder.iterdir() if child.is_dir()}
    if not there:
        raise BadTask(f"{folder} has no class folders; sort its photos into folders such as {folder / classes[0]}.")
    for names, what in ((set(classes) - there, "lacks"), (there - set(classes), "has, unlike train,")):
        if names:
            raise BadTask(f"{folder} {what} the class folder {min(names)!r}; train and {folder.name} must agree.")


def _photos(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise BadTask(f"{folder} has no photos ({', '.join(sorted(SUFFIXES))}); fill or remove the folder.")
    return found
