"""What the held-out errors of an energy model depend on; used by energy_fit.py for profiles that miss their goal.

The errors are modelled as a Gaussian process: a function of each width alone, a function of the input and the output width
of each layer, and a rest that follows no width. Amplitudes and correlation lengths maximise the likelihood. A part counts
if it raises the log-likelihood by more than `MIN_GAIN`. If no part does, more terms of that kind cannot help: the cost
then changes from one width to the next, as where a library selects kernels by shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from ecc.energy.families import physical
from ecc.energy.quality import cross_validate
from ecc.energy.regression import Samples

MIN_GAIN = 3.0
_LENGTHS = (8.0, 30.0, 100.0)  # starting points, in channels
_LIMITS = (2.0, 3000.0)
Array = NDArray[np.float64]


class Residuals(TypedDict):
    """Gains are in nats over the model in which all errors are independent."""

    std: float
    """Standard deviation of the logarithm of value / prediction."""
    gain_of_single_widths: float
    gain_of_pairs: float
    length_of_pairs: float
    """Channels over which errors of the same layer are alike."""


def residual_variance(samples: Samples) -> Residuals:
    """Likelihoods of the held-out errors of the physical model, without the ends of the range."""
    inner = ~samples.range_ends
    errors = -np.log1p(cross_validate(physical, samples)[inner].clip(min=-0.9))
    errors = errors - errors.mean()
    positions = list(samples.structure.prunable)
    widths = samples.widths[inner][:, positions]
    distances = np.abs(widths[:, None, :] - widths[None, :, :])
    pairs = _pairs(samples, positions)
    variance = float(errors.var())
    independent = -0.5 * len(errors) * (1 + float(np.log(variance)))
    single = _fit(errors, lambda length: np.exp(-distances / length).mean(axis=2), variance)

    def of_pairs(length: float) -> Array:
        near = np.exp(-distances / length)
        return np.asarray(np.mean([near[:, :, one] * near[:, :, other] for one, other in pairs], axis=0))

    pair = _fit(errors, of_pairs, variance) if pairs else (independent, 0.0)
    return {
        "std": float(np.sqrt(variance)),
        "gain_of_single_widths": max(0.0, single[0] - independent),
        "gain_of_pairs": max(0.0, pair[0] - independent),
        "length_of_pairs": pair[1],
    }


def _pairs(samples: Samples, positions: list[int]) -> list[tuple[int, int]]:
    """Prunable groups that are the input and the output of a layer."""
    place = {group: number for number, group in enumerate(positions)}
    found = set()
    for layer in samples.structure.layers:
        if layer.macs and layer.kind != "grouped conv":
            sides = ({place[g] for g, _ in size.multiples if g in place} for size in (layer.incoming, layer.outgoing))
            inputs, outputs = sides
            found |= {(min(one, other), max(one, other)) for one in inputs for other in outputs if one != other}
    return sorted(found)


def _fit(errors: Array, kernel: Callable[[float], Array], variance: float) -> tuple[float, float]:
    """Largest log-likelihood over amplitude, length and independent rest, and the length."""

    def loss(logs: Array) -> float:
        length, amplitude, rest = np.exp(logs)
        covariance = amplitude * kernel(length) + rest * np.eye(len(errors))
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e9
        white = np.linalg.solve(factor, errors)
        return float(0.5 * white @ white + np.log(np.diag(factor)).sum())

    limits = [tuple(np.log(_LIMITS)), *[(np.log(1e-6 * variance), np.log(4 * variance))] * 2]
    starts = [np.log([length, variance / 2, variance / 2]) for length in _LENGTHS]
    best = min((minimize(loss, start, method="L-BFGS-B", bounds=limits) for start in starts), key=lambda one: one.fun)
    return -float(best.fun), float(np.exp(best.x[0]))
