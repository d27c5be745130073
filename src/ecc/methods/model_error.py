"""How far the energy model is off at networks that were not measured, estimated from those that were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ecc.run_records import CostCheck

BLOCK = 8
"""Channels that kernels compute together."""

SAFETY_MARGIN = (0.002, 0.015)
"""Smallest and largest safety margin, as a fraction of the budget."""

_COMMON_ERROR, _GROUP_ERROR = 0.3, 0.04  # standard deviations; see `estimate_errors`


def estimate_errors(
    checks: Sequence[CostCheck], resource: str, candidates: Sequence[Mapping[str, int]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logarithm of measured / predicted cost of networks that were not measured, from those that were.

    The logarithm of the error is a constant plus, for each group, an error of its width, one of the block of channels
    in which it ends (kernels compute whole blocks), and one of its alignment (there are other kernels for whole blocks,
    and for even widths), all of them independent. So networks have similar errors if they share these. The estimate is
    that of this Gaussian process given the measurements.

    Args:
        checks: The measurements.
        resource: Which cost. One that was not measured is exact.
        candidates: Widths by name of the group.

    Returns:
        Mean and standard deviation for each candidate.
    """
    known = [check for check in checks if resource in check.measured]
    if checks and not known:
        return np.zeros(len(candidates)), np.full(len(candidates), 1e-9)
    names = list(candidates[0])
    here = np.array([[widths[name] for name in names] for widths in candidates])
    there = np.array([[check.widths[name] for name in names] for check in known]).reshape(len(known), len(names))
    errors = np.log([check.measured[resource] / check.predicted[resource] for check in known])
    noise = np.array([safety_margin(check.relative_ci) / 2 for check in known])

    across, among = _error_covariance(here, there), _error_covariance(there, there)
    weights = np.linalg.solve(among + np.diag(noise**2), np.column_stack([errors, across.T]))
    variance = _COMMON_ERROR**2 + len(_FEATURES) * _GROUP_ERROR**2 - (across * weights[:, 1:].T).sum(1)
    return across @ weights[:, 0], np.sqrt(np.maximum(variance, 1e-18))


def _error_covariance(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.float64]:
    """Covariance of the errors of networks, which are rows of widths."""
    shared = [(feature(one)[:, None] == feature(other)[None]).mean(-1) for feature in _FEATURES]
    return np.asarray(_COMMON_ERROR**2 + _GROUP_ERROR**2 * sum(shared))


_FEATURES: tuple[Callable[[NDArray[np.int64]], NDArray[np.int64]], ...] = (
    lambda widths: widths,
    lambda widths: -(-widths // BLOCK),
    lambda widths: np.where(widths % BLOCK == 0, 2, widths % 2),
)
"""Of widths with the same error: the width itself, its block, and its alignment."""


def safety_margin(relative_ci: float | None) -> float:
    """What a measured cost stays below its limit, as a fraction: the confidence interval of the measurement."""
    smallest, largest = SAFETY_MARGIN
    return min(largest, max(smallest, relative_ci or 0.0))
