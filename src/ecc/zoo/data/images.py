"""Photos and label maps: decoded by Pillow, cropped and flipped at random, returned as uint8 arrays.

Each photo has a `Random` of its own, so the result does not depend on the thread that decodes it. Only `random()` is
called on it, because Python guarantees its stream between versions.
"""

from __future__ import annotations

import io
import math
import stat
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecc.errors import BadTask, import_optional

Array = NDArray[np.uint8]
Size = tuple[int, int]
"""(height, width) in pixels."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of the photo."""

VOID = 255
"""Label of pixels without a class."""
_UNKNOWN = 254  # in a label table: a value that the data set does not define

CENTER = 0.875  # of the shorter side: 224 of 256
AREAS = (0.08, 1.0)  # of the photo, for a random resized crop; Szegedy et al. (2015)
ASPECTS = (3 / 4, 4 / 3)
MAX_ZOOM = 2.0  # of a scene
_MAX_PHOTO_BYTES = 256 << 20
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"})


def pillow() -> Any:
    """Pillow's module `Image`."""
    return import_optional("PIL.Image", "reading photos", package="Pillow")


# ---------------------------------------------------------------- classes: one label for a photo


def load_random_crop(path: Path, size: Size, draw: Random) -> Array:
    """A random resized crop of a photo, flipped with probability 1/2: `(height, width, 3)`."""
    photo = _opened(path)
    box = random_box(photo.size, size, draw)
    mirror = draw.random() < 0.5
    return _crop(photo, path, size, box, mirror)


def load_center_crop(path: Path, size: Size) -> Array:
    """The center crop of a photo: `(height, width, 3)`."""
    photo = _opened(path)
    return _crop(photo, path, size, _center_box(photo.size, size, CENTER), mirror=False)


def random_box(photo: tuple[int, int], size: Size, draw: Random) -> Box:
    """Box of a random resized crop: `AREAS` of the photo (width, height), with an aspect ratio changed by `ASPECTS`."""
    width, height = photo
    for _ in range(10):  # a box that does not fit is drawn again, as in the paper
        area = width * height * _between(*AREAS, draw)
        aspect = size[1] / size[0] * math.exp(_between(math.log(ASPECTS[0]), math.log(ASPECTS[1]), draw))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = (width - wide) * draw.random(), (height - high) * draw.random()
            return left, top, left + wide, top + high
    return _center_box(photo, size, 1.0)


def _center_box(photo: tuple[int, int], size: Size, share: float) -> Box:
    width, height = photo
    scale = min(width / size[1], height / size[0]) * share
    left, top = (width - size[1] * scale) / 2, (height - size[0] * scale) / 2
    return max(0.0, left), max(0.0, top), min(width, left + size[1] * scale), min(height, top + size[0] * scale)


# ---------------------------------------------------------------- scenes: one label for a pixel


def load_random_scene(photo: Path, labels: Path, table: bytes, size: Size, draw: Random) -> tuple[Array, Array]:
    """A scene, zoomed up to twice and flipped with probability 1/2, with its labels."""
    picture, classes = _opened(photo), _labels(labels, table)
    _check_pair(picture, classes, photo, labels)
    zoom = _between(1.0, MAX_ZOOM, draw)
    wide, high = picture.width / zoom, picture.height / zoom
    left, top = (picture.width - wide) * draw.random(), (picture.height - high) * draw.random()
    box, mirror = (left, top, left + wide, top + high), draw.random() < 0.5
    return _crop(picture, photo, size, box, mirror), _crop_labels(classes, size, box, mirror)


def load_scene(photo: Path, labels: Path, table: bytes, size: Size | None) -> tuple[Array, Array]:
    """A whole scene with its labels, resized; None keeps its size."""
    picture, classes = _opened(photo), _labels(labels, table)
    _check_pair(picture, classes, photo, labels)
    box, size = (0.0, 0.0, float(picture.width), float(picture.height)), size or (picture.height, picture.width)
    return _crop(picture, photo, size, box, mirror=False), _crop_labels(classes, size, box, mirror=False)


def label_counts(labels: Path, table: bytes) -> NDArray[np.int64]:
    """Number of pixels of each of 256 labels in one label map."""
    return np.bincount(np.asarray(_labels(labels, table)).ravel(), minlength=256)


