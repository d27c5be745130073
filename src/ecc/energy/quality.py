"""Quality of a fit: cross-validated errors, outlier widths and learning curves.

The mean error at random widths flatters a model. Compression starts at the dense network and follows a path of ever
smaller ones, so the error there is reported as well. Bias is reported beside the mean error, because an optimizer turns
bias into a missed budget, and so is the measurement noise, which no model can get below.

Every profile contains the dense network and the smallest one, and both without branches where branches can be removed.
A model is only asked about networks between them, so these ends of the range (`Samples.range_ends`) belong to every fit
of the cross-validation. Their own errors, when left out, are reported separately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ecc.measure.profile import Profile

from .cost import Array
from .families import FAMILIES, Family
from .regression import MIN_SAMPLES, RESOURCES, Samples, check_sample_count, folds

FOLDS = 10
NEAR_DENSE = 0.6
"""Mean width ratio from which a network counts as near dense."""

UNIFORM_RATIOS = (0.15, 0.85)
"""Mean width ratios of uniformly scaled networks that stand for the path of a compression."""
_UNIFORM_STD = 0.15  # standard deviation of the width ratios up to which a network counts as uniformly scaled

OUTLIER_SAMPLES = 5
"""Fewest networks with a width before it can be an outlier."""
OUTLIER_SIGMAS = 6.0
"""Standard errors by which outliers must differ: profiles have hundreds of widths to test."""
OUTLIER_MIN_EXCESS = 0.03
"""Smallest excess that is reported; a budget may be missed by as much."""
OUTLIERS_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class FitErrors:
    """Relative errors of one family on samples that it was not fitted to: prediction / value - 1."""

    samples: int
    """All samples. Mean, p90, max and bias leave out the ends of the range."""
    mean: float
    """Mean absolute error."""
    p90: float
    """90th percentile of the absolute error."""
    max: float
    """Largest absolute error."""
    bias: float
    """Mean signed error."""
    dense: float | None
    """Error at the dense network, left out of the fit; None if it was not sampled."""
    dense_fitted: float | None = None
    """Error at the dense network in the final fit, which includes it."""
    smallest: float | None = None
    """Error at the network with the lowest cost, left out of the fit."""
    ends: int = 0
    """Number of samples at the ends of the range: the dense and the smallest network, and both without branches."""
    max_at_ends: float | None = None
    """Largest absolute error at the ends of the range, each left out of the fit."""
    near_dense: float | None
    """Mean absolute error of networks near dense; None if there are none."""
    uniform: float | None
    """Mean absolute error of uniformly scaled networks; None if there are none."""


@dataclass(frozen=True)
class OutlierWidth:
    """A width of one group at which networks cost clearly more than predicted."""

    group: str
    width: int
    samples: int
    excess: float
    """Mean relative excess of the cost over the prediction."""


@dataclass(frozen=True, kw_only=True)
class FitQuality:
    """Everything that a fit reports about itself."""

    families: dict[str, FitErrors] = field(default_factory=dict)
    """Errors by family; `EnergyModel.kind` is the chosen one."""
    noise: float | None = None
    """Relative standard deviation of one measurement; None without repeated measurements."""
    outlier_widths: tuple[OutlierWidth, ...] = ()
    learning_curve: tuple[tuple[int, float], ...] = ()
    """(number of samples, mean absolute error) of the chosen family."""
    held_out: tuple[tuple[float, float], ...] = ()
    """(value, prediction of a model fitted without it) of every sample."""


def cross_validate(family: Family, samples: Samples) -> Array:
    """Relative error of each sample under a model that was fitted without its fold.

    Each end of the range is a fold of its own; see the module.
    """
    check_sample_count(samples)
    ends = samples.range_ends
    number = min(FOLDS, int((~ends).sum()))
    fold = np.empty(len(samples), dtype=np.intp)
    fold[~ends] = folds(int((~ends).sum()), number)
    fold[ends] = number + np.arange(ends.sum())
    errors = np.empty(len(samples))
    for each in range(fold.max() + 1):
        here = fold == each
        model = family(samples.take(~here))
        errors[here] = model.at(samples.widths[here]) / samples.values[here] - 1
    return errors


def summarize_errors(errors: Array, samples: Samples, dense_fitted: float | None = None) -> FitErrors:
    """Statistics of cross-validated errors."""
    size = np.abs(errors)
    ratios = samples.width_ratios
    mean_ratio = ratios.mean(axis=1)
    low, high = UNIFORM_RATIOS
    uniform = (ratios.std(axis=1) < _UNIFORM_STD) & (mean_ratio > low) & (mean_ratio < high)
    dense, inner = samples.is_dense, ~samples.range_ends
    near = (mean_ratio > NEAR_DENSE) & ~dense
    return FitErrors(
        samples=len(samples),
        mean=float(size[inner].mean()),
        p90=float(np.quantile(size[inner], 0.9)),
        max=float(size[inner].max()),
        bias=float(errors[inner].mean()),
        smallest=float(errors[np.argmin(samples.values)]),
        ends=int((~inner).sum()),
        max_at_ends=float(size[~inner].max()),
        dense=float(errors[dense].mean()) if dense.any() else None,
        dense_fitted=dense_fitted,
        near_dense=float(size[near].mean()) if near.any() else None,
        uniform=float(size[uniform].mean()) if uniform.any() else None,
    )


def evaluate_family(name: str, samples: Samples, errors: Array) -> FitErrors:
    """Statistics of cross-validated errors, with the error at the dense network in a fit to all samples."""
    dense = samples.take(samples.is_dense)
    if not len(dense):
        return summarize_errors(errors, samples)
    fitted = FAMILIES[name](samples).at(dense.widths) / dense.values - 1
    return summarize_errors(errors, samples, float(fitted.mean()))


def measurement_noise(profile: Profile, resource: str = "energy") -> float | None:
    """Relative standard deviation of one measurement: from rounds if there are several, else from the reference."""
    name, _ = RESOURCES[resource]
    noise, drift = profile.repeat_noise_of_field(name), profile.drift_of_field(name)
    is_run = profile.header.device_type is not None  # an analytic reference is the same each time
    return drift.noise if noise is None and is_run and drift is not None and drift.references > 2 else noise


def find_outlier_widths(errors: Array, samples: Samples) -> tuple[OutlierWidth, ...]:
    """Widths of single groups at which networks cost clearly more than predicted, the worst first.

    The models know that sizes which are not a multiple of 8 to 64 may cost more, and that a wider network otherwise
    costs at least as much. A width that does not fit spoils the prediction of all others, and a method that chooses it
    misses its budget. A width needs `OUTLIER_SAMPLES` networks, most of which cost more, and must differ from the
    spread of all (cross-validated) errors by `OUTLIER_SIGMAS` standard errors.
    """
    excess = -np.log(np.maximum(1 + errors, 1e-3))  # log(value / prediction)
    std = max(float(excess.std()), OUTLIER_MIN_EXCESS / OUTLIER_SIGMAS)
    found = []
    for position in samples.structure.prunable:
        for width in np.unique(samples.widths[:, position]):
            here = samples.widths[:, position] == width
            if width == 0:  # a removed branch
                continue
            if min(here.sum(), (~here).sum()) < OUTLIER_SAMPLES:
                continue
            mean, median = float(excess[here].mean()), float(np.median(excess[here]))
            is_significant = mean - excess[~here].mean() > OUTLIER_SIGMAS * std / np.sqrt(here.sum())
            if is_significant and min(mean, median) > OUTLIER_MIN_EXCESS:
                group = samples.structure.groups[position]
                found.append(OutlierWidth(group, int(width), int(here.sum()), math.expm1(mean)))
    return tuple(sorted(found, key=lambda one: -one.excess))


def learning_curve(
    family: Family, samples: Samples, sizes: Sequence[int], repeats: int = 3
) -> tuple[tuple[int, float], ...]:
    """(number of samples, mean absolute error on a held-out fifth) for models fitted to growing parts of the rest.

    Sizes that are too small or too large are left out. The error is a mean over some random splits.
    """
    curve: dict[int, list[float]] = {}
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(len(samples))
        held, rest = order[: len(order) // 5], order[len(order) // 5 :]
        for size in sizes:
            if not MIN_SAMPLES <= size <= len(rest):
                continue
            model = family(samples.take(rest[:size]))
            errors = model.at(samples.widths[held]) / samples.values[held] - 1
            curve.setdefault(size, []).append(float(np.abs(errors).mean()))
    return tuple((size, float(np.mean(errors))) for size, errors in curve.items())


# ---------------------------------------------------------------- advice


def describe_learning_curve(quality: FitQuality) -> str:
    """One sentence on whether more samples would help; empty without a learning curve."""
    if len(quality.learning_curve) < 3:
        return ""
    curve = sorted(quality.learning_curve)
    (size, before), (full, last) = curve[-3], curve[-1]
    digits = 1 if f"{before:.1%}" != f"{last:.1%}" else 2
    trend = f"{before:.{digits}%} with {size} samples, {last:.{digits}%} with {full}"
    if quality.noise is not None and last < 1.25 * quality.noise:
        return f"More samples will not help: the error ({trend}) is at the measurement noise of {quality.noise:.1%}."
    if last < 0.9 * before:
        return f"More samples would help: the error still falls ({trend})."
    return f"More samples will hardly help: the error no longer falls ({trend})."


def describe_outlier_widths(quality: FitQuality) -> str:
    """A sentence on widths that cost more than wider ones; empty if there are none."""
    found = quality.outlier_widths
    if not found:
        return ""
    shown = [
        f"{one.excess:.1%} with {one.width} channels in {one.group} ({one.samples} networks)"
        for one in found[:OUTLIERS_SHOWN]
    ]
    more = f", and {len(found) - OUTLIERS_SHOWN} more widths" if len(found) > OUTLIERS_SHOWN else ""
    return (
        f"Some widths cost more than predicted: {', '.join(shown)}{more}. Profile with a larger --width-multiple, or "
        "exclude the group with --freeze."
    )
