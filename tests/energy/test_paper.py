from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy import Cost
from ecc.energy.families import FittedModel, bilinear, folds
from ecc.energy.paper import HIDDEN_WIDTH, ITERATIONS, Mlp, PaperFit, fit_as_paper
from ecc.energy.regression import Array
from ecc.energy.samples import Samples
from ecc.errors import BadFile, BadMeasurement
from ecc.graph import StructureSpec
from energy.cases import (
    AUTHORS_BIAS,
    authors_alexnet,
    autograd,
    random_widths,
    samples_from,
    skeleton_of,
    slow_extent,
    widths_of,
)


@cache
def probe() -> Array:
    return random_widths(alexnet(), 100, seed=11)


def alexnet() -> StructureSpec:
    return skeleton_of("alexnet")


@cache
def alexnet_samples(noise: float = 0.0) -> Samples:
    """As many as the paper measures, of the authors' own model."""
    return samples_from(authors_alexnet(), alexnet(), 300, noise=noise)


@cache
def perceptron(hidden_layers: int = 1) -> PaperFit:
    return fit_as_paper(alexnet_samples(), hidden_layers=hidden_layers, iterations=200, log_every=20)


def mlp(hidden_layers: int = 1) -> Mlp:
    model = perceptron(hidden_layers).model
    assert isinstance(model, Mlp)
    return model


# ---------------------------------------------------------------- the bilinear model by Adam


@pytest.mark.slow
def test_the_paper_s_recipe_finds_the_authors_coefficients() -> None:
    """10,000 iterations at the settings of the paper, against least squares and against the truth."""
    found = fit_as_paper(alexnet_samples(), hidden_layers=0)
    truth, least_squares = authors_alexnet(), bilinear(alexnet_samples())
    assert isinstance(found.model, FittedModel)
    assert found.model.base == pytest.approx(AUTHORS_BIAS, rel=0.01)
    assert found.model.coefficients == pytest.approx(truth.coefficients, rel=0.01, abs=0)
    assert found.model.at(probe()) == pytest.approx(least_squares.at(probe()), rel=0.01)
    assert list(found.curve)[-1] == ITERATIONS


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_adam_and_least_squares_agree(noise: float) -> None:
    """Ten times the paper's step and a fifth of its iterations, for time; on the same four fifths, in joules."""
    samples = alexnet_samples(noise)
    found = fit_as_paper(samples, hidden_layers=0, learning_rate=1e-2, iterations=2000).model
    train = samples.take(folds(len(samples), 5) != 0)
    assert found.at(probe()) == pytest.approx(bilinear(train, relative=False).at(probe()), rel=0.01)


def test_the_error_on_held_out_rows_falls() -> None:
    curve = fit_as_paper(alexnet_samples(), learning_rate=1e-2, iterations=600, log_every=100).curve
    assert list(curve) == [100, 200, 300, 400, 500, 600]
    errors = list(curve.values())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]


def test_coefficients_stay_at_least_zero() -> None:
    """Energies that fall as networks grow: the best coefficients would be negative."""
    samples = alexnet_samples()
    falling = Samples(alexnet(), samples.widths, 1 / samples.values)
    found = fit_as_paper(falling, learning_rate=1e-2, iterations=500).model
    assert isinstance(found, FittedModel)
    assert min(found.base, *found.coefficients) >= 0
    assert min(found.coefficients) == 0


def test_held_out_rows_do_not_change_what_is_learnt() -> None:
    samples = alexnet_samples()
    held = folds(len(samples), 5) == 0
    spoilt = Samples(alexnet(), samples.widths, np.where(held, 3 * samples.values, samples.values))
    one, other = (fit_as_paper(s, learning_rate=1e-2, iterations=1500, weight_decay=0.0) for s in (samples, spoilt))
    assert one.model.at(probe()) == pytest.approx(other.model.at(probe()), rel=0.01)
    assert one.curve[1500] < 0.01
    assert other.curve[1500] == pytest.approx(2 / 3, abs=0.01)  # each is told as a third of what it is said to be


def test_the_last_iteration_is_always_looked_at() -> None:
    assert list(fit_as_paper(alexnet_samples(), iterations=25, log_every=10).curve) == [10, 20, 25]


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (11, {}, "the profile holds 11 networks, and a fit needs 12"),
        (20, {"hidden_layers": -1}, "hidden_layers=-1 is below 0"),
        (20, {"iterations": 0}, "iterations=0 is below 1"),
    ],
)
def test_what_makes_no_sense_is_refused(rows: int, options: dict[str, int], said: str) -> None:
    with pytest.raises(BadMeasurement, match=said):
        fit_as_paper(alexnet_samples().take(range(rows)), **options)  # type: ignore[arg-type] # integers all


# ---------------------------------------------------------------- the perceptron


@pytest.mark.parametrize("hidden_layers", [1, 2, 3])
def test_it_has_the_layers_of_the_paper_and_its_error_falls(hidden_layers: int) -> None:
    found = perceptron(hidden_layers)
    shapes = [tuple(weight.shape) for weight, _ in mlp(hidden_layers).layers]
    assert shapes == [(128, 8), *[(HIDDEN_WIDTH, HIDDEN_WIDTH)] * (hidden_layers - 1), (1, 128)]
    errors = list(found.curve.values())
    assert errors[-1] < 0.5 * errors[0]
    assert errors[-1] < 0.1


