from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import (
    slim,
    slim_optimizer,
    trace_channels,
    zero_channels_,
)
from graph.cases import traced

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cut_optimizer_goes_on_where_the_dense_one_stood(name: str) -> None:
    net, inputs, _ = traced("residual")
    net.double().eval()  # in train mode a bias before a batch norm has no gradient but noise, which Adam scales up
    graph = trace_channels(net, inputs.double(), proven=False)
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(3):
        step(net, optimizer, inputs.double())
    dead = {"stem": torch.tensor([1, 6]), "conv1": torch.tensor([0, 3])}
    zero_channels_(net, graph, dead)
    small = slim(net, graph)
    twin = slim_optimizer(optimizer, net, small, graph)
    assert type(twin) is type(optimizer)
    # One more step of both. The dead slices of the dense network may move; they are cut away before comparing.
    for one, its in ((net, optimizer), (small, twin)):
        step(one, its, inputs.double())
    zero_channels_(net, graph, dead)
    expected = slim(net, graph).state_dict()
    for key, value in small.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_dead_channels_that_stay_keep_their_state() -> None:
    net, inputs, graph = traced("residual")
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer, inputs)
    zero_channels_(net, graph, {"conv1": torch.tensor([0, 2, 3])})
    small = slim(net, graph, 4)
    twin = slim_optimizer(optimizer, net, small, graph, 4)
    kept = [0, 1, 4, 5]  # 3 live ones, and the first of the dead
    assert torch.equal(twin.state[small.conv1.weight]["exp_avg"], optimizer.state[net.conv1.weight]["exp_avg"][kept])
    step(small, twin, inputs)


def test_settings_of_each_parameter_group_are_kept() -> None:
    net, inputs, graph = traced("chain")
    optimizer = torch.optim.SGD(
        [{"params": net.conv1.parameters(), "lr": 0.5}, {"params": [net.conv2.weight], "momentum": 0.9}], lr=0.1
    )
    step(net, optimizer, inputs)
    small = slim(net, graph)
    twin = slim_optimizer(optimizer, net, small, graph)
    assert [(g["lr"], g["momentum"], len(g["params"])) for g in twin.param_groups] == [(0.5, 0, 2), (0.1, 0.9, 1)]
    assert twin.param_groups[1]["params"][0] is small.conv2.weight


def test_an_optimizer_that_knows_names_keeps_them() -> None:
    net, inputs, graph = traced("chain")
    optimizer = torch.optim.Adam(net.named_parameters())
    step(net, optimizer, inputs)
    twin = slim_optimizer(optimizer, net, slim(net, graph), graph)
    assert twin.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def test_the_dense_optimizer_is_left_alone() -> None:
    net, inputs, graph = traced("chain")
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer, inputs)
    before = copy.deepcopy(optimizer.state_dict())
    small = slim(net, graph)
    twin = slim_optimizer(optimizer, net, small, graph)
    step(small, twin, inputs)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())
