from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ecc.methods.driving import Drive
from torch import Tensor, nn

from ecc.errors import BadTask, EccError, InfeasibleBudget
from ecc.methods import PruningContext
from ecc.methods.baselines.amc import FEATURES, Amc, AmcSettings, LayerEnv
from ecc.methods.baselines.ddpg import DdpgSettings
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.training import load_state, save_state
from methods.jobs import WIDE, digits_job, history_of, same_result, wide_job, wide_task
from methods.works import work_of

SMALL = DdpgSettings(hidden=16, batch=8)


def quick(episodes: int = 6, **settings: Any) -> Amc:
    return Amc(AmcSettings(episodes=episodes, agent=SMALL, **{"chunk": 2, **settings}))


def started(work: PruningContext, episodes: int = 6, **settings: Any) -> Amc:
    method = quick(episodes, **settings)
    method.start(work)
    return method


def finished(work: PruningContext, episodes: int = 6, **settings: Any) -> Amc:
    method = started(work, episodes, **settings)
    while not method.is_done:
        method.step()
    return method


def weight_of(model: nn.Module) -> float:
    """A score that likes wide networks, as accuracy does."""
    return float(sum(parameter.detach().abs().sum() for parameter in model.parameters()))


def lines_of(work: PruningContext) -> list[dict[str, Any]]:
    return [dict(line) for line in work.lines]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the wall


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", WIDE)
def test_every_episode_meets_the_aims(name: str, width_multiple: int) -> None:
    work = work_of(name, share=0.4, width_multiple=width_multiple)
    method = finished(work, 6)
    episodes = [line for line in lines_of(work) if "episode" in line]
    assert [line["episode"] for line in episodes] == list(range(1, 7))
    for line in episodes:
        assert work.constraint_violation(line["widths"]) <= 0
        assert line["widths"] == work.round_widths(line["widths"])
    assert method.is_done
    assert work.widths() == lines_of(work)[-1]["widths"]


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_wall_is_the_largest_width_that_leaves_a_way(share: float) -> None:
    work = work_of("residual", share=share)
    walk, floors = LayerEnv(work), work.min_widths()
    widths, states, actions = walk.along(lambda _, low: 1.0)
    assert actions == [1.0] * len(walk)
    assert len(states) == len(walk)
    slow = [group.width for group in work.graph.groups]  # the twin tries every width
    for place, stop in enumerate(walk.stops):
        rest = {later: floors[later] for later in walk.stops[place + 1 :]}

        def constraint_violation(width: int, stop: int = stop, rest: dict[int, int] = rest) -> float:
            return work.constraint_violation(
                [{stop: width, **rest}.get(number, one) for number, one in enumerate(slow)]
            )

        slow[stop] = max(width for width in walk.choices[stop] if constraint_violation(width) <= 0)
    assert widths == slow
    assert work.constraint_violation(widths) <= 0 < work.constraint_violation([width + 1 for width in widths])


def test_what_the_wall_lets_through_is_what_was_chosen() -> None:
    work = work_of(share=1.0, width_multiple=8)
    walk = LayerEnv(work)
    widths, _, _ = walk.along(lambda _, low: 0.6)
    assert widths == work.round_widths(
        [(0.6 if number in walk.stops else 1) * group.width for number, group in enumerate(work.graph.groups)]
    )
    lows: list[float] = []
    low, _, _ = walk.along(lambda _, least: lows.append(least) or least)  # type: ignore[func-returns-value]
    assert low == work.min_widths()
    assert all(0 < one < 1 for one in lows)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("name", WIDE)
def test_states_are_numbers_from_0_to_1_that_tell_of_the_walk(name: str) -> None:
    walk = LayerEnv(work_of(name, share=0.5))
    _, high, _ = walk.along(lambda _, low: 1.0)
    _, low, _ = walk.along(lambda _, least: least)
    for state in high + low:
        assert state.shape == (FEATURES,)
        assert bool(((state >= 0) & (state <= 1)).all())
    assert torch.equal(high[0], low[0])
    assert float(high[0][-3]) == 0.0  # nothing is saved before the first choice
    assert float(high[0][-1]) == 1.0
    assert float(low[-1][-2]) == 0.0  # nothing can be saved after the last
    if len(walk) > 1:
        assert float(low[1][-3]) > float(high[1][-3])
        assert float(low[1][-1]) < float(high[1][-1])


