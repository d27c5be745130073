"""`ImageData`: a data set as the rest of the zoo sees it, whatever its layout on the disk.

A split is one of three things: `Photos`, files with a class each; `Scenes`, files with a label map each; `Packed`,
images of one size that fit into memory whole, as bytes. The first two are decoded as they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ecc.errors import BadTask
from ecc.zoo.data.images import Size, photo_size, whole_scene
from ecc.zoo.data.workers import in_threads

HOLD_OUT = 10
"""Every tenth training item is held out for the choices that methods make."""


@dataclass(frozen=True)
class Photos:
    """Photos in files, each of one class."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class Scenes:
    """Photos in files, each with a label map in another file."""

    photos: tuple[Path, ...]
    maps: tuple[Path, ...]
    table: bytes
    """What the values in the maps mean, see `label_table`."""

    def __len__(self) -> int:
        return len(self.photos)


@dataclass(frozen=True, eq=False)
class Packed:
    """Images of one size in memory."""

    images: Tensor
    """uint8 `(count, 3, height, width)`."""
    labels: Tensor
    """Classes, int64 `(count,)`; or uint8 `(count, height, width)`, `VOID` where there is none."""
    _copies: dict[torch.device, Packed] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4 or len(self.images) != len(self.labels):
            raise BadTask(
                f"packed images are {self.images.dtype} of shape {tuple(self.images.shape)} with {len(self.labels)} "
                "labels; give uint8 (count, 3, height, width), and as many labels."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def on(self, device: torch.device) -> Packed:
        """The same on a device, where it stays."""
        device = torch.empty(0, device=device).device  # with its number
        if self.images.device == device:
            return self
        if device not in self._copies:
            self._copies[device] = Packed(self.images.to(device), self.labels.to(device))
        return self._copies[device]


class Kept:
    """Scenes of one size that are decoded once, when they are first needed, and kept.

    Raises:
        BadTask: If they have different sizes.
    """

    def __init__(self, scenes: Scenes, size: Size) -> None:
        self.scenes, self.size = scenes, size
        for path in (*scenes.photos, *scenes.maps):
            width, height = photo_size(path)
            if (height, width) != size:
                raise BadTask(f"{path} has {width}x{height} pixels; all images of this set have {size[1]}x{size[0]}.")

    def __len__(self) -> int:
        return len(self.scenes)

    def on(self, device: torch.device) -> Packed:
        """The decoded scenes on a device, where they stay."""
        return self.packed.on(device)

    @cached_property
    def packed(self) -> Packed:
        """The decoded scenes."""
        scenes = self.scenes
        try:
            images = torch.empty((len(scenes), 3, *self.size), dtype=torch.uint8)
            labels = torch.empty((len(scenes), *self.size), dtype=torch.uint8)
        except RuntimeError:  # of torch's allocator
            raise BadTask(
                f"{len(scenes)} scenes of {self.size[1]}x{self.size[0]} pixels do not fit into memory; shrink them."
            ) from None

        def one(row: int) -> None:
            photo, classes = whole_scene(scenes.photos[row], scenes.maps[row], scenes.table, None)
            images[row] = torch.from_numpy(photo.copy()).permute(2, 0, 1)
            labels[row] = torch.from_numpy(classes.copy())

        in_threads(one, range(len(scenes)))
        return Packed(images, labels)


Split = Photos | Scenes | Packed | Kept


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set.

    Raises:
        BadTask: If a split is empty.
    """

    name: str
    """Short, for tables and file names."""
    classes: tuple[str, ...]
    train: Split
    held_out: Split
    """For the choices a method makes."""
    test: Split
    """For the number that is reported."""
    size: Size | None = None
    """What networks for pixels are run at, if the data has a say in it."""
    batch: int | None = None
    """Items in a training batch, if the data has a say in it."""
    published: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Where our classes are among the outputs of published weights, by how many outputs those have."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out", "test"):
            if len(getattr(self, name)) == 0:
                raise BadTask(f"data set {self.name!r} has no items for {name}; training and judging need some.")

    @property
    def has_pixels(self) -> bool:
        """Whether every pixel has a label, rather than the whole image."""
        return isinstance(self.train, Scenes | Kept) or (isinstance(self.train, Packed) and self.train.labels.dim() > 1)


def every_tenth(count: int) -> tuple[list[int], list[int]]:
    """Indices that are kept, and every tenth, held out; at least one of each where there are two."""
    held = list(range(0, count, HOLD_OUT)) if count > 1 else []
    chosen = set(held)
    return [index for index in range(count) if index not in chosen], held
