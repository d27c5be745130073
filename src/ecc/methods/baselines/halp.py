"""HALP: choose blocks of channels by a knapsack, so that the most important ones fit into the budget.

M. Shen, H. Yin, P. Molchanov, L. Mao, J. Liu, J. M. Alvarez: Structural Pruning via Latency-Saliency Knapsack,
NeurIPS 2022, arXiv:2210.06659; before that HALP: Hardware-Aware Latency Pruning, arXiv:2110.10811. Their code:
github.com/NVlabs/HALP.

As in the paper: the channels of a group are sorted by importance and combined into blocks, which end where the cost
changes. What the blocks of a group cost comes from a table of the cost against the width of the group, with the other
groups at their present widths. A knapsack maximises the total importance within the budget; a block can be kept only
with all more important blocks of its group. There are 30 iterations with training in between. Their budgets decrease
exponentially to the final one, and each one computes the importance and the tables again.

Changed for energy:
- The table is computed by the energy model. It contains what a group saves in all layers, those that consume it too;
  the paper looks up the layers that produce it.
- The cost is a sum of products of widths, so the savings of several groups do not add up. The knapsack is solved for
  all internal budgets at once, and the largest one whose network meets the budget of the iteration at its own widths is
  used. This also serves several budgets; the table is that of the cost furthest above its target.

Changed besides, and why:
- Importance is the Taylor criterion of ECC and `greedy_taylor` (variance of w g over batches), so that it is equal for
  all methods. The authors' code has |w g| of the scale and shift of batch norms, averaged over the training in between.
  Here it is computed on the same few training batches in each iteration, which are counted once, with the running
  statistics of batch norms recalibrated on them.
- The order of the blocks makes the knapsack a choice of one width per group, which dynamic programming solves exactly.
  The authors' code adds blocks one by one and can miss the optimum.
- Blocks end at allowed widths, and a group has no more than 64 of them. No layer is removed entirely.
- At equal numbers of batches, the pruning steps are divided among the trainings; the authors' configuration for
  ResNet-50 has 40 steps before each iteration.

If a measurement lowers the targets, one more iteration without training prunes the present network.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ecc.energy import Cost
from ecc.graph import live_masks
from ecc.methods.base import PruningContext
from ecc.methods.calibration import taylor_importance
from ecc.options import check_options, option
from ecc.torch_utils import on_cpu

from .calibration_loss import CalibrationBatches
from .greedy import TAYLOR_BATCHES
from .recalibration import recalibrated
from .widths import allowed_widths, check_feasible, largest_ratio

MAX_BLOCKS = 64
"""Blocks of a group."""

LEVELS = 2000
"""Levels of the budget in the dynamic program."""

_TOLERANCE = 1e-12  # relative, of costs computed in another order

Array: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class HalpSettings:
    """Settings of HALP."""

    iterations: int = option(30, "Number of iterations; the last one meets the targets.", range=(1, None))
    batches: int = option(TAYLOR_BATCHES, "Training batches over which importance is computed.", range=(2, None))
    finetune_steps: int | None = option(
        None,
        "Training steps between two iterations. None divides the pruning steps among them.",
        range=(0, None),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Choices:
    """Widths that a group can have, ascending, with their cost and importance."""

    group: int
    """Position in the graph."""
    widths: Indices
    costs: Array
    """Ascending."""
    values: Array
    """Sum of the importance of the channels that are kept."""


class Halp:
    """Prunes in iterations, each to the solution of a knapsack problem."""

    name = "halp"
    needs_held_out = False

    def __init__(self, settings: HalpSettings | None = None) -> None:
        self.settings = settings or HalpSettings()

    def config(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self.settings)

    def start(self, context: PruningContext) -> None:
        """Find the widths that each group can have."""
        self._context = context
        self._allowed = allowed_widths(context)
        self._batches = CalibrationBatches(context, self.settings.batches)
        self._first_total = context.stream.total
        self._iterations = 0

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._context.constraint_violation(self._context.widths()) <= 0

    def step(self) -> None:
        """One iteration: train, unless it is the first one, and prune to its budget."""
        context = self._context
        check_feasible(context)
        steps = self._finetune_steps()
        if steps:
            context.train(context.model, steps, context.settings.lr, context.stream)
        importance = self._importance()
        present = context.widths()
        violation = context.constraint_violation(present)
        self._iterations += 1
        while violation <= self.target(self._iterations):  # met by the iteration before
            self._iterations += 1
        target = self.target(self._iterations)
        widths = self.plan(present, importance, target)
        context.keep_channels_(context.model, importance, widths)
        line = {"phase": self.name, "iteration": self._iterations, "target": 1 + target, "steps": steps}
        context.log(line | {"widths": widths})

    def target(self, iteration: int) -> float:
        """Constraint violation that an iteration may leave. 1 + violation decreases exponentially to 1."""
        if iteration >= self.settings.iterations:
            return 0.0
        dense = 1 + self._context.constraint_violation([group.width for group in self._context.graph.groups])
        return float(dense ** (1 - iteration / self.settings.iterations) - 1)

    def _finetune_steps(self) -> int:
        """Training steps before the next iteration."""
        context, left = self._context, self.settings.iterations - self._iterations
        if not self._iterations or left <= 0:
            return 0
        if self.settings.finetune_steps is not None:
            return self.settings.finetune_steps
        unused = context.settings.prune_steps - (context.stream.total - self._first_total)
        return max(0, unused // left)

    def _importance(self) -> dict[str, Tensor]:
        """Importance of each channel by group, on the CPU; -1 for channels that are masked."""
        context = self._context
        batches = self._batches()
        with recalibrated(context.model, self._batches.inputs() if self._iterations else []):
            found = taylor_importance(context, batches)
        masks = dict(zip(context.graph.full_widths, live_masks(context.model, context.graph), strict=True))
        values = on_cpu([one.double().masked_fill(~masks[name].to(one.device), -1) for name, one in found.items()])
        return dict(zip(found, values, strict=True))

    # ------------------------------------------------------------ the knapsack problem

    def plan(self, present: Sequence[int], importance: Mapping[str, Tensor], target: float) -> list[int]:
        """Widths of the most important blocks with which the constraint violation is at most `target`."""
        context = self._context
        vector = torch.tensor(present, dtype=torch.float64)
        pairs = zip(context.costs, context.targets, strict=True)
        tightest = max(pairs, key=lambda pair: float(pair[0].to("cpu").value(vector)) / pair[1])[0].to("cpu")
        groups = enumerate(context.graph.full_widths)
        choices = [
            self._choices(number, importance[name], tightest, present) for number, name in groups if name in importance
        ]
        choices = [one for one in choices if len(one.widths) > 1]
        chosen = solve_knapsack([weights(one.costs, choices) for one in choices], [one.values for one in choices])
        plans = np.tile(np.array(present, dtype=np.int64), (len(chosen), 1))
        for column, one in enumerate(choices):
            plans[:, one.group] = one.widths[chosen[:, column]]
        fits = np.flatnonzero(self._violations(plans) <= target - _TOLERANCE)
        if len(fits):
            return [int(width) for width in plans[fits[-1]]]
        return self._narrowed(plans[0], target)

    def _choices(self, group: int, importance: Tensor, cost: Cost, present: Sequence[int]) -> Choices:
        """The ends of the blocks of a group, the table of their costs, and the importance up to them."""
        allowed = self._allowed[group]
        widths = np.array([*allowed[: bisect_left(allowed, present[group])], present[group]], dtype=np.int64)
        rows = torch.tensor(present, dtype=torch.float64).repeat(len(widths), 1)
        rows[:, group] = torch.from_numpy(widths)
        costs = cost.value(rows).numpy()
        kept = block_ends(costs)
        total = importance.clamp(min=0).sort(descending=True).values.cumsum(0).numpy()
        return Choices(group, widths[kept], costs[kept], total[widths[kept] - 1])

    def _violations(self, plans: Indices) -> Array:
        """Constraint violation of each row of widths."""
        rows = torch.from_numpy(plans).double()
        pairs = zip(self._context.costs, self._context.targets, strict=True)
        found: Array = np.max([cost.to("cpu").value(rows).numpy() / target - 1 for cost, target in pairs], axis=0)
        return found

    def _narrowed(self, widths: Indices, target: float) -> list[int]:
        """Widths between some that are too large and the minimum widths, by one ratio.

        Needed where no group alone lowers the cost, but several together do, such as for a maximum.
        """
        context, least = self._context, np.array(self._context.min_widths())

        def between(ratio: float) -> list[int]:
            rounded = context.round_widths((least + ratio * (widths - least)).tolist())
            return [min(pair) for pair in zip(widths.tolist(), rounded, strict=True)]

        return between(largest_ratio(lambda ratio: context.constraint_violation(between(ratio)) <= target))

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The number of iterations, and the position of the calibration batches."""
        return {
            "first_batch": self._batches.state(),
            "first_total": self._first_total,
            "iterations": self._iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._batches.restore(state["first_batch"])
        self._first_total, self._iterations = int(state["first_total"]), int(state["iterations"])


def block_ends(costs: Array) -> Indices:
    """Positions of the widths at which blocks end: those that cost less than all larger ones, at most `MAX_BLOCKS` + 1.

    Args:
        costs: Cost of ascending widths.
    """
    smallest = np.minimum.accumulate(costs[::-1])[::-1]
    kept = np.flatnonzero(np.append(costs[:-1] < smallest[1:] * (1 - 1e-9), True))
    ends = np.linspace(0, len(kept) - 1, min(len(kept), MAX_BLOCKS + 1)).round().astype(np.int64)
    found: Indices = kept[ends]
    return found


def weights(costs: Array, choices: Sequence[Choices]) -> Indices:
    """Costs of a group above its smallest one, in levels of what all groups can save, rounded up."""
    level = sum(float(one.costs[-1] - one.costs[0]) for one in choices) / LEVELS
    found: Indices = np.ceil((costs - costs[0]) / level - 1e-9).astype(np.int64)
    return found


def solve_knapsack(weights: Sequence[Indices], values: Sequence[Array]) -> Indices:
    """The choice of one width per group that has the highest value, for every budget.

    Args:
        weights: Per group, the weight of each width, ascending from 0.
        values: Per group, the value of each width.

    Returns:
        (budgets, groups): Position of the chosen width, for the budgets 0, 1, ... up to the weight of all groups.
    """
    budgets = np.arange(1 + sum(int(one[-1]) for one in weights))
    best = np.zeros(len(budgets))  # highest value of the groups so far, by budget
    chosen = []
    for weight, value in zip(weights, values, strict=True):
        left = budgets - weight[:, None]
        found = np.where(left >= 0, best[left] + value[:, None], -np.inf)
        chosen.append(found.argmax(0))
        best = found.max(0)
    plans = np.empty((len(budgets), len(weights)), dtype=np.int64)
    left = budgets.copy()
    for group in reversed(range(len(weights))):
        plans[:, group] = chosen[group][left]
        left -= weights[group][plans[:, group]]
    return plans
