"""The two families of energy models that are sums of fitted terms: the paper's, and ours, which also has steps.

A family is a function from samples to a `FittedModel`; `fitting` chooses between them. The third, `Mlp`, is the paper's
ablation and is no such sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .features import AMOUNTS, Term, bilinear_terms, physical_terms
from .regression import Array, coefficients_of, left_out_errors
from .samples import Samples
from .step_terms import Step, steps_of


@dataclass(frozen=True)
class FittedModel:
    """Terms with their coefficients; `base` is what is spent at any widths."""

    kind: str
    base: float
    terms: tuple[Term, ...]
    coefficients: tuple[float, ...]
    unit_coefficients: tuple[float, ...] = ()
    """Of one of each of `AMOUNTS`, where terms were drawn to common coefficients."""
    strength: float | None = None
    """Of the pull to the common coefficients; None where there was none."""
    steps: tuple[Step, ...] = ()
    heights: tuple[float, ...] = ()
    """One a step, at least 0."""

    def at(self, widths: Array) -> Array:
        """The cost at each row of widths."""
        total = np.full(len(widths), self.base)
        for term, coefficient in zip(self.terms, self.coefficients, strict=True):
            if coefficient:
                total += coefficient * term.at(widths)
        for step, height in zip(self.steps, self.heights, strict=True):
            total += height * step.at(widths)
        return total


Family: TypeAlias = Callable[[Samples], FittedModel]


def bilinear(samples: Samples, *, relative: bool = True) -> FittedModel:
    """The paper's Eq. (3) over the channel graph: a_0 + sum of a_j in_j out_j, all of them at least 0.

    Args:
        samples: To fit to.
        relative: Squares relative errors; False squares joules, as the paper does.
    """
    terms = bilinear_terms(samples.structure)
    base, coefficients = _with_constant(terms, samples, relative)
    return FittedModel("bilinear", base, terms, coefficients)


def _with_constant(terms: tuple[Term, ...], samples: Samples, relative: bool) -> tuple[float, tuple[float, ...]]:
    features = np.stack([np.ones(len(samples)), *(term.at(samples.widths) for term in terms)], axis=1)
    base, *coefficients = coefficients_of(features, samples.values, relative=relative).tolist()
    return base, tuple(coefficients)


STRENGTHS = (1e-4, 1e-3, 0.01, 0.1, 1.0)
"""Pulls to the common coefficients that are tried, for `REFERENCE_ROWS` rows."""

REFERENCE_ROWS = 250
"""The pull does not grow with the rows: a short profile leans on physics, a long one on itself."""

_LEAST_SHARE = 0.02  # of the mean contribution: the least that the scale of a term is taken for


def physical(samples: Samples, *, strengths: Sequence[float] = STRENGTHS) -> FittedModel:
    """Common coefficients for MACs and bytes; each term has a coefficient of its own, drawn to them; and steps, drawn to none.

    A kernel costs what its MACs and bytes cost, more or less; which kernels a library picks at which shapes is known to
    no formula, and shows in coefficients of layers and in steps of sizes. With few rows the terms stay near the common
    coefficients, with more they move away from them. How far a term may move goes with the root of what it contributes.

    Args:
        samples: To fit to.
        strengths: Of the pull; the one with the least error on left-out rows is taken. None gives the common coefficients.
    """
    terms, steps = physical_terms(samples.structure), steps_of(samples.structure)
    columns = [*(term.at(samples.widths) for term in terms), *(step.at(samples.widths) for step in steps)]
    features = np.stack(columns, axis=1)
    common = _common_coefficients(terms, features[:, : len(terms)], samples)
    amounts = np.array([term.amounts for term in terms])
    prior = np.concatenate([amounts @ common[1:], np.zeros(len(steps))])
    prior[0] += common[0]  # the constant term also pays for being switched on and for launching kernels
    best, coefficients, strength = np.inf, prior, np.inf
    prior_scale = _slack(terms, steps, prior, features, samples)
    for tried in strengths:
        pull = tried * REFERENCE_ROWS / len(samples)
        found = coefficients_of(
            features, samples.values, importance=samples.weights, prior=prior, prior_scale=prior_scale, strength=pull
        )
        errors = left_out_errors(
            features, samples.values, found, importance=samples.weights, prior_scale=prior_scale, strength=pull
        )
        error = float(np.abs(errors).mean())
        if error < best:
            best, coefficients, strength = error, found, tried
    kept = [
        (step, height) for step, height in zip(steps, coefficients[len(terms) :].tolist(), strict=True) if height > 0
    ]
    return FittedModel(
        kind="physical",
        base=float(coefficients[0]),
        terms=terms[1:],
        coefficients=tuple(coefficients[1 : len(terms)].tolist()),
        unit_coefficients=tuple(common[1:].tolist()),
        strength=float(strength),
        steps=tuple(step for step, _ in kept),
        heights=tuple(height for _, height in kept),
    )


def _common_coefficients(terms: Sequence[Term], features: Array, samples: Samples) -> Array:
    """Of being switched on, and of each of `AMOUNTS`."""
    amounts = np.array([term.amounts for term in terms])
    pooled = np.column_stack([np.ones(len(samples)), features @ amounts])
    used = pooled.max(axis=0) > 0
    common = np.zeros(1 + len(AMOUNTS))
    common[used] = coefficients_of(pooled[:, used], samples.values, importance=samples.weights)
    return common


def _slack(terms: Sequence[Term], steps: Sequence[Step], prior: Array, features: Array, samples: Samples) -> Array:
    """How far each coefficient may be from its prior: in contributions, by the root of what physics expects of it.

    A step may be as high as the terms of its size and its layers let expect.
    """
    reach = np.sqrt(((features / samples.values[:, None]) ** 2).mean(axis=0))
    reach[reach == 0] = 1.0
    expected = prior * reach
    scale = np.empty(len(prior))
    scale[: len(terms)] = _scale(expected[: len(terms)])
    if steps:
        by_layer: dict[int, float] = {}
        by_group: dict[int, float] = {}
        for term, amount in zip(terms, expected, strict=False):
            groups = {group for extent in (term.left, term.right) for group, _ in extent.multiples}
            if term.right.multiples:
                by_layer[term.layers[0][0]] = by_layer.get(term.layers[0][0], 0.0) + float(amount)
            elif len(groups) == 1:
                by_group[groups.pop()] = float(amount)
        of_steps = np.array(
            [
                sum(by_group.get(group, 0.0) for group, _ in step.size.multiples)
                + sum(by_layer.get(layer, 0.0) for layer in step.layers)
                for step in steps
            ]
        )
        scale[len(terms) :] = _scale(of_steps)
    return np.asarray(scale / reach)


def _scale(contributions: Array) -> Array:
    scale = np.sqrt(contributions.clip(min=max(_LEAST_SHARE * float(contributions.mean()), 1e-300)))
    return np.asarray(scale / scale.mean())


def folds(count: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The fold of each row: random, of equal sizes, and always the same."""
    return np.random.default_rng(20190613).permutation(count) % number
