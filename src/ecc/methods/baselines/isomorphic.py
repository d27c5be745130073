"""Isomorphic pruning: groups of the same structure are ranked together, and every such class keeps the same fraction.

G. Fang, X. Ma, M. B. Mi, X. Wang: Isomorphic Pruning for Vision Models, ECCV 2024. Importance of channels in different
kinds of layers (attention, MLP, residual stream) is on different scales, so only channels of groups with the same
structure are compared with each other. A group with less important channels loses more of them than others of its kind.

Importance is the magnitude of the consumer weights as for `uniform`, relative to the mean of its group. Changed for
energy: the fraction is the largest one whose rounded widths meet the targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ecc.graph import ChannelGroup
from ecc.methods.base import OneShotMethod, magnitudes

from .widths import largest_ratio


class Isomorphic(OneShotMethod):
    """Prunes every class of isomorphic groups by one ratio."""

    name = "isomorphic"

    def step(self) -> None:
        """Find the ratio, and prune."""
        context = self.context
        context.model.load_state_dict(self.dense_state)
        importance = magnitudes(context)
        order = ranks_in_classes(context.graph.prunable, importance)

        def widths(ratio: float) -> list[int]:
            wanted = [
                int((order[group.name] < ratio).sum()) if group.name in order else group.width
                for group in context.graph.groups
            ]
            return context.round_widths(wanted)

        ratio = largest_ratio(lambda ratio: context.constraint_violation(widths(ratio)) <= 0)
        context.keep_channels_(context.model, importance, widths(ratio))
        self.pruned_for = list(context.targets)
        context.log({"phase": self.name, "ratio": ratio, "widths": widths(ratio)})


def ranks_in_classes(groups: Sequence[ChannelGroup], importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each channel of each group the fraction of the channels of its class that are more important, on the CPU."""
    classes: dict[tuple[object, ...], list[str]] = {}
    for group in groups:
        classes.setdefault(structure(group), []).append(group.name)
    found: dict[str, Tensor] = {}
    for names in classes.values():
        relative = [importance[name].double().cpu() for name in names]
        together = torch.cat([one / one.mean().clamp(min=1e-30) for one in relative])
        ranks = torch.empty_like(together)
        ranks[together.argsort(descending=True, stable=True)] = torch.arange(len(together), dtype=ranks.dtype)
        found |= dict(zip(names, (ranks / len(together)).split([len(one) for one in relative]), strict=True))
    return found


def structure(group: ChannelGroup) -> tuple[object, ...]:
    """Equal for groups whose channels occupy the same kinds of places: number and axis of tensors, and their roles."""
    places = [(one.axis, one.index.shape[1:].numel(), *sorted(str(role) for role in one.roles)) for one in group.slices]
    return tuple(sorted(places))
