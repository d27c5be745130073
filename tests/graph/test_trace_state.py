from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import trace_channels
from graph.cases import chain, conv, named


class Remembers(nn.Module):
    """Writes attributes in its forward pass, as positional caches and counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), conv(8, 4, 1)
        self.register_buffer("calls", torch.zeros(8))
        self.cache: dict[str, Any] = {}
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.calls += 1
        self.cache["size"] = x.shape
        self.latest = x.detach()
        self.fresh = 1
        return self.head(x)


def test_what_forward_writes_into_a_module_does_not_reach_the_users() -> None:
    net = Remembers()
    trace_channels(net, torch.randn(2, 3, 8, 8))
    assert net.cache == {}
    assert net.latest is None
    assert not hasattr(net, "fresh")
    assert torch.equal(net.calls, torch.zeros(8))


def test_a_cache_that_was_filled_before_is_kept() -> None:
    net, images = Remembers(), torch.randn(2, 3, 8, 8)
    net(images)
    latest = net.latest
    trace_channels(net, images)
    assert net.latest is latest
    assert net.cache == {"size": (2, 8, 8, 8)}


def test_the_input_is_left_as_it_was() -> None:
    net = named(relu=nn.ReLU(inplace=True), conv1=conv(3, 8), head=conv(8, 4, 1))
    images = torch.randn(2, 3, 8, 8)
    before = images.clone()
    trace_channels(net, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_network_on_meta_tensors_is_verified_with_random_weights(device: str) -> None:
    with torch.device("meta"):
        net = chain()
    graph = trace_channels(net, torch.randn(1, 3, 8, 8, device=device))
    assert graph.max_relative_diff is not None
    assert all(tensor.device.type == "meta" for tensor in net.state_dict().values())
    assert {g.name: g.width for g in graph.prunable} == {"conv1": 8, "conv2": 6}


def test_a_network_without_parameters_has_no_groups() -> None:
    graph = trace_channels(named(relu=nn.ReLU(), pool=nn.MaxPool2d(2)), torch.randn(1, 3, 8, 8))
    assert graph.groups == ()


def test_the_callers_default_device_does_not_matter() -> None:
    net = chain()
    images = torch.randn(1, 3, 8, 8)
    with torch.device("meta"):  # as torch.set_default_device does
        graph = trace_channels(net, images)
    assert {g.name: g.width for g in graph.prunable} == {"conv1": 8, "conv2": 6}
