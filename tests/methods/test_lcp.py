from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ecc.methods.landing import BAND
from torch import Tensor, nn

from ecc.energy import parse_budgets
from ecc.errors import BadTask, BadWidths, EccError, InfeasibleBudget
from ecc.graph import live_masks
from ecc.methods import Compression, CompressSettings, PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.lcp import Compensation, Lcp, LcpSettings, ranked_widths
from ecc.options import settings_from
from ecc.training import BatchStream, load_state, save_state
from ecc.zoo import find_task
from methods.jobs import digits_model, history_of, platform, same_result, wide_task
from methods.nets import macs_cost, traced


class Judge:
    """Counts how often it is asked, and likes the last network best."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module) -> float:
        self.calls += 1
        return float(self.calls)


def size(model: nn.Module) -> float:
    """Likes a network whose weights are small."""
    return -sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())


def work_of(
    share: float, *, net: str = "chain", width_multiple: int = 1, held_out: Callable[[nn.Module], float] | None = None
) -> PruningContext:
    model, _, graph = traced(net)
    cost = macs_cost(graph)
    full = torch.tensor(cost.full_widths, dtype=torch.float64)
    return PruningContext(
        model=model,
        graph=graph,
        costs=(cost,),
        targets=[share * float(cost.value(full))],
        settings=CompressSettings(),
        width_multiple=width_multiple,
        stream=BatchStream(wide_task("chain")),
        teacher=None,
        held_out=held_out or Judge(),
        train=lambda model, steps, lr, stream: None,
        log=lambda facts: None,
    )


def done(method: Lcp, most: int = 1000) -> int:
    steps = 0
    while not method.is_done:
        method.step()
        steps += 1
        assert steps <= most
    return steps


def slow_widths(
    work: PruningContext, norms: dict[str, Tensor], compensation: dict[str, tuple[float, float]]
) -> list[int]:
    """One channel after the other, by the compensated score, until the targets are met."""
    ranking = sorted(
        (scale * float(norm) + shift, name)
        for name, (scale, shift) in compensation.items()
        for norm in norms[name].double()
    )
    left = dict(work.graph.full_widths)
    for _, name in ranking:
        widths = work.round_widths(list(left.values()))
        if work.constraint_violation(widths) <= 0:
            return widths
        left[name] -= 1
    return work.round_widths(list(left.values()))


def drawn(work: PruningContext, seed: int) -> tuple[Lcp, dict[str, tuple[float, float]]]:
    """A method that was told a random compensation."""
    draw = random.Random(seed)
    norms = magnitudes(work)
    found = {
        name: (2 ** draw.uniform(-2, 2), draw.gauss(0, 1) * float(one.std(unbiased=False)))
        for name, one in norms.items()
    }
    return Lcp(found=found), found


# ---------------------------------------------------------------- the cut


@pytest.mark.parametrize("net", ["chain", "residual", "concat", "digits"])
@pytest.mark.parametrize("width_multiple", [1, 4])
def test_the_cut_is_that_of_removing_one_channel_after_the_other(net: str, width_multiple: int) -> None:
    for seed, share in enumerate((0.8, 0.5, 0.35)):
        work = work_of(share, net=net, width_multiple=width_multiple)
        norms = magnitudes(work)
        method, found = drawn(work, seed)
        method.start(work)
        expected = slow_widths(work, norms, found)
        assert done(method) == 1
        assert work.widths() == expected
        assert work.constraint_violation(expected) <= 0


def test_what_stays_are_the_largest_of_each_group_with_their_weights() -> None:
    work = work_of(0.5)
    dense, norms = copy.deepcopy(work.model), magnitudes(work)
    method, _ = drawn(work, 3)
    method.start(work)
    method.step()
    for group, mask in zip(work.graph.groups, live_masks(work.model, work.graph), strict=True):
        if group.frozen is None and not mask.all():
            assert norms[group.name][mask].min() > norms[group.name][~mask].max()
    for name, weight in work.model.state_dict().items():
        assert torch.equal(weight, torch.where(weight == 0, weight, dense.state_dict()[name]))


def test_a_group_that_is_shifted_away_stops_at_its_floor_and_one_that_is_lifted_stays() -> None:
    work = work_of(0.3, width_multiple=4)
    floors, (low, high) = work.min_widths(), list(magnitudes(work))
    for first, second in ((low, high), (high, low)):
        work = work_of(0.3, width_multiple=4)
        method = Lcp(found={first: (1.0, -1e6), second: (1.0, 0.0)})
        method.start(work)
        done(method)
        widths = dict(zip(work.graph.full_widths, work.widths(), strict=True))
        assert widths[first] == dict(zip(work.graph.full_widths, floors, strict=True))[first]
        assert all(width % 4 == 0 or width == work.graph.full_widths[name] for name, width in widths.items())


def test_aims_below_all_floors_are_refused() -> None:
    method = Lcp(LcpSettings(candidates=1))
    method.start(work_of(0.001))
    with pytest.raises(InfeasibleBudget, match="at its floor"):
        method.step()
    with pytest.raises(InfeasibleBudget, match="search_share"):
        Lcp(LcpSettings(search_share=0.001)).start(work_of(0.5))


# ---------------------------------------------------------------- one search for every budget


@pytest.mark.parametrize("scale", [False, True])
def test_lower_aims_are_cut_anew_without_asking_for_another_score(scale: bool) -> None:
    judge = Judge()
    work = work_of(0.6, held_out=judge)
    dense, norms = copy.deepcopy(work.model.state_dict()), magnitudes(work)
    method = Lcp(LcpSettings(scale=scale, candidates=7, population=4, tournament=2))
    method.start(work)
    assert done(method) == 8
    assert judge.calls == 7
    first = work.widths()
    work.targets = [0.5 * aim for aim in work.targets]
    assert not method.is_done
    assert done(method) == 1
    assert judge.calls == 7
    assert work.widths() == slow_widths(work, norms, method.compensation) != first
    for name, weight in work.model.state_dict().items():  # from the dense weights, not from what the first cut left
        assert torch.equal(weight, torch.where(weight == 0, weight, dense[name]))
    assert all(one == 1 for one, _ in method.compensation.values()) != scale


def test_what_was_found_serves_another_run() -> None:
    method = Lcp(LcpSettings(candidates=6, population=3, search_share=0.4))
    method.start(work_of(0.7))
    done(method)
    judge = Judge()
    work = work_of(0.5, held_out=judge)
    again = Lcp(LcpSettings(search_share=0.4), found=method.compensation)
    again.start(work)
    assert done(again) == 1
    assert judge.calls == 0
    assert work.widths() == slow_widths(work, magnitudes(work_of(0.5)), method.compensation)
    assert again.config()["found"] is not None
    with pytest.raises(BadWidths, match="nothing for"):
        Lcp(found={}).start(work_of(0.5))


def test_candidates_are_judged_at_the_share_of_the_search() -> None:
    seen: list[list[int]] = []
    work = work_of(0.9)

    def held_out(model: nn.Module) -> float:
        seen.append(work.widths(model))
        return 0.0

    work.held_out = held_out
    method = Lcp(LcpSettings(candidates=5, population=3, search_share=0.4))
    method.start(work)
    done(method)
    full = [group.width for group in work.graph.groups]
    tight = replace(work, targets=[0.4 / 0.9 * aim for aim in work.targets])
    assert all(-0.15 < tight.constraint_violation(widths) <= 1e-12 for widths in seen)
    assert full != work.widths() != seen[-1]


def test_candidates_are_trained_on_forks_from_the_same_place() -> None:
    calls: list[tuple[int, float, int]] = []
    work = work_of(0.5)
    stream = work.stream

    def train(model: nn.Module, steps: int, lr: float, fork: BatchStream) -> None:
        calls.append((steps, lr, fork.lineage))
        assert fork is not stream
        assert model is not work.model
        for _ in range(steps):
            next(fork)

    work.train = train
    method = Lcp(LcpSettings(candidates=3, short_steps=2, short_lr=0.25))
    method.start(work)
    done(method)
    assert calls == [(2, 0.25, 0)] * 3
    assert (stream.total, stream.lineage) == (6, 0)


# ---------------------------------------------------------------- resume


def test_a_method_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    settings = LcpSettings(scale=True, candidates=9, population=4, tournament=2)
    whole, part, rest = (work_of(0.5, held_out=size) for _ in range(3))
    one = Lcp(settings)
    one.start(whole)
    done(one)
    other = Lcp(settings)
    other.start(part)
    for _ in range(6):
        other.step()
    save_state(tmp_path / "state.safetensors", other.state_dict())
    torch.rand(3)  # what a new session has drawn says nothing
    last = Lcp(settings)
    last.start(rest)
    last.load_state_dict(load_state(tmp_path / "state.safetensors"))
    done(last)
    assert last.compensation == one.compensation
    assert rest.widths() == whole.widths()
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name])
    assert one.compensation != dict.fromkeys(one.compensation, (1.0, 0.0))


def test_the_seed_decides_and_the_global_generators_do_not() -> None:
    found = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        work = work_of(0.5)
        work.settings = replace(work.settings, seed=seed)
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        method = Lcp(LcpSettings(candidates=6, population=3))
        method.start(work)
        while method.is_searching:
            method.step()
        assert torch.equal(before, torch.get_rng_state())
        found.append(method.state_dict()["evolution"]["population"])
    assert found[0] == found[1] != found[2]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"candidates": 0},
        {"population": 0},
        {"tournament": 0},
        {"short_steps": -1},
        {"mutated": 0.0},
        {"mutated": 1.1},
        {"sigma": -1.0},
        {"spread": float("nan")},
        {"short_lr": 0.0},
        {"search_share": 0.0},
        {"search_share": 1.5},
    ],
)
def test_values_out_of_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EccError, match=next(iter(wrong))):
        LcpSettings(**wrong)


def test_names_and_what_was_asked() -> None:
    assert (Lcp().name, Lcp(LcpSettings(scale=True)).name) == ("lcp", "legr")
    assert Lcp().config()["candidates"] == 400
    assert Lcp().config() != Lcp(LcpSettings(sigma=2.0)).config()


# ---------------------------------------------------------------- digits, from end to end


class Stop(BaseException):
    pass


def digits_job(stop_at: int | None = None) -> Compression:
    task = find_task("digits")
    real, calls = task.evaluate_held_out, 0
    assert real is not None

    def held_out(model: nn.Module) -> float:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop
        return real(model)

    return Compression(
        replace(task, evaluate_held_out=held_out),
        parse_budgets(["60%"]),
        digits_model(),
        meter=platform(),
        settings=settings_from(
            CompressSettings, dict(pretrain_steps=20, prune_steps=8, finetune_steps=4, lr=1e-3, log_every=5)
        ),
        method=Lcp(LcpSettings(scale=True, candidates=8, population=4, tournament=2, short_steps=1)),
    )


def test_a_budget_is_met_on_the_scales_and_a_stopped_run_ends_alike(tmp_path: Path) -> None:
    result = digits_job().run(tmp_path / "whole")
    budget = result.summary["budgets"]["energy"]
    assert budget["result"] <= BAND[1] * budget["limit"]
    assert result.summary["method"] == "legr"
    assert result.summary["batches"]["total"] == 20 + 8 + 4
    assert result.summary["batches"]["lineage"] == 20 + 4
    judged = [line for line in history_of(tmp_path / "whole") if "candidate" in line]
    assert [line["candidate"] for line in judged] == list(range(1, 9))
    assert judged[-1]["best"] == max(line["fitness"] for line in judged)

    with pytest.raises(Stop):
        digits_job(stop_at=6).run(tmp_path / "parts")
    again = digits_job().run(tmp_path / "parts")
    assert same_result(result, again)
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


def test_a_task_without_held_out_data_is_refused(tmp_path: Path) -> None:
    job = digits_job()
    job.task = replace(job.task, evaluate_held_out=None)
    with pytest.raises(BadTask, match="evaluate_held_out"):
        job.run(tmp_path / "run")


def test_the_ranking_of_bare_norms_is_the_first_candidate() -> None:
    work = work_of(0.5)
    norms = magnitudes(work)
    method = Lcp(LcpSettings(candidates=1))
    method.start(work)
    done(method)
    groups = [group for group in work.graph.prunable if group.name in method.compensation]
    assert work.widths() == ranked_widths(work, groups, norms, Compensation.none(len(groups)))
    assert set(method.compensation.values()) == {(1.0, 0.0)}
