"""Non-negative least squares with a prior, and the samples of a profile."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy import regression
from ecc.energy.cost import Array
from ecc.energy.regression import RESOURCES, fit_coefficients, folds, leave_one_out_errors, samples_from_profile
from ecc.errors import BadFile, BadMeasurement
from ecc.measure import Profile, Sample
from energy.cases import computed
from measure.profile_cases import profile_of, reference, sample, small_graph

SEEDS = st.integers(0, 10_000)


def problem(seed: int, rows: int = 30, terms: int = 5) -> tuple[Array, Array, Array]:
    """Features of very different sizes, true coefficients (some 0), and the values they give."""
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
def test_true_coefficients_are_found_without_noise(seed: int, relative: bool) -> None:
    features, coefficients, values = problem(seed)
    found = fit_coefficients(features, values, relative=relative)
    assert features @ found == pytest.approx(values, rel=1e-8)
    contribution = features.mean(axis=0) * coefficients
    clear = contribution > 1e-6 * contribution.sum()
    assert found[clear] == pytest.approx(coefficients[clear], rel=1e-5)


@given(SEEDS, st.booleans(), st.sampled_from([0.0, 1e-3, 1.0]))
def test_no_other_coefficients_fit_better(seed: int, relative: bool, strength: float) -> None:
    """At the minimum of a convex function under c >= 0 no step lowers it, random or along an axis."""
    generator = np.random.default_rng(seed)
    features, prior, values = problem(seed)
    values = values * np.exp(0.3 * generator.standard_normal(len(values)))
    scale = values.mean() / features.mean(axis=0)
    prior_scale = scale * generator.uniform(0.1, 2, len(prior))
    options = {"prior": prior, "prior_scale": prior_scale, "strength": strength}
    found = fit_coefficients(features, values, relative=relative, **options)  # type: ignore[arg-type] # mixed
    assert (found >= 0).all()
    least = objective(found, features, values, relative, prior, prior_scale, strength)
    steps = [*(generator.standard_normal((20, len(found))) * 1e-3), *(1e-3 * np.eye(5)), *(-1e-3 * np.eye(5))]
    for step in steps:
        other = (found + step * scale).clip(min=0)
        assert objective(other, features, values, relative, prior, prior_scale, strength) >= least - 1e-12


def test_relative_and_weighted_errors_by_hand() -> None:
    features, values = np.array([[1.0], [1.0]]), np.array([1.0, 100.0])
    assert fit_coefficients(features, values, relative=False) == pytest.approx([50.5])  # the mean
    assert fit_coefficients(features, values) == pytest.approx([(1 + 1e-2) / (1 + 1e-4)])  # sum 1/v over sum 1/v^2
    weighted = fit_coefficients(features, values, relative=False, weights=np.array([3.0, 1.0]))
    assert weighted == pytest.approx([(3 * 1 + 100) / 4])
    prior = {"prior": np.array([3.0, 7.0]), "prior_scale": np.ones(2), "strength": 1e-3}
    unseen = fit_coefficients(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([3.0, 6.0]), **prior)  # type: ignore[arg-type] # mixed
    assert unseen.tolist() == pytest.approx([3, 7])  # a term that is always 0 keeps its prior


def test_strength_of_the_prior_does_not_grow_with_the_samples() -> None:
    features, coefficients, values = problem(1)
    prior, prior_scale = 2 * coefficients + 1e-9, 1 / features.mean(axis=0) * values.mean()
    options = {"prior": prior, "prior_scale": prior_scale}
    strong, weak, middle = (fit_coefficients(features, values, strength=s, **options) for s in (1e8, 1e-14, 0.1))
    assert features @ strong == pytest.approx(features @ prior, rel=1e-5)
    assert features @ weak == pytest.approx(values, rel=1e-4)
    twice = fit_coefficients(np.tile(features, (2, 1)), np.tile(values, 2), strength=0.1, **options)
    assert twice == pytest.approx(middle, rel=1e-6)


def test_interior_point_method_is_used_when_the_active_set_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    features, _, values = problem(2)

    def endless(*_: object, **__: object) -> None:
        raise RuntimeError("Maximum number of iterations reached.")

    expected = fit_coefficients(features, values)
    monkeypatch.setattr(scipy.optimize, "nnls", endless)
    found = fit_coefficients(features, values)
    assert (found >= 0).all()
    assert features @ found == pytest.approx(features @ expected, rel=1e-4)


@given(SEEDS, st.integers(2, 12), st.integers(1, 30), st.sampled_from([1e-4, 1e-2, 1.0, 100.0]))
def test_dual_solver_equals_the_active_set(seed: int, rows: int, more: int, strength: float) -> None:
    generator = np.random.default_rng(seed)
    features, prior, values = problem(seed, rows, rows + more)
    values = values * np.exp(0.3 * generator.standard_normal(rows))
    prior_scale = generator.uniform(0.1, 2, len(prior)) / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    found = fit_coefficients(features, values, prior=prior, prior_scale=prior_scale, strength=strength)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "_solve_dual", lambda *_: None)
        expected = fit_coefficients(features, values, prior=prior, prior_scale=prior_scale, strength=strength)
    assert found / prior_scale == pytest.approx(expected / prior_scale, rel=1e-6, abs=1e-9)
    assert (found >= 0).all()


@pytest.mark.parametrize(("terms", "noise"), [(3000, 1.1), (40, 1.0)])
def test_dual_solver_scales_to_many_terms_and_accepts_an_exact_prior(
    terms: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An active set over 3,000 terms took half a minute. An exact prior leaves the active set to rounding."""
    features, prior, values = problem(1, 20, terms)
    prior_scale = 1 / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    monkeypatch.setattr(regression, "_nonnegative", lambda *_: pytest.fail("the dual solver did not converge"))
    found = fit_coefficients(features, values * noise, prior=prior, prior_scale=prior_scale, strength=1e-4)
    assert features @ found == pytest.approx(values * noise, rel=0.05)
    sizes: list[int] = []
    solve = np.linalg.solve
    monkeypatch.setattr(np.linalg, "solve", lambda a, b: sizes.append(len(a)) or solve(a, b))
    errors = leave_one_out_errors(features, values * noise, found, prior_scale=prior_scale, strength=0.1)
    assert np.isfinite(errors).all()
    assert sizes == [20]


