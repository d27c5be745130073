from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ecc.energy import counted_cost
from ecc.graph import trace_channels
from ecc.methods import PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.netadapt import NetAdapt, NetAdaptSettings
from ecc.methods.baselines.widths import allowed_widths
from ecc.training import BatchStream
from ecc.zoo.resnet_cifar import resnet56
from methods.baselines.cases import finish, lines_of, netadapt
from methods.jobs import true_model
from methods.works import work_of


def started(context: PruningContext, **settings: Any) -> Any:
    method = netadapt(**{"initial_reduction": 0.1, **settings})
    method.start(context)
    return method


def full_of(context: PruningContext) -> list[int]:
    return [group.width for group in context.graph.groups]


def cost_at(context: PruningContext, widths: Sequence[int], number: int = 0) -> float:
    return float(context.costs[number].value(torch.tensor(widths, dtype=torch.float64)))


def trainings(context: PruningContext) -> list[tuple[tuple[int, ...], int]]:
    """Widths and steps of every candidate that is trained from now on."""
    seen, real = [], context.train

    def recorded(model: nn.Module, steps: int, lr: float, stream: BatchStream) -> None:
        seen.append((tuple(context.widths(model)), steps))
        real(model, steps, lr, stream)

    context.train = recorded
    return seen


def slow_proposals(context: PruningContext, widths: list[int], target: float) -> dict[str, int]:
    """For each group the largest width that is enough alone, by trying all."""
    found = {}
    for number, (group, allowed) in enumerate(zip(context.graph.groups, allowed_widths(context), strict=True)):
        for width in reversed([one for one in allowed if one < widths[number]]):
            if context.constraint_violation([*widths[:number], width, *widths[number + 1 :]]) <= target:
                found[group.name] = width
                break
    return found


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", ["residual", "concat", "depthwise"])
def test_each_group_proposes_the_largest_width_that_is_enough(name: str, width_multiple: int) -> None:
    context = work_of(name, share=0.5, width_multiple=width_multiple)
    widths, names = full_of(context), list(context.graph.full_widths)
    for target in (0.95, 0.7, 0.5):
        slow = slow_proposals(context, widths, target)
        if not slow:
            continue
        proposals = started(context).proposals(widths, target)
        assert [proposal.groups for proposal in proposals] == [(group,) for group in slow]
        for proposal in proposals:
            changed = dict(zip(names, widths, strict=True)) | {proposal.groups[0]: slow[proposal.groups[0]]}
            assert proposal.widths == tuple(changed.values())


@pytest.mark.parametrize("name", ["residual", "concat"])
def test_near_the_minimum_groups_are_pruned_together_and_equal_proposals_trained_once(name: str) -> None:
    context = work_of(name, width_multiple=8)
    context.targets = [1.05 * cost_at(context, context.min_widths())]
    assert not slow_proposals(context, full_of(context), 0.0)
    proposals = started(context).proposals(full_of(context), 0.0)
    prunable = [
        group.name
        for group, allowed in zip(context.graph.groups, allowed_widths(context), strict=True)
        if len(allowed) > 1
    ]
    assert sorted(group for proposal in proposals for group in proposal.groups) == sorted(prunable)
    for proposal in proposals:
        assert list(proposal.widths) == context.round_widths(proposal.widths)
        assert context.constraint_violation(proposal.widths) <= 0
    context = work_of(name)
    context.targets = [cost_at(context, context.min_widths())]  # only all minimum widths meet it
    method, seen = started(context, rounds=1), trainings(context)
    method.step()
    assert seen == [(tuple(context.min_widths()), 1)]
    assert method.is_done
    assert len(method.rounds[0]["chosen"]) == len(context.graph.prunable) > 1


def test_of_several_costs_the_one_furthest_above_its_target_counts() -> None:
    context = work_of("residual", share=0.5)
    latency = true_model(context.graph, "latency")
    context.costs, context.targets = (*context.costs, latency), [context.targets[0], 0.4 * latency.dense]
    method = started(context)
    assert method.target(full_of(context)) == pytest.approx(0.9 / 0.4 - 1)
    finish(method, context)
    assert all(cost_at(context, context.widths(), k) <= target for k, target in enumerate(context.targets))


