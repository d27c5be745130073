"""Operators of torchvision in Python, for machines where its compiled operators do not load.

torchvision's wheels on PyPI need the libraries of CUDA. With the CPU build of PyTorch its operators are missing, and already
`import torchvision` fails. `define_missing_operators` then defines those that its detectors call: `nms` and `roi_align`, with
the schemas of torchvision. They are opaque operators like the compiled ones, so that a trace sees the same calls.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

DEFINED = ("nms", "roi_align")
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ROI_ALIGN = (
    "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, "
    "bool aligned) -> Tensor"
)
_libraries: list[torch.library.Library] = []  # their operators disappear with them


def define_missing_operators() -> tuple[str, ...]:
    """Make `import torchvision` work; the names of the operators that were defined in Python."""
    if _libraries:
        return DEFINED
    found = find_spec("torchvision")
    if found is None or found.origin is None or _loads_compiled(Path(found.origin).parent):
        return ()
    library = torch.library.Library("torchvision", "FRAGMENT")
    _libraries.append(library)
    for name, schema in (("nms", _NMS), ("qnms", _NMS), ("roi_align", _ROI_ALIGN)):
        library.define(name + schema)  # qnms has no kernel: torchvision only registers a shape function for it
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CPU")
    torch.library.register_fake("torchvision::roi_align", _roi_align_shape, lib=library)
    torch.library.register_autograd("torchvision::roi_align", _roi_align_backward, setup_context=_keep, lib=library)
    import torchvision.ops  # after the definitions

    for module in (torchvision.extension, sys.modules["torchvision.ops.roi_align"]):
        vars(module)["_has_ops"] = lambda: True
    return DEFINED


def _loads_compiled(folder: Path) -> bool:
    for file in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(file)
        except OSError:
            continue
        return True
    return False


def nms(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """Positions of the boxes that overlap no box with a better score by more than `limit` (intersection over union)."""
    order = scores.detach().argsort(descending=True, stable=True)
    low_x, low_y, high_x, high_y = boxes.detach()[order].numpy().T
    areas = (high_x - low_x) * (high_y - low_y)
    is_left = np.ones(len(areas), dtype=bool)
    kept = []
    for i in range(len(areas)):
        if is_left[i]:
            kept.append(i)
            width = np.minimum(high_x[i], high_x[i + 1 :]) - np.maximum(low_x[i], low_x[i + 1 :])
            height = np.minimum(high_y[i], high_y[i + 1 :]) - np.maximum(low_y[i], low_y[i + 1 :])
            both = width.clip(min=0) * height.clip(min=0)
            with np.errstate(invalid="ignore", divide="ignore"):  # boxes without an area
                is_left[i + 1 :] &= ~(both / (areas[i] + areas[i + 1 :] - both) > limit)
    return order[kept]


def roi_align(
    features: Tensor, regions: Tensor, scale: float, rows: int, columns: int, samples: int, aligned: bool
) -> Tensor:
    """Means of bilinear samples in a grid of each region (Mask R-CNN, section 3); features N x C x H x W."""
    if samples <= 0:
        raise NotImplementedError("roi_align in Python needs a sampling_ratio above 0")
    _, channels, height, width = features.shape
    shift = 0.5 if aligned else 0.0
    low, high = regions[:, 1:3] * scale - shift, regions[:, 3:5] * scale - shift
    size = high - low if aligned else (high - low).clamp(min=1)
    x, x_weights = _samples(low[:, 0], size[:, 0], columns, samples, width)
    y, y_weights = _samples(low[:, 1], size[:, 1], rows, samples, height)
    # Axes: region, row, column, samples in y, samples in x. Each output is a weighted sum of rows of a table.
    index = y[:, :, None, :, None] * width + x[:, None, :, None, :]
    index = index + regions[:, 0].long().view(-1, 1, 1, 1, 1) * (height * width)
    weights = y_weights[:, :, None, :, None] * x_weights[:, None, :, None, :]
    table = features.permute(0, 2, 3, 1).reshape(-1, channels)
    bags = (len(regions) * rows * columns, -1)
    if not len(regions):
        return features.new_zeros(0, channels, rows, columns)
    sums = F.embedding_bag(index.reshape(bags), table, mode="sum", per_sample_weights=weights.reshape(bags))
    return sums.view(len(regions), rows, columns, channels).permute(0, 3, 1, 2).contiguous()


def _samples(low: Tensor, size: Tensor, bins: int, samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions and weights along one axis, regions x bins x (2 * samples): each sample has two neighbours."""
    steps = torch.arange(bins * samples, dtype=low.dtype, device=low.device) + 0.5
    at = (low[:, None] + size[:, None] / (bins * samples) * steps).view(-1, bins, samples)
    is_inside = (at >= -1) & (at <= length)
    at = at.clamp(0, length - 1)
    first = at.long()
    part = at - first
    index = torch.cat([first, (first + 1).clamp(max=length - 1)], -1)
    weights = torch.cat([1 - part, part], -1) * is_inside.repeat(1, 1, 2) / samples
    return index, weights


def _roi_align_shape(features: Tensor, regions: Tensor, *options: Any) -> Tensor:
    return features.new_empty(len(regions), features.shape[1], *options[1:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 - torch passes three
    features, regions, *ctx.options = inputs
    ctx.save_for_backward(regions)
    ctx.shape = features.shape


def _roi_align_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (regions,) = ctx.saved_tensors
    with torch.enable_grad():  # linear in the features, so that any features do
        features = gradient.new_zeros(ctx.shape, requires_grad=True)
        found = roi_align(features, regions, *ctx.options)
    return (*torch.autograd.grad(found, features, gradient), None, None, None, None, None, None)
