"""Photos and label maps in files: decoded by Pillow, cut and flipped at random, handed on as uint8 arrays.

Whoever calls gives a `Random` of its own to each photo, so what comes out depends on the photo's place alone and not
on the thread that decoded it. Only `random()` is drawn from it, whose stream Python has promised to keep.
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

from ecc.errors import BadTask

Array = NDArray[np.uint8]
Size = tuple[int, int]
"""(height, width) in pixels."""
Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of the photo."""

VOID = 255
"""The label of pixels that nobody asks for."""
_REFUSED = 254  # in a table of labels: a value that the data set does not have

CENTRE = 0.875  # share of the shorter side that is kept in the middle: 224 of 256
AREAS = (0.08, 1.0)  # of a photo, in a random with_widths crop; Szegedy et al. (2015)
ASPECTS = (3 / 4, 4 / 3)
MAX_ZOOM = 2.0  # of a scene
_MOST_PHOTO_BYTES = 256 << 20
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"})


def pillow() -> Any:
    """Pillow's module `Image`.

    Raises:
        BadTask: If it is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise BadTask(f"reading photos needs Pillow, which cannot be imported ({error}); pip install pillow.") from None
    return Image


# ---------------------------------------------------------------- classes: one label for a photo


def random_photo(path: Path, size: Size, draw: Random) -> Array:
    """A random part of a photo at the network's size, mirrored half of the time: `(height, width, 3)`."""
    photo = _opened(path)
    box = random_box(photo.size, size, draw)
    mirror = draw.random() < 0.5
    return _cut(photo, path, size, box, mirror)


def centre_photo(path: Path, size: Size) -> Array:
    """The middle of a photo at the network's size: `(height, width, 3)`."""
    photo = _opened(path)
    return _cut(photo, path, size, _centre_box(photo.size, size, CENTRE), mirror=False)


def random_box(photo: tuple[int, int], size: Size, draw: Random) -> Box:
    """Where a random with_widths crop is taken: `AREAS` of the photo, its aspect times one of `ASPECTS`.

    Args:
        photo: (width, height) of the photo.
        size: (height, width) of what it becomes.
        draw: Random numbers.
    """
    width, height = photo
    for _ in range(10):  # a box that does not fit is drawn again, as the authors do
        area = width * height * _between(*AREAS, draw)
        aspect = size[1] / size[0] * math.exp(_between(math.log(ASPECTS[0]), math.log(ASPECTS[1]), draw))
        wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if wide <= width and high <= height:
            left, top = (width - wide) * draw.random(), (height - high) * draw.random()
            return left, top, left + wide, top + high
    return _centre_box(photo, size, 1.0)


def _centre_box(photo: tuple[int, int], size: Size, share: float) -> Box:
    width, height = photo
    scale = min(width / size[1], height / size[0]) * share
    left, top = (width - size[1] * scale) / 2, (height - size[0] * scale) / 2
    return max(0.0, left), max(0.0, top), min(width, left + size[1] * scale), min(height, top + size[0] * scale)


# ---------------------------------------------------------------- scenes: one label for a pixel


def random_scene(photo: Path, labels: Path, table: bytes, size: Size, draw: Random) -> tuple[Array, Array]:
    """A scene at up to twice its scale, cut to the network's size and mirrored half of the time, labels alike."""
    picture, classes = _opened(photo), _labels(labels, table)
    _check_pair(picture, classes, photo, labels)
    zoom = _between(1.0, MAX_ZOOM, draw)
    wide, high = picture.width / zoom, picture.height / zoom
    left, top = (picture.width - wide) * draw.random(), (picture.height - high) * draw.random()
    box, mirror = (left, top, left + wide, top + high), draw.random() < 0.5
    return _cut(picture, photo, size, box, mirror), _cut_labels(classes, size, box, mirror)


def whole_scene(photo: Path, labels: Path, table: bytes, size: Size | None) -> tuple[Array, Array]:
    """A scene as it is, brought to the network's size; None leaves its own."""
    picture, classes = _opened(photo), _labels(labels, table)
    _check_pair(picture, classes, photo, labels)
    box, size = (0.0, 0.0, float(picture.width), float(picture.height)), size or (picture.height, picture.width)
    return _cut(picture, photo, size, box, mirror=False), _cut_labels(classes, size, box, mirror=False)


def label_counts(labels: Path, table: bytes) -> NDArray[np.int64]:
    """How many pixels each of 256 labels has in one label map."""
    return np.bincount(np.asarray(_labels(labels, table)).ravel(), minlength=256)


