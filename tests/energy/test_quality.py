from __future__ import annotations

import numpy as np
import pytest

from ecc.energy.families import FittedModel, bilinear, folds
from ecc.energy.quality import (
    LEAST_ROWS,
    OUTLIER_NETWORKS,
    check_rows,
    cross_validated,
    learning_curve,
    outlier_widths,
    quality_of,
)
from ecc.energy.samples import Samples
from ecc.errors import BadMeasurement
from ecc.graph import StructureSpec
from energy.cases import authors_alexnet, random_fitted, samples_from, skeleton_of


def chain() -> StructureSpec:
    """Groups of 8 and 6 channels, and 4 that cannot be cut."""
    return skeleton_of("chain")


def chain_samples(*widths: tuple[int, int]) -> Samples:
    rows = np.array([(*pair, 4) for pair in widths], dtype=np.float64)
    return Samples(chain(), rows, np.ones(len(rows)))


# ---------------------------------------------------------------- errors that are told in several ways


def test_errors_are_summed_up_by_hand() -> None:
    samples = chain_samples((8, 6), (4, 3), (1, 6), (6, 5))
    quality = quality_of(np.array([0.3, -0.2, 0.4, -0.1]), samples, noise=0.03)
    assert quality.rows == 4
    assert quality.mean == pytest.approx(0.25)
    assert quality.bias == pytest.approx(0.1)
    assert quality.largest == pytest.approx(0.4)
    assert quality.ninetieth == pytest.approx(0.3 + 0.7 * 0.1)  # 0.9 * 3 steps along 0.1, 0.2, 0.3, 0.4
    assert quality.dense == pytest.approx(0.3)
    assert quality.near_dense == pytest.approx(0.1)  # (6, 5) alone: dense is told by itself
    assert quality.path == pytest.approx(0.15)  # (4, 3) and (6, 5); (1, 6) is uneven, dense is where a path starts
    assert quality.noise == 0.03
    assert quality.to_dict()["bias"] == quality.bias


def test_what_no_row_shows_is_not_told() -> None:
    quality = quality_of(np.array([0.1, -0.2]), chain_samples((1, 6), (8, 1)))
    assert (quality.dense, quality.near_dense, quality.path, quality.noise) == (None, None, None, None)


def test_a_dense_error_keeps_its_sign() -> None:
    assert quality_of(np.array([-0.1, 0.2]), chain_samples((8, 6), (4, 3))).dense == pytest.approx(-0.1)


# ---------------------------------------------------------------- cross-validation


def test_every_row_is_predicted_by_a_model_that_has_not_seen_it() -> None:
    """A twin that fits once for each row, without the fold of the row."""
    samples = samples_from(random_fitted("physical", chain()), chain(), 25, noise=0.1)
    fold = folds(25, 10)
    expected = []
    for number in range(25):
        model = bilinear(samples.take(fold != fold[number]))
        expected.append(model.at(samples.widths[[number]])[0] / samples.values[number] - 1)
    assert cross_validated(bilinear, samples).tolist() == pytest.approx(expected, rel=1e-9)


def test_rows_are_never_shown_to_the_model_that_predicts_them() -> None:
    samples = samples_from(random_fitted("bilinear", chain()), chain(), 30)
    samples = Samples(chain(), samples.widths, np.arange(1.0, 31.0))  # each row can be told by its value

    class Memory:
        """Knows the values that it was shown, and gives them away."""

        def __init__(self, shown: Samples) -> None:
            self.values = set(shown.values.tolist())

        def at(self, widths: np.ndarray) -> np.ndarray:
            held = [v for v in samples.values.tolist() if v not in self.values]
            assert len(held) == len(widths)
            return np.array(held)

    errors = cross_validated(Memory, samples)  # type: ignore[arg-type] # looks like a model
    assert errors.tolist() == [0.0] * 30


def test_a_true_family_has_no_error_and_noise_is_what_is_left() -> None:
    structure, truth = skeleton_of("alexnet"), authors_alexnet()
    assert np.abs(cross_validated(bilinear, samples_from(truth, structure, 60))).max() < 1e-6
    noisy = np.abs(cross_validated(bilinear, samples_from(truth, structure, 300, noise=0.02)))
    assert noisy.mean() == pytest.approx(0.02 * np.sqrt(2 / np.pi), abs=0.0025)  # mean of |N(0, 0.02)|


