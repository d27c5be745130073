"""ImageNet, and any tree with one folder a class: `train/CLASS/photo`, `val/CLASS/photo`."""

from __future__ import annotations

from pathlib import Path

from ecc.errors import BadTask
from ecc.zoo.data.images import SUFFIXES
from ecc.zoo.data.sets import ImageData, Photos, every_tenth

TEST_FOLDERS = ("val", "test")
"""Where the reported number comes from: the first of these that is there."""


def is_folders(root: Path) -> bool:
    """Whether there is a folder `train` with folders in it."""
    return (root / "train").is_dir() and any(child.is_dir() for child in (root / "train").iterdir())


def read_folders(root: Path) -> ImageData:
    """Classes are the folders of `train` in alphabetical order, which for ImageNet is the order of published weights.

    Every tenth training photo of each class is held out.

    Raises:
        BadTask: If a folder is missing or empty, or `val` has other classes than `train`.
    """
    classes = tuple(sorted(child.name for child in (root / "train").iterdir() if child.is_dir()))
    test_folder = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    if test_folder is None:
        raise BadTask(f"{root} has the folder train, but neither val nor test; put the photos to judge by into val.")
    _check_classes(test_folder, classes)
    train, held_out, test = _Chosen(), _Chosen(), _Chosen()
    for label, name in enumerate(classes):
        photos = _photos(root / "train" / name)
        kept, held = every_tenth(len(photos))
        train.add(label, [photos[row] for row in kept])
        held_out.add(label, [photos[row] for row in held])
        test.add(label, _photos(test_folder / name))
    name = "".join(letter if letter.isprintable() else "_" for letter in root.resolve().name)  # terminals obey others
    return ImageData(name, classes, train.photos(), held_out.photos(), test.photos())


class _Chosen:
    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.labels: list[int] = []

    def add(self, label: int, paths: list[Path]) -> None:
        self.paths += paths
        self.labels += [label] * len(paths)

    def photos(self) -> Photos:
        return Photos(tuple(self.paths), tuple(self.labels))


def _check_classes(folder: Path, classes: tuple[str, ...]) -> None:
    there = {child.name for child in folder.iterdir() if child.is_dir()}
    if not there:
        raise BadTask(
            f"{folder} has no class folders; sort its photos into folders named as those in train, such as "
            f"{folder / classes[0]}."
        )
    for names, what in ((set(classes) - there, "lacks"), (there - set(classes), "has, beyond those of train,")):
        if names:
            raise BadTask(f"{folder} {what} the class folder {min(names)!r}; both must have the same classes.")


def _photos(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not found:
        raise BadTask(f"{folder} holds no photos ({', '.join(sorted(SUFFIXES))}); fill or remove the folder.")
    return found
