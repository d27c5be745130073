"""Allocation of widths against exhaustive search, with products, steps, several budgets and costs that fall."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from ecc.energy import counted_cost
from ecc.energy.cost import CostForm, SwitchedTerms
from ecc.graph import ChannelGraph, removed_branches, slim, trace_channels
from ecc.methods import EccSolver
from ecc.methods.ecc.allocation import WidthAllocator
from ecc.methods.ecc.constraints import PruningProblem, ResourceConstraints
from ecc.methods.ecc.planner import WidthPlanner, _PlanProblem, allowed_widths
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import Schedule, ScheduledSolver
from ecc.zoo import ERFNet
from methods.nets import bare_graph, traced, train


def value(form: CostForm, widths: tuple[int, ...]) -> float:
    return form.value(np.asarray(widths, float))


def random_form(rng: np.random.Generator, full: list[int], falls: bool) -> CostForm:
    """Products of all pairs, steps on single groups and on their sum; some steps fall."""
    groups = len(full)
    quadratic = np.triu(rng.exponential(size=(groups, groups)) * rng.integers(0, 2, (groups, groups)))
    rows = np.concatenate([np.eye(groups).repeat(3, axis=0), np.ones((2, groups))]) / 4
    heights = rng.exponential(size=len(rows)) * 10 * rng.integers(0, 2, len(rows))
    if falls:
        heights *= rng.choice([1.0, 1.0, -0.5], len(rows))
    start = rng.uniform(0, 0.25 * max(full), len(rows))
    linear = rng.exponential(size=groups) * 3
    multiple = np.zeros(len(rows))
    if falls:  # sizes that are not multiples of 8 cost more
        rows[::4] *= 4
        start[::4], multiple[::4] = 0, 8
    cap = np.ones(len(rows))
    return CostForm(5.0, linear, quadratic + quadratic.T, heights, csr_array(rows), start, cap, multiple)


def linear_form(constant: float, linear: list[float]) -> CostForm:
    count, none = len(linear), np.zeros(0)
    return CostForm(constant, np.array(linear), np.zeros((count, count)), none, csr_array((0, count)), none, none, none)


def exhaustive(
    forms: list[CostForm], budgets: list[float], candidates: list[list[int]], losses: list[np.ndarray]
) -> float:
    best = np.inf
    for picks in itertools.product(*(range(len(one)) for one in candidates)):
        widths = tuple(candidates[g][k] for g, k in enumerate(picks))
        if all(value(form, widths) <= budget for form, budget in zip(forms, budgets, strict=True)):
            best = min(best, sum(float(losses[g][k]) for g, k in enumerate(picks)))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.lists(st.floats(0.2, 1.05), min_size=1, max_size=2))
def test_it_finds_what_exhaustive_search_finds(seed: int, groups: int, falls: bool, fractions: list[float]) -> None:
    rng = np.random.default_rng(seed)
    full = [int(one) * 4 for one in rng.integers(1, 7, groups)]
    candidates = [allowed_widths(one, 4, 4, 0) for one in full]
    losses = [np.concatenate([[0.0], np.sort(rng.exponential(size=len(one) - 1)).cumsum()]) for one in candidates]
    forms = [random_form(rng, full, falls) for _ in fractions]
    budgets = [max(f * value(one, tuple(full)), 0.1) for f, one in zip(fractions, forms, strict=True)]
    best = exhaustive(forms, budgets, candidates, losses)
    found = WidthAllocator(forms, budgets, candidates).solve(losses)
    assert found.is_feasible == (best < np.inf)
    if found.is_feasible:
        for form, budget in zip(forms, budgets, strict=True):
            assert value(form, found.widths) <= budget * (1 + 1e-9)
        picked = [list(one).index(width) for one, width in zip(candidates, found.widths, strict=True)]
        assert found.lost == pytest.approx(sum(losses[g][k] for g, k in enumerate(picked)))
        assert found.lost <= best * 1.05 + 1e-9


def test_a_width_that_costs_more_than_a_wider_one_is_not_chosen() -> None:
    """16 channels cost 10, 12 cost 12, 8 cost 7: with a budget of 19 for two such groups, one keeps 16 and one 8."""
    table = {16: 10.0, 12: 12.0, 8: 7.0, 4: 5.0}
    # Straight lines between the four points, as steps of four channels each.
    heights = np.array([7 - 5, 12 - 7, 10 - 12] * 2, dtype=float)
    rows = np.repeat(np.eye(2), 3, axis=0) / 4
    start = np.array([1, 2, 3] * 2, dtype=float)
    form = CostForm(10.0, np.zeros(2), np.zeros((2, 2)), heights, csr_array(rows), start, np.ones(6), np.zeros(6))
    assert [value(form, (width, 4)) - 5 for width in table] == list(table.values())
    losses = [np.array([0.0, 1.0, 3.0, 9.0]), np.array([0.0, 1.5, 3.5, 9.5])]
    allocator = WidthAllocator([form], [19.0], [list(table)] * 2)
    assert allocator.solve(losses)[:3] == ((8, 16), 3.0, True)
    for budget in np.linspace(10.5, 21, 30):
        assert 12 not in WidthAllocator([form], [budget], [list(table)] * 2).solve(losses).widths


def test_without_feasible_widths_it_returns_the_cheapest() -> None:
    form = linear_form(1.0, [1.0, 2.0])
    losses = [np.array([0.0, 1.0]), np.array([0.0, 1.0])]
    assert WidthAllocator([form], [5.0], [[8, 4], [8, 4]]).solve(losses)[:3] == ((4, 4), 2.0, False)
    assert WidthAllocator([form], [25.0], [[8, 4], [8, 4]]).solve(losses)[:3] == ((8, 8), 0.0, True)


def test_one_channel_worth_more_than_all_others_does_not_blind_it() -> None:
    form = linear_form(0.0, [1.0] * 3)
    losses = [np.array([0.0, 1e38]), np.array([0.0, 1e-6]), np.array([0.0, 2e-6])]
    assert WidthAllocator([form], [23.0], [[8, 4]] * 3).solve(losses).widths == (8, 4, 8)


@cache
def erfnet() -> ChannelGraph:
    return trace_channels(ERFNet(), torch.zeros(1, 3, 64, 64), verify=False)


@pytest.mark.parametrize("resource", ["macs", "params", "peak_bytes", "activation_bytes"])
def test_forms_are_the_costs(resource: str) -> None:
    """For a maximum, the form is the budget plus the excess of each layer."""
    cost = counted_cost(erfnet(), resource)
    rng = np.random.default_rng(0)
    for _ in range(4):
        widths = tuple(int(rng.integers(1, full + 1)) for full in cost.full_widths)
        real = float(cost.value(torch.tensor(widths, dtype=torch.float64)))
        if resource == "peak_bytes":
            assert value(cost.form(real * 1.01), widths) == pytest.approx(real * 1.01)
            assert value(cost.form(real * 0.9), widths) >= real
        else:
            assert value(cost.form(1.0), widths) == pytest.approx(real)


@pytest.mark.parametrize(
    ("live", "least", "multiple", "remainder", "expected"),
    [
        (16, 4, 8, 0, [16, 8]),
        (13, 5, 8, 5, [13, 5]),
        (10, 8, 8, 0, [10, 8]),
        (6, 6, 8, 0, [6]),
        (3, 1, 1, 0, [3, 2, 1]),
        (8, 8, 8, 0, [8]),
    ],
)
def test_allowed_widths(live: int, least: int, multiple: int, remainder: int, expected: list[int]) -> None:
    assert allowed_widths(live, least, multiple, remainder) == expected


# ---------------------------------------------------------------- branches


def test_a_plan_removes_a_branch_where_that_loses_less() -> None:
    """Two groups; the second is a branch with a fixed cost of 40 that only its removal saves."""
    switched = SwitchedTerms((1,), np.array([40.0]), csr_array((1, 2)), np.ones(1), csr_array((1, 2)), np.ones(1))
    form = linear_form(40.0, [1.0, 1.0])._replace(switched=(switched,))
    assert (value(form, (16, 16)), value(form, (16, 0))) == (72.0, 16.0)
    assert form.without({1}).value(np.array([16.0, 0.0])) == 16.0
    graph, ranking = bare_graph([16, 16]), ChannelRanking([16, 16])
    constraints = ResourceConstraints([FormCost(form, tuple(graph.full_widths), (16, 16))], graph, "cpu")
    planner = WidthPlanner(PruningProblem(ranking, constraints, torch.tensor([4, 4]), 4), branches=[[1]])
    alive = torch.ones(32, dtype=torch.bool)
    for worth, planned in ((3.0, [16, 0]), (1e6, [8, 4])):
        importance = torch.cat([torch.ones(16), torch.full((16,), 0.1), torch.tensor([worth])])
        assert planner.plan(alive, importance, [52 / 72]).tolist() == planned
    # A branch that is removed stays removed.
    alive[16:] = False
    assert planner.plan(alive, torch.cat([torch.ones(32), torch.tensor([1e6])]), [0.9]).tolist() == [16, 0]


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_with_changing_plans_keeps_nearly_what_the_best_plan_keeps(seed: int) -> None:
    """Eight branches of 16 channels that cost 40 however narrow they are, and importance that changes between plans."""
    branches, width = 8, 16
    fixed = [
        SwitchedTerms(
            (b,), np.array([40.0]), csr_array((1, branches)), np.ones(1), csr_array((1, branches)), np.ones(1)
        )
        for b in range(branches)
    ]
    form = linear_form(40.0 * branches, [1.0] * branches)._replace(switched=tuple(fixed))
    graph, ranking = bare_graph([width] * branches), ChannelRanking([width] * branches)
    constraints = ResourceConstraints(
        [FormCost(form, tuple(graph.full_widths), (width,) * branches, tuple("abcdefgh"))], graph, "cpu"
    )
    problem = PruningProblem(ranking, constraints, torch.full((branches,), 2), 2)
    random = torch.Generator().manual_seed(seed)
    mean = torch.rand(branches * width, generator=random)
    of_branches = 0.7 * mean.view(branches, width).sum(1)  # less than its channels, which depend on each other

    def lost(widths: torch.Tensor) -> float:
        rows = [one.sort().values[: width - int(kept)] for one, kept in zip(mean.split(width), widths, strict=True)]
        parts = [float(of_branches[b]) if kept == 0 else float(rows[b].sum()) for b, kept in enumerate(widths.tolist())]
        return sum(parts)

    alive = torch.ones(branches * width, dtype=torch.bool)
    solver = ScheduledSolver(problem, alive, planner=WidthPlanner(problem, branches=[[b] for b in range(branches)]))
    schedule = Schedule((1.0,), (0.5,), 100)
    exact = torch.cat([mean, of_branches])
    best = WidthPlanner(problem, branches=[[b] for b in range(branches)]).plan(alive, exact, [0.5])
    for step in range(1, 101):
        if solver.is_due(schedule, step):
            noise = torch.exp(0.5 * torch.randn(len(exact), generator=random))
            solver.update(exact * noise, schedule, step, 1.0)
    widths = ranking.widths(solver.alive)
    assert not bool(constraints.exceeded(widths.double()[None], (0.5,)))
    assert lost(widths) <= 1.2 * lost(best)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_removes_nearly_the_best_set_of_branches(seed: int, share: float) -> None:
    """Compared with an allocation for each of 64 sets of branches. At 30 % widths alone do not meet the budget."""
    random = np.random.default_rng(seed)
    groups, width, least = 7, 12, 2
    fixed = [0.0, *random.uniform(10, 60, groups - 1)]
    terms = [
        SwitchedTerms(
            (g,), np.array([fixed[g]]), csr_array((1, groups)), np.ones(1), csr_array((1, groups)), np.ones(1)
        )
        for g in range(1, groups)
    ]
    form = linear_form(sum(fixed), random.uniform(0.5, 4, groups).tolist())._replace(switched=tuple(terms))
    graph, ranking = bare_graph([width] * groups), ChannelRanking([width] * groups)
    cost = FormCost(form, tuple(graph.full_widths), (width,) * groups, tuple("bcdefg"))
    problem = PruningProblem(
        ranking, ResourceConstraints([cost], graph, "cpu"), torch.full((groups,), least), width_multiple=2
    )
    planner = WidthPlanner(problem, branches=[[g] for g in range(1, groups)])
    of_channels = torch.from_numpy(random.lognormal(0, 1, groups * width)).float()
    of_branches = torch.from_numpy(random.uniform(0.6, 1.2, groups - 1)).float() * of_channels.view(groups, width)[
        1:
    ].sum(1)
    importance, alive = torch.cat([of_channels, of_branches]), torch.ones(groups * width, dtype=torch.bool)
    inner = planner._problem(alive, importance, [share])
    sets = [frozenset(s) for n in range(groups) for s in itertools.combinations(range(groups - 1), n)]
    found = [one for one in map(inner.solve, sets) if one.is_feasible]
    planned = planner.plan(alive, importance, [share]).tolist()
    removed = frozenset(g - 1 for g in range(1, groups) if planned[g] == 0)
    ours = inner.solve(removed)
    assert list(ours.widths) == planned
    assert ours.is_feasible
    assert ours.lost <= 1.05 * min(one.lost for one in found)


@pytest.mark.parametrize("is_taylor", [True, False])
def test_what_groups_and_branches_lose(is_taylor: bool) -> None:
    """Two branches of one stream, of one group each. Norms of weights are not in units of the loss."""
    graph, ranking = bare_graph([4, 4, 4]), ChannelRanking([4, 4, 4])
    cost = FormCost(linear_form(1.0, [1.0, 1.0, 1.0]), tuple(graph.full_widths), (4, 4, 4), ("b", "c"))
    problem = PruningProblem(ranking, ResourceConstraints([cost], graph, "cpu"), torch.tensor([1, 1, 1]))
    planner = WidthPlanner(problem, per_remaining_share=is_taylor, branches=[[1], [2]], streams=[0, 0])
    importance = torch.tensor([3.0, 1.0, 2.0, 4.0, *[1.0] * 8, 5.0, 2.0])
    found = planner._problem(torch.ones(12, dtype=torch.bool), importance, [0.5])
    if is_taylor:
        assert found.lost[0][:4] == pytest.approx([0, 1 * (4 / 3) ** 0.5, 3 * 2**0.5, 6 * 2])
        assert found.branch_lost == [5.0, 2.0]
        assert found.lost_with(frozenset({0})) == {0: 5.0 * 3 / 2}
        assert found.lost_with(frozenset({0, 1})) == {0: 5.0 * 3, 1: 2.0 * 3}
    else:
        assert found.lost[0][:4] == pytest.approx([0, 1, 3, 6])
        assert found.branch_lost == [5.0, 3.0]  # at least what the minimum width loses
        assert found.lost_with(frozenset({0, 1})) == {0: 5.0, 1: 3.0}


@dataclass(frozen=True)
class FormCost:
    """A cost from its form."""

    arrays: CostForm
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    branches: tuple[str, ...] = ("b",)
    resource: str = "energy"
    unit: str = "J"
    label: str = "counted"

    def value(self, widths: torch.Tensor) -> torch.Tensor:
        rows = widths.reshape(-1, len(self.groups)).double().numpy()
        return torch.tensor([self.arrays.value(row) for row in rows]).reshape(widths.shape[:-1])

    def gradient(self, widths: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.arrays.linear)

    def to(self, device: torch.device | str) -> FormCost:
        return self

    def form(self, budget: float) -> CostForm:
        return self.arrays


@pytest.mark.parametrize(("budget", "removed"), [("60%", 0), ("8%", 1)])
def test_a_solver_removes_branches_and_the_slim_network_is_exact(budget: str, removed: int) -> None:
    net, example, graph = traced("digits")
    assert len(graph.branches) == 2
    cost = counted_cost(graph, "macs")
    solver = EccSolver(net, graph, cost, budget, 30, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3))
    train(net, solver, example, range(20))
    state = solver.state_dict()
    train(net, solver, example, range(20, 30))
    assert solver.is_met
    gone = removed_branches(net, graph)
    assert len(gone) >= removed
    for branch in graph.branches:
        assert all((solver.widths[name] == 0) == (branch.name in gone) for name in branch.groups)
    small = slim(net, graph)
    torch.testing.assert_close(small.eval()(example), net.eval()(example), rtol=1e-4, atol=1e-5)
    copied = copy.deepcopy(traced("digits")[0])
    solver.mask_(copied)
    assert removed_branches(copied, graph) == gone
    other, _, _ = traced("digits")
    again = EccSolver(other, graph, cost, budget, 30, optimizer=torch.optim.Adam(other.parameters(), lr=1e-3))
    again.load_state_dict(state)
    assert float(again.energy) == pytest.approx(float(cost.value(again._counts().double())), rel=0.2)
    without = EccSolver(traced("digits")[0], graph, cost, "60%", 30, depth=False)
    assert without._exits is None


def test_removed_branches_lose_more_where_few_terms_of_their_stream_remain() -> None:
    """A stream is the sum of its branches and of what enters it: one branch alone is half of it."""
    problem = _PlanProblem(
        forms=[], budgets=[], live=[4] * 4, allowed=[], lost=[], branches=[[0], [1], [2], [3]],
        branch_lost=[1.0, 2.0, 3.0, 4.0], streams=[7, 8, 8, 8],
    )  # fmt: skip
    assert problem.lost_with(frozenset({0})) == {0: 2.0}
    assert problem.lost_with(frozenset({1})) == {1: pytest.approx(2.0 * 4 / 3)}
    assert problem.lost_with(frozenset({1, 2, 3})) == {1: 8.0, 2: 12.0, 3: 16.0}
    earlier = replace(problem, live=[4, 4, 4, 0])  # the last branch is gone already
    assert earlier.lost_with(frozenset({1})) == {1: 3.0}
    assert replace(problem, streams=None).lost_with(frozenset({0, 1})) == {0: 1.0, 1: 2.0}
