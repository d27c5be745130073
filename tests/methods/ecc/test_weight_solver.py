"""`WeightSolver` against a loop over single weights."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from ecc.energy import NonzeroCost, nonzero_cost
from ecc.errors import BadFile, BadWidths, InfeasibleBudget
from ecc.graph import ChannelGraph
from ecc.graph.model_copy import named_tensors
from ecc.measure.meters.platform import Platform
from ecc.methods.ecc.importance import adam_preconditioners
from ecc.methods.ecc.weight_solver import Weights, WeightSolver, count_nonzeros, min_counts
from methods.nets import assert_resumes_exactly, traced, train

STEPS = 20
LR = 1e-2
EYERISS = Platform("eyeriss")


def cost_of(graph: ChannelGraph) -> NonzeroCost:
    """With a smaller base: in such small networks activations are most of it, and weights could save little."""
    cost = nonzero_cost(graph, EYERISS)
    return replace(cost, base=0.1 * (cost.dense - cost.base))


def solver_for(name: str, budget: Any = "50%", steps: int = STEPS, seed: int = 0, **changes: Any) -> Any:
    """A network, its example input, its cost and a solver."""
    net, example, graph = traced(name, seed)
    cost = cost_of(graph)
    return net, example, cost, WeightSolver(net, cost, budget, steps, **{"lr": LR, **changes})


def masks_of(net: nn.Module, cost: NonzeroCost) -> dict[str, Tensor]:
    return {name: tensor.detach() != 0 for name, tensor in named_tensors(net).items() if name in cost.groups}


@pytest.mark.parametrize("name", ["flattened", "depthwise", "transposed", "tied", "digits"])
def test_the_budget_is_met_on_schedule_without_regrowth_and_resume_is_exact(name: str) -> None:
    net, example, cost, solver = solver_for(name)
    saved: dict[str, Any] = {}
    costs, masks = [float(solver.energy)], [masks_of(net, cost)]
    stop = random.randrange(1, STEPS - 1)

    def after(step: int) -> None:
        costs.append(float(solver.energy))
        masks.append(masks_of(net, cost))
        assert costs[-1] <= solver.target * (1 + 1e-9)
        assert solver.counts == {name: int(mask.sum()) for name, mask in masks[-1].items()} == count_nonzeros(net, cost)
        assert not any((mask & ~masks[-2][key]).any() for key, mask in masks[-1].items()), "a dead weight came back"
        if step == stop:
            saved.update(copy.deepcopy({"net": net.state_dict(), "solver": solver.state_dict()}))

    train(net, solver, example, range(STEPS), after)
    assert costs[0] == costs[1] == pytest.approx(cost.dense, rel=1e-12)  # the warm-up
    assert len(set(costs)) > 8
    assert costs[solver._schedule.ramp_end] == costs[-1] <= 0.5 * cost.dense * (1 + 1e-9)
    assert costs[-1] >= 0.5 * cost.dense - max(cost.coefficients)  # not a weight more than needed
    assert solver.is_met
    assert all(p.abs().sum() > 0 for key, p in net.named_parameters() if key not in cost.groups)
    average = traced(name)[0]
    solver.mask_(average)
    assert count_nonzeros(average, cost) == solver.counts

    other, _, _, resumed = solver_for(name, seed=99)
    assert_resumes_exactly(net, other, resumed, saved, example, range(stop + 1, STEPS))
    assert (resumed.counts, resumed.duals) == (solver.counts, solver.duals)


# ---------------------------------------------------------------- against a loop


def greedy(
    importance: dict[str, Tensor], alive: dict[str, Tensor], cost: NonzeroCost, least: list[int], target: float
) -> dict[str, Tensor]:
    """Remove one weight after the other, the least important per joule first, until the target is met."""
    alive = {name: mask.clone() for name, mask in alive.items()}
    left = {name: int(mask.sum()) for name, mask in alive.items()}
    joules, least_of = (dict(zip(cost.groups, one, strict=True)) for one in (cost.coefficients, least))
    order = [
        (value / joules[name], cost.groups.index(name), place, name)
        for name in cost.groups
        for place, value in enumerate(importance[name].flatten().tolist())
        if alive[name].flatten()[place]
    ]
    for _, _, place, name in sorted(order):
        if math.fsum([cost.base, *(joules[key] * left[key] for key in left)]) <= target:
            break
        if left[name] > least_of[name]:
            alive[name].view(-1)[place] = False
            left[name] -= 1
    return alive


@pytest.mark.parametrize(("kind", "budget"), [(SGD, "45%"), (Adam, "70%"), (Adam, "35%")])
def test_every_update_equals_the_loop(kind: Any, budget: str) -> None:
    net, example, graph = traced("flattened")
    cost, least = cost_of(graph), min_counts(cost_of(graph).full_widths, 0.15)
    optimizer = kind(net.parameters(), lr=LR)
    solver = WeightSolver(net, cost, budget, 6, optimizer=optimizer, min_width_ratio=0.15, warm_up=0.0, ramp=1.0)
    copied = copy.deepcopy(net)
    other = kind(copied.parameters(), lr=LR)
    alive = masks_of(net, cost)
    for step in range(6):
        for model in (net, copied):
            batch = torch.randn(example.shape, generator=torch.Generator().manual_seed(step))
            model(batch).square().mean().backward()
        solver.step()
        other.step()
        tensors = [named_tensors(copied)[name] for name in cost.groups]
        importance = {
            name: tensor.detach().square() * (1 if one is None else one)
            for name, tensor, one in zip(cost.groups, tensors, adam_preconditioners(other, tensors), strict=True)
        }
        alive = greedy(importance, alive, cost, least, solver.target)
        with torch.no_grad():
            for name, tensor in zip(cost.groups, tensors, strict=True):
                tensor *= alive[name]
        for name, tensor in named_tensors(copied).items():
            assert torch.equal(tensor, named_tensors(net)[name]), (step, name)
        solver.zero_grad()
        other.zero_grad()
    assert solver.is_met


@settings(max_examples=30)
@given(st.data())
def test_ties_minimums_and_any_coefficients(data: st.DataObject) -> None:
    """Weights of a few values, so that most are tied, and all steps at once."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    net = nn.Module()
    for k, size in enumerate(sizes):
        values = data.draw(st.lists(st.sampled_from([0.0, 0.5, -0.5, 1.0, 2.0]), min_size=size, max_size=size))
        net.register_parameter(f"w{k}", nn.Parameter(torch.tensor(values)))
    coefficients = tuple(float(data.draw(st.integers(1, 4))) for _ in sizes)
    cost = NonzeroCost("toy", 1.0, tuple(f"w{k}" for k in range(len(sizes))), tuple(sizes), coefficients)
    ratio = data.draw(st.sampled_from([0.0, 0.3, 0.6]))
    least = min_counts(sizes, ratio)
    smallest = float(cost.value(torch.tensor(least)))
    limit = smallest + data.draw(st.floats(0, 1)) * (cost.dense - smallest)
    sgd = SGD(net.parameters(), lr=1.0)
    solver = WeightSolver(net, cost, limit, 1, optimizer=sgd, min_width_ratio=ratio, warm_up=0.0, ramp=1.0)
    alive = {}
    for name, parameter, one in zip(cost.groups, net.parameters(), least, strict=True):
        mask = parameter.detach() != 0
        alive[name] = mask if int(mask.sum()) >= one else torch.ones_like(mask)
        parameter.grad = torch.zeros_like(parameter)
    squares = {name: parameter.detach().square() for name, parameter in net.named_parameters()}
    expected = greedy(squares, alive, cost, least, solver.limits[0])
    solver.step()
    found = solver._solver.alive.split(sizes)
    assert [mask.tolist() for mask in found] == [expected[name].tolist() for name in cost.groups]
    assert solver.is_met


