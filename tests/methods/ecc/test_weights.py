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

from ecc.energy import NonzeroCost, nonzero_cost
from ecc.errors import BadFile, BadWidths, InfeasibleBudget
from ecc.graph import ChannelGraph
from ecc.graph.model_copy import named_tensors
from ecc.measure.meters.platform import Platform
from ecc.methods.ecc.importance import adam_metrics
from ecc.methods.ecc.weights import Weights, WeightSolver, count_nonzeros, floor_counts
from methods.ecc.test_solver import Waits, solve_without_waits
from methods.nets import NETS, goes_on_to_the_bit, traced, train

STEPS = 20
LR = 1e-2
EYERISS = Platform("eyeriss")


def cost_of(graph: ChannelGraph) -> NonzeroCost:
    """On such small networks activations are most of it, so that weights could save little: less of them."""
    cost = nonzero_cost(graph, EYERISS)
    return replace(cost, base=0.1 * (cost.dense - cost.base))


def solver_for(name: str, budget: Any = "50%", steps: int = STEPS, seed: int = 0, **changes: Any) -> Any:
    """A network, its example input, its cost and a solver."""
    net, example, graph = traced(name, seed)
    cost = cost_of(graph)
    return net, example, cost, WeightSolver(net, cost, budget, steps, **{"lr": LR, **changes})


def masks_of(net: nn.Module, cost: NonzeroCost) -> dict[str, Tensor]:
    return {name: tensor.detach() != 0 for name, tensor in named_tensors(net).items() if name in cost.groups}


# ---------------------------------------------------------------- every network


@pytest.mark.parametrize("name", NETS)
def test_budgets_are_met_on_schedule_without_regrowth_and_resumed_to_the_bit(name: str) -> None:
    net, example, cost, solver = solver_for(name)
    saved: dict[str, Any] = {}
    spent, masks = [float(solver.energy)], [masks_of(net, cost)]
    stop = random.randrange(1, STEPS - 1)

    def after(step: int) -> None:
        spent.append(float(solver.energy))
        masks.append(masks_of(net, cost))
        assert spent[-1] <= solver.target * (1 + 1e-9)
        assert solver.counts == {name: int(mask.sum()) for name, mask in masks[-1].items()} == count_nonzeros(net, cost)
        for key, mask in masks[-1].items():
            assert not (mask & ~masks[-2][key]).any(), "a dead weight came back"
        if step == stop:
            saved.update(copy.deepcopy({"net": net.state_dict(), "solver": solver.state_dict()}))

    train(net, solver, example, range(STEPS), after)
    assert spent == sorted(spent, reverse=True)
    assert spent[0] == spent[1] == pytest.approx(cost.dense, rel=1e-12)  # the warm-up
    assert len(set(spent)) > 8
    ramp_end = solver._schedule.ramp_end
    assert spent[ramp_end] == spent[-1] <= 0.5 * cost.dense * (1 + 1e-9)
    assert spent[-1] >= 0.5 * cost.dense - max(cost.coefficients)  # not a weight more than needed
    assert solver.is_met
    assert solver.progress == solver.descent == 1.0
    assert all(p.abs().sum() > 0 for key, p in net.named_parameters() if key not in cost.groups)

    # Stopped and taken up by another process: not a bit differs.
    other, _, _, resumed = solver_for(name, seed=99)
    goes_on_to_the_bit(net, other, resumed, saved, example, range(stop + 1, STEPS))
    assert resumed.counts == solver.counts
    assert resumed.duals == solver.duals


# ---------------------------------------------------------------- beside a slow and obvious twin


