"""Cross-validation, outlier widths, learning curves, and the advice drawn from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecc.energy.families import FittedModel, bilinear, physical
from ecc.energy.quality import (
    OUTLIER_SAMPLES,
    cross_validate,
    find_outlier_widths,
    learning_curve,
    measurement_noise,
    summarize_errors,
)
from ecc.energy.regression import MIN_SAMPLES, Samples, check_sample_count, folds, samples_from_profile
from ecc.errors import BadMeasurement
from ecc.graph import StructureSpec, trace_channels
from ecc.measure import find_meter, profile
from energy.cases import authors_alexnet, random_fitted, samples_from, structure_of
from graph.branch_nets import NETWORKS, built
from measure.profile_cases import profile_of, reference, sample


def chain() -> StructureSpec:
    """Groups of 8 and 6 channels, and one of 4 that is not prunable."""
    return structure_of("chain")


def chain_samples(*widths: tuple[int, int]) -> Samples:
    rows = np.array([(*pair, 4) for pair in widths], dtype=np.float64)
    return Samples(chain(), rows, np.ones(len(rows)))


def numbered(count: int) -> Samples:
    """Samples that can be told apart by their values 1, 2, ..."""
    samples = samples_from(random_fitted("bilinear", chain()), chain(), count)
    return Samples(chain(), samples.widths, np.arange(1.0, count + 1))


def test_errors_are_summarised_by_hand() -> None:
    samples = chain_samples((8, 6), (4, 3), (1, 6), (6, 5), (1, 1))
    samples.values[-1] = 0.5
    errors = summarize_errors(np.array([0.3, -0.2, 0.4, -0.1, 2.0]), samples)
    assert errors.samples == 5
    # without the dense and the smallest network
    assert errors.mean == pytest.approx(0.7 / 3)
    assert errors.bias == pytest.approx(0.1 / 3)
    assert errors.max == pytest.approx(0.4)
    assert errors.p90 == pytest.approx(0.2 + 0.8 * 0.2)  # 0.9 * 2 steps along 0.1, 0.2, 0.4
    assert (errors.dense, errors.smallest) == pytest.approx((0.3, 2.0))
    assert (errors.ends, errors.max_at_ends) == (2, 2.0)
    assert errors.near_dense == pytest.approx(0.1)  # (6, 5) only; dense is separate
    assert errors.uniform == pytest.approx(0.15)  # (4, 3) and (6, 5); (1, 6) is not uniform, dense is above the range
    assert summarize_errors(np.array([-0.1, 0.2]), chain_samples((8, 6), (4, 3))).dense == pytest.approx(-0.1)
    none = summarize_errors(np.array([0.1, -0.2]), chain_samples((1, 6), (8, 1)))
    assert (none.dense, none.near_dense, none.uniform, none.dense_fitted) == (None, None, None, None)


def test_ends_of_the_range_with_and_without_branches() -> None:
    structure = trace_channels(*built(*NETWORKS["basic"][:2]), verify=False).structure
    full = np.array(structure.full_widths, dtype=np.float64)
    inside = sorted({group for groups in structure.branch_groups for group in groups})
    stems = np.array([(number in inside) for number in range(len(full))])
    least = np.where(np.array(structure.min_widths) == full, full, 1.0)
    none, small = np.where(stems, 0, full), np.where(stems, 0, least)
    part = full.copy()
    part[list(structure.branch_groups[0])] = 0
    rows = np.stack([full, 0.5 * full, least, part, none, 0.5 * none, small])
    samples = Samples(structure, rows, np.array([9.0, 5.0, 3.0, 7.0, 2.0, 1.5, 1.0]))
    assert samples.range_ends.tolist() == [True, False, True, False, True, False, True]
    apart = replace(samples, structure=replace(structure, branches=(), replacements=()))
    assert apart.range_ends.tolist() == [True, False, False, False, False, False, True]
    no_dense = samples.take([1, 3])
    assert no_dense.range_ends.tolist() == [True, False]


def test_the_smallest_network_with_a_branch_does_not_count_as_an_error(tmp_path: Path) -> None:
    """Only one network is small and has its branch; without it the fit extrapolates, and the report says so.

    A cost per misaligned layer stands for the kernels of a GPU.
    """
    net, x = built(*NETWORKS["basic"][:2])
    graph = trace_channels(net, x, verify=False)
    made = profile(net, graph, x, find_meter("platform:jetson-tx2"), tmp_path / "a.profile", samples=30)
    samples = samples_from_profile(made)
    extra = 0.3 * samples.values.max() * ((samples.widths % 4 > 0) & (samples.widths > 1)).mean(axis=1)
    samples = replace(samples, values=samples.values + extra)
    found = summarize_errors(cross_validate(physical, samples), samples)
    assert found.ends == 4
    assert found.max_at_ends is not None
    assert found.max_at_ends > found.max
    assert found.mean < 0.1


def test_each_sample_is_predicted_by_a_model_fitted_without_its_fold() -> None:
    samples = samples_from(random_fitted("physical", chain()), chain(), 25, noise=0.1)
    ends = samples.is_dense | (samples.values == samples.values.min())
    assert ends.sum() == 1  # no dense network among these
    fold = np.full(25, -1)
    fold[~ends] = folds(24, 10)
    expected = []
    for number in range(25):
        model = bilinear(samples.take(fold != fold[number]))
        expected.append(model.at(samples.widths[[number]])[0] / samples.values[number] - 1)
    assert cross_validate(bilinear, samples).tolist() == pytest.approx(expected, rel=1e-9)


def test_cross_validated_error_of_the_true_family_is_the_noise() -> None:
    structure, truth = structure_of("alexnet"), authors_alexnet()
    assert np.abs(cross_validate(bilinear, samples_from(truth, structure, 60))).max() < 1e-6
    noisy = np.abs(cross_validate(bilinear, samples_from(truth, structure, 300, noise=0.02)))
    assert noisy.mean() == pytest.approx(0.02 * np.sqrt(2 / np.pi), abs=0.0025)  # mean of |N(0, 0.02)|


def test_too_few_samples_are_refused() -> None:
    few = numbered(MIN_SAMPLES - 1)
    for refuse in (check_sample_count, lambda samples: cross_validate(bilinear, samples)):
        with pytest.raises(BadMeasurement, match=r"the profile has 11 samples; a fit needs 12\. Profile more"):
            refuse(few)
    assert len(cross_validate(bilinear, numbered(MIN_SAMPLES))) == MIN_SAMPLES


def test_noise_comes_from_rounds_or_from_the_reference() -> None:
    factor = math.exp(0.02 * math.sqrt(2))
    rounds = [sample(i, joules, round=r) for i in range(50) for r, joules in enumerate((1.0, factor))]
    assert measurement_noise(profile_of(*rounds)) == pytest.approx(0.02)
    references = [reference(2.0 * math.exp(0.01 * (-1) ** k)) for k in range(20)]
    measured = profile_of(sample(0), *references, device_type="cpu")
    assert measurement_noise(measured) == pytest.approx(0.01 * math.sqrt(2), rel=1e-6)
    assert measurement_noise(profile_of(sample(0), *references)) is None  # an analytic platform repeats itself
    assert measurement_noise(profile_of(sample(0), reference(2.0), reference(2.0))) is None


def test_noise_and_drift_are_those_of_the_resource() -> None:
    """Seconds may be steady where joules are not."""
    rows = [replace(sample(i, 1.0 + 0.05 * r, round=r), seconds=2.0 + 0.002 * r) for i in range(30) for r in (0, 1)]
    references = [replace(reference(2.0 * (1 + 0.1 * k)), seconds=3.0 * (1 + 0.001 * (-1) ** k)) for k in range(6)]
    profile = profile_of(*rows, *references, device_type="cpu")
    latency, energy = (measurement_noise(profile, resource) for resource in ("latency", "energy"))
    assert latency == pytest.approx(0.001 / math.sqrt(2), rel=0.1)
    assert energy is not None
    assert energy > 0.02
    with pytest.raises(BadMeasurement, match="the joules of the dense reference varied by 1"):
        samples_from_profile(profile)
    assert len(samples_from_profile(profile, "latency")) > 1


# ---------------------------------------------------------------- outlier widths


def random_chain(count: int, seed: int = 0) -> Samples:
    generator = np.random.default_rng(seed)
    rows = np.stack([2 * generator.integers(1, 5, count), generator.integers(1, 7, count), np.full(count, 4)], axis=1)
    return Samples(chain(), rows.astype(np.float64), np.ones(count))


def test_widths_that_cost_more_than_predicted_are_found_worst_first() -> None:
    samples = random_chain(200)
    narrow, other = samples.widths[:, 0] == 6, samples.widths[:, 1] == 3
    noise = 0.02 * np.random.default_rng(1).standard_normal(200)
    (found,) = find_outlier_widths(1 / (1 + np.where(narrow, 0.15, -0.01) + noise) - 1, samples)
    assert (found.group, found.width, found.samples) == (chain().groups[0], 6, narrow.sum())
    assert found.excess == pytest.approx(0.15, abs=0.01)
    both = find_outlier_widths(1 / (1 + np.where(narrow, 0.1, 0.0) + np.where(other, 0.2, 0.0)) - 1, samples)
    assert [(one.group, one.width) for one in both] == [(chain().groups[1], 3), (chain().groups[0], 6)]
    zero = find_outlier_widths(np.where(narrow, -1.0, 0.0), samples)  # a prediction of 0 must not fail
    assert zero[0].excess == pytest.approx(999)


@pytest.mark.parametrize("noise", [1e-9, 0.02, 0.3])
def test_noise_alone_gives_no_outliers(noise: float) -> None:
    for seed in range(20):
        errors = noise * np.random.default_rng(100 + seed).standard_normal(80)
        assert find_outlier_widths(errors, random_chain(80, seed)) == ()


def test_small_excess_savings_and_few_samples_are_no_outliers() -> None:
    samples = random_chain(80)
    narrow = samples.widths[:, 0] == 6
    assert find_outlier_widths(np.where(narrow, -0.02, 0.0), samples) == ()  # below the tolerance of a budget
    assert find_outlier_widths(np.where(narrow, 0.2, 0.0), samples) == ()  # costs less than predicted
    for count, found in ((OUTLIER_SAMPLES - 1, 0), (OUTLIER_SAMPLES, 1)):
        few = samples.take(np.flatnonzero(~narrow | (np.cumsum(narrow) <= count)))
        assert len(find_outlier_widths(np.where(few.widths[:, 0] == 6, -0.2, 0.0), few)) == found


# ---------------------------------------------------------------- learning curves


def test_learning_curve_fits_only_samples_that_are_not_held_out() -> None:
    fitted: list[set[float]] = []

    def family(some: Samples) -> FittedModel:
        fitted.append(set(some.values.tolist()))
        return bilinear(some)

    curve = learning_curve(family, numbered(50), (5, 11, 12, 40, 41, 50), repeats=2)
    assert [size for size, _ in curve] == [12, 40]  # a fifth of 50 is held out
    assert [len(values) for values in fitted] == [12, 40, 12, 40]
    assert fitted[0] < fitted[1]  # a larger size contains the smaller one
    assert fitted[1] != fitted[3]  # another fifth is held out
    held = {float(value) for value in 1 + np.random.default_rng(0).permutation(50)[:10]}
    assert not held & fitted[1]
