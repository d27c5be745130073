from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.energy import counted_cost
from ecc.errors import BadWidths
from ecc.graph import (
    mask_channels_,
    slim,
    slim_optimizer,
    trace_channels,
)
from ecc.methods import EccSolver
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
    graph = trace_channels(net, inputs.double(), verify=False)
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(3):
        step(net, optimizer, inputs.double())
    dead = {"stem": torch.tensor([1, 6]), "conv1": torch.tensor([0, 3])}
    mask_channels_(net, graph, dead)
    small = slim(net, graph)
    twin = slim_optimizer(optimizer, net, small, graph)
    assert type(twin) is type(optimizer)
    # One more step of both. The dead slices of the dense network may move; they are cut away before comparing.
    for one, its in ((net, optimizer), (small, twin)):
        step(one, its, inputs.double())
    mask_channels_(net, graph, dead)
    expected = slim(net, graph).state_dict()
    for key, value in small.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_dead_channels_that_stay_keep_their_state() -> None:
    net, inputs, graph = traced("residual")
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer, inputs)
    mask_channels_(net, graph, {"conv1": torch.tensor([0, 2, 3])})
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


def cut_chain(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, ...]:
    net, inputs, graph = traced("chain")
    optimizer = optimizer_of(net)
    step(net, optimizer, inputs)
    mask_channels_(net, graph, {"conv1": [0, 2, 3]})
    return optimizer, net, slim(net, graph), graph, inputs


def test_settings_for_parameters_to_come_are_kept() -> None:
    optimizer, net, small, graph, _ = cut_chain(lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    twin = slim_optimizer(optimizer, net, small, graph)
    twin.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert (twin.param_groups[1]["lr"], twin.param_groups[1]["momentum"]) == (0.1, 0.9)


def test_of_a_solver_the_optimizer_inside_is_cut() -> None:
    net, inputs, graph = traced("chain")
    solver = EccSolver(net, graph, counted_cost(graph, "macs"), "50%", 4, lr=1e-2)
    for _ in range(4):
        step(net, solver, inputs)
    small = slim(net, graph)
    twin = slim_optimizer(solver, net, small, graph)
    assert type(twin) is torch.optim.Adam
    step(small, twin, inputs)


def test_what_cannot_be_cut_along_is_refused() -> None:
    optimizer, net, small, graph, _ = cut_chain(lambda net: torch.optim.Adafactor(net.parameters()))
    with pytest.raises(BadWidths, match=r"Adafactor keeps row_var of conv\d\.weight in another shape"):
        slim_optimizer(optimizer, net, small, graph)
    optimizer, net, small, graph, _ = cut_chain(lambda net: torch.optim.AdamW(net.parameters()))
    with pytest.raises(
        BadWidths, match=r"conv1\.weight of the slim network has shape .* give the width_multiple that slim"
    ):
        slim_optimizer(optimizer, net, small, graph, 4)

    class Needy(torch.optim.SGD):
        def __init__(self, parameters: Any, more: int) -> None:
            super().__init__(parameters, lr=0.1)

    optimizer, net, small, graph, _ = cut_chain(lambda net: Needy(net.parameters(), 1))
    with pytest.raises(BadWidths, match="a new Needy cannot be made of its parameters alone"):
        slim_optimizer(optimizer, net, small, graph)
