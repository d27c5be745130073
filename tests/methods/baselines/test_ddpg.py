from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.methods.baselines.ddpg import Ddpg, DdpgSettings, soft_update_, truncated_normal
from ecc.training import load_state, save_state

QUICK = DdpgSettings(hidden=32, actor_lr=3e-3, critic_lr=1e-2, batch=32)
STATES = torch.eye(3)
BEST = (0.2, 0.7, 0.9)


def reward_of(actions: list[float]) -> float:
    """An episode of three steps, and one reward for all; no walk is better than one of the best actions."""
    return 5.0 - sum((action - best) ** 2 for action, best in zip(actions, BEST, strict=True))


def episode(agent: Ddpg, noise: float | None) -> float:
    if noise is None:
        actions = [agent.drawn(0.0, 1.0) for _ in STATES]
    else:
        actions = [agent.act(state, 0.0, 1.0, noise) for state in STATES]
    reward = reward_of(actions)
    agent.remember(STATES, torch.tensor(actions), reward)
    return reward


def trained(agent: Ddpg, episodes: int) -> Ddpg:
    for number in range(episodes):
        episode(agent, 0.5 * 0.97**number)
        for _ in STATES:
            agent.learn()
    return agent


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in [key, *leaves(tree[key])]]
    if isinstance(tree, (list, tuple)):
        return [leaf for one in tree for leaf in leaves(one)]
    return [tree.tolist() if isinstance(tree, Tensor) else tree]


# ---------------------------------------------------------------- acting


@pytest.mark.parametrize("mean", [-3.0, 0.1, 0.5, 1.0, 40.0])
@pytest.mark.parametrize("deviation", [0.0, 1e-12, 0.01, 0.5, 20.0])
def test_noise_stays_within_the_bounds(mean: float, deviation: float) -> None:
    random = torch.Generator().manual_seed(0)
    drawn = [truncated_normal(mean, deviation, 0.25, 0.75, random) for _ in range(100)]
    assert all(0.25 <= one <= 0.75 for one in drawn)
    if deviation <= 1e-12 or (deviation == 0.01 and not 0 < mean < 1.5):
        nearest = min(0.75, max(0.25, mean))
        assert all(one == pytest.approx(nearest, abs=1e-3) for one in drawn)
    elif deviation >= 0.5:
        assert len(set(drawn)) > 1 or (mean, deviation) == (40.0, 0.5)  # whose tail rounds to nothing


@pytest.mark.parametrize("mean", [-1.5, -0.2, 0.3, 0.9, 1.4, 3.0])
def test_noise_has_the_moments_of_a_truncated_normal_distribution(mean: float) -> None:
    random = torch.Generator().manual_seed(0)
    drawn = torch.tensor([truncated_normal(mean, 0.4, 0.1, 1.0, random) for _ in range(4000)], dtype=torch.float64)
    grid = torch.linspace(0.1, 1.0, 10_001, dtype=torch.float64)  # the slow twin: integrate the density
    density = torch.exp(-0.5 * ((grid - mean) / 0.4) ** 2)
    expected = float((grid * density).sum() / density.sum())
    variance = float(((grid - expected) ** 2 * density).sum() / density.sum())
    assert float(drawn.mean()) == pytest.approx(expected, abs=4 * math.sqrt(variance / 4000))
    assert float(drawn.var()) == pytest.approx(variance, rel=0.1)


def test_the_first_answers_lie_in_the_middle() -> None:
    agent = Ddpg(3, 10, seed=0)
    assert all(agent.act(state, 0.0, 1.0, 0.0) == pytest.approx(0.5, abs=0.02) for state in STATES)
    assert agent.act(STATES[0], 0.8, 1.0, 0.0) == 0.8
    assert all(0.3 <= agent.drawn(0.3, 0.4) <= 0.4 for _ in range(50))


# ---------------------------------------------------------------- learning


