"""`Ddpg`: an actor that answers each state with one number in 0..1, and a critic that says what comes of it.

T. P. Lillicrap et al., "Continuous control with deep reinforcement learning", ICLR 2016; in the form in which AMC uses
it (see `amc.py`), whose numbers are the defaults.

As in AMC: two hidden layers of 300, targets that follow softly, one reward for all transitions of an episode, a moving
baseline that is taken from it, and noise from a normal distribution that is cut off at the bounds of the action.

Why no library: stable-baselines3, which is no dependency of this package, owns the loop over a gym environment and
clips noise instead of truncating its distribution; it has no baseline and no reward that is given back to a
whole episode, and its replay is kept in files that run code when they are read.
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

from ecc.errors import EccError

_LAST_BOUND = 3e-3  # first answers lie in the middle, and first values near 0: Lillicrap et al., section 7


@dataclass(frozen=True, kw_only=True)
class DdpgSettings:
    """How the agent learns.

    Raises:
        EccError: If a value is out of its range.
    """

    hidden: int = 300
    """Width of both hidden layers, of actor and critic."""
    actor_lr: float = 1e-4
    critic_lr: float = 1e-3
    soft_update: float = 0.01
    """The share of the way that targets go after each update."""
    discount: float = 1.0
    """1: a choice at the first group counts as much as one at the last."""
    batch: int = 64
    baseline_rate: float = 0.5
    """The share of the way that the baseline goes to the mean reward of each batch."""

    def __post_init__(self) -> None:
        for name in ("hidden", "batch"):
            if getattr(self, name) < 1:
                raise EccError(f"{name}={getattr(self, name)} is below 1, the least it may be.")
        for name in ("actor_lr", "critic_lr", "soft_update", "discount", "baseline_rate"):
            if not 0 < getattr(self, name) <= 1:
                raise EccError(f"{name}={getattr(self, name)} is outside 0..1.")


class Ddpg:
    """The agent. It lives on the CPU, and draws from a random generator of its own.

    Args:
        features: Numbers in a state.
        capacity: Transitions that are remembered; the oldest are forgotten.
        seed: Of the first weights and of everything that is drawn.
        settings: How it learns.
    """

    def __init__(self, features: int, capacity: int, seed: int, settings: DdpgSettings | None = None) -> None:
        self.settings = settings or DdpgSettings()
        self._random = torch.Generator().manual_seed(seed)
        hidden = self.settings.hidden
        self.actor = self._net(features, hidden, nn.Sigmoid())
        self.critic = self._net(features + 1, hidden, nn.Identity())
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        # Fused, an update takes less time on a CPU, and there are thousands.
        self._actor_adam = torch.optim.Adam(self.actor.parameters(), lr=self.settings.actor_lr, fused=True)
        self._critic_adam = torch.optim.Adam(self.critic.parameters(), lr=self.settings.critic_lr, fused=True)
        self._replay = {
            "states": torch.zeros(capacity, features),
            "actions": torch.zeros(capacity, 1),
            "rewards": torch.zeros(capacity, 1),
            "next_states": torch.zeros(capacity, features),
            "goes_on": torch.zeros(capacity, 1),  # 0 at the end of an episode, where nothing is to come
        }
        self._seen = 0
        self.baseline: float | None = None

    def _net(self, inputs: int, hidden: int, last: nn.Module) -> nn.Sequential:
        """Two hidden layers; drawn from the own generator, so that nothing else is disturbed."""
        layers = []
        for fan_in, fan_out in ((inputs, hidden), (hidden, hidden), (hidden, 1)):
            layer = cast(nn.Linear, skip_init(nn.Linear, fan_in, fan_out))
            bound = _LAST_BOUND if fan_out == 1 else 1 / math.sqrt(fan_in)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=self._random)
            layers.append(layer)
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], last)

    # ------------------------------------------------------------ acting

    def drawn(self, low: float, high: float) -> float:
        """An action before anything is known: any is as likely as another."""
        return low + (high - low) * float(torch.rand((), generator=self._random, dtype=torch.float64))

    @torch.no_grad()
    def act(self, state: Tensor, low: float, high: float, noise: float) -> float:
        """The actor's answer, with truncated normal noise.

        Args:
            state: One state.
            low: The least action.
            high: The largest.
            noise: Standard deviation before it is cut off; 0 for none.
        """
        return truncated_normal(float(self.actor(state)), noise, low, high, self._random)

    # ------------------------------------------------------------ learning

    @property
    def remembered(self) -> int:
        """Transitions in the replay."""
        return min(self._seen, len(self._replay["states"]))

    def remember(self, states: Tensor, actions: Tensor, reward: float) -> None:
        """Takes in one episode; each of its transitions earns the reward of the whole.

        Args:
            states: (steps, features).
            actions: (steps,).
            reward: Of the episode.
        """
        steps = len(states)
        rows = (self._seen + torch.arange(steps)) % len(self._replay["states"])
        goes_on = torch.ones(steps, 1)
        goes_on[-1] = 0
        self._replay["states"][rows] = states
        self._replay["actions"][rows] = actions.reshape(-1, 1).to(torch.float32)
        self._replay["rewards"][rows] = reward
        self._replay["next_states"][rows] = torch.cat([states[1:], states[-1:]])
        self._replay["goes_on"][rows] = goes_on
        self._seen += steps

    def learn(self) -> None:
        """One update of critic, actor and targets from a batch of the replay."""
        how = self.settings
        rows = torch.randint(self.remembered, (how.batch,), generator=self._random)
        states, actions, rewards, next_states, goes_on = (column[rows] for column in self._replay.values())
        mean = float(rewards.mean())
        self.baseline = mean if self.baseline is None else self.baseline + how.baseline_rate * (mean - self.baseline)

        with torch.no_grad():
            to_come = self.critic_target(torch.cat([next_states, self.actor_target(next_states)], dim=1))
            targets = rewards - self.baseline + how.discount * goes_on * to_come
        values = self.critic(torch.cat([states, actions], dim=1))
        _descend(self._critic_adam, (values - targets).square().mean())
        _descend(self._actor_adam, -self.critic(torch.cat([states, self.actor(states)], dim=1)).mean())
        soft_update_(self.actor_target, self.actor, how.soft_update)
        soft_update_(self.critic_target, self.critic, how.soft_update)

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that is needed to go on: tensors and plain values."""
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
        """The reverse."""
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


