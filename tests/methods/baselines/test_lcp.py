from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadWidths
from ecc.graph import live_masks
from ecc.methods import PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.lcp import Compensation, Evolution, Lcp, LcpSettings
from ecc.training import BatchStream
from methods.baselines.cases import finish, lcp, lines_of
from methods.works import work_of

Found = dict[str, tuple[float, float]]


def slow_widths(context: PruningContext, norms: dict[str, Tensor], found: Found) -> list[int]:
    """Remove one channel after the other by the compensated norm, until the targets are met."""
    pairs = found.items()
    ranking = sorted((scale * float(n) + shift, name) for name, (scale, shift) in pairs for n in norms[name].double())
    left = dict(context.graph.full_widths)
    for _, name in ranking:
        widths = context.round_widths(list(left.values()))
        if context.constraint_violation(widths) <= 0:
            return widths
        left[name] -= 1
    return context.round_widths(list(left.values()))


def drawn(context: PruningContext, seed: int) -> Found:
    draw, norms = random.Random(seed), magnitudes(context)
    return {
        name: (2 ** draw.uniform(-2, 2), draw.gauss(0, 1) * float(one.std(unbiased=False)))
        for name, one in norms.items()
    }


@pytest.mark.parametrize("width_multiple", [1, 4])
@pytest.mark.parametrize(("name", "share"), [("chain", 0.8), ("residual", 0.5), ("concat", 0.35)])
def test_the_ranking_equals_removing_one_channel_after_the_other(name: str, share: float, width_multiple: int) -> None:
    context = work_of(name, share=share, width_multiple=width_multiple)
    dense, norms, found = copy.deepcopy(context.model), magnitudes(context), drawn(context, 3)
    expected = slow_widths(context, norms, found)
    finish(Lcp(found=found), context, most=1)
    assert context.widths() == expected
    for group, mask in zip(context.graph.groups, live_masks(context.model, context.graph), strict=True):
        if group.frozen is None and not mask.all():
            assert norms[group.name][mask].min() > norms[group.name][~mask].max()
    for key, weight in context.model.state_dict().items():
        assert torch.equal(weight, torch.where(weight == 0, weight, dense.state_dict()[key]))


@pytest.mark.parametrize("scale", [False, True])
def test_lower_targets_need_no_new_search_and_prune_the_dense_weights(scale: bool) -> None:
    context = work_of("residual", share=0.6)
    dense, norms = copy.deepcopy(context.model.state_dict()), magnitudes(context)
    method = finish(lcp(scale=scale), context)
    assert len(lines_of(context, "candidate")) == 7
    first = context.widths()
    context.targets = [0.5 * target for target in context.targets]
    finish(method, context, most=1)
    assert len(lines_of(context, "candidate")) == 7
    assert context.widths() == slow_widths(context, norms, method.compensation) != first
    for key, weight in context.model.state_dict().items():
        assert torch.equal(weight, torch.where(weight == 0, weight, dense[key]))
    best = max(line["fitness"] for line in lines_of(context, "candidate"))
    assert lines_of(context, "candidate")[-1]["best"] == best
    assert {one for one, _ in method.compensation.values()} == {1.0} or scale
    plain = finish(lcp(candidates=1), work_of(share=0.5))
    assert set(plain.compensation.values()) == {(1.0, 0.0)}


def test_a_compensation_serves_another_run() -> None:
    method = finish(lcp(), work_of("residual", share=0.7))
    context = work_of("residual", share=0.5)
    norms = magnitudes(context)
    again = finish(Lcp(found=method.compensation), context, most=1)
    assert context.widths() == slow_widths(context, norms, method.compensation)
    assert not again.needs_held_out
    assert again.config()["found"] is not None
    with pytest.raises(BadWidths, match="lacks"):
        Lcp(found={}).start(work_of())


def test_candidates_are_trained_on_forks_from_the_same_position() -> None:
    context = work_of()
    calls: list[tuple[int, float, int]] = []

    def train(model: nn.Module, steps: int, lr: float, fork: BatchStream) -> None:
        calls.append((steps, lr, fork.lineage))
        assert fork is not context.stream
        assert model is not context.model
        for _ in range(steps):
            next(fork)

    context.train = train
    finish(lcp(candidates=3, short_steps=2), context)
    assert calls == [(2, context.settings.lr, 0)] * 3
    assert (context.stream.total, context.stream.lineage) == (6 + LcpSettings().batches, 0)


# ---------------------------------------------------------------- evolution


def evolution_of(**settings: Any) -> Evolution:
    values = {"scale": True, "candidates": 200, "population": 16, "tournament": 6} | settings
    return Evolution([1.0, 2.0, 0.5, 1.0], LcpSettings(**values), seed=5)


def fitness_of(candidate: Compensation) -> float:
    """Highest at scales of 3 and shifts of 1."""
    scales, shifts = torch.tensor(candidate.scales), torch.tensor(candidate.shifts)
    return -float((scales.log() - 1.1).square().sum() + (shifts - 1).square().sum())


def test_evolution_improves_from_the_plain_norms() -> None:
    evolution, fitness = evolution_of(), []
    while not evolution.is_over:
        candidate = evolution.propose()
        fitness.append(fitness_of(candidate))
        evolution.add(candidate, fitness[-1])
    assert len(fitness) == 200
    assert fitness[0] == fitness_of(Compensation.none(4))
    assert evolution.best[0] == max(fitness) > max(fitness[:16]) + 0.5
    assert sum(fitness[-40:]) / 40 > sum(fitness[:40]) / 40 + 2


def test_the_oldest_is_removed_and_the_best_remembered() -> None:
    evolution = evolution_of(population=3)
    candidates = []
    for number in range(5):
        candidates.append(evolution.propose())
        evolution.add(candidates[-1], -float(number))
    assert evolution.population == [(-float(k), candidates[k]) for k in (2, 3, 4)]
    assert evolution.best == (0.0, candidates[0])
    broken = evolution_of()
    broken.add(first := broken.propose(), float("nan"))
    assert broken.best == (float("-inf"), first)
    broken.add(second := broken.propose(), -1e9)
    assert broken.best == (-1e9, second)


def test_a_child_differs_from_the_best_of_a_tournament_in_some_groups() -> None:
    evolution = evolution_of(population=4, tournament=64, mutation_ratio=0.5)
    for fitness in (0.0, 3.0, 1.0, 2.0):
        evolution.add(evolution.propose(), fitness)
    parent, child = evolution.population[1][1], evolution.propose()
    changed = [one != other for one, other in zip(parent.shifts, child.shifts, strict=True)]
    assert sum(changed) == 2
    assert changed == [one != other for one, other in zip(parent.scales, child.scales, strict=True)]
    shifted = evolution_of(scale=False)
    for _ in range(30):
        shifted.add(candidate := shifted.propose(), fitness_of(candidate))
        assert candidate.scales == (1.0,) * 4
    assert shifted.best[1].shifts != (0.0,) * 4
