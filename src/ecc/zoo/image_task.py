"""`image_task`: a bundled network and a data set as a task, with published weights, losses and scores."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ecc.errors import BadFile, BadTask
from ecc.io import MAX_BYTES, open_to_read
from ecc.task import MAX_BATCH_SIZE, Task
from ecc.torch_utils import device_of, eval_mode
from ecc.zoo.alexnet import AlexNet
from ecc.zoo.data.batches import ImageFormat, epoch_batches, evaluation_batches
from ecc.zoo.data.images import VOID, Size, label_counts
from ecc.zoo.data.sets import ImageData, Photos, Scenes, Split, map_in_threads
from ecc.zoo.erfnet import ERFNet
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.resnet_cifar import resnet20, resnet56

SEED = 0
MAX_SIDE = 8192  # pixels; one such image takes 0.8 GB
EVALUATION_PIXELS = 2**22  # per evaluation batch; label maps are evaluated in training batches instead
_MAX_WEIGHT_BYTES = 4 << 30  # the largest bundled network has 250 MB

Colour = tuple[float, float, float]
Log = Callable[[str], None]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Network:
    """A bundled network and its images."""

    build: Callable[[int], nn.Module]
    """Builds it for a number of classes."""
    num_classes: int
    """Number of classes in its paper, used without data."""
    size: tuple[int, int]
    """(height, width) of the images, as measured in the paper."""
    head: tuple[str, int]
    """Name of the last layer, and the output axis of its weight."""
    batch_size: int
    """Training batch size, as in the paper of ECC where it is given."""
    min_side: int = 8
    """Smallest image side in pixels."""
    side_multiple: int = 1
    """Image sides are multiples of this."""
    for_pixels: bool = False
    """Whether it classifies every pixel."""
    mean: Colour = IMAGENET_MEAN
    std: Colour = IMAGENET_STD


_HALF, _ZERO, _ONE = (0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
NETWORKS = {
    "alexnet": Network(AlexNet, 1000, (224, 224), ("classifier.6", 0), 128, min_side=63),
    "mobilenet_v1": Network(MobileNetV1, 1000, (224, 224), ("fc", 0), 128, min_side=32, mean=_HALF, std=_HALF),
    "erfnet": Network(
        ERFNet, 20, (512, 1024), ("decoder.output_conv", 1), 4, side_multiple=8, for_pixels=True, mean=_ZERO, std=_ONE
    ),
    "resnet20": Network(resnet20, 10, (32, 32), ("linear", 0), 128),
    "resnet56": Network(resnet56, 10, (32, 32), ("linear", 0), 128),
}


def image_task(
    name: str,
    data: ImageData | None = None,
    *,
    weights: str | Path | None = None,
    image_size: Size | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    log: Log = lambda _: None,
) -> Task:
    """A bundled network; with data, a complete task whose number of classes follows the data.

    The score is top-1 accuracy, or mean IoU for networks that classify pixels.

    Args:
        name: One of `NETWORKS`.
        data: Data set; None for the network alone, enough to trace and measure.
        weights: Safetensors file with published weights; seeded random weights if None.
        image_size: (height, width) of the images; by default that of the data or of the network.
        batch_size: Training batch size; by default that of the data or of the network.
        device: Device that holds data which fits into memory.
        log: Called with one-line notes for the user.
    """
    network = NETWORKS[name]
    if data is not None and data.has_pixels != network.for_pixels:
        kinds = ("pixels", "images") if network.for_pixels else ("images", "pixels")
        raise BadTask(f"{name} classifies {kinds[0]}, but the data set {data.name!r} has labels of {kinds[1]}.")
    own = data.size if data is not None and network.for_pixels else None
    size = image_size or own or network.size
    _check_size(name, size)
    form = ImageFormat(size, network.mean, network.std)
    num_classes = network.num_classes if data is None else len(data.classes)
    model = seeded(lambda: network.build(num_classes))
    if weights is not None:
        load_weights_(model, weights, head=network.head, published=None if data is None else data.published, log=log)
    example = seeded_images((3, *size))
    if data is None:
        return Task(name=name, model=model, example_input=example)
    default = (data.batch_size if network.for_pixels else None) or network.batch_size
    count = checked_batch_size(default if batch_size is None else batch_size)
    score = partial(score_split, form, num_classes if network.for_pixels else None, count)
    return Task(
        name=f"{name}-{data.name}",
        model=model,
        example_input=example,
        loss=PixelLoss(data.train, num_classes) if network.for_pixels else F.cross_entropy,
        # Partials of plain functions can be sent to worker processes; closures cannot.
        train_batches=partial(epoch_batches, data.train, form, count, str(device)),
        evaluate=partial(score, data.test),
        evaluate_held_out=partial(score, data.held_out),
    )


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network with weights from our seed, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reseed the GPUs as well
        return build()


def seeded_images(shape: tuple[int, int, int]) -> Tensor:
    """One random image, as example input."""
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(SEED))


def checked_batch_size(count: int) -> int:
    """The batch size, if it is possible."""
    if not 1 <= count <= MAX_BATCH_SIZE:
        raise BadTask(f"batch size {count} is outside 1..{MAX_BATCH_SIZE}.")
    return count


def _check_size(name: str, size: Size) -> None:
    least, multiple = NETWORKS[name].min_side, NETWORKS[name].side_multiple
    if max(size) > MAX_SIDE:
        raise BadTask(f"image size {size[0]}x{size[1]} is too large; sides may have at most {MAX_SIDE} pixels.")
    if min(size) < least or any(side % multiple for side in size):
        multiples = f" and be multiples of {multiple}" if multiple > 1 else ""
        raise BadTask(f"image size {size[0]}x{size[1]} does not fit {name}: sides must be at least {least}{multiples}.")


# ---------------------------------------------------------------- loss


class PixelLoss:
    """Cross-entropy of pixels without void ones, with class weights 1 / ln(1.02 + share of the pixels).

    The weights are those of the papers of ERFNet and ENet. Pixels are counted at the first call.
    """

    def __init__(self, split: Split, num_classes: int) -> None:
        self._split, self._num_classes = split, num_classes
        self._copies: dict[torch.device, Tensor] = {}

    @cached_property
    def weights(self) -> Tensor:
        """One weight per class."""
        counts = pixel_counts(self._split)[: self._num_classes].double()
        return (1 / torch.log(1.02 + counts / counts.sum().clamp(min=1))).float()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of scores `(batch, classes, height, width)`."""
        if outputs.device not in self._copies:  # a copy at each call would synchronise
            self._copies[outputs.device] = self.weights.to(outputs.device)
        weights = self._copies[outputs.device]
        # The mean is taken here because a batch of void pixels alone would be 0 / 0.
        total = F.cross_entropy(outputs.float(), targets, weights, ignore_index=VOID, reduction="sum")
        known = targets != VOID
        return total / weights[targets.masked_fill(~known, 0)].masked_fill(~known, 0).sum().clamp(min=1e-6)


