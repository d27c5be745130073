"""Greedy: one-shot pruning in the order of channel magnitude per joule, without training in between.

A control for ECC: it removes channels in the order of `ecc/scheduled.py`, with the plain norm of the weights as
importance, and all training happens in finetuning.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecc.methods.base import OneShotMethod
from ecc.methods.ecc.constraints import ResourceConstraints, initial_channels
from ecc.methods.ecc.importance import ConsumerSlices
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import ScheduledPruner
from ecc.torch_utils import device_of

UPDATES = 50
"""Number of updates from the dense network to the budget; each takes the derivative of the cost at its widths."""


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
        context.log({"phase": "greedy", "widths": widths})

    def _alive(self) -> Tensor:
        """(channels,) bool: channels that are kept."""
        context = self.context
        model, graph, multiple = context.model, context.graph, context.width_multiple
        device = device_of(model)
        constraints = ResourceConstraints(context.costs, graph, device)
        alive, min_widths = initial_channels(model, graph, context.settings.min_width_ratio, multiple, device)
        remainders = torch.tensor(graph.structure.width_remainders(multiple), dtype=torch.long, device=device)
        ranking = ChannelRanking([group.width for group in graph.groups], device)
        pruner = ScheduledPruner(ranking, constraints, min_widths, multiple, remainders)
        importance = ConsumerSlices(model, graph, device).norms()
        ends = constraints.parse(context.targets)
        decision = pruner.start(alive)
        for update in range(1, UPDATES + 1):
            fractions = [1 - (1 - end) * update / UPDATES if end < 1 else end for end in ends]
            decision = pruner.update(decision, importance, fractions, ends)
        return decision.alive
