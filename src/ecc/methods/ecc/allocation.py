"""Choice of widths: lose the least importance within all budgets.

Given the allowed widths of each group, the importance that each of them loses, and one or several costs,

    minimise  sum over groups of lost_g(s_g)    subject to    C_k(s) <= budget_k  for every cost k.

This is a multiple-choice knapsack whose costs contain products of widths and steps, so no order of the channels solves
it. `WidthAllocator` has three parts:

1. Lagrangian descent. For fixed multipliers mu >= 0, minimise lost(s) + sum of mu_k C_k(s) by coordinate descent. A
   step of a group is exact: it compares all allowed widths, with the other widths fixed. Groups that share no term
   step together. One multiplier is found by bisection, several by multiplicative updates.
2. Exchange. The Lagrangian solution leaves a part of the budget unused. Single moves use it up, and pairs of moves (one
   group grows, another one shrinks) are taken while they lower the loss.
3. Restarts. A group is moved to another width and held there while the rest is repaired and improved. The result is
   kept if it is better. The numbers are seeded, so the same problem always has the same solution.

`benchmarks/allocation_gap.py` publishes the distance to the optimum. A width that costs no less than a wider one is
never chosen: the move to the wider one loses less and is within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ecc.energy.cost import Array, CostForm, risen

Indices = NDArray[np.intp]

BISECTIONS = 16
MULTIPLIER_UPDATES = 40  # with several costs
SWEEPS = 6  # of coordinate descent; three are usually enough
PAIRED_MOVES = 96  # moves of each direction that are paired
MAX_EXCHANGES = 400
RESTART_WORK = 20_000  # allowed widths times restarts
MAX_RESTARTS = 24
DENSE_GROUPS = 128  # up to which numpy multiplies faster than scipy
_TOLERANCE = 1e-12


class Allocation(NamedTuple):
    """Chosen widths."""

    widths: tuple[int, ...]
    lost: float
    """Sum of the losses at these widths."""
    is_feasible: bool
    """Whether all budgets are met; if not, no allowed widths were found that meet them."""
    multipliers: tuple[float, ...] = ()
    """Loss for one more budget of each cost; 0 where the widest widths meet all budgets."""


class _BudgetedCost:
    """One cost divided by its budget, and the share of it that each allowed width has while the others are fixed."""

    def __init__(self, form: CostForm, budget: float, widths: Array, group: Indices) -> None:
        scale = 1 / budget
        diagonal = np.diagonal(form.quadratic)
        self._constant = form.constant * scale
        self.products = form.quadratic * scale
        np.fill_diagonal(self.products, 0.0)
        # scipy takes ten times as long as numpy to multiply a small matrix by a vector.
        is_small = len(form.linear) <= DENSE_GROUPS
        self._matrix = self.products if is_small else csr_array(self.products)
        # All terms that depend on one group only.
        self._own = scale * (form.linear[group] * widths + 0.5 * diagonal[group] * widths**2)
        # Steps: one entry for each step, each of its groups and each allowed width of that group.
        sizes = np.bincount(group, minlength=len(form.linear))
        uses = np.diff(form.rows.indptr)  # number of groups of each step
        step = np.repeat(np.repeat(np.arange(len(uses)), uses), sizes[form.rows.indices])
        multiple = np.repeat(form.rows.data, sizes[form.rows.indices])
        ends = sizes[form.rows.indices].cumsum()
        within = np.arange(len(step)) - np.repeat(ends - sizes[form.rows.indices], sizes[form.rows.indices])
        entry = np.repeat((sizes.cumsum() - sizes)[form.rows.indices], sizes[form.rows.indices]) + within
        is_own = uses[step] == 1
        height = form.heights[step] * risen(
            multiple * widths[entry] - form.start[step], form.cap[step], form.multiple[step]
        )
        self._own += np.bincount(entry[is_own], scale * height[is_own], len(widths))
        self._constant += scale * float((form.heights * risen(-form.start, form.cap, form.multiple))[uses == 0].sum())
        # Steps on sums of several groups depend on the other groups.
        shared = uses > 1
        self.has_shared = bool(shared.any())
        self._rows = form.rows[shared].toarray() if is_small else form.rows[shared]
        self._start, self._cap = form.start[shared], form.cap[shared]
        self._heights, self._modulus = scale * form.heights[shared], form.multiple[shared]
        self._step, self._entry, self._multiple = (
            (shared.cumsum() - 1)[step][~is_own],
            entry[~is_own],
            multiple[~is_own],
        )
        self._widths, self._group = widths, group

    def shares(self, at: Array, entries: Indices | slice = slice(None)) -> Array:
        """Cost of each allowed width up to a constant of its group, with the other groups at these widths."""
        found: Array = self._own[entries] + self._widths[entries] * (self._matrix @ at)[self._group[entries]]
        if self.has_shared:
            entry, step = self._entry, self._step
            moved = (self._rows @ at)[step] + self._multiple * (self._widths[entry] - at[self._group[entry]])
            height = risen(moved - self._start[step], self._cap[step], self._modulus[step])
            found += np.bincount(entry, self._heights[step] * height, len(self._widths))[entries]
        return found

    def total(self, at: Array, chosen: Indices) -> float:
        """The whole cost, as a fraction of the budget."""
        value = self._constant + self._own[chosen].sum() + 0.5 * at @ (self._matrix @ at)
        if self.has_shared:
            value += self._heights @ risen(self._rows @ at - self._start, self._cap, self._modulus)
        return float(value)

    @property
    def couplings(self) -> csr_array:
        """Which groups share a term."""
        found = csr_array(self._matrix != 0, dtype=np.int64)
        if self.has_shared:
            uses = csr_array(self._rows != 0, dtype=np.int64)
            found = found + uses.T @ uses
        return found


class _Class(NamedTuple):
    """Groups that share no term."""

    members: Indices
    entries: Indices
    """Their allowed widths, as indices of the whole vector."""
    first: Indices
    """Position of each member's first allowed width in `entries`."""
    owner: Indices
    """Position of the member of each entry."""


