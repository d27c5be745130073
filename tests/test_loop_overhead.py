"""The benchmark that compares the loop of `ecc compress` with a plain one, on tiny networks."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    script: Any = importlib.import_module("loop_overhead")
    monkeypatch.setattr(sys, "argv", ["loop_overhead.py", "--quick", *words])
    script.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-Tiny", pytest.param("ResNet-18, own file", marks=pytest.mark.thorough)])
def test_both_loops_are_timed_in_both_phases(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    words = ["--only", name, "--ratios", "2", "--steps", "1", "--warm-up", "3", "--out", str(out)]
    run(monkeypatch, *words)
    record = json.loads(out.read_text("utf-8"))
    assert record["networks"].keys() == {name}
    assert record["networks"][name]["data"] == "random images"
    rows = record["networks"][name]["rows"]
    assert [(row["cuda_graph"], row["distillation"]) for row in rows] == [(False, False), (False, True)]
    for row in rows:
        for phase in ("prune", "finetune"):
            assert len(row[phase]["ratios"]) == 2
            assert min(row[phase]["plain_ms"], row[phase]["ecc_ms"], row[phase]["ratio"]) > 0
    assert "tmp" not in json.dumps(record["environment"])
    changed = {**rows[0], "commit": "of an earlier day"}
    record["networks"][name]["rows"] = [changed, {**changed, "cuda_graph": True}]
    out.write_text(json.dumps(record), "utf-8")
    run(monkeypatch, *words, "--merge", str(out), "--commit", "0123abc")
    merged = json.loads(out.read_text("utf-8"))["networks"][name]["rows"]
    ways = [(row["cuda_graph"], row["distillation"], row["commit"]) for row in merged]
    assert ways == [(True, False, "of an earlier day"), (False, False, "0123abc"), (False, True, "0123abc")]


def test_the_plain_loop_trains_by_the_same_loss() -> None:
    networks: Any = importlib.import_module("loop_networks")
    torch.manual_seed(0)
    device = torch.device("cpu")
    batches = networks.plain_batches(networks.images_of(64, (32, 32)), 16, device)
    images, labels = next(batches)
    assert images.shape == (16, 3, 32, 32)
    assert labels.shape == (16,)
    model = networks.ResNet18(4)
    plain = networks.PlainLoop(
        model, None, batches, torch.nn.functional.cross_entropy, precision="fp32", cuda_graph=False, log_every=2
    )
    before = [parameter.clone() for parameter in model.parameters()]
    assert plain.run(2) > 0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)), "a copy"
    assert not all(torch.equal(one, other) for one, other in zip(before, plain.model.parameters(), strict=True))


def test_the_table_of_the_results_says_what_the_record_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables: Any = importlib.import_module("loop_table")
    phase = {"plain_ms": 5.0, "ecc_ms": 5.1, "ratio": 1.02}
    slow = {"plain_ms": 5.0, "ecc_ms": 6.0, "ratio": 1.2}
    row = {"cuda_graph": True, "distillation": False, "prune": slow, "finetune": phase, "commit": "abc"}
    record = {
        "goal": 1.05,
        "device": "NVIDIA H200",
        "precision": "bf16",
        "steps_of_a_block": 10,
        "log_every": 50,
        "networks": {"ResNet-18": {"data": "random images", "rows": [row]}},
    }
    text = tables.section_of(record, "`results/loop_overhead.json`")
    assert "1 of 2 ratios\nmeet it; the largest is 1.20." in text
    assert "| ResNet-18 | yes | no | 5.00 | 6.00 | **1.200** | 5.00 | 5.10 | **1.020** | abc |" in text
    assert "It is missed 1 times in prune.\n" in text
    met = {**record, "goal": 1.5}
    assert "The goal is met." in tables.section_of(met, "")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.loop_section() == "", "the benchmark has not been run there"
