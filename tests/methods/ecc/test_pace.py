from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ecc.methods.ecc import scheduled as pace_module
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.scheduled import PruneDecision, ScheduledPruner
from methods.nets import ProductCost, bare_graph, pair_cost


@dataclass
class Problem:
    """Random groups, products of their widths, and channel energies."""

    costs: list[ProductCost]
    full: list[int]
    floors: list[int]
    scores: Tensor
    width_multiple: int = 1

    @property
    def limits(self) -> ResourceConstraints:
        return ResourceConstraints(self.costs, bare_graph(self.full), "cpu")

    @property
    def ladder(self) -> ChannelRanking:
        return ChannelRanking(self.full)

    @property
    def pace(self) -> ScheduledPruner:
        return self.bound_pace(0.0)

    def bound_pace(self, uniform_floor: float) -> ScheduledPruner:
        return ScheduledPruner(
            self.ladder, self.limits, torch.tensor(self.floors), self.width_multiple, uniform_floor=uniform_floor
        )

    def start(self) -> PruneDecision:
        return self.pace.start(torch.ones(sum(self.full), dtype=torch.bool))

    def widths(self, cut: PruneDecision) -> list[int]:
        return [int(width) for width in self.ladder.widths(cut.alive)]

    def share(self, widths: list[int], which: int = 0) -> float:
        return float(self.costs[which].value(torch.tensor(widths, dtype=torch.float64))) / self.limits.dense[which]


@st.composite
def problems(draw: st.DrawFn, max_width: int = 24, costs: int = 1, width_multiple: int | None = None) -> Problem:
    full = draw(st.lists(st.integers(1, max_width), min_size=1, max_size=5))
    seed = draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    step = draw(st.sampled_from([1, 2, 4, 8])) if width_multiple is None else width_multiple
    scores = torch.exp(2 * torch.randn(sum(full), generator=generator))
    if draw(st.booleans()):  # ties
        scores = scores.clamp(1, 2).round()
    made = []
    for _ in range(costs):
        pairs = [(k, k + 1) for k in range(len(full) - 1)]
        coefficients = torch.rand(len(pairs), generator=generator).tolist()
        linear = torch.rand(len(full), generator=generator).tolist()
        made.append(pair_cost(full, pairs, coefficients, linear, base=draw(st.sampled_from([0.0, 1.0]))))
    floors = [min(width, math.ceil(draw(st.integers(1, width)) / 2 / step) * step) for width in full]
    return Problem(made, full, floors, scores, step)


def one_by_one(problem: Problem, shares: list[float], ends: list[float]) -> list[int]:
    """The slow twin of one update: blocks in the order of mean energy per cost, removed one after another."""
    widths, step = list(problem.full), problem.width_multiple
    slope = problem.limits.slope(torch.tensor(widths, dtype=torch.float64), ends).tolist()
    blocks = []
    for group, scores in enumerate(problem.scores.split(problem.full)):
        ordered, kept, first = sorted(scores.tolist()), widths[group], 0
        while kept > problem.floors[group]:
            size = kept % step or step
            blocks.append((sum(ordered[first : first + size]) / size / slope[group], group, first, size))
            first, kept = first + size, kept - size
    for _, group, _, size in sorted(blocks):
        if all(problem.share(widths, k) <= share for k, share in enumerate(shares)):
            break
        widths[group] -= size
    return widths


@given(problems(), st.floats(0.05, 1.1))
def test_one_update_is_the_greedy_loop(problem: Problem, share: float) -> None:
    cut = problem.pace.update(problem.start(), problem.scores, [share], [share])
    assert problem.widths(cut) == one_by_one(problem, [share], [share])


@given(problems(costs=2), st.floats(0.05, 1.1), st.floats(0.05, 1.1))
def test_with_two_budgets_the_loop_ends_when_both_are_met(problem: Problem, first: float, second: float) -> None:
    shares, ends = [first, second], [first * 0.9, second * 0.7]
    cut = problem.pace.update(problem.start(), problem.scores, shares, ends)
    assert problem.widths(cut) == one_by_one(problem, shares, ends)


@pytest.mark.parametrize("fanout", [2, 3, 64])
def test_the_search_does_not_depend_on_its_fanout(fanout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "FANOUT", fanout)
    generator = torch.Generator().manual_seed(1)
    full = [40, 70, 33]
    cost = pair_cost(full, [(0, 1), (1, 2)], [1.0, 2.0], linear=[1.0, 5.0, 9.0])
    problem = Problem([cost], full, [1, 1, 1], torch.rand(sum(full), generator=generator))
    for share in (1.0, 0.999, 0.8, 0.5, 0.2, 0.01, 1e-6):
        cut = problem.pace.update(problem.start(), problem.scores, [share], [share])
        assert problem.widths(cut) == one_by_one(problem, [share], [share])