def label_table(classes: dict[int, int], void: set[int]) -> bytes:
    """For `random_scene`: what each value in a label map means.

    Args:
        classes: Value in the file -> class.
        void: Values that mean no class.
    """
    table = bytearray([_REFUSED] * 256)
    for value, label in [*classes.items(), *((value, VOID) for value in void)]:
        table[value] = label
    return bytes(table)


# ---------------------------------------------------------------- Pillow


def photo_size(path: Path) -> tuple[int, int]:
    """(width, height), from the head of the file alone."""
    image = pillow()
    try:
        with _plain(path).open("rb") as file:
            width, height = image.open(file).size
    except Exception as error:  # noqa: BLE001 - bytes of strangers: Pillow's many parsers raise whatever they meet
        raise _unreadable(path, error) from None
    return width, height


def _plain(path: Path) -> Path:
    """The same, after a look: a pipe would be waited for, and a device has no end."""
    about = path.stat()
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):  # a folder has its own error
        raise OSError(0, "it is not a plain file")
    if about.st_size > _MOST_PHOTO_BYTES:
        raise OSError(0, f"it has more than {_MOST_PHOTO_BYTES >> 20} MiB")
    return path


def _opened(path: Path) -> Any:
    """The photo, read but not decoded yet; no file stays open, however this ends."""
    image = pillow()
    try:
        return image.open(io.BytesIO(_plain(path).read_bytes()))
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None


def _cut(photo: Any, path: Path, size: Size, box: Box, mirror: bool) -> Array:
    """Decodes a part of a photo at another size. JPEGs that are far too large are decoded at a half or less."""
    image = pillow()
    (width, height), (wide, high) = photo.size, (box[2] - box[0], box[3] - box[1])
    try:
        photo.draft("RGB", (math.ceil(width * size[1] / wide), math.ceil(height * size[0] / high)))
        if photo.mode == "P":
            photo = photo.convert("RGBA")  # a palette with transparency has no other way to RGB without a warning
        across, down = photo.size[0] / width, photo.size[1] / height
        box = (box[0] * across, box[1] * down, min(box[2] * across, photo.size[0]), min(box[3] * down, photo.size[1]))
        if photo.size != (size[1], size[0]) or box != (0.0, 0.0, photo.size[0], photo.size[1]):
            photo = photo.convert("RGB").resize((size[1], size[0]), image.Resampling.BILINEAR, box=box)
        found = np.asarray(photo.convert("RGB"))
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    return np.ascontiguousarray(found[:, ::-1]) if mirror else found


def _labels(path: Path, table: bytes) -> Any:
    """A label map as an image of classes."""
    picture = _opened(path)
    if picture.mode not in ("L", "P"):
        raise BadTask(
            f"{path} is an image of mode {picture.mode}; a label map has one byte a pixel, the class (mode L or P)."
        )
    try:
        values = np.asarray(picture)
    except Exception as error:  # noqa: BLE001 - as above
        raise _unreadable(path, error) from None
    found = np.frombuffer(table, np.uint8)[values]
    if (found == _REFUSED).any():
        bad = int(values[found == _REFUSED][0])
        raise BadTask(f"{path} has the label {bad}, which this data set does not have; repair or remove the file.")
    return pillow().fromarray(found)


def _cut_labels(labels: Any, size: Size, box: Box, mirror: bool) -> Array:
    nearest = pillow().Resampling.NEAREST  # a mean of two classes is a third
    found = np.asarray(labels.resize((size[1], size[0]), nearest, box=box))
    return np.ascontiguousarray(found[:, ::-1]) if mirror else found


def _check_pair(picture: Any, classes: Any, photo: Path, labels: Path) -> None:
    if picture.size != classes.size:
        raise BadTask(
            f"{labels} has {classes.width}x{classes.height} pixels and its photo {photo.name} "
            f"{picture.width}x{picture.height}; they must be equal."
        )


def _unreadable(path: Path, error: Exception) -> BadTask:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if "BytesIO" in words:  # Pillow tells the file by its address in memory
        words = "no image, or of a format that Pillow does not know"
    first = (words.strip().splitlines() or [type(error).__name__])[0]
    return BadTask(f"{path} cannot be decoded ({first}); repair or remove the file.")


def _between(low: float, high: float, draw: Random) -> float:
    return low + (high - low) * draw.random()
