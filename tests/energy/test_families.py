"""Terms, steps and the two families of energy models."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ecc.energy import families
from ecc.energy.cost import ONE, RISE
from ecc.energy.families import (
    FAMILIES,
    MAX_LEVELS,
    MIN_RISE,
    FittedModel,
    Step,
    _shapes,
    bilinear,
    bilinear_terms,
    candidate_steps,
    physical,
    physical_terms,
    step_levels,
)
from ecc.energy.regression import Samples, samples_from_profile
from ecc.graph import AffineSize, Layer, StructureSpec, trace_channels
from ecc.graph.structure import TensorShape
from energy.cases import (
    AUTHORS_BIAS,
    NETWORKS,
    TERMS,
    authors_alexnet,
    computed,
    graph_of,
    random_fitted,
    random_widths,
    samples_from,
    slow_amounts,
    slow_value,
    structure_of,
)


def with_noise(samples: Samples, noise: float, seed: int = 0) -> Samples:
    factor = np.exp(noise * np.random.default_rng(seed).standard_normal(len(samples)))
    return Samples(samples.structure, samples.widths, samples.values * factor)


# ---------------------------------------------------------------- terms


@pytest.mark.parametrize("name", NETWORKS)
def test_terms_add_up_to_the_counts_of_the_graph(name: str) -> None:
    graph, structure = graph_of(name), structure_of(name)
    terms, macs_only = physical_terms(structure), bilinear_terms(structure)
    for widths in random_widths(structure, 5):
        vector = graph.widths().new_tensor(widths)
        per_layer = graph.costs.macs_per_layer(vector).tolist()
        grouped = sum(m for m, layer in zip(per_layer, graph.layers, strict=True) if layer.kind == "grouped conv")
        weight_bytes = float(graph.costs.weight_bytes_per_layer(vector).sum())
        expected = [sum(per_layer) - grouped, grouped, float(graph.activation_bytes(vector)), weight_bytes]
        assert slow_amounts(terms, widths) == pytest.approx(expected, rel=1e-12)
        assert slow_amounts(macs_only, widths) == pytest.approx([*expected[:2], 0, 0], rel=1e-12)
    for term in (*terms, *macs_only):
        parts = np.array([amounts for _, amounts in term.layers])
        assert parts.sum(axis=0).tolist() == pytest.approx(list(term.amounts), rel=1e-12)
    constant, *others = terms
    assert (constant.name, constant.left, constant.right) == ("constant", ONE, ONE)
    linear = [term for term in others if term.right == ONE]
    assert others[: len(linear)] == linear
    plain = [term.name for term in linear if term.left.multiples and not term.switch]
    assert plain == [structure.groups[position] for position in structure.prunable]


def width(group: int, multiple: int = 1, fixed: int = 0) -> AffineSize:
    return AffineSize(fixed, ((group, multiple),))


def structure_with(
    *layers: Layer, tensors: tuple[TensorShape, ...] = (), least: tuple[int, ...] = (1, 1)
) -> StructureSpec:
    """Two groups of 8 and 6 channels."""
    return StructureSpec("f" * 16, ("a", "b"), (8, 6), least, layers, tensors)


def layer(macs: int, incoming: AffineSize, outgoing: AffineSize, kind: str = "conv") -> Layer:
    return Layer("layer", kind, macs, incoming, outgoing, AffineSize(0), AffineSize(0), 4, ())


def test_terms_of_one_convolution_by_hand() -> None:
    """Weights (b, a, 3, 3) of 4 bytes; activations read and written are linear in one group each."""
    conv = Layer("c", "conv", 9 * 25, width(0), width(1), width(0, 25), width(1, 25), 4, ("w", "bias"))
    weight = TensorShape("w", (width(1), width(0), AffineSize(3), AffineSize(3)), 4, True)
    bias = TensorShape("bias", (width(1),), 4, True)
    constant, a, b, product = physical_terms(structure_with(conv, tensors=(weight, bias)))
    assert constant.amounts == (0, 0, 0, 0)
    assert a.amounts == (0, 0, 4 * 25, 0)
    assert b.amounts == (0, 0, 4 * 25, 4)
    assert product.amounts == (225, 0, 0, 4 * 9)
    assert (product.left, product.right) == (width(0), width(1))


def test_fixed_sides_frozen_groups_factors_and_grouped_convolutions_by_hand() -> None:
    terms = physical_terms(structure_with(layer(7, AffineSize(3), width(1))))
    assert [(term.name, term.amounts[0]) for term in terms] == [("constant", 0), ("b", 21)]
    terms = physical_terms(structure_with(layer(7, width(0), width(1, 2, 5)), least=(8, 1)))
    assert [(term.name, term.amounts[0]) for term in terms] == [("constant", 7 * 8 * 5), ("b", 7 * 8 * 2)]
    flattened, swapped = layer(1, width(0, 36), width(1)), layer(36, width(1), width(0))
    (_, one), (_, other) = (physical_terms(structure_with(item)) for item in (flattened, swapped))
    assert one == other
    assert one.amounts[0] == 36
    (grouped,) = bilinear_terms(structure_with(layer(9, AffineSize(1), width(0), "grouped conv")))
    assert grouped.amounts == (0, 9, 0, 0)
    assert bilinear_terms(structure_with(layer(0, AffineSize(1), width(0)))) == ()


# ---------------------------------------------------------------- steps


@given(st.integers(1, 20_000))
def test_step_levels_are_few_and_count_down_from_the_full_size(full: int) -> None:
    levels, rise = step_levels(full)
    assert len(levels) <= MAX_LEVELS
    assert list(levels) == sorted(levels)
    assert all(0 < level < full for level in levels)
    distance = full - levels[-1] if levels else 1
    assert distance.bit_count() == 1  # a power of two
    assert all((full - level) % distance == 0 for level in levels)
    assert rise == min(max(distance, MIN_RISE), RISE)


def test_steps_by_hand() -> None:
    assert step_levels(3) == ((1, 2), 2)  # such as heads
    assert step_levels(32) == (tuple(range(2, 32, 2)), 2)
    assert step_levels(64) == (tuple(range(4, 64, 4)), 4)
    assert step_levels(512) == (tuple(range(32, 512, 32)), 8)
    step = Step("a", AffineSize(0, ((0, 1),)), 16, (0,))
    assert step.at(np.array([[8.0], [16.0], [20.0], [24.0], [40.0]])).tolist() == [0, 0, 0.5, 1, 1]


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_belong_to_channels_of_dense_layers(name: str) -> None:
    structure = structure_of(name)
    for step in candidate_steps(structure):
        for number in step.layers:
            one = structure.layers[number]
            assert one.macs > 0
            assert one.kind != "grouped conv"
            groups = {group for size in (one.incoming, one.outgoing) for group, _ in size.multiples}
            assert {group for group, _ in step.size.multiples} <= groups
    assert name != "digits" or len(candidate_steps(structure)) > 5


# ---------------------------------------------------------------- families


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_is_the_sum_of_its_terms_and_a_bilinear_truth_is_found(name: str) -> None:
    structure = structure_of(name)
    for kind in TERMS:
        fitted, widths = random_fitted(kind, structure), random_widths(structure, 5)
        assert fitted.at(widths).tolist() == pytest.approx([slow_value(fitted, row) for row in widths], rel=1e-12)
    truth, probe = random_fitted("bilinear", structure, seed=3), random_widths(structure, 20, seed=5)
    assert bilinear(samples_from(truth, structure, 60)).at(probe) == pytest.approx(truth.at(probe), rel=1e-6)


@pytest.mark.parametrize("relative", [True, False])
def test_the_authors_coefficients_are_found_from_300_samples(relative: bool) -> None:
    truth, structure = authors_alexnet(), structure_of("alexnet")
    full = np.array([structure.full_widths], dtype=np.float64)
    assert truth.at(full)[0] == pytest.approx(0.0498, abs=5e-5)
    found = bilinear(samples_from(truth, structure, 300), relative=relative)
    assert (found.kind, found.terms) == ("bilinear", truth.terms)
    assert found.base == pytest.approx(AUTHORS_BIAS, rel=0.01)
    assert found.coefficients == pytest.approx(truth.coefficients, rel=0.01, abs=0)
    noisy, probe = bilinear(samples_from(truth, structure, 300, noise=0.02)), random_widths(structure, 100, seed=7)
    assert np.abs(noisy.at(probe) / truth.at(probe) - 1).mean() < 0.005


@pytest.mark.parametrize("kind", FAMILIES)
@given(seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.05, 0.5]))
@settings(max_examples=10)
def test_coefficients_are_never_negative(kind: str, seed: int, noise: float) -> None:
    structure = structure_of(NETWORKS[seed % len(NETWORKS)])
    truth = random_fitted("physical", structure, seed)
    found = FAMILIES[kind](samples_from(truth, structure, 20, seed=seed, noise=noise))
    assert len(found.coefficients) == len(found.terms)
    numbers = [found.base, *found.coefficients, *found.unit_coefficients, *found.heights]
    assert np.isfinite(numbers).all()
    assert min(numbers) >= 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_fits_are_deterministic_independent_of_units_and_learn_a_constant(kind: str) -> None:
    samples = with_noise(samples_from_profile(computed("digits", "jetson-tx2")), 0.02)
    one = FAMILIES[kind](samples)
    assert FAMILIES[kind](samples) == one
    millis = FAMILIES[kind](Samples(samples.structure, samples.widths, samples.values * 1e-3))
    probe = random_widths(samples.structure, 20)
    assert 1e3 * millis.at(probe) == pytest.approx(one.at(probe), rel=1e-3)
    structure = structure_of("residual")
    found = FAMILIES[kind](Samples(structure, random_widths(structure, 40), np.full(40, 3.0)))
    assert found.at(random_widths(structure, 10, seed=1)) == pytest.approx(np.full(10, 3.0), rel=5e-3)


def test_physical_family_needs_fewer_samples_than_the_bilinear_one() -> None:
    """30 networks of MobileNet with 28 layers: more coefficients than samples that could tell them apart."""
    truth = samples_from_profile(computed("mobilenet_v1", "jetson-tx2"))
    few = with_noise(truth, 0.02).take(range(30))
    errors = {kind: np.abs(fit(few).at(truth.widths) / truth.values - 1).mean() for kind, fit in FAMILIES.items()}
    assert errors["physical"] < 0.015
    assert errors["physical"] < errors["bilinear"]


def test_physical_family_learns_a_layer_that_costs_ten_times_its_prior() -> None:
    structure, truth = structure_of("alexnet"), authors_alexnet()
    coefficients = (truth.coefficients[0], 10 * truth.coefficients[1], *truth.coefficients[2:])
    slow_layer = FittedModel("bilinear", truth.base, truth.terms, coefficients)
    found, probe = physical(samples_from(slow_layer, structure, 200)), random_widths(structure, 50, seed=1)
    assert np.abs(found.at(probe) / slow_layer.at(probe) - 1).mean() < 0.02


def test_strength_of_the_prior_scales_with_the_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    fit_coefficients = families.fit_coefficients
    monkeypatch.setattr(
        families,
        "fit_coefficients",
        lambda *a, strength=0.0, **k: used.append(strength) or fit_coefficients(*a, strength=strength, **k),
    )
    samples = samples_from_profile(computed("digits", "jetson-tx2"))
    physical(samples)
    scaled = [strength * 250 / len(samples) for strength in families.STRENGTHS]
    assert used == [0.0, *scaled, *scaled]  # with and without shared coefficients
    used.clear()
    physical(samples_from(authors_alexnet(), structure_of("alexnet"), 20))  # all of its layers differ
    assert len(used) == 1 + len(families.STRENGTHS)


# ---------------------------------------------------------------- layers of the same shape


@cache
def deep_chain() -> StructureSpec:
    """A convolution, eight of the same shape, and a classifier."""
    blocks = [part for _ in range(8) for part in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), *blocks, nn.Flatten(), nn.Linear(32 * 64, 10))
    return trace_channels(model, torch.zeros(2, 3, 8, 8), verify=False).structure


def by_shape(structure: StructureSpec, of_block: Callable[[int], float]) -> FittedModel:
    """A physical model whose products differ from each other by `of_block`; layers by their number."""
    terms = physical_terms(structure)[1:]
    coefficients = [of_block(number) if term.right.multiples else 1e-6 for number, term in enumerate(terms)]
    return FittedModel("physical", 1e-3, terms, tuple(coefficients))


def error_of(found: FittedModel, truth: FittedModel, structure: StructureSpec) -> float:
    probe = random_widths(structure, 200, seed=9)
    return float(np.abs(found.at(probe) / truth.at(probe) - 1).mean())


def test_shapes_are_those_of_repeated_layers() -> None:
    structure = deep_chain()
    terms, steps = physical_terms(structure), candidate_steps(structure)
    numbers = _shapes(structure, terms, steps)
    assert len(numbers) == len(terms) + len(steps)
    products = [number for number, term in zip(numbers, terms, strict=False) if term.right.multiples]
    assert len(products) == 8
    assert len(set(products)) == 1
    groups = [number for number, term in zip(numbers, terms, strict=False) if term.left.multiples and term.right == ONE]
    assert len(groups) == 9
    assert len(set(groups)) == 3  # behind the first convolution, between two blocks, before the classifier
    assert list(numbers).count(numbers[0]) == 1  # the constant
    levels = {step.level for step in steps if not step.multiple}
    assert len(
        {number for number, step in zip(numbers[len(terms) :], steps, strict=True) if not step.multiple}
    ) == 3 * len(levels)


def test_equal_layers_share_what_few_samples_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 noisy samples cannot tell eight layers apart."""
    structure = deep_chain()
    truth = by_shape(structure, lambda number: 5e-6)
    few = [with_noise(samples_from(truth, structure, 20, seed=seed), 0.02, seed) for seed in range(4)]
    shared = np.mean([error_of(physical(one), truth, structure) for one in few])
    monkeypatch.setattr(families, "_shapes", lambda structure, terms, steps: np.arange(len(terms) + len(steps)))
    apart = np.mean([error_of(physical(one), truth, structure) for one in few])
    assert shared < 0.015
    assert shared < 0.95 * apart


def test_equal_layers_that_cost_differently_do_not_share() -> None:
    structure = deep_chain()
    truth = by_shape(structure, lambda number: 5e-7 * (1 + number % 4))
    found = physical(samples_from(truth, structure, 150))
    assert error_of(found, truth, structure) < 0.005
    products = [c for term, c in zip(found.terms, found.coefficients, strict=True) if term.right.multiples]
    assert max(products) > 2 * min(products)
