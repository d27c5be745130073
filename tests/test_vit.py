"""The ViT benchmark: its augmentation, and its table on a made-up record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cells
import pytest
import torch

pytest.importorskip("PIL")
import vit
import vit_table as table


def test_batches_of_an_epoch_are_always_the_same_and_labels_sum_to_one() -> None:
    images = torch.randint(0, 256, (10, 3, 128, 128), dtype=torch.uint8)
    batches = vit.StrongBatches(images, torch.arange(10), 4)
    first, again, other = (list(batches(epoch)) for epoch in (0, 0, 1))
    assert len(first) == 2
    assert first[0][0].shape == (4, 3, 128, 128)
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    for _, targets in first:
        torch.testing.assert_close(targets.sum(1), torch.ones(4))


def test_batches_are_taken_in_any_order_and_are_those_of_the_epoch_in_its_order() -> None:
    photos = torch.randint(0, 256, (10, 3, 128, 128), dtype=torch.uint8)
    labels = torch.arange(10)
    batches = vit.StrongBatches(photos, labels, 4)(3)
    assert len(batches) == 2
    random = torch.Generator().manual_seed(7919 * 3 + 1)  # the draws of a whole epoch, in their order
    order, draws = torch.randperm(10, generator=random), torch.rand(10, 9, generator=random)
    mixes = torch.rand(3, 4, generator=random).tolist()
    for number in (1, 0):
        rows = order[4 * number : 4 * number + 4]
        strong = vit.augmented(photos[rows], draws[4 * number : 4 * number + 4])
        expected = vit.mixed(strong, torch.eye(10)[labels[rows]], mixes[number])
        assert all(torch.equal(one, two) for one, two in zip(batches[number], expected, strict=True))
    with pytest.raises(IndexError):
        batches[2]


def test_a_whole_crop_without_changes_is_the_image() -> None:
    images = torch.randint(0, 256, (2, 3, 128, 128), dtype=torch.uint8)
    same = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5, 0.0]])
    flipped = torch.tensor([[1.0, 0.5, 0.5, 0.5, 0.1, 0.5, 0.5, 0.5, 0.0]])
    whole = vit.normalised(images.float() / 255)
    torch.testing.assert_close(vit.augmented(images, same.expand(2, -1)), whole, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(vit.augmented(images, flipped.expand(2, -1)), whole.flip(-1), rtol=1e-3, atol=1e-3)


def test_mixed_images_have_the_shares_of_their_labels() -> None:
    images, targets = torch.stack([torch.zeros(3, 128, 128), torch.ones(3, 128, 128)]), torch.eye(2)
    for draws in ([0.1, 0.5, 0.3, 0.3], [0.9, 0.5, 0.3, 0.7]):
        found, shares = vit.mixed(images, targets, draws)
        torch.testing.assert_close(found.mean((1, 2, 3)), shares[:, 1], rtol=1e-4, atol=1e-4)
        assert 0.5 <= float(shares[1, 1]) < 1


def test_the_table_compares_with_ecc(monkeypatch: pytest.MonkeyPatch) -> None:

    def cell(method: str, seed: int, score: float, **more: Any) -> dict[str, Any]:
        facts = {"of_budget": 0.99, "removed_branches": 2, "batches": 3000, "scores": {"finetuned": score}}
        return {"method": method, "budget": "50%", "seed": seed, **facts, **more}

    record = {
        "device": "a GPU",
        "dense_accuracy": 0.85,
        "settings": {"width": 192, "blocks": 12, "measured_batch": 256, "protocol": "equal"},
        "cells": [
            *(cell("ecc", seed, 0.84 + seed / 1000) for seed in range(3)),
            *(cell("uniform", seed, 0.82 + seed / 1000) for seed in range(3)),
            {"method": "tp_taylor", "budget": "50%", "seed": 0, "error": "no"},
        ],
    }
    text = table.section_of(record, "source")
    assert "| 50% | ECC | 84.10 | 3 | - | - | 99.0% | 2.0 |" in text
    assert "| 50% | uniform | 82.10 | 3 | +2.00 (± 0.00) | ahead | 99.0% | 2.0 |" in text
    assert "Failed: tp_taylor at 50%." in text
    assert "\nHeads, MLP widths," in text
    assert "Every method has the same number of batches and" in text
    record["cells"].append(cell("tp_magnitude", 0, 0.8, batches=3016))
    text = table.section_of(record, "source")
    assert "nearly the same number of batches (3,000 to 3,016)" in text
    monkeypatch.setattr(table, "RESULTS", Path("/nowhere"))
    assert table.vit_section() == ""


def test_a_cell_is_expected_to_take_as_long_as_the_longest_one_so_far(tmp_path: Path) -> None:
    known = cells.Cells(tmp_path / "vit.json", {})
    known.add({"method": "uniform"}, {"error": "not reachable"}, 0.1)
    assert vit.longest(known) == vit.EXPECTED_SECONDS
    for method, seconds in (("ecc", 70.0), ("uniform", 50.0)):
        known.add({"method": method}, {}, seconds)
    assert vit.longest(known) == 70
