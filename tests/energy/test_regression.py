from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from ecc.energy import regression
from ecc.energy.regression import Array, coefficients_of, left_out_errors

SEEDS = st.integers(0, 10_000)


def problem(seed: int, rows: int = 30, terms: int = 5) -> tuple[Array, Array, Array]:
    """Features of very different sizes, true coefficients (some 0), and what they give."""
    generator = np.random.default_rng(seed)
    features = generator.random((rows, terms)) * 10 ** generator.uniform(-3, 6, terms)
    coefficients = generator.random(terms) * 10 ** generator.uniform(-9, 0, terms) * (generator.random(terms) > 0.3)
    coefficients[0] += 1e-3
    return features, coefficients, features @ coefficients


def objective(
    c: Array, features: Array, values: Array, relative: bool, prior: Array, prior_scale: Array, s: float
) -> float:
    errors = features @ c - values
    errors = errors / values if relative else errors / values.mean()
    return float((errors**2).mean() + s * (((c - prior) / prior_scale) ** 2).sum())


@given(SEEDS, st.booleans())
def test_true_prices_are_found_where_there_is_no_noise(seed: int, relative: bool) -> None:
    features, coefficients, values = problem(seed)
    found = coefficients_of(features, values, relative=relative)
    assert features @ found == pytest.approx(values, rel=1e-8)
    contribution = features.mean(axis=0) * coefficients
    clear = contribution > 1e-6 * contribution.sum()
    assert found[clear] == pytest.approx(coefficients[clear], rel=1e-5)


@given(SEEDS, st.booleans(), st.sampled_from([0.0, 1e-3, 1.0]))
def test_no_other_prices_fit_better(seed: int, relative: bool, strength: float) -> None:
    """At the least of a convex function, under c >= 0, no step lowers it: neither a random one nor along an axis."""
    generator = np.random.default_rng(seed)
    features, prior, values = problem(seed)
    values = values * np.exp(0.3 * generator.standard_normal(len(values)))
    scale = values.mean() / features.mean(axis=0)
    prior_scale = scale * generator.uniform(0.1, 2, len(prior))
    found = coefficients_of(
        features, values, relative=relative, prior=prior, prior_scale=prior_scale, strength=strength
    )
    assert (found >= 0).all()
    least = objective(found, features, values, relative, prior, prior_scale, strength)
    steps = [*(generator.standard_normal((20, len(found))) * 1e-3), *(1e-3 * np.eye(5)), *(-1e-3 * np.eye(5))]
    for step in steps:
        other = (found + step * scale).clip(min=0)
        assert objective(other, features, values, relative, prior, prior_scale, strength) >= least - 1e-12


def test_a_general_minimiser_finds_the_same() -> None:
    features, prior, values = problem(3)
    values = values * np.exp(0.2 * np.random.default_rng(0).standard_normal(len(values)))
    scale = values.mean() / features.mean(axis=0)
    features, prior = features * scale, prior / scale  # so that all coefficients are about one
    prior_scale = np.full(5, 0.5)
    found = coefficients_of(features, values, prior=prior, prior_scale=prior_scale, strength=0.01)
    twin = minimize(
        objective, np.ones(5), (features, values, True, prior, prior_scale, 0.01), bounds=[(0, None)] * 5, tol=1e-14
    )
    assert found == pytest.approx(twin.x, abs=1e-5)


def test_relative_errors_weigh_a_cheap_network_as_much_as_a_dear_one() -> None:
    features, values = np.array([[1.0], [1.0]]), np.array([1.0, 100.0])
    assert coefficients_of(features, values, relative=False) == pytest.approx([50.5])  # the mean
    assert coefficients_of(features, values) == pytest.approx([(1 + 1e-2) / (1 + 1e-4)])  # sum of 1/v over sum of 1/v^2


def test_a_strong_pull_gives_the_prior_and_a_weak_one_the_fit() -> None:
    features, coefficients, values = problem(1)
    prior, prior_scale = 2 * coefficients + 1e-9, 1 / features.mean(axis=0) * values.mean()
    strong = coefficients_of(features, values, prior=prior, prior_scale=prior_scale, strength=1e8)
    weak = coefficients_of(features, values, prior=prior, prior_scale=prior_scale, strength=1e-14)
    assert features @ strong == pytest.approx(features @ prior, rel=1e-5)
    assert features @ weak == pytest.approx(values, rel=1e-4)


