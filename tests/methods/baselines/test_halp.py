from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ecc.energy import counted_cost
from ecc.graph import live_masks
from ecc.methods.baselines.greedy import GreedyTaylor
from ecc.methods.baselines.halp import (
    LEVELS,
    MAX_BLOCKS,
    Array,
    Choices,
    Halp,
    HalpSettings,
    Indices,
    block_ends,
    solve_knapsack,
    weights,
)
from ecc.methods.registry import find_method
from methods.baselines.cases import finish, halp, lines_of
from methods.nets import macs_cost
from methods.works import work_of

# ---------------------------------------------------------------- the knapsack

Block = tuple[int, float]  # weight and value

blocks = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20).map(float)), min_size=1, max_size=3)


def best_of_all_subsets(groups: list[list[Block]], budget: int) -> float:
    """The highest value of all sets of blocks within the budget that leave out no more important block of a group."""
    items = [(group, number) for group, found in enumerate(groups) for number in range(len(found))]
    best = -math.inf
    for kept in itertools.product((False, True), repeat=len(items)):
        chosen = {item for item, is_kept in zip(items, kept, strict=True) if is_kept}
        if any(number and (group, number - 1) not in chosen for group, number in chosen):
            continue
        weight, value = (sum(groups[group][number][field] for group, number in chosen) for field in (0, 1))
        if weight <= budget:
            best = max(best, value)
    return best


def prefixes(groups: list[list[Block]]) -> tuple[list[Indices], list[Array]]:
    """Weights and values of the first 0, 1, ... blocks of each group."""
    found = [np.cumsum([(0.0, 0.0), *group], axis=0).T for group in groups]
    return [weight.astype(np.int64) for weight, _ in found], [value for _, value in found]


@given(st.lists(blocks, min_size=1, max_size=4))
@settings(max_examples=40)
def test_the_knapsack_has_the_value_of_the_best_subset_at_every_budget(groups: list[list[Block]]) -> None:
    weight, value = prefixes(groups)
    plans = solve_knapsack(weight, value)
    assert plans.shape == (1 + sum(block[0] for group in groups for block in group), len(groups))
    for budget, plan in enumerate(plans):
        assert sum(weight[group][one] for group, one in enumerate(plan)) <= budget
        assert sum(value[group][one] for group, one in enumerate(plan)) == best_of_all_subsets(groups, budget)


def test_a_block_of_high_value_behind_one_of_low_value_is_not_taken_alone() -> None:
    plans = solve_knapsack(*prefixes([[(2, 1.0), (1, 9.0)], [(2, 2.0)]]))
    assert plans.tolist() == [[0, 0], [0, 0], [0, 1], [2, 0], [2, 0], [2, 1]]


@given(st.lists(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=9), min_size=1, max_size=5))
def test_levels_are_rounded_up_so_that_every_plan_is_within_its_budget(steps: list[list[float]]) -> None:
    costs = [0.3 + np.cumsum([0.0, *one]) for one in steps]
    nothing = np.zeros(0)
    choices = [Choices(group, np.zeros(0, np.int64), cost, nothing) for group, cost in enumerate(costs)]
    weight = [weights(cost, choices) for cost in costs]
    level = sum(cost[-1] - cost[0] for cost in costs) / LEVELS
    plans = solve_knapsack(weight, [np.sqrt(cost - cost[0]) for cost in costs])
    spent = [sum(cost[one] - cost[0] for cost, one in zip(costs, plan, strict=True)) for plan in plans]
    assert (np.array(spent) <= level * (np.arange(len(plans)) + 1e-6)).all()
    assert len(plans) <= LEVELS + len(steps) + 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_blocks_end_where_the_cost_is_below_that_of_all_larger_widths(costs: list[int]) -> None:
    expected = [k for k, cost in enumerate(costs) if all(cost < later for later in costs[k + 1 :])]
    assert block_ends(np.array(costs, dtype=np.float64)).tolist() == expected


def test_a_group_has_no_more_than_64_blocks() -> None:
    kept = block_ends(np.arange(1, 1001, dtype=np.float64))
    assert (len(kept), kept[0], kept[-1]) == (MAX_BLOCKS + 1, 0, 999)
    assert set(np.diff(kept)) <= {15, 16}


def test_the_problem_of_a_resnet50_has_few_entries() -> None:
    count = 60
    steps = np.random.default_rng(0).random((count, MAX_BLOCKS))
    costs = [np.append(0.0, one.cumsum()) for one in steps]
    choices = [Choices(k, np.zeros(0, np.int64), one, one) for k, one in enumerate(costs)]
    plans = solve_knapsack([weights(one, choices) for one in costs], costs)
    assert plans.shape[0] <= LEVELS + count + 1
    assert plans[-1].tolist() == [MAX_BLOCKS] * count


# ---------------------------------------------------------------- iterations


@pytest.mark.parametrize("name", ["chain", "residual", "concat"])
def test_every_iteration_meets_its_budget_and_the_last_one_the_target(name: str) -> None:
    context = work_of(name, share=0.4)
    method = halp(iterations=5)
    method.start(context)
    for iteration in range(1, 6):
        assert not method.is_done
        method.step()
        ratio = 1 + context.constraint_violation(context.widths())
        budget = (1 / 0.4) ** (1 - iteration / 5)  # exponential, as a fraction of the target
        assert method.target(iteration) == pytest.approx(budget - 1)
        assert budget * 0.97 < ratio <= budget
    assert method.is_done
    assert [line["widths"] for line in lines_of(context)][-1] == context.widths()


