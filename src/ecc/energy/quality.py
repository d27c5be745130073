"""How well a family of models predicts what it has not seen: cross-validation, said in several ways.

The mean error at random widths flatters a model. Compression starts at the dense network and walks along a path of
ever smaller ones, so the error is also told there; bias is told beside spread, since an optimiser turns bias into a
missed budget; and the noise of the measurements is told, below which no model can get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ecc.errors import BadMeasurement

from .families import Family, folds
from .regression import Array
from .samples import Samples

FOLDS = 10
NEAR_DENSE = 0.6
"""Mean share of the widths from which a network counts as near dense."""

PATH = (0.15, 0.85)
"""Scaled networks, whose widths are all about equal shares, stand for the path of a compression between these."""
_PATH_SPREAD = 0.15  # standard deviation of the shares up to which a network counts as scaled

OUTLIER_NETWORKS = 5
"""So many networks must have a width before it can be called odd."""
OUTLIER_SIGMAS = 6.0
"""Standard errors by which they must stand out: profiles have hundreds of widths, and one in a million passes."""
OUTLIER_MIN_EXCESS = 0.03
"""The least excess that is told, and what a budget is allowed to be missed by."""

LEAST_ROWS = 12
"""Fewer cannot be cross-validated."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Relative errors on rows that a model was not fitted to, prediction / value - 1."""

    rows: int
    mean: float
    """Mean of their absolute values."""
    ninetieth: float
    """Nine in ten are below this."""
    largest: float
    bias: float
    """Mean of the errors themselves."""
    dense: float | None
    """At the dense network, left out of the fit; None if no row is dense."""
    dense_fitted: float | None = None
    """At the dense network in the final fit, which knows it: it is measured in every profile."""
    near_dense: float | None
    """Mean absolute error of networks near dense; None if there is none."""
    path: float | None
    """Mean absolute error of evenly scaled networks; None if there is none."""
    noise: float | None = None
    """Relative standard deviation of one measurement, from repeats; None if there were none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def cross_validated(family: Family, samples: Samples, count: int = FOLDS) -> Array:
    """Relative errors, each of a model that was fitted without the fold of the row.

    Raises:
        BadMeasurement: If there are too few rows.
    """
    check_rows(samples)
    fold = folds(len(samples), min(count, len(samples)))
    errors = np.empty(len(samples))
    for number in range(fold.max() + 1):
        here = fold == number
        model = family(samples.take(~here))
        errors[here] = model.at(samples.widths[here]) / samples.values[here] - 1
    return errors


def check_rows(samples: Samples) -> None:
    """Refuses samples too few to learn from.

    Raises:
        BadMeasurement: With the number that is needed.
    """
    if len(samples) < LEAST_ROWS:
        raise BadMeasurement(f"the profile holds {len(samples)} networks, and a fit needs {LEAST_ROWS}. Profile more.")


def quality_of(errors: Array, samples: Samples, noise: float | None = None) -> Quality:
    """What cross-validated errors amount to.

    Args:
        errors: One a row.
        samples: The rows.
        noise: Of one measurement.
    """
    size = np.abs(errors)
    shares = samples.mean_share
    positions = list(samples.structure.prunable)
    spread = (samples.widths[:, positions] / np.asarray(samples.structure.full_widths)[positions]).std(axis=1)
    path = (spread < _PATH_SPREAD) & (shares > PATH[0]) & (shares < PATH[1])
    dense = samples.is_dense
    near = (shares > NEAR_DENSE) & ~dense
    return Quality(
        rows=len(samples),
        mean=float(size.mean()),
        ninetieth=float(np.quantile(size, 0.9)),
        largest=float(size.max()),
        bias=float(errors.mean()),
        dense=float(errors[dense].mean()) if dense.any() else None,
        near_dense=float(size[near].mean()) if near.any() else None,
        path=float(size[path].mean()) if path.any() else None,
        noise=noise,
    )


def outlier_widths(errors: Array, samples: Samples) -> list[dict[str, Any]]:
    """Widths of single groups at which networks cost clearly more than was predicted.

    No model of ours lets a wider network cost less, and some devices do: where kernels for 16 channels are better than
    those for 12, the narrower network is the dearer one. Such a width spoils what is predicted of all others, and a
    method that chooses it misses its budget.

    Args:
        errors: Cross-validated ones, one a row.
        samples: The rows.

    Returns:
        Group, width, the number of networks, and the share by which they cost more; the worst first. A width has to
        have `OUTLIER_NETWORKS`, most of which cost more, and to stand out from the scatter of all by `OUTLIER_SIGMAS`.
    """
    excess = -np.log(np.maximum(1 + errors, 1e-3))  # of value / prediction
    scatter = max(float(excess.std()), OUTLIER_MIN_EXCESS / OUTLIER_SIGMAS)
    found = []
    for position in samples.structure.prunable:
        for width in np.unique(samples.widths[:, position]):
            here = samples.widths[:, position] == width
            if min(here.sum(), (~here).sum()) < OUTLIER_NETWORKS:
                continue
            mean, median = float(excess[here].mean()), float(np.median(excess[here]))
            stands_out = mean - excess[~here].mean() > OUTLIER_SIGMAS * scatter / np.sqrt(here.sum())
            if stands_out and min(mean, median) > OUTLIER_MIN_EXCESS:
                group = samples.structure.groups[position]
                found.append(
                    {"group": group, "width": int(width), "networks": int(here.sum()), "excess": math.expm1(mean)}
                )
    return sorted(found, key=lambda one: -one["excess"])


def learning_curve(family: Family, samples: Samples, sizes: Sequence[int], repeats: int = 3) -> dict[int, float]:
    """Mean absolute error on a fixed fifth of the rows, of models fitted to so many of the others.

    Args:
        family: What is fitted.
        samples: At least as many as the largest size and a fifth more; larger sizes are left out.
        sizes: Numbers of rows.
        repeats: Random choices of rows and of the fifth to average over.
    """
    curve: dict[int, list[float]] = {}
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(len(samples))
        held, rest = order[: len(order) // 5], order[len(order) // 5 :]
        for size in sizes:
            if not LEAST_ROWS <= size <= len(rest):
                continue
            model = family(samples.take(rest[:size]))
            errors = model.at(samples.widths[held]) / samples.values[held] - 1
            curve.setdefault(size, []).append(float(np.abs(errors).mean()))
    return {size: float(np.mean(errors)) for size, errors in curve.items()}
