"""Two files are timed in turn; what is checked is what the numbers mean, not how fast this machine is."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ecc.export import latency
from ecc.export.formats import FORMATS
from ecc.export.latency import compare_latency
from export.runs import SmallNet


def test_blocks_take_turns_and_neighbours_are_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    drift = iter(range(1, 1000))

    def block(session: str, feed: object, runs: int, clock: object) -> float:
        calls.append(session)
        return (2.0 if session == "dense" else 1.0) * (1 + next(drift) * 1e-9)

    monkeypatch.setattr(latency, "onnx_session", lambda path: path.name)
    monkeypatch.setattr(latency, "feed_of", lambda session, inputs: {})
    monkeypatch.setattr(latency, "_block", block)
    found = compare_latency(tmp_path / "dense", tmp_path / "slim", torch.zeros(7, 1))
    assert calls[4:8] == ["dense", "slim", "slim", "dense"]
    assert len(calls) == 4 + 2 * latency.PAIRS
    assert found.ratio == pytest.approx(2)
    assert found.ratio_range == pytest.approx((2, 2))
    assert (found.dense_seconds, found.slim_seconds) == pytest.approx((2, 1))
    assert (found.batch, found.threads) == (7, torch.get_num_threads())
    assert "measured here, on this CPU" in found.label


def test_waiting_for_other_programs_is_not_counted() -> None:
    def waiting(names: object, feed: object) -> None:
        time.sleep(0.05)

    name, clock = latency.clock_of(1)
    assert name == "processor time"
    assert latency._block(SimpleNamespace(run=waiting), {}, 3, clock) < 0.05
    name, clock = latency.clock_of(2)
    assert name == "wall clock"
    assert latency._block(SimpleNamespace(run=waiting), {}, 3, clock) >= 0.05


def test_a_block_is_the_median_of_its_runs() -> None:
    ticks = iter([0.0, 9.0, 10.0, 11.5, 20.0, 22.0])
    assert latency._block(SimpleNamespace(run=lambda names, feed: None), {}, 3, lambda: next(ticks)) == 2.0


def test_real_files_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(latency, "BLOCK_SECONDS", 0.001)
    example = torch.randn(1, 3, 8, 8)
    FORMATS["onnx"].write(SmallNet().eval(), example, tmp_path / "net.onnx")
    found = compare_latency(tmp_path / "net.onnx", tmp_path / "net.onnx", example)
    assert found.dense_seconds > 0
    assert found.ratio_range[0] <= found.ratio <= found.ratio_range[1]
