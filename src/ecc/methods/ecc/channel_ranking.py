"""`ChannelRanking`: all channels of all groups in one vector, each group's live channels in ascending order of score.

Both dynamics remove channels from the foot of each group's ladder. Since the layout of the vector is fixed (group
behind group, each at its full width), everything about it that does not depend on scores is computed once, and an
update is a handful of operations on whole vectors: no loop over channels, and no word from the device to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SortedChannels(NamedTuple):
    """Live channels in order; position `first[g] + k` holds the k-th least of group g, dead ones come last."""

    scores: Tensor
    """(channels,) float32, ascending within each group; infinite where dead."""
    channels: Tensor
    """(channels,), which channel stands there."""
    widths: Tensor
    """(groups,) int64, how many channels of each group live."""


class ChannelRanking:
    """The layout of the channels of groups of given full widths.

    Args:
        full_widths: Channels of each group.
        device: Where the vectors live.
    """

    def __init__(self, full_widths: Sequence[int], device: torch.device | str = "cpu") -> None:
        widths = torch.tensor(full_widths, dtype=torch.long, device="cpu")
        firsts = widths.cumsum(0) - widths
        group = torch.repeat_interleave(torch.arange(len(widths), device="cpu"), widths)
        self.full_widths = tuple(full_widths)
        self.first = firsts.to(device)
        """(groups,), where each group begins."""
        self.group = group.to(device)
        """(channels,), the group each channel belongs to."""
        self._group_bits = self.group << 32
        self.place = (torch.arange(len(group), device="cpu") - firsts[group]).to(device)
        """(channels,), the number of each position within its group, from 0 for the least score."""

    def widths(self, alive: Tensor) -> Tensor:
        """phi: how many channels of each group are alive, int64."""
        none = torch.zeros(len(self.full_widths), dtype=torch.long, device=alive.device)
        return none.index_add(0, self.group, alive.long())  # whole numbers: the order of summing does not matter

    def sort(self, scores: Tensor, alive: Tensor) -> SortedChannels:
        """Brings live channels into order, equal ones by their number.

        A score that is not a number counts as large: a channel is not removed because the loss exploded.
        """
        largest = torch.finfo(torch.float32).max
        scores = torch.nan_to_num(scores.to(torch.float32), nan=largest, posinf=largest).abs()
        scores = scores.masked_fill(~alive, torch.inf)
        # Floats of at least 0 are in the order of their bits, so group and score make one whole number to sort by.
        channels = (self._group_bits + scores.view(torch.int32)).argsort(stable=True)
        return SortedChannels(scores[channels], channels, self.widths(alive))

    def without_least(self, rungs: SortedChannels, removed: Tensor) -> Tensor:
        """The mask of live channels once the `removed[g]` least of each group g are gone."""
        stays = (self.place >= removed[self.group]) & (self.place < rungs.widths[self.group])
        return torch.zeros_like(stays).scatter(0, rungs.channels, stays)

    def least(self, rungs: SortedChannels, removed: Tensor | int = 0) -> Tensor:
        """(groups,) the score of the next channel to go once `removed[g]` are gone; infinite if none is left."""
        inside = self.first + removed
        found = rungs.scores[inside.clamp(max=len(self.place) - 1)]
        return torch.where(rungs.widths > removed, found, torch.inf)
