from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ecc.errors import BadTask
from ecc.task import Task
from ecc.zoo.digits import (
    BATCH_SIZE,
    DigitsNet,
    DigitsSplits,
    Split,
    accuracy,
    digits,
    load_digits_splits,
    shuffled_batches,
)


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


@pytest.fixture(scope="module")
def splits() -> DigitsSplits:
    return load_digits_splits()


def test_the_network_is_small() -> None:
    model = DigitsNet().eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 42_474
    with FlopCounterMode(display=False) as counter:
        scores = model(torch.randn(1, 1, 8, 8))
    assert scores.shape == (1, 10)
    assert counter.get_total_flops() // 2 == 924_128


def test_widths_can_be_chosen() -> None:
    model = DigitsNet(widths=(4, 6, 8), num_classes=3)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert model.depthwise.groups == 4
    assert model.pointwise.out_channels == 6
    assert model.head.in_features == 8


def test_the_network_has_both_kinds_of_shortcut() -> None:
    model = DigitsNet()
    assert isinstance(model.residual.shortcut, nn.Identity)
    assert isinstance(model.strided.shortcut, nn.Sequential)


def test_splits_are_disjoint_and_complete(splits: DigitsSplits) -> None:
    from sklearn.datasets import load_digits

    everything = sorted(map(tuple, load_digits().data.astype(int).tolist()))
    parts = [[tuple(row) for row in ((split.images.flatten(1) + 1) * 8).int().tolist()] for split in splits]
    # All 1,797 images differ, so equality of the sorted lists says: each image lies in exactly one part.
    assert len(set(everything)) == len(everything) == 1797
    assert sorted(parts[0] + parts[1] + parts[2]) == everything
    assert [len(part) for part in parts] == [1169, 269, 359]


def test_splits_are_stratified(splits: DigitsSplits) -> None:
    for split, (least, most) in zip(splits, [(113, 119), (26, 27), (35, 37)], strict=True):
        counts = split.labels.bincount(minlength=10)
        assert least <= int(counts.min())
        assert int(counts.max()) <= most


def test_splits_do_not_depend_on_the_global_seed(splits: DigitsSplits) -> None:
    torch.manual_seed(1)
    for one, other in zip(splits, load_digits_splits(), strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_the_split_is_the_same_on_every_machine(splits: DigitsSplits) -> None:
    assert splits.test.labels[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]
    assert float(splits.test.images.sum()) == -9043.375


def test_images_are_scaled(splits: DigitsSplits) -> None:
    images = splits.train.images
    assert images.dtype == torch.float32
    assert images.shape[1:] == (1, 8, 8)
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)


def test_an_epoch_gives_the_same_batches_again_and_another_gives_others(splits: DigitsSplits) -> None:
    first, again, second = (
        torch.cat([labels for _, labels in shuffled_batches(splits.train, epoch)]) for epoch in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_an_epoch_shows_each_image_at_most_once_in_full_batches() -> None:
    count = 3 * BATCH_SIZE + 5
    numbered = Split(images=torch.arange(count), labels=torch.arange(count))
    batches = list(shuffled_batches(numbered, 0))
    assert [len(labels) for _, labels in batches] == [BATCH_SIZE] * 3
    assert all(torch.equal(images, labels) for images, labels in batches)
    assert len(set(torch.cat([labels for _, labels in batches]).tolist())) == 3 * BATCH_SIZE


def test_building_the_task_leaves_the_global_random_state() -> None:
    before = torch.get_rng_state()
    one, other = digits(), digits()
    assert torch.equal(before, torch.get_rng_state())
    for left, right in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_the_task_survives_pickling(task: Task) -> None:
    twin = pickle.loads(pickle.dumps(task))  # noqa: S301 - our own bytes
    assert twin.evaluate(twin.model) == task.evaluate(task.model)  # type: ignore[misc]


def test_accuracy_counts_and_puts_every_mode_back() -> None:
    split = Split(images=torch.eye(4), labels=torch.tensor([0, 1, 2, 0]))
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.99)).train()
    model[0].eval()
    assert accuracy(split, model) == 0.75
    assert [module.training for module in model.modules()] == [True, False, True]


def test_accuracy_puts_the_mode_back_after_an_error() -> None:
    model = nn.Linear(3, 3).train()
    with pytest.raises(RuntimeError):
        accuracy(Split(images=torch.eye(4), labels=torch.zeros(4)), model)
    assert model.training


def test_training_reaches_95_percent_in_seconds(task: Task) -> None:
    assert task.loss is not None
    assert task.train_batches is not None
    assert task.evaluate is not None
    assert task.evaluate_held_out is not None
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for images, labels in task.train_batches(epoch):
            optimizer.zero_grad()
            task.loss(model(images), labels).backward()
            optimizer.step()
    assert task.evaluate(model) >= 0.95
    assert task.evaluate_held_out(model) >= 0.95


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadTask) as caught:
        digits()
    assert str(caught.value).startswith("task 'digits' needs scikit-learn, which cannot be imported (")
    assert str(caught.value).endswith("); pip install scikit-learn.")
