"""`find_data`: which data set a folder holds, told by its contents."""

from __future__ import annotations

from pathlib import Path

from ecc.errors import BadTask
from ecc.zoo.data.camvid import is_camvid, read_camvid
from ecc.zoo.data.cifar import is_cifar10, read_cifar10
from ecc.zoo.data.cityscapes import is_cityscapes, read_cityscapes
from ecc.zoo.data.folders import is_folders, read_folders
from ecc.zoo.data.sets import ImageData

# In this order: a tree in CamVid's layout has a folder train as well.
_LAYOUTS = (
    (is_cityscapes, read_cityscapes, "leftImg8bit/ and gtFine/ (Cityscapes)"),
    (is_camvid, read_camvid, "train/ and trainannot/ with val and test alike (CamVid)"),
    (is_cifar10, read_cifar10, "data_batch_1.bin ... test_batch.bin (CIFAR-10)"),
    (is_folders, read_folders, "train/CLASS/ and val/CLASS/ (ImageNet and any other)"),
)


def find_data(root: str | Path) -> ImageData:
    """The data set in a folder.

    Raises:
        BadTask: If it has no layout that we know, or something is missing in it.
    """
    root = Path(root)
    if not root.is_dir():
        raise BadTask(f"there is no folder {str(root)!r} of data; check the path.")
    try:
        for is_it, read, _ in _LAYOUTS:
            if is_it(root):
                return read(root)
    except OSError as error:  # a folder that may not be listed
        raise BadTask(f"cannot read {error.filename}: {error.strerror}.") from None
    known = "; ".join(text for _, _, text in _LAYOUTS)
    raise BadTask(f"{root} has none of the layouts that are known: {known}.")
