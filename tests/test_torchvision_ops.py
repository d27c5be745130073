"""The operators of torchvision that the coverage benchmark has in Python."""

from __future__ import annotations

import pytest
import torch
import torchvision_ops as ops
from torch import Tensor


def overlap(one: Tensor, other: Tensor) -> float:
    """Intersection over union of two boxes."""
    sides = (torch.minimum(one[2:], other[2:]) - torch.maximum(one[:2], other[:2])).clamp(min=0)
    both = sides.prod()
    return float(both / ((one[2:] - one[:2]).prod() + (other[2:] - other[:2]).prod() - both))


def test_nms_keeps_boxes_that_no_better_box_overlaps() -> None:
    generator = torch.Generator().manual_seed(0)
    low = torch.rand(40, 2, generator=generator)
    boxes = torch.cat([low, low + 0.1 + torch.rand(40, 2, generator=generator)], 1)
    scores = torch.rand(40, generator=generator)
    kept: list[int] = []
    for number in scores.argsort(descending=True).tolist():
        if all(overlap(boxes[number], boxes[other]) <= 0.3 for other in kept):
            kept.append(number)
    assert 3 < len(kept) < 40
    assert ops.nms(boxes.requires_grad_(), scores, 0.3).tolist() == kept


def sample(image: Tensor, y: float, x: float) -> Tensor:
    """Bilinear value of an image of shape C x H x W; zero more than one pixel outside."""
    height, width = image.shape[1:]
    if y < -1 or y > height or x < -1 or x > width:
        return image.new_zeros(len(image))
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    above = image[:, top, left] * (left + 1 - x) + image[:, top, right] * (x - left)
    below = image[:, bottom, left] * (left + 1 - x) + image[:, bottom, right] * (x - left)
    return above * (top + 1 - y) + below * (y - top)


@pytest.mark.parametrize("aligned", [True, False])
def test_roi_align_is_the_mean_of_bilinear_samples(aligned: bool) -> None:
    features = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    regions = torch.tensor([[0, 2, 3, 20, 11], [1, -9, 5, 14, 40], [1, 6, 6, 6.5, 6.2]], dtype=torch.float64)
    found = ops.roi_align(features, regions, 0.5, 2, 3, 2, aligned)
    assert found.shape == (3, 3, 2, 3)
    shift = 0.5 if aligned else 0.0
    for number, (image, *box) in enumerate(regions.tolist()):
        x0, y0, x1, y1 = (value * 0.5 - shift for value in box)
        width, height = (x1 - x0, y1 - y0) if aligned else (max(x1 - x0, 1.0), max(y1 - y0, 1.0))
        for row in range(2):
            for column in range(3):
                samples = [
                    sample(
                        features[int(image)],
                        y0 + height * (row + (i + 0.5) / 2) / 2,
                        x0 + width * (column + (j + 0.5) / 2) / 3,
                    )
                    for i in range(2)
                    for j in range(2)
                ]
                assert torch.allclose(found[number, :, row, column], torch.stack(samples).mean(0))