def pixel_counts(split: Split) -> Tensor:
    """Number of pixels of a split with each of 256 labels."""
    assert not isinstance(split, Photos), "photos have one label each"
    if isinstance(split, Scenes):
        table = split.table
        return torch.from_numpy(np.sum(map_in_threads(lambda path: label_counts(path, table), split.maps), axis=0))
    counts = torch.zeros(256, dtype=torch.int64)
    for labels in split.on(torch.device("cpu")).labels:  # one by one: int64 takes eight times the memory
        counts += torch.bincount(labels.flatten().long(), minlength=256)
    return counts


# ---------------------------------------------------------------- scores

Batches = Callable[[torch.device], Iterable[tuple[Tensor, Tensor]]]
"""Yields (inputs, targets) on a device."""


def score_split(form: ImageFormat, num_classes: int | None, batch_size: int, split: Split, model: nn.Module) -> float:
    """Top-1 accuracy, or mean IoU if a number of classes is given."""
    at_once = max(1, EVALUATION_PIXELS // (form.size[0] * form.size[1])) if num_classes is None else batch_size
    batches = partial(evaluation_batches, split, form, at_once)
    if num_classes is None:
        return top_k(model, batches, (1,))[0]
    return mean_iou(confusion(model, batches, num_classes))


@torch.no_grad()
def top_k(model: nn.Module, batches: Batches, ks: Sequence[int] = (1, 5)) -> tuple[float, ...]:
    """For each k, the fraction of items whose class is among the k highest scores."""
    hits, count = [], 0
    with eval_mode(model):
        for inputs, targets in batches(device_of(model)):
            outputs = model(inputs)
            scores = getattr(outputs, "logits", outputs)  # models of transformers return a record
            best = scores.topk(min(max(ks), scores.shape[1]), dim=1).indices == targets[:, None]
            hits.append(torch.stack([best[:, :k].any(dim=1).sum() for k in ks]))  # .item() would synchronise
            count += len(targets)
    if count == 0:
        raise BadTask("the split gave no batch, so there is no score.")
    return tuple(hit / count for hit in torch.stack(hits).sum(0).tolist())


@torch.no_grad()
def confusion(model: nn.Module, batches: Batches, num_classes: int) -> Tensor:
    """Confusion matrix of pixels, true class by predicted class; void pixels are left out."""
    counts = torch.zeros(num_classes * num_classes + 1, dtype=torch.int64)
    with eval_mode(model):
        for inputs, targets in batches(device_of(model)):
            counts += _pair_counts(model(inputs).argmax(dim=1), targets, num_classes).cpu()
    *_, unknown = counts.tolist()
    if unknown:
        raise BadTask(f"{unknown} labels are neither classes, 0 to {num_classes - 1}, nor {VOID} for void.")
    return counts[:-1].view(num_classes, num_classes)


def _pair_counts(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """The confusion matrix of one batch, flat, followed by the number of unknown labels."""
    pairs, is_class = num_classes * num_classes, (targets >= 0) & (targets < num_classes)
    place = torch.where(is_class, targets * num_classes + predicted, torch.where(targets == VOID, pairs + 1, pairs))
    return torch.bincount(place.flatten(), minlength=pairs + 2)[: pairs + 1]  # indexing by masks would synchronise


def mean_iou(counts: Tensor) -> float:
    """Mean over classes of TP / (TP + FP + FN) (Sec. 4.3 of the paper).

    A class that neither occurs nor is predicted has no IoU and is left out of the mean.
    """
    counts = counts.double()
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    if not bool((union > 0).any()):
        raise BadTask("every pixel of the split is void, so there is no score.")
    return float((right[union > 0] / union[union > 0]).mean())


# ---------------------------------------------------------------- published weights


def load_weights_(
    model: nn.Module,
    path: str | Path,
    *,
    head: tuple[str, int],
    published: Mapping[int, tuple[int, ...]] | None = None,
    log: Log = lambda _: None,
) -> None:
    """Load published weights in place. If the number of classes differs, matching classes are selected, or none.

    `head` is the name of the last layer and the output axis of its weight; `published` has, by the number of outputs in
    the file, the outputs that are our classes, in our order.
    """
    weights = read_weights(path)
    layer, axis = head
    ours, theirs = model.state_dict(), weights.get(f"{layer}.bias")
    count = len(ours[f"{layer}.bias"])
    if theirs is not None and theirs.dim() == 1 and len(theirs) != count:
        rows = (published or {}).get(len(theirs))
        outputs = f"{Path(path).name} has {len(theirs)} outputs and the data {count} classes"
        if rows is None:
            log(f"{outputs}: the last layer starts from random weights; train it first (--pretrain-steps N).")
        else:
            log(f"{outputs}: the outputs of these classes are kept.")
        for name, along in ((f"{layer}.weight", axis), (f"{layer}.bias", 0)):
            if name in weights:
                whole = weights[name]
                weights[name] = ours[name] if rows is None else whole.index_select(along, torch.tensor(rows))
    needed = {name for name in ours if not name.endswith("num_batches_tracked")}
    for names, what in ((needed - set(weights), "lacks"), (set(weights) - set(ours), "has the unknown tensor")):
        if names:
            raise BadFile(f"{path} {what} {min(names)}: the weights belong to another network.")
    for name in sorted(needed):
        here, there = tuple(ours[name].shape), tuple(weights[name].shape)
        if here != there:
            raise BadFile(f"{path}: {name} has shape {there}, the network's has {here}; it is another network.")
    model.load_state_dict(weights, strict=False)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file; float16 and bfloat16 become float32."""
    path = Path(path)
    try:
        with open_to_read(path) as file:
            start, size = file.read(8), path.stat().st_size
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if size > _MAX_WEIGHT_BYTES or length > min(MAX_BYTES, size - 8):
            raise BadFile(f"{path} is truncated, too large, or not a safetensors file.")
        with safe_open(path, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}.") from None
    except (SafetensorError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the name
        raise BadFile(f"{path} is damaged: {error}. Download it again.") from None
    return {name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for name, t in found.items()}
