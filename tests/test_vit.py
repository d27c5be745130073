"""The ViT benchmark: its augmentation, whole calls with one and two processes, and its table on a made-up record."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cells
import numpy as np
import pytest
import torch

from ecc.measure.runners import inputs
from ecc.zoo.data import ImageData, Packed

pytest.importorskip("PIL")
import vit
import vit_table as table
from PIL import Image


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


def test_a_meter_accepts_the_example_input(tmp_path: Path) -> None:
    photos = [torch.randint(0, 256, (10, 3, 128, 128), dtype=torch.uint8) for _ in range(3)]
    data = ImageData("imagenette", ("a",), *(Packed(one, torch.arange(10)) for one in photos))
    options = vit.parse(
        ["--data", str(tmp_path), "--out", str(tmp_path / "x.json"), "--device", "cpu", "--width", "24"]
    )
    example = vit.make_task(options, data).example_input
    assert isinstance(example, torch.Tensor)
    assert len(example) == vit.VERIFIED_BATCH
    inputs.draw_inputs(example, "cpu")  # which refuses zeros


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


# ---------------------------------------------------------------- whole calls

OPTIONS = (
    *("--device", "cpu", "--meter", "platform:eyeriss", "--width", "24", "--blocks", "2", "--width-multiple", "1"),
    *("--steps", "12", "--dense-steps", "4", "--batch", "8", "--measured-batch", "4", "--samples", "30"),
    *("--methods", "ecc,uniform", "--budgets", "60%", "--seeds", "1"),
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with few small photos, packed as the real ones are."""
    random, packed = np.random.default_rng(0), dict[str, Any]()
    for split, count in (("train", 40), ("val", 10)):
        files = []
        for _ in range(count):
            file = io.BytesIO()
            Image.fromarray(random.integers(256, size=(128, 128, 3), dtype=np.uint8)).save(file, "JPEG", quality=30)
            files.append(file.getvalue())
        packed[f"{split}_data"] = np.frombuffer(b"".join(files), np.uint8)
        packed[f"{split}_off"] = np.cumsum([0, *map(len, files)])
        packed[f"{split}_y"] = np.arange(count) % 10
    np.savez(tmp_path / "imagenette128.npz", imagenet_index=np.arange(10), **packed)
    return tmp_path


def call(data: Path, out: Path, *more: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Cells of a call by method, and what it printed."""
    words = [sys.executable, str(Path(vit.__file__)), "--data", str(data), "--out", str(out), *OPTIONS, *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, check=True, env=environment, capture_output=True, text=True)
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["skipped"] == []
    return {cell["method"]: cell for cell in record["cells"]}, done.stdout


@pytest.mark.slow
def test_cells_of_two_processes_are_those_of_one(data: Path) -> None:
    found, printed = call(data, data / "two.json", "--processes", "2")
    assert sorted(found) == ["ecc", "uniform"]
    assert "measurements, for which processes paused" in printed
    for cell in found.values():
        assert cell["of_budget"] <= 1
        assert cell["met"]
        assert (cell["batches"], cell["processes"], cell["label"]) == (12, 2, "estimated")
        assert {"dense", "pruned", "finetuned"} <= set(cell["scores"])
        assert cells.problems({**cell, "relative_ci": 0.0}) == []
    before = (data / "two.json").stat().st_mtime_ns
    again, _ = call(data, data / "two.json", "--processes", "2")
    assert again == found
    assert (data / "two.json").stat().st_mtime_ns == before

    for suffix in (vit.DENSE, vit.ENERGY):
        shutil.copy(data / f"two{suffix}", data / f"one{suffix}")
    alone, printed = call(data, data / "one.json")
    assert "paused" not in printed
    for method, cell in alone.items():
        for name in (
            "joules",
            "of_budget",
            "of_dense",
            "scores",
            "parameters",
            "widths",
            "removed_branches",
            "batches",
        ):
            assert cell[name] == found[method][name], (method, name)
