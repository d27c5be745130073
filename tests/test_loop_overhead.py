"""The benchmark that compares the loop of `ecc compress` with a plain one, on tiny networks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import loop_overhead
import pytest
import torch


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["loop_overhead.py", "--quick", *words])
    loop_overhead.main()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ViT-Tiny", "ResNet-18, own file"])
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
