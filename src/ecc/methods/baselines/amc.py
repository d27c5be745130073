"""AMC: an agent walks along the network, and learns what share of each group to keep.

Y. He, J. Lin, Z. Liu, H. Wang, L.-J. Li and S. Han, "AMC: AutoML for Model Compression and Acceleration on Mobile
Devices", ECCV 2018.

As in the paper: DDPG (`ddpg.py`) with one action for each layer, eleven numbers for a state, 400 episodes of which the
first quarter draws at random, noise of 0.5 that decays afterwards, as many updates as actions in each episode, and an
action wall: no choice is let through that later layers could not make good. An episode is rewarded with the score on
held-out data, without fine-tuning, and all its transitions earn that reward. The best episode wins. Where the paper is
silent, numbers are those of the authors' code.

Changed for energy, and why:

- Action and state are about channel groups: layers that share channels can only be cut together.
- The wall asks the energy model, or whatever has a budget, in the place of FLOPs. Costs are no sums over layers there,
  so the wall is found by bisection, with all later groups at their floors. It is right as costs never fall when a width
  grows; every episode meets the targets.
- The state tells what a group and the choices so far save of the costs, in the place of FLOPs and kernel sizes.
- Floors and rounding are those of all methods here (in the authors' code 0.2, and up to multiples of 8); rounding down
  is what lets the budget hold.
- Channels go by magnitude alone. The authors' code refits 1x1 convolutions by least squares, which is not defined for
  every layer that may read a group; all methods here are tuned alike instead.
- Batch norms get statistics of their own before a network is judged (`recalibration.py`), as for all methods here.
- When the scales lower the targets, the trained agent searches on for a few episodes.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ecc.errors import EccError, InfeasibleBudget
from ecc.methods.base import PruningContext, magnitudes

from .ddpg import Ddpg, DdpgSettings

FEATURES = 11
"""Numbers in a state."""


@dataclass(frozen=True, kw_only=True)
class AmcSettings:
    """How AMC searches.

    Raises:
        EccError: If a value is out of its range.
    """

    episodes: int = 400
    warm_up: float = 0.25
    """Share of the episodes that act at random, before the agent learns."""
    noise: float = 0.5
    """Standard deviation of the actions after the warm-up."""
    noise_decay: float = 0.95
    """What is left of the noise after each episode."""
    again: float = 0.05
    """Episodes, as a share of `episodes`, when the targets were lowered after the search."""
    again_noise: float = 0.1
    """Noise in these; that of the search has died away."""
    replay: int = 100
    """Episodes that are remembered."""
    chunk: int = 10
    """Episodes in one step: between two steps a run can be stopped."""
    agent: DdpgSettings = field(default_factory=DdpgSettings)

    def __post_init__(self) -> None:
        for name in ("episodes", "replay", "chunk"):
            if getattr(self, name) < 1:
                raise EccError(f"{name}={getattr(self, name)} is below 1, the least it may be.")
        for name in ("warm_up", "noise", "noise_decay", "again", "again_noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise EccError(f"{name}={getattr(self, name)} is outside 0..1.")


class Amc:
    """Searches widths by reinforcement learning.

    Args:
        settings: How.
    """

    name = "amc"
    needs_held_out = True

    def __init__(self, settings: AmcSettings | None = None) -> None:
        self.settings = settings or AmcSettings()

    def config(self) -> dict[str, Any]:
        """All settings but the size of a step, which changes no result."""
        return {name: value for name, value in asdict(self.settings).items() if name != "chunk"}

    def start(self, work: PruningContext) -> None:
        """Remembers the dense weights, and makes an agent that knows nothing."""
        self._work = work
        self._dense = copy.deepcopy(work.model.state_dict())
        self._trial = copy.deepcopy(work.model)  # pruned anew in each episode
        self._scores = {name: scores.cpu() for name, scores in magnitudes(work).items()}
        self._walk = LayerEnv(work)
        self._agent = Ddpg(
            FEATURES, self.settings.replay * max(1, len(self._walk)), work.settings.train.seed, self.settings.agent
        )
        self._wanted = self.settings.episodes
        self._tried: list[tuple[float, list[int]]] = []
        """Reward and widths of each episode."""

    @property
    def is_done(self) -> bool:
        """Whether the search is over and the targets are met."""
        return len(self._tried) >= self._wanted and self._work.constraint_violation(self._work.widths()) <= 0

    def step(self) -> None:
        """A few episodes; after the last, the network is cut to the best widths that meet the targets.

        Raises:
            InfeasibleBudget: If the targets were lowered below what the floors cost.
        """
        work = self._work
        if (excess := work.constraint_violation(work.min_widths())) > 0:
            raise InfeasibleBudget(
                f"with every group at its floor the network is predicted to spend {1 + excess:.1%} of what it may. "
                "Raise the budget, or lower min_width_ratio (--min-width-ratio)."
            )
        if len(self._tried) >= self._wanted:  # the targets were lowered
            self._wanted = len(self._tried) + max(1, round(self.settings.again * self.settings.episodes))
        for _ in range(min(self.settings.chunk, self._wanted - len(self._tried))):
            self._episode()
        if len(self._tried) >= self._wanted:
            self._take_best()

    def _episode(self) -> None:
        """One walk along the network, its reward, and what the agent learns from it."""
        number = len(self._tried)
        warm_up = math.ceil(self.settings.warm_up * self.settings.episodes)
        noise = self._noise(number - warm_up)

        def chosen(state: Tensor, low: float) -> float:
            return self._agent.drawn(low, 1.0) if number < warm_up else self._agent.act(state, low, 1.0, noise)

        widths, states, actions = self._walk.along(chosen)
        reward = self._rewarded(widths)
        self._tried.append((reward, widths))
        if actions:
            self._agent.remember(torch.stack(states), torch.tensor(actions), reward)
            for _ in range(0 if number < warm_up else len(actions)):
                self._agent.learn()
        self._work.log({"phase": "amc", "episode": number + 1, "reward": reward, "noise": noise, "widths": widths})

    def _noise(self, learnt: int) -> float:
        """Of an episode, by the number of those from which the agent has learnt."""
        if len(self._tried) >= self.settings.episodes:
            return self.settings.again_noise
        return self.settings.noise * self.settings.noise_decay ** max(0, learnt)

    def _rewarded(self, widths: Sequence[int]) -> float:
        """The score of the dense network cut to some widths; a score that is no number is as bad as the worst."""
        self._trial.load_state_dict(self._dense)
        self._work.keep_channels_(self._trial, self._scores, widths)
        score = float(self._work.held_out(self._trial))
        return score if math.isfinite(score) else min((reward for reward, _ in self._tried), default=0.0)

    def _take_best(self) -> None:
        """Cuts the dense network to the best widths that meet the targets; the first of equals."""
        work = self._work
        best_first = sorted(self._tried, key=lambda one: -one[0])
        reward, widths = next(
            one for one in best_first if work.constraint_violation(one[1]) <= 0
        )  # the last episode does, at least
        work.model.load_state_dict(self._dense)
        work.keep_channels_(work.model, self._scores, widths)
        work.log({"phase": "amc", "episodes": len(self._tried), "best": reward, "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """The agent, and what was tried."""
        return {
            "agent": self._agent.state_dict(),
            "wanted": self._wanted,
            "rewards": [reward for reward, _ in self._tried],
            "widths": torch.tensor([widths for _, widths in self._tried], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts them back."""
        self._agent.load_state_dict(state["agent"])
        self._wanted = int(state["wanted"])
        rewards = [float(reward) for reward in state["rewards"]]
        self._tried = list(zip(rewards, state["widths"].tolist(), strict=True))


