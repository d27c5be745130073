"""`OneShot`: prune a trained network to its budget without training, by the loss on held-out data per joule saved.

The search goes from the dense network downwards, in rounds. In each round *moves* are tried on the network:

    a few channels of one group                      the least important ones by the Taylor criterion
    some heads of an attention block                 those whose removal alone raises the held-out loss least
    a whole residual branch                          an attention or MLP block of a transformer

A move is rated by the increase of the held-out loss per cost that it saves, as the energy model predicts it. The best
moves are made until the round has saved its share; then the remaining layers are refit (`reconstruction.py`), and the
next round starts from there. Rounds do not depend on the target, so a corrected target only leads to another end. In
the last round moves are chosen, and one of them made in part, so that the cost ends just below the target. The final
network is the dense one with these channels masked, refit once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ecc.graph import mask_channels_
from ecc.records import from_builtins, to_builtins

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

_SLACK = 0.012  # how far below the targets a good end is, as a fraction of them
_WIDE = 512  # channels of a group whose widths stay multiples of 8 in any case
_PARTS = 8  # of a move, of which some are made at the end
_FEW = 16  # channels of a group, such as heads, that are tried one by one, and of which one move may remove several


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
    """All moves are tried again after so many rounds, too; in the rounds between, only the better half."""


@dataclass(frozen=True)
class Move:
    """New widths of some groups; 0 for all groups of a branch removes it."""

    widths: dict[str, int]
    increase: float
    """Increase of the held-out loss."""
    rating: float
    """The increase per share of the dense cost that is saved."""


@dataclass(frozen=True)
class Round:
    """Moves that were rated on one network, the best first."""

    start: dict[str, int]
    moves: tuple[Move, ...]
    reached: dict[str, int]
    """Widths after the moves that the round makes."""


class OneShot(OneShotMethod):
    """Prunes without training.

    Args:
        settings: The defaults if None.
        path: Rounds of an earlier search on the same network and resource, which is continued.
    """

    name = "one_shot"
    removes_branches = True
    needs_held_out = True

    def __init__(self, settings: OneShotSettings | None = None, path: list[Round] | None = None) -> None:
        self.settings = settings or OneShotSettings()
        self.path: list[Round] = [] if path is None else path

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
        self.importance |= self._tried_one_by_one()
        self._consumers = _consumers(context)
        self._dense: DenseOutputs | None = None
        self.refit: Refit | None = None
        """How layers were refit last."""
        self._chosen_for = -1  # rounds after which the refit of the result was chosen
        if self.settings.refits:
            paths = sorted({path for paths in self._consumers.values() for path in paths})
            self._dense = record_outputs(context.model, paths, self._inputs)
        self._branches = branch_groups(context)

    def state_dict(self) -> dict[str, Any]:
        """The rounds, and how layers were refit last."""
        refit = None if self.refit is None else asdict(self.refit)
        own = {"path": to_builtins(self.path), "refit": refit, "chosen_for": self._chosen_for}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.path = from_builtins(state["path"], list[Round], "the checkpoint")
        self.refit = None if state["refit"] is None else Refit(**state["refit"])
        self._chosen_for = int(state["chosen_for"])

    def step(self) -> None:
        """Prune the dense network to the targets."""
        widths = self._find_widths()
        self._apply(widths, choose=self._chosen_for != len(self.path))
        self._chosen_for = len(self.path)
        self.pruned_for = list(self.context.targets)
        self.context.log({"phase": self.name, "rounds": len(self.path), "widths": widths})

    def _tried_one_by_one(self) -> dict[str, Tensor]:
        """Increase of the held-out loss without each channel of groups that have few of them, such as heads.

        The Taylor criterion is an estimate for small changes, and often takes an important head for the least one.
        """
        context, found = self.context, {}
        now = -context.held_out(context.model)
        for group in inner_groups(context.graph):
            if not 1 < group.width <= _FEW:
                continue
            increases = []
            for unit in range(group.width):
                with restored_tensors(context.model, context.graph, [group.name]):
                    mask_channels_(context.model, context.graph, {group.name: [unit]})
                    loss = -context.held_out(context.model)
                increases.append(loss - now if math.isfinite(loss) else math.inf)
            found[group.name] = torch.tensor(increases, dtype=torch.float64)
        return found

    # ------------------------------------------------------------ search

    def _find_widths(self) -> dict[str, int]:
        """Widths that meet the targets: whole rounds, of which more are added if they do not suffice, and an end."""
        widths, made = dict(self.context.graph.full_widths), 0
        while self._violation(widths) > 0:
            if made == len(self.path):
                found = self._round(widths)
                if found.reached == widths:
                    break
                self.path.append(found)
            widths = self.path[made].reached
            made += 1
        return self._end(self.path[made - 1]) if made and self._violation(widths) <= 0 else widths

    def _round(self, widths: dict[str, int]) -> Round:
        """Rate moves, and make the best ones."""
        context, known = self.context, self._known_increases()
        self._apply(widths, choose=len(self.path) % self.settings.choose_every == 1)
        now = -context.held_out(context.model)
        cost = self._relative_cost(widths)
        rated: list[Move] = []
        for change in self._candidates(widths):
            saved = cost - self._relative_cost({**widths, **change})
            if saved <= 0:
                continue
            increase = known.get(tuple(change.items()), math.nan)
            if math.isnan(increase):
                with restored_tensors(context.model, context.graph, list(change)):
                    mask_(context, self.importance, change)
                    loss = -context.held_out(context.model)
                increase = loss - now if math.isfinite(loss) else math.inf
            # Moves that lower the loss are ordered by the loss, the others by loss per cost.
            rated.append(Move(dict(change), increase, increase * saved if increase < 0 else increase / saved))
        rated.sort(key=lambda move: move.rating)
        reached, end = widths, cost - self.settings.round_share
        for move in rated:
            if self._relative_cost(reached) <= end:
                break
            if _is_new(move, widths, reached):
                reached = {**reached, **move.widths}
        return Round(widths, tuple(rated), reached)

    def _end(self, last: Round) -> dict[str, int]:
        """Widths just below the targets, from moves of the last round with the smallest total increase of the loss.

        What moves save is rounded to a unit, and the errors of many moves add up, so a smaller unit is tried if no end
        is close to the targets. If there is none, the closest of all ends is taken.
        """
        best = last.reached
        options = self._options(last)
        for unit in (_SLACK / 4, _SLACK / 16, _SLACK / 64):
            for widths in self._ends(last, options, unit):
                violation = self._violation(widths)
                if -_SLACK <= violation <= 0:
                    return widths
                if self._violation(best) < violation <= 0:
                    best = widths
        return best

    def _ends(
        self, last: Round, options: list[list[tuple[dict[str, int], float]]], unit: float
    ) -> Iterator[dict[str, int]]:
        """Widths that save what is needed, or a little more, those with the smallest increase of the loss first.

        A knapsack problem: at most one move, or a part of it, for each branch. The increases and what moves save are
        added up as if they were independent.
        """
        need = self._violation(last.start)
        size = math.ceil((need + _SLACK) / unit)
        least, chosen = np.full(size + 1, np.inf), []  # the least increase for each amount that is saved, in units
        least[0] = 0
        for parts in options:
            before, best = least.copy(), np.full(size + 1, -1)
            for number, (widths, increase) in enumerate(parts):
                saved = round((need - self._violation({**last.start, **widths})) / unit)
                if not 0 < saved <= size:
                    continue
                total = before[: size + 1 - saved] + increase
                is_better = total < least[saved:]
                least[saved:][is_better] = total[is_better]
                best[saved:][is_better] = number * (size + 1) + saved
            chosen.append(best)
        for amount in sorted(range(math.floor(need / unit), size + 1), key=least.__getitem__):
            if not math.isfinite(least[amount]):
                break
            found, left = dict(last.start), amount
            for parts, best in zip(reversed(options), reversed(chosen), strict=True):
                if best[left] >= 0:
                    number, saved = divmod(int(best[left]), size + 1)
                    found.update(parts[number][0])
                    left -= saved
            yield found

    def _options(self, last: Round) -> list[list[tuple[dict[str, int], float]]]:
        """Widths and the increase of the loss of each move and of parts of it, in one list for each branch."""
        owners = {name: branch for branch, groups in self._branches.items() for name in groups}
        found: dict[str, list[tuple[dict[str, int], float]]] = {}
        for move in last.moves:
            if not math.isfinite(move.increase):
                continue
            name, *others = move.widths
            mine = found.setdefault(owners.get(name, name), [])
            mine.append((move.widths, move.increase))
            if others or move.widths[name] == 0:
                continue
            least, (above, before) = move.widths[name], self._next_above(last, name, move.widths[name])
            grain = 8 if self.context.graph.full_widths[name] >= _WIDE else 1
            parts = {above - round(part * (above - least) / _PARTS / grain) * grain for part in range(1, _PARTS)}
            slope = (move.increase - before) / (above - least)
            mine += [({name: one}, before + slope * (above - one)) for one in parts if least < one < above]
        return list(found.values())

    @staticmethod
    def _next_above(last: Round, name: str, width: int) -> tuple[int, float]:
        """The next larger width of a group that was rated, or that of the start, and the increase of the loss there."""
        mine = (move for move in last.moves if list(move.widths) == [name] and math.isfinite(move.increase))
        rated = {**{move.widths[name]: move.increase for move in mine}, last.start[name]: 0.0}
        above = min(one for one in rated if one > width)
        return above, rated[above]

    def _known_increases(self) -> dict[tuple[tuple[str, int], ...], float]:
        """Increases of the loss that need not be computed again: those of the worse half of the last round.

        Moves of groups that were changed then are tried again.
        """
        if len(self.path) % self.settings.choose_every == 0:
            return {}
        last = self.path[-1]
        worse = last.moves[-(-len(last.moves) // 2) :]
        return {tuple(move.widths.items()): move.increase for move in worse if _is_new(move, last.start, last.reached)}

    def _candidates(self, widths: Mapping[str, int]) -> list[dict[str, int]]:
        """Changes of widths that are considered."""
        context, found = self.context, []
        for group, least in zip(context.graph.groups, context.min_widths(), strict=True):
            width = widths[group.name]
            if group.frozen is None and width > least:
                wanted = [_less(width, group.width, self.settings.move_share)]
                if group.width <= _FEW:  # one of two heads may cost much less than half of both
                    wanted += [width // 2, 1]
                found += [{group.name: one} for one in dict.fromkeys(max(least, one) for one in wanted)]
        present = (groups for groups in self._branches.values() if any(widths[name] for name in groups))
        return [*found, *(dict.fromkeys(groups, 0) for groups in present)]

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
            choices = REFITS if choose else (self.refit,)
            self.refit = reconstruct_best_(context.model, self._dense, reaches, self._inputs, context.held_out, choices)

    def _has_gap(self, widths: Mapping[str, int]) -> bool:
        """Whether a branch is removed, so that the layers after it have to make up for it."""
        return any(not any(widths[name] for name in groups) for groups in self._branches.values())

    def _violation(self, widths: Mapping[str, int]) -> float:
        return self.context.constraint_violation([widths[group.name] for group in self.context.graph.groups])

    def _relative_cost(self, widths: Mapping[str, int]) -> float:
        """The cost as a fraction of dense; the mean of several costs."""
        context = self.context
        vector = torch.tensor([float(widths[group.name]) for group in context.graph.groups], dtype=torch.float64)
        full = torch.tensor([float(group.width) for group in context.graph.groups], dtype=torch.float64)
        shares = [float(cost.to("cpu").value(vector) / cost.to("cpu").value(full)) for cost in context.costs]
        return sum(shares) / len(shares)


def _is_new(move: Move, start: Mapping[str, int], widths: Mapping[str, int]) -> bool:
    """Whether none of its groups has changed since the start of a round: a branch excludes its groups."""
    return all(widths[name] == start[name] for name in move.widths)


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
