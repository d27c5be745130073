"""`Ddpg`: an actor that maps a state to one action in [0, 1], and a critic that predicts its value.

T. P. Lillicrap et al., "Continuous control with deep reinforcement learning", ICLR 2016, in the form that AMC uses
(`amc.py`), whose numbers are the defaults.

As in AMC: two hidden layers of 300, soft target updates, one reward for all transitions of an episode, a moving
baseline that is subtracted from it, and noise from a truncated normal distribution.

Why no library: stable-baselines3 owns the loop over a gym environment and clips noise instead of truncating its
distribution, has no baseline and no reward for a whole episode, and pickles its replay buffer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ecc.options import check_options, option

_LAST_BOUND = 3e-3  # of the last layer: first actions are near 0.5, first values near 0; Lillicrap et al., section 7


@dataclass(frozen=True, kw_only=True)
class DdpgSettings:
    """Settings of the agent."""

    hidden: int = option(300, "Width of both hidden layers, of actor and critic.", range=(1, None))
    actor_lr: float = option(1e-4, "Learning rate of the actor.", above=0, range=(None, 1))
    critic_lr: float = option(1e-3, "Learning rate of the critic.", above=0, range=(None, 1))
    soft_update: float = option(0.01, "Step of the target networks after each update.", above=0, range=(None, 1))
    discount: float = option(1.0, "Discount; with 1 the first action counts as the last.", above=0, range=(None, 1))
    batch: int = option(64, "Transitions per update.", range=(1, None))
    baseline_rate: float = option(0.5, "Step of the baseline to each mean reward.", above=0, range=(None, 1))

    def __post_init__(self) -> None:
        check_options(self)


class Ddpg:
    """The agent. It runs on the CPU, with a random generator of its own."""

    def __init__(self, features: int, capacity: int, seed: int, settings: DdpgSettings | None = None) -> None:
        self.settings = settings or DdpgSettings()
        self._random = torch.Generator().manual_seed(seed)
        hidden = self.settings.hidden
        self.actor = self._net(features, hidden, nn.Sigmoid())
        self.critic = self._net(features + 1, hidden, nn.Identity())
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        # Fused updates are faster on a CPU, and there are thousands.
        self._actor_adam = torch.optim.Adam(self.actor.parameters(), lr=self.settings.actor_lr, fused=True)
        self._critic_adam = torch.optim.Adam(self.critic.parameters(), lr=self.settings.critic_lr, fused=True)
        self._replay = {
            "states": torch.zeros(capacity, features),
            "actions": torch.zeros(capacity, 1),
            "rewards": torch.zeros(capacity, 1),
            "next_states": torch.zeros(capacity, features),
            "continues": torch.zeros(capacity, 1),  # 0 at the end of an episode
        }
        self._seen = 0
        self.baseline: float | None = None

    def _net(self, inputs: int, hidden: int, last: nn.Module) -> nn.Sequential:
        """Two hidden layers, initialised from the generator of the agent."""
        layers = []
        for fan_in, fan_out in ((inputs, hidden), (hidden, hidden), (hidden, 1)):
            layer = cast(nn.Linear, skip_init(nn.Linear, fan_in, fan_out))
            bound = _LAST_BOUND if fan_out == 1 else 1 / math.sqrt(fan_in)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=self._random)
            layers.append(layer)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], last)

    # ------------------------------------------------------------ acting

    def random_action(self, low: float, high: float) -> float:
        """A uniformly random action."""
        return low + (high - low) * float(torch.rand((), generator=self._random, dtype=torch.float64))

    @torch.no_grad()
    def act(self, state: Tensor, low: float, high: float, noise: float) -> float:
        """The actor's action, with truncated normal noise."""
        return truncated_normal(float(self.actor(state)), noise, low, high, self._random)

    # ------------------------------------------------------------ learning

    @property
    def remembered(self) -> int:
        """Number of transitions in the replay buffer."""
        return min(self._seen, len(self._replay["states"]))

    def remember(self, states: Tensor, actions: Tensor, reward: float) -> None:
        """Add an episode to the replay buffer; each transition has the reward of the episode.

        Args:
            states: (steps, features).
            actions: (steps,).
            reward: Reward of the episode.
        """
        steps = len(states)
        rows = (self._seen + torch.arange(steps)) % len(self._replay["states"])
        continues = torch.ones(steps, 1)
        continues[-1] = 0
        self._replay["states"][rows] = states
        self._replay["actions"][rows] = actions.reshape(-1, 1).to(torch.float32)
        self._replay["rewards"][rows] = reward
        self._replay["next_states"][rows] = torch.cat([states[1:], states[-1:]])
        self._replay["continues"][rows] = continues
        self._seen += steps

    def learn(self) -> None:
        """One update of critic, actor and target networks from a random batch."""
        settings = self.settings
        rows = torch.randint(self.remembered, (settings.batch,), generator=self._random)
        states, actions, rewards, next_states, continues = (column[rows] for column in self._replay.values())
        mean = float(rewards.mean())
        before = mean if self.baseline is None else self.baseline
        self.baseline = before + settings.baseline_rate * (mean - before)

        with torch.no_grad():
            future = self.critic_target(torch.cat([next_states, self.actor_target(next_states)], dim=1))
            targets = rewards - self.baseline + settings.discount * continues * future
        values = self.critic(torch.cat([states, actions], dim=1))
        _descend(self._critic_adam, (values - targets).square().mean())
        _descend(self._actor_adam, -self.critic(torch.cat([states, self.actor(states)], dim=1)).mean())
        soft_update_(self.actor_target, self.actor, settings.soft_update)
        soft_update_(self.critic_target, self.critic, settings.soft_update)

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole state: tensors and plain values."""
        return copy.deepcopy(
            {
                **{name: dict(part.state_dict()) for name, part in self._parts().items()},
                "replay": self._replay,
                "seen": self._seen,
                "baseline": self.baseline,
                "random": self._random.get_state(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        for name, part in self._parts().items():
            part.load_state_dict(copy.deepcopy(state[name]))
        self._replay = {name: state["replay"][name].clone() for name in self._replay}
        self._seen = int(state["seen"])
        self.baseline = None if state["baseline"] is None else float(state["baseline"])
        self._random.set_state(state["random"].clone())

    def _parts(self) -> dict[str, Any]:
        return {
            "actor": self.actor,
            "critic": self.critic,
            "actor_target": self.actor_target,
            "critic_target": self.critic_target,
            "actor_adam": self._actor_adam,
            "critic_adam": self._critic_adam,
        }


def truncated_normal(mean: float, std: float, low: float, high: float, random: torch.Generator) -> float:
    """Draw from a normal distribution truncated to [low, high].

    Args:
        mean: Mean before truncation; may lie outside the bounds.
        std: Standard deviation before truncation; 0 gives the mean, or the bound next to it.
        low: Lower bound.
        high: Upper bound.
        random: Exactly one number is drawn from it.
    """
    uniform = float(torch.rand((), generator=random, dtype=torch.float64))
    if mean < low:  # mirrored: floating point resolves the lower tail of the distribution better than the upper
        return -_quantile(-mean, std, -high, -low, uniform)
    return _quantile(mean, std, low, high, uniform)


def _quantile(mean: float, std: float, low: float, high: float, fraction: float) -> float:
    """Quantile of the truncated normal distribution; the mean is not below `low`."""
    nearest = min(high, max(low, mean))
    if std <= 0:
        return nearest
    at_low, at_high = (0.5 * math.erfc((mean - bound) / (std * math.sqrt(2))) for bound in (low, high))
    if at_high == 0:  # so far in the tail that the whole distribution is at the bound
        return nearest
    below = torch.tensor(at_low + (at_high - at_low) * fraction, dtype=torch.float64)
    return min(high, max(low, mean + std * float(torch.special.ndtri(below))))


@torch.no_grad()
def soft_update_(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Move the target to the source: target <- (1 - rate) target + rate source."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, rate)


def _descend(adam: torch.optim.Adam, loss: Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    adam.step()
