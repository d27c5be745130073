"""Non-negative least squares on relative errors, and the `Samples` of a profile that models are fitted to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ecc.budget import MEASURED_UNITS
from ecc.errors import BadFile, BadMeasurement
from ecc.graph import StructureSpec
from ecc.measure.profile import Profile, check_samples

from .cost import Array

RESOURCES = {name: ({"J": "joules", "s": "seconds"}[unit], unit) for name, unit in MEASURED_UNITS.items()}
"""Resources that a profile holds: the field of a sample and the unit."""

MIN_SAMPLES = 12
"""Fewer samples cannot be cross-validated."""

MIN_REMOVED = 3
"""Samples without a branch that are needed to predict the cost without it."""


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Samples:
    """Width configurations and their costs, one row per network."""

    structure: StructureSpec
    widths: Array
    """(networks, groups): widths of all groups, in the order of the structure."""
    values: Array
    """Cost of one inference of the whole batch, above 0."""
    weights: Array | None = None
    """Number of measurements of each network; None for one each."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_dense(self) -> NDArray[np.bool_]:
        """Which rows are the dense network."""
        return np.asarray((self.widths == np.asarray(self.structure.full_widths)).all(axis=1))

    @property
    def range_ends(self) -> NDArray[np.bool_]:
        """Which rows every fit needs, because a model without them extrapolates.

        These are the dense network and the one of the lowest cost. If branches were removed, also the one of the lowest
        cost with all branches, and those of the lowest and the highest cost without any. A profile contains them all.
        """
        ends = self.is_dense.copy()
        branches = self.structure.branch_groups
        removed = np.array([(self.widths[:, list(groups)] == 0).all(axis=1) for groups in branches]).reshape(
            -1, len(self)
        )
        with_all, with_none = ~removed.any(axis=0), removed.all(axis=0) & bool(branches)
        for rows, sign in ((with_all, 1), (with_none, 1), (with_none, -1)):
            if rows.any():
                ends[np.argmin(np.where(rows, sign * self.values, np.inf))] = True
        ends[np.argmin(self.values)] = True
        return ends

    @property
    def width_ratios(self) -> Array:
        """width / full width of the prunable groups: (networks, prunable groups)."""
        positions = list(self.structure.prunable)
        return np.asarray(self.widths[:, positions] / np.asarray(self.structure.full_widths)[positions])

    def take(self, rows: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> Samples:
        """Some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, widths=self.widths[rows], values=self.values[rows], weights=weights)


def samples_from_profile(profile: Profile, resource: str = "energy", *, allow_drift: bool = False) -> Samples:
    """Samples of a profile and its dense reference, with drift divided out and rounds averaged.

    The dense network is measured repeatedly as the reference. It becomes one sample, the median, weighted by the number
    of its measurements. The arguments are those of `fit`.
    """
    if resource not in RESOURCES:
        raise BadFile(f"a profile does not hold {resource!r}; choose {' or '.join(RESOURCES)}.")
    field, _ = RESOURCES[resource]
    header = profile.header
    if field == "joules" and not header.meter.has_energy:
        raise BadMeasurement(
            f"the profile was measured by the clock {header.meter.name!r}: it has latency and no energy. Fit the "
            "latency, or measure with an energy meter."
        )
    names = [f"measurement {number} of the profile" for number in range(1, len(profile.samples) + 1)]
    check_samples(header, profile.samples, names)
    rounds = Counter(row.index for row in profile.samples)
    found = [
        (sample.widths, float(getattr(sample, field)), float(rounds[sample.index]))
        for sample in profile.corrected(allow_drift=allow_drift, of=field)
    ]
    if profile.references:
        dense = sorted(float(getattr(row, field)) for row in profile.references)
        dense += [value for widths, value, _ in found if widths == header.full_widths]
        found = [row for row in found if row[0] != header.full_widths]
        found.append((header.full_widths, statistics.median(dense), float(len(dense))))
    positions = [header.structure.groups.index(name) for name in header.groups]
    full = np.asarray(header.structure.full_widths, dtype=np.float64)
    widths = np.tile(full, (len(found), 1))
    for number, (kept, _, _) in enumerate(found):
        widths[number, positions] = kept
    values, weights = (np.array([row[k] for row in found], dtype=np.float64) for k in (1, 2))
    return Samples(_with_removed(header.structure, widths), widths, values, weights)


def _with_removed(structure: StructureSpec, widths: Array) -> StructureSpec:
    """The structure with the branches that were removed in at least `MIN_REMOVED` samples."""
    counts = [int((widths[:, list(groups)] == 0).all(axis=1).sum()) for groups in structure.branch_groups]
    kept = [number for number, count in enumerate(counts) if count >= MIN_REMOVED]
    position = {number: new for new, number in enumerate(kept)}
    replacements = tuple(
        replace(one, branches=tuple(position[number] for number in one.branches))
        for one in structure.replacements
        if all(number in position for number in one.branches)
    )
    return replace(structure, branches=tuple(structure.branches[n] for n in kept), replacements=replacements)


def check_sample_count(samples: Samples) -> None:
    """Refuse samples too few to fit."""
    if len(samples) < MIN_SAMPLES:
        raise BadMeasurement(f"the profile has {len(samples)} samples; a fit needs {MIN_SAMPLES}. Profile more.")


def folds(count: int, number: int) -> NDArray[np.intp]:
    """The fold of each sample: random, of equal sizes, and always the same."""
    return np.random.default_rng(20190613).permutation(count) % number


# ---------------------------------------------------------------- least squares


def fit_coefficients(
    features: Array,
    values: Array,
    *,
    relative: bool = True,
    weights: Array | None = None,
    prior: Array | None = None,
    prior_scale: Array | None = None,
    strength: float = 0.0,
) -> Array:
    """Coefficients c >= 0 so that features @ c fits the values, with an optional Gaussian prior.

    Minimises  mean(weights * ((features @ c - values) / values)^2) + strength * sum(((c - prior) / prior_scale)^2),
    or the same without the division by the values (`relative=False`). Features are (networks, terms), at least 0;
    values and weights are one per network, the prior and its scale one per term.
    """
    rows, goal = _weighted(features, values, relative, weights)
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0  # a term that is always 0 keeps its prior coefficient
    rows = rows / scale
    if strength > 0:
        assert prior_scale is not None
        pull = np.sqrt(strength) / (prior_scale * scale)
        centre = np.zeros(len(scale)) if prior is None else prior * scale
        if rows.shape[0] < rows.shape[1]:
            found = _solve_dual(rows, goal, pull, centre)
            if found is not None:
                return np.asarray(found / scale)
        rows = np.vstack([rows, np.diag(pull)])
        goal = np.concatenate([goal, pull * centre])
    return np.asarray(_nonnegative(rows, goal) / scale)


def leave_one_out_errors(
    features: Array,
    values: Array,
    coefficients: Array,
    *,
    weights: Array | None = None,
    prior_scale: Array,
    strength: float,
) -> Array:
    """Relative error of each network under coefficients fitted without it, in closed form.

    Exact as long as the same coefficients stay above 0: the fit without one sample is then linear in that sample, and
    its residual is the residual of the fit divided by 1 - leverage. `coefficients` is the result of `fit_coefficients`,
    and the other arguments are those that it was called with.
    """
    rows, goal = _weighted(features, values, True, weights)
    used = coefficients > 0
    kept = rows[:, used] * prior_scale[used]
    if kept.shape[0] < kept.shape[1]:  # the same, by the smaller of the two matrices
        outer = kept @ kept.T
        leverage = np.diagonal(np.linalg.solve(outer + strength * np.eye(len(outer)), outer))
    else:
        inner = kept.T @ kept + strength * np.eye(int(used.sum()))
        leverage = np.einsum("ij,ji->i", kept, np.linalg.solve(inner, kept.T))
    errors = (rows @ coefficients - goal) / (1 - leverage).clip(min=1e-6)
    return np.asarray(errors / goal)


def _weighted(features: Array, values: Array, relative: bool, weights: Array | None) -> tuple[Array, Array]:
    """Rows and goal whose plain least squares are the weighted ones."""
    scale = 1 / values if relative else np.full(len(values), 1 / values.mean())
    if weights is not None:
        scale = scale * np.sqrt(weights)
    scale = scale / np.sqrt(len(values))
    return features * scale[:, None], values * scale


def _nonnegative(rows: Array, goal: Array) -> Array:
    """Non-negative least squares: an active set, or an interior point method where that does not converge."""
    from scipy.optimize import lsq_linear, nnls  # slow to import, and most commands do not fit

    try:
        solution, _ = nnls(rows, goal, maxiter=20 * rows.shape[1] + 100)
    except RuntimeError:
        solution = lsq_linear(rows, goal, bounds=(0, np.inf), tol=1e-12).x.clip(min=0)
    return np.asarray(solution, dtype=np.float64)


_MAX_STEPS, _MAX_HALVINGS = 200, 40  # about ten steps are enough, most of them full
_TOLERANCE = 1e-10  # of the largest contribution; a smaller step is rounding


def _solve_dual(rows: Array, goal: Array, pull: Array, centre: Array) -> Array | None:
    """Minimise |rows x - goal|^2 + |pull (x - centre)|^2 over x >= 0 where there are fewer rows than coefficients.

    An active-set method adds coefficients one by one, which takes the cube of their number: minutes for a network with
    a thousand groups. The dual problem has one variable per row, the residual r:

        x = max(0, centre - (rows^T r) / pull^2),    r = rows x - goal.

    Its solution is the zero of the gradient of a strongly convex, piecewise quadratic function of r. Newton's method
    with a bisecting line search finds it in a few steps, each of the cost of one small linear system.

    Returns:
        The coefficients; None if it does not converge.
    """
    room = pull**-2
    residual = -goal
    coefficients, slope = _dual(residual, rows, goal, room, centre)
    for _ in range(_MAX_STEPS):
        used = coefficients > 0
        curvature = np.eye(len(goal)) + (rows[:, used] * room[used]) @ rows[:, used].T
        direction = -np.linalg.solve(curvature, slope)
        if np.abs(room * (direction @ rows)).max() <= _TOLERANCE * coefficients.max():
            return coefficients
        low, high, step = 0.0, 1.0, 1.0
        for _ in range(_MAX_HALVINGS):  # the directional derivative only rises along the line; find where it is 0
            found = _dual(residual + step * direction, rows, goal, room, centre)
            rising = float(found[1] @ direction)
            if abs(rising) <= 0.1 * abs(float(slope @ direction)) or (rising < 0 and step == 1.0):
                break
            low, high = (step, high) if rising < 0 else (low, step)
            step = (low + high) / 2
        is_same = step == 1.0 and bool(((found[0] > 0) == used).all())
        residual, (coefficients, slope) = residual + step * direction, found
        if is_same:
            return coefficients  # with an unchanged active set the function is quadratic, and this is its minimum
    return None


def _dual(residual: Array, rows: Array, goal: Array, room: Array, centre: Array) -> tuple[Array, Array]:
    """The coefficients at a residual, and the gradient of the function that `_solve_dual` minimises."""
    coefficients = (centre - room * (residual @ rows)).clip(min=0)
    return coefficients, residual + goal - rows @ coefficients
