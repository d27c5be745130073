from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ecc.energy import counted_cost
from ecc.graph import trace_channels
from ecc.zoo.resnet_cifar import resnet20

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("resnet56_table")


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("resnet56_methods")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("resnet56_training")


def cells(method: str, *scores: float, met: bool = True) -> list[dict[str, Any]]:
    facts = {"macs_share": 0.47, "params": 400_000, "commit": "abc", "share_is_met": met}
    return [{"method": method, "seed": seed, "accuracy": score / 100, **facts} for seed, score in enumerate(scores)]


def record(found: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"share": 0.47, "lr": 0.04, "batch": 256, "epochs": 60, "distill": 0.5}
    settings |= {"tune_epochs": 0, "scratch": False}
    return {"cells": found, "headline": "ecc", "settings": settings, "environment": {"device": "NVIDIA H200"}}


def test_paired_differences_have_the_interval_of_students_t(table: ModuleType) -> None:
    found = table.paired_difference({0: 93.0, 1: 93.2, 2: 93.1}, {0: 92.8, 1: 92.9, 2: 93.0, 3: 1.0})
    assert found.pairs == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
    assert found.side == "undecided"
    assert table.paired_difference({0: 93.0, 1: 93.1}, {0: 92.0, 1: 92.1 + 1e-9}).side == "ahead"
    assert table.paired_difference({0: 93.0, 1: 93.1}, {0: 94.0, 1: 94.1 + 1e-9}).side == "behind"
    assert table.paired_difference({0: 93.0}, {0: 92.0}).side == "undecided"  # one seed shows nothing
    assert table.paired_difference({0: 93.0}, {1: 92.0}) is None


def test_goals_are_judged_by_the_cells(table: ModuleType) -> None:
    found = [
        *cells("ecc", 93.0, 93.1, 93.2),
        *cells("uniform", 92.6, 92.7, 92.8),
        *cells("tp_magnitude", 92.3, 92.7, 92.5),
        *cells("dense", 93.3, 93.4, 93.5),
        *cells("dense_distilled", 93.1, 93.2, 93.3),
        *cells("tp_taylor", 99.0, 99.0, 99.0, met=False),  # another share of the MACs does not count
        *cells("ecc_widths", 99.0, 99.0, 99.0),  # a variant is no baseline
    ]
    lead, dense, distilled = table.goals(found, "ecc")
    assert "+0.40 (± 0.00)" in lead
    assert lead.endswith("met") and "missed" not in lead  # noqa: PT018
    assert "-0.30" in dense and dense.endswith("missed")  # noqa: PT018
    assert "-0.10" in distilled and distilled.endswith("met")  # noqa: PT018


def test_the_section_shows_every_method_and_is_empty_without_the_file(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"method": "tp_taylor", "seed": 1, "error": "RuntimeError: no", "commit": "abc", "share_is_met": False}
    found = [*cells("ecc", 93.0, 93.1), *cells("uniform", 92.0, 92.1), failed]
    text = table.section_of(record(found), "source")
    assert "| ECC (default) | 93.05 | 0.07 | 2 | - | - | 47.0% | 400 k |" in text
    assert "| uniform, Taylor | 92.05 |" in text
    assert "tp_taylor (seed 1)" in text
    assert "93.77" in text
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.resnet56_section() == ""


def test_every_method_has_a_name_in_the_table(table: ModuleType, methods: ModuleType) -> None:
    assert set(methods.METHODS) == set(table.NAMES)
    assert set(methods.DEFAULT_METHODS) <= set(methods.METHODS)
    assert methods.HEADLINE in methods.DEFAULT_METHODS


def test_macs_are_those_of_the_graph_and_of_the_paper(methods: ModuleType) -> None:
    model = resnet20()
    graph = trace_channels(model, torch.randn(1, 3, 32, 32))
    assert methods.count_macs(model) == counted_cost(graph, "macs").dense == 40_551_040


def test_uniform_widths_use_up_the_macs(methods: ModuleType) -> None:
    graph = trace_channels(resnet20(), torch.randn(1, 3, 32, 32))
    cost = counted_cost(graph, "macs")
    full = {group.name: group.width for group in graph.groups}
    least = {group.name: 1 if group.frozen is None else group.width for group in graph.groups}
    for share in (0.8, 0.47, 0.3):
        limit = share * cost.dense
        widths = methods.match_widths(full, least, lambda some: float(cost.value(graph.widths(some))), limit)
        macs = float(cost.value(graph.widths(widths)))
        assert limit * 0.985 <= macs <= limit  # a channel of ResNet-20 is up to 1 % of it
        ratios = [widths[group.name] / group.width for group in graph.prunable]
        assert max(ratios) - min(ratios) <= 1 / 8


def test_crops_are_shifted_and_flipped_images(training: ModuleType) -> None:
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    padded = training.padded(images)
    rows = torch.tensor([[2, 4, 4, 0], [1, 4, 4, 1], [0, 0, 8, 0]])
    found = training.crops(padded, rows)
    whole = training.normalised(images.permute(0, 2, 3, 1))
    torch.testing.assert_close(found[0], whole[2])
    torch.testing.assert_close(found[1], whole[1].flip(-1))
    torch.testing.assert_close(found[2][:, 4:, :28], whole[0][:, :28, 4:])
    assert torch.equal(training.augmentation(50, 3, 1), training.augmentation(50, 3, 1))
    assert not torch.equal(training.augmentation(50, 3, 1), training.augmentation(50, 3, 2))


@pytest.mark.parametrize(
    "method",
    [
        "ecc",
        "uniform",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("dense", "ecc_early_floor", "greedy_taylor")),
    ],
)
def test_a_cell_uses_all_batches_and_meets_the_share(methods: ModuleType, training: ModuleType, method: str) -> None:
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (64,))
    data = {
        "train": training.Images(training.padded(images), labels),
        "score": training.Images(images.permute(0, 2, 3, 1).contiguous(), labels),
    }
    recipe = training.Recipe(epochs=3, batch=16, precision="fp32", ema=0.9)
    model = resnet20()
    logits = training.teacher_logits(model, data["train"], recipe, 0)
    share = 0.47
    cell = methods.run_cell(method, 0, recipe, share, model, data, logits, None)
    assert cell["batches"] == 12
    if method == "dense":
        assert cell["macs_share"] == 1
    else:
        assert share - 0.012 <= cell["macs_share"] <= share  # a channel of ResNet-20 is up to 1 % of it
        assert cell["macs"] == round(cell["macs_share"] * 40_551_040)
    assert 0 <= cell["accuracy"] <= 1
