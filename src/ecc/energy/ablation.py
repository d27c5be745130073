"""Ablations of the energy model, for figures: all families on one profile, and the paper's own way to fit.

The paper (Sec. 4.2) fits by Adam: full batch, 10,000 iterations, four fifths of the samples for training and one for
testing; its ablation adds an MLP with hidden layers of 128 and SELU behind the bilinear features. ECC fits by least
squares instead. Here features are divided by their dense values and energies by their mean, so that Adam's default step
fits any network; the paper's weight decay of 1.0 (1e-3 in the published code) belongs to other units.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from ecc.errors import BadMeasurement
from ecc.measure import MeasureSettings
from ecc.measure.profile import Profile

from .families import FAMILIES, FittedModel, bilinear_terms
from .model import CURVE_SIZES
from .quality import FitErrors, cross_validate, evaluate_family, learning_curve, measurement_noise
from .regression import RESOURCES, Samples, check_sample_count, folds, samples_from_profile

ABLATION_FORMAT = "ecc fit ablation 2"
HIDDEN_LAYERS = (0, 1, 2, 3)
"""Numbers of hidden layers in the paper's ablation; 0 is the bilinear model."""
HIDDEN_WIDTH = 128
ITERATIONS = 10_000
_TEST_FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class FamilyAblation(FitErrors):
    """One family on one profile."""

    errors: tuple[float, ...]
    """Cross-validated relative error of each sample."""
    learning_curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class FitAblation:
    """What the figures of a fit show."""

    format: str = ABLATION_FORMAT
    resource: str
    unit: str
    label: str
    device: str
    batch: int
    settings: MeasureSettings | None
    width_multiple: int | None
    noise: float | None
    seconds_per_sample: float | None
    values: tuple[float, ...]
    """Cost of each sample."""
    mean_width_ratio: tuple[float, ...]
    is_dense: tuple[bool, ...]
    families: dict[str, FamilyAblation]
    paper: dict[str, tuple[tuple[int, float], ...]]
    """By number of hidden layers: (iteration of Adam, mean error on the held-out fifth)."""


def run_ablation(
    profile: Profile, *, resource: str = "energy", allow_drift: bool = False, iterations: int = ITERATIONS
) -> FitAblation:
    """Cross-validate all families on a profile, and fit as the paper does.

    Args:
        profile: Profile of one network on one device.
        resource: `energy` or `latency`.
        allow_drift: Accept a profile whose reference varied by more than the limit.
        iterations: Iterations of Adam for the paper's figures; 0 leaves them out.

    Raises:
        BadFile, BadMeasurement: As `fit`.
    """
    samples = samples_from_profile(profile, resource, allow_drift=allow_drift)
    header = profile.header
    families = {}
    for name, family in FAMILIES.items():
        errors = cross_validate(family, samples)
        families[name] = FamilyAblation(
            **vars(evaluate_family(name, samples, errors)),
            errors=tuple(round(error, 6) for error in errors.tolist()),
            learning_curve=learning_curve(family, samples, CURVE_SIZES),
        )
    counts = HIDDEN_LAYERS if iterations else ()
    return FitAblation(
        resource=resource,
        unit=RESOURCES[resource][1],
        label=header.label,
        device=header.meter.device,
        batch=header.batch,
        settings=header.settings,
        width_multiple=header.design.width_multiple,
        noise=measurement_noise(profile, resource),
        seconds_per_sample=profile.seconds_per_sample,
        values=tuple(float(f"{value:.6g}") for value in samples.values.tolist()),
        mean_width_ratio=tuple(round(ratio, 4) for ratio in samples.width_ratios.mean(axis=1).tolist()),
        is_dense=tuple(samples.is_dense.tolist()),
        families=families,
        paper={
            str(count): tuple(fit_with_adam(samples, hidden_layers=count, iterations=iterations).curve.items())
            for count in counts
        },
    )


@dataclass(frozen=True)
class AdamFit:
    """A fit by Adam."""

    model: FittedModel | None
    """The bilinear model; None with hidden layers."""
    network: nn.Sequential
    """Maps products in * out, divided by their dense values, to cost / mean cost."""
    curve: dict[int, float]
    """Mean relative error on the held-out fifth, by iteration."""


def fit_with_adam(
    samples: Samples,
    *,
    hidden_layers: int = 0,
    iterations: int = ITERATIONS,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-6,
    log_every: int = 100,
    seed: int = 0,
) -> AdamFit:
    """Fit by Adam, full batch, on four fifths of the samples.

    Args:
        samples: All samples.
        hidden_layers: 0 for the bilinear model, whose coefficients are clamped to at least 0; 1 to 3 for an MLP.
        iterations: Iterations of Adam.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of all parameters, in normalised units.
        log_every: Iterations between two evaluations on the held-out samples.
        seed: Random seed of the MLP's weights.

    Raises:
        BadMeasurement: If there are too few samples, or an argument is out of range.
    """
    check_sample_count(samples)
    for name, value, least in (("hidden_layers", hidden_layers, 0), ("iterations", iterations, 1)):
        if value < least:
            raise BadMeasurement(f"{name} is {value}; give at least {least}.")
    terms = bilinear_terms(samples.structure)
    full = np.asarray([samples.structure.full_widths], dtype=np.float64)
    features, dense = (np.stack([term.at(widths) for term in terms], axis=1) for widths in (samples.widths, full))
    mean = float(samples.values.mean())
    inputs, targets = torch.from_numpy(features / dense), torch.from_numpy(samples.values / mean)
    held_out = torch.from_numpy(folds(len(samples), _TEST_FOLDS) == 0)
    network = _network(len(terms), hidden_layers, seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    curve: dict[int, float] = {}
    for iteration in range(1, iterations + 1):
        optimizer.zero_grad()
        loss = ((network(inputs[~held_out]).squeeze(-1) - targets[~held_out]) ** 2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if hidden_layers == 0:
                for parameter in network.parameters():
                    parameter.clamp_(min=0)
            if iteration % log_every == 0 or iteration == iterations:
                errors = network(inputs[held_out]).squeeze(-1) / targets[held_out] - 1
                curve[iteration] = float(errors.abs().mean())
    model = None
    if hidden_layers == 0:
        linear = network[0]
        assert isinstance(linear, nn.Linear)
        coefficients = (linear.weight.detach()[0].numpy() * mean / dense[0]).tolist()
        model = FittedModel("bilinear", float(linear.bias.detach()) * mean, terms, tuple(coefficients))
    return AdamFit(model, network, curve)


def _network(inputs: int, hidden_layers: int, seed: int) -> nn.Sequential:
    """A linear layer that starts at zero, as in the authors' code, or an MLP with LeCun initialisation, for SELU."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [inputs, *[HIDDEN_WIDTH] * hidden_layers, 1]
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(sizes)):
        linear = nn.Linear(before, after, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.zero_()
            if hidden_layers:
                weight = torch.randn(after, before, generator=generator, dtype=torch.float64)
                linear.weight.copy_(weight / np.sqrt(before))
            linear.bias.zero_()
        layers += [linear] if number == len(sizes) - 2 else [linear, nn.SELU()]
    return nn.Sequential(*layers)
