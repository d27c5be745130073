"""The caller's settings do not change the groups, and a trace does not change the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph, trace_channels
from graph.cases import conv


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.inner = conv(3, 8), nn.BatchNorm2d(8), conv(8, 6)
        self.outer, self.head, self.drop = conv(6, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.outer(torch.relu(self.inner(x)))
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.head(self.drop(x.mean((2, 3))))  # type: ignore[no-any-return]


@contextmanager
def called(change: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        undo()


SETTINGS: dict[str, Callable[[], Any]] = {
    "matmul precision": lambda: called(
        lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": lambda: called(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "default type": lambda: called(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "cudnn": lambda: torch.backends.cudnn.flags(benchmark=True, deterministic=True, allow_tf32=True),
    "default device": lambda: torch.device("meta"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


def summary(graph: ChannelGraph) -> list[tuple[str, int, str | None]]:
    return [(group.name, group.width, group.frozen) for group in graph.groups]


WANTED = [("stem", 8, None), ("inner", 6, None), ("head", 4, "it is an output of the network")]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_torch(name: str) -> None:
    net, images = Residual(), torch.randn(2, 3, 8, 8)
    with SETTINGS[name]():
        graph = trace_channels(net, images)
    assert summary(graph) == WANTED
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= 1e-9


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_types_modes_and_memory_formats(dtype: torch.dtype, training: bool, memory_format: torch.memory_format) -> None:
    net = Residual().train(training).to(dtype, memory_format=memory_format)  # type: ignore[call-overload]
    images = torch.randn(2, 3, 8, 8).to(dtype, memory_format=memory_format)
    graph = trace_channels(net, images)
    assert summary(graph) == WANTED
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= 1e-9
    assert net.training == training
    assert {parameter.dtype for parameter in net.parameters()} == {dtype}


def test_a_network_on_the_meta_device() -> None:
    with torch.device("meta"):
        net = Residual()
    assert summary(trace_channels(net, torch.randn(2, 3, 8, 8))) == WANTED
