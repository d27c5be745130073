"""The default dynamics: where Algorithm 1 goes, reached on schedule and without constants to search for.

Why this is the solver of the paper. With the trim of Sec. 3.3.3, y_u = a_u / (2 alpha) where a_u is the energy of the
next channel that group u would lose. With the projection of z, z is the least number that moves some width in Eq. (10),
so z = min over u of y_u / (dE/ds_u): the group that moves is the one with the least a_u per joule, it loses that
channel (Algorithm 2), its y_u rises to the next one, and so on until E <= E_budget. At that point no width moves:
z dE/ds_u <= y_u in all groups, with equality at the margin, which is stationarity of Eq. (4) in s, and a channel i of
group u is alive exactly if

    a_i / (dE/ds_u)  >=  2 alpha z,

one threshold for the whole network. So an update ranks all channels by a_i / (dE/ds_u), removes them in this order
until the energy is what the schedule allows now, and reads the duals off: 2 alpha z is the ratio at the margin and
2 alpha y_u the energy of the next channel. alpha, beta, rho and epsilon set the pace of the paper's walk along this
order but not the order; the schedule takes their place.

dE/ds is taken at the widths before the update and is exact in the limit of many small updates, as in Eq. (10).

Where blocks are coarse, the order alone wastes energy. The block that comes last may save a sixth of the network's
joules where a hundredth was wanted, as the first one of AlexNet's first layer does on a GPU, and what went before it
does not come back. So `plan` looks ahead to the end of the descent, as scores stand now, and what it keeps an update
does not take. Where blocks are fine, the plan is the order itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ecc.methods.ecc.channel_ranking import ChannelRanking, SortedChannels
from ecc.methods.ecc.constraints import ResourceConstraints, Shares

FANOUT = 64  # candidates a level of the search: two levels find one of 4,096 prefixes, three one of 262,144
FANOUT_ON_GPU = 1024  # there a level costs its kernels, whatever their size
SHARES = 128  # candidates for the widths that bind a plan
ROOM = 0.9  # of what may be spent: what those widths may take, so that there is something to choose
SWAPS = 2  # blocks of a plan that are too large for what is wanted, one after the other


class PruneDecision(NamedTuple):
    """What an update decided."""

    alive: Tensor
    """(channels,) bool."""
    next_energies: Tensor
    """2 alpha y: energy of the next channel that each group would lose."""
    margin: Tensor
    """2 alpha z: energy per share of the dense cost of the last channel removed."""


class _Items(NamedTuple):
    """What can be removed, in ascending order of energy per cost."""

    groups: Tensor
    counts: Tensor
    """Channels in each, int64; 0 for what must stay."""
    ratios: Tensor
    energies: Tensor
    """Of all channels in each."""

    def ordered(self, key: Tensor) -> _Items:
        """In ascending order of a key; equals stay as they are."""
        order = key.sort(stable=True).indices
        return _Items(*(part[order] for part in self))


class ScheduledPruner:
    """Removal in the order of energy per cost.

    Channels leave in blocks, so that a group's width is a multiple of `width_multiple` from its first block on (that one
    takes what is too much), and a block counts with its mean. What cannot be rounded stays: a group that is no wider
    than `width_multiple` keeps its width.

    Args:
        ladder: The layout of the channels.
        limits: The costs.
        floors: (groups,) int64, least widths: multiples of `width_multiple`, or the width at the start of those that stay.
        width_multiple: Widths are multiples of this.
        left: (groups,) int64, what widths leave over when divided by it, see `StructureSpec.width_remainders`; nothing if None.
        uniform_floor: Plans are bound to this share of the even cut, see `bound`; 0 for floors alone.
    """

    def __init__(
        self,
        ladder: ChannelRanking,
        limits: ResourceConstraints,
        floors: Tensor,
        width_multiple: int = 1,
        left: Tensor | None = None,
        uniform_floor: float = 0.0,
    ) -> None:
        self._ladder, self._limits, self._floors, self._round_to = ladder, limits, floors, width_multiple
        self._uniform_floor = uniform_floor
        device = ladder.group.device
        self._left = torch.zeros_like(floors) if left is None else left
        blocks = ChannelRanking([width // width_multiple + 1 for width in ladder.full_widths], device)
        self._item_group = blocks.group
        # First place of each block, were the width a multiple of width_multiple; `_items` shifts it.
        self._item_start = blocks.place * width_multiple
        self._within = torch.arange(width_multiple, device=device)
        self._fanout = FANOUT if device.type == "cpu" else FANOUT_ON_GPU
        self._levels = 1
        while self._fanout**self._levels <= len(self._item_group):
            self._levels += 1

    def start(self, alive: Tensor) -> PruneDecision:
        """Before the first update: nothing removed, duals zero."""
        groups = len(self._ladder.full_widths)
        zeros = torch.zeros(groups, dtype=torch.float64, device=alive.device)
        return PruneDecision(alive, zeros, zeros.new_zeros(()))

    def update(
        self,
        before: PruneDecision,
        scores: Tensor,
        shares: Shares,
        ends: Shares,
        least: Tensor | None = None,
    ) -> PruneDecision:
        """Removes channels until every cost is within its share; none if they are already.

        Args:
            before: The last update.
            scores: a of each channel.
            shares: What each cost may be now, as a share of the dense network's.
            ends: What it may be in the end; decides the mix of several costs.
            least: (groups,) int64, what a `plan` for shares no larger than these keeps; None for the floors.
        """
        rungs = self._ladder.sort(scores, before.alive)
        items = self._items(rungs, ends, self._floors if least is None else torch.maximum(self._floors, least))
        removed, position = self._search(items, rungs.widths, shares)
        # Not `ratios[position]`: an index without dimensions is read on the host.
        last = items.ratios.index_select(0, (position - 1).clamp(min=0).view(1)).squeeze(0)
        return PruneDecision(
            self._ladder.without_least(rungs, removed),
            self._ladder.least(rungs, removed).to(torch.float64),
            torch.where(position > 0, last, before.margin),
        )

    def _items(self, rungs: SortedChannels, ends: Shares, floors: Tensor) -> _Items:
        """All blocks, sorted by mean energy per cost."""
        group, step = self._item_group, self._round_to
        slope = self._limits.slope(rungs.widths.to(torch.float64), ends)
        # Where the model sees no saving (a plateau), channels go last: division by a little, not by nothing.
        slope = torch.maximum(slope, 1e-9 * slope.amax()).clamp(min=1e-300)
        missing = (self._left - rungs.widths) % step  # the first block is shorter by this
        removable = (rungs.widths - floors).clamp(min=0)
        places = (self._item_start - missing[group])[:, None] + self._within
        inside = (places >= 0) & (places < removable[group, None])
        positions = (self._ladder.first[group, None] + places).clamp(0, len(rungs.scores) - 1)
        # In float64 the sums of float32 energies keep the order of the blocks, ties among them.
        energies = torch.where(inside, rungs.scores[positions].to(torch.float64), 0.0).sum(1)
        counts = inside.sum(1)
        ratios = torch.where(counts > 0, energies / counts.clamp(min=1) / slope[group], torch.inf)
        return _Items(group, counts, ratios, energies).ordered(ratios)

    def bound(self, ends: Sequence[float]) -> Tensor:
        """The least widths of a plan: the floors, or a share of what an even cut to the ends would leave, if wider.

        Harm is judged channel by channel, as if each went alone. Where a budget is mild, this pays for cutting a few
        groups deep and leaving the rest whole, and the harm of many may be more than the sum of their harms.

        Returns:
            (groups,) int64. With these, costs take at most `ROOM` of the ends, unless the floors take more already.
        """
        floors, step = self._floors.to(torch.float64), self._round_to
        full = self._ladder.widths(torch.ones_like(self._ladder.group, dtype=torch.bool)).to(torch.float64)
        shares = torch.arange(SHARES, device=floors.device, dtype=torch.float64) / SHARES
        evenly = shares[:, None] * full
        # Costs never fall when widths grow, so those that fit come first.
        fitting = (~self._limits.exceeded(torch.maximum(evenly, floors), ends)).sum()
        left = self._left.to(torch.float64)
        rounded = torch.minimum(left + ((self._uniform_floor * evenly - left) / step).ceil() * step, full)
        bounds = torch.maximum(rounded, floors)
        roomy = (~self._limits.exceeded(bounds, [ROOM * end for end in ends])).sum()
        chosen = (torch.minimum(fitting, roomy) - 1).clamp(min=0)
        return bounds.index_select(0, chosen.view(1)).squeeze(0).long()

    def plan(self, before: PruneDecision, scores: Tensor, ends: Sequence[float]) -> Tensor:
        """The widths at the end of the descent, if scores and slopes stay as they are.

        The last block of the shortest prefix may save far more than is wanted. Then either it goes, and others that
        would have gone before it can stay, or it stays, and later ones go: whichever loses less energy of channels.

        Args:
            before: The last update.
            scores: a of each channel.
            ends: What each cost may be in the end, as a share of the dense network's.

        Returns:
            (groups,) int64.
        """
        rungs = self._ladder.sort(scores, before.alive)
        items, widths = (
            self._items(rungs, ends, self.bound(ends) if self._uniform_floor else self._floors),
            rungs.widths,
        )
        position = torch.arange(len(items.groups), device=widths.device)
        removed, count = self._search(items, widths, ends)
        for _ in range(SWAPS):
            last = items.groups.index_select(0, (count - 1).clamp(min=0).view(1))
            mine = items.groups == last
            first = items.ordered((~(mine & (position < count))).long())
            spared = (mine & (position >= count - 1)).long()
            later = items.ordered(torch.where(items.counts > 0, spared, 2))
            (removed, count), (otherwise, number) = (self._search(one, widths, ends) for one in (first, later))
            lost, instead = (
                torch.where(position < upto, one.energies, 0.0).sum() for one, upto in ((first, count), (later, number))
            )
            better = lost <= instead
            items = _Items(*(torch.where(better, a, b) for a, b in zip(first, later, strict=True)))
            removed, count = torch.where(better, removed, otherwise), torch.where(better, count, number)
        return widths - removed

    def _search(self, items: _Items, widths: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
        """The shortest prefix of the items without which all costs are within their shares.

        Costs never rise when channels go, so the prefixes that exceed come before those that do not, and each level
        of the search looks at many prefixes at once and goes on between two of them.

        Returns:
            Channels removed from each group, int64, and the number of items, 0-dimensional.
        """
        groups, fanout = len(widths), self._fanout
        position = torch.arange(len(items.groups), device=widths.device)
        low = torch.zeros((), dtype=torch.long, device=widths.device)
        removed = torch.zeros_like(widths)
        for level in reversed(range(self._levels)):
            stride = fanout**level
            bucket = torch.div(position - low, stride, rounding_mode="floor")
            counted = torch.where((bucket >= 0) & (bucket < fanout), items.counts, 0)
            cell = items.groups * (fanout + 1) + bucket.clamp(0, fanout - 1) + 1
            # In whole numbers the order of summing does not matter, which on a GPU is any. A GPU sums along rows far
            # faster than along columns.
            table = widths.new_zeros(groups * (fanout + 1)).index_add(0, cell, counted).view(groups, fanout + 1)
            candidates = removed + table.cumsum(1).T  # row k: k strides removed beyond `low`
            exceeding = self._limits.exceeded((widths - candidates).to(torch.float64), shares).sum()
            chosen = exceeding.clamp(max=fanout) if level == 0 else (exceeding - 1).clamp(0, fanout - 1)
            low = low + chosen * stride
            removed = candidates.index_select(0, chosen.view(1)).squeeze(0)
        return removed, torch.minimum(low, (items.counts > 0).sum())