def test_a_target_goes_a_share_of_the_way() -> None:
    target, source = nn.Linear(2, 2), nn.Linear(2, 2)
    before = [parameter.clone() for parameter in target.parameters()]
    soft_update_(target, source, 0.1)
    for old, now, new in zip(before, target.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(now, 0.9 * old + 0.1 * new)


def test_targets_follow_while_it_learns() -> None:
    agent = Ddpg(3, 30, seed=0, settings=QUICK)
    episode(agent, None)
    old = [parameter.clone() for parameter in agent.critic_target.parameters()]
    agent.learn()
    for before, now, new in zip(old, agent.critic_target.parameters(), agent.critic.parameters(), strict=True):
        torch.testing.assert_close(now, before + 0.01 * (new - before))


def test_the_baseline_follows_the_rewards() -> None:
    agent = Ddpg(3, 300, seed=0, settings=QUICK)
    assert agent.baseline is None
    agent.remember(STATES, torch.tensor([0.5, 0.5, 0.5]), 2.0)
    agent.learn()
    assert agent.baseline == 2.0
    agent.remember(STATES.repeat(99, 1), torch.full((297,), 0.5), 10.0)  # the first are 1 of 100 now
    agent.learn()
    assert 5.0 < agent.baseline <= 6.0


def test_the_oldest_is_forgotten() -> None:
    agent = Ddpg(3, 6, seed=0, settings=QUICK)
    for reward in (1.0, 2.0, 3.0):
        agent.remember(STATES, torch.tensor([0.1, 0.2, 0.3]), reward)
    replay = agent.state_dict()["replay"]
    assert agent.remembered == 6
    assert sorted(replay["rewards"].flatten().tolist()) == [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert replay["goes_on"].flatten().tolist() == [1.0, 1.0, 0.0] * 2
    assert torch.equal(replay["next_states"][:2], replay["states"][1:3])


@pytest.mark.parametrize("seed", range(3))
def test_it_learns_what_each_state_wants_from_the_reward_of_the_whole(seed: int) -> None:
    agent = Ddpg(3, 300, seed=seed, settings=QUICK)
    by_chance = sum(episode(agent, None) for _ in range(50)) / 50
    trained(agent, 200)
    learnt = reward_of([agent.act(state, 0.0, 1.0, 0.0) for state in STATES])
    assert 5.0 - learnt < 0.25 * (5.0 - by_chance)  # seeds 0 to 7 leave a thirtieth to a fifth


# ---------------------------------------------------------------- going on


def test_it_goes_on_bit_by_bit_from_a_saved_state(tmp_path: Any) -> None:
    agent = trained(Ddpg(3, 30, seed=0, settings=QUICK), 6)
    save_state(tmp_path / "agent.safetensors", agent.state_dict())
    other = Ddpg(3, 30, seed=9, settings=QUICK)
    other.load_state_dict(load_state(tmp_path / "agent.safetensors"))
    assert leaves(other.state_dict()) == leaves(agent.state_dict())
    assert leaves(trained(other, 6).state_dict()) == leaves(trained(agent, 6).state_dict())


def test_a_saved_state_is_a_copy() -> None:
    agent = trained(Ddpg(3, 30, seed=0, settings=QUICK), 3)
    state = agent.state_dict()
    before = leaves(state)
    other = Ddpg(3, 30, seed=1, settings=QUICK)
    other.load_state_dict(state)
    trained(agent, 3)
    trained(other, 3)
    assert leaves(state) == before


def test_other_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    trained(Ddpg(3, 30, seed=0, settings=QUICK), 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeds_tell_agents_apart() -> None:
    one, same, other = (leaves(trained(Ddpg(3, 30, seed=s, settings=QUICK), 3).state_dict()) for s in (0, 0, 1))
    assert one == same != other


@pytest.mark.parametrize("wrong", [{"hidden": 0}, {"batch": 0}, {"soft_update": 0.0}, {"discount": 1.1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EccError, match=next(iter(wrong))):
        DdpgSettings(**wrong)
