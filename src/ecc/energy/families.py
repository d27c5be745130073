"""The two families of energy models that are sums of priced terms: the paper's, and ours.

A family is a function from samples to a `Priced`; `fitting` chooses between them. The third, `Mlp`, is the paper's
ablation and is no such sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .features import AMOUNTS, Array, Term, bilinear_terms, physical_terms
from .regression import prices_of
from .samples import Samples


@dataclass(frozen=True)
class Priced:
    """Terms with their prices; `base` is what is spent at any widths."""

    kind: str
    base: float
    terms: tuple[Term, ...]
    prices: tuple[float, ...]
    unit_prices: tuple[float, ...] = ()
    """Of one of each of `AMOUNTS`, where terms were drawn to common prices."""
    strength: float | None = None
    """Of the pull to the common prices; None where there was none."""

    def at(self, widths: Array) -> Array:
        """The cost at each row of widths."""
        total = np.full(len(widths), self.base)
        for term, price in zip(self.terms, self.prices, strict=True):
            if price:
                total += price * term.at(widths)
        return total


Family: TypeAlias = Callable[[Samples], Priced]


def bilinear(samples: Samples, *, relative: bool = True) -> Priced:
    """The paper's Eq. (3) over the channel graph: a_0 + sum of a_j in_j out_j, all of them at least 0.

    Args:
        samples: To fit to.
        relative: Squares relative errors; False squares joules, as the paper does.
    """
    terms = bilinear_terms(samples.skeleton)
    base, prices = _with_constant(terms, samples, relative)
    return Priced("bilinear", base, terms, prices)


def _with_constant(terms: tuple[Term, ...], samples: Samples, relative: bool) -> tuple[float, tuple[float, ...]]:
    features = np.stack([np.ones(len(samples)), *(term.at(samples.widths) for term in terms)], axis=1)
    base, *prices = prices_of(features, samples.values, relative=relative).tolist()
    return base, tuple(prices)


STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, np.inf)
"""Pulls to the common prices that are tried; the last gives the common prices themselves."""

_LEAST_SHARE = 0.02  # of the mean contribution: how far a term may rise that has no price before
_INNER_FOLDS = 5


def physical(samples: Samples, *, strength: float | None = None) -> Priced:
    """Common prices for MACs and bytes; and each term has its own, drawn to what the common ones give.

    A kernel costs what its MACs and bytes cost, more or less: which kernels a library picks at which shapes is
    known to no formula. With few rows the terms stay near the common prices, with more they move away from them.

    Args:
        samples: To fit to.
        strength: Of the pull; chosen by cross-validation within the samples if None.
    """
    terms = physical_terms(samples.skeleton)
    if strength is None:
        strength = _chosen_strength(terms, samples)
    return _physical(terms, samples, strength)


def _physical(terms: tuple[Term, ...], samples: Samples, strength: float) -> Priced:
    features = np.stack([term.at(samples.widths) for term in terms], axis=1)
    amounts = np.array([term.amounts for term in terms])
    pooled = np.column_stack([np.ones(len(samples)), features @ amounts])
    used = pooled.max(axis=0) > 0
    common = np.zeros(1 + len(AMOUNTS))
    common[used] = prices_of(pooled[:, used], samples.values)
    prior = amounts @ common[1:]
    prior[0] += common[0]  # the constant term also pays for being switched on and for launching kernels
    if np.isinf(strength):
        prices = prior
    else:
        reach = np.sqrt(((features / samples.values[:, None]) ** 2).mean(axis=0)).clip(min=1e-300)
        contribution = prior * reach
        least = _LEAST_SHARE * contribution.sum() / len(terms)
        slack = np.sqrt(contribution.clip(min=least)) / reach
        prices = prices_of(features, samples.values, prior=prior, slack=slack, strength=strength)
    base, rest = float(prices[0]), tuple(prices[1:].tolist())
    return Priced("physical", base, terms[1:], rest, tuple(common[1:].tolist()), strength)


def _chosen_strength(terms: tuple[Term, ...], samples: Samples) -> float:
    """The pull that predicts best, five-fold; the stronger of two that do equally well."""
    fold = folds(len(samples), _INNER_FOLDS)
    errors = []
    for strength in STRENGTHS:
        squares = 0.0
        for number in range(_INNER_FOLDS):
            here = fold == number
            model = _physical(terms, samples.take(~here), strength)
            squares += float(np.abs(model.at(samples.widths[here]) / samples.values[here] - 1).sum())
        errors.append(squares)
    best = min(errors)
    return float(next(s for s, error in reversed(list(zip(STRENGTHS, errors, strict=True))) if error <= 1.01 * best))


def folds(count: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """The fold of each row: random, of equal sizes, and always the same."""
    return np.random.default_rng(20190613).permutation(count) % number