@settings(max_examples=8)
@given(problems(max_width=60, width_multiple=1), st.floats(0.3, 0.9))
def test_many_small_updates_are_the_exact_greedy(problem: Problem, end: float) -> None:
    """The exact greedy takes one channel at a time and looks at dE/ds anew each time."""
    widths = list(problem.full)
    ordered = [sorted(scores.tolist()) for scores in problem.scores.split(problem.full)]
    while problem.share(widths) > end:
        slope = problem.limits.slope(torch.tensor(widths, dtype=torch.float64), [end]).tolist()
        nexts = [
            (ordered[g][problem.full[g] - width] / slope[g], g)
            for g, width in enumerate(widths)
            if width > problem.floors[g]
        ]
        if not nexts:
            break
        widths[min(nexts)[1]] -= 1
    cut = problem.start()
    updates = 150
    for step in range(updates):
        share = end + (1 - end) * (1 - (step + 1) / updates)
        cut = problem.pace.update(cut, problem.scores, [share], [end])
    for mine, exact in zip(problem.widths(cut), widths, strict=True):
        assert abs(mine - exact) <= 1


@given(problems(costs=2), st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5))
def test_widths_are_rounded_above_their_floors_and_nothing_comes_back(problem: Problem, shares: list[float]) -> None:
    cut, pace = problem.start(), problem.pace
    generator = torch.Generator().manual_seed(7)
    for share in shares:  # also upwards, and with other scores each time
        before = cut
        cut = pace.update(cut, torch.rand(len(problem.scores), generator=generator), [share, 1.0], [0.5, 0.5])
        assert not (cut.alive & ~before.alive).any()
        for width, full, floor in zip(problem.widths(cut), problem.full, problem.floors, strict=True):
            assert floor <= width <= full
            assert width % problem.width_multiple == 0 or width == full
        spent = problem.share(problem.widths(cut))
        assert spent <= share + 1e-12 or problem.widths(cut) == problem.floors
        assert spent <= problem.share(problem.widths(before))


@given(problems(width_multiple=1), st.floats(0.2, 0.95))
def test_the_duals_are_those_of_the_fixed_point(problem: Problem, share: float) -> None:
    """Stationarity of Eq. (4): 2 alpha z dE/ds_u <= 2 alpha y_u, and what is gone was worth less than 2 alpha z."""
    cut = problem.pace.update(problem.start(), problem.scores, [share], [share])
    slope = problem.limits.slope(torch.tensor(problem.full, dtype=torch.float64), [share])
    group = problem.ladder.group
    ratios = problem.scores.double() / slope[group]
    removed = ~cut.alive
    widths = torch.tensor(problem.widths(cut))
    if removed.any():
        assert ratios[removed].max() == cut.margin
    else:
        assert cut.margin == 0
    free = (widths > torch.tensor(problem.floors))[group] & cut.alive
    assert not free.any() or ratios[free].min() >= cut.margin
    for number, scores in enumerate(problem.scores.split(problem.full)):
        alive = cut.alive.split(problem.full)[number]
        assert cut.next_energies[number] == scores[alive].min()


def test_a_group_that_saves_nothing_goes_last_and_only_if_it_must() -> None:
    cost = pair_cost([8, 8], [], [], linear=[1.0, 0.0])
    problem = Problem([cost], [8, 8], [2, 2], torch.cat([torch.full((8,), 9.0), torch.full((8,), 1e-3)]))
    cut = problem.pace.update(problem.start(), problem.scores, [0.5], [0.5])
    assert problem.widths(cut) == [4, 8]


def test_equal_channels_leave_in_whole_blocks() -> None:
    """Means of equal numbers must tie exactly, or a later block would overtake the first, shorter one."""
    cost = pair_cost([13, 21], [(0, 1)], [0.1], linear=[1.0, 1.0])
    problem = Problem([cost], [13, 21], [4, 4], torch.full((34,), 0.1), width_multiple=4)
    for share in (0.99, 0.9, 0.7, 0.5, 0.3):
        cut = problem.pace.update(problem.start(), problem.scores, [share], [share])
        assert all(width % 4 == 0 or width in (13, 21) for width in problem.widths(cut))


# ---------------------------------------------------------------- plans


def lost(problem: Problem, widths: list[int]) -> float:
    """Energies of the least channels that are gone."""
    groups = zip(problem.scores.double().split(problem.full), widths, strict=True)
    return sum(float(scores.sort().values[: len(scores) - width].sum()) for scores, width in groups)


