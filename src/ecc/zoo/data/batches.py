"""Batches of a split: shuffled and augmented epochs for training, or all items in order for evaluation.

An epoch is a sequence with random access: a resumed run decodes nothing twice, and each of several processes decodes
only its own batches. While one batch is used, the next ones are decoded in threads. The content of a batch depends on
the seed of the epoch and on its index, not on the number of threads. Images are copied to the device as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.training.rng import derived_seed
from ecc.zoo.data.images import (
    MAX_ZOOM,
    Array,
    Size,
    load_center_crop,
    load_random_crop,
    load_random_scene,
    load_scene,
)
from ecc.zoo.data.sets import CachedScenes, Packed, Photos, Scenes, Split, thread_pool

AHEAD = 2  # batches that are decoded while one is used
MAX_SHIFT = 4 / 32  # of the side of a small image; He et al. (2016) pad 32 pixels by 4

Batch = tuple[Tensor, Tensor]
Made = TypeVar("Made")


@dataclass(frozen=True)
class ImageFormat:
    """Size and normalisation of the images of a network."""

    size: Size
    mean: tuple[float, float, float]
    """Mean of colours from 0 to 1."""
    std: tuple[float, float, float]

    def normalize(self, images: Tensor) -> Tensor:
        """Floats from bytes `(batch, 3, height, width)`."""
        mean, std = (_colour(value, images.device) for value in (self.mean, self.std))
        return (images.float() / 255 - mean) / std

    def resize(self, images: Tensor) -> Tensor:
        """Images at the network's size, from floats of any size."""
        if images.shape[-2:] == self.size:
            return images
        return F.interpolate(images, self.size, mode="bilinear", antialias=True, align_corners=False)

    def resize_labels(self, labels: Tensor) -> Tensor:
        """Classes of pixels at the network's size; classes of images unchanged."""
        if labels.dim() == 1 or labels.shape[-2:] == self.size:
            return labels.long()
        return F.interpolate(labels[:, None].float(), self.size, mode="nearest-exact")[:, 0].long()


@lru_cache(maxsize=64)
def _colour(value: tuple[float, float, float], device: torch.device) -> Tensor:
    """One number per colour, copied to the device once."""
    return torch.tensor(value).view(1, 3, 1, 1).to(device)


def epoch_batches(
    split: Split, form: ImageFormat, batch: int, device: torch.device | str, epoch: int
) -> Sequence[Batch]:
    """The full batches of one epoch, shuffled and augmented.

    The order depends on the epoch alone; runs with different seeds use different epochs (`BatchStream`). A split
    smaller than a batch is one batch.
    """
    seed = derived_seed(0, f"data of epoch {epoch}")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    chunks = list(order.split(batch))
    if len(chunks) > 1 and len(chunks[-1]) < batch:
        chunks.pop()
    return _prepared(_Plan(split, form, chunks, seed, torch.device(device)))


def evaluation_batches(
    split: Split, form: ImageFormat, batch: int, device: torch.device | str = "cpu"
) -> Iterator[Batch]:
    """All items in order, without augmentation; the last batch may be smaller."""
    chunks = list(torch.arange(len(split)).split(batch))
    return iter(_prepared(_Plan(split, form, chunks, None, torch.device(device))))


@dataclass(frozen=True, eq=False)
class _Plan:
    """The items of each batch, and how they are prepared."""

    split: Split
    form: ImageFormat
    chunks: list[Tensor]
    seed: int | None
    """Seed of the augmentation; None for no augmentation."""
    device: torch.device


