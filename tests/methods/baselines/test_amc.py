"""AMC: its environment, its search, and the DDPG agent."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from ecc.methods.baselines.amc import AmcSettings, LayerEnv
from ecc.methods.baselines.ddpg import Ddpg, DdpgSettings, soft_update_, truncated_normal
from methods.baselines.cases import amc, finish, lines_of, magnitude_score
from methods.works import work_of

# ---------------------------------------------------------------- environment


def test_actions_are_limited_to_the_largest_width_that_can_still_meet_the_targets() -> None:
    context = work_of("residual", share=0.4)
    env, least = LayerEnv(context), context.min_widths()
    widths, states, actions = env.rollout(lambda _, low: 1.0)
    assert actions == [1.0] * len(env) == [1.0] * len(states)
    slow = [group.width for group in context.graph.groups]
    for position, stop in enumerate(env.stops):
        trials = []
        for width in env.choices[stop]:
            trial = [*slow[:stop], width, *slow[stop + 1 :]]
            for later in env.stops[position + 1 :]:
                trial[later] = least[later]
            trials.append(width if context.constraint_violation(trial) <= 0 else 0)
        slow[stop] = max(trials)
    assert widths == slow
    assert context.constraint_violation(widths) <= 0 < context.constraint_violation([width + 1 for width in widths])


# ---------------------------------------------------------------- search


def test_the_best_episode_is_taken_without_training() -> None:
    context = work_of(share=0.5)
    dense = copy.deepcopy(context.model.state_dict())
    method = finish(amc(8, noise=0.4, noise_decay=0.5), context)
    episodes = lines_of(context, "episode")
    best = max(episodes, key=lambda line: line["reward"])
    assert context.widths() == best["widths"]
    assert context.held_out(context.model) == best["reward"]
    assert context.stream.total == AmcSettings().batches  # of the refit
    assert context.stream.lineage == 0
    assert all(context.constraint_violation(line["widths"]) <= 0 for line in episodes)
    refit = set(method._refit._products)
    for name, value in context.model.state_dict().items():
        same = bool(((value == dense[name]) | (value == 0)).all())
        assert same == (name.rpartition(".")[0] not in refit), name
    noise = [line["noise"] for line in episodes]
    assert noise == pytest.approx([0.4, 0.4, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125])  # decays after the warm-up
    assert method._agent.baseline is not None
    random = finish(amc(4, warm_up=1.0), work_of(share=0.5))
    assert random._agent.baseline is None  # no updates in the warm-up
    assert random._agent.remembered == 4 * len(random._env)


def test_scores_that_are_not_finite_never_win() -> None:
    context = work_of(share=0.5)
    scores = iter([math.nan, 1.0, math.inf, 3.0, math.nan, 2.0])
    context.held_out = lambda _: next(scores)
    finish(amc(6), context)
    assert [line["reward"] for line in lines_of(context, "episode")] == [0.0, 1.0, 0.0, 3.0, 0.0, 2.0]
    assert lines_of(context, "best")[-1]["best"] == 3.0


def test_lower_targets_add_episodes_with_little_noise() -> None:
    context = work_of(share=0.6)
    context.held_out = magnitude_score
    method = finish(amc(6, retarget_episodes=0.5), context)
    context.targets = [0.5 * context.targets[0]]
    finish(method, context)
    episodes = lines_of(context, "episode")
    assert [line["noise"] for line in episodes[6:]] == [0.1] * 3
    fitting = [line for line in episodes if context.constraint_violation(line["widths"]) <= 0]
    assert all(line in fitting for line in episodes[6:])
    assert context.widths() == max(fitting, key=lambda line: line["reward"])["widths"]


# ---------------------------------------------------------------- DDPG

QUICK = DdpgSettings(hidden=32, actor_lr=3e-3, critic_lr=1e-2, batch=32)
STATES, BEST = torch.eye(3), (0.2, 0.7, 0.9)


def reward_of(actions: list[float]) -> float:
    """One reward for an episode of three steps, highest for the best actions."""
    return 5.0 - sum((action - best) ** 2 for action, best in zip(actions, BEST, strict=True))


def trained(agent: Ddpg, episodes: int) -> Ddpg:
    for number in range(episodes):
        actions = [agent.act(state, 0.0, 1.0, 0.5 * 0.97**number) for state in STATES]
        agent.remember(STATES, torch.tensor(actions), reward_of(actions))
        for _ in STATES:
            agent.learn()
    return agent


@pytest.mark.parametrize("mean", [-1.5, 0.3, 0.9, 3.0])
def test_noise_is_a_truncated_normal_distribution(mean: float) -> None:
    random = torch.Generator().manual_seed(0)
    drawn = torch.tensor([truncated_normal(mean, 0.4, 0.1, 1.0, random) for _ in range(4000)], dtype=torch.float64)
    grid = torch.linspace(0.1, 1.0, 10_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((grid - mean) / 0.4) ** 2)
    expected = float((grid * density).sum() / density.sum())
    variance = float(((grid - expected) ** 2 * density).sum() / density.sum())
    assert float(drawn.mean()) == pytest.approx(expected, abs=4 * math.sqrt(variance / 4000))
    assert float(drawn.var()) == pytest.approx(variance, rel=0.1)
    assert 0.1 <= float(drawn.min()) <= float(drawn.max()) <= 1.0
    for tiny in (0.0, 1e-12):
        assert truncated_normal(mean, tiny, 0.1, 1.0, random) == pytest.approx(min(1.0, max(0.1, mean)), abs=1e-6)
    assert truncated_normal(40.0, 0.5, 0.1, 1.0, random) == 1.0  # the tail rounds to nothing


def test_an_untrained_agent_and_its_replay_buffer() -> None:
    agent = Ddpg(3, 6, seed=0, settings=QUICK)
    assert all(agent.act(state, 0.0, 1.0, 0.0) == pytest.approx(0.5, abs=0.02) for state in STATES)
    assert agent.act(STATES[0], 0.8, 1.0, 0.0) == 0.8
    assert all(0.3 <= agent.random_action(0.3, 0.4) <= 0.4 for _ in range(50))
    for reward in (1.0, 2.0, 3.0):
        agent.remember(STATES, torch.tensor([0.1, 0.2, 0.3]), reward)
    replay = agent.state_dict()["replay"]
    assert agent.remembered == 6
    assert sorted(replay["rewards"].flatten().tolist()) == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]  # the oldest are gone
    assert replay["continues"].flatten().tolist() == [1.0, 1.0, 0.0] * 2
    assert torch.equal(replay["next_states"][:2], replay["states"][1:3])


def test_targets_and_baseline_follow() -> None:
    target, source = nn.Linear(2, 2), nn.Linear(2, 2)
    before = [parameter.clone() for parameter in target.parameters()]
    soft_update_(target, source, 0.1)
    for old, now, new in zip(before, target.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * new)
    agent = Ddpg(3, 300, seed=0, settings=QUICK)
    agent.remember(STATES, torch.tensor([0.5, 0.5, 0.5]), 2.0)
    before = [parameter.clone() for parameter in agent.critic_target.parameters()]
    agent.learn()
    for old, now, new in zip(before, agent.critic_target.parameters(), agent.critic.parameters(), strict=True):
        torch.testing.assert_close(now, old + 0.01 * (new - old))
    assert agent.baseline == 2.0
    agent.remember(STATES.repeat(99, 1), torch.full((297,), 0.5), 10.0)  # the first are 1 of 100 now
    agent.learn()
    assert 5.0 < agent.baseline <= 6.0


def test_the_agent_learns_each_state_from_the_reward_of_the_episode() -> None:
    agent = Ddpg(3, 300, seed=0, settings=QUICK)
    for _ in range(50):
        actions = [agent.random_action(0.0, 1.0) for _ in STATES]
        agent.remember(STATES, torch.tensor(actions), reward_of(actions))
    by_chance = float(agent.state_dict()["replay"]["rewards"][:150].mean())
    trained(agent, 200)
    learnt = reward_of([agent.act(state, 0.0, 1.0, 0.0) for state in STATES])
    assert 5.0 - learnt < 0.25 * (5.0 - by_chance)
