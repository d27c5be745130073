"""`solver="admm"`: meets budgets without constants that are set by hand, in any unit and with any criterion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.graph import live_channels
from ecc.methods import Ecc, EccSolver
from ecc.methods.budget_controller import TOLERANCE_BAND
from ecc.methods.ecc.constraints import PruningProblem, ResourceConstraints
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.relative_admm import RelativeAdmmSolver
from ecc.methods.ecc.scheduled import Schedule, ScheduledSolver
from methods.ecc.test_admm import BUDGET, Alexnet
from methods.nets import ProductCost, bare_graph, bytes_cost, macs_cost, pair_cost, traced, train
from methods.test_budget_controller import Control, measure_by, models

STEPS = 40


def problem_of(full: list[int], costs: list[ProductCost], least: list[int], multiple: int = 1) -> PruningProblem:
    constraints = ResourceConstraints(costs, bare_graph(full), "cpu")
    return PruningProblem(ChannelRanking(full), constraints, torch.tensor(least), multiple)


def solve(problem: PruningProblem, importance: torch.Tensor, schedule: Schedule) -> RelativeAdmmSolver:
    alive = torch.ones(len(importance), dtype=torch.bool)
    solver = RelativeAdmmSolver(problem, alive, WidthPlanner(problem))
    for step in range(1, schedule.steps + 1):
        if solver.is_due(schedule, step):
            solver.update(importance, schedule, step, 1e-3)
    return solver


def lost(importance: torch.Tensor, alive: torch.Tensor) -> float:
    return float(importance[~alive].sum())


# ---------------------------------------------------------------- against oracles


def test_it_ends_at_the_greedy_widths_of_the_authors_alexnet() -> None:
    net = Alexnet(4)
    problem = problem_of(list(net.full), [net.cost], net.min_widths.tolist())
    solver = solve(problem, net.importance, Schedule((1.0,), (BUDGET,), 400))
    widths, expected = net.ranking.widths(solver.alive), net.greedy()
    apart = (widths - expected).abs() / (0.02 * torch.tensor(net.full)).clamp(min=2)
    assert apart.max() <= 1, (widths.tolist(), expected.tolist())
    assert 0.99 * BUDGET * net.dense <= net.energy(widths) <= BUDGET * net.dense


@given(seed=st.integers(0, 10_000), groups=st.integers(2, 6), multiple=st.sampled_from([1, 2, 4]))
@settings(max_examples=8, deadline=None)
def test_random_problems_end_within_the_budgets_and_near_the_plan(seed: int, groups: int, multiple: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    full = [int(width) for width in 4 * torch.randint(2, 9, (groups,), generator=draw)]
    pairs = [(k, k + 1) for k in range(groups - 1)]
    costs = [
        pair_cost(full, pairs, torch.rand(len(pairs), generator=draw).tolist(), linear=[0.1] * groups)
        for _ in range(1 + seed % 2)
    ]
    importance = torch.exp(2 * torch.randn(sum(full), generator=draw))
    ends = tuple((0.35 + 0.5 * torch.rand(len(costs), generator=draw)).tolist())
    problem = problem_of(full, costs, [multiple] * groups, multiple)
    schedule = Schedule((1.0,) * len(costs), ends, STEPS)
    solver = solve(problem, importance, schedule)
    widths = problem.ranking.widths(solver.alive)
    assert not bool(problem.constraints.exceeded(widths.to(torch.float64), [end * (1 + 1e-9) for end in ends]))
    assert all(width % multiple == 0 for width in widths.tolist())
    # Only the least important channels of a group are removed.
    for values, alive in zip(importance.split(full), solver.alive.split(full), strict=True):
        assert alive.all() or not alive.any() or values[alive].min() >= values[~alive].max()
    planned = ScheduledSolver(problem, torch.ones_like(solver.alive), planner=WidthPlanner(problem))
    for step in range(1, STEPS + 1):
        if planned.is_due(schedule, step):
            planned.update(importance, schedule, step, 1e-3)
    assert lost(importance, solver.alive) <= 2 * lost(importance, planned.alive) + 0.01 * float(importance.sum())


@given(seed=st.integers(0, 1000), scale=st.sampled_from([2.0**-40, 2.0**20]))
@settings(max_examples=2, deadline=None)
def test_units_do_not_matter(seed: int, scale: float) -> None:
    """The same widths with the importance, or the cost, in another unit."""
    draw, full = torch.Generator().manual_seed(seed), [12, 20, 8]
    importance = torch.exp(torch.randn(40, generator=draw))
    schedule, found = Schedule((1.0,), (0.5,), STEPS), []
    for by, price in ((1.0, 1.0), (scale, 1.0), (1.0, scale)):
        cost = pair_cost(full, [(0, 1), (1, 2)], [price, 2 * price], linear=[price] * 3)
        found.append(solve(problem_of(full, [cost], [1, 1, 1]), by * importance, schedule).alive)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_fixed_widths_are_reached_and_a_plan_can_be_proposed() -> None:
    full, importance = [12, 20], torch.rand(32, generator=torch.Generator().manual_seed(0))
    cost = pair_cost(full, [(0, 1)], [1.0], linear=[1.0, 1.0])
    problem, schedule = problem_of(full, [cost], [1, 1]), Schedule((1.0,), (0.5,), STEPS)
    solver = RelativeAdmmSolver(problem, torch.ones(32, dtype=torch.bool), WidthPlanner(problem))
    for step in range(1, 11):
        if solver.is_due(schedule, step):
            solver.update(importance, schedule, step, 1e-3)
    proposed = solver.propose(importance, [0.5])
    assert proposed is not None
    assert float(cost.value(torch.tensor(proposed, dtype=torch.float64))) <= 0.5 * problem.constraints.dense[0]
    chosen = [max(1, proposed[0] - 1), proposed[1]]
    solver.fix_plan(chosen)
    resumed = RelativeAdmmSolver(problem, torch.ones(32, dtype=torch.bool), WidthPlanner(problem))
    resumed.load([tensor.clone() for tensor in solver.state])
    for step in range(11, STEPS + 1):
        for one in (solver, resumed):
            if one.is_due(schedule, step):
                one.update(torch.rand(32), schedule, step, 1e-3)
    assert problem.ranking.widths(solver.alive).tolist() == chosen
    assert problem.ranking.widths(resumed.alive).tolist() == chosen


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize("importance", ["adam_norm", "taylor"])
@pytest.mark.parametrize("name", ["chain", "residual", "grouped", "digits"])
def test_multiples_and_two_budgets_hold_with_any_importance(name: str, importance: str) -> None:
    net, example, graph = traced(name)
    costs = [macs_cost(graph), bytes_cost(graph)]
    options: dict[str, Any] = {"lr": 1e-2, "solver": "admm", "importance": importance, "width_multiple": 4}
    solver = EccSolver(net, graph, costs, ["60%", "75%"], STEPS, **options)
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    widths = live_channels(net, graph)
    assert widths == solver.widths
    assert widths != graph.full_widths
    assert all(widths[group.name] % 4 == 0 or widths[group.name] == group.width for group in graph.prunable)


@pytest.mark.parametrize(
    ("name", "share", "factor"),
    [pytest.param("chain", 0.6, 1.25, marks=pytest.mark.thorough), ("residual", 0.5, 0.8)],
)
def test_the_controller_corrects_a_wrong_model(name: str, share: float, factor: float) -> None:
    true, wrong = models(name, factor)
    limit = share * true.dense
    trusting = Control(Ecc(), [wrong], [limit], measure_by(wrong), name, solver="admm")
    assert trusting.run().is_met
    assert not TOLERANCE_BAND[0] <= true.at(trusting.widths) / limit <= TOLERANCE_BAND[1]
    control = Control(Ecc(), [wrong], [limit], measure_by(true), name, solver="admm")
    controller = control.run()
    assert (controller.is_met, controller.note) == (True, "")
    assert TOLERANCE_BAND[0] <= true.at(control.widths) / limit <= TOLERANCE_BAND[1]
    assert controller.checks[-1].widths == control.widths
