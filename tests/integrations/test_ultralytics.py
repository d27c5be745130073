"""The real ultralytics package: a YOLO built from its configuration, without any download."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ecc
from ecc.errors import BadTask

ultralytics = pytest.importorskip("ultralytics", reason="ultralytics is not installed")
INPUT = torch.zeros(1, 3, 64, 64)


@pytest.fixture(scope="module")
def yolo() -> Any:
    return ultralytics.YOLO("yolov8n.yaml")


def test_the_wrapper_is_refused_and_trains_nothing(yolo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object, **__: object) -> None:
        raise AssertionError("a training run was started")

    monkeypatch.setattr(type(yolo), "train", train)
    for call in (ecc.inspect, ecc.trace_channels):
        with pytest.raises(BadTask, match=r"pass `yolo\.model`"):
            call(yolo, INPUT)
    with pytest.raises(BadTask, match=r"pass `yolo\.model`"):
        ecc.compress(yolo, [(INPUT, INPUT)], "macs=50%", loss=torch.nn.functional.mse_loss)


def test_its_network_is_pruned_exactly(yolo: Any) -> None:
    model = yolo.model.eval()
    graph = ecc.trace_channels(model, INPUT)
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff < 1e-6
    assert len(graph.prunable) > 40
    assert graph.branches
    half = {group.name: max(group.min_width, group.width // 2) for group in graph.prunable}
    small = ecc.with_widths(model, graph, half)
    assert sum(p.numel() for p in small.parameters()) < 0.4 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        assert small(INPUT)[0].shape == model(INPUT)[0].shape