class LayerEnv:
    """The way along the groups that can be cut: what is seen at each, and which choices are let through.

    Args:
        work: Its targets are met by all widths that a walk leads to, if the floors meet them.
    """

    def __init__(self, work: PruningContext) -> None:
        self._work = work
        self._full = [group.width for group in work.graph.groups]
        self._floors = work.min_widths()
        self.choices = _lattice(work)
        """The widths that each group may have, from its floor up."""
        self.stops = [number for number, widths in enumerate(self.choices) if len(widths) > 1]
        """Positions of the groups at which there is a choice."""
        costs = [cost.to("cpu").value for cost in work.costs]
        self._costs = [(cost, float(cost(work.graph.widths()))) for cost in costs]
        self._still = self._still_features()

    def __len__(self) -> int:
        return len(self.stops)

    def along(self, chosen: Callable[[Tensor, float], float]) -> tuple[list[int], list[Tensor], list[float]]:
        """One walk from the first group to the last.

        Args:
            chosen: `chosen(state, low)` is the share that a group should keep, in low..1.

        Returns:
            The widths of all groups, which meet the targets, and at each stop the state and what was chosen: before the
            wall, as in the authors' code.
        """
        widths, states, actions = list(self._full), [], []
        last = 1.0
        for place, stop in enumerate(self.stops):
            states.append(self._state(place, widths, last))
            action = chosen(states[-1], self._floors[stop] / self._full[stop])
            widths[stop] = self._walled(place, widths, action * self._full[stop])
            actions.append(action)
            last = widths[stop] / self._full[stop]
        return widths, states, actions

    def _walled(self, place: int, widths: Sequence[int], wanted: float) -> int:
        """The action wall: the largest width up to that wanted with which later groups can still meet the targets."""
        stop = self.stops[place]
        trial = list(widths)
        for later in self.stops[place:]:
            trial[later] = self._floors[later]

        def fits(width: int) -> bool:
            trial[stop] = width
            return self._work.constraint_violation(trial) <= 0

        choices = self.choices[stop]
        low, high = 0, max(0, bisect_right(choices, wanted + 1e-9) - 1)
        if fits(choices[high]):
            return choices[high]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(choices[middle]) else (low, middle)
        return choices[low]

    # ------------------------------------------------------------ states

    def _state(self, place: int, widths: Sequence[int], last: float) -> Tensor:
        """What the agent sees before it chooses: eight numbers in 0..1 that stay, and three that depend on the walk."""
        floored = list(widths)
        for later in self.stops[place + 1 :]:
            floored[later] = self._floors[later]
        spent = self._spent(widths)
        moving = torch.tensor([1 - spent, spent - self._spent(floored), last], dtype=torch.float32)
        return torch.cat([self._still[place], moving.clamp(0, 1)])

    def _still_features(self) -> Tensor:
        """One row for each stop: its place, its width, its floor, and what it has to do with the network's costs."""
        graph = self._work.graph
        table = torch.zeros(len(self.stops), FEATURES - 3, dtype=torch.float64)
        full = graph.widths()
        counts = (graph.macs, graph.parameters, graph.activation_bytes)
        for place, stop in enumerate(self.stops):
            group, cut = graph.groups[stop], full.clone()
            cut[stop] = self._floors[stop]
            saved = [1 - float(count(cut)) / max(1.0, float(count(full))) for count in counts]
            table[place] = torch.tensor(
                [
                    place,
                    group.width,
                    self._floors[stop] / group.width,
                    graph.share_of_macs(group),
                    *saved,
                    1 - self._spent(cut.tolist()),
                ],
                dtype=torch.float64,
            )
        if not len(table):
            return table.float()
        low, high = table.amin(0), table.amax(0)
        return ((table - low) / (high - low).clamp(min=1e-12)).float()  # what is the same everywhere becomes 0

    def _spent(self, widths: Sequence[float]) -> float:
        """What widths cost as a share of the dense network; the mean, where several things have a budget."""
        vector = torch.tensor(widths, dtype=torch.float64)
        return sum(float(cost(vector)) / dense for cost, dense in self._costs) / len(self._costs)


def _lattice(work: PruningContext) -> list[list[int]]:
    """All widths that `PruningContext.rounded` gives to each group, from the floor up."""
    groups = work.graph.groups
    found: list[set[int]] = [set() for _ in groups]
    for width in range(1, max(group.width for group in groups) + 1):
        for number, rounded in enumerate(work.round_widths([width] * len(groups))):
            found[number].add(rounded)
    return [sorted(widths) for widths in found]
