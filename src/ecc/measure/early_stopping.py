"""Stop a profile when more samples no longer improve a fit.

The quick fit has five terms: a constant, MACs, MACs of grouped convolutions, bytes of activations and bytes of weights,
each with a coefficient of at least 0. It is not the energy model that is used later. But errors that it cannot reduce
with more samples, such as noise and steps of the hardware, remain for better models too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph

from .profile import Profile

FitError: TypeAlias = Callable[[ChannelGraph, Profile], float | None]
"""Cross-validated relative error of a fit of a profile; None with too few samples."""

CHECK_EVERY = 10
"""Samples between two checks of the error."""

MIN_SAMPLES = 40
"""Fewest samples before stopping: with fewer, a low error may be luck."""

_FOLDS = 5
_MIN_TO_FIT = 10
_CHECKS_BELOW_TARGET = 2  # consecutive checks below the target
_PATIENCE = 5  # checks without improvement before stopping
_IMPROVEMENT = 0.05  # relative decrease that counts as improvement


def parse_share(text: str) -> float:
    """Parse a fraction, such as `2%` or `0.02`."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise BadMeasurement(f"{text!r} is not a fraction; write 2% or 0.02.") from None


def quick_error(graph: ChannelGraph, profile: Profile) -> float | None:
    """Mean relative error of the quick fit in five-fold cross-validation; None with fewer than ten samples."""
    from scipy.optimize import nnls  # slow to import

    samples = profile.corrected(allow_drift=True)
    if len(samples) < _MIN_TO_FIT:
        return None
    joules = np.array([sample.joules for sample in samples])
    terms = _features(graph, [profile.widths_by_group(sample.widths) for sample in samples])
    # Dividing by the joules makes least squares minimise relative errors.
    relative = terms / terms.max(axis=0).clip(min=1) / joules[:, None]
    fold = np.arange(len(samples)) % _FOLDS
    errors = np.empty(len(samples))
    for number in range(_FOLDS):
        coefficients, _ = nnls(relative[fold != number], np.ones(int((fold != number).sum())))
        errors[fold == number] = relative[fold == number] @ coefficients - 1
    return float(np.abs(errors).mean())


def _features(graph: ChannelGraph, configurations: list[dict[str, int]]) -> NDArray[np.float64]:
    """One row per configuration: 1, MACs, MACs of grouped convolutions, activation bytes, weight bytes."""
    grouped = torch.tensor([layer.kind == "grouped conv" for layer in graph.layers])
    rows = []
    for configuration in configurations:
        widths = graph.widths(configuration)
        macs = graph.costs.macs_per_layer(widths)
        activation, weight = graph.costs.activation_bytes(widths), graph.costs.weight_bytes(widths)
        rows.append([1.0, float(macs[~grouped].sum()), float(macs[grouped].sum()), float(activation), float(weight)])
    return np.array(rows)


def check_points(samples: int) -> list[int]:
    """Sample counts at which the error is checked: every ten, and every tenth part of large profiles."""
    found = [CHECK_EVERY]
    while found[-1] <= samples:
        found.append(found[-1] + max(1, found[-1] // (10 * CHECK_EVERY)) * CHECK_EVERY)
    return found[:-1]


class EarlyStop:
    """Checks the error while a profile grows; without a target error, a profile is never stopped.

    The decision depends only on the profile, so an interrupted profile stops at the same sample.
    """

    def __init__(self, graph: ChannelGraph, target_error: float | None, fit_error: FitError = quick_error) -> None:
        self.error: float | None = None
        """Error at the last check."""
        self._graph, self._target_error, self._fit_error = graph, target_error, fit_error
        self._errors: dict[int, float | None] = {}
        self._checked_at = 0

    def is_due(self, samples: int) -> bool:
        """Whether the error must be checked at this number of samples."""
        points = check_points(samples) if samples > self._checked_at else []
        return bool(points) and points[-1] > self._checked_at

    def reason(self, profile: Profile) -> str | None:
        """Check the error. Returns a reason to stop, or None to continue."""
        counts = check_points(len(profile.design_samples))
        if not counts:
            return None
        self._checked_at = counts[-1]
        self.error = self._error_at(counts[-1], profile)
        counts = [count for count in counts if count >= MIN_SAMPLES]
        if self._target_error is None or self.error is None or not counts:
            return None
        latest = [self._error_at(count, profile) for count in counts[-_CHECKS_BELOW_TARGET:]]
        if len(latest) == _CHECKS_BELOW_TARGET and all(e is not None and e < self._target_error for e in latest):
            found = f"{self.error:.2%}, below {self._target_error:.2%}"
            return f"the error of a quick fit is {found}, with {counts[-1]} samples"
        if len(counts) <= _PATIENCE:
            return None
        before, *since = (self._error_at(count, profile) for count in counts[-_PATIENCE - 1 :])
        if before is not None and all(e is not None and e > (1 - _IMPROVEMENT) * before for e in since):
            return (
                f"the error of a quick fit no longer improves: {before:.2%} with {counts[-_PATIENCE - 1]} samples, "
                f"{self.error:.2%} with {counts[-1]}"
            )
        return None

    def _error_at(self, count: int, profile: Profile) -> float | None:
        if count not in self._errors:
            self._errors[count] = self._fit_error(self._graph, profile.head(count))
        return self._errors[count]
