"""AMC: an RL agent sets the fraction of channels that each group keeps.

Y. He, J. Lin, Z. Liu, H. Wang, L.-J. Li and S. Han, "AMC: AutoML for Model Compression and Acceleration on Mobile
Devices", ECCV 2018.

As in the paper: DDPG (`ddpg.py`) with one action per layer, a state of eleven numbers, 400 episodes of which the first
quarter acts at random, noise of 0.5 that decays afterwards, as many updates as actions in each episode, and actions
limited so that later layers can still meet the budget. Layers that lost inputs are refit by least squares to the
outputs of the dense network (`refit.py`). The reward of an episode is the score on held-out data without finetuning,
for all of its transitions. The best episode wins. Where the paper gives no number, it is that of the authors' code.

Changed for energy, and why:

- Actions and states are per channel group: layers that share channels can only be pruned together.
- Actions are limited by the energy model (or any cost with a budget) instead of FLOPs. Such a cost is not a sum over
  layers, so the limit is found by bisection with all later groups at their minimum width. Costs never fall when a width
  grows, so every episode meets the targets.
- The state contains what a group and the actions so far save of the costs, instead of FLOPs and kernel sizes.
- Minimum widths and rounding are those of all methods here (in the authors' code 0.2, and up to multiples of 8).
- Channels are selected by magnitude. All plain convolutions and linear layers are refit, in the authors' code those
  with 1x1 kernels. Without the refit, pruned networks score much closer to chance.
- Batch norms are recalibrated before a network is scored (`recalibration.py`), as for all methods here.
- When a measurement lowers the targets, the trained agent searches for a few more episodes.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ecc.methods.base import PruningContext, magnitudes
from ecc.options import check_options, option

from .calibration_loss import CalibrationBatches
from .ddpg import Ddpg, DdpgSettings
from .refit import DenseRefit
from .widths import allowed_widths, check_feasible

FEATURES = 11
"""Numbers in a state."""


@dataclass(frozen=True, kw_only=True)
class AmcSettings:
    """Settings of the search."""

    episodes: int = option(400, "Number of episodes.", range=(1, None))
    warm_up: float = option(0.25, "Fraction of the episodes that act at random.", range=(0, 1))
    noise: float = option(0.5, "Standard deviation of the actions after the warm-up.", range=(0, 1))
    noise_decay: float = option(0.95, "Factor of the noise from episode to episode.", range=(0, 1))
    retarget_episodes: float = option(
        0.05, "Episodes after the targets are lowered, as a fraction of `episodes`.", range=(0, 1)
    )
    retarget_noise: float = option(0.1, "Noise in these episodes.", range=(0, 1))
    replay: int = option(100, "Episodes in the replay buffer.", range=(1, None))
    batches: int = option(4, "Training batches of the refit.", range=(1, None))
    rows: int = option(4096, "Output positions of each layer in the least squares problem.", range=(1, None))
    ridge: float = option(1e-3, "Regularisation of the refit towards the dense weights.", range=(1e-12, None))
    episodes_per_step: int = option(10, "Episodes between two checkpoints.", range=(1, None), changes_result=False)
    agent: DdpgSettings = field(default_factory=DdpgSettings)

    def __post_init__(self) -> None:
        check_options(self)


class Amc:
    """Searches widths by reinforcement learning."""

    name = "amc"
    needs_held_out = True

    def __init__(self, settings: AmcSettings | None = None) -> None:
        self.settings = settings or AmcSettings()

    def config(self) -> dict[str, Any]:
        """All settings that change the result."""
        return {name: value for name, value in asdict(self.settings).items() if name != "episodes_per_step"}

    def start(self, context: PruningContext) -> None:
        """Keep the dense weights, and create an agent."""
        self._context = context
        self._dense = copy.deepcopy(context.model.state_dict())
        self._trial = copy.deepcopy(context.model)  # pruned in each episode
        self._importance = {name: values.cpu() for name, values in magnitudes(context).items()}
        self._batches = CalibrationBatches(context, self.settings.batches)
        self._refit: DenseRefit | None = None
        self._env = LayerEnv(context)
        capacity = self.settings.replay * max(1, len(self._env))
        self._agent = Ddpg(FEATURES, capacity, context.settings.train.seed, self.settings.agent)
        self._wanted = self.settings.episodes
        self._episodes: list[tuple[float, list[int]]] = []
        """Reward and widths of each episode."""

    @property
    def is_done(self) -> bool:
        """Whether the search is over and the targets are met."""
        context = self._context
        return len(self._episodes) >= self._wanted and context.constraint_violation(context.widths()) <= 0

    def step(self) -> None:
        """Run a few episodes; after the last one, prune the network to the best widths that meet the targets."""
        check_feasible(self._context)
        if len(self._episodes) >= self._wanted:  # the targets were lowered
            more = max(1, round(self.settings.retarget_episodes * self.settings.episodes))
            self._wanted = len(self._episodes) + more
        for _ in range(min(self.settings.episodes_per_step, self._wanted - len(self._episodes))):
            self._run_episode()
        if len(self._episodes) >= self._wanted:
            self._take_best()

    def _run_episode(self) -> None:
        """Choose all widths, score the network, and update the agent."""
        number = len(self._episodes)
        warm_up = math.ceil(self.settings.warm_up * self.settings.episodes)
        noise = self._noise(number - warm_up)

        def act(state: Tensor, low: float) -> float:
            return self._agent.random_action(low, 1.0) if number < warm_up else self._agent.act(state, low, 1.0, noise)

        widths, states, actions = self._env.rollout(act)
        reward = self._reward(widths)
        self._episodes.append((reward, widths))
        if actions:
            self._agent.remember(torch.stack(states), torch.tensor(actions), reward)
            for _ in range(0 if number < warm_up else len(actions)):
                self._agent.learn()
        self._context.log(
            {"phase": self.name, "episode": number + 1, "reward": reward, "noise": noise, "widths": widths}
        )

    def _noise(self, learnt: int) -> float:
        """Noise of an episode, given the number of episodes after the warm-up."""
        if len(self._episodes) >= self.settings.episodes:
            return self.settings.retarget_noise
        return self.settings.noise * self.settings.noise_decay ** max(0, learnt)

    def _reward(self, widths: Sequence[int]) -> float:
        """Score of the dense network pruned to some widths. A score that is not finite counts as the lowest so far."""
        self._prune_(self._trial, widths)
        score = float(self._context.held_out(self._trial))
        return score if math.isfinite(score) else min((reward for reward, _ in self._episodes), default=0.0)

    def _prune_(self, model: nn.Module, widths: Sequence[int]) -> None:
        """Make a model the dense network pruned to some widths, with refit layers."""
        model.load_state_dict(self._dense)
        if self._refit is None:
            settings, groups = self.settings, self._context.graph.prunable
            slices = [one for group in groups for one in group.slices if one.is_consumer and one.axis == 1]
            paths = sorted({one.tensor.removesuffix(".weight") for one in slices})
            seed, inputs = self._context.settings.train.seed, self._batches.inputs()
            self._refit = DenseRefit(model, paths, inputs, settings.rows, settings.ridge, seed)
        self._context.keep_channels_(model, self._importance, widths)
        self._refit.apply_(model)

    def _take_best(self) -> None:
        """Prune the dense network to the best widths that meet the targets; the first of equals."""
        context = self._context
        best_first = sorted(self._episodes, key=lambda episode: -episode[0])
        # The last episode meets the targets, so there is one.
        reward, widths = next(one for one in best_first if context.constraint_violation(one[1]) <= 0)
        self._prune_(context.model, widths)
        context.log({"phase": self.name, "episodes": len(self._episodes), "best": reward, "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """The agent and all episodes."""
        return {
            "agent": self._agent.state_dict(),
            "wanted": self._wanted,
            "first_batch": self._batches.state(),
            "rewards": [reward for reward, _ in self._episodes],
            "widths": torch.tensor([widths for _, widths in self._episodes], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._agent.load_state_dict(state["agent"])
        self._wanted = int(state["wanted"])
        self._batches.restore(state["first_batch"])
        rewards = [float(reward) for reward in state["rewards"]]
        self._episodes = list(zip(rewards, state["widths"].tolist(), strict=True))


class LayerEnv:
    """The environment of the agent: one step per prunable group, its state, and the actions that are allowed."""

    def __init__(self, context: PruningContext) -> None:
        self._context = context
        self._full = [group.width for group in context.graph.groups]
        self._least = context.min_widths()
        self.choices = allowed_widths(context)
        """Allowed widths of each group, ascending."""
        self.stops = [number for number, widths in enumerate(self.choices) if len(widths) > 1]
        """Positions of the groups with a choice."""
        costs = [cost.to("cpu").value for cost in context.costs]
        self._costs = [(cost, float(cost(context.graph.widths()))) for cost in costs]
        self._constants = self._constant_features()

    def __len__(self) -> int:
        return len(self.stops)

    def rollout(self, act: Callable[[Tensor, float], float]) -> tuple[list[int], list[Tensor], list[float]]:
        """One episode, from the first group to the last.

        Args:
            act: `act(state, low)` is the fraction of channels that a group should keep, in [low, 1].

        Returns:
            Widths of all groups, which meet the targets, and the state and action of each step. Actions are those
            before they are limited, as in the authors' code.
        """
        widths, states, actions = list(self._full), [], []
        last = 1.0
        for position, stop in enumerate(self.stops):
            states.append(self._state(position, widths, last))
            action = act(states[-1], self._least[stop] / self._full[stop])
            widths[stop] = self._limited(position, widths, action * self._full[stop])
            actions.append(action)
            last = widths[stop] / self._full[stop]
        return widths, states, actions

    def _limited(self, position: int, widths: Sequence[int], wanted: float) -> int:
        """Largest allowed width up to the wanted one with which later groups can still meet the targets."""
        trial = self._at_minimum(widths, position)
        stop = self.stops[position]
        choices = self.choices[stop][: max(1, bisect_right(self.choices[stop], wanted + 1e-9))]

        def violation(width: int) -> float:
            trial[stop] = width
            return self._context.constraint_violation(trial)

        return choices[max(0, bisect_right(choices, 0.0, key=violation) - 1)]

    def _at_minimum(self, widths: Sequence[int], position: int) -> list[int]:
        """Widths with all groups from a position on at their minimum."""
        trial = list(widths)
        for later in self.stops[position:]:
            trial[later] = self._least[later]
        return trial

    # ------------------------------------------------------------ states

    def _state(self, position: int, widths: Sequence[int], last: float) -> Tensor:
        """Eight constants of the group in [0, 1], and three numbers that depend on the actions so far."""
        cost = self._cost(widths)
        later = cost - self._cost(self._at_minimum(widths, position + 1))
        changing = torch.tensor([1 - cost, later, last], dtype=torch.float32).clamp(0, 1)
        return torch.cat([self._constants[position], changing])

    def _constant_features(self) -> Tensor:
        """One row per step: position, width, minimum, and the effect of the group on the costs; scaled to [0, 1]."""
        graph = self._context.graph
        table = torch.zeros(len(self.stops), FEATURES - 3, dtype=torch.float64)
        full = graph.widths()
        counts = (graph.macs, graph.parameters, graph.activation_bytes)
        for position, stop in enumerate(self.stops):
            group, pruned = graph.groups[stop], full.clone()
            pruned[stop] = self._least[stop]
            saved = [1 - float(count(pruned)) / max(1.0, float(count(full))) for count in counts]
            ratio, macs = self._least[stop] / group.width, graph.share_of_macs(group)
            row = [position, group.width, ratio, macs, *saved, 1 - self._cost(pruned.tolist())]
            table[position] = torch.tensor(row, dtype=torch.float64)
        if not len(table):
            return table.float()
        low, high = table.amin(0), table.amax(0)
        return ((table - low) / (high - low).clamp(min=1e-12)).float()  # constant columns become 0

    def _cost(self, widths: Sequence[float]) -> float:
        """Cost as a fraction of the dense cost; the mean of several costs."""
        vector = torch.tensor(widths, dtype=torch.float64)
        return sum(float(cost(vector)) / dense for cost, dense in self._costs) / len(self._costs)