@given(SEEDS, st.integers(3, 12), st.integers(1, 20))
def test_leave_one_out_errors_follow_from_the_hat_matrix(seed: int, rows: int, terms: int) -> None:
    features, prior, values = problem(seed, rows, terms)
    values = values * np.exp(0.1 * np.random.default_rng(seed).standard_normal(rows))
    prior_scale = 1 / np.sqrt(((features / values[:, None]) ** 2).mean(axis=0))
    errors = leave_one_out_errors(features, values, prior, prior_scale=prior_scale, strength=0.1)
    used = prior > 0
    scaled = features[:, used] * prior_scale[used] / values[:, None] / np.sqrt(rows)
    hat = scaled @ np.linalg.inv(scaled.T @ scaled + 0.1 * np.eye(used.sum())) @ scaled.T
    expected = (features @ prior / values - 1) / (1 - np.diag(hat))
    assert errors == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(st.integers(0, 300), st.integers(1, 20))
@settings(max_examples=30)
def test_folds_have_equal_sizes_and_are_deterministic(count: int, number: int) -> None:
    fold = folds(count, number)
    sizes = np.bincount(fold, minlength=number)
    assert (len(fold), len(sizes)) == (count, number)
    assert sizes.max() - sizes.min() <= 1
    assert fold.tolist() == folds(count, number).tolist()


# ---------------------------------------------------------------- samples of a profile

STEADY = (reference(2.0), sample(0, 0.5, seconds=0.1), sample(1, 0.7, (8, 6), seconds=0.2), reference(2.01))


