"""Invariants for random networks, schedules and gradients, and for every precision."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ecc.energy import counted_cost
from ecc.errors import InfeasibleBudget
from ecc.graph import ChannelGraph, live_channels, live_masks, slim, trace_channels
from ecc.methods import EccSolver
from methods.nets import NETS, traced, train

SIZES = (0.0, 1e-38, 1e-6, 1.0, 1e6, 1e38)
"""Sizes of gradients, up to the ends of float32."""


class Toy(nn.Module):
    """Convolutions of random widths; `tied` adds the output of the first one to every other of the same width."""

    def __init__(self, widths: list[int], *, tied: bool, norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise([2, *widths]))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) if norm else nn.Identity() for width in widths)
        self.head, self.tied = nn.Linear(widths[-1], 2), tied

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor | None = None
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
            if first is None:
                first = x
            elif self.tied and first.shape == x.shape:
                x = x + first
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


def toys() -> st.SearchStrategy[Toy]:
    widths = st.lists(st.integers(1, 13) | st.just(8), min_size=1, max_size=4)
    return st.builds(lambda w, tied, norm: Toy(w, tied=tied, norm=norm), widths, st.booleans(), st.booleans())


def drawn_solver(data: st.DataObject, net: nn.Module, graph: ChannelGraph, steps: int) -> EccSolver:
    """A solver with random settings; infeasible budgets are skipped."""
    names = data.draw(st.sampled_from([["macs"], ["params"], ["peak_bytes"], ["macs", "activation_bytes"]]))
    costs = [counted_cost(graph, name) for name in names]
    warm_up = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    made = {"sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), "adam": lambda p: torch.optim.Adam(p, lr=0.1)}
    try:
        return EccSolver(
            net,
            graph,
            costs,
            [f"{data.draw(st.integers(30, 100) | st.integers(1, 100))}%" for _ in costs],
            steps,
            optimizer=made[data.draw(st.sampled_from(sorted(made)))](net.parameters()),
            min_width_ratio=data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
            width_multiple=data.draw(st.sampled_from([1, 2, 4, 8])),
            warm_up=warm_up,
            ramp=data.draw(st.sampled_from([0.1, 0.5, 1.0 - warm_up])),
            importance=data.draw(st.sampled_from(["taylor", "adam_norm"])),
        )
    except InfeasibleBudget:
        assume(False)
        raise


@settings(max_examples=max(1, settings.default.max_examples * 40 // 100), phases=set(Phase) - {Phase.explain})
@given(toys(), st.data())
def test_every_step_follows_the_schedule_and_nothing_comes_back(net: Toy, data: st.DataObject) -> None:
    graph = trace_channels(net, torch.randn(1, 2, 4, 4), verify=False)
    steps = data.draw(st.integers(1, 10), "steps")
    solver = drawn_solver(data, net, graph, steps)
    least = solver._min_widths.tolist()
    alive = solver._solver.alive
    costs = [float(cost) for cost in solver.cost]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for step in range(1, steps + 1):
        size = data.draw(st.sampled_from(SIZES))
        for parameter in net.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (size * noise).clamp(-3e38, 3e38) if size else torch.zeros_like(parameter)
        solver.step()
        now = [float(cost) for cost in solver.cost]
        allowed = solver._schedule.fractions(step)
        for cost, before, fraction, dense in zip(now, costs, allowed, solver._constraints.dense, strict=True):
            assert cost <= fraction * dense * (1 + 1e-9)
            assert cost <= before
        assert all(width >= one for width, one in zip(solver.widths.values(), least, strict=True))
        assert all(
            width >= min(group.width, group.min_width)
            for group, width in zip(graph.groups, solver.widths.values(), strict=True)
        )
        assert not (solver._solver.alive & ~alive).any()
        alive, costs = solver._solver.alive, now
        if all(parameter.isfinite().all() for parameter in net.parameters()):
            masks = zip(graph.groups, live_masks(net, graph), alive.split([g.width for g in graph.groups]), strict=True)
            assert not any((read & ~kept).any() for group, read, kept in masks if group.frozen is None)
    assert solver.is_met


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["residual", "concat", "grouped", "tied", "digits"])
def test_every_precision_is_pruned_and_slimmed_exactly(name: str, dtype: torch.dtype) -> None:
    """Gradients are given, since not all layers have backward passes in half precision on a CPU."""
    torch.manual_seed(3)
    build, inputs = NETS[name]
    net, example = build().to(dtype).eval(), inputs()
    graph = trace_channels(net, example.to(dtype), verify=False)
    wide = traced(name)[2]
    assert graph.full_widths == wide.full_widths
    assert [group.frozen for group in graph.groups] == [group.frozen for group in wide.groups]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)  # the epsilon of Adam is 0 in float16
    solver = EccSolver(net, graph, counted_cost(graph, "macs"), "60%", 6, optimizer=optimizer, min_width_ratio=0.0)
    for _ in range(6):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        solver.step()
    assert solver.is_met
    assert live_channels(net, graph) == solver.widths
    small = slim(net, graph)
    assert {tensor.dtype for tensor in small.parameters()} == {dtype}
    assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(solver.widths))
    masked, cut = copy.deepcopy(net).double(), small.double()  # in wide numbers, so that rounding hides nothing
    torch.testing.assert_close(cut(example.double()), masked(example.double()), rtol=1e-9, atol=1e-9)


def test_importance_of_half_precision_does_not_overflow() -> None:
    """The norm of a channel with many weights is above the range of float16, so it is summed in float32."""
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4096, bias=False)).half()
    graph = trace_channels(net, torch.zeros(1, 2, dtype=torch.float16), verify=False)
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([30.0, 20.0, 10.0]).expand(4096, 3))  # squares sum to 3.7 million
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    solver = EccSolver(
        net,
        graph,
        counted_cost(graph, "macs"),
        "70%",
        1,
        optimizer=optimizer,
        warm_up=0.0,
        ramp=1.0,
        importance="adam_norm",
    )
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    solver.step()
    assert live_masks(net, graph)[0].tolist() == [True, True, False]
    assert all(math.isfinite(dual) for dual in solver.duals.width.values())


def masked_and_slim(name: str) -> tuple[nn.Module, nn.Module, ChannelGraph, EccSolver, Any]:
    """A network with dead channels, and the same network slimmed."""
    net, example, graph = traced(name)
    solver = EccSolver(net, graph, counted_cost(graph, "macs"), "50%", 6, lr=1e-2)
    train(net, solver, example, range(6))
    return net, slim(net, graph), graph, solver, example


@pytest.mark.parametrize("name", ["depthwise", "transposed", "digits"])
def test_training_on_is_the_same_masked_or_slim(name: str) -> None:
    """Slimming before or after further training gives the same live weights and batch statistics."""
    net, small, graph, solver, example = masked_and_slim(name)
    torch.testing.assert_close(small.eval()(example), net.eval()(example), rtol=1e-4, atol=1e-5)
    net.train(), small.train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (net, small)]
    for _ in range(3):
        batch = torch.randn_like(example)
        for one, optimizer in zip((net, small), optimizers, strict=True):
            one(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        solver.mask_(net)
    again = slim(net, graph).state_dict()
    moved = 0
    for key, value in small.state_dict().items():
        torch.testing.assert_close(value, again[key], rtol=1e-3, atol=1e-5)
        moved += key.endswith("running_var")
    assert moved
    torch.testing.assert_close(small.eval()(example), net.eval()(example), rtol=1e-3, atol=1e-4)
