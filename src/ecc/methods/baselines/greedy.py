"""Greedy: the channel of least magnitude per joule goes first, all at once and without training in between.

The control that shows what ECC's training on the way is worth: its order is that of ECC (see `ecc/pace.py`) with the
plain norm in the place of Adam's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ecc.methods.base import OneShotMethod
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.importance import ConsumerSlices
from ecc.methods.ecc.min_widths import alive_and_floors
from ecc.methods.ecc.scheduled import ScheduledPruner

UPDATES = 50
"""The derivative of the cost is taken anew so often on the way down."""


class Greedy(OneShotMethod):
    """Removes channels in the order of magnitude per joule."""

    name = "greedy"

    def step(self) -> None:
        """Cuts the dense network to the targets."""
        work = self._context
        work.model.load_state_dict(self._dense)
        alive = self._alive()
        masks = alive.split([group.width for group in work.graph.groups])
        scores = {group.name: mask.double() for group, mask in zip(work.graph.groups, masks, strict=True)}
        widths = [int(mask.sum()) for mask in masks]
        work.keep_channels_(work.model, scores, widths)
        work.log({"phase": "greedy", "widths": widths})

    def _alive(self) -> Tensor:
        work = self._context
        device = next((parameter.device for parameter in work.model.parameters()), torch.device("cpu"))
        ladder = ChannelRanking([group.width for group in work.graph.groups], device)
        limits = ResourceConstraints(work.costs, work.graph, device)
        alive, floors = alive_and_floors(
            work.model, work.graph, work.settings.min_width_ratio, work.width_multiple, device
        )
        left = torch.tensor(work.graph.structure.width_remainders(work.width_multiple), dtype=torch.long, device=device)
        pace = ScheduledPruner(ladder, limits, floors, work.width_multiple, left)
        readers = ConsumerSlices(work.model, work.graph, device)
        scores = readers.scores([None] * len(readers.tensors))
        ends = limits.parse(work.targets)
        cut = pace.start(alive)
        for update in range(1, UPDATES + 1):
            shares = [1 - (1 - end) * update / UPDATES if end < 1 else end for end in ends]
            cut = pace.update(cut, scores, shares, ends)
        return cut.alive