def meets(problem: Problem, widths: list[int] | list[float], ends: list[float]) -> bool:
    return not bool(problem.limits.exceeded(torch.tensor([widths], dtype=torch.float64), ends))


@given(problems(costs=2), st.floats(0.05, 0.99), st.floats(0.05, 0.99))
def test_a_plan_meets_the_ends_and_loses_no_more_than_the_order(problem: Problem, first: float, second: float) -> None:
    ends = [first, second]
    planned = problem.pace.plan(problem.start(), problem.scores, ends).tolist()
    in_order = one_by_one(problem, ends, ends)
    for width, full, floor in zip(planned, problem.full, problem.floors, strict=True):
        assert floor <= width <= full
        assert width % problem.width_multiple == 0 or width == full
    assert meets(problem, planned, ends) or planned == in_order == problem.floors
    assert lost(problem, planned) <= lost(problem, in_order) * (1 + 1e-12)


@pytest.mark.parametrize(("dear", "planned"), [(255.0, [3, 18]), (300.0, [4, 8])], ids=["it goes", "it stays"])
def test_a_block_that_saves_too_much_goes_for_others_or_stays_for_others(dear: float, planned: list[int]) -> None:
    """40 channels of 1 J and 4 of 10 J, of which 32 J must go: by the order alone 35 or 40 J would."""
    cost = pair_cost([4, 40], [], [], linear=[10.0, 1.0])
    scores = torch.cat([torch.tensor([dear, 1e6, 1e6, 1e6]), torch.arange(1.0, 41.0)])
    problem = Problem([cost], [4, 40], [1, 1], scores)
    assert problem.share(one_by_one(problem, [0.6], [0.6])) < 0.6
    assert problem.pace.plan(problem.start(), scores, [0.6]).tolist() == planned
    assert problem.share(planned) == pytest.approx(0.6)
    cut = problem.start()
    for share in torch.linspace(1.0, 0.6, 41).tolist():
        least = problem.pace.plan(cut, scores, [0.6])
        cut = problem.pace.update(cut, scores, [share], [0.6], least)
    assert problem.widths(cut) == planned


@given(problems(), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_an_update_takes_nothing_that_the_plan_keeps(problem: Problem, end: float, way: float) -> None:
    share = end + way * (1 - end)
    least = problem.pace.plan(problem.start(), problem.scores, [end])
    widths = problem.widths(problem.pace.update(problem.start(), problem.scores, [share], [end], least))
    assert all(width >= planned for width, planned in zip(widths, least.tolist(), strict=True))
    assert problem.share(widths) <= share or widths == problem.floors


@given(problems(costs=2), st.floats(0.05, 0.99), st.floats(0.05, 0.99), st.sampled_from([0.5, 0.8, 0.95]))
def test_a_bound_plan_stays_near_the_even_cut_and_meets_the_ends(
    problem: Problem, first: float, second: float, uniform_floor: float
) -> None:
    ends, pace = [first, second], problem.bound_pace(uniform_floor)
    bound = pace.bound(ends).tolist()
    for width, full, floor in zip(bound, problem.full, problem.floors, strict=True):
        assert floor <= width <= full
        assert width % problem.width_multiple == 0 or width in (full, floor)
    shares = [step / pace_module.SHARES for step in range(pace_module.SHARES)]
    evenly = [
        [max(share * full, floor) for full, floor in zip(problem.full, problem.floors, strict=True)] for share in shares
    ]
    fitting = [share for share, widths in zip(shares, evenly, strict=True) if meets(problem, widths, ends)]
    most = uniform_floor * max(fitting, default=0.0)
    tops = [most * full + problem.width_multiple for full in problem.full]
    assert all(width <= max(top, floor) for width, top, floor in zip(bound, tops, problem.floors, strict=True))
    assert bound == problem.floors or meets(problem, bound, [pace_module.ROOM * end for end in ends])
    planned = pace.plan(problem.start(), problem.scores, ends).tolist()
    assert all(width >= least for width, least in zip(planned, bound, strict=True))
    assert meets(problem, planned, ends) or planned == problem.floors


def test_what_would_be_cut_deep_is_bound_to_the_even_cut() -> None:
    """Two groups that cost the same, and one of them is hardly of use: half of all must go."""
    problem = Problem([pair_cost([64, 64], [], [], linear=[1.0, 1.0])], [64, 64], [6, 6], torch.ones(128))
    scores = torch.cat([torch.full((64,), 1e-3), torch.ones(64)])
    for uniform_floor, planned in ((0.0, [6, 58]), (0.5, [16, 48]), (0.75, [24, 40])):
        assert problem.bound_pace(uniform_floor).plan(problem.start(), scores, [0.5]).tolist() == planned
