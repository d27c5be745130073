from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.energy import parse_budgets
from ecc.errors import BadTask, EccError, InfeasibleBudget
from ecc.methods import Compression, CompressSettings, PruningContext
from ecc.methods.baselines.netadapt import NetAdapt, NetAdaptSettings
from ecc.training import BatchStream
from ecc.zoo import find_task
from methods.jobs import (
    WIDE,
    digits_model,
    history_of,
    platform,
    same_result,
    true_model,
    wide_job,
    wide_task,
)
from methods.works import work_of


class Stop(Exception):
    pass


def started(work: PruningContext, **settings: Any) -> NetAdapt:
    method = NetAdapt(NetAdaptSettings(**{"short_steps": 1, **settings}))
    method.start(work)
    return method


def full_of(work: PruningContext) -> list[int]:
    return [group.width for group in work.graph.groups]


def cost_at(work: PruningContext, widths: Sequence[int], number: int = 0) -> float:
    return float(work.costs[number].value(torch.tensor(widths, dtype=torch.float64)))


def trainings(work: PruningContext) -> list[tuple[int, ...]]:
    """The widths of every candidate that is trained from now on."""
    seen, real = [], work.train

    def noted(model: nn.Module, steps: int, lr: float, stream: BatchStream) -> None:
        seen.append(tuple(work.widths(model)))
        real(model, steps, lr, stream)

    work.train = noted
    return seen


def judged_by_widths(work: PruningContext, score: Any) -> None:
    work.held_out = lambda model: score(work.widths(model))


def slow_proposals(work: PruningContext, widths: Sequence[int], target: float) -> dict[str, int]:
    """For each group the largest width that alone is enough, by trying all."""
    found, left = {}, work.graph.structure.width_remainders(work.width_multiple)
    for number, group in enumerate(work.graph.groups):
        if group.frozen is not None:
            continue
        for width in range(widths[number] - 1, work.min_widths()[number] - 1, -1):
            on_lattice = (
                width % work.width_multiple == left[number] % work.width_multiple or width == work.min_widths()[number]
            )
            one = [*widths[:number], width, *widths[number + 1 :]]
            if on_lattice and work.constraint_violation(one) <= target:
                found[group.name] = width
                break
    return found


# ---------------------------------------------------------------- proposals


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", WIDE)
def test_each_group_proposes_the_largest_width_that_alone_meets_the_target(name: str, width_multiple: int) -> None:
    work = work_of(name, share=0.3, width_multiple=width_multiple)
    method = started(work, initial_reduction=0.1)
    for widths in (full_of(work), work.round_widths([0.8 * width for width in full_of(work)])):
        target = method.target(widths)
        slow = slow_proposals(work, widths, target)
        assert slow, "the case is of use"
        proposals = method.proposals(widths, target)
        assert [proposal.groups for proposal in proposals] == [(group,) for group in slow]
        for proposal in proposals:
            changed = dict(zip(work.graph.full_widths, widths, strict=True)) | {
                proposal.groups[0]: slow[proposal.groups[0]]
            }
            assert proposal.widths == tuple(changed.values())
            assert work.constraint_violation(proposal.widths) <= target


@pytest.mark.parametrize("name", sorted(WIDE.keys() - {"transformer MLP", "grouped"}))  # which have but one to cut
def test_where_no_group_can_alone_others_help_and_floors_hold(name: str) -> None:
    work = work_of(name, width_multiple=8)
    work.targets = [1.05 * cost_at(work, work.min_widths())]
    method, widths = started(work), full_of(work)
    assert not slow_proposals(work, widths, 0.0)
    proposals = method.proposals(widths, 0.0)
    groups = [group for proposal in proposals for group in proposal.groups]
    assert sorted(groups) == sorted(
        group.name
        for group, floor in zip(work.graph.groups, work.min_widths(), strict=True)
        if group.frozen is None and floor < group.width
    )
    for proposal in proposals:
        assert list(proposal.widths) == work.round_widths(proposal.widths)
        assert work.constraint_violation(proposal.widths) <= 0
    assert len({proposal.widths for proposal in proposals}) == len(proposals)


def test_identical_proposals_are_trained_once() -> None:
    work = work_of("residual", share=0.2)
    work.targets = [cost_at(work, work.min_widths())]  # which only all floors meet
    method, seen = started(work, rounds=1), trainings(work)
    method.step()
    assert seen == [tuple(work.min_widths())] == [tuple(work.widths())]
    assert method.is_done
    assert len(method.rounds[0]["chosen"]) == len(work.graph.prunable) > 1
    assert work.stream.total == work.stream.lineage == 1