def greedy(
    scores: dict[str, Tensor], alive: dict[str, Tensor], cost: NonzeroCost, floors: list[int], target: float
) -> dict[str, Tensor]:
    """One weight after the other, the least energy per joule first, until the target is met."""
    alive = {name: mask.clone() for name, mask in alive.items()}
    left = {name: int(mask.sum()) for name, mask in alive.items()}
    price, floor = dict(zip(cost.groups, cost.coefficients, strict=True)), dict(zip(cost.groups, floors, strict=True))
    order = [
        (float(score) / price[name], cost.groups.index(name), place, name)
        for name in cost.groups
        for place, score in enumerate(scores[name].flatten().tolist())
        if alive[name].flatten()[place]
    ]
    for _, _, place, name in sorted(order):
        if math.fsum([cost.base, *(price[key] * left[key] for key in left)]) <= target:
            break
        if left[name] > floor[name]:
            alive[name].view(-1)[place] = False
            left[name] -= 1
    return alive


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("budget", ["70%", "45%", "35%"])
def test_every_update_is_the_greedy_one(kind: Any, budget: str) -> None:
    net, example, graph = traced("flattened")
    cost = cost_of(graph)
    optimizer = kind(net.parameters(), lr=LR)
    solver = WeightSolver(net, cost, budget, 6, optimizer=optimizer, min_width_ratio=0.15, warm_up=0.0, ramp=1.0)
    copied = copy.deepcopy(net)
    twins = kind(copied.parameters(), lr=LR)
    alive = masks_of(net, cost)
    floors = floor_counts(cost.full_widths, 0.15)
    for step in range(6):
        for model in (net, copied):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(example.shape, generator=generator)
            model(batch).square().mean().backward()
        solver.step()
        twins.step()
        tensors = [named_tensors(copied)[name] for name in cost.groups]
        metrics = adam_metrics(twins, tensors)
        scores = {
            name: tensor.detach().square() * (1 if metric is None else metric)
            for name, tensor, metric in zip(cost.groups, tensors, metrics, strict=True)
        }
        alive = greedy(scores, alive, cost, floors, solver.target)
        with torch.no_grad():
            for name, tensor in zip(cost.groups, tensors, strict=True):
                tensor *= alive[name]
        for name, tensor in named_tensors(copied).items():
            assert torch.equal(tensor, named_tensors(net)[name]), (step, name)
        solver.zero_grad()
        twins.zero_grad()
    assert solver.is_met


@settings(max_examples=40)
@given(st.data())
def test_ties_floors_and_any_prices(data: st.DataObject) -> None:
    """Weights of a few values only, so that most are tied; all at once."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    net = nn.Module()
    for k, size in enumerate(sizes):
        values = data.draw(st.lists(st.sampled_from([0.0, 0.5, -0.5, 1.0, 2.0]), min_size=size, max_size=size))
        net.register_parameter(f"w{k}", nn.Parameter(torch.tensor(values)))
    coefficients = tuple(float(data.draw(st.integers(1, 4))) for _ in sizes)
    cost = NonzeroCost("toy", 1.0, tuple(f"w{k}" for k in range(len(sizes))), tuple(sizes), coefficients)
    share = data.draw(st.sampled_from([0.0, 0.3, 0.6]))
    floors = floor_counts(sizes, share)
    least = float(cost.value(torch.tensor(floors)))
    limit = least + data.draw(st.floats(0, 1)) * (cost.dense - least)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    solver = WeightSolver(net, cost, limit, 1, optimizer=sgd, min_width_ratio=share, warm_up=0.0, ramp=1.0)
    alive = {}
    for name, parameter, floor in zip(cost.groups, net.parameters(), floors, strict=True):
        mask = parameter.detach() != 0
        alive[name] = mask if int(mask.sum()) >= floor else torch.ones_like(mask)
    scores = {name: parameter.detach().square() for name, parameter in net.named_parameters()}
    expected = greedy(scores, alive, cost, floors, solver.limits[0])
    still(net)
    solver.step()
    found = solver._dynamics.alive.split(sizes)
    assert [mask.tolist() for mask in found] == [expected[name].tolist() for name in cost.groups]
    assert solver.is_met
    assert all(count >= floor for count, floor in zip(solver.counts.values(), floors, strict=True))


def still(net: nn.Module) -> None:
    """Gradients with which a step of SGD changes nothing."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)


def test_of_two_equal_weights_the_dearer_goes_first() -> None:
    net = nn.Module()
    for name in ("cheap", "dear"):
        net.register_parameter(name, nn.Parameter(torch.tensor([1.0, 1.1, 1.2, 1.3])))
    cost = NonzeroCost("toy", 0.0, ("cheap", "dear"), (4, 4), (1.0, 3.0))
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    solver = WeightSolver(net, cost, "60%", 1, optimizer=sgd, min_width_ratio=0.0, warm_up=0.0, ramp=1.0)
    still(net)
    solver.step()  # 16 J, of which 9.6 are allowed: 16 - 3 * 3 = 7
    assert solver.counts == {"cheap": 4, "dear": 1}
    assert net.dear.tolist()[:3] == [0.0, 0.0, 0.0]  # type: ignore[union-attr, operator]


# ---------------------------------------------------------------- where it starts and where it stops