# ---------------------------------------------------------------- start and minimum


def test_minimum_counts_hold() -> None:
    net, example, cost, solver = solver_for("residual", "35%", min_width_ratio=0.25)
    train(net, solver, example, range(STEPS))
    full = dict(zip(cost.groups, cost.full_widths, strict=True))
    assert min(count / full[name] for name, count in solver.counts.items()) == pytest.approx(0.25, abs=0.01)
    with pytest.raises(InfeasibleBudget, match=r"J is not reachable.* lower min_width_ratio"):
        solver_for("residual", "20%", min_width_ratio=0.25)
    assert min_counts([10, 3, 1, 1000], 0.0) == [1, 1, 1, 1]
    assert min_counts([10, 3, 1, 1000], 0.15) == [2, 1, 1, 150]
    with pytest.raises(ValueError, match=r"min_width_ratio=1.5 must be between 0 and 1"):
        min_counts([10], 1.5)


def test_zeros_at_the_start_stay_zero_but_a_head_of_zeros_is_trained() -> None:
    net, example, graph = traced("residual")
    cost = cost_of(graph)
    with torch.no_grad():
        net.conv1.weight[0] = 0  # type: ignore[union-attr, operator, index]
        net.head.weight.zero_()  # type: ignore[union-attr, operator]
    solver = WeightSolver(net, cost, "100%", STEPS, lr=LR)
    full = dict(zip(cost.groups, cost.full_widths, strict=True))
    assert solver.counts == {**full, "conv1.weight": full["conv1.weight"] - 16 * 9}
    train(net, solver, example, range(3))
    assert (net.conv1.weight[0] == 0).all()  # type: ignore[union-attr, operator, index]
    assert (net.head.weight != 0).all()  # type: ignore[union-attr, operator]


