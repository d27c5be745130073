"""The paper's own way to fit an energy model, for its Figures 2 and 3; used by energy_fit.py.

The paper (Sec. 4.2) fits by Adam: full batch, 10,000 iterations, four fifths of the samples for training and one for
testing; its ablation adds an MLP with hidden layers of 128 and SELU behind the bilinear features. ECC fits by least
squares instead. Here features are divided by their dense values and energies by their mean, so that Adam's default step
fits any network; the paper's weight decay of 1.0 (1e-3 in the published code) belongs to other units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import altair as alt
import numpy as np
import torch
from torch import nn

from ecc.energy.families import FittedModel, bilinear_terms
from ecc.energy.regression import Samples, check_sample_count, folds, samples_from_profile
from ecc.measure import Profile
from ecc.report.chart_parts import make_chart, x_axis, y_axis
from ecc.report.figures import file_config, save_chart

HIDDEN_LAYERS = (0, 1, 2, 3)
"""Numbers of hidden layers in the paper's ablation; 0 is the bilinear model."""
HIDDEN_WIDTH = 128
ITERATIONS = 10_000
_TEST_FOLDS = 5

Curves = dict[str, tuple[tuple[int, float], ...]]
"""By number of hidden layers: (iteration of Adam, mean error on the held-out fifth)."""


def paper_curves(profile: Profile, iterations: int = ITERATIONS) -> Curves:
    """The error over iterations of the bilinear model and of the MLPs."""
    samples = samples_from_profile(profile, "energy")
    return {
        str(count): tuple(fit_with_adam(samples, hidden_layers=count, iterations=iterations).curve.items())
        for count in HIDDEN_LAYERS
    }


def draw_curves(found: Sequence[tuple[str, Curves]], path: Path) -> Path:
    """Draw Figures 2 and 3 of the paper (test error over iterations of Adam) for several profiles side by side."""
    panels = []
    for title, one in found:
        rows = [
            {"model": "bilinear" if count == "0" else f"MLP, {count} hidden", "iteration": iteration, "error": error}
            for count, curve in one.items()
            for iteration, error in curve
        ]
        y = y_axis("error", "relative test error", scale=alt.Scale(domain=[0, 0.2], clamp=True))
        line = make_chart(rows).mark_line(strokeWidth=1.5, clip=True)
        chart = line.encode(
            x_axis("iteration", "iterations of Adam"), y, alt.Color("model", type="nominal", title=None)
        )
        panels.append(chart.properties(title=title, width=270, height=200))
    return save_chart(file_config(alt.hconcat(*panels).to_dict()), path)


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
    """
    check_sample_count(samples)
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
