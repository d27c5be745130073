"""`image_task`: a bundled network and a data set, made into a task that can be trained and judged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.task import MAX_BATCH_SIZE, Task
from ecc.zoo.data.batches import Form, epoch_of, in_order
from ecc.zoo.data.images import VOID, Size, label_counts
from ecc.zoo.data.sets import ImageData, Photos, Scenes, Split
from ecc.zoo.data.workers import in_threads
from ecc.zoo.metrics import confusion, mean_iou, top_k
from ecc.zoo.networks import NETWORKS
from ecc.zoo.weights import load_weights_

SEED = 0
MOST_SIDE = 8192  # pixels; such an image takes 0.8 GB
JUDGED_AT_ONCE = 2**22  # pixels of images; scenes are judged one batch of training at a time


def image_task(
    name: str,
    data: ImageData | None = None,
    *,
    weights: str | Path | None = None,
    size: Size | None = None,
    batch: int | None = None,
    device: torch.device | str = "cpu",
    tell: Callable[[str], None] = lambda _: None,
) -> Task:
    """A bundled network; with data, a whole task, whose number of outputs follows the data.

    Scores are top-1 accuracy, or mean IoU for networks that label pixels.

    Args:
        name: One of `NETWORKS`.
        data: What to train and judge with; None for the network alone, enough to trace and measure.
        weights: A safetensors file with the published names; seeded random weights if None.
        size: (height, width) of the images; by default the data's or the network's own.
        batch: Items in a training batch; by default the data's or the network's own.
        device: Where data that fits into memory is kept, as bytes.
        tell: Is told in one line what a user should know.

    Raises:
        BadTask: If network and data do not go together, or the size is too small for the network.
        BadFile: If the weights are not those of the network.
    """
    network = NETWORKS[name]
    if data is not None and data.has_pixels != network.for_pixels:
        what = ("pixels", "whole images") if network.for_pixels else ("whole images", "pixels")
        raise BadTask(f"{name} labels {what[0]}, and the data set {data.name!r} has labels of {what[1]}.")
    own = data.size if data is not None and network.for_pixels else None
    form = Form(_checked(name, size or own or network.size), network.mean, network.std)
    outputs = network.outputs if data is None else len(data.classes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reseed the GPUs as well
        model = network.build(outputs)
    if weights is not None:
        load_weights_(model, weights, head=network.head, published=None if data is None else data.published, tell=tell)
    example = torch.randn(1, 3, *form.size, generator=torch.Generator().manual_seed(SEED))
    if data is None:
        return Task(name=name, model=model, example_input=example)
    count = ((data.batch if network.for_pixels else None) or network.batch) if batch is None else batch
    if not 1 <= count <= MAX_BATCH_SIZE:
        raise BadTask(f"batch size {count} is outside 1..{MAX_BATCH_SIZE}.")
    score = partial(_score, form, outputs if network.for_pixels else None, count)
    return Task(
        name=f"{name}-{data.name}",
        model=model,
        example_input=example,
        loss=PixelLoss(data.train, outputs) if network.for_pixels else F.cross_entropy,
        # Partials of plain functions, not closures: worker processes can be given them.
        train_batches=partial(epoch_of, data.train, form, count, str(device)),
        evaluate=partial(score, data.test),
        evaluate_held_out=partial(score, data.held_out),
    )


def _checked(name: str, size: Size) -> Size:
    least, step = NETWORKS[name].least, NETWORKS[name].step
    if max(size) > MOST_SIDE:
        raise BadTask(f"images of {size[0]}x{size[1]} are too large: sides may have {MOST_SIDE} pixels at most.")
    if min(size) < least or any(side % step for side in size):
        steps = f" and be multiples of {step}" if step > 1 else ""
        raise BadTask(f"images of {size[0]}x{size[1]} do not fit {name}: sides must have at least {least}{steps}.")
    return size


def _score(form: Form, classes: int | None, batch: int, split: Split, model: nn.Module) -> float:
    at_once = max(1, JUDGED_AT_ONCE // (form.size[0] * form.size[1])) if classes is None else batch
    batches = partial(in_order, split, form, at_once)
    if classes is None:
        return top_k(model, batches, (1,))[0]
    return mean_iou(confusion(model, batches, classes))


class PixelLoss:
    """Cross-entropy of pixels without the void ones, rare classes weighing more: 1 / ln(1.02 + share of the pixels).

    The weights are those of ERFNet's paper, and ENet's before it. Pixels are counted at the first call.

    Args:
        split: Whose pixels are counted.
        classes: How many there are.
    """

    def __init__(self, split: Split, classes: int) -> None:
        self._split, self._classes = split, classes
        self._copies: dict[torch.device, Tensor] = {}

    @cached_property
    def weights(self) -> Tensor:
        """One for each class."""
        counts = pixel_counts(self._split)[: self._classes].double()
        return (1 / torch.log(1.02 + counts / counts.sum().clamp(min=1))).float()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of scores `(batch, classes, height, width)`."""
        if outputs.device not in self._copies:  # a copy at each call would wait for the device
            self._copies[outputs.device] = self.weights.to(outputs.device)
        weights = self._copies[outputs.device]
        # A batch of void pixels alone would be 0 / 0.
        total = F.cross_entropy(outputs.float(), targets, weights, ignore_index=VOID, reduction="sum")
        known = targets != VOID
        return total / weights[targets.masked_fill(~known, 0)].masked_fill(~known, 0).sum().clamp(min=1e-6)


def pixel_counts(split: Split) -> Tensor:
    """How many pixels of a split have each of 256 labels."""
    assert not isinstance(split, Photos), "photos have one label each"
    if isinstance(split, Scenes):
        table = split.table
        return torch.from_numpy(np.sum(in_threads(lambda path: label_counts(path, table), split.maps), axis=0))
    counts = torch.zeros(256, dtype=torch.int64)
    for labels in split.on(torch.device("cpu")).labels:  # one by one: as int64 all would take eight times the memory
        counts += torch.bincount(labels.flatten().long(), minlength=256)
    return counts