@dataclass
class _Point:
    """One choice: an entry for each group."""

    chosen: Indices
    lost: float
    violation: float
    """Largest cost / budget - 1."""

    def is_better(self, other: _Point) -> bool:
        """Whether it is closer to the budgets, or within them and loses less."""
        mine, others = max(self.violation, _TOLERANCE), max(other.violation, _TOLERANCE)
        return mine < others or (mine == others and self.lost < other.lost)


class WidthAllocator:
    """Chooses widths that lose the least within all budgets. It can be used for many losses.

    Args:
        forms: The costs.
        budgets: Upper bound of each cost, above 0.
        candidates: Allowed widths of each group, at least one each, the widest first.
    """

    def __init__(
        self, forms: Sequence[CostForm], budgets: Sequence[float], candidates: Sequence[Sequence[int]]
    ) -> None:
        # The allowed widths of all groups are one vector, group after group. A choice is an index for each group.
        self._sizes = np.array([len(one) for one in candidates])
        self._first: Indices = self._sizes.cumsum() - self._sizes
        self._group: Indices = np.repeat(np.arange(len(self._sizes)), self._sizes)
        self._widths = np.concatenate([np.asarray(one, np.float64) for one in candidates])
        pairs = zip(forms, budgets, strict=True)
        self._costs = [_BudgetedCost(form, budget, self._widths, self._group) for form, budget in pairs]
        self._classes = self._independent_classes()

    def solve(self, losses: Sequence[Sequence[float] | Array], *, restarts: int | None = None) -> Allocation:
        """Widths that lose the least.

        Args:
            losses: Loss at each of the allowed widths of each group; it must not fall from one width to the next.
            restarts: Number of restarts; by default fewer for larger problems.
        """
        lost = np.concatenate([np.asarray(one, np.float64) for one in losses])
        scale = max(float(lost.max()), 1e-300)
        self._lost = lost / scale
        self._random = np.random.default_rng(0)
        best = self._point(self._first.copy())
        multipliers = np.zeros(len(self._costs))
        if best.violation > 0:
            best, multipliers = self._relax(best)
            if best.lost > 0:  # one channel may be worth more than all others together
                scale, multipliers = scale * best.lost, multipliers / best.lost
                self._lost, best = self._lost / best.lost, replace(best, lost=1.0)
            best = self._improve(best, multipliers)
            if restarts is None:
                restarts = min(MAX_RESTARTS, RESTART_WORK // len(self._widths))
            for _ in range(restarts):
                found = self._restart(best, multipliers)
                if found.is_better(best):
                    best = found
        widths = tuple(int(width) for width in self._widths[best.chosen])
        scaled = tuple((scale * multipliers).tolist())
        return Allocation(widths, best.lost * scale, best.violation <= _TOLERANCE, scaled)

    # ------------------------------------------------------------ evaluation

    def _point(self, chosen: Indices) -> _Point:
        at = self._widths[chosen]
        violation = max((cost.total(at, chosen) for cost in self._costs), default=0.0) - 1
        return _Point(chosen, float(self._lost[chosen].sum()), violation)

    def _changes(self, point: _Point) -> tuple[Array, list[Array], list[float]]:
        """For each allowed width: the change of the loss and of each cost if its group moves there; and the slacks."""
        at = self._widths[point.chosen]
        lost = self._lost - self._lost[point.chosen][self._group]
        costs, slacks = [], []
        for cost in self._costs:
            shares = cost.shares(at)
            costs.append(shares - shares[point.chosen][self._group])
            slacks.append(1 - cost.total(at, point.chosen))
        return lost, costs, slacks

    def _independent_classes(self) -> list[_Class]:
        """Sets of groups that share no term: a greedy colouring."""
        couplings = sum((cost.couplings for cost in self._costs), csr_array((len(self._sizes),) * 2, dtype=np.int64))
        indptr, indices = couplings.indptr.tolist(), couplings.indices.tolist()
        colour = [-1] * len(self._sizes)
        for group in sorted(range(len(colour)), key=lambda group: indptr[group] - indptr[group + 1]):
            near = {colour[other] for other in indices[indptr[group] : indptr[group + 1]]}
            colour[group] = next(number for number in range(len(colour)) if number not in near)
        found = []
        for number in range(max(colour) + 1):
            members = np.flatnonzero(np.array(colour) == number)
            members = members[self._sizes[members] > 1]
            if len(members):
                sizes = self._sizes[members]
                entries = np.flatnonzero(np.isin(self._group, members))
                found.append(_Class(members, entries, sizes.cumsum() - sizes, np.repeat(np.arange(len(sizes)), sizes)))
        return found

    # ------------------------------------------------------------ 1. Lagrangian descent

    def _descend(self, chosen: Indices, multipliers: Array, weight: float = 1.0) -> Indices:
        """Coordinate descent of weight * lost + multipliers * costs."""
        for _ in range(SWEEPS):
            before = chosen
            for part in self._classes:
                at = self._widths[chosen]
                value = weight * self._lost[part.entries]
                for multiplier, cost in zip(multipliers.tolist(), self._costs, strict=True):
                    if multiplier:
                        value += multiplier * cost.shares(at, part.entries)
                least = np.minimum.reduceat(value, part.first)
                best = np.flatnonzero(value <= least[part.owner])[::-1]
                chosen = chosen.copy()
                chosen[part.members[part.owner[best]]] = part.entries[best]  # of equal ones the widest, written last
            if (chosen == before).all():
                break
        return chosen

    def _relax(self, start: _Point) -> tuple[_Point, Array]:
        """Best choice for some multipliers, and the multipliers."""
        weights = np.ones(len(self._costs)) / len(self._costs)
        best, scale = self._bisect(start, weights)
        multipliers = scale * weights
        if len(self._costs) == 1 or best.violation > _TOLERANCE:
            return best, multipliers
        for number in range(MULTIPLIER_UPDATES):
            # A cost that is above its budget gains weight, one that is below it loses weight.
            point = self._point(self._descend(best.chosen, multipliers))
            at = self._widths[point.chosen]
            excess = np.array([cost.total(at, point.chosen) - 1 for cost in self._costs])
            if point.is_better(best):
                best = point
            multipliers = multipliers * np.exp(np.clip(8 / (1 + 0.2 * number) * excess, -1, 1))
        return best, multipliers

    def _bisect(self, start: _Point, weights: Array) -> tuple[_Point, float]:
        """Smallest multiplier along these weights whose choice meets the budgets."""
        cheapest = self._point(self._descend(self._first + self._sizes - 1, weights, weight=0.0))
        if cheapest.violation > _TOLERANCE:
            other = self._point(self._descend(start.chosen, weights, weight=0.0))
            cheapest = other if other.is_better(cheapest) else cheapest
        # A multiplier of this size buys the cheapest network at the mean rate.
        high = max(cheapest.lost - start.lost, 1e-9) / max(start.violation - cheapest.violation, 1e-9)
        if cheapest.violation > _TOLERANCE:
            return cheapest, high
        low, above, best, middle = 0.0, start, cheapest, high
        high = np.inf
        for _ in range(BISECTIONS):
            point = self._point(self._descend(above.chosen, middle * weights))
            if point.violation > _TOLERANCE:
                low, above = middle, point
            else:
                high, best = middle, point if point.is_better(best) else best
            # Find both ends of the bracket first.
            middle = 16 * low if high == np.inf else high / 16 if low == 0 else float(np.sqrt(low * high))
        high = min(high, middle)
        for end in (cheapest, best):  # coordinate descent may end elsewhere from below
            point = self._point(self._descend(end.chosen, high * weights))
            best = point if point.is_better(best) else best
        return best, high

    # ------------------------------------------------------------ 2. exchange

    def _improve(self, point: _Point, multipliers: Array, held: int = -1) -> _Point:
        """Repair a violation, use up the budgets, and exchange pairs while the loss falls."""
        for _ in range(MAX_EXCHANGES):
            lost, costs, slacks = self._changes(point)
            movable = self._group != held
            moves = (
                self._repairing(lost, costs, slacks, movable)
                if point.violation > _TOLERANCE
                else (
                    self._single(lost, costs, slacks, movable)
                    or self._pair(point, lost, costs, slacks, movable, multipliers)
                )
            )
            if not moves:
                break
            chosen = point.chosen.copy()
            for entry in moves:
                chosen[self._group[entry]] = entry
            new = self._point(chosen)
            if not new.is_better(point):
                break
            point = new
        return point

    def _repairing(self, lost: Array, costs: list[Array], slacks: list[float], movable: NDArray[np.bool_]) -> list[int]:
        """The move that removes violation at the smallest loss."""
        violation = sum(max(-slack, 0.0) for slack in slacks)
        after = np.zeros_like(lost)
        for change, slack in zip(costs, slacks, strict=True):
            after += np.maximum(change - slack, 0.0)
        gained = violation - after
        useful = np.flatnonzero((gained > _TOLERANCE) & movable)
        if not len(useful):
            return []
        return [int(useful[np.argmin(np.maximum(lost[useful], 0) / gained[useful] + 1e-9 * after[useful])])]

    def _single(self, lost: Array, costs: list[Array], slacks: list[float], movable: NDArray[np.bool_]) -> list[int]:
        """The move within the budgets that gains most."""
        fits = (lost < -_TOLERANCE) & movable
        for change, slack in zip(costs, slacks, strict=True):
            fits &= change <= slack + _TOLERANCE
        entries = np.flatnonzero(fits)
        return [int(entries[np.argmin(lost[entries])])] if len(entries) else []

    def _pair(
        self,
        point: _Point,
        lost: Array,
        costs: list[Array],
        slacks: list[float],
        movable: NDArray[np.bool_],
        multipliers: Array,
    ) -> list[int]:
        """The pair of moves within the budgets that gains most.

        Both moves must have a small change of lost + multipliers * costs, since a pair that gains within the budgets
        has a change of at most multipliers * slacks in total. So only the smallest ones are paired.
        """
        reduced = lost + sum(multiplier * change for multiplier, change in zip(multipliers, costs, strict=True))
        sides = []
        for side in (lost < -_TOLERANCE, lost > _TOLERANCE):
            entries = np.flatnonzero(side & movable)
            if len(entries) > PAIRED_MOVES:
                entries = entries[np.argpartition(reduced[entries], PAIRED_MOVES)[:PAIRED_MOVES]]
            sides.append(entries)
        grow, shrink = sides
        if not len(grow) or not len(shrink):
            return []
        gain = lost[grow][:, None] + lost[shrink]
        owners = self._group[grow], self._group[shrink]
        fits = (gain < -_TOLERANCE) & (owners[0][:, None] != owners[1])
        at = self._widths[point.chosen]
        by, less = self._widths[grow] - at[owners[0]], self._widths[shrink] - at[owners[1]]
        for cost, change, slack in zip(self._costs, costs, slacks, strict=True):
            crossed = cost.products[np.ix_(*owners)] * by[:, None] * less
            fits &= change[grow][:, None] + change[shrink] + crossed <= slack + _TOLERANCE
        if not fits.any():
            return []
        one, other = np.unravel_index(np.argmin(np.where(fits, gain, np.inf)), gain.shape)
        return [int(grow[one]), int(shrink[other])]

    # ------------------------------------------------------------ 3. restarts

    def _restart(self, best: _Point, multipliers: Array) -> _Point:
        """Hold one group at another width, repair and improve the rest, then improve all."""
        lost, costs, _ = self._changes(best)
        reduced = lost + sum(multiplier * change for multiplier, change in zip(multipliers, costs, strict=True))
        others = np.flatnonzero(self._widths[best.chosen][self._group] != self._widths)
        if not len(others):
            return best
        others = others[np.argsort(reduced[others], kind="stable")]
        entry = others[min(int(self._random.exponential(0.1 * len(others) + 2)), len(others) - 1)]
        chosen = best.chosen.copy()
        chosen[self._group[entry]] = entry
        point = self._improve(self._point(chosen), multipliers, held=int(self._group[entry]))
        return self._improve(point, multipliers)
