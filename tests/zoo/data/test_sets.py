from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ecc.errors import BadTask
from ecc.zoo.data.sets import ImageData, Packed, Photos, every_tenth


@pytest.mark.parametrize(("count", "held"), [(0, []), (1, []), (2, [0]), (10, [0]), (11, [0, 10]), (25, [0, 10, 20])])
def test_every_tenth_is_held_out_and_nothing_is_lost(count: int, held: list[int]) -> None:
    kept, ours = every_tenth(count)
    assert ours == held
    assert sorted(kept + ours) == list(range(count))


def test_a_set_without_items_is_refused() -> None:
    photos = Photos((Path("a"),), (0,))
    with pytest.raises(BadTask, match="has no items for held_out"):
        ImageData("x", ("a",), photos, Photos((), ()), photos)


def test_packed_images_are_bytes_with_as_many_labels() -> None:
    for images, labels in (
        (torch.zeros(2, 3, 4, 4), torch.zeros(2)),
        (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2)),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3)),
    ):
        with pytest.raises(BadTask, match="give uint8"):
            Packed(images, labels)


def test_packed_images_move_to_a_device_once() -> None:
    packed = Packed(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert packed.on(torch.device("cpu")) is packed
    elsewhere = packed.on(torch.device("meta"))
    assert elsewhere.images.device.type == elsewhere.labels.device.type == "meta"
    assert packed.on(torch.device("meta")) is elsewhere


def test_whether_pixels_have_labels_follows_from_their_shape() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    for labels, pixels in ((torch.zeros(2), False), (torch.zeros(2, 4, 4, dtype=torch.uint8), True)):
        split = Packed(images, labels)
        assert ImageData("x", ("a",), split, split, split).has_pixels is pixels
