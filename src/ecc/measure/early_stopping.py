"""How well a profile can be learnt so far, and whether more samples still help.

The model is the quickest that is physical: a constant, MACs, MACs of grouped convolutions, bytes of activations
and bytes of weights, each with a price of at least 0. It is no energy model to compress with, but what it cannot
learn from more samples, noise and steps of the hardware, a better model will hardly learn either.
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

ErrorOf: TypeAlias = Callable[[ChannelGraph, Profile], float | None]
"""Cross-validated relative error of a model on a profile; None as long as there are too few samples."""

CHECK_EVERY = 10
"""Rows from one look at the error to the next."""

MIN_SAMPLES = 40
"""No profile is stopped before: fewer samples agree by luck. In simulation 40 already beat the paper's 3 %."""

_FOLDS = 5
_MIN_TO_LEARN = 10
_IN_A_ROW = 2  # looks at which the error must be below its target
_PATIENCE = 5  # looks without improvement after which more samples are taken to be in vain
_IMPROVEMENT = 0.05  # a relative fall of the error that counts as one


def parse_share(text: str) -> float:
    """The share that `2%` or `0.02` names.

    Raises:
        BadMeasurement: If it is neither.
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / (100 if percent else 1)
    except ValueError:
        raise BadMeasurement(f"{text!r} is not a share; write it as 2% or 0.02.") from None


def quick_error(graph: ChannelGraph, profile: Profile) -> float | None:
    """Mean relative error of five pooled physical terms on samples they were not fitted to.

    Args:
        graph: Counts MACs and bytes.
        profile: Of this graph.

    Returns:
        The error, five-fold; None with fewer than ten networks.
    """
    from scipy.optimize import nnls  # a quarter of a second, which most commands need not spend

    samples = profile.corrected(allow_drift=True)
    if len(samples) < _MIN_TO_LEARN:
        return None
    joules = np.array([sample.joules for sample in samples])
    terms = features(graph, [profile.named(sample.widths) for sample in samples])
    # Divided by the joules, least squares minimise relative errors.
    relative = terms / terms.max(axis=0).clip(min=1) / joules[:, None]
    fold = np.arange(len(samples)) % _FOLDS
    errors = np.empty(len(samples))
    for number in range(_FOLDS):
        coefficients, _ = nnls(relative[fold != number], np.ones(int((fold != number).sum())))
        errors[fold == number] = relative[fold == number] @ coefficients - 1
    return float(np.abs(errors).mean())


def features(graph: ChannelGraph, networks: list[dict[str, int]]) -> NDArray[np.float64]:
    """One row a network: 1, MACs, MACs of grouped convolutions, activation bytes, weight bytes."""
    grouped = torch.tensor([layer.kind == "grouped conv" for layer in graph.layers])
    rows = []
    for named in networks:
        widths = graph.widths(named)
        macs = graph.costs.macs_per_layer(widths)
        activation, weight = graph.costs.activation_bytes(widths), graph.costs.weight_bytes(widths)
        rows.append([1.0, float(macs[~grouped].sum()), float(macs[grouped].sum()), float(activation), float(weight)])
    return np.array(rows)


def looks(networks: int) -> list[int]:
    """At how many networks the error is looked at, up to a number: every ten, and every tenth part when it is many."""
    found = [CHECK_EVERY]
    while found[-1] <= networks:
        found.append(found[-1] + max(1, found[-1] // (10 * CHECK_EVERY)) * CHECK_EVERY)
    return found[:-1]


class EarlyStop:
    """Watches the error while a profile grows.

    What it says depends on the profile alone and not on when it was asked, so that a profile that was
    interrupted stops at the same sample.

    Args:
        graph: Of the profile.
        target_error: The error to reach; None never stops.
        error_of: The model that is learnt.
    """

    def __init__(self, graph: ChannelGraph, target_error: float | None, error_of: ErrorOf = quick_error) -> None:
        self.error: float | None = None
        """At the last look."""
        self._graph, self._target_error, self._error_of = graph, target_error, error_of
        self._errors: dict[int, float | None] = {}
        self._looked_at = 0

    def is_due(self, networks: int) -> bool:
        """Whether it is time for a look that was not made."""
        return networks > self._looked_at and bool(looks(networks)) and looks(networks)[-1] > self._looked_at

    def reason(self, profile: Profile) -> str | None:
        """Looks at the error: why to stop, or None to go on."""
        counts = looks(len(profile.design_samples))
        if not counts:
            return None
        self._looked_at = counts[-1]
        self.error = self._at(counts[-1], profile)
        counts = [count for count in counts if count >= MIN_SAMPLES]
        if self._target_error is None or self.error is None or not counts:
            return None
        latest = [self._at(count, profile) for count in counts[-_IN_A_ROW:]]
        if len(latest) == _IN_A_ROW and all(error is not None and error < self._target_error for error in latest):
            return (
                f"the error of the fit is {self.error:.2%}, below {self._target_error:.2%}, with {counts[-1]} networks"
            )
        if len(counts) <= _PATIENCE:
            return None
        before, *since = (self._at(count, profile) for count in counts[-_PATIENCE - 1 :])
        if before is not None and all(e is not None and e > (1 - _IMPROVEMENT) * before for e in since):
            return (
                f"the error of the fit has stopped improving: {before:.2%} with {counts[-_PATIENCE - 1]} "
                f"networks, {self.error:.2%} with {counts[-1]}"
            )
        return None

    def _at(self, count: int, profile: Profile) -> float | None:
        if count not in self._errors:
            self._errors[count] = self._error_of(self._graph, profile.first(count))
        return self._errors[count]
