"""Least squares with coefficients of at least 0, on relative errors: what all fits of this room come down to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def coefficients_of(
    features: Array,
    values: Array,
    *,
    relative: bool = True,
    importance: Array | None = None,
    prior: Array | None = None,
    prior_scale: Array | None = None,
    strength: float = 0.0,
) -> Array:
    """Coefficients c >= 0 that make features @ c fit the values, drawn towards prior ones.

    They minimise  mean(importance * ((features @ c - values) / values)^2) + strength * sum(((c - prior) / prior_scale)^2),
    or the same without the division by the values.

    Args:
        features: (networks, terms), at least 0.
        values: (networks,), above 0.
        relative: Whether relative or absolute errors are squared.
        importance: Of each network; 1 if None.
        prior: Coefficients to be drawn to; 0 if None.
        prior_scale: How far a coefficient may be from its prior at a cost of one; needed with a strength.
        strength: Of that pull.
    """
    rows, goal = _scaled(features, values, relative, importance)
    scale = np.sqrt((rows**2).sum(axis=0))
    scale[scale == 0] = 1.0  # a term that is always 0 keeps its prior coefficient
    rows = rows / scale
    if strength > 0:
        assert prior_scale is not None
        pull = np.sqrt(strength) / (prior_scale * scale)
        towards = np.zeros(len(scale)) if prior is None else prior * scale
        if rows.shape[0] < rows.shape[1]:
            found = _drawn(rows, goal, pull, towards)
            if found is not None:
                return np.asarray(found / scale)
        rows = np.vstack([rows, np.diag(pull)])
        goal = np.concatenate([goal, pull * towards])
    return np.asarray(_nonnegative(rows, goal) / scale)


def left_out_errors(
    features: Array,
    values: Array,
    coefficients: Array,
    *,
    importance: Array | None = None,
    prior_scale: Array,
    strength: float,
) -> Array:
    """The relative error of each network under coefficients fitted without it, in closed form.

    Exact as long as the same coefficients stay above 0: a fit without one row is then linear in that row (leverage).

    Args:
        features: As for `coefficients_of`.
        values: As for `coefficients_of`.
        coefficients: What that gave.
        importance: As for `coefficients_of`.
        prior_scale: As for `coefficients_of`.
        strength: As for `coefficients_of`.
    """
    rows, goal = _scaled(features, values, True, importance)
    used = coefficients > 0
    kept = rows[:, used] * prior_scale[used]
    if kept.shape[0] < kept.shape[1]:  # the same, by way of the smaller of the two matrices
        outer = kept @ kept.T
        leverage = np.diagonal(np.linalg.solve(outer + strength * np.eye(len(outer)), outer))
    else:
        inner = kept.T @ kept + strength * np.eye(int(used.sum()))
        leverage = np.einsum("ij,ji->i", kept, np.linalg.solve(inner, kept.T))
    errors = (rows @ coefficients - goal) / (1 - leverage).clip(min=1e-6)
    return np.asarray(errors / goal)


def _scaled(features: Array, values: Array, relative: bool, importance: Array | None) -> tuple[Array, Array]:
    """Rows and goal whose plain least squares are the weighted ones."""
    weights = 1 / values if relative else np.full(len(values), 1 / values.mean())
    if importance is not None:
        weights = weights * np.sqrt(importance)
    weights = weights / np.sqrt(len(values))
    return features * weights[:, None], values * weights


def _nonnegative(rows: Array, goal: Array) -> Array:
    """Non-negative least squares: the active set, or an interior point where that does not end."""
    from scipy.optimize import lsq_linear, nnls  # a quarter of a second, which most commands need not spend

    try:
        solution, _ = nnls(rows, goal, maxiter=20 * rows.shape[1] + 100)
    except RuntimeError:
        solution = lsq_linear(rows, goal, bounds=(0, np.inf), tol=1e-12).x.clip(min=0)
    return np.asarray(solution, dtype=np.float64)


_MOST_STEPS, _MOST_HALVES = 200, 40  # some ten steps are enough, most of them whole
_ENOUGH = 1e-10  # of the largest contribution: what a step would change no more than this is left to rounding


def _drawn(rows: Array, goal: Array, pull: Array, towards: Array) -> Array | None:
    """Minimises |rows x - goal|^2 + |pull (x - towards)|^2 over x >= 0 where there are fewer rows than coefficients.

    An active set looks at the coefficients one by one, which takes the cube of their number: a network with a thousand groups
    has thousands. The dual has one variable a row, the residual r, and

        x = max(0, towards - (rows^T r) / pull^2),    r = rows x - goal.

    That is where the gradient of a strongly convex, piecewise quadratic function of r vanishes, and Newton's method
    gets there in a few steps.

    Returns:
        The coefficients; None if it does not get there.
    """
    room = pull**-2
    residual = -goal
    coefficients, slope = _dual(residual, rows, goal, room, towards)
    for _ in range(_MOST_STEPS):
        used = coefficients > 0
        curvature = np.eye(len(goal)) + (rows[:, used] * room[used]) @ rows[:, used].T
        way = -np.linalg.solve(curvature, slope)
        if np.abs(room * (way @ rows)).max() <= _ENOUGH * coefficients.max():
            return coefficients
        low, high, step = 0.0, 1.0, 1.0
        for _ in range(_MOST_HALVES):  # along the way the slope only rises; where it is 0 is the least
            found = _dual(residual + step * way, rows, goal, room, towards)
            rising = float(found[1] @ way)
            if abs(rising) <= 0.1 * abs(float(slope @ way)) or (rising < 0 and step == 1.0):
                break
            low, high = (step, high) if rising < 0 else (low, step)
            step = (low + high) / 2
        is_same = step == 1.0 and bool(((found[0] > 0) == used).all())
        residual, (coefficients, slope) = residual + step * way, found
        if is_same:
            return coefficients  # with these above 0 the function is quadratic, and this is its minimum
    return None


def _dual(residual: Array, rows: Array, goal: Array, room: Array, towards: Array) -> tuple[Array, Array]:
    """The coefficients at a residual, and the gradient of the function that `_drawn` minimises."""
    coefficients = (towards - room * (residual @ rows)).clip(min=0)
    return coefficients, residual + goal - rows @ coefficients