class SeededBatches(Sequence[Made]):
    """Batches that are made on access by a function of their number, without global random numbers."""

    is_seeded = True
    """See `BatchStream`."""

    def __init__(self, count: int, make: Callable[[int], Made]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Made:  # type: ignore[override]  # slices are not used
        place = number + self._count if number < 0 else number
        if not 0 <= place < self._count:
            raise IndexError(f"batch {number} of {self._count}")
        return self._make(place)


def _prepared(plan: _Plan) -> SeededBatches[Batch]:
    in_memory = isinstance(plan.split, Packed | CachedScenes)
    return SeededBatches(len(plan.chunks), _FromMemory(plan) if in_memory else _FromFiles(plan))


# ---------------------------------------------------------------- from files


class _FromFiles:
    """Batches from files, decoded ahead in threads."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._coming: dict[int, list[Future[tuple[Array, Any]]]] = {}
        self._last: int | None = None

    def __call__(self, number: int) -> Batch:
        # With several processes each reads every n-th batch, so the next one is as far ahead as the last one was.
        stride = 1 if self._last is None or number <= self._last else number - self._last
        wanted = [number + step * stride for step in range(AHEAD + 1)]
        for place in set(self._coming) - set(wanted):
            for future in self._coming.pop(place):
                future.cancel()
        for place in wanted:
            if place < len(self._plan.chunks) and place not in self._coming:
                rows = self._plan.chunks[place].tolist()
                self._coming[place] = [thread_pool().submit(_item, self._plan, row) for row in rows]
        self._last = number
        items = [future.result() for future in self._coming.pop(number)]
        images = torch.from_numpy(np.stack([image for image, _ in items]))
        labels = torch.from_numpy(np.stack([label for _, label in items]))
        device = self._plan.device
        images = _send(images, device).permute(0, 3, 1, 2).contiguous()
        return self._plan.form.normalize(images), _send(labels, device).long()


def _item(plan: _Plan, row: int) -> tuple[Array, Any]:
    """One decoded item; its random numbers depend on its row alone."""
    split, size = plan.split, plan.form.size
    draw = None if plan.seed is None else Random(derived_seed(plan.seed, f"item {row}"))
    if isinstance(split, Photos):
        path = split.paths[row]
        image = load_center_crop(path, size) if draw is None else load_random_crop(path, size, draw)
        return image, split.labels[row]
    assert isinstance(split, Scenes), "packed images are not decoded item by item"
    photo, labels = split.photos[row], split.maps[row]
    if draw is None:
        return load_scene(photo, labels, split.table, size)
    return load_random_scene(photo, labels, split.table, size, draw)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


# ---------------------------------------------------------------- from memory


class _FromMemory:
    """Batches of images in memory, augmented on the device."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    @cached_property
    def _packed(self) -> Packed:
        assert isinstance(self._plan.split, Packed | CachedScenes), "files are decoded"
        return self._plan.split.on(self._plan.device)

    @cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        """The rows of each batch, copied to the device together."""
        chunks = self._plan.chunks
        rows = _send(torch.cat(chunks), self._packed.images.device)
        found: tuple[Tensor, ...] = rows.split([len(chunk) for chunk in chunks])
        return found

    def __call__(self, number: int) -> Batch:
        plan, packed, rows = self._plan, self._packed, self._rows[number]
        images, labels = plan.form.normalize(packed.images[rows]), packed.labels[rows]
        if plan.seed is not None:
            draw = torch.Generator().manual_seed(derived_seed(plan.seed, f"batch {number}"))
            where = _random_transforms(images.shape, labels.dim() > 1, draw).to(images.device, non_blocking=True)
            images = _sample(images, where, "bilinear", "zeros")
            if labels.dim() > 1:
                labels = _sample(labels[:, None].float(), where, "nearest", "border")[:, 0]
        return plan.form.resize(images), plan.form.resize_labels(labels)


def _random_transforms(shape: torch.Size, zooms: bool, draw: torch.Generator) -> Tensor:
    """Affine maps `(count, 2, 3)` from output to input coordinates, in units of half a side.

    Scenes are zoomed by up to `MAX_ZOOM`. Other images are shifted by whole pixels and filled with the mean colour.
    """
    count, _, height, width = shape
    uniform = torch.rand((count, 4), generator=draw)
    zoom = 1 + (MAX_ZOOM - 1) * uniform[:, :1] if zooms else torch.ones(count, 1)
    sides = torch.tensor([width, height])
    most = (MAX_SHIFT * sides).round()
    pixels = (uniform[:, 1:3] * (2 * most + 1)).floor() - most
    shift = (2 * uniform[:, 1:3] - 1) * (1 - 1 / zoom) if zooms else 2 * pixels / sides
    mirror = torch.where(uniform[:, 3] < 0.5, -1.0, 1.0)
    places = torch.zeros(count, 2, 3)
    places[:, 0, 0], places[:, 1, 1] = mirror / zoom[:, 0], 1 / zoom[:, 0]
    places[:, :, 2] = shift
    return places


def _sample(images: Tensor, places: Tensor, how: str, outside: str) -> Tensor:
    grid = F.affine_grid(places, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=how, padding_mode=outside, align_corners=False)