def label_table(classes: dict[int, int], void: set[int]) -> bytes:
    """Class of each value in a label map, as 256 bytes."""
    table = bytearray([_UNKNOWN] * 256)
    for value, label in [*classes.items(), *((value, VOID) for value in void)]:
        table[value] = label
    return bytes(table)


# ---------------------------------------------------------------- Pillow


def photo_size(path: Path) -> tuple[int, int]:
    """(width, height), from the header of the file."""
    image = pillow()
    try:
        with _plain(path).open("rb") as file:
            width, height = image.open(file).size
    except Exception as error:  # noqa: BLE001 - untrusted bytes: Pillow's parsers raise many types
        raise _unreadable(path, error) from None
    return width, height


def _plain(path: Path) -> Path:
    """The path, if it is a plain file: a pipe would block and a device has no end."""
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):  # folders fail later with their own error
        raise OSError(0, "it is not a plain file")
    if about.st_size > _MAX_PHOTO_BYTES:
        raise OSError(0, f"it has more than {_MAX_PHOTO_BYTES >> 20} MiB")
    return path


def _opened(path: Path) -> Any:
    """The photo, read but not decoded; the file is closed."""
    image = pillow()
    try:
        return image.open(io.BytesIO(_plain(path).read_bytes()))
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None


def _crop(photo: Any, path: Path, size: Size, box: Box, mirror: bool) -> Array:
    """Decode a part of a photo at another size. Large JPEGs are decoded at a half or less."""
    image = pillow()
    (width, height), (wide, high) = photo.size, (box[2] - box[0], box[3] - box[1])
    try:
        photo.draft("RGB", (math.ceil(width * size[1] / wide), math.ceil(height * size[0] / high)))
        if photo.mode == "P":
            photo = photo.convert("RGBA")  # avoids a warning about palettes with transparency
        across, down = photo.size[0] / width, photo.size[1] / height
        box = (box[0] * across, box[1] * down, min(box[2] * across, photo.size[0]), min(box[3] * down, photo.size[1]))
        if photo.size != (size[1], size[0]) or box != (0.0, 0.0, photo.size[0], photo.size[1]):
            photo = photo.convert("RGB").resize((size[1], size[0]), image.Resampling.BILINEAR, box=box)
        found = np.asarray(photo.convert("RGB"))
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    return np.ascontiguousarray(found[:, ::-1]) if mirror else found


def _labels(path: Path, table: bytes) -> Any:
    """A label map with its values replaced by classes."""
    picture = _opened(path)
    if picture.mode not in ("L", "P"):
        raise BadTask(f"{path} is an image of mode {picture.mode}; a label map needs one byte per pixel (mode L or P).")
    try:
        values = np.asarray(picture)
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    found = np.frombuffer(table, np.uint8)[values]
    if (found == _UNKNOWN).any():
        bad = int(values[found == _UNKNOWN][0])
        raise BadTask(f"{path} has the unknown label {bad}; repair or remove the file.")
    return pillow().fromarray(found)


def _crop_labels(labels: Any, size: Size, box: Box, mirror: bool) -> Array:
    nearest = pillow().Resampling.NEAREST  # the mean of two classes would be a third class
    found = np.asarray(labels.resize((size[1], size[0]), nearest, box=box))
    return np.ascontiguousarray(found[:, ::-1]) if mirror else found


def _check_pair(picture: Any, classes: Any, photo: Path, labels: Path) -> None:
    if picture.size != classes.size:
        raise BadTask(
            f"{labels} has {classes.width}x{classes.height} pixels and its photo {photo.name} "
            f"{picture.width}x{picture.height}; the sizes must be equal."
        )


def _unreadable(path: Path, error: Exception) -> BadTask:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "BytesIO" in words:  # Pillow shows an address in memory
        words = "not an image, or in a format that Pillow does not know"
    first = (words.strip().splitlines() or [type(error).__name__])[0]
    return BadTask(f"{path} cannot be decoded ({first}); repair or remove the file.")


def _between(low: float, high: float, draw: Random) -> float:
    return low + (high - low) * draw.random()