def test_samples_have_all_groups_and_one_dense_row() -> None:
    samples = samples_from_profile(profile_of(*STEADY))
    assert samples.structure == small_graph().structure
    assert samples.widths.tolist() == [[4, 3, 4], [8, 6, 4], [16, 12, 4]]  # the head is not prunable
    assert samples.values.tolist() == [0.5, 0.7, 2.005]
    assert samples.weights is not None
    assert samples.weights.tolist() == [1, 1, 2]  # the reference was measured twice
    assert samples.is_dense.tolist() == [False, False, True]
    assert samples.width_ratios.mean(axis=1).tolist() == [0.25, 0.5, 1.0]
    assert samples_from_profile(profile_of(*STEADY), "latency").values.tolist() == [0.1, 0.2, 1e-3]
    for some in ([0, 2], np.array([0, 2]), np.array([True, False, True])):
        assert samples.take(some).values.tolist() == [0.5, 2.005]
        assert samples.take(some).widths.tolist() == [[4, 3, 4], [16, 12, 4]]
    assert len(samples_from_profile(Profile(profile_of().header, (sample(0), sample(1))))) == 2  # no reference


def test_groups_are_found_by_name_and_dense_samples_join_the_reference() -> None:
    samples = samples_from_profile(
        profile_of(sample(0, widths=(3, 4)), groups=("second", "first"), full_widths=(12, 16))
    )
    assert samples.widths.tolist() == [[4, 3, 4]]
    samples = samples_from_profile(profile_of(reference(2.0), sample(0, 1.9, (16, 12)), reference(2.0)))
    assert samples.values.tolist() == [2.0]
    assert samples.weights is not None
    assert samples.weights.tolist() == [3]


def test_rounds_are_combined_and_drift_is_divided_out() -> None:
    rounds = [sample(0, joules, round=number) for number, joules in enumerate((1.0, 3.0, 1.1))]
    assert samples_from_profile(profile_of(*rounds)).values.tolist() == [1.1]
    drifting: list[Sample] = []
    for number in range(11):
        warm = 1 + 0.004 * (number - 5)
        drifting += [reference(2 * warm), sample(number, 0.5 * warm)]
    assert samples_from_profile(profile_of(*drifting)).values[:-1] == pytest.approx([0.5] * 11, rel=0.004)
    profile = computed("digits", "jetson-tx2")
    found = {tuple(widths) for widths in samples_from_profile(profile).widths.tolist()}
    for network in profile.corrected():
        assert tuple(profile.header.structure.widths(profile.widths_by_group(network.widths)).tolist()) in found


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        *((sample(17, joules=value), f"{value} joules and") for value in (math.nan, 0.0, -1.0)),
        (sample(17, seconds=math.inf), r"1\.0 joules and inf seconds; both must be above 0"),
        (reference(math.nan), "nan joules and"),
        (sample(0, math.nan, round=1), "nan joules and"),
        *((sample(9, widths=w), "widths .* do not fit") for w in ((17, 3), (4, 0), (4,), (4, 3, 4))),
        (sample(0, 1.1), "sample 0 of round 0 is already in measurement 2 of the profile. Remove one"),
    ],
)
@pytest.mark.parametrize("resource", RESOURCES)
def test_invalid_samples_are_refused_by_their_number(resource: str, bad: Sample, message: str) -> None:
    with pytest.raises(BadFile, match=f"^measurement 3 of the profile: {message}"):
        samples_from_profile(profile_of(reference(2.0), sample(0), bad, reference(2.0)), resource)


def test_drift_and_unknown_resources_are_refused() -> None:
    unsteady = profile_of(reference(2.0), sample(0), reference(2.3), sample(1), reference(2.0))
    with pytest.raises(BadMeasurement, match=r"varied by 8\.2%"):
        samples_from_profile(unsteady)
    assert len(samples_from_profile(unsteady, allow_drift=True)) == 3
    with pytest.raises(BadFile, match="does not hold 'macs'; choose energy or latency"):
        samples_from_profile(profile_of(*STEADY), "macs")
