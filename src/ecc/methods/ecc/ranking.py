"""`ChannelRanking`: all channels of all groups in one vector, sorted by importance within each group.

Both solvers remove the least important channels of each group. The layout of the vector is fixed (one group after the
other, each at its full width), so everything that does not depend on the importance is computed once. An update is a
few operations on whole vectors: no loop over channels, and no synchronisation between device and host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SortedChannels(NamedTuple):
    """Channels in order: entry `first[g] + k` is the k-th least important channel of group g; dead ones are last."""

    importance: Tensor
    """(channels,) float32, ascending within each group; infinite for dead channels."""
    channels: Tensor
    """(channels,) index of the channel at each entry."""
    widths: Tensor
    """(groups,) int64, number of live channels of each group."""


class ChannelRanking:
    """Layout of the channels of all groups.

    Args:
        full_widths: Number of channels of each group.
        device: Device of all vectors.
    """

    def __init__(self, full_widths: Sequence[int], device: torch.device | str = "cpu") -> None:
        widths = torch.tensor(full_widths, dtype=torch.long, device="cpu")
        firsts = widths.cumsum(0) - widths
        group = torch.repeat_interleave(torch.arange(len(widths), device="cpu"), widths)
        self.full_widths = tuple(full_widths)
        self.first = firsts.to(device)
        """(groups,) first entry of each group."""
        self.group = group.to(device)
        """(channels,) group of each entry."""
        self._group_bits = self.group << 32
        self.rank = (torch.arange(len(group), device="cpu") - firsts[group]).to(device)
        """(channels,) position of each entry within its group; 0 is the least important."""

    def widths(self, alive: Tensor) -> Tensor:
        """phi(W): number of live channels of each group, int64."""
        none = torch.zeros(len(self.full_widths), dtype=torch.long, device=alive.device)
        return none.index_add(0, self.group, alive.long())  # integers: the order of additions does not matter

    def sort(self, importance: Tensor, alive: Tensor) -> SortedChannels:
        """Sort the live channels of each group; ties keep the order of the channels.

        NaN counts as the largest importance, so that an exploding loss does not remove a channel.
        """
        largest = torch.finfo(torch.float32).max
        importance = torch.nan_to_num(importance.to(torch.float32), nan=largest, posinf=largest).abs()
        importance = importance.masked_fill(~alive, torch.inf)
        # The bit patterns of nonnegative floats have the order of the floats. Group number and bit pattern together
        # are one integer, so a single sort orders all groups at once.
        channels = (self._group_bits + importance.view(torch.int32)).argsort(stable=True)
        return SortedChannels(importance[channels], channels, self.widths(alive))

    def remove_least(self, ranked: SortedChannels, removed: Tensor) -> Tensor:
        """Mask of live channels after the `removed[g]` least important ones of each group g are removed."""
        stays = (self.rank >= removed[self.group]) & (self.rank < ranked.widths[self.group])
        return torch.zeros_like(stays).scatter(0, ranked.channels, stays)

    def next_importance(self, ranked: SortedChannels, removed: Tensor | int = 0) -> Tensor:
        """(groups,) importance of the next channel to remove after `removed[g]` are gone; infinite if none is left."""
        entry = self.first + removed
        found = ranked.importance[entry.clamp(max=len(self.rank) - 1)]
        return torch.where(ranked.widths > removed, found, torch.inf)
