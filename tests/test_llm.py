"""The benchmark of language models: a whole call with a tiny Llama, a call that continues it, and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = (
    *("--device", "cpu", "--meter", "platform:eyeriss", "--length", "16", "--batch", "4", "--calibration-batch", "2"),
    *("--decode-batch", "2", "--prefill-batch", "2", "--cache", "16", "--held-out", "4", "--heal-steps", "3"),
    *("--shares", "0.6", "--processes", "2", "--only", "resource=decode,seed=0,method=one_shot+uniform"),
)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "zoo"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tiny_models as tiny

    tiny.write_model(tmp_path / "llama", tiny.tiny_llama(num_hidden_layers=3))
    for name, words in (("valid", 4000), ("test", 800)):
        tiny.write_text(tmp_path / f"{name}.txt", words)
    return tmp_path


def call(inputs: Path, *more: str) -> dict[str, Any]:
    out = inputs / "llm.json"
    words = [sys.executable, str(ROOT / "benchmarks" / "llm.py"), "--weights", str(inputs / "llama"), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--text", str(inputs), *OPTIONS, *more], check=True, env=environment, capture_output=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_cells_are_pruned_then_healed_and_a_later_call_adds_what_is_missing(inputs: Path) -> None:
    first = call(inputs)
    cells = {(one["method"], one["share"]): one for one in first["cells"]}
    assert sorted(cells) == [(name, share) for name in ("one_shot", "uniform") for share in (0.6, 0.8)]
    for one in cells.values():
        assert "is_partial" not in one
        assert one["healed_perplexity"] < one["perplexity"]
        assert one["of_budget"] <= 1
        assert one["of_dense"] == pytest.approx(one["of_budget"] * one["share"])
        assert {"seconds_calibrating", "seconds_searching", "seconds_measuring", "seconds_healing"} <= one.keys()
    assert "prefill" not in first["dense"]  # nothing needed it

    lost = cells["uniform", 0.8]
    lost["is_partial"] = True
    del lost["healed_perplexity"]
    first["cells"] = [one for one in first["cells"] if (one["method"], one["share"]) != ("one_shot", 0.6)]
    (inputs / "llm.json").write_text(json.dumps(first), encoding="utf-8")
    again = {(one["method"], one["share"]): one for one in call(inputs)["cells"]}
    assert sorted(again) == sorted(cells)
    for key, one in again.items():
        assert one["perplexity"] == pytest.approx(cells[key]["perplexity"], rel=1e-3)
        assert "healed_perplexity" in one

    from llm_table import section_of

    text = section_of({**first, "cells": list(again.values())}, "source")
    assert f"| 80% | one_shot | {again['one_shot', 0.8]['of_budget']:.1%} |" in text


def test_a_pruned_network_travels_as_what_differs_from_the_dense_one(inputs: Path) -> None:
    import llm_healing as healing
    import tiny_models as tiny
    from safetensors.torch import load_file

    model = tiny.tiny_llama()
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        weight[:, 3:] = 0
    key = {"method": "a", "share": 0.8}
    healing.save_pruned(inputs, key, model, dense, {"perplexity": 3.0})
    found = load_file(inputs / "a-0.8.safetensors")
    assert list(found) == ["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], weight)


def test_pruning_ends_when_the_networks_need_the_rest_of_the_time(inputs: Path) -> None:
    import argparse

    import llm
    from cells import Deadline

    options = argparse.Namespace(heal_steps=50, batch=8, length=1024, device="cuda")
    pending: list[dict[str, Any]] = []
    deadline = llm.PruningDeadline(Deadline.after(400).end, options, pending)
    empty = deadline.left
    pending += [{}] * 20
    each = llm.HEAL_CELL + llm.HEAL_TOKEN * 50 * 8 * 1024
    assert empty == pytest.approx(400 - llm.ENDING - llm.HEAL_START - each, abs=1)
    assert deadline.left == pytest.approx(empty - 20 * each, abs=1)
    options.heal_steps = 0
    assert deadline.left == pytest.approx(400, abs=1)


def test_wide_groups_get_multiples_of_8_and_heads_any_number(inputs: Path) -> None:
    import llm
    import tiny_models as tiny

    from ecc.graph import trace_channels
    from ecc.settings import CompressSettings

    model = tiny.tiny_llama(intermediate_size=512)
    graph = trace_channels(model, {"input_ids": torch.randint(1, 20, (2, 8))}, verify=False)
    context: Any = object.__new__(llm.AlignedContext)
    context.graph, context.width_multiple = graph, 1
    context.settings = CompressSettings(min_width_ratio=0.0)
    for share in (0.0, 0.3, 0.77, 1.0):
        found = context.round_widths([share * group.width for group in graph.groups])
        for group, width in zip(graph.groups, found, strict=True):
            if group.width == 512:
                assert width == max(8, int(share * 512) // 8 * 8)
            elif "attn" in group.name:
                assert width == max(1, int(share * group.width + 1e-9))


def test_all_methods_at_one_budget_and_ours_at_all_budgets_come_first(inputs: Path) -> None:
    import argparse

    import llm

    keys = llm.keys_of(argparse.Namespace(main=0.8, shares=[0.9, 0.7, 0.6, 0.5], seeds=[0, 1, 2]))
    assert [(one["method"], one["share"]) for one in keys[:2]] == [("one_shot", 0.8), ("flap", 0.8)]
    assert all(one["resource"] == "decode" and one["seed"] == 0 for one in keys[:11])
    assert {one["share"] for one in keys[7:11]} == {0.9, 0.7, 0.6, 0.5}
    assert {one["method"] for one in keys[7:11]} == {"one_shot"}
    assert all(one["resource"] == "decode" and one["seed"] == 0 for one in keys[:35])
    assert all(one["resource"] == "decode" and one["seed"] > 0 for one in keys[35:49])
    assert all(one["resource"] == "prefill" for one in keys[49:])
    assert len({tuple(one.values()) for one in keys}) == len(keys) == 98
