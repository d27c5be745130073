from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ecc.errors import BadFile, InfeasibleBudget
from ecc.graph import live_channels, slim, trace_channels
from ecc.methods import AdmmSettings, EccSolver
from methods.nets import NETS, bytes_cost, goes_on_to_the_bit, macs_cost, traced, train

STEPS = 24
LR = 1e-2


def solver_for(net: nn.Module, graph: Any, budget: Any = "50%", steps: int = STEPS, **settings: Any) -> EccSolver:
    return EccSolver(net, graph, macs_cost(graph), budget, steps, **{"lr": LR, **settings})


# ---------------------------------------------------------------- every network, two budgets


@pytest.mark.parametrize("budget", ["60%", "35%"])
@pytest.mark.parametrize("name", NETS)
def test_budgets_are_met_on_schedule_resumed_to_the_bit_and_cut_exactly(name: str, budget: str) -> None:
    net, example, graph = traced(name)
    solver = solver_for(net, graph, budget)
    dense, share = float(macs_cost(graph).value(graph.widths())), float(budget[:-1]) / 100
    saved: dict[str, Any] = {}
    spent = [dense]
    stop = random.randrange(1, STEPS - 1)

    def after(step: int) -> None:
        spent.append(float(solver.energy))
        assert spent[-1] <= solver.target * (1 + 1e-9) or solver.target == dense
        if step == stop:
            saved.update(copy.deepcopy({"net": net.state_dict(), "solver": solver.state_dict()}))

    train(net, solver, example, range(STEPS), after)
    assert spent == sorted(spent, reverse=True)
    assert spent[1] == dense  # the warm-up
    assert spent[1 + solver._schedule.ramp_end] == spent[-1] <= share * dense * (1 + 1e-9)
    assert solver.is_met
    assert solver.progress == 1.0
    assert solver.limits == pytest.approx((share * dense,))
    assert solver.widths == live_channels(net, graph)

    # Stopped and taken up by another process: not a bit differs.
    other, _, _ = traced(name, seed=99)
    resumed = solver_for(other, graph, budget)
    goes_on_to_the_bit(net, other, resumed, saved, example, range(stop + 1, STEPS))
    assert resumed.widths == solver.widths
    assert resumed.duals == solver.duals

    # Cut: same outputs, and the widths that were counted.
    small = slim(net.eval(), graph)
    torch.testing.assert_close(small(example), net(example), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(solver.widths))
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


# ---------------------------------------------------------------- optimizers and dynamics


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
    ],
    ids=["AdamW", "SGD", "RMSprop", "Adam"],
)
def test_any_optimizer_can_step_the_weights(make: Any) -> None:
    net, example, graph = traced("residual")
    solver = solver_for(net, graph, optimizer=make(net.parameters()))
    before = net.head.weight.clone()  # type: ignore[union-attr, operator]
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert live_channels(net, graph) == solver.widths
    assert not torch.equal(before, net.head.weight)  # type: ignore[arg-type]


def test_until_channels_go_it_is_the_optimizer_within() -> None:
    net, example, graph = traced("residual")
    twin = copy.deepcopy(net)
    solver = solver_for(net, graph, "100%")
    plain = torch.optim.Adam(twin.parameters(), lr=LR)
    train(net, solver, example, range(5))
    train(twin, plain, example, range(5))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert solver.widths == graph.full_widths
    assert solver.is_met  # a budget above the dense network's cost is met at once


@pytest.mark.parametrize(("metric", "kept", "last"), [("adam_norm", 2.5, 0.5), ("taylor", 2.5 * 0.5, 0.25 * 2.75)])
def test_two_steps_by_hand(metric: str, kept: float, last: float) -> None:
    """fc1 (1 -> 3), fc2 (3 -> 1), gradients given: SGD with lr 1, then the least w^2, or (w g)^2, leaves."""
    net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
    graph = trace_channels(net, torch.randn(1, 1), verify=False)
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    solver = solver_for(
        net, graph, "40%", 2, optimizer=optimizer, warm_up=0.0, ramp=1.0, min_width_ratio=0.0, importance=metric
    )
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert net[1].weight.grad is not None
    # e_1 = 0.4 + 0.6 / 8 = 0.475 of 6 MACs. fc2 steps to (0.5, -2.5, 0.25): two leave. 2 MACs are left.
    net[1].weight.grad.copy_(torch.tensor([[0.5, 0.5, 2.75]]))
    solver.step()
    assert net[1].weight.tolist() == [[0.0, -2.5, 0.0]]
    assert float(solver.energy) == pytest.approx(2e-9)
    assert solver.target == pytest.approx(0.475 * 6e-9)
    y, z = solver.duals
    assert y["0"] == pytest.approx(kept**2 / 2)
    assert z == pytest.approx(last**2 / 2 / 2e-9)  # each channel costs 2e-9 J
    # The dead ones get gradients and stay dead.
    net[1].weight.grad.copy_(torch.tensor([[7.0, 1.0, -7.0]]))
    solver.step()
    assert net[1].weight.tolist() == [[0.0, -3.5, 0.0]]
    assert solver.widths == {"0": 1, "1": 1}
    assert solver.is_met