def test_a_price_without_rows_is_its_prior() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    values = np.array([3.0, 6.0])
    assert coefficients_of(features, values).tolist() == pytest.approx([3, 0])
    pulled = coefficients_of(features, values, prior=np.array([3.0, 7.0]), prior_scale=np.ones(2), strength=1e-3)
    assert pulled.tolist() == pytest.approx([3, 7])


@given(SEEDS)
def test_units_do_not_matter(seed: int) -> None:
    """Coefficients of millijoules are a thousand times those of joules, and MMACs cost a million times a MAC."""
    features, _, values = problem(seed)
    values = values * np.exp(0.1 * np.random.default_rng(seed).standard_normal(len(values)))
    units = 10.0 ** np.arange(5)
    assert coefficients_of(features / units, 1e3 * values) == pytest.approx(
        1e3 * units * coefficients_of(features, values), rel=1e-6, abs=1e-12
    )


def test_where_the_active_set_does_not_end_another_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    features, _, values = problem(2)

    def endless(*_: object, **__: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    expected = coefficients_of(features, values)
    monkeypatch.setattr(scipy.optimize, "nnls", endless)
    found = coefficients_of(features, values)
    assert (found >= 0).all()
    assert features @ found == pytest.approx(features @ expected, rel=1e-4)


@given(SEEDS, st.integers(2, 12), st.integers(1, 30), st.sampled_from([1e-4, 1e-2, 1.0, 100.0]))
def test_few_rows_of_many_prices_give_what_the_active_set_gives(
    seed: int, rows: int, more: int, strength: float
) -> None:
    """The two ways to the one minimum: by residuals, and by coefficients, which takes the cube of their number."""
    generator = np.random.default_rng(seed)
    features, prior, values = problem(seed, rows, rows + more)
    values = values * np.exp(0.3 * generator.standard_normal(rows))
    prior_scale = generator.uniform(0.1, 2, len(prior)) / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    found = coefficients_of(features, values, prior=prior, prior_scale=prior_scale, strength=strength)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "_drawn", lambda *_: None)
        expected = coefficients_of(features, values, prior=prior, prior_scale=prior_scale, strength=strength)
    assert found / prior_scale == pytest.approx(expected / prior_scale, rel=1e-6, abs=1e-9)
    assert (found >= 0).all()


def test_thousands_of_prices_never_meet_in_a_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with a thousand groups has so many; an active set over them took half a minute for one fit."""
    features, prior, values = problem(0, 20, 3000)
    prior_scale = 1 / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    monkeypatch.setattr(regression, "_nonnegative", lambda *_: pytest.fail("all coefficients at once"))
    found = coefficients_of(features, values * 1.1, prior=prior, prior_scale=prior_scale, strength=0.1)
    sizes: list[int] = []
    solve = np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda a, b: sizes.append(len(a)) or solve(a, b))
    errors = left_out_errors(features, values * 1.1, found, prior_scale=prior_scale, strength=0.1)
    assert np.isfinite(errors).all()
    assert sizes == [20]


@given(SEEDS, st.integers(3, 12), st.integers(1, 20))
def test_leaving_one_out_is_the_same_by_rows_and_by_prices(seed: int, rows: int, terms: int) -> None:
    features, prior, values = problem(seed, rows, terms)
    values = values * np.exp(0.1 * np.random.default_rng(seed).standard_normal(rows))
    prior_scale = 1 / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    errors = left_out_errors(features, values, prior, prior_scale=prior_scale, strength=0.1)
    used = prior > 0
    scaled = features[:, used] * prior_scale[used] / values[:, None] / np.sqrt(rows)
    hat = scaled @ np.linalg.inv(scaled.T @ scaled + 0.1 * np.eye(used.sum())) @ scaled.T
    expected = (features @ prior / values - 1) / (1 - np.diag(hat))
    assert errors == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_prior_that_is_true_already_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are exact: which coefficients are 0 is then a matter of rounding, and would never settle."""
    features, coefficients, values = problem(1, 20, 40)
    prior_scale = 1 / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    monkeypatch.setattr(regression, "_nonnegative", lambda *_: pytest.fail("did not get there"))
    found = coefficients_of(features, values, prior=coefficients, prior_scale=prior_scale, strength=1e-4)
    assert found / prior_scale == pytest.approx(
        coefficients / prior_scale, abs=1e-9 * (coefficients / prior_scale).max()
    )
