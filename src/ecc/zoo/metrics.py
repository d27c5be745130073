"""Scores: top-k accuracy, and mean intersection over union as the paper defines it.

A split is judged batch by batch on the network's device, so that memory does not grow with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.zoo.data.images import VOID

Batches = Callable[[torch.device], Iterable[tuple[Tensor, Tensor]]]
"""Gives (inputs, targets) on a device."""


@torch.no_grad()
def top_k(model: nn.Module, batches: Batches, ks: Sequence[int] = (1, 5)) -> tuple[float, ...]:
    """For each k, the share of items whose class is among the k highest scores."""
    hits, count = [], 0
    with judged(model) as device:
        for inputs, targets in batches(device):
            scores = model(inputs)
            best = scores.topk(min(max(ks), scores.shape[1]), dim=1).indices == targets[:, None]
            hits.append(torch.stack([best[:, :k].any(dim=1).sum() for k in ks]))  # to read them would be to wait
            count += len(targets)
    if count == 0:
        raise BadTask("there is nothing to judge by: the split gave no batch.")
    return tuple(hit / count for hit in torch.stack(hits).sum(0).tolist())


@torch.no_grad()
def confusion(model: nn.Module, batches: Batches, classes: int) -> Tensor:
    """How often a pixel of each class (row) is taken for each class (column); void is left out.

    Raises:
        BadTask: If a label is neither a class nor void.
    """
    counts = torch.zeros(classes * classes + 1, dtype=torch.int64)
    with judged(model) as device:
        for inputs, targets in batches(device):
            counts += pair_counts(model(inputs).argmax(dim=1), targets, classes).cpu()
    *_, strange = counts.tolist()
    if strange:
        raise BadTask(f"{strange} labels are neither classes, 0 to {classes - 1}, nor {VOID} for void.")
    return counts[:-1].view(classes, classes)


def pair_counts(predicted: Tensor, targets: Tensor, classes: int) -> Tensor:
    """As `confusion`, of one batch and flat, and last how many labels are neither classes nor void."""
    pairs, is_class = classes * classes, (targets >= 0) & (targets < classes)
    place = torch.where(is_class, targets * classes + predicted, torch.where(targets == VOID, pairs + 1, pairs))
    return torch.bincount(place.flatten(), minlength=pairs + 2)[: pairs + 1]  # no indexing by masks: each would wait


def mean_iou(counts: Tensor) -> float:
    """TP / (TP + FP + FN) of each class over all pixels, and the mean of it (Sec. 4.3 of the paper).

    A class that is neither there nor predicted anywhere has no such number, and is left out of the mean.

    Args:
        counts: From `confusion`.
    """
    counts = counts.double()
    right = counts.diagonal()
    union = counts.sum(0) + counts.sum(1) - right
    if not bool((union > 0).any()):
        raise BadTask("there is nothing to judge by: every pixel is void.")
    return float((right[union > 0] / union[union > 0]).mean())


@contextmanager
def judged(model: nn.Module) -> Iterator[torch.device]:
    """A network in evaluation mode, and where it is; the modes are put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        for module, mode in modes:
            module.training = mode
