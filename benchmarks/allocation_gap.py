"""How far the chosen widths are from the optimum, and how long the choice takes.

    PYTHONPATH=src python3 benchmarks/allocation_gap.py --out results/allocation_gap.json

Three sets of problems, each with random channel importance (log-normal, with a random scale of each group):

- small: two to four groups with products and steps, solved by exhaustive search as well;
- profiles: the energy models of the recorded profiles, solved as a mixed-integer program by SciPy's HiGHS as well. The
  program is exact. Where HiGHS stops at its time limit, its lower bound takes the place of the optimum;
- large: a chain of 1,000 groups, timed.

The excess is lost importance / optimum - 1. `order` is the same excess for pruning by importance per joule alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, machine, write_record
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array

from ecc.energy import fit
from ecc.energy.cost import Array, CostForm, risen
from ecc.measure import Profile
from ecc.methods.ecc.allocation import Allocation, WidthAllocator

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = (0.9, 0.8, 0.65, 0.5, 0.35)
MIN_WIDTH_RATIO = 0.1


def value(form: CostForm, widths: Sequence[float] | Array) -> float:
    """The cost at these widths."""
    return form.value(np.asarray(widths, float))


def candidate_widths(full: int, multiple: int, least: int = 1) -> list[int]:
    """Full width, and the multiples between it and the minimum, in this order."""
    smallest = max(multiple, -(-max(least, int(MIN_WIDTH_RATIO * full)) // multiple) * multiple)
    return [full, *range((full - 1) // multiple * multiple, smallest - 1, -multiple)]


def draw_losses(rng: np.random.Generator, candidates: Sequence[Sequence[int]], full: Sequence[int]) -> list[Array]:
    """Importance lost at each width, for random importance."""
    losses = []
    spread, between = rng.uniform(0.3, 2.0), rng.uniform(0, 1.5)
    for widths, count in zip(candidates, full, strict=True):
        importance = np.sort(np.exp(spread * rng.normal(size=count) + between * rng.normal()))
        removed = np.concatenate([[0.0], importance.cumsum()])
        losses.append(removed[[count - width for width in widths]])
    return losses


def prune_by_order(form: CostForm, budget: float, candidates: Any, losses: Any) -> float:
    """Lost importance if blocks are removed in the order of importance per joule, measured at the dense network."""
    dense = np.array([max(one) for one in candidates], float)
    near = dense - 1
    slopes = [
        value(form, dense) - value(form, np.where(np.arange(len(dense)) == g, near, dense)) for g in range(len(dense))
    ]
    blocks = []
    for group, (widths, lost) in enumerate(zip(candidates, losses, strict=True)):
        for before, after in itertools.pairwise(range(len(widths))):
            size = widths[before] - widths[after]
            ratio = (lost[after] - lost[before]) / size / max(slopes[group], 1e-12 * max(slopes))
            blocks.append((ratio, group, -widths[after], lost[after] - lost[before]))
    widths, total = dense.copy(), 0.0
    for _, group, width, more in sorted(blocks):
        if value(form, widths) <= budget:
            break
        widths[group], total = -width, total + more
    return total


def allocate(form: CostForm, budget: float, candidates: Any, losses: Any) -> Allocation:
    """The solution of the package."""
    return WidthAllocator([form], [budget], candidates).solve(losses)


# ---------------------------------------------------------------- optimum


def search_all(form: CostForm, budget: float, candidates: Any, losses: Any) -> float:
    """Smallest loss over all combinations."""
    best = np.inf
    for picks in itertools.product(*(range(len(one)) for one in candidates)):
        lost = sum(losses[g][k] for g, k in enumerate(picks))
        if lost < best and value(form, [candidates[g][k] for g, k in enumerate(picks)]) <= budget * (1 + 1e-12):
            best = lost
    return float(best)


class Program:
    """The problem as a mixed-integer program for HiGHS.

    One binary variable for each allowed width; one continuous variable for each pair of widths of two groups that share
    a term, tied to the two by the sums over each of them; two variables for each step on more than two groups.
    """

    def __init__(self, form: CostForm, budget: float, candidates: Any, losses: Any) -> None:
        self._form, self._candidates, self._budget, self._losses = form, candidates, budget, losses
        self._first = np.concatenate([[0], np.cumsum([len(one) for one in candidates])])
        self._count = int(self._first[-1])
        self._binary = list(range(self._count))
        self._costs: list[tuple[int, float]] = []
        self._constant = form.constant
        self._pairs: dict[tuple[int, int], Array] = {}
        self._rows: list[list[tuple[int, float]]] = []
        self._bounds: list[tuple[float, float]] = []
        self._upper: dict[int, float] = {}  # of variables that may be above 1
        for group, widths in enumerate(candidates):
            at = np.asarray(widths, float)
            self._add_own(group, form.linear[group] * at + 0.5 * form.quadratic[group, group] * at**2)
            self._rows.append([(int(self._first[group]) + k, 1.0) for k in range(len(widths))])
            self._bounds.append((1.0, 1.0))
        for one, other in zip(*np.nonzero(np.triu(form.quadratic, 1)), strict=True):
            self._add_pair(one, other, form.quadratic[one, other] * np.outer(candidates[one], candidates[other]))
        for row in range(len(form.heights)):
            self._add_step(row)
        for (one, other), table in self._pairs.items():
            self._tie(one, other, table)

    def _add_own(self, group: int, costs: Array) -> None:
        self._costs += [(int(self._first[group]) + k, cost) for k, cost in enumerate(costs.tolist()) if cost]

    def _add_pair(self, one: int, other: int, table: Array) -> None:
        key, table = ((one, other), table) if one < other else ((other, one), table.T)
        self._pairs[key] = self._pairs.get(key, 0.0) + table

    def _add_step(self, row: int) -> None:
        form = self._form
        part = slice(form.rows.indptr[row], form.rows.indptr[row + 1])
        start, height = form.start[row], form.heights[row]
        sums = []
        for group, multiple in zip(form.rows.indices[part], form.rows.data[part], strict=True):
            sizes = multiple * np.asarray(self._candidates[group], float)
            if len(sizes) == 1:
                start -= sizes[0]
            else:
                sums.append((group, sizes))
        if not sums:
            self._constant += height * self._risen(row, np.array(-start))
        elif len(sums) == 1:
            self._add_own(sums[0][0], height * self._risen(row, sums[0][1] - start))
        elif len(sums) == 2:
            (one, rows), (other, columns) = sums
            self._add_pair(one, other, height * self._risen(row, np.add.outer(rows, columns) - start))
        elif form.multiple[row]:  # size - start = multiple * whole + rest with 0 <= rest <= (multiple - 1) * misaligned
            whole, misaligned = self._count, self._count + 1
            self._count += 2
            self._binary += [whole, misaligned]
            self._costs.append((misaligned, height))
            multiple = float(form.multiple[row])
            self._upper[whole] = (sum(sizes.max() for _, sizes in sums) - start) / multiple
            sizes_of = [(int(self._first[g]) + k, size) for g, sizes in sums for k, size in enumerate(sizes.tolist())]
            rest = [*sizes_of, (whole, -multiple)]
            self._rows += [rest, [*rest, (misaligned, 1 - multiple)]]
            self._bounds += [(start, np.inf), (-np.inf, start)]
        else:  # risen >= size - start, unless full is 1; full <= risen
            risen, full = self._count, self._count + 1
            self._count += 2
            self._binary.append(full)
            self._costs.append((risen, height))
            most = sum(sizes.max() for _, sizes in sums) - start
            sizes_of = [(int(self._first[g]) + k, size) for g, sizes in sums for k, size in enumerate(sizes.tolist())]
            self._rows += [[*sizes_of, (risen, -1.0), (full, -max(most - 1, 0.0))], [(full, 1.0), (risen, -1.0)]]
            self._bounds += [(-np.inf, start), (-np.inf, 0.0)]

    def _risen(self, row: int, sizes: Array) -> Array:
        return risen(sizes, self._form.cap[row], np.full(sizes.shape, self._form.multiple[row]))

    def _tie(self, one: int, other: int, table: Array) -> None:
        index = np.arange(table.size).reshape(table.shape) + self._count
        self._count += table.size
        self._costs += list(zip(index.ravel().tolist(), table.ravel().tolist(), strict=True))
        for group, lines in ((one, index), (other, index.T)):
            for k, line in enumerate(lines):
                self._rows.append([(int(self._first[group]) + k, -1.0), *((int(entry), 1.0) for entry in line)])
                self._bounds.append((0.0, 0.0))

    def solve(self, seconds: float) -> tuple[float, bool]:
        """The optimum or a lower bound of it, and whether it is the optimum."""
        objective = np.zeros(self._count)
        objective[: self._first[-1]] = np.concatenate([np.asarray(one) for one in self._losses])
        scale = max(objective.max(), 1e-300)
        integrality = np.zeros(self._count)
        integrality[self._binary] = 1
        upper = np.ones(self._count)
        upper[list(self._upper)] = list(self._upper.values())
        low, high = (np.array(side) for side in zip(*self._bounds, strict=True))
        result = milp(
            objective / scale,
            constraints=[
                LinearConstraint(_matrix(self._rows, self._count), low, high),
                LinearConstraint(
                    _matrix([self._costs], self._count) / self._budget, -np.inf, 1 - self._constant / self._budget
                ),
            ],
            integrality=integrality,
            bounds=Bounds(0, upper),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        return float(result.mip_dual_bound) * scale, result.status == 0


def _matrix(rows: Any, columns: int) -> csr_array:
    entries = [(row, column, amount) for row, parts in enumerate(rows) for column, amount in parts]
    row, column, amount = (np.array(part) for part in zip(*entries, strict=True))
    return csr_array(coo_array((amount, (row, column)), shape=(len(rows), columns)))


# ---------------------------------------------------------------- problems


def small_problem(rng: np.random.Generator) -> tuple[CostForm, list[list[int]], list[Array]]:
    """Two to four groups in a chain, with products, and steps that make some widths as dear as wider ones."""
    groups = int(rng.integers(2, 5))
    full = rng.integers(3, 9, groups) * 8
    quadratic = np.zeros((groups, groups))
    for one in range(groups - 1):
        quadratic[one, one + 1] = quadratic[one + 1, one] = rng.exponential()
    linear = rng.exponential(size=groups) * full.mean() * rng.choice([0.1, 1.0])
    rows, start, heights = [], [], []
    for group in range(groups):
        for level in range(0, int(full[group]), 8):
            rows.append([(group, 1 / 8)])
            start.append(level / 8)
            heights.append(rng.exponential() * full.mean() * full[group] * rng.choice([0.0, 0.3]))
    ones = np.ones(len(start))
    form = CostForm(
        rng.exponential() * 100,
        linear,
        quadratic,
        np.array(heights),
        _matrix(rows, groups),
        np.array(start),
        ones,
        0 * ones,
    )
    candidates = [candidate_widths(int(one), 8) for one in full]
    return form, candidates, draw_losses(rng, candidates, full.tolist())


def large_problem(rng: np.random.Generator, groups: int) -> tuple[CostForm, list[list[int]], list[Array]]:
    """A chain of groups with 64 to 512 channels, products of neighbours and steps of 64 channels."""
    full = rng.choice([64, 128, 256, 512], groups)
    quadratic = np.zeros((groups, groups))
    near = rng.exponential(size=groups - 1)
    quadratic[np.arange(groups - 1), np.arange(1, groups)] = quadratic[np.arange(1, groups), np.arange(groups - 1)] = (
        near
    )
    levels = [(group, level) for group in range(groups) for level in range(0, int(full[group]), 64)]
    rows = _matrix([[(group, 1 / 8)] for group, _ in levels], groups)
    heights = rng.exponential(size=len(levels)) * 3000
    start = np.array([level / 8 for _, level in levels])
    form = CostForm(
        0.0, 50 * np.ones(groups), quadratic, heights, rows, start, np.ones(len(levels)), np.zeros(len(levels))
    )
    candidates = [candidate_widths(int(one), 8) for one in full]
    return form, candidates, draw_losses(rng, candidates, full.tolist())


def summary(excess: list[float]) -> dict[str, float]:
    """Median, p90 and maximum."""
    quantiles = np.quantile(excess, [0.5, 0.9])
    return {"median": float(quantiles[0]), "p90": float(quantiles[1]), "max": float(max(excess))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", type=int, default=200, help="Number of small problems.")
    parser.add_argument("--draws", type=int, default=4, help="Draws of importance for each profile and budget.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Time limit of HiGHS for each problem.")
    options = parser.parse_args()
    rng = np.random.default_rng(1)

    exact: list[float] = []
    order: list[float] = []
    while len(exact) < options.small:
        form, candidates, losses = small_problem(rng)
        budget = rng.uniform(0.3, 0.95) * value(form, [max(one) for one in candidates])
        best = search_all(form, budget, candidates, losses)
        if 0 < best < np.inf:
            exact.append(allocate(form, budget, candidates, losses).lost / best - 1)
            order.append(prune_by_order(form, budget, candidates, losses) / best - 1)
    small = {"problems": len(exact), "excess": summary(exact), "order": summary(order)}
    print("small", small, flush=True)

    profiles: dict[str, Any] = {}
    every: list[float] = []
    paths = [
        *sorted((ROOT / "profiles").glob("*/*.profile.gz")),
        *sorted((ROOT / "results/evidence").glob("*.profile.gz")),
    ]
    for path in paths:
        profile = Profile.load(path)
        model = fit(profile, "physical", allow_drift=True)
        multiple = profile.header.design.width_multiple or 1
        pairs = zip(model.full_widths, model.min_widths, strict=True)
        # At most 32 widths of a group, so that HiGHS can solve the problem.
        candidates = [
            [full] if full == least else candidate_widths(full, max(multiple, full // 32), least)
            for full, least in pairs
        ]
        excess, by_order, milliseconds, solved = [], [], [], 0
        for fraction in BUDGETS:
            for _ in range(options.draws):
                budget = fraction * model.dense
                form, losses = model.form(budget), draw_losses(rng, candidates, model.full_widths)
                begin = time.process_time()
                found = allocate(form, budget, candidates, losses)
                milliseconds.append(1e3 * (time.process_time() - begin))
                if not found.is_feasible:
                    milliseconds.pop()
                    continue
                best, is_optimal = Program(form, budget, candidates, losses).solve(options.seconds)
                solved += is_optimal
                excess.append(found.lost / max(best, 1e-300) - 1)
                by_order.append(prune_by_order(form, budget, candidates, losses) / max(best, 1e-300) - 1)
        name = path.name.partition(".")[0]
        profiles[name] = {
            "groups": sum(len(one) > 1 for one in candidates),
            "problems": len(excess),
            "solved_to_optimality": solved,
            "excess": summary(excess),
            "order": summary(by_order),
            "milliseconds": {"median": statistics.median(milliseconds), "max": max(milliseconds)},
        }
        every += excess
        print(name, profiles[name], flush=True)

    large, built = [], []
    for _ in range(5):
        form, candidates, losses = large_problem(rng, 1000)
        budget = rng.uniform(0.3, 0.9) * value(form, [max(one) for one in candidates])
        begin = time.process_time()
        allocator = WidthAllocator([form], [budget], candidates)
        built.append(1e3 * (time.process_time() - begin))
        begin = time.process_time()
        allocator.solve(losses)
        large.append(1e3 * (time.process_time() - begin))
    print("large", large, built)
    write_record(
        {
            "what": "excess of the lost importance over the optimum or its lower bound, and time of allocate()",
            "environment": machine(commit=commit()),
            "small": small,
            "all_profiles": {"problems": len(every), "excess": summary(every)},
            "profiles": profiles,
            "large": {
                "groups": 1000,
                "milliseconds": {"median": statistics.median(large), "max": max(large)},
                "milliseconds_to_build": statistics.median(built),
            },
        },
        options.out,
    )


if __name__ == "__main__":
    main()
