"""Batches of a split: an epoch in random order and form for training, or all items as they are for judging.

An epoch is a sequence: a batch can be asked for by its number, so that a resumed run decodes nothing twice and each of
several processes decodes its own batches alone. While one batch is used, the next ones are decoded in threads. What a
batch holds follows from the seed of the epoch and its number, whatever the number of threads.

Bytes go to the device, and become numbers there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, lru_cache
from random import Random
from typing import Any, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.training.rng import derived_seed
from ecc.zoo.data.images import MAX_ZOOM, Array, Size, centre_photo, random_photo, random_scene, whole_scene
from ecc.zoo.data.sets import Kept, Packed, Photos, Scenes, Split
from ecc.zoo.data.workers import pool

AHEAD = 2  # batches that are decoded while one is used
SHIFT = 4 / 32  # of a small image, in either direction and axis; He et al. (2016) pad 32 pixels by 4

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Form:
    """What a network wants its images like."""

    size: Size
    mean: tuple[float, float, float]
    """Of colours from 0 to 1."""
    std: tuple[float, float, float]

    def normalised(self, images: Tensor) -> Tensor:
        """Floats from bytes `(batch, 3, height, width)`."""
        mean, std = (_colour(value, images.device) for value in (self.mean, self.std))
        return (images.float() / 255 - mean) / std

    def with_widths(self, images: Tensor) -> Tensor:
        """The same at the network's size, from floats of any."""
        if images.shape[-2:] == self.size:
            return images
        return F.interpolate(images, self.size, mode="bilinear", antialias=True, align_corners=False)

    def resized_labels(self, labels: Tensor) -> Tensor:
        """Classes of pixels at the network's size; those of whole images as they are."""
        if labels.dim() == 1 or labels.shape[-2:] == self.size:
            return labels.long()
        return F.interpolate(labels[:, None].float(), self.size, mode="nearest-exact")[:, 0].long()


@lru_cache(maxsize=64)
def _colour(value: tuple[float, float, float], device: torch.device) -> Tensor:
    """One number for each colour, on the device; it is copied there once."""
    return torch.tensor(value).view(1, 3, 1, 1).to(device)


def epoch_of(split: Split, form: Form, batch: int, device: torch.device | str, epoch: int) -> Sequence[Batch]:
    """The full batches of one epoch, shuffled and augmented.

    The number of the epoch decides, and runs of different seeds have different epochs (`BatchStream`). A set that is
    smaller than a batch is one batch.
    """
    seed = derived_seed(0, f"data of epoch {epoch}")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))
    chunks = list(order.split(batch))
    if len(chunks) > 1 and len(chunks[-1]) < batch:
        chunks.pop()
    plan = _Plan(split, form, chunks, seed, torch.device(device))
    return _Drawn(plan) if isinstance(split, Packed | Kept) else _Decoded(plan)


def in_order(split: Split, form: Form, batch: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
    """All items as they are, the last batch as long as it comes."""
    plan = _Plan(split, form, list(torch.arange(len(split)).split(batch)), None, torch.device(device))
    batches: Sequence[Batch] = _Drawn(plan) if isinstance(split, Packed | Kept) else _Decoded(plan)
    return iter(batches)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which items make each batch, and how."""

    split: Split
    form: Form
    chunks: list[Tensor]
    seed: int | None
    """None for items as they are."""
    device: torch.device


class _Batches(Sequence[Batch]):
    """A sequence of batches, each made when it is asked for."""

    is_seeded = True
    """All random numbers come from the seed of the plan; see `BatchStream`."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._plan.chunks)

    @overload
    def __getitem__(self, number: int) -> Batch: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Batch]: ...
    def __getitem__(self, number: int | slice) -> Batch | Sequence[Batch]:
        """A batch; its images are floats on the device."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        place = number + len(self) if number < 0 else number
        if not 0 <= place < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        return self._made(place)

    @abstractmethod
    def _made(self, number: int) -> Batch:
        """The batch with that number, which exists."""


# ---------------------------------------------------------------- from files


class _Decoded(_Batches):
    """Batches from files, decoded ahead in threads."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__(plan)
        self._coming: dict[int, list[Future[tuple[Array, Any]]]] = {}
        self._last: int | None = None

    def _made(self, number: int) -> Batch:
        # Of several processes each asks for every n-th batch: the next one is as far ahead as the last was behind.
        stride = 1 if self._last is None or number <= self._last else number - self._last
        wanted = [number + step * stride for step in range(AHEAD + 1)]
        for place in set(self._coming) - set(wanted):
            for future in self._coming.pop(place):
                future.cancel()
        for place in wanted:
            if place < len(self) and place not in self._coming:
                rows = self._plan.chunks[place].tolist()
                self._coming[place] = [pool().submit(_item, self._plan, row) for row in rows]
        self._last = number
        items = [future.result() for future in self._coming.pop(number)]
        images = torch.from_numpy(np.stack([image for image, _ in items]))
        labels = torch.from_numpy(np.stack([label for _, label in items]))
        device = self._plan.device
        images = _sent(images, device).permute(0, 3, 1, 2).contiguous()
        return self._plan.form.normalised(images), _sent(labels, device).long()