# ---------------------------------------------------------------- the search


def test_the_best_episode_is_taken_and_nothing_is_trained() -> None:
    work = work_of(share=0.5)
    dense = copy.deepcopy(work.model.state_dict())
    finished(work, 8)
    episodes = [line for line in lines_of(work) if "episode" in line]
    best = max(episodes, key=lambda line: line["reward"])
    assert work.widths() == best["widths"]
    assert work.held_out(work.model) == best["reward"]
    assert work.stream.total == 0
    for name, value in work.model.state_dict().items():  # what is alive is as it was
        assert bool(((value == dense[name]) | (value == 0)).all())


def test_noise_waits_for_the_warm_up_and_then_decays() -> None:
    work = work_of(share=0.5)
    method = finished(work, 8, noise=0.4, noise_decay=0.5)
    noise = [line["noise"] for line in lines_of(work) if "episode" in line]
    assert noise == pytest.approx([0.4, 0.4, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125])
    assert method._agent.baseline is not None


def test_the_agent_is_not_taught_in_the_warm_up() -> None:
    method = finished(work_of(share=0.5), 4, warm_up=1.0)
    assert method._agent.baseline is None
    assert method._agent.remembered == 4 * len(method._walk)


def test_it_finds_what_the_held_out_data_want() -> None:
    """The reward likes one group wide and the other narrow: the search beats its own warm-up."""
    work = work_of("chain", share=0.5)
    stops = LayerEnv(work).stops

    def wants(model: nn.Module) -> float:
        first, second = (work.widths(model)[stop] / work.graph.groups[stop].width for stop in stops)
        return -((first - 0.3) ** 2) - (second - 0.8) ** 2

    work.held_out = wants
    agent = DdpgSettings(hidden=32, actor_lr=1e-3, critic_lr=1e-2)
    method = Amc(AmcSettings(episodes=120, chunk=120, agent=agent))
    method.start(work)
    method.step()
    rewards = [line["reward"] for line in lines_of(work) if "episode" in line]
    assert sum(rewards[-20:]) / 20 > 0.5 * sum(rewards[:30]) / 30  # negative; five seeds left 0.15 to 0.35
    assert max(rewards) == wants(work.model)


def test_a_score_that_is_no_number_never_wins() -> None:
    work = work_of(share=0.5)
    scores = iter([math.nan, 1.0, math.inf, 3.0, math.nan, 2.0])
    work.held_out = lambda _: next(scores)
    finished(work, 6)
    rewards = [line["reward"] for line in lines_of(work) if "episode" in line]
    assert rewards == [0.0, 1.0, 0.0, 3.0, 0.0, 2.0]
    assert lines_of(work)[-1]["best"] == 3.0


def test_lower_aims_make_it_search_on_from_the_dense_network() -> None:
    work = work_of(share=0.6)
    work.held_out = weight_of
    method = finished(work, 6, again=0.5)
    work.targets = [0.5 * work.targets[0]]
    assert not method.is_done
    while not method.is_done:
        method.step()
    episodes = [line for line in lines_of(work) if "episode" in line]
    assert len(episodes) == 9
    fitting = [line for line in episodes if work.constraint_violation(line["widths"]) <= 0]
    assert all(line in fitting for line in episodes[6:])
    assert [line["noise"] for line in episodes[6:]] == [0.1] * 3
    best = max(fitting, key=lambda line: line["reward"])
    assert work.widths() == best["widths"]
    assert work.held_out(work.model) == best["reward"]


def test_aims_below_the_floors_are_refused() -> None:
    method = started(work_of(share=0.01))
    with pytest.raises(InfeasibleBudget, match="every group at its floor"):
        method.step()


# ---------------------------------------------------------------- going on


