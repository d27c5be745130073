"""Least squares with prices of at least 0, on relative errors: what all fits of this room come down to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear, nnls

Array = NDArray[np.float64]


def prices_of(
    features: Array,
    values: Array,
    *,
    relative: bool = True,
    prior: Array | None = None,
    slack: Array | None = None,
    strength: float = 0.0,
) -> Array:
    """Prices c >= 0 that make features @ c fit the values, drawn towards prior ones.

    They minimise  mean(((features @ c - values) / values)^2) + strength * sum(((c - prior) / slack)^2),
    or the same without the division by the values.

    Args:
        features: (networks, terms), at least 0.
        values: (networks,), above 0.
        relative: Whether relative or absolute errors are squared.
        prior: Prices to be drawn to; 0 if None.
        slack: How far a price may be from its prior at a cost of one; needed with a strength.
        strength: Of that pull.
    """
    weights = 1 / values if relative else np.full(len(values), 1 / values.mean())
    rows = features * weights[:, None]
    goal = values * weights
    scale = np.sqrt((rows**2).mean(axis=0))
    scale[scale == 0] = 1.0  # a term that is always 0 gets the price 0
    rows = rows / scale / np.sqrt(len(values))
    goal = goal / np.sqrt(len(values))
    if strength > 0:
        assert slack is not None
        pull = np.sqrt(strength) / (slack * scale)
        towards = np.zeros(len(scale)) if prior is None else prior * scale
        rows = np.vstack([rows, np.diag(pull)])
        goal = np.concatenate([goal, pull * towards])
    return np.asarray(_nonnegative(rows, goal) / scale)


def _nonnegative(rows: Array, goal: Array) -> Array:
    """Non-negative least squares: the active set, or an interior point where that does not end."""
    try:
        solution, _ = nnls(rows, goal, maxiter=20 * rows.shape[1] + 100)
    except RuntimeError:
        solution = lsq_linear(rows, goal, bounds=(0, np.inf), tol=1e-12).x.clip(min=0)
    return np.asarray(solution, dtype=np.float64)