def test_the_papers_own_dynamics_prune_a_chain() -> None:
    net, example, graph = traced("chain")
    solver = solver_for(net, graph, "60%", 150, solver=AdmmSettings(width_lr=100.0), lr=1e-3)
    spent = []
    train(net, solver, example, range(150), lambda _: spent.append(float(solver.energy)))
    assert solver.is_met
    assert spent == sorted(spent, reverse=True)
    assert len(set(spent)) > 5  # on its way, not at once
    assert live_channels(net, graph) == solver.widths
    saved, widths = copy.deepcopy(solver.state_dict()), solver.widths
    again = solver_for(net, graph, "60%", 150, solver="admm")
    again.load_state_dict(saved)
    assert again.widths == widths
    assert again.duals == solver.duals


@pytest.mark.parametrize("name", ["scheduled", "admm"])
def test_all_numbers_at_once_are_those_one_by_one(name: str) -> None:
    net, example, graph = traced("digits")
    solver = solver_for(net, graph, solver=name)
    for _ in range(STEPS // 2):
        train(net, solver, example, range(1))
        spent, duals, widths = solver.numbers
        assert spent == tuple(float(cost) for cost in solver.cost)
        assert (duals, widths) == (solver.duals, solver.widths)
    assert widths != graph.full_widths or name == "admm"


def test_several_budgets_at_once() -> None:
    net, example, graph = traced("digits")
    costs = [macs_cost(graph), bytes_cost(graph)]
    solver = EccSolver(net, graph, costs, ["60%", "70%"], STEPS, lr=LR)
    train(net, solver, example, range(STEPS))
    macs, moved = (float(value) / dense for value, dense in zip(solver.cost, solver._limits.dense, strict=True))
    assert macs <= 0.6
    assert moved <= 0.7
    assert solver.is_met
    alone = EccSolver(net2 := traced("digits")[0], graph, costs[0], "60%", STEPS, lr=LR)
    train(net2, alone, example, range(STEPS))
    assert float(costs[1].value(graph.widths(alone.widths))) / solver._limits.dense[1] > 0.7  # the second had a say


def test_widths_are_rounded() -> None:
    net, example, graph = traced("digits")
    solver = solver_for(net, graph, "50%", width_multiple=8)
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert all(width % 8 == 0 for name, width in solver.widths.items() if name != "head")
    assert solver.widths != graph.full_widths


def test_frozen_parameters_are_scored_and_masked_too() -> None:
    net, example, graph = traced("chain")
    net.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    solver = solver_for(net, graph)
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert live_channels(net, graph) == solver.widths


# ---------------------------------------------------------------- limits


def test_a_lower_limit_goes_on_and_a_higher_one_brings_nothing_back() -> None:
    net, example, graph = traced("digits")
    solver = solver_for(net, graph, "60%")
    train(net, solver, example, range(STEPS))
    widths, limit = solver.widths, solver.limits[0]
    solver.set_limit(0.8 * limit, steps=10)
    assert solver.progress == 0.0
    assert not solver.is_met
    assert solver.target == pytest.approx(limit)
    train(net, solver, example, range(10))
    assert solver.is_met
    assert float(solver.energy) <= 0.8 * limit
    assert all(solver.widths[name] <= width for name, width in widths.items())
    lower = solver.widths
    solver.set_limit("90%")
    train(net, solver, example, range(5))
    assert solver.widths == lower
    assert solver.is_met


@pytest.mark.parametrize("uniform_floor", [-0.1, 1.0, float("nan")])
def test_a_share_of_the_even_cut_is_below_one(uniform_floor: float) -> None:
    net, _, graph = traced("residual")
    with pytest.raises(ValueError, match=f"uniform_floor={uniform_floor} is a share of the even cut"):
        solver_for(net, graph, "60%", uniform_floor=uniform_floor)
    with pytest.raises(ValueError, match="the paper's do not plan"):
        solver_for(net, graph, "60%", uniform_floor=0.5, solver="admm")


def test_unreachable_budgets_are_refused_before_any_step() -> None:
    net, _, graph = traced("transformer MLP")
    with pytest.raises(InfeasibleBudget, match=r"J is below .* lower min_width_ratio, or shrink"):
        solver_for(net, graph, "10%")
    with pytest.raises(InfeasibleBudget, match="lower min_width_ratio or width_multiple"):
        solver_for(net, graph, "30%", width_multiple=32)
    solver = solver_for(net, graph, "60%")
    with pytest.raises(InfeasibleBudget):
        solver.set_limit(1e-12)
    assert solver.limits[0] > 1e-12


# ---------------------------------------------------------------- states


def test_states_of_others_are_refused() -> None:
    net, _, graph = traced("chain")
    solver = solver_for(net, graph)
    with pytest.raises(BadFile, match="not a state of EccSolver"):
        solver.load_state_dict(torch.optim.Adam(net.parameters()).state_dict())
    other, _, other_graph = traced("residual")
    with pytest.raises(BadFile, match="belongs to network"):
        solver.load_state_dict(solver_for(other, other_graph).state_dict())


def test_what_was_dead_at_the_start_stays_dead() -> None:
    net, example, graph = traced("chain")
    with torch.no_grad():
        net.conv2.weight[:, 5] = 0  # type: ignore[union-attr, operator, index]
    solver = solver_for(net, graph, "100%")
    train(net, solver, example, range(4))
    assert solver.widths["conv1"] == 15
    assert (net.conv2.weight[:, 5] == 0).all()  # type: ignore[union-attr, operator, index]


def test_more_parameters_can_join() -> None:
    net, example, graph = traced("chain")
    extra = nn.Parameter(torch.ones(3))
    solver = solver_for(net, graph)
    solver.add_param_group({"params": [extra], "lr": 0.5})
    assert len(solver.param_groups) == len(solver.inner.param_groups) == 2
    extra.grad = torch.ones(3)
    train(net, solver, example, range(2))
    assert (extra < 1).all()


# ---------------------------------------------------------------- no waiting


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_to_copy"}:
            moves = name != "_to_copy" or (kwargs or {}).get("device") is not None
            self.seen += [name] if moves else []
        if name in {"index", "index_put_", "index_put"}:  # a mask as an index is a nonzero in disguise
            self.seen += ["mask" for index in args[1] if isinstance(index, Tensor) and index.dtype == torch.bool]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [{}, {"width_multiple": 4}, {"solver": "admm"}], ids=str)