def test_it_goes_on_bit_by_bit_between_episodes(tmp_path: Path) -> None:
    work = work_of(share=0.5)
    method = started(work, 8, chunk=1)
    for _ in range(5):
        method.step()
    save_state(tmp_path / "amc.safetensors", method.state_dict())
    other = work_of(share=0.5)  # with the dense weights, as a new session starts
    again = started(other, 8, chunk=2)
    again.load_state_dict(load_state(tmp_path / "amc.safetensors"))
    for one in (method, again):
        while not one.is_done:
            one.step()
    assert lines_of(other) == lines_of(work)[5:]
    theirs = other.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in work.model.state_dict().items())
    assert _equal(method.state_dict(), again.state_dict())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_the_seed_decides_and_other_random_numbers_are_left_alone() -> None:
    before = torch.random.get_rng_state()
    works = [work_of(share=0.5, seed=seed) for seed in (0, 0, 1)]
    torch.random.set_rng_state(before)
    for work in works:
        finished(work)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert lines_of(works[0]) == lines_of(works[1]) != lines_of(works[2])


def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job() -> Any:
        made = digits_job("60%")
        made.method = quick(8, chunk=3)
        return made

    whole = job().run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        real = Amc._episode

        def dies(self: Amc) -> None:
            if len(self._tried) == 4:  # within the second step
                raise KeyboardInterrupt
            real(self)

        patched.setattr(Amc, "_episode", dies)
        with pytest.raises(KeyboardInterrupt):
            job().run(tmp_path / "parts")
    again = job().run(tmp_path / "parts")
    assert same_result(whole, again)
    assert again.summary == whole.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")
    row = whole.summary["budgets"]["energy"]
    assert whole.summary["method"] == "amc"
    assert row["met"]
    assert row["result"] <= row["limit"]


def test_a_budget_is_met_on_the_scales_though_the_model_errs(tmp_path: Path) -> None:
    job = wide_job("50%", factor=0.8, task=wide_task(evaluate_held_out=weight_of))
    job.method = quick(10, again=0.3)
    summary = job.run(tmp_path / "run").summary
    row = summary["budgets"]["energy"]
    assert summary["met"]
    assert row["result"] <= row["limit"]
    assert (
        job.energy_models["energy"].at(summary["widths"]) < 0.9 * row["limit"]
    )  # the model alone would have stopped above


def test_scales_that_show_more_make_it_search_on_until_they_agree() -> None:
    work = work_of(share=0.5)
    work.held_out = weight_of
    limit, cost = work.targets[0], work.costs[0]

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        return MeasuredCost({"energy": 1.3 * float(cost.value(work.graph.widths(widths)))}, "measured")

    drive = Drive(started(work, 20), work, [limit], scales)
    drive.go(lambda: None)
    assert drive.landed
    assert len(drive.weighings) > 1
    assert drive.weighings[-1].weighed["energy"] <= limit
    assert len([line for line in lines_of(work) if "episode" in line]) == 20 + len(drive.weighings) - 1


# ---------------------------------------------------------------- what is refused


def test_a_task_without_held_out_data_is_refused(tmp_path: Path) -> None:
    job = wide_job("50%")
    job.method = quick()
    with pytest.raises(BadTask, match="has no evaluate_held_out"):
        job.run(tmp_path / "run")


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"chunk": 0}, {"warm_up": 1.5}, {"noise": -0.1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EccError, match=next(iter(wrong))):
        AmcSettings(**wrong)


def test_its_defaults_are_those_of_the_paper() -> None:
    asked = Amc().config()
    assert asked["episodes"] == 400
    assert asked["warm_up"] * asked["episodes"] == 100
    assert (asked["noise"], asked["noise_decay"], asked["replay"]) == (0.5, 0.95, 100)
    agent = asked["agent"]
    assert (agent["hidden"], agent["actor_lr"], agent["critic_lr"]) == (300, 1e-4, 1e-3)
    assert (agent["soft_update"], agent["discount"], agent["batch"]) == (0.01, 1.0, 64)
    assert "chunk" not in asked
