"""How NetAdapt trains its candidates, and what becomes of their batches."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from ecc.methods import PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.netadapt import NetAdapt, NetAdaptSettings
from ecc.training import BatchStream
from methods.works import work_of


def started(work: PruningContext, **settings: Any) -> NetAdapt:
    method = NetAdapt(NetAdaptSettings(**{"short_steps": 1, **settings}))
    method.start(work)
    return method


def steps_taken(work: PruningContext) -> list[int]:
    """Of every candidate that is trained from now on."""
    seen, real = [], work.train

    def noted(model: nn.Module, steps: int, lr: float, stream: BatchStream) -> None:
        seen.append(steps)
        real(model, steps, lr, stream)

    work.train = noted
    return seen


def test_the_winner_is_the_proposal_trained_by_itself() -> None:
    """Losers leave no trace, in the weights or in the place in the stream."""
    work = work_of("residual", share=0.5)
    dense = copy.deepcopy(work.model)
    method = started(work, short_steps=3)
    method.step()
    alone = work_of("residual", share=0.5)
    alone.keep_channels_(alone.model, magnitudes(alone, dense), method.rounds[0]["widths"])
    alone.train(alone.model, 3, alone.settings.lr, alone.stream)
    expected = alone.model.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in work.model.state_dict().items())
    assert torch.equal(next(work.stream)[0], next(alone.stream)[0])


def test_total_counts_all_candidates_and_lineage_the_winners() -> None:
    work = work_of("residual", share=0.6, steps=100)
    method, seen = started(work, short_steps=3, initial_reduction=0.15), steps_taken(work)
    while not method.is_done:
        method.step()
        assert work.stream.total == 3 * len(seen)
        assert work.stream.lineage == 3 * len(method.rounds)
        facts = method.rounds[-1]
        assert (facts["total"], facts["lineage"]) == (work.stream.total, work.stream.lineage)
    assert len(method.rounds) > 1
    assert len(seen) == sum(len(facts["scores"]) for facts in method.rounds) > len(method.rounds)


def test_no_batch_is_taken_that_was_not_given() -> None:
    work = work_of("residual", share=0.5, steps=7)
    method, seen = started(work, short_steps=3, initial_reduction=0.1), steps_taken(work)
    while not method.is_done:
        method.step()
    first = len(method.rounds[0]["scores"])
    assert seen == [7 // first] * first  # the same for all of the first round, and then none


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_by_default_all_candidates_share_the_steps_of_the_solve(share: float) -> None:
    work = work_of("residual", share=share, steps=120)
    method, seen = started(work, short_steps=None), steps_taken(work)
    while not method.is_done:
        method.step()
    assert 60 < work.stream.total <= 120
    for facts in method.rounds:  # all of a round are trained alike
        mine, seen = seen[: len(facts["scores"])], seen[len(facts["scores"]) :]
        assert len(set(mine)) == 1
    assert seen == []
    assert len(method.rounds) <= method.settings.rounds_to(share)


def test_few_steps_are_spread_over_all_rounds() -> None:
    """And not used up by the first of them."""
    work = work_of("residual", share=0.5, steps=40)
    method = started(work, short_steps=None)
    while not method.is_done:
        method.step()
    totals = [0, *(facts["total"] for facts in method.rounds)]
    taken = [after - before for before, after in itertools.pairwise(totals)]
    assert max(taken) <= 2 * len(method.rounds[0]["scores"])
    assert sum(taken[len(taken) // 2 :]) > 0
