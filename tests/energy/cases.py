"""Small networks, costs of them with known coefficients, and slow reference implementations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from ecc.energy import EnergyModel
from ecc.energy.cost import Array
from ecc.energy.families import FittedModel, Term, bilinear_terms, physical_terms
from ecc.energy.model import Origin
from ecc.energy.regression import Samples
from ecc.graph import AffineSize, ChannelGraph, StructureSpec, trace_channels
from ecc.measure import Estimated, MeasureSettings, MeterInfo, Profile, find_meter, profile
from ecc.task import with_batch_size
from ecc.zoo import find_task
from graph.cases import traced

NETWORKS = ("chain", "residual", "depthwise", "concat", "grouped", "flattened chain", "shared module", "digits")
"""One for each kind of coupling between channels."""

DIGITS_BATCH = 64


@cache
def network(name: str) -> tuple[Any, Any, ChannelGraph]:
    """A model, its input and its graph: a test case of the graph package, or a bundled task."""
    if name in ("digits", "mobilenet_v1", "alexnet"):
        task = find_task(name)
        inputs = with_batch_size(task.example_input, DIGITS_BATCH) if name == "digits" else task.example_input
        return task.model, inputs, trace_channels(task.model, inputs, verify=False)
    return traced(name)


def graph_of(name: str) -> ChannelGraph:
    return network(name)[2]


def structure_of(name: str) -> StructureSpec:
    return graph_of(name).structure


@cache
def computed(name: str, platform: str, rows: int = 60, **options: Any) -> Profile:
    """The profile of an analytic platform."""
    model, inputs, graph = network(name)
    with TemporaryDirectory() as folder:
        return profile(
            model,
            graph,
            inputs,
            find_meter(f"platform:{platform}"),
            Path(folder) / "a.profile",
            samples=rows,
            **options,
        )


# ---------------------------------------------------------------- widths


def random_widths(structure: StructureSpec, count: int, seed: int = 0) -> Array:
    """(networks, groups), each group between its minimum and its full width."""
    generator = np.random.default_rng(seed)
    least, full = np.array(structure.min_widths), np.array(structure.full_widths)
    return generator.integers(least, full + 1, (count, len(full))).astype(np.float64)


def named(structure: StructureSpec, widths: Sequence[float]) -> dict[str, int]:
    return {name: int(width) for name, width in zip(structure.groups, widths, strict=True)}


def widths_of(structure: StructureSpec) -> SearchStrategy[Tensor]:
    """Integer widths, and real ones as a solver has them."""
    ranges = [
        st.one_of(st.integers(least, full).map(float), st.floats(least, full))
        for least, full in zip(structure.min_widths, structure.full_widths, strict=True)
    ]
    return st.tuples(*ranges).map(lambda widths: torch.tensor(widths, dtype=torch.float64))


def pairs_of(structure: StructureSpec) -> SearchStrategy[tuple[Tensor, Tensor]]:
    """Two vectors of widths, the first nowhere above the second."""
    return st.tuples(widths_of(structure), widths_of(structure)).map(
        lambda pair: (torch.minimum(*pair), torch.maximum(*pair))
    )


# ---------------------------------------------------------------- models

TERMS = {"bilinear": bilinear_terms, "physical": physical_terms}


def random_fitted(kind: str, structure: StructureSpec, seed: int = 0) -> FittedModel:
    """Coefficients of any size, some of them 0."""
    generator = np.random.default_rng(seed)
    terms = TERMS[kind](structure)
    if kind == "physical":
        terms = terms[1:]  # the constant is the base
    coefficients = 10 ** generator.uniform(-9, -3, len(terms)) * (generator.random(len(terms)) > 0.2)
    return FittedModel(kind, float(generator.random()), terms, tuple(coefficients.tolist()))


def model_of(fitted: FittedModel, structure: StructureSpec, **changes: Any) -> EnergyModel:
    values: dict[str, Any] = {
        "fingerprint": structure.fingerprint,
        "groups": structure.groups,
        "full_widths": structure.full_widths,
        "min_widths": structure.min_widths,
        "layers": tuple(layer.path for layer in structure.layers),
        "resource": "energy",
        "origin": origin(),
        "fitted": fitted,
    }
    return EnergyModel(**{**values, **changes})


def origin() -> Origin:
    meter = MeterInfo(name="made up", device="paper", provenance=Estimated("a test"), scope="all")
    return Origin(meter=meter, batch=2, device_type="cpu", settings=MeasureSettings(), samples=7)


@cache
def random_model(kind: str, name: str, seed: int = 0) -> EnergyModel:
    return model_of(random_fitted(kind, structure_of(name), seed), structure_of(name))


def samples_from(
    fitted: FittedModel, structure: StructureSpec, rows: int, *, seed: int = 0, noise: float = 0.0
) -> Samples:
    """Uniform random widths and their cost under a model, with log-normal noise."""
    widths = random_widths(structure, rows, seed)
    noise_factor = np.exp(noise * np.random.default_rng(seed + 1).standard_normal(rows))
    return Samples(structure, widths, np.array([slow_value(fitted, row) for row in widths]) * noise_factor)


# ---------------------------------------------------------------- slow references


def slow_size(size: AffineSize, widths: Sequence[float]) -> float:
    total = float(size.fixed)
    for group, multiple in size.multiples:
        total += multiple * float(widths[group])
    return total


def slow_value(fitted: FittedModel, widths: Sequence[float]) -> float:
    """A model without steps, term by term."""
    total = fitted.base
    for term, coefficient in zip(fitted.terms, fitted.coefficients, strict=True):
        total += coefficient * slow_size(term.left, widths) * slow_size(term.right, widths)
    return total


def slow_amounts(terms: Sequence[Term], widths: Sequence[float]) -> list[float]:
    """Total of each of `AMOUNTS` over all terms at some widths."""
    totals = [0.0] * 4
    for term in terms:
        size = slow_size(term.left, widths) * slow_size(term.right, widths)
        totals = [total + size * amount for total, amount in zip(totals, term.amounts, strict=True)]
    return totals


def finite_differences(cost: Any, widths: Tensor, step: float = 0.25) -> Tensor:
    """Central differences: exact for polynomials of degree two, up to rounding."""
    steps = step * torch.eye(len(widths), dtype=torch.float64)
    return torch.stack([(cost.value(widths + e) - cost.value(widths - e)) / (2 * step) for e in steps])


def autograd(cost: Any, widths: Tensor) -> Tensor:
    point = widths.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cost.value(point), point)
    return gradient


# ---------------------------------------------------------------- published by the authors of the paper

AUTHORS_COEFFICIENTS = (
    0.0022337078116834164,
    0.0075399503111839294,
    0.003909255377948284,
    0.004940669517964125,
    0.0033930998761206865,
    0.0161565151065588,
    0.00721406377851963,
    0.0019541799556463957,
)
"""Joules of each product of shares of widths, conv1 to conv5 and fc6 to fc8 of AlexNet at batch 1 on a Jetson TX2."""
AUTHORS_BIAS = 0.0024820673279464245
AUTHORS_DENSE_JOULES = 0.04982350906357169


def authors_alexnet() -> FittedModel:
    """The authors' model of AlexNet over our channel graph, with coefficients per unit of in * out."""
    structure = structure_of("alexnet")
    terms = bilinear_terms(structure)
    dense = [
        slow_size(term.left, structure.full_widths) * slow_size(term.right, structure.full_widths) for term in terms
    ]
    coefficients = tuple(joules / size for joules, size in zip(AUTHORS_COEFFICIENTS, dense, strict=True))
    return FittedModel("bilinear", AUTHORS_BIAS, terms, coefficients)
