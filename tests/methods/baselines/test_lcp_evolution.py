from __future__ import annotations

from typing import Any

import torch

from ecc.methods.baselines.lcp import Compensation, Evolution, LcpSettings


def toy(candidates: int = 200, **fields: Any) -> Evolution:
    settings = LcpSettings(**({"scale": True, "candidates": candidates, "population": 16, "tournament": 6} | fields))
    return Evolution([1.0, 2.0, 0.5, 1.0], settings, seed=5)


def fitness_of(candidate: Compensation) -> float:
    """Highest at scales of 3 and shifts of 1."""
    scales, shifts = torch.tensor(candidate.scales), torch.tensor(candidate.shifts)
    return -float((scales.log() - 1.1).square().sum() + (shifts - 1).square().sum())


def test_evolution_finds_better_and_better() -> None:
    evolution = toy()
    fitness = []
    while not evolution.is_over:
        candidate = evolution.propose()
        fitness.append(fitness_of(candidate))
        evolution.judge(candidate, fitness[-1])
    assert len(fitness) == 200
    assert fitness[0] == fitness_of(Compensation.none(4))  # the norms as they are come first
    assert evolution.best[0] == max(fitness) > max(fitness[:16]) + 0.5
    assert sum(fitness[-40:]) / 40 > sum(fitness[:40]) / 40 + 2


def test_the_oldest_dies_however_fit_it_was() -> None:
    evolution = toy(population=3)
    candidates = []
    for number in range(5):
        candidates.append(evolution.propose())
        evolution.judge(candidates[-1], -float(number))
    assert evolution.population == [(-2.0, candidates[2]), (-3.0, candidates[3]), (-4.0, candidates[4])]
    assert evolution.best == (0.0, candidates[0])


def test_a_child_is_the_best_of_a_tournament_but_for_a_share_of_the_groups() -> None:
    evolution = toy(population=4, tournament=64, mutated=0.5)
    for number in range(4):
        evolution.judge(evolution.propose(), [0.0, 3.0, 1.0, 2.0][number])
    parent, child = evolution.population[1][1], evolution.propose()
    changed = [one != other for one, other in zip(parent.shifts, child.shifts, strict=True)]
    assert sum(changed) == 2
    assert changed == [one != other for one, other in zip(parent.scales, child.scales, strict=True)]


def test_without_scales_only_shifts_move() -> None:
    evolution = toy(scale=False)
    for _ in range(30):
        candidate = evolution.propose()
        assert candidate.scales == (1.0,) * 4
        evolution.judge(candidate, fitness_of(candidate))
    assert evolution.best[1].shifts != (0.0,) * 4


def test_a_network_that_broke_is_never_the_best() -> None:
    evolution = toy()
    evolution.judge(first := evolution.propose(), float("nan"))
    assert evolution.best == (float("-inf"), first)
    evolution.judge(second := evolution.propose(), -1e9)
    assert evolution.best == (-1e9, second)
