"""The example task: its splits, batches, score and training."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from ecc.errors import BadTask
from ecc.zoo.digits import BATCH_SIZE, Split, accuracy, digits, load_digits_splits, shuffled_batches


def test_splits_are_disjoint_complete_stratified_and_the_same_everywhere() -> None:
    from sklearn.datasets import load_digits

    torch.manual_seed(1)
    splits = load_digits_splits()
    everything = sorted(map(tuple, load_digits().data.astype(int).tolist()))
    parts = [[tuple(row) for row in ((split.images.flatten(1) + 1) * 8).int().tolist()] for split in splits]
    # All 1,797 images differ, so equality of the sorted lists means that each image is in exactly one split.
    assert len(set(everything)) == len(everything) == 1797
    assert sorted(parts[0] + parts[1] + parts[2]) == everything
    assert [len(part) for part in parts] == [1169, 269, 359]
    for split, (least, most) in zip(splits, [(113, 119), (26, 27), (35, 37)], strict=True):
        counts = split.labels.bincount(minlength=10)
        assert least <= int(counts.min()) <= int(counts.max()) <= most
    assert splits.test.labels[:12].tolist() == [3, 7, 3, 9, 0, 8, 7, 0, 8, 0, 3, 3]
    assert float(splits.test.images.sum()) == -9043.375
    images = splits.train.images
    assert (images.dtype, images.shape[1:]) == (torch.float32, (1, 8, 8))
    assert (float(images.min()), float(images.max())) == (-1.0, 1.0)


def test_an_epoch_is_deterministic_and_shows_each_image_at_most_once() -> None:
    count = 3 * BATCH_SIZE + 5
    numbered = Split(images=torch.arange(count), labels=torch.arange(count))
    first, again, second = (list(shuffled_batches(numbered, epoch)) for epoch in (0, 0, 1))
    assert [len(labels) for _, labels in first] == [BATCH_SIZE] * 3
    assert all(torch.equal(images, labels) for images, labels in first)
    orders = [torch.cat([labels for _, labels in batches]).tolist() for batches in (first, again, second)]
    assert len(set(orders[0])) == 3 * BATCH_SIZE
    assert orders[0] == orders[1] != orders[2]


def test_the_task_is_seeded_and_can_be_pickled() -> None:
    before = torch.get_rng_state()
    one, other = digits(), digits()
    assert torch.equal(before, torch.get_rng_state())
    for left, right in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(left, right)
    twin = pickle.loads(pickle.dumps(one))  # noqa: S301 - our own bytes
    assert one.evaluate is not None
    assert twin.evaluate(twin.model) == one.evaluate(one.model)


def test_accuracy_counts_and_restores_every_mode() -> None:
    split = Split(images=torch.eye(4), labels=torch.tensor([0, 1, 2, 0]))
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.99)).train()
    model[0].eval()
    assert accuracy(split, model) == 0.75
    assert [module.training for module in model.modules()] == [True, False, True]
    failing = nn.Linear(3, 3).train()
    with pytest.raises(RuntimeError):
        accuracy(split, failing)
    assert failing.training


@pytest.mark.thorough
def test_training_reaches_95_percent() -> None:
    task = digits()
    assert task.loss is not None
    assert task.train_batches is not None
    assert task.evaluate is not None
    assert task.evaluate_held_out is not None
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        for images, labels in task.train_batches(epoch):  # type: ignore[operator] # a function of the epoch
            optimizer.zero_grad()
            task.loss(model(images), labels).backward()
            optimizer.step()
    assert task.evaluate(model) >= 0.95
    assert task.evaluate_held_out(model) >= 0.95


def test_a_missing_scikit_learn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BadTask, match=r"needs scikit-learn, which cannot be imported .*pip install scikit-learn"):
        digits()