def test_the_importance_is_that_of_greedy_taylor_and_the_most_important_channels_are_kept() -> None:
    context, other = work_of("residual", share=0.6), work_of("residual", share=0.6)
    method, greedy = Halp(HalpSettings(iterations=1)), GreedyTaylor()
    method.start(context)
    greedy.start(other)
    importance = method._importance()
    flat = greedy._taylor(torch.device("cpu"))
    method.step()
    sizes = [group.width for group in context.graph.groups]
    masks = live_masks(context.model, context.graph)
    for group, theirs, mask in zip(context.graph.groups, flat.split(sizes), masks, strict=True):
        if group.frozen is None:
            assert torch.equal(importance[group.name].float(), theirs)
            if not mask.all():
                assert importance[group.name][mask].min() >= importance[group.name][~mask].max()
    assert not all(mask.all() for mask in masks)


def test_masked_channels_stay_masked() -> None:
    context = work_of("residual", share=0.4)
    method = halp(iterations=6)
    method.start(context)
    before = live_masks(context.model, context.graph)
    while not method.is_done:
        method.step()
        after = live_masks(context.model, context.graph)
        assert all((old | ~new).all() for old, new in zip(before, after, strict=True))
        before = after


def test_a_plan_is_at_least_as_important_as_removing_the_same_share_of_every_group() -> None:
    context = work_of("concat", share=0.5)
    method = Halp(HalpSettings(iterations=1))
    method.start(context)
    importance = {name: one.sort(descending=True).values for name, one in method._importance().items()}

    def kept(widths: list[int]) -> float:
        pairs = zip(context.graph.full_widths, widths, strict=True)
        return float(sum(importance[name][:width].sum() for name, width in pairs if name in importance))

    method.step()
    full = [group.width for group in context.graph.groups]
    shares = [context.round_widths([ratio * width for width in full]) for ratio in np.linspace(0, 1, 200)]
    assert kept(context.widths()) > max(kept(one) for one in shares if context.constraint_violation(one) <= 0)


@pytest.mark.parametrize("resources", [("energy", "macs"), ("peak_bytes",), ("params", "peak_bytes")])
def test_several_budgets_and_maxima_are_met(resources: tuple[str, ...]) -> None:
    context = work_of("residual")
    known = {"energy": context.costs[0], "macs": macs_cost(context.graph)}
    context.costs = tuple(known.get(one) or counted_cost(context.graph, one) for one in resources)
    full = context.graph.widths()
    shares = (0.5, 0.4) if len(resources) > 1 else (0.6,)
    context.targets = [share * float(cost.value(full)) for share, cost in zip(shares, context.costs, strict=True)]
    finish(halp(), context, most=4)
    assert -0.05 < context.constraint_violation(context.widths()) <= 0


# ---------------------------------------------------------------- batches and corrections


def counted(context: Any) -> list[int]:
    """Steps of each training."""
    calls, real = list[int](), context.train

    def train(model: nn.Module, steps: int, *rest: Any) -> None:
        calls.append(steps)
        real(model, steps, *rest)

    context.train = train
    return calls


@pytest.mark.parametrize(("prune_steps", "expected"), [(0, []), (3, [1]), (5, [1, 1, 1]), (20, [6, 6, 6])])
def test_the_pruning_steps_are_divided_among_the_iterations(prune_steps: int, expected: list[int]) -> None:
    context = work_of("chain", share=0.3, prune_steps=prune_steps)
    calls = counted(context)
    finish(halp(), context, most=4)
    assert calls == expected
    assert context.stream.lineage == sum(expected)
    assert context.stream.total == 2 + sum(expected)  # the calibration batches are counted once
    assert sum(line["steps"] for line in lines_of(context)) == sum(expected)


def test_the_published_search_trains_between_all_iterations() -> None:
    context = work_of("chain", share=0.4, prune_steps=3)
    calls = counted(context)
    finish(halp(finetune_steps=4), context)
    assert calls == [4, 4, 4]
    assert find_method("halp", published=True).config()["finetune_steps"] == 100
    assert find_method("halp").config() == {"iterations": 30, "batches": 16, "finetune_steps": None}


def test_lower_targets_take_one_more_iteration_without_training() -> None:
    context = work_of("residual", share=0.6, prune_steps=30)
    method = finish(halp(), context)
    before, total = context.widths(), context.stream.total
    context.targets = [0.9 * context.targets[0]]
    assert not method.is_done
    finish(method, context, most=1)
    assert all(new <= old for new, old in zip(context.widths(), before, strict=True))
    assert -0.03 < context.constraint_violation(context.widths()) <= 0
    assert context.stream.total == total


def test_iterations_that_blocks_already_meet_are_passed() -> None:
    context = work_of("concat", share=0.45, width_multiple=32)
    finish(halp(iterations=30), context)
    found = [line["iteration"] for line in lines_of(context)]
    assert found == sorted(set(found))
    assert len(found) < 30