def test_aims_below_all_floors_end_in_one_line_and_not_in_a_loop() -> None:
    work = work_of(share=0.001)
    method = started(work, initial_reduction=0.5)
    while work.widths() != work.min_widths():
        before = sum(work.widths())
        method.step()
        assert sum(work.widths()) < before
    assert not method.is_done
    with pytest.raises(InfeasibleBudget, match="with every group at its floor") as raised:
        method.step()
    assert "\n" not in str(raised.value)


def test_of_several_costs_the_one_that_is_exceeded_most_counts() -> None:
    work = work_of("residual", share=0.5)
    work.costs = (*work.costs, true_model(work.graph, "latency"))
    work.targets = [work.targets[0], 0.4 * true_model(work.graph, "latency").dense]
    method = started(work, initial_reduction=0.1)
    target = method.target(full_of(work))
    assert target == pytest.approx(0.9 / 0.4 - 1)
    slow = slow_proposals(work, full_of(work), target)
    assert {p.groups[0] for p in method.proposals(full_of(work), target)} == set(slow)
    while not method.is_done:
        method.step()
    assert all(cost_at(work, work.widths(), number) <= aim for number, aim in enumerate(work.targets))


# ---------------------------------------------------------------- rounds


def test_the_reduction_decays_and_the_last_target_is_the_aim() -> None:
    work = work_of(share=0.5)
    method = started(work, initial_reduction=0.1, decay=0.9)
    targets, dense = [], 1 + work.constraint_violation(full_of(work))
    while not method.is_done:
        before = work.constraint_violation(work.widths())
        method.step()
        facts = method.rounds[-1]
        number = len(targets)
        assert facts["target"] - 1 == pytest.approx(max(0.0, before - 0.1 * 0.9**number * dense))
        assert before > work.constraint_violation(work.widths()) <= facts["target"] - 1 + 1e-12
        assert facts["predicted"]["energy"] == pytest.approx(
            (1 + work.constraint_violation(work.widths())) * work.targets[0]
        )
        assert facts["widths"] == work.widths()
        targets.append(facts["target"])
    assert targets[-1] == 1
    assert 4 <= len(targets) <= 8
    assert [facts["round"] for facts in work.lines] == [*range(1, len(targets) + 1)]  # type: ignore[attr-defined]


def test_a_reduction_that_would_never_get_there_does_after_its_rounds() -> None:
    work = work_of(share=0.5)
    method = started(work, initial_reduction=0.02, decay=0.5, rounds=4)
    steps = 0
    while not method.is_done:
        method.step()
        steps += 1
    assert steps == 4


def test_it_goes_on_from_where_it_is_when_the_aims_fall() -> None:
    work = work_of(share=0.7)
    method = started(work, initial_reduction=0.3)
    while not method.is_done:
        method.step()
    first = work.widths()
    work.targets = [0.98 * work.targets[0]]
    assert not method.is_done
    while not method.is_done:
        method.step()
    assert all(now <= before for now, before in zip(work.widths(), first, strict=True))


# ---------------------------------------------------------------- selection


def test_the_highest_score_wins_and_of_equals_the_one_that_saves_most() -> None:
    for score, key in [
        (lambda widths: float(widths[1]), lambda work, widths: widths[1]),
        (lambda widths: 0.5, lambda work, widths: -work.constraint_violation(widths)),
    ]:
        work = work_of("residual", share=0.5, width_multiple=8)
        judged_by_widths(work, score)
        method = started(work, initial_reduction=0.1)
        proposals = method.proposals(full_of(work), method.target(full_of(work)))
        assert len(proposals) > 1
        method.step()
        expected = max(proposals, key=lambda proposal: key(work, proposal.widths))
        assert tuple(work.widths()) == expected.widths
        assert method.rounds[0]["chosen"] == list(expected.groups)
        assert method.rounds[0]["scores"] == {p.groups[0]: score(p.widths) for p in proposals}


