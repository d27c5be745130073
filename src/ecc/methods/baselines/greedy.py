"""Greedy: one-shot pruning by importance per joule, without training in between.

Two controls for ECC; all training happens in finetuning. `greedy` removes channels in the order of `ecc/scheduled.py`
with the plain norm of the weights as importance. `greedy_taylor` has the importance and the plan of ECC, computed once
on the dense network: the difference to `ecc` is what pruning during training is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import taylor_importance
from ecc.methods.ecc.constraints import PruningProblem, channel_problem
from ecc.methods.ecc.importance import ConsumerSlices
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.scheduled import ScheduledPruner

from .calibration_loss import CalibrationBatches

UPDATES = 50
"""Number of updates from the dense network to the budget; each takes the derivative of the cost at its widths."""


TAYLOR_BATCHES = 16
"""Training batches over which the importance of `greedy_taylor` is computed."""


class Greedy(OneShotMethod):
    """Removes channels in ascending order of magnitude per joule."""

    name = "greedy"

    def step(self) -> None:
        """Prune the dense network to the targets."""
        context = self.context
        context.model.load_state_dict(self.dense_state)
        masks = self._alive().split([group.width for group in context.graph.groups])
        importance = {group.name: mask.double() for group, mask in zip(context.graph.groups, masks, strict=True)}
        widths = [int(mask.sum()) for mask in masks]
        context.keep_channels_(context.model, importance, widths)
        self.pruned_for = list(context.targets)
        context.log({"phase": self.name, "widths": widths})

    def _alive(self) -> Tensor:
        """(channels,) bool: channels that are kept."""
        problem, alive = self._problem()
        pruner = ScheduledPruner(problem)
        importance = ConsumerSlices(self.context.model, self.context.graph, alive.device).norms()
        ends = problem.constraints.parse(self.context.targets)
        decision = pruner.start(alive)
        for update in range(1, UPDATES + 1):
            fractions = [1 - (1 - end) * update / UPDATES if end < 1 else end for end in ends]
            decision = pruner.update(decision, importance, fractions, ends)
        return decision.alive

    def _problem(self) -> tuple[PruningProblem, Tensor]:
        """The problem, and the channels that are alive."""
        context = self.context
        return channel_problem(
            context.model, context.graph, context.costs, context.settings.min_width_ratio, context.width_multiple
        )


class GreedyTaylor(Greedy):
    """Prunes to the plan of ECC for the Taylor importance of the dense network."""

    name = "greedy_taylor"

    def start(self, context: PruningContext) -> None:
        """Keep the dense weights."""
        super().start(context)
        self._batches = CalibrationBatches(context, TAYLOR_BATCHES)
        self._importance: Tensor | None = None

    def _alive(self) -> Tensor:
        problem, alive = self._problem()
        ends = problem.constraints.parse(self.context.targets)
        if self._importance is None:
            self._importance = self._taylor(alive.device)
        planned = WidthPlanner(problem, per_remaining_share=True).plan(alive, self._importance, ends)
        pruner = ScheduledPruner(problem)
        return pruner.prune_to(pruner.start(alive), self._importance, planned, ends).alive

    def _taylor(self, device: torch.device) -> Tensor:
        """(channels,): variance over batches of the sum of w g, as `TaylorImportance` has it."""
        importance = taylor_importance(self.context, self._batches())
        parts = []
        for group in self.context.graph.groups:
            if group.frozen is None:
                parts.append(importance[group.name].to(device, torch.float32))
            else:
                parts.append(torch.zeros(group.width, device=device))
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Any]:
        """The position of the calibration batches."""
        return {**super().state_dict(), "first_batch": self._batches.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._batches.restore(state["first_batch"])
