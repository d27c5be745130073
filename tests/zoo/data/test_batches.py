"""Batches from files and from memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ecc.task import Task
from ecc.training import BatchStream
from ecc.zoo.data import batches, find_data
from ecc.zoo.data.batches import ImageFormat, epoch_batches, evaluation_batches
from ecc.zoo.data.images import VOID, load_scene
from ecc.zoo.data.sets import ImageData, Packed, Scenes, ThreadPoolExecutor
from zoo.data import trees

PLAIN = ImageFormat((16, 16), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
LAYOUTS = {"folders": trees.folders, "cityscapes": trees.cityscapes, "camvid": trees.camvid, "cifar": trees.cifar10}


@pytest.fixture(params=LAYOUTS)
def data(request: Any, tmp_path: Path) -> ImageData:
    return find_data(LAYOUTS[request.param](tmp_path))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) and torch.equal(c, d) for (a, c), (b, d) in zip(one, other, strict=True))


def test_an_epoch_is_deterministic_and_leaves_global_random_states(data: ImageData) -> None:
    one, again, other = (list(epoch_batches(data.train, PLAIN, 2, "cpu", epoch)) for epoch in (3, 3, 4))
    assert same(one, again)
    assert not same(one, other)
    before, others = torch.get_rng_state(), (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002 - read only
    epoch = epoch_batches(data.train, PLAIN, 2, "cpu", 3)
    list(epoch)
    assert torch.equal(before, torch.get_rng_state())
    assert others == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002 - read only
    assert epoch.is_seeded, "BatchStream relies on it"  # type: ignore[attr-defined]
    torch.manual_seed(7)
    assert same(one, list(epoch_batches(data.train, PLAIN, 2, "cpu", 3)))


def test_a_batch_does_not_depend_on_threads_or_earlier_batches(
    data: ImageData, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 1 if len(data.train) < 4 else 2
    whole = list(epoch_batches(data.train, PLAIN, batch, "cpu", 0))
    with ThreadPoolExecutor(7) as threads:
        monkeypatch.setattr(batches, "thread_pool", lambda: threads)
        epoch = epoch_batches(data.train, PLAIN, batch, "cpu", 0)
        assert same([epoch[1]], [whole[1]])
        assert same([epoch[-1]], [whole[-1]])
        assert same([epoch[0]], [whole[0]])
        assert same([epoch[0], epoch[1]], whole[0:2])
        with pytest.raises(IndexError):
            epoch[len(whole)]


def test_batches_are_full_and_have_the_requested_size(data: ImageData) -> None:
    for images, labels in epoch_batches(data.train, PLAIN, 2, "cpu", 0):
        assert images.shape == (2, 3, 16, 16)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert labels.shape == ((2, 16, 16) if data.has_pixels else (2,))
        assert set(labels.unique().tolist()) <= {*range(len(data.classes)), VOID}
    assert len(epoch_batches(data.train, PLAIN, 2, "cpu", 0)) == len(data.train) // 2
    (only,) = epoch_batches(data.train, PLAIN, 1000, "cpu", 0)  # a small split is one batch
    assert len(only[0]) == len(data.train)


def test_evaluation_batches_contain_every_item_in_order(data: ImageData) -> None:
    found = list(evaluation_batches(data.train, PLAIN, 2))
    assert sum(len(labels) for _, labels in found) == len(data.train)
    assert same(found, list(evaluation_batches(data.train, PLAIN, 2)))


def test_colours_are_normalised_by_hand() -> None:
    form = ImageFormat((1, 1), (0.5, 0.5, 0.0), (0.5, 0.25, 1.0))
    found = form.normalize(torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1))
    torch.testing.assert_close(found.flatten(), torch.tensor([-1.0, 2.0, 0.2]))


# ---------------------------------------------------------------- from files


def test_only_the_next_batches_of_this_process_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, decoded = find_data(trees.folders(tmp_path, classes=2, train=30)), []
    real = batches._item
    monkeypatch.setattr(batches, "_item", lambda plan, row: (decoded.append(row), real(plan, row))[1])
    task = Task(
        name="t",
        model=torch.nn.Linear(1, 1),
        example_input=torch.zeros(1),
        loss=F.mse_loss,
        train_batches=lambda epoch: epoch_batches(data.train, PLAIN, 2, "cpu", epoch),
    )
    stream = BatchStream(task)
    stream.restore({"epoch": 0, "index": 20, "lineage": 20, "total": 20})
    next(stream)
    assert len(decoded) <= 2 * (1 + batches.AHEAD)
    decoded.clear()
    half = BatchStream(task, rank=1, world_size=2)
    for _ in range(5):
        next(half)
    # At its first batch a process does not know the stride; from then on only its own batches are decoded.
    assert len(decoded) <= 2 * (5 + batches.AHEAD) + 2 * batches.AHEAD


def test_an_unscaled_scene_equals_the_files(tmp_path: Path) -> None:
    data = find_data(trees.cityscapes(tmp_path))
    split = data.test
    assert isinstance(split, Scenes)
    form = ImageFormat((32, 64), (0.0,) * 3, (1.0,) * 3)
    images, labels = next(iter(evaluation_batches(split, form, 1)))
    photo, classes = load_scene(split.photos[0], split.maps[0], split.table, None)
    assert (images[0].permute(1, 2, 0).numpy() == (photo / np.float32(255))).all()
    assert (labels[0].numpy() == classes).all()


# ---------------------------------------------------------------- from memory


def test_small_images_are_shifted_by_whole_pixels_and_flipped() -> None:
    ramp = torch.arange(1, 33).view(1, 1, 1, 32).expand(400, 3, 32, 32).to(torch.uint8)
    split = Packed(ramp.contiguous(), torch.arange(400))
    form = ImageFormat((32, 32), (0.0,) * 3, (1 / 255,) * 3)
    ((images, _),) = epoch_batches(split, form, 400, "cpu", 0)
    row = images[:, 0, 16]
    torch.testing.assert_close(row, row.round(), atol=1e-3, rtol=0)  # no interpolation
    step = (row[:, 17] - row[:, 16]).round()
    assert set(step.tolist()) == {1.0, -1.0}
    assert 150 < int((step == 1).sum()) < 250
    shift = torch.where(step == 1, row[:, 16] - 17, row[:, 15] - 17).round()
    assert set(shift.tolist()) == set(range(-4, 5))
    assert float(images.min()) == 0  # filled from outside


def test_scenes_in_memory_are_zoomed_with_their_labels() -> None:
    classes = torch.from_numpy(np.kron(trees.noise(6, 8, below=2), np.ones((8, 8), np.uint8)))
    split = Packed((classes * 200).expand(64, 3, 48, 64).contiguous(), classes.expand(64, 48, 64).contiguous())
    form = ImageFormat((48, 64), (0.0,) * 3, (1.0,) * 3)
    ((images, labels),) = epoch_batches(split, form, 64, "cpu", 0)
    assert set(labels.unique().tolist()) == {0, 1}
    agree = ((images[:, 0] > 100 / 255).long() == labels).float().mean(dim=(1, 2))
    assert float(agree.min()) > 0.98
    assert len({tuple(one.flatten().tolist()) for one in labels}) > 50


def test_images_in_memory_are_resized_without_aliasing() -> None:
    checks = (torch.arange(64).view(1, 64) + torch.arange(64).view(64, 1)) % 2 * 255
    split = Packed(checks.expand(1, 3, 64, 64).to(torch.uint8).contiguous(), torch.zeros(1, dtype=torch.int64))
    ((images, _),) = evaluation_batches(split, PLAIN, 1)
    assert images.shape == (1, 3, 16, 16)
    assert float((images - 0.5).abs().max()) < 0.05
