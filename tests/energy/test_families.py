from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy.families import FittedModel, bilinear, folds, physical
from ecc.energy.features import AMOUNTS
from ecc.energy.samples import Samples, samples_from_profile
from energy.cases import (
    AUTHORS_BIAS,
    NETWORKS,
    TERMS,
    authors_alexnet,
    computed,
    random_fitted,
    random_widths,
    samples_from,
    skeleton_of,
    slow_value,
)

FAMILIES = {"bilinear": bilinear, "physical": physical}


def noisy(samples: Samples, noise: float, seed: int = 0) -> Samples:
    scatter = np.exp(noise * np.random.default_rng(seed).standard_normal(len(samples)))
    return Samples(samples.structure, samples.widths, samples.values * scatter)


# ---------------------------------------------------------------- fitted terms


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", TERMS)
def test_a_model_is_the_sum_of_its_terms(kind: str, name: str) -> None:
    fitted, widths = random_fitted(kind, skeleton_of(name)), random_widths(skeleton_of(name), 5)
    assert fitted.at(widths).tolist() == pytest.approx([slow_value(fitted, row) for row in widths], rel=1e-12)


# ---------------------------------------------------------------- the paper's


def test_the_authors_model_gives_their_energy_of_dense_alexnet() -> None:
    full = np.array([skeleton_of("alexnet").full_widths], dtype=np.float64)
    assert authors_alexnet().at(full)[0] == pytest.approx(0.0498, abs=5e-5)


@pytest.mark.parametrize("relative", [True, False])
def test_the_authors_coefficients_are_found_again(relative: bool) -> None:
    """From 300 uniform random networks, as many as the paper measures."""
    truth, structure = authors_alexnet(), skeleton_of("alexnet")
    found = bilinear(samples_from(truth, structure, 300), relative=relative)
    assert found.kind == "bilinear"
    assert found.terms == truth.terms
    assert found.base == pytest.approx(AUTHORS_BIAS, rel=0.01)
    assert found.coefficients == pytest.approx(truth.coefficients, rel=0.01, abs=0)


def test_noise_moves_the_authors_coefficients_little() -> None:
    truth, structure = authors_alexnet(), skeleton_of("alexnet")
    found = bilinear(samples_from(truth, structure, 300, noise=0.02))
    probe = random_widths(structure, 100, seed=7)
    assert np.abs(found.at(probe) / truth.at(probe) - 1).mean() < 0.005


@pytest.mark.parametrize("name", NETWORKS)
def test_a_bilinear_truth_is_predicted_exactly(name: str) -> None:
    structure = skeleton_of(name)
    truth = random_fitted("bilinear", structure, seed=3)
    found = bilinear(samples_from(truth, structure, 60))
    probe = random_widths(structure, 20, seed=5)
    assert found.at(probe) == pytest.approx(truth.at(probe), rel=1e-6)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("kind", FAMILIES)
@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.05, 0.5]))
@settings(max_examples=15)
def test_prices_are_never_negative(kind: str, seed: int, noise: float) -> None:
    """Whatever is measured, noise of half the value among it: so a model is nonnegative and monotone."""
    structure = skeleton_of(NETWORKS[seed % len(NETWORKS)])
    found = FAMILIES[kind](
        samples_from(random_fitted("physical", structure, seed), structure, 20, seed=seed, noise=noise)
    )
    assert found.base >= 0
    assert min(found.coefficients) >= 0
    assert len(found.coefficients) == len(found.terms)
    assert all(coefficient >= 0 for coefficient in found.unit_coefficients)
    assert np.isfinite([found.base, *found.coefficients]).all()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_same_rows_give_the_same_model(kind: str) -> None:
    samples = noisy(samples_from_profile(computed("digits", "jetson-tx2")), 0.02)
    assert FAMILIES[kind](samples) == FAMILIES[kind](samples)


@pytest.mark.parametrize("kind", FAMILIES)
def test_millijoules_are_learnt_as_joules_are(kind: str) -> None:
    samples = noisy(samples_from_profile(computed("digits", "jetson-tx2")), 0.02)
    small = Samples(samples.structure, samples.widths, samples.values * 1e-3)
    one, other = FAMILIES[kind](samples), FAMILIES[kind](small)
    probe = random_widths(samples.structure, 20)
    assert 1e3 * other.at(probe) == pytest.approx(one.at(probe), rel=1e-3)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_constant_is_learnt_as_a_constant(kind: str) -> None:
    """A device that is all overhead: no width changes anything."""
    structure = skeleton_of("residual")
    widths = random_widths(structure, 40)
    found = FAMILIES[kind](Samples(structure, widths, np.full(40, 3.0)))
    assert found.at(random_widths(structure, 10, seed=1)) == pytest.approx(np.full(10, 3.0), rel=5e-3)


# ---------------------------------------------------------------- ours


@pytest.mark.parametrize("platform", ["jetson-tx2", "gtx-1080-ti", "eyeriss"])
@pytest.mark.parametrize("name", ["digits", "mobilenet_v1"])
def test_networks_that_were_not_seen_are_predicted(name: str, platform: str) -> None:
    samples = samples_from_profile(computed(name, platform))
    found = physical(samples.take(np.arange(len(samples)) % 2 == 0))
    others = samples.take(np.arange(len(samples)) % 2 == 1)
    assert np.abs(found.at(others.widths) / others.values - 1).mean() < 0.005


def test_few_noisy_rows_are_enough_where_the_paper_s_family_needs_many() -> None:
    """30 networks of MobileNet, with 28 layers: more coefficients than rows that could tell them apart."""
    truth = samples_from_profile(computed("mobilenet_v1", "jetson-tx2"))
    few = noisy(truth, 0.02).take(range(30))
    errors = {kind: np.abs(fit(few).at(truth.widths) / truth.values - 1).mean() for kind, fit in FAMILIES.items()}
    assert errors["physical"] < 0.015
    assert errors["physical"] < errors["bilinear"]


def test_prices_of_macs_and_bytes_are_told() -> None:
    found = physical(samples_from_profile(computed("digits", "jetson-tx2")))
    assert found.kind == "physical"
    assert len(found.unit_coefficients) == len(AMOUNTS)
    assert max(found.unit_coefficients) > 0
    assert found.strength is not None


def test_a_chosen_strength_is_kept() -> None:
    assert physical(samples_from_profile(computed("digits", "jetson-tx2")), strengths=(0.01,)).strength == 0.01


def test_a_term_that_costs_alone_is_learnt_in_spite_of_the_common_coefficients() -> None:
    """One layer at ten times the coefficient of the others, as a badly chosen kernel costs it."""
    structure = skeleton_of("alexnet")
    truth = authors_alexnet()
    coefficients = (truth.coefficients[0], 10 * truth.coefficients[1], *truth.coefficients[2:])
    odd = FittedModel("bilinear", truth.base, truth.terms, coefficients)
    found = physical(samples_from(odd, structure, 200))
    probe = random_widths(structure, 50, seed=1)
    assert np.abs(found.at(probe) / odd.at(probe) - 1).mean() < 0.02


# ---------------------------------------------------------------- folds


@given(st.integers(0, 300), st.integers(1, 20))
def test_folds_are_of_equal_size_and_always_the_same(count: int, number: int) -> None:
    fold = folds(count, number)
    sizes = np.bincount(fold, minlength=number)
    assert len(fold) == count
    assert len(sizes) == number
    assert sizes.max() - sizes.min() <= 1
    assert fold.tolist() == folds(count, number).tolist()


def test_folds_are_not_in_the_order_of_the_rows() -> None:
    assert folds(100, 10).tolist() != [row % 10 for row in range(100)]
