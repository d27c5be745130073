"""`ImageData`: a data set, whatever its layout on disk, and the threads that decode it.

A split is one of `Photos` (files with a class each), `Scenes` (files with a label map each), `CachedScenes` (scenes
that are decoded once), and `Packed` (images of one size in memory, as bytes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ecc.errors import BadTask
from ecc.zoo.data.images import Size, load_scene, photo_size

HOLD_OUT = 10
"""Every tenth training item is held out for the choices of methods."""

Item = TypeVar("Item")
Result = TypeVar("Result")


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
    """Class of each value in the maps, see `label_table`."""

    def __len__(self) -> int:
        return len(self.photos)


@dataclass(frozen=True, eq=False)
class Packed:
    """Images of one size in memory."""

    images: Tensor
    """uint8 `(count, 3, height, width)`."""
    labels: Tensor
    """Classes, int64 `(count,)`; or uint8 `(count, height, width)` with `VOID` for pixels without a class."""
    _copies: dict[torch.device, Packed] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4 or len(self.images) != len(self.labels):
            raise BadTask(
                f"packed images are {self.images.dtype} of shape {tuple(self.images.shape)} with {len(self.labels)} "
                "labels; give uint8 (count, 3, height, width) and as many labels."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def on(self, device: torch.device) -> Packed:
        """The same on a device; the copy is kept."""
        device = torch.empty(0, device=device).device  # with its index
        if self.images.device == device:
            return self
        if device not in self._copies:
            self._copies[device] = Packed(self.images.to(device), self.labels.to(device))
        return self._copies[device]


class CachedScenes:
    """Scenes of one size that are decoded when first needed, and kept in memory."""

    def __init__(self, scenes: Scenes, size: Size) -> None:
        self.scenes, self.size = scenes, size
        for path in (*scenes.photos, *scenes.maps):
            width, height = photo_size(path)
            if (height, width) != size:
                raise BadTask(
                    f"{path} has {width}x{height} pixels; all images of this data set need {size[1]}x{size[0]}."
                )

    def __len__(self) -> int:
        return len(self.scenes)

    def on(self, device: torch.device) -> Packed:
        """The decoded scenes on a device; the copy is kept."""
        return self.packed.on(device)

    @cached_property
    def packed(self) -> Packed:
        """The decoded scenes."""
        scenes = self.scenes
        try:
            images = torch.empty((len(scenes), 3, *self.size), dtype=torch.uint8)
            labels = torch.empty((len(scenes), *self.size), dtype=torch.uint8)
        except RuntimeError:  # torch's allocator
            raise BadTask(
                f"{len(scenes)} scenes of {self.size[1]}x{self.size[0]} pixels do not fit into memory; shrink them."
            ) from None

        def decode(row: int) -> None:
            photo, classes = load_scene(scenes.photos[row], scenes.maps[row], scenes.table, None)
            images[row] = torch.from_numpy(photo.copy()).permute(2, 0, 1)
            labels[row] = torch.from_numpy(classes.copy())

        map_in_threads(decode, range(len(scenes)))
        return Packed(images, labels)


Split = Photos | Scenes | Packed | CachedScenes


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set."""

    name: str
    """Short name for tables and file names."""
    classes: tuple[str, ...]
    train: Split
    held_out: Split
    """For the choices of methods."""
    test: Split
    """For the reported score."""
    size: Size | None = None
    """Image size for networks that classify pixels, if the data set defines one."""
    batch_size: int | None = None
    """Training batch size for such networks, if the data set defines one."""
    published: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By number of outputs of published weights: the outputs that are our classes."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out", "test"):
            if len(getattr(self, name)) == 0:
                raise BadTask(f"data set {self.name!r} has no {name} items; training and evaluation need some.")

    @property
    def has_pixels(self) -> bool:
        """Whether every pixel has a label, rather than the whole image."""
        if isinstance(self.train, Packed):
            return self.train.labels.dim() > 1
        return isinstance(self.train, Scenes | CachedScenes)


def every_tenth(count: int) -> tuple[list[int], list[int]]:
    """Indices that are kept, and every tenth, held out; at least one of each if there are two."""
    held = list(range(0, count, HOLD_OUT)) if count > 1 else []
    chosen = set(held)
    return [index for index in range(count) if index not in chosen], held


# ---------------------------------------------------------------- threads

# Pillow releases Python's lock while it decodes and resizes, so threads use all cores and need no copies.


def cores() -> int:
    """Cores of this process; with several training processes on the machine, its share of them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return max(1, count // max(1, int(processes) if processes.isdecimal() else 1))


@cache
def thread_pool() -> ThreadPoolExecutor:
    """The decoding threads of this process."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="ecc-data")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=thread_pool.cache_clear)  # threads do not survive a fork


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results in the order of the items; the first error is raised."""
    return list(thread_pool().map(function, items))