def test_without_a_budget_the_mask_is_fixed() -> None:
    net, example, cost, solver = solver_for("digits", "40%")
    train(net, solver, example, range(STEPS))
    with torch.no_grad():
        net.strided.shortcut[0].weight.zero_()  # type: ignore[union-attr, operator, index]
    before, old = masks_of(net, cost), {name: tensor.clone() for name, tensor in named_tensors(net).items()}
    finetune = WeightSolver(net, cost, None, 10, optimizer=Adam(net.parameters(), lr=LR))
    train(net, finetune, example, range(10))
    assert finetune.counts == count_nonzeros(net, cost)
    for name, mask in masks_of(net, cost).items():
        assert torch.equal(mask, before[name])
        assert not mask.any() or not torch.equal(old[name], named_tensors(net)[name])
    assert finetune.is_met
    with pytest.raises(BadFile, match="solver 'fixed', but"):
        WeightSolver(net, cost, "90%", 10, lr=LR).load_state_dict(finetune.state_dict())


@pytest.mark.parametrize(
    "make", [lambda p: AdamW(p, lr=1e-3, weight_decay=0.1), lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3)]
)
def test_momentum_decay_frozen_weights_and_channels_last(make: Any) -> None:
    net, example, graph = traced("chain")
    net.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    cost = cost_of(graph)
    solver = WeightSolver(net, cost, "45%", STEPS, optimizer=make([p for p in net.parameters() if p.requires_grad]))
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert count_nonzeros(net, cost) == solver.counts
    assert solver.counts["head.weight"] < 24 * 4 * 9
    assert net.conv2.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]


def test_a_cost_of_another_network_is_refused() -> None:
    net, _, _ = traced("chain")
    with pytest.raises(BadWidths, match=r"weights of 'stem.weight', but this network has no such tensor"):
        WeightSolver(net, nonzero_cost(traced("residual")[2], EYERISS), "50%", 5)
    with pytest.raises(BadWidths, match=r"7 weights of 'conv1.weight', but this network has 432"):
        Weights(net, NonzeroCost("x", 0.0, ("conv1.weight",), (7,), (1.0,)), torch.device("cpu"))