def truncated_normal(mean: float, deviation: float, low: float, high: float, random: torch.Generator) -> float:
    """One number from a normal distribution of which only low..high is left.

    Args:
        mean: Of the distribution before it is cut off; may lie outside the bounds.
        deviation: Likewise; 0 gives the mean, or the bound next to it.
        low: The least number.
        high: The largest.
        random: One number is drawn from it, whatever else is given.
    """
    drawn = float(torch.rand((), generator=random, dtype=torch.float64))
    if mean < low:  # mirrored, as the lower tail of the distribution is the one that floating point resolves
        return -_quantile(-mean, deviation, -high, -low, drawn)
    return _quantile(mean, deviation, low, high, drawn)


def _quantile(mean: float, deviation: float, low: float, high: float, share: float) -> float:
    """The number below which a share of the truncated normal distribution lies; the mean is not below `low`."""
    nearest = min(high, max(low, mean))
    if deviation <= 0:
        return nearest
    at_low, at_high = (0.5 * math.erfc((mean - bound) / (deviation * math.sqrt(2))) for bound in (low, high))
    if at_high == 0:  # so far in the tail that all of it lies at the bound
        return nearest
    below = torch.tensor(at_low + (at_high - at_low) * share, dtype=torch.float64)
    return min(high, max(low, mean + deviation * float(torch.special.ndtri(below))))


@torch.no_grad()
def soft_update_(target: nn.Module, source: nn.Module, share: float) -> None:
    """Moves a target to its source by a share of the way."""
    for old, new in zip(target.parameters(), source.parameters(), strict=True):
        old.lerp_(new, share)


def _descend(adam: torch.optim.Adam, loss: Tensor) -> None:
    adam.zero_grad()
    loss.backward()
    adam.step()
