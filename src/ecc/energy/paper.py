"""The paper's own way to fit: Adam on the bilinear model, and on a perceptron behind it (its ablation).

    Section 4.2: full batch, 10,000 iterations, four fifths of the rows to train and one to test; hidden layers of 128
    with SELU behind the bilinear features.

Our default is least squares, which the bilinear model admits. This is for fidelity and for the paper's figures.
Inside, in * out is divided by its dense value and energies by their mean, so that Adam's usual step fits any network;
the paper's weight decay of 1.0 (1e-3 in its published code) belongs to other units, and is a setting here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecc.errors import BadFile, BadMeasurement
from ecc.graph import AffineSize
from ecc.io import read_text, write_text
from ecc.records import from_builtins, to_builtins

from .bilinear_form import BilinearForm
from .families import FittedModel, folds
from .features import Term, bilinear_terms
from .quality import check_rows
from .regression import Array
from .samples import RESOURCES, Samples

HIDDEN_WIDTH = 128  # Section 4.2
ITERATIONS = 10_000  # Section 4.2
_TEST_FOLDS = 5  # one fifth is held out


@dataclass(frozen=True)
class PaperFit:
    """What was learnt, and how the error on held-out rows went."""

    model: FittedModel | Mlp
    curve: dict[int, float]
    """Mean relative error on the held-out fifth, by iteration."""


def fit_as_paper(
    samples: Samples,
    *,
    hidden_layers: int = 0,
    iterations: int = ITERATIONS,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-6,
    log_every: int = 100,
    seed: int = 0,
    resource: str = "energy",
) -> PaperFit:
    """Fits by Adam, full batch, on four fifths of the rows.

    Args:
        samples: All rows.
        hidden_layers: 0 for the bilinear model, whose coefficients stay at least 0; 1 to 3 in the paper's ablation.
        iterations: Of Adam.
        learning_rate: Adam's default.
        weight_decay: On everything that is learnt, in normalised units.
        log_every: Iterations between two looks at the held-out rows.
        seed: Of the perceptron's first weights.
        resource: What the samples are of; recorded.

    Raises:
        BadMeasurement: If there are too few rows, or a number is below its least.
    """
    check_rows(samples)
    for name, value, least in (("hidden_layers", hidden_layers, 0), ("iterations", iterations, 1)):
        if value < least:
            raise BadMeasurement(f"{name}={value} is below {least}, the least it may be.")
    terms = bilinear_terms(samples.structure)
    dense = _features(terms, np.asarray([samples.structure.full_widths], dtype=np.float64))
    mean = float(samples.values.mean())
    inputs = torch.from_numpy(_features(terms, samples.widths) / dense)
    goals = torch.from_numpy(samples.values / mean)
    held = torch.from_numpy(folds(len(samples), _TEST_FOLDS) == 0)
    network = _network(len(terms), hidden_layers, seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    curve: dict[int, float] = {}
    for iteration in range(1, iterations + 1):
        optimizer.zero_grad()
        loss = ((network(inputs[~held]).squeeze(-1) - goals[~held]) ** 2).mean()
        loss.backward()
        optimizer.step()
        if hidden_layers == 0:
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.clamp_(min=0)
        if iteration % log_every == 0 or iteration == iterations:
            with torch.no_grad():
                errors = network(inputs[held]).squeeze(-1) / goals[held] - 1
            curve[iteration] = float(errors.abs().mean())
    model: FittedModel | Mlp
    if hidden_layers == 0:
        linear = network[0]
        assert isinstance(linear, nn.Linear)
        coefficients = (linear.weight.detach()[0].numpy() * mean / dense[0]).tolist()
        model = FittedModel("bilinear", float(linear.bias.detach()) * mean, terms, tuple(coefficients))
    else:
        model = Mlp(
            groups=samples.structure.groups,
            full_widths=samples.structure.full_widths,
            resource=resource,
            lefts=tuple(term.left for term in terms),
            rights=tuple(term.right for term in terms),
            dense_products=tuple(dense[0].tolist()),
            mean=mean,
            label=samples.label,
            layers=tuple(
                (layer.weight.detach().clone(), layer.bias.detach().clone())
                for layer in network
                if isinstance(layer, nn.Linear)
            ),
        )
    return PaperFit(model, curve)


def _features(terms: tuple[Term, ...], widths: Array) -> Array:
    return np.stack([term.at(widths) for term in terms], axis=1)


def _network(inputs: int, hidden_layers: int, seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    sizes = [inputs, *[HIDDEN_WIDTH] * hidden_layers, 1]
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(sizes)):
        linear = nn.Linear(before, after, dtype=torch.float64)
        with torch.no_grad():
            if hidden_layers == 0:
                linear.weight.zero_()  # as the authors start
            else:  # LeCun's normal, which SELU is made for
                linear.weight.copy_(
                    torch.randn(after, before, generator=generator, dtype=torch.float64) / np.sqrt(before)
                )
            linear.bias.zero_()
        layers += [linear] if number == len(sizes) - 2 else [linear, nn.SELU()]
    return nn.Sequential(*layers)


# ---------------------------------------------------------------- the perceptron as a cost

MLP_FORMAT = "ecc energy perceptron, version 1"


@dataclass(frozen=True)
class Mlp:
    """A perceptron behind the bilinear features: the paper's ablation, and a `Cost` but for one promise.

    It is differentiable; but nothing makes it grow with the widths, so `fit` never chooses it by itself.
    """

    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    resource: str
    lefts: tuple[AffineSize, ...]
    rights: tuple[AffineSize, ...]
    dense_products: tuple[float, ...]
    mean: float
    label: str
    """Of the samples: measured, estimated or declared."""
    layers: tuple[tuple[Tensor, Tensor], ...] = field(compare=False)
    device: torch.device | str = "cpu"

    @property
    def unit(self) -> str:
        """J or s."""
        return RESOURCES[self.resource][1]

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix."""
        coefficients = tuple(1 / product for product in self.dense_products)
        products = BilinearForm(0.0, coefficients, self.lefts, self.rights, len(self.groups), self.device)
        hidden = products.terms(widths)
        for number, (weight, bias) in enumerate(self.layers):
            hidden = hidden @ weight.T.to(self.device) + bias.to(self.device)
            if number < len(self.layers) - 1:
                hidden = torch.selu(hidden)
        return hidden.squeeze(-1) * self.mean

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths."""
        with torch.enable_grad():
            point = widths.detach().to(torch.float64).requires_grad_()
            (gradient,) = torch.autograd.grad(self.value(point), point)
        return gradient

    def at(self, widths: Array) -> Array:
        """The cost at each row of widths."""
        return np.asarray(self.value(torch.from_numpy(widths)).detach().numpy())

    def to(self, device: torch.device | str) -> Mlp:
        """The same, computing on a device."""
        return Mlp(**{**vars(self), "device": device})

    def save(self, path: str | Path) -> None:
        """Writes it as JSON.

        Raises:
            BadFile: If it cannot be written.
        """
        data = {
            "format": MLP_FORMAT,
            **{name: value for name, value in vars(self).items() if name not in ("layers", "device")},
            "lefts": [to_builtins(extent) for extent in self.lefts],
            "rights": [to_builtins(extent) for extent in self.rights],
            "layers": [[weight.tolist(), bias.tolist()] for weight, bias in self.layers],
        }
        write_text(path, json.dumps(data) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Mlp:
        """Reads what `save` wrote.

        Raises:
            BadFile: If it is something else, or damaged.
        """
        try:
            data: Mapping[str, Any] = json.loads(read_text(path))
            if not isinstance(data, dict) or data.get("format") != MLP_FORMAT:
                raise BadFile(f"{path} is not an energy perceptron of this version ({MLP_FORMAT!r}).")
            found = cls(
                groups=tuple(str(name) for name in data["groups"]),
                full_widths=tuple(int(width) for width in data["full_widths"]),
                resource=str(data["resource"]),
                lefts=tuple(from_builtins(extent, AffineSize, "the energy model") for extent in data["lefts"]),
                rights=tuple(from_builtins(extent, AffineSize, "the energy model") for extent in data["rights"]),
                dense_products=tuple(float(product) for product in data["dense_products"]),
                mean=float(data["mean"]),
                layers=tuple(
                    (torch.tensor(weight, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64))
                    for weight, bias in data["layers"]
                ),
                label=str(data["label"]),
            )
            dense = torch.tensor(found.full_widths, dtype=torch.float64)
            flat = any(weight.dim() != 2 for weight, _ in found.layers)
            if flat or len(dense) != len(found.groups) or found.gradient(dense).isnan().any() or not found.unit:
                raise ValueError("its parts do not fit together")
            return found
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise BadFile(f"{path} is damaged ({type(error).__name__}). Fit the profile again.") from None