def test_too_few_rows_are_refused_with_the_number_that_is_needed() -> None:
    few = samples_from(random_fitted("bilinear", chain()), chain(), LEAST_ROWS - 1)
    for refuse in (check_rows, lambda samples: cross_validated(bilinear, samples)):
        with pytest.raises(BadMeasurement, match=r"the profile holds 11 networks, and a fit needs 12\. Profile more"):
            refuse(few)
    enough = samples_from(random_fitted("bilinear", chain()), chain(), LEAST_ROWS)
    check_rows(enough)
    assert len(cross_validated(bilinear, enough)) == LEAST_ROWS


# ---------------------------------------------------------------- widths that cost more than wider ones


def random_chain(count: int, seed: int = 0) -> Samples:
    draw = np.random.default_rng(seed)
    rows = np.stack([2 * draw.integers(1, 5, count), draw.integers(1, 7, count), np.full(count, 4)], axis=1)
    return Samples(chain(), rows.astype(np.float64), np.ones(count))


def test_a_width_that_costs_more_than_predicted_is_named() -> None:
    samples = random_chain(80)
    odd = samples.widths[:, 0] == 6
    excess = np.where(odd, 0.15, -0.01) + 0.02 * np.random.default_rng(1).standard_normal(80)
    (found,) = outlier_widths(1 / (1 + excess) - 1, samples)
    assert (found["group"], found["width"], found["networks"]) == (chain().groups[0], 6, odd.sum())
    assert found["excess"] == pytest.approx(excess[odd].mean(), rel=0.01)


def test_several_are_named_the_worst_first() -> None:
    samples = random_chain(200)
    excess = np.where(samples.widths[:, 0] == 6, 0.1, 0.0) + np.where(samples.widths[:, 1] == 3, 0.2, 0.0)
    found = outlier_widths(1 / (1 + excess) - 1, samples)
    assert [(one["group"], one["width"]) for one in found] == [(chain().groups[1], 3), (chain().groups[0], 6)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scatter", [1e-9, 0.02, 0.3])
def test_scatter_alone_is_not_odd(seed: int, scatter: float) -> None:
    samples = random_chain(80, seed)
    assert outlier_widths(scatter * np.random.default_rng(100 + seed).standard_normal(80), samples) == []


def test_little_excess_and_few_networks_are_not_odd() -> None:
    samples = random_chain(80)
    odd = samples.widths[:, 0] == 6
    assert outlier_widths(np.where(odd, -0.02, 0.0), samples) == []  # no budget is missed by it
    assert outlier_widths(np.where(odd, 0.2, 0.0), samples) == []  # it costs less than predicted
    few = samples.take(np.flatnonzero(~odd | (np.cumsum(odd) < OUTLIER_NETWORKS)))
    assert outlier_widths(np.where(few.widths[:, 0] == 6, -0.2, 0.0), few) == []


def test_a_prediction_of_nothing_is_no_reason_to_fail() -> None:
    samples = random_chain(80)
    found = outlier_widths(np.where(samples.widths[:, 0] == 6, -1.0, 0.0), samples)
    assert found[0]["excess"] == pytest.approx(999)


# ---------------------------------------------------------------- learning curves


def test_the_error_falls_with_rows() -> None:
    structure = skeleton_of("alexnet")
    samples = samples_from(authors_alexnet(), structure, 250, noise=0.05)
    curve = learning_curve(bilinear, samples, (15, 50, 200))
    assert list(curve) == [15, 50, 200]
    assert curve[15] > curve[50] > curve[200]
    assert 0.03 < curve[200] < 0.05  # the noise is left


def test_sizes_that_cannot_be_are_left_out() -> None:
    samples = samples_from(random_fitted("bilinear", chain()), chain(), 50)
    assert list(learning_curve(bilinear, samples, (5, 11, 12, 40, 41, 50))) == [12, 40]  # a fifth is held out
    assert learning_curve(bilinear, samples, ()) == {}


def test_held_out_rows_are_not_among_those_that_are_fitted() -> None:
    samples = samples_from(random_fitted("bilinear", chain()), chain(), 50)
    samples = Samples(chain(), samples.widths, np.arange(1.0, 51.0))
    shown: list[set[float]] = []

    def family(some: Samples) -> FittedModel:
        shown.append(set(some.values.tolist()))
        return bilinear(some)

    learning_curve(family, samples, (20, 40), repeats=2)
    assert [len(values) for values in shown] == [20, 40, 20, 40]
    assert shown[0] < shown[1]  # a larger size holds the smaller one
    assert shown[1] != shown[3]  # another fifth is held out
