"""`OneShot`: prune a trained network to its budget without training, by the loss on held-out data per joule saved.

The search goes from the dense network downwards, in rounds. In each round every *move* is tried on the network:

    a few channels, or a head, of one group          the least important ones by the Taylor criterion
    a whole residual branch                          an attention or MLP block of a transformer

A move is rated by the increase of the held-out loss per cost that it saves, as the energy model predicts it. The best
moves are made until the round has saved its share; then the remaining layers are refit (`reconstruction.py`), and the
next round starts from there. The moves of all rounds form a path; a target is met by the shortest beginning of it. So a
corrected target only moves along the path. The final network is the dense one with these channels masked, refit once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .base import OneShotMethod, PruningContext
from .calibration import (
    batch_inputs,
    branch_groups,
    calibration_batches,
    inner_groups,
    mask_,
    restored_tensors,
    taylor_products,
)
from .reconstruction import REFITS, DenseOutputs, Refit, linear_consumers, reconstruct_best_, record_outputs


@dataclass(frozen=True, kw_only=True)
class OneShotSettings:
    """Settings of one-shot pruning."""

    batches: int = 16
    """Calibration batches."""
    round_share: float = 0.05
    """Share of the dense cost that a round saves."""
    move_share: float = 0.125
    """Share of the channels of a group that one move removes; at least one."""
    refits: bool = True
    """Whether layers are refit. How is chosen by the held-out loss, and again every `choose_every` rounds."""
    choose_every: int = 3


@dataclass(frozen=True)
class Move:
    """New widths of some groups; 0 for all groups of a branch removes it."""

    widths: dict[str, int]
    loss: float
    """Held-out loss after the move, when it was rated."""


class OneShot(OneShotMethod):
    """Prunes without training.

    Args:
        settings: The defaults if None.
        path: Moves of an earlier search on the same network and resource, which is continued.
    """

    name = "one_shot"
    removes_branches = True
    needs_held_out = True

    def __init__(self, settings: OneShotSettings | None = None, path: list[Move] | None = None) -> None:
        self.settings = settings or OneShotSettings()
        self.path: list[Move] = [] if path is None else path
        """Moves in the order in which they are made."""
        self.spare: list[Move] = []
        """All moves that the last round rated."""

    def config(self) -> dict[str, Any]:
        """The settings."""
        return asdict(self.settings)

    def start(self, context: PruningContext) -> None:
        """Compute the importance of channels, and record the outputs of the dense layers."""
        super().start(context)
        batches = calibration_batches(context, self.settings.batches)
        self._inputs = batch_inputs(context, batches)
        products = taylor_products(context, batches)
        self.importance: dict[str, Tensor] = {
            group.name: torch.stack([one[group.name].square() for one in products]).mean(0)
            for group in context.graph.prunable
        }
        self._consumers = _consumers(context)
        self._dense: DenseOutputs | None = None
        self._refit: Refit | None = None
        self._rounds = 0
        if self.settings.refits:
            paths = sorted({path for paths in self._consumers.values() for path in paths})
            self._dense = record_outputs(context.model, paths, self._inputs)
        self._branches = branch_groups(context)

    def step(self) -> None:
        """Prune the dense network to the targets."""
        widths = self._find_widths()
        self._apply(widths, choose=True)
        self.pruned_for = list(self.context.targets)
        self.context.log({"phase": self.name, "moves": len(self.path), "widths": widths})

    # ------------------------------------------------------------ search

    def _find_widths(self) -> dict[str, int]:
        """Widths that meet the targets: a beginning of the path, extended if it is too short."""
        widths = dict(self.context.graph.full_widths)
        made, before = 0, widths
        while self._violation(widths) > 0:
            if made == len(self.path):
                found = self._round(widths)
                if not found:
                    break
                self.path += found
            before = widths
            widths = {**widths, **self.path[made].widths}
            made += 1
        if made:
            widths = self._smaller_last_move(before, widths, self.path[made - 1])
        return self._fill_up(widths)

    def _smaller_last_move(self, before: Mapping[str, int], widths: dict[str, int], last: Move) -> dict[str, int]:
        """The last move, or another one that also meets the targets and is rated better by its loss."""
        best, least = widths, last.loss
        for move in [*self.path, *self.spare]:
            after = {**before, **move.widths}
            is_new = all(before[name] > width for name, width in move.widths.items())
            if is_new and move.loss < least and self._violation(after) <= 0:
                best, least = after, move.loss
        return best

    def _round(self, widths: Mapping[str, int]) -> list[Move]:
        """The moves of the next round."""
        context = self.context
        self._apply(widths, choose=self._rounds % self.settings.choose_every == 1)
        self._rounds += 1
        now = -context.held_out(context.model)
        cost = self._relative_cost(widths)
        rated: list[tuple[float, int, dict[str, int], float]] = []
        for change in self._candidates(widths):
            saved = cost - self._relative_cost({**widths, **change})
            if saved <= 0:
                continue
            with restored_tensors(context.model, context.graph, list(change)):
                mask_(context, self.importance, {**widths, **change})
                loss = -context.held_out(context.model)
            increase = loss - now if math.isfinite(loss) else math.inf
            # Moves that lower the loss are ordered by the loss, the others by loss per cost.
            rated.append((increase * saved if increase < 0 else increase / saved, len(rated), change, loss))
        found: list[Move] = []
        self.spare = [Move(dict(change), loss) for _, _, change, loss in rated]
        reached, end = dict(widths), cost - self.settings.round_share
        for _, _, change, loss in sorted(rated, key=lambda one: one[:2]):
            if any(reached[name] != widths[name] for name in change):
                continue  # a branch and one of its groups
            reached.update(change)
            found.append(Move(dict(change), loss))
            if self._relative_cost(reached) <= end:
                break
        return found

    def _candidates(self, widths: Mapping[str, int]) -> list[dict[str, int]]:
        """Changes of widths that are tried."""
        context, found = self.context, []
        for group, least in zip(context.graph.groups, context.min_widths(), strict=True):
            width = widths[group.name]
            if group.frozen is None and width > least:
                found.append({group.name: max(least, _less(width, group.width, self.settings.move_share))})
        present = (groups for groups in self._branches.values() if any(widths[name] for name in groups))
        return [*found, *(dict.fromkeys(groups, 0) for groups in present)]

    def _fill_up(self, widths: dict[str, int]) -> dict[str, int]:
        """Give channels back, those of the last moves first, as far as the targets allow."""
        full = self.context.graph.full_widths
        order = dict.fromkeys(name for move in reversed(self.path) for name in move.widths)
        for name in order:
            grain = min(8, _grain(full[name]))
            while widths[name] > 0 and widths[name] + grain <= full[name]:
                more = {**widths, name: widths[name] + grain}
                if self._violation(more) > 0:
                    break
                widths = more
        return widths

    def _apply(self, widths: Mapping[str, int], *, choose: bool) -> None:
        """The dense network with these channels masked, refit in the best way or in that of the last choice."""
        context = self.context
        context.model.load_state_dict(self.dense_state)
        mask_(context, self.importance, widths)
        if self._dense is None:
            return
        full = context.graph.full_widths
        paths = sorted({path for name, many in self._consumers.items() if widths[name] < full[name] for path in many})
        reaches = paths if not self._has_gap(widths) else sorted({p for many in self._consumers.values() for p in many})
        if reaches:
            choices = REFITS if choose else (self._refit,)
            self._refit = reconstruct_best_(
                context.model, self._dense, reaches, self._inputs, context.held_out, choices
            )

    def _has_gap(self, widths: Mapping[str, int]) -> bool:
        """Whether a branch is removed, so that the layers after it have to make up for it."""
        return any(not any(widths[name] for name in groups) for groups in self._branches.values())

    def _violation(self, widths: Mapping[str, int]) -> float:
        return self.context.constraint_violation([widths[group.name] for group in self.context.graph.groups])

    def _relative_cost(self, widths: Mapping[str, int]) -> float:
        """The cost as a fraction of dense; of several costs, the one that is farthest above its target."""
        context = self.context
        vector = torch.tensor([float(widths[group.name]) for group in context.graph.groups], dtype=torch.float64)
        full = torch.tensor([float(group.width) for group in context.graph.groups], dtype=torch.float64)
        shares = [float(cost.to("cpu").value(vector) / cost.to("cpu").value(full)) for cost in context.costs]
        return sum(shares) / len(shares)


def _consumers(context: PruningContext) -> dict[str, list[str]]:
    """Linear layers that consume each prunable group, and can be refit."""
    return {
        group.name: linear_consumers(context.model, [one.tensor for one in group.slices if one.is_consumer])
        for group in inner_groups(context.graph)
    }


def _grain(width: int) -> int:
    """Widths are multiples of this: large groups in steps that kernels are fast with."""
    return 64 if width >= 1024 else 8 if width >= 128 else 1


def _less(width: int, full: int, share: float) -> int:
    """The next smaller width."""
    grain = _grain(full)
    step = max(grain, round(share * full / grain) * grain)
    return (width - 1) // grain * grain if width - step < 1 else -(-(width - step) // grain) * grain