def test_a_step_never_waits_for_the_device(settings: dict[str, Any]) -> None:
    """SGD, since Adam itself reads its step from a tensor on the CPU; its metric is checked in the next test."""
    net, example, graph = traced("digits")
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    solver = solver_for(net, graph, optimizer=optimizer, **settings)
    for step in range(8):
        net(example).square().mean().backward()
        with Waits() as waits:
            solver.step()
        assert waits.seen == [], step
    if "solver" not in settings:
        assert solver.widths != graph.full_widths


def test_adam_waits_no_more_often_with_us_than_alone() -> None:
    counts = []
    for wrapped in (False, True):
        net, example, graph = traced("digits")
        plain = torch.optim.Adam(net.parameters(), lr=LR, foreach=False)
        optimizer: Any = solver_for(net, graph, optimizer=plain) if wrapped else plain
        net(example).square().mean().backward()
        with Waits() as waits:
            for _ in range(6):
                optimizer.step()
        counts.append(len(waits.seen))
    assert counts[0] == counts[1] > 0


def solve_without_waits(net: nn.Module, example: Tensor, solver: Any, steps: int) -> None:
    """On a GPU, where torch raises an error if a step of the solver waits for it."""
    for _ in range(steps):
        net(example).square().mean().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            solver.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        solver.zero_grad()


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"width_multiple": 4}, {"solver": "admm"}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_on_a_gpu_torch_itself_sees_no_wait(kind: Any, settings: dict[str, Any]) -> None:
    net, example, graph = traced("digits")
    net, example = net.cuda(), example.cuda()
    solver = solver_for(net, graph, optimizer=kind(net.parameters(), lr=LR), **settings)
    solve_without_waits(net, example, solver, STEPS)
    assert live_channels(net, graph) == solver.widths
    assert solver.is_met or "solver" in settings
