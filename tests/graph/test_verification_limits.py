from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import EccWarning
from ecc.graph import trace_channels
from ecc.graph.numerics import ALLOWED_FLOAT32, ALLOWED_FLOAT64
from ecc.graph.verification import verify_graph
from graph.cases import conv, traced
from graph.test_verification import planted, rolled, why


def test_too_little_memory_is_told_and_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images, graph = traced("chain")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("ecc.graph.verification.run_without_randomness", full)
    with pytest.warns(EccWarning, match="verification could not run because .*Tried to allocate 2 GiB"):
        verified = verify_graph(net, graph, images)
    assert verified.max_relative_diff is None
    assert verified.groups == graph.groups


class NamesItsType(nn.Module):
    """Cannot run in float64: a matrix product with a constant of a fixed type."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x @ torch.eye(6, dtype=torch.float32)))  # type: ignore[no-any-return]


def test_a_network_that_cannot_run_in_float64_is_verified_in_its_own_type() -> None:
    graph = trace_channels(NamesItsType(), torch.randn(3, 6))
    assert [group.name for group in graph.prunable] == ["body"]
    assert graph.max_relative_diff is not None
    assert ALLOWED_FLOAT64 < ALLOWED_FLOAT32
    assert 0 <= graph.max_relative_diff <= ALLOWED_FLOAT32


class NeedsTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and targets is None:
            raise ValueError("targets should not be none when in training mode")
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def test_a_network_that_cannot_train_on_the_example_is_verified_in_eval_mode_and_says_so() -> None:
    graph = trace_channels(NeedsTargets(), torch.randn(2, 3, 8, 8))
    assert [group.name for group in graph.prunable] == ["body"]
    assert graph.notes == (
        "not verified in train mode, in which the network raised "
        "ValueError: targets should not be none when in training mode",
    )


def test_a_large_network_on_a_cpu_is_verified_in_float32_and_failures_are_confirmed_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ecc.graph.verification.MAX_FLOAT64_MACS", 0)
    net, images, graph = traced("residual")
    verified = verify_graph(net, graph, images)
    assert verified.max_relative_diff is not None
    assert 1e-12 < verified.max_relative_diff < ALLOWED_FLOAT32  # as float32 rounds
    net, images, graph = traced("chain")
    wrong = verify_graph(net, planted(graph, "conv1", "conv1.bias", rolled), images)
    assert "allowed 1e-09" in why(wrong, "conv1")
    assert [group.name for group in wrong.prunable] == ["conv2"]


class Steep(nn.Module):
    """Enlarges rounding errors in train mode beyond measure."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(torch.relu(self.body(x)))
        return (x * 1e16).sin() if self.training else x  # type: ignore[no-any-return]


def test_a_network_that_enlarges_rounding_errors_is_not_blamed() -> None:
    graph = trace_channels(Steep(), torch.randn(2, 3, 8, 8))
    assert [group.name for group in graph.prunable] == ["body"]
    assert any("train mode, in which the network enlarges rounding errors too much" in note for note in graph.notes)


def test_the_search_for_what_fails_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images, graph = traced("chain")
    wrong = planted(graph, "conv1", "conv1.bias", rolled)
    assert [group.name for group in verify_graph(net, wrong, images).prunable] == ["conv2"]
    monkeypatch.setattr("ecc.graph.verification.MAX_CHECKS", 0)
    assert verify_graph(net, wrong, images).prunable == ()