def test_floors_hold_and_say_so() -> None:
    net, example, cost, solver = solver_for("residual", "35%", min_width_ratio=0.25)
    train(net, solver, example, range(STEPS))
    full = dict(zip(cost.groups, cost.full_widths, strict=True))
    shares = {name: count / full[name] for name, count in solver.counts.items()}
    assert min(shares.values()) == pytest.approx(0.25, abs=0.01)
    with pytest.raises(InfeasibleBudget, match=r"J is below .* lower min_width_ratio, or shrink"):
        solver_for("residual", "20%", min_width_ratio=0.25)
    assert floor_counts([10, 3, 1, 1000], 0.0) == [1, 1, 1, 1]
    assert floor_counts([10, 3, 1, 1000], 0.15) == [2, 1, 1, 150]
    with pytest.raises(ValueError, match=r"min_width_ratio=1.5 is a share of a tensor's weights"):
        floor_counts([10], 1.5)


def test_zeros_of_the_start_stay_zero_but_a_head_of_zeros_is_learnt() -> None:
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


def test_without_a_budget_nothing_more_goes_and_nothing_comes_back() -> None:
    net, example, cost, solver = solver_for("digits", "40%")
    train(net, solver, example, range(STEPS))
    with torch.no_grad():
        net.strided.shortcut[0].weight.zero_()  # type: ignore[union-attr, operator, index] # not untrained either
    before, counts = masks_of(net, cost), count_nonzeros(net, cost)
    adam = torch.optim.Adam(net.parameters(), lr=LR)
    tuner = WeightSolver(net, cost, None, 10, optimizer=adam)
    weights = {name: tensor.clone() for name, tensor in named_tensors(net).items()}
    train(net, tuner, example, range(10))
    assert tuner.counts == counts == count_nonzeros(net, cost)
    for name, mask in masks_of(net, cost).items():
        assert torch.equal(mask, before[name])
        assert not mask.any() or not torch.equal(weights[name], named_tensors(net)[name])
    assert tuner.is_met
    other = WeightSolver(net, cost, "90%", 10, lr=LR)
    with pytest.raises(BadFile, match="solver 'fixed'"):
        other.load_state_dict(tuner.state_dict())


def test_the_optimizer_within_is_untouched_until_weights_go() -> None:
    net, example, _, solver = solver_for("residual", "100%")
    twin = traced("residual")[0]
    plain = torch.optim.Adam(twin.parameters(), lr=LR)
    train(net, solver, example, range(5))
    train(twin, plain, example, range(5))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_a_copy_can_be_masked_too() -> None:
    net, example, cost, solver = solver_for("transposed")
    average = copy.deepcopy(net)
    train(net, solver, example, range(STEPS))
    assert count_nonzeros(average, cost) != solver.counts
    solver.mask_(average)
    assert count_nonzeros(average, cost) == solver.counts


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
    ],
    ids=["AdamW", "SGD"],
)
def test_momentum_and_decay_wake_nothing(make: Any) -> None:
    net, example, graph = traced("depthwise")
    solver = WeightSolver(net, (cost := cost_of(graph)), "45%", STEPS, optimizer=make(net.parameters()))
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert count_nonzeros(net, cost) == solver.counts


def test_frozen_weights_and_channels_last_are_pruned_too() -> None:
    net, example, graph = traced("chain")
    net.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    cost = cost_of(graph)
    solver = WeightSolver(net, cost, "45%", STEPS, lr=LR)
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert count_nonzeros(net, cost) == solver.counts
    assert solver.counts["head.weight"] < 24 * 4 * 9
    assert net.conv2.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]


def test_a_cost_of_another_network_is_refused() -> None:
    net, _, _ = traced("chain")
    other = nonzero_cost(traced("residual")[2], EYERISS)
    with pytest.raises(BadWidths, match=r"weights of 'stem.weight', and this one has no such tensor"):
        WeightSolver(net, other, "50%", 5)
    wide = NonzeroCost("x", 0.0, ("conv1.weight",), (7,), (1.0,))
    with pytest.raises(BadWidths, match=r"7 weights of 'conv1.weight', and this one has 432 weights there"):
        Weights(net, wide, torch.device("cpu"))


def test_a_step_never_waits_for_the_device() -> None:
    net, example, graph = traced("digits")
    sgd = torch.optim.SGD(net.parameters(), lr=LR)
    solver = WeightSolver(net, cost_of(graph), "50%", STEPS, optimizer=sgd)
    counts = solver.counts
    for step in range(6):
        net(example).square().mean().backward()
        with Waits() as waits:
            solver.step()
        assert waits.seen == [], step
    assert solver.counts != counts


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_on_a_gpu_torch_itself_sees_no_wait(kind: Any) -> None:
    net, example, graph = traced("digits")
    net, example = net.cuda(), example.cuda()
    cost = cost_of(graph)
    solver = WeightSolver(net, cost, "50%", STEPS, optimizer=kind(net.parameters(), lr=LR))
    solve_without_waits(net, example, solver, STEPS)
    assert solver.is_met
    assert count_nonzeros(net, cost) == solver.counts
