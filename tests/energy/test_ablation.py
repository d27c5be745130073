"""The paper's own way to fit, and the data of the figures of a fit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from paper_fit import HIDDEN_LAYERS, HIDDEN_WIDTH, ITERATIONS, draw_curves, fit_with_adam, paper_curves
from torch import nn

from ecc.energy import fit
from ecc.energy.ablation import FitAblation, run_ablation
from ecc.energy.families import bilinear
from ecc.energy.regression import Samples, folds
from ecc.measure import Profile
from ecc.records import from_json, to_json
from energy.cases import AUTHORS_BIAS, authors_alexnet, random_widths, samples_from, structure_of

H200 = Path(__file__).parents[2] / "profiles" / "h200"


@cache
def alexnet_samples(noise: float = 0.0) -> Samples:
    """As many as the paper measures, from the authors' own model."""
    return samples_from(authors_alexnet(), structure_of("alexnet"), 300, noise=noise)


def probe() -> np.ndarray:
    return random_widths(structure_of("alexnet"), 100, seed=11)


@pytest.mark.thorough
def test_10000_iterations_find_the_authors_coefficients() -> None:
    found = fit_with_adam(alexnet_samples())
    assert found.model is not None
    assert found.model.base == pytest.approx(AUTHORS_BIAS, rel=0.01)
    assert found.model.coefficients == pytest.approx(authors_alexnet().coefficients, rel=0.01, abs=0)
    assert list(found.curve)[-1] == ITERATIONS


def test_adam_and_least_squares_agree() -> None:
    """Ten times the paper's learning rate and a fifth of its iterations, on the same four fifths of the samples."""
    samples = alexnet_samples(0.02)
    found = fit_with_adam(samples, learning_rate=1e-2, iterations=2000)
    train = samples.take(folds(len(samples), 5) != 0)
    assert found.model is not None
    assert found.model.at(probe()) == pytest.approx(bilinear(train, relative=False).at(probe()), rel=0.01)
    errors = list(found.curve.values())
    assert errors[5] < 0.2 * errors[0]


def test_coefficients_stay_nonnegative_and_held_out_samples_are_not_fitted() -> None:
    samples = alexnet_samples()
    decreasing = Samples(samples.structure, samples.widths, 1 / samples.values)
    found = fit_with_adam(decreasing, learning_rate=1e-2, iterations=500).model
    assert found is not None
    assert found.base >= 0 == min(found.coefficients)
    held = folds(len(samples), 5) == 0
    wrong = Samples(samples.structure, samples.widths, np.where(held, 3 * samples.values, samples.values))
    options = {"learning_rate": 1e-2, "iterations": 1500, "weight_decay": 0.0}
    curve = fit_with_adam(wrong, **options).curve  # type: ignore[arg-type] # mixed
    assert curve[1500] == pytest.approx(2 / 3, abs=0.01)  # predicted as a third of the wrong value


@pytest.mark.parametrize("hidden_layers", [1, 2, 3])
def test_the_mlp_has_the_layers_of_the_paper_and_learns(hidden_layers: int) -> None:
    torch.manual_seed(hidden_layers)  # the global generator has no influence
    found = fit_with_adam(alexnet_samples(), hidden_layers=hidden_layers, iterations=205, log_every=20)
    shapes = [tuple(layer.weight.shape) for layer in found.network if isinstance(layer, nn.Linear)]
    assert shapes == [(128, 8), *[(HIDDEN_WIDTH, HIDDEN_WIDTH)] * (hidden_layers - 1), (1, 128)]
    assert found.model is None
    assert list(found.curve)[-2:] == [200, 205]
    errors = list(found.curve.values())
    assert errors[-1] < min(0.1, 0.5 * errors[0])
    first, same, other = (
        fit_with_adam(alexnet_samples(), hidden_layers=hidden_layers, iterations=2, seed=seed).curve
        for seed in (1, 1, 2)
    )
    assert first == same != other


def test_an_ablation_agrees_with_the_fit_and_round_trips() -> None:
    profile = Profile.load(H200 / "mobilenet_v1-b1.profile.gz").head(40)
    found = run_ablation(profile)
    assert from_json(to_json(found), FitAblation, "a.json") == found
    quality = fit(profile).quality
    for name, family in found.families.items():
        assert vars(family).items() >= vars(quality.families[name]).items()
        assert len(family.errors) == len(found.values) == len(found.mean_width_ratio) == family.samples
        inner = ~np.array(found.is_dense) & (np.array(found.values) > min(found.values))
        assert family.mean == pytest.approx(np.abs(family.errors)[inner].mean(), abs=1e-6)
        assert [size for size, _ in family.learning_curve] == [15, 20, 30]
    assert (found.label, found.device, found.batch) == ("measured", "NVIDIA H200", 1)


def test_the_curves_of_the_paper_are_drawn(tmp_path: Path) -> None:
    curves = paper_curves(Profile.load(H200 / "mobilenet_v1-b1.profile.gz").head(40), iterations=100)
    assert list(curves) == [str(count) for count in HIDDEN_LAYERS]
    drawn = draw_curves([("one", curves), ("two", curves)], tmp_path / "paper.svg").read_text(encoding="utf-8")
    assert all(words in drawn for words in ("one", "two", "MLP, 3 hidden"))