def test_score_per_joule_may_choose_another_than_the_score() -> None:
    chosen, losses, saved = {}, {}, {}
    for selection in ("score", "score per joule"):
        work = work_of("residual", share=0.5, width_multiple=16)
        full = full_of(work)
        method = started(work, initial_reduction=0.1, selection=selection)
        for proposal in method.proposals(full, method.target(full)):
            saved[proposal.widths] = 1 - cost_at(work, proposal.widths) / cost_at(work, full)
        thrifty = max(saved, key=saved.__getitem__)
        losses.update({widths: 0.02 if widths == thrifty else 0.019 for widths in saved})
        judged_by_widths(work, lambda widths: 0.9 - losses.get(tuple(widths), 0.0))  # the dense network loses nothing
        method.step()
        chosen[selection] = tuple(work.widths())
    assert len(saved) > 1
    assert chosen["score"] == min(losses, key=lambda widths: (losses[widths], -saved[widths]))
    assert chosen["score per joule"] == min(losses, key=lambda widths: (losses[widths] + 1e-6) / (saved[widths] + 1e-5))
    assert chosen["score"] != chosen["score per joule"]


def test_a_candidate_without_a_score_does_not_win() -> None:
    work = work_of("residual", share=0.5)
    full = full_of(work)
    judged_by_widths(work, lambda widths: float("nan") if widths[0] < full[0] else -1.0)
    method = started(work)
    method.step()
    assert work.widths()[0] == full[0]


def test_the_rounds_that_the_defaults_take() -> None:
    settings = NetAdaptSettings()
    assert [settings.rounds_to(share) for share in (1.0, 0.96, 0.5, 0.25, 0.0)] == [1, 1, 15, 24, 30]
    assert NetAdaptSettings(decay=0.5).rounds_to(0.5) == settings.rounds


# ---------------------------------------------------------------- whole runs


def test_digits_meet_their_budget_on_a_platform(tmp_path: Path) -> None:
    job = Compression(
        find_task("digits"),
        parse_budgets(("60%",)),
        digits_model(),
        meter=platform(),
        settings=CompressSettings(pretrain_steps=6, prune_steps=40, finetune_steps=3, lr=1e-3),
        method=NetAdapt(NetAdaptSettings(initial_reduction=0.2, short_steps=2)),
    )
    summary = job.run(tmp_path / "run").summary
    assert summary["met"]
    assert summary["method"] == "netadapt"
    rounds = [facts for facts in history_of(tmp_path / "run") if facts["phase"] == "netadapt"]
    candidates = sum(len(facts["scores"]) for facts in rounds)
    assert len(rounds) >= 2
    left = 40 - 2 * candidates  # goes into tuning
    assert left >= 0
    assert summary["batches"] == {"total": 6 + 40 + 3, "lineage": 6 + 2 * len(rounds) + left + 3}
    assert all(0 <= score <= 1 for facts in rounds for score in facts["scores"].values())


def wide_netadapt(**settings: Any) -> Compression:
    def held_out(model: nn.Module) -> float:
        return -float(sum(parameter.detach().abs().sum() for parameter in model.parameters()))

    job = wide_job("70%", name="residual", factor=0.9, task=wide_task("residual", evaluate_held_out=held_out))
    job.method = NetAdapt(NetAdaptSettings(**{"short_steps": 2, "initial_reduction": 0.08, **settings}))
    return job


@pytest.mark.parametrize("selection", ["score", "score per joule"])
def test_a_run_that_was_stopped_between_rounds_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selection: str
) -> None:
    whole = wide_netadapt(selection=selection).run(tmp_path / "whole")
    assert whole.summary["met"]
    real = NetAdapt.step
    for stop in (1, 3):
        with monkeypatch.context() as patched:

            def dies(self: NetAdapt, stop: int = stop) -> None:
                if len(self.rounds) == stop:
                    next(self._work.stream)  # lost with the session
                    raise Stop
                real(self)

            patched.setattr(NetAdapt, "step", dies)
            with pytest.raises(Stop):
                wide_netadapt(selection=selection).run(tmp_path / "parts")
    again = wide_netadapt(selection=selection).run(tmp_path / "parts")
    assert same_result(whole, again)
    assert again.summary == whole.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


def test_a_task_without_held_out_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = wide_job("70%")
    job.method = NetAdapt(NetAdaptSettings(short_steps=1))
    with pytest.raises(BadTask, match="no evaluate_held_out to judge them by") as raised:
        job.run(tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_other_settings_are_another_run() -> None:
    assert NetAdapt().config() == NetAdapt(NetAdaptSettings()).config()
    assert NetAdapt(NetAdaptSettings(short_steps=7)).config()["short_steps"] == 7


@pytest.mark.parametrize(
    "values",
    [
        {"initial_reduction": 0.0},
        {"decay": 1.1},
        {"decay": float("nan")},
        {"rounds": 0},
        {"short_steps": 0},
        {"selection": "best"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(EccError, match=next(iter(values))):
        NetAdaptSettings(**values)
