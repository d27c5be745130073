"""The scheduled solver: schedule, one update against a slow loop, plans, and its state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecc.methods.ecc import planner, scheduled
from ecc.methods.ecc.constraints import PruningProblem, ResourceConstraints
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import (
    MAX_UPDATES,
    PLANS,
    FixedMask,
    PruneDecision,
    Schedule,
    ScheduledPruner,
    ScheduledSolver,
)
from methods.nets import ProductCost, bare_graph, pair_cost

# ---------------------------------------------------------------- schedule


def updates(schedule: Schedule) -> list[int]:
    return [step for step in range(schedule.steps + 1) if schedule.updates_at(step)]


def test_schedules_by_hand() -> None:
    schedule = Schedule((1.0,), (0.6,), 1000)
    assert (schedule.ramp_start, schedule.ramp_end, schedule.every) == (20, 620, 4)
    assert schedule.fractions(0) == schedule.fractions(20) == (1.0,)
    assert schedule.fractions(320) == pytest.approx((0.6 + 0.4 / 8,))
    assert schedule.fractions(620) == schedule.fractions(1000) == (0.6,)
    assert updates(schedule) == list(range(24, 621, 4))
    plans = [step for step in updates(schedule) if schedule.plans_at(step)]
    assert (plans[0], plans[-1]) == (24, 620)
    assert PLANS <= len(plans) <= 1.25 * PLANS + 2  # updates between plans are a whole number
    short, long = Schedule((1.0,), (0.6,), 100), Schedule((1.0,), (0.5,), 20_001)
    assert updates(short) == list(range(3, 63))  # at every step
    assert long.every == 30
    assert len(updates(long)) <= MAX_UPDATES + 1
    assert Schedule((0.5,), (0.8,), 10).fractions(1) == (0.8,)  # a start below the end does not rise


@given(st.integers(1, 2000), st.floats(0, 0.4), st.floats(0.01, 0.6), st.floats(0.1, 1.2))
def test_every_schedule_falls_to_its_end_in_time(steps: int, warm_up: float, ramp: float, end: float) -> None:
    schedule = Schedule((1.0, 0.9), (end, 0.5), steps, warm_up, ramp)
    found = updates(schedule)
    assert schedule.ramp_start < found[0]
    assert found[-1] == schedule.ramp_end <= steps
    fractions = [schedule.fractions(step) for step in found]
    assert fractions[-1] == (end, 0.5)
    assert all(after[k] <= before[k] for before, after in pairwise(fractions) for k in (0, 1))


@pytest.mark.parametrize(
    ("steps", "warm_up", "ramp", "words"),
    [(0, 0.02, 0.6, "steps=0 must be"), (9, 0.5, 0.6, "fractions of the steps"), (9, 0.1, 0.0, "ramp above 0")],
)
def test_impossible_schedules_are_refused(steps: int, warm_up: float, ramp: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule((1.0,), (0.5,), steps, warm_up, ramp)


# ---------------------------------------------------------------- updates


@dataclass
class Problem:
    """Random groups, products of their widths as costs, and channel importance."""

    costs: list[ProductCost]
    full: list[int]
    min_widths: list[int]
    importance: Tensor
    width_multiple: int = 1
    uniform_floor: float = 0.0
    own_steps: list[int] | None = None
    """Step of each group; None for the multiple."""

    def __post_init__(self) -> None:
        self.constraints = ResourceConstraints(self.costs, bare_graph(self.full), "cpu")
        self.ranking = ChannelRanking(self.full)
        self.steps = self.own_steps or [self.width_multiple] * len(self.full)
        self.problem = PruningProblem(
            self.ranking,
            self.constraints,
            torch.tensor(self.min_widths),
            self.width_multiple,
            steps=None if self.own_steps is None else torch.tensor(self.own_steps),
        )

    @property
    def pruner(self) -> ScheduledPruner:
        return ScheduledPruner(self.problem)

    @property
    def planner(self) -> WidthPlanner:
        return WidthPlanner(self.problem, self.uniform_floor)

    def start(self) -> PruneDecision:
        return self.pruner.start(torch.ones(sum(self.full), dtype=torch.bool))

    def update(self, fractions: list[float], ends: list[float], planned: Tensor | None = None) -> PruneDecision:
        return self.pruner.update(self.start(), self.importance, fractions, ends, planned)

    def plan(self, ends: list[float]) -> list[int]:
        return self.planner.plan(self.start().alive, self.importance, ends).tolist()

    def widths(self, decision: PruneDecision) -> list[int]:
        return self.ranking.widths(decision.alive).tolist()

    def fraction(self, widths: list[int], which: int = 0) -> float:
        return self.constraints.fractions(torch.tensor(widths))[which]

    def meets(self, widths: list[int] | list[float], ends: list[float]) -> bool:
        return not bool(self.constraints.exceeded(torch.tensor([widths], dtype=torch.float64), ends))

    def lost(self, widths: list[int]) -> float:
        """Importance of the least important channels that are removed."""
        groups = zip(self.importance.double().split(self.full), widths, strict=True)
        return sum(float(group.sort().values[: len(group) - width].sum()) for group, width in groups)

    def slow_update(self, fractions: list[float], ends: list[float]) -> list[int]:
        """Widths after an update, one block after the other in the order of mean importance per cost."""
        widths = list(self.full)
        slope = self.constraints.gradient(torch.tensor(widths, dtype=torch.float64), ends).tolist()
        blocks = []
        for group, importance in enumerate(self.importance.split(self.full)):
            ordered, kept, first, step = sorted(importance.tolist()), widths[group], 0, self.steps[group]
            while kept > self.min_widths[group]:
                size = kept % step or step
                blocks.append((sum(ordered[first : first + size]) / size / slope[group], group, first, size))
                first, kept = first + size, kept - size
        for _, group, _, size in sorted(blocks):
            if all(self.fraction(widths, k) <= allowed for k, allowed in enumerate(fractions)):
                break
            widths[group] -= size
        return widths

    def check_widths(self, widths: list[int]) -> None:
        for width, full, least, step in zip(widths, self.full, self.min_widths, self.steps, strict=True):
            assert least <= width <= full
            assert width % step == 0 or width == full


@st.composite
def problems(draw: st.DrawFn, max_width: int = 24, costs: int = 1, width_multiple: int | None = None) -> Problem:
    full = draw(st.lists(st.integers(1, max_width), min_size=1, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    multiple = draw(st.sampled_from([1, 2, 4, 8])) if width_multiple is None else width_multiple
    are_equal = multiple == 1 or draw(st.booleans())
    steps = [multiple if are_equal else draw(st.sampled_from([1, 2, multiple])) for _ in full]
    importance = torch.exp(2 * torch.randn(sum(full), generator=generator))
    if draw(st.booleans()):  # ties
        importance = importance.clamp(1, 2).round()
    made = []
    for _ in range(costs):
        pairs = [(k, k + 1) for k in range(len(full) - 1)]
        coefficients = torch.rand(len(pairs), generator=generator).tolist()
        linear = torch.rand(len(full), generator=generator).tolist()
        made.append(pair_cost(full, pairs, coefficients, linear, base=draw(st.sampled_from([0.0, 1.0]))))
    groups = zip(full, steps, strict=True)
    least = [min(width, math.ceil(draw(st.integers(1, width)) / 2 / step) * step) for width, step in groups]
    return Problem(made, full, least, importance, multiple, own_steps=None if are_equal else steps)


FRACTIONS = st.floats(0.05, 1.1)


@given(problems(), FRACTIONS)
def test_one_update_equals_the_slow_loop(problem: Problem, end: float) -> None:
    assert problem.widths(problem.update([end], [end])) == problem.slow_update([end], [end])


@given(problems(costs=2), FRACTIONS, FRACTIONS)
def test_with_two_budgets_an_update_meets_both(problem: Problem, first: float, second: float) -> None:
    fractions, ends = [first, second], [first * 0.9, second * 0.7]
    assert problem.widths(problem.update(fractions, ends)) == problem.slow_update(fractions, ends)


@pytest.mark.parametrize("fanout", [2, 3, 64])
def test_the_search_does_not_depend_on_its_fanout(fanout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduled, "FANOUT", fanout)
    full = [40, 70, 33]
    cost = pair_cost(full, [(0, 1), (1, 2)], [1.0, 2.0], linear=[1.0, 5.0, 9.0])
    problem = Problem([cost], full, [1, 1, 1], torch.rand(sum(full), generator=torch.Generator().manual_seed(1)))
    for end in (1.0, 0.999, 0.8, 0.5, 0.2, 0.01, 1e-6):
        assert problem.widths(problem.update([end], [end])) == problem.slow_update([end], [end])


@settings(max_examples=5)
@given(problems(max_width=40, width_multiple=1), st.floats(0.3, 0.9))
def test_many_small_updates_are_the_exact_greedy_algorithm(problem: Problem, end: float) -> None:
    """The exact greedy algorithm removes one channel at a time and evaluates dE/ds each time."""
    widths = list(problem.full)
    ordered = [sorted(group.tolist()) for group in problem.importance.split(problem.full)]
    while problem.fraction(widths) > end:
        slope = problem.constraints.gradient(torch.tensor(widths, dtype=torch.float64), [end]).tolist()
        candidates = [
            (ordered[g][problem.full[g] - width] / slope[g], g)
            for g, width in enumerate(widths)
            if width > problem.min_widths[g]
        ]
        if not candidates:
            break
        widths[min(candidates)[1]] -= 1
    decision, pruner = problem.start(), problem.pruner
    for step in range(120):
        allowed = end + (1 - end) * (1 - (step + 1) / 120)
        decision = pruner.update(decision, problem.importance, [allowed], [end])
    assert all(abs(mine - exact) <= 1 for mine, exact in zip(problem.widths(decision), widths, strict=True))


@given(problems(costs=2), st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5))
def test_widths_are_multiples_above_their_minimum_and_nothing_comes_back(
    problem: Problem, allowed: list[float]
) -> None:
    decision, pruner, generator = problem.start(), problem.pruner, torch.Generator().manual_seed(7)
    for fraction in allowed:  # also rising, and with another importance each time
        before, importance = decision, torch.rand(len(problem.importance), generator=generator)
        decision = pruner.update(before, importance, [fraction, 1.0], [0.5, 0.5])
        assert not (decision.alive & ~before.alive).any()
        widths = problem.widths(decision)
        problem.check_widths(widths)
        assert problem.fraction(widths) <= fraction + 1e-12 or widths == problem.min_widths


@given(problems(width_multiple=1), st.floats(0.2, 0.95))
def test_the_duals_are_those_of_the_fixed_point(problem: Problem, end: float) -> None:
    """Stationarity of Eq. (4): 2 alpha z dE/ds_u <= 2 alpha y_u, and a / (dE/ds) of removed channels <= 2 alpha z."""
    decision = problem.update([end], [end])
    slope = problem.constraints.gradient(torch.tensor(problem.full, dtype=torch.float64), [end])
    group, removed = problem.ranking.group, ~decision.alive
    ratios = problem.importance.double() / slope[group]
    assert decision.threshold == (ratios[removed].max() if removed.any() else 0)
    free = (torch.tensor(problem.widths(decision)) > torch.tensor(problem.min_widths))[group] & decision.alive
    assert not free.any() or ratios[free].min() >= decision.threshold
    live = zip(problem.importance.split(problem.full), decision.alive.split(problem.full), strict=True)
    assert decision.next_importance.tolist() == [float(importance[alive].min()) for importance, alive in live]


def test_a_group_that_saves_nothing_is_pruned_last() -> None:
    cost = pair_cost([8, 8], [], [], linear=[1.0, 0.0])
    problem = Problem([cost], [8, 8], [2, 2], torch.cat([torch.full((8,), 9.0), torch.full((8,), 1e-3)]))
    assert problem.widths(problem.update([0.5], [0.5])) == [4, 8]


def test_equal_channels_are_removed_in_whole_blocks() -> None:
    """Means of equal numbers must tie exactly, or a later block would come before the first, shorter one."""
    cost = pair_cost([13, 21], [(0, 1)], [0.1], linear=[1.0, 1.0])
    problem = Problem([cost], [13, 21], [4, 4], torch.full((34,), 0.1), width_multiple=4)
    for end in (0.99, 0.9, 0.7, 0.5, 0.3):
        problem.check_widths(problem.widths(problem.update([end], [end])))


# ---------------------------------------------------------------- plans


@given(problems(costs=2), st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_a_plan_meets_the_budget_and_loses_no_more_than_the_order(
    problem: Problem, first: float, second: float
) -> None:
    ends = [first, second]
    planned, in_order = problem.plan(ends), problem.slow_update(ends, ends)
    problem.check_widths(planned)
    assert problem.meets(planned, ends) or planned == in_order == problem.min_widths
    assert problem.lost(planned) <= problem.lost(in_order) * (1 + 1e-12)


@pytest.mark.parametrize(("large", "planned"), [(255.0, [3, 18]), (300.0, [4, 8])], ids=["removed", "kept"])
def test_a_block_that_saves_too_much_is_exchanged(large: float, planned: list[int]) -> None:
    """40 channels of 1 J and 4 of 10 J, of which 32 J must go: by the order alone 35 or 40 J would."""
    cost = pair_cost([4, 40], [], [], linear=[10.0, 1.0])
    importance = torch.cat([torch.tensor([large, 1e6, 1e6, 1e6]), torch.arange(1.0, 41.0)])
    problem = Problem([cost], [4, 40], [1, 1], importance)
    assert problem.fraction(problem.slow_update([0.6], [0.6])) < 0.6
    assert problem.plan([0.6]) == planned
    assert problem.fraction(planned) == pytest.approx(0.6)
    decision, pruner = problem.start(), problem.pruner
    for allowed in torch.linspace(1.0, 0.6, 41).tolist():
        kept = problem.planner.plan(decision.alive, importance, [0.6])
        decision = pruner.update(decision, importance, [allowed], [0.6], kept)
    assert problem.widths(decision) == planned


@given(problems(), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_an_update_removes_nothing_that_the_plan_keeps(problem: Problem, end: float, way: float) -> None:
    allowed, planned = end + way * (1 - end), problem.plan([end])
    widths = problem.widths(problem.update([allowed], [end], torch.tensor(planned)))
    assert all(width >= least for width, least in zip(widths, planned, strict=True))
    assert problem.fraction(widths) <= allowed or widths == problem.min_widths


@settings(max_examples=30)
@given(problems(costs=2), st.floats(0.05, 0.99), st.floats(0.05, 0.99), st.sampled_from([0.5, 0.8, 0.95]))
def test_a_uniform_floor_bounds_the_plan(problem: Problem, first: float, second: float, floor: float) -> None:
    problem.uniform_floor, ends = floor, [first, second]
    bound = problem.planner.uniform_min_widths(ends).tolist()
    for width, full, least, step in zip(bound, problem.full, problem.min_widths, problem.steps, strict=True):
        assert least <= width <= full
        assert width % step == 0 or width in (full, least)
    ratios = [k / planner.UNIFORM_CANDIDATES for k in range(planner.UNIFORM_CANDIDATES)]
    pairs = list(zip(problem.full, problem.min_widths, strict=True))
    fitting = [r for r in ratios if problem.meets([max(r * full, least) for full, least in pairs], ends)]
    largest = floor * max(fitting, default=0.0)
    for width, step, (full, least) in zip(bound, problem.steps, pairs, strict=True):
        assert width <= max(largest * full + step, least)
    assert bound == problem.min_widths or problem.meets(bound, [planner.UNIFORM_BUDGET * end for end in ends])
    planned = problem.plan(ends)
    assert all(width >= least for width, least in zip(planned, bound, strict=True))
    assert problem.meets(planned, ends) or planned == problem.min_widths


def test_a_uniform_floor_by_hand() -> None:
    """Two groups of the same cost, one of them of little importance; half of the cost must go."""
    importance = torch.cat([torch.full((64,), 1e-3), torch.ones(64)])
    for floor, planned in ((0.0, [6, 58]), (0.5, [16, 48]), (0.75, [24, 40]), (0.95, [28, 36])):  # 0.9 of the budget
        cost = pair_cost([64, 64], [], [], linear=[1.0, 1.0])
        assert Problem([cost], [64, 64], [6, 6], importance, uniform_floor=floor).plan([0.5]) == planned


# ---------------------------------------------------------------- the solver

FULL = [6, 8]
COST = pair_cost(FULL, [(0, 1)], [0.5], linear=[1.0, 1.0])
ALIVE = torch.ones(14, dtype=torch.bool)
IMPORTANCE = torch.rand(14, generator=torch.Generator().manual_seed(0))
SCHEDULE = Schedule((1.0,), (0.5,), 10, warm_up=0.2, ramp=0.5)


def solver_on(
    device: str = "cpu", kind: type[ScheduledSolver] = ScheduledSolver, *, plans: bool = False
) -> ScheduledSolver:
    constraints = ResourceConstraints([COST], bare_graph(FULL), device)
    least = torch.tensor([1, 1], device=device)
    ranking = ChannelRanking(FULL, device)
    problem = PruningProblem(ranking, constraints, least)
    return kind(problem, ALIVE.to(device), planner=WidthPlanner(problem) if plans else None)


def test_it_updates_on_schedule_and_a_fixed_mask_never() -> None:
    due = [step for step in range(1, 11) if solver_on().is_due(SCHEDULE, step)]
    assert due == updates(SCHEDULE) == [3, 4, 5, 6, 7]
    assert not any(solver_on(kind=FixedMask).is_due(SCHEDULE, step) for step in range(11))


def test_duals_are_in_units_of_the_loss_and_of_the_cost() -> None:
    """y_u = a_next / (2 alpha), and y_u >= z dE/ds_u with dE/ds in joules per channel."""
    solver, alpha = solver_on(), 0.1
    slope = COST.gradient(torch.tensor(FULL, dtype=torch.float64)).tolist()
    solver.update(IMPORTANCE, SCHEDULE, 7, alpha)
    assert float(COST.value(solver._pruner._ranking.widths(solver.alive).double())) <= 0.5 * 38
    width_dual, energy_dual = (dual.tolist() for dual in solver.duals(alpha))
    parts = list(zip(IMPORTANCE.split(FULL), solver.alive.split(FULL), slope, strict=True))
    assert width_dual == pytest.approx([float(one[alive].min()) / (2 * alpha) for one, alive, _ in parts])
    last = max(float(one[~alive].max()) / dE for one, alive, dE in parts if not alive.all())
    assert energy_dual == pytest.approx(last / (2 * alpha))
    assert solver.duals(0.0)[1] == float("inf")


def test_an_update_is_a_function_of_tensors_and_resumes_from_its_state() -> None:
    """On a GPU an update is a CUDA graph, so it must depend on tensors alone."""
    numbers, tensors, resumed = solver_on(), solver_on(), solver_on()
    for step in (3, 5, 7):
        before = tensors.state
        allowed = torch.tensor([SCHEDULE.fractions(step), SCHEDULE.end], dtype=torch.float64)
        tensors.load([*tensors._updated(*before[:3], IMPORTANCE, allowed, before[3]), *before[3:]])
        resumed.load([tensor.clone() for tensor in numbers.state])
        for solver in (numbers, resumed):
            solver.update(IMPORTANCE, SCHEDULE, step, 1e-2)
        for other in (tensors, resumed):
            assert all(torch.equal(a, b) for a, b in zip(numbers.state, other.state, strict=True))
    assert not numbers.alive.all()


@pytest.mark.gpu
def test_on_a_gpu_the_same_channels_are_removed() -> None:
    schedule, draw = Schedule((1.0,), (0.3,), 40, warm_up=0.1, ramp=0.8), torch.Generator().manual_seed(1)
    cpu, gpu = solver_on(plans=True), solver_on("cuda", plans=True)
    for step in range(1, 41):
        importance = torch.rand(14, generator=draw)
        if schedule.updates_at(step):
            cpu.update(importance, schedule, step, 1e-2)
            gpu.update(importance.cuda(), schedule, step, 1e-2)
            assert torch.equal(cpu.alive, gpu.alive.cpu()), step
    assert gpu._cuda_graph is not None
    assert gpu._cuda_graph._graph is not None
    assert not cpu.alive.all()