def test_its_value_is_that_of_a_plain_loop() -> None:
    model = mlp(2)
    for row in probe()[:5]:
        hidden = [
            slow_extent(left, row) * slow_extent(right, row) / dense
            for left, right, dense in zip(model.lefts, model.rights, model.dense_products, strict=True)
        ]
        for number, (weight, bias) in enumerate(model.layers):
            sums = [
                sum(w * h for w, h in zip(line, hidden, strict=True)) + b
                for line, b in zip(weight.tolist(), bias.tolist(), strict=True)
            ]
            hidden = sums if number == len(model.layers) - 1 else [selu(x) for x in sums]
        assert float(model.value(torch.from_numpy(row))) == pytest.approx(hidden[0] * model.mean, rel=1e-9)


def selu(x: float) -> float:
    scale, alpha = 1.0507009873554805, 1.6732632423543772  # Klambauer et al., 2017
    return scale * (x if x > 0 else alpha * (math.exp(x) - 1))


@given(data=st.data())
@settings(max_examples=20)
def test_its_gradient_is_the_finite_differences(data: st.DataObject) -> None:
    model, widths = mlp(), data.draw(widths_of(alexnet()))
    gradient, step = model.gradient(widths), 1e-3
    unit = step * torch.eye(len(widths), dtype=torch.float64)
    differences = torch.stack([(model.value(widths + e) - model.value(widths - e)) / (2 * step) for e in unit])
    # SELU bends at 0: a step across it errs by the step, relative to the steepest slope.
    torch.testing.assert_close(gradient, differences, rtol=1e-4, atol=1e-3 * float(gradient.abs().max()))
    torch.testing.assert_close(gradient, autograd(model, widths))
    assert not gradient.requires_grad


def test_a_gradient_is_found_where_gradients_are_off() -> None:
    widths = torch.from_numpy(probe()[0])
    with torch.no_grad():
        gradient = mlp().gradient(widths)
    assert gradient.tolist() == mlp().gradient(widths).tolist()


def test_a_matrix_is_priced_row_by_row() -> None:
    model = mlp()
    rows = torch.from_numpy(probe()[:4])
    assert model.value(rows).tolist() == pytest.approx([float(model.value(row)) for row in rows], rel=1e-12)
    assert model.at(probe()[:4]).tolist() == model.value(rows).tolist()


def test_it_is_a_cost() -> None:
    model = mlp()
    assert isinstance(model, Cost)
    assert (model.resource, model.unit, model.groups) == ("energy", "J", alexnet().groups)
    latency = fit_as_paper(alexnet_samples(), hidden_layers=1, iterations=1, resource="latency").model
    assert isinstance(latency, Mlp)
    assert latency.unit == "s"
    assert model.to("cpu").value(torch.from_numpy(probe())).tolist() == model.value(torch.from_numpy(probe())).tolist()


def test_a_seed_decides_the_first_weights() -> None:
    one, same, other = (
        fit_as_paper(alexnet_samples(), hidden_layers=1, iterations=3, seed=seed).model.at(probe())
        for seed in (1, 1, 2)
    )
    assert one.tolist() == same.tolist() != other.tolist()


def test_the_global_generator_decides_nothing() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(fit_as_paper(alexnet_samples(), hidden_layers=1, iterations=2).model.at(probe()).tolist())
    assert found[0] == found[1]


# ---------------------------------------------------------------- its file


@pytest.mark.parametrize("hidden_layers", [1, 3])
def test_it_comes_back_bit_by_bit(hidden_layers: int, tmp_path: Path) -> None:
    model = mlp(hidden_layers)
    model.save(tmp_path / "a.mlp")
    loaded = Mlp.load(tmp_path / "a.mlp")
    assert loaded == model
    for (weight, bias), (old_weight, old_bias) in zip(loaded.layers, model.layers, strict=True):
        assert torch.equal(weight, old_weight)
        assert torch.equal(bias, old_bias)
    assert loaded.at(probe()).tolist() == model.at(probe()).tolist()
    loaded.save(tmp_path / "b.mlp")
    assert (tmp_path / "a.mlp").read_bytes() == (tmp_path / "b.mlp").read_bytes()


MISFITS: list[dict[str, Any]] = [
    {"full_widths": [3]},
    {"lefts": [], "rights": []},
    {"lefts": [[0, [[99, 1]]]] * 8},
    {"dense_products": [0] * 8},
    {"layers": [[[[1.0]], [0.0]]]},
    {"layers": [[[1.0], [0.0]]]},
    {"mean": float("nan")},
    {"resource": "money"},
]


@pytest.mark.parametrize("changes", [{"format": "other"}, {"layers": 5}, {"lefts": [[1]]}, {"mean": None}, *MISFITS])
def test_a_damaged_file_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.mlp"
    mlp().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(BadFile, match=r"a\.mlp is (damaged|not an energy perceptron)"):
        Mlp.load(path)


def test_files_that_are_no_perceptron_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot read .*missing: No such file"):
        Mlp.load(tmp_path / "missing")
    for text in ("", "[]", "{"):
        (tmp_path / "a.mlp").write_text(text)
        with pytest.raises(BadFile, match=r"a\.mlp is (damaged|not an energy perceptron)"):
            Mlp.load(tmp_path / "a.mlp")