def test_the_reduction_decays_and_the_last_target_is_the_budget() -> None:
    context = work_of(share=0.5)
    method = started(context, decay=0.9)
    targets, dense = [], 1 + context.constraint_violation(full_of(context))
    while not method.is_done:
        before = context.constraint_violation(context.widths())
        method.step()
        line = method.rounds[-1]
        after = context.constraint_violation(context.widths())
        assert line["target"] - 1 == pytest.approx(max(0.0, before - 0.1 * 0.9 ** len(targets) * dense))
        assert before > after <= line["target"] - 1 + 1e-12
        assert line["predicted"]["energy"] == pytest.approx((1 + after) * context.targets[0])
        assert line["widths"] == context.widths()
        targets.append(line["target"])
    assert targets[-1] == 1
    assert 4 <= len(targets) <= 8
    assert [line["round"] for line in lines_of(context)] == [*range(1, len(targets) + 1)]
    slow = finish(netadapt(initial_reduction=0.02, decay=0.5, rounds=4), work_of(share=0.5))
    assert len(slow.rounds) == 4  # the decaying reductions alone would never get there


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize("by_score", [True, False])
def test_the_highest_score_wins_and_ties_go_to_the_largest_saving(by_score: bool) -> None:
    context = work_of("residual", share=0.5, width_multiple=8)

    def score(widths: Sequence[int]) -> float:
        return float(widths[1]) if by_score else 0.5

    context.held_out = lambda model: score(context.widths(model))
    method = started(context)
    proposals = method.proposals(full_of(context), method.target(full_of(context)))
    assert len(proposals) > 1
    method.step()
    expected = max(proposals, key=lambda one: (score(one.widths), -context.constraint_violation(one.widths)))
    assert tuple(context.widths()) == expected.widths
    assert method.rounds[0]["chosen"] == list(expected.groups)
    assert method.rounds[0]["scores"] == {one.groups[0]: score(one.widths) for one in proposals}


# ---------------------------------------------------------------- short trainings


def test_the_winner_equals_its_proposal_trained_alone() -> None:
    context, alone = work_of("residual", share=0.5), work_of("residual", share=0.5)
    dense = copy.deepcopy(context.model)
    method = started(context, short_steps=3)
    method.step()
    alone.keep_channels_(alone.model, magnitudes(alone, dense), method.rounds[0]["widths"])
    alone.train(alone.model, 3, alone.settings.lr, alone.stream)
    expected = alone.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in context.model.state_dict().items())
    assert torch.equal(next(context.stream)[0], next(alone.stream)[0])


def test_all_candidates_are_counted_within_the_pruning_steps() -> None:
    context = work_of("residual", share=0.6, prune_steps=100)
    method, seen = started(context, short_steps=3, initial_reduction=0.15), trainings(context)
    while not method.is_done:
        method.step()
        line = method.rounds[-1]
        assert line["total"] == context.stream.total == 3 * len(seen)
        assert line["lineage"] == context.stream.lineage == 3 * len(method.rounds)
    assert len(seen) == sum(len(line["scores"]) for line in method.rounds) > len(method.rounds) > 1
    context = work_of("residual", share=0.5, prune_steps=7)
    method, seen = started(context, short_steps=3), trainings(context)
    finish(method, context)
    first = len(method.rounds[0]["scores"])
    assert [steps for _, steps in seen] == [7 // first] * first  # equal in the first round, then none are left


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_by_default_the_pruning_steps_are_divided_among_rounds_and_candidates(share: float) -> None:
    context = work_of("residual", share=share, prune_steps=120)
    method, seen = started(context, short_steps=None, initial_reduction=0.04), trainings(context)
    finish(method, context)
    assert 60 < context.stream.total <= 120
    assert len(method.rounds) <= method.settings.rounds_to(share)
    for line in method.rounds:
        mine, seen = seen[: len(line["scores"])], seen[len(line["scores"]) :]
        assert len({steps for _, steps in mine}) == 1
    totals = [line["total"] for line in method.rounds]
    assert totals[-1] > totals[len(totals) // 2 - 1]  # later rounds are trained too


@pytest.mark.thorough
def test_by_default_half_of_the_groups_can_meet_the_reduction_of_a_round() -> None:
    context, model = work_of(), resnet56()
    context.model, context.graph = model, trace_channels(model, torch.randn(1, 3, 32, 32), verify=False)
    cost = counted_cost(context.graph, "macs")
    context.costs, context.targets = (cost,), [0.47 * cost.dense]
    method = NetAdapt()
    method.start(context)
    widths = full_of(context)
    while (target := method.target(widths)) > 0:
        able = len(slow_proposals(context, widths, target))
        can = sum(allowed[0] < width for allowed, width in zip(allowed_widths(context), widths, strict=True))
        assert able >= can / 2, (len(method.rounds), able, can)
        widths = list(random.Random(len(method.rounds)).choice(method.proposals(widths, target)).widths)
        method.rounds.append({})
    assert len(method.rounds) > 15
    assert method.settings.reduction(0, 0.01) == 0.01
    assert NetAdaptSettings(initial_reduction=0.2).reduction(0, 0.01) == 0.2


def test_the_best_candidates_without_training_are_trained() -> None:
    context = work_of("residual", share=0.5, prune_steps=2000)
    method, seen = started(context, short_steps=None, initial_reduction=0.04), trainings(context)
    full = full_of(context)
    count = len(method.proposals(full, method.target(full)))
    trained, steps = method.short_training(count)
    assert (trained, steps) == (1, 2000 // 15)  # fifteen rounds of 133 steps: one candidate can have 100
    context.held_out = lambda model: float(context.widths(model)[1])
    proposals = method.proposals(full, method.target(full))
    expected = max(proposals, key=lambda one: (one.widths[1], -context.constraint_violation(one.widths)))
    method.step()
    assert seen == [(expected.widths, steps)]
    assert count > 1