def _item(plan: _Plan, row: int) -> tuple[Array, Any]:
    """One item, decoded; its random numbers are its own."""
    split, size = plan.split, plan.form.size
    draw = None if plan.seed is None else Random(derived_seed(plan.seed, f"item {row}"))
    if isinstance(split, Photos):
        path = split.paths[row]
        return centre_photo(path, size) if draw is None else random_photo(path, size, draw), split.labels[row]
    assert isinstance(split, Scenes), "what is packed is not decoded item by item"
    photo, labels = split.photos[row], split.maps[row]
    if draw is None:
        return whole_scene(photo, labels, split.table, size)
    return random_scene(photo, labels, split.table, size, draw)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


# ---------------------------------------------------------------- from memory


class _Drawn(_Batches):
    """Batches of images in memory, augmented on the device."""

    @cached_property
    def _packed(self) -> Packed:
        assert isinstance(self._plan.split, Packed | Kept), "files are decoded"
        return self._plan.split.on(self._plan.device)

    @cached_property
    def _rows(self) -> tuple[Tensor, ...]:
        """The items of each batch, which are sent to the device at once."""
        chunks = self._plan.chunks
        rows = _sent(torch.cat(chunks), self._packed.images.device)
        found: tuple[Tensor, ...] = rows.split([len(chunk) for chunk in chunks])
        return found

    def _made(self, number: int) -> Batch:
        plan, packed, rows = self._plan, self._packed, self._rows[number]
        images, labels = plan.form.normalised(packed.images[rows]), packed.labels[rows]
        if plan.seed is not None:
            draw = torch.Generator().manual_seed(derived_seed(plan.seed, f"batch {number}"))
            where = _random_places(images.shape, labels.dim() > 1, draw).to(images.device, non_blocking=True)
            images = _sampled(images, where, "bilinear", "zeros")
            if labels.dim() > 1:
                labels = _sampled(labels[:, None].float(), where, "nearest", "border")[:, 0]
        return plan.form.with_widths(images), plan.form.resized_labels(labels)


def _random_places(shape: torch.Size, zooms: bool, draw: torch.Generator) -> Tensor:
    """For each image, the affine map `(count, 2, 3)` from where it goes to where it is taken, in units of half a side.

    Scenes are taken at up to `MAX_ZOOM`; other images are moved by whole pixels, and what comes in is the mean colour.
    """
    count, _, height, width = shape
    uniform = torch.rand((count, 4), generator=draw)
    zoom = 1 + (MAX_ZOOM - 1) * uniform[:, :1] if zooms else torch.ones(count, 1)
    sides = torch.tensor([width, height])
    most = (SHIFT * sides).round()
    pixels = (uniform[:, 1:3] * (2 * most + 1)).floor() - most
    shift = (2 * uniform[:, 1:3] - 1) * (1 - 1 / zoom) if zooms else 2 * pixels / sides
    mirror = torch.where(uniform[:, 3] < 0.5, -1.0, 1.0)
    places = torch.zeros(count, 2, 3)
    places[:, 0, 0], places[:, 1, 1] = mirror / zoom[:, 0], 1 / zoom[:, 0]
    places[:, :, 2] = shift
    return places


def _sampled(images: Tensor, places: Tensor, how: str, outside: str) -> Tensor:
    grid = F.affine_grid(places, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode=how, padding_mode=outside, align_corners=False)
