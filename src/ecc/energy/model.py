"""`EnergyModel`: predicted joules, or seconds, of a network at any widths, fitted to a profile with `fit`.

The file is readable JSON: coefficients, the terms they belong to, the device of the profile and the quality of the fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ecc.errors import BadFile, BadMeasurement, BadWidths, EccError
from ecc.graph import AffineSize, ChannelGraph
from ecc.io import read_bytes
from ecc.measure import MeasureSettings, MeterInfo
from ecc.measure.profile import HEADER_START, Profile
from ecc.records import from_json, write_record

from .cost import BilinearForm, CostForm, StepTerms
from .families import AMOUNTS, FAMILIES, FittedModel
from .quality import (
    FitErrors,
    FitQuality,
    cross_validate,
    evaluate_family,
    find_outlier_widths,
    learning_curve,
    measurement_noise,
)
from .regression import RESOURCES, Samples, check_sample_count, samples_from_profile

FORMAT = "ecc energy model, version 2"
FORMULA = (
    "base + sum of coefficient * left * right + sum of height * clip((size - level) / rise, 0, 1); "
    "a step with a multiple is 1 where the size is not a multiple of it, else 0; "
    "a size is [fixed, [[group, multiple], ...]]; a term is 0 if all groups of its switch have width 0"
)
CURVE_SIZES = (15, 20, 30, 40, 60, 80, 120, 160, 200, 300, 500, 1000, 2000, 5000)
_MIN_IMPROVEMENT = 0.98  # the physical family must have an error below this share of the bilinear one to be chosen


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The meter and device of a profile, and how its networks were run."""

    meter: MeterInfo
    batch: int
    """Items in one inference."""
    device_type: str | None = None
    """Where networks ran: cuda, cpu, ...; None for an analytic platform."""
    settings: MeasureSettings | None = None
    """How networks were run and measured; None for an analytic platform."""
    samples: int = 0
    """Number of width configurations that the model was fitted to."""
    width_multiple: int | None = None
    """The profiled widths were multiples of this; other widths are extrapolated."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions of the software of the profile."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EnergyModel:
    """A `Cost` that was fitted to a profile.

    All coefficients are at least 0, so the prediction is too. Removing a channel raises it only where the profile shows
    that a size which is not a multiple of 8, 16, 32 or 64 costs more (`Step.multiple`).
    """

    fingerprint: str
    """Fingerprint of the channel graph that it belongs to."""
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    min_widths: tuple[int, ...]
    width_steps: tuple[int, ...] = ()
    """Differences of the profiled widths of each group (`StructureSpec.width_steps`); empty in older files."""
    layers: tuple[str, ...]
    """Paths of the layers."""
    branches: tuple[str, ...] = ()
    """Names of the branches that were removed in some samples of the profile. The cost without others is not known."""
    branch_groups: tuple[tuple[int, ...], ...] = ()
    """For each branch, the positions of its groups."""
    resource: str
    """energy or latency."""
    origin: Origin
    fitted: FittedModel
    dense_sample: float | None = None
    """Cost of the dense network in the profile; None if it was not sampled."""
    quality: FitQuality = field(default_factory=FitQuality)
    device: str = "cpu"
    """Where it computes; files do not contain it."""

    def __repr__(self) -> str:
        error = "" if self.errors is None else f", error {self.errors.mean:.1%}"
        dense = f"dense {self.dense_profiled:.4g} {self.unit}"
        return f"<EnergyModel {self.resource} ({self.kind}), {dense}{error}, {self.origin.meter.device}>"

    @property
    def unit(self) -> str:
        """J or s, for one inference of the whole batch."""
        return RESOURCES[self.resource][1]

    @property
    def label(self) -> str:
        """Source of the profile: measured, estimated or declared."""
        return self.origin.meter.label

    @property
    def kind(self) -> str:
        """Family of the model: bilinear or physical."""
        return self.fitted.kind

    @property
    def errors(self) -> FitErrors | None:
        """Cross-validated errors of this model; None if it was not cross-validated."""
        return self.quality.families.get(self.kind)

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix."""
        value = self._form.value(widths)
        return value + self._steps.value(widths) if self.fitted.steps else value

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; at a kink, the derivative towards smaller widths."""
        gradient = self._form.gradient(widths)
        return gradient + self._steps.gradient(widths) if self.fitted.steps else gradient

    def form(self, budget: float) -> CostForm:
        """The cost as arrays."""
        del budget
        return self._form.form(self._steps if self.fitted.steps else None)

    def to(self, device: torch.device | str) -> EnergyModel:
        """The same model, computed on a device."""
        # The same object keeps its tensors, which take a while to build.
        return self if torch.device(device) == torch.device(self.device) else replace(self, device=str(device))

    def at(self, widths: Mapping[str, float] | None = None) -> float:
        """The cost at widths by group name; groups that are not named keep their full width.

        Raises:
            BadWidths: If a group does not exist.
        """
        return float(self.value(self._vector(widths)))

    def _vector(self, widths: Mapping[str, float] | None) -> Tensor:
        vector = torch.tensor(self.full_widths, dtype=torch.float64, device="cpu")
        position = {name: number for number, name in enumerate(self.groups)}
        for name, width in (widths or {}).items():
            if name not in position:
                raise BadWidths(f"there is no channel group {name!r}.")
            vector[position[name]] = float(width)
        return vector.to(self.device)

    @property
    def dense(self) -> float:
        """Predicted cost at full widths."""
        return self.at()

    @property
    def dense_profiled(self) -> float:
        """Cost at full widths in the profile, which the model may miss; the prediction if it was not sampled."""
        return self.dense if self.dense_sample is None else self.dense_sample

    @property
    def min_cost(self) -> float:
        """Predicted cost with every group at its smallest width and every branch removed."""
        removed = {group for groups in self.branch_groups for group in groups}
        least = [0 if number in removed else width for number, width in enumerate(self.min_widths)]
        return self.at(dict(zip(self.groups, least, strict=True)))

    def per_layer(self, widths: Mapping[str, float] | None = None) -> dict[str, float]:
        """Cost by layer path; the empty name holds costs that belong to no layer.

        A term of a group is divided among the layers that use the group by the amounts that each contributes, a step
        equally among the layers that produce or consume its channels.
        """
        vector = self._vector(widths)
        costs = self._form.terms(vector).tolist()
        found = dict.fromkeys(("", *self.layers), 0.0)
        found[""] = self.fitted.base  # operators in the root module's forward have the empty path too
        units = self.fitted.unit_coefficients or (1.0,) * len(AMOUNTS)
        for term, cost in zip(self.fitted.terms, costs, strict=True):
            parts = [sum(a * u for a, u in zip(amounts, units, strict=True)) for _, amounts in term.layers]
            parts = parts if sum(parts) > 0 else [1.0] * len(parts)
            for (number, _), part in zip(term.layers, parts, strict=True):
                found[self.layers[number]] += cost * part / sum(parts)
        if self.fitted.steps:
            for step, cost in zip(self.fitted.steps, self._steps.terms(vector).tolist(), strict=True):
                for number in step.layers:
                    found[self.layers[number]] += cost / len(step.layers)
        return found

    def check(self, graph: ChannelGraph) -> None:
        """Refuse another network. More groups may be frozen in it than in the profile: they keep their full width.

        Raises:
            BadFile: If the model was fitted to another network.
        """
        sizes = zip(self.groups, self.min_widths, self.full_widths, strict=True)
        frozen = [name for name, least, full in sizes if least == full]
        is_profiled = {group.name for group in graph.prunable} <= set(self.groups) - set(frozen)
        if graph.fingerprint != self.fingerprint and not (
            is_profiled and graph.fingerprint_if(frozen) == self.fingerprint
        ):
            raise BadFile(
                f"the energy model belongs to network {self.fingerprint}, not to this one ({graph.fingerprint}). "
                "Profile and fit this network with this input shape."
            )

    @cached_property
    def _form(self) -> BilinearForm:
        terms = self.fitted.terms
        lefts, rights = tuple(term.left for term in terms), tuple(term.right for term in terms)
        switches = tuple(term.switch for term in terms)
        base, coefficients = self.fitted.base, self.fitted.coefficients
        return BilinearForm(base, coefficients, lefts, rights, len(self.groups), self.device, switches)

    @cached_property
    def _steps(self) -> StepTerms:
        steps = self.fitted.steps
        sizes, levels = tuple(step.size for step in steps), tuple(step.level for step in steps)
        rises, multiples = tuple(step.rise for step in steps), tuple(step.multiple for step in steps)
        return StepTerms(self.fitted.heights, sizes, levels, rises, multiples, len(self.groups), self.device)

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the model as JSON.

        Raises:
            BadFile: If the file cannot be written.
        """
        unit = f"{self.unit} for one inference of the whole batch"
        about = {"format": FORMAT, "resource": self.resource, "unit": unit, "label": self.label, "formula": FORMULA}
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "device"}
        write_record(path, {**about, **values})

    @classmethod
    def load(cls, path: str | Path, graph: ChannelGraph | None = None) -> EnergyModel:
        """Read a model that `save` wrote.

        Args:
            path: The file.
            graph: If given, the network that the model must belong to.

        Raises:
            BadFile: If it is not an energy model, is damaged, or belongs to another network.
        """
        data = read_bytes(path)
        if data.startswith(HEADER_START):
            raise BadFile(f"{path} is a profile, not an energy model. Fit one: ecc fit {path} -o energy.json")
        if FORMAT.encode() not in data[:512]:
            raise BadFile(f"{path} is not an energy model of this version ({FORMAT!r}). Fit one with ecc fit.")
        model = replace(from_json(data, cls, path), device="cpu")
        try:
            _check_consistency(model)
        except (ValueError, KeyError, TypeError) as error:
            raise BadFile(f"{path} is damaged: {error}. Fit the profile again.") from None
        if graph is not None:
            model.check(graph)
        return model


def _check_consistency(model: EnergyModel) -> None:
    """Check what the types of a file do not: positions, lengths and a positive cost."""
    groups, layers, fitted = model.groups, model.layers, model.fitted
    if not len(set(groups)) == len(groups) == len(model.full_widths) == len(model.min_widths):
        raise ValueError("the numbers of groups and widths differ")
    if any(not 1 <= least <= full for least, full in zip(model.min_widths, model.full_widths, strict=True)):
        raise ValueError("a minimum width is outside 1..full width")
    if not all(name.isprintable() for name in (*groups, *layers, model.fingerprint, model.kind)):
        raise ValueError("a name has unprintable characters")
    if model.resource not in RESOURCES or model.origin.batch < 1:
        raise ValueError(f"resource {model.resource!r} or batch {model.origin.batch} is unknown")
    if len(fitted.coefficients) != len(fitted.terms) or len(fitted.heights) != len(fitted.steps):
        raise ValueError("the numbers of terms and coefficients differ")
    if len(fitted.unit_coefficients) not in (0, len(AMOUNTS)):
        raise ValueError(f"there are {len(fitted.unit_coefficients)} unit coefficients, not {len(AMOUNTS)}")
    inside = [group for groups_of in model.branch_groups for group in groups_of]
    if len(model.branches) != len(model.branch_groups) or any(not 0 <= group < len(groups) for group in inside):
        raise ValueError("a branch refers to an unknown group")
    _check_terms(model)
    for dense in (model.dense, model.dense_profiled):
        if not (math.isfinite(dense) and dense > 0):
            raise ValueError(f"the cost of the dense network is {dense} {model.unit}")


def _check_terms(model: EnergyModel) -> None:
    known = range(len(model.groups))
    parts: list[tuple[str, tuple[AffineSize, ...], Sequence[int]]] = []
    for term in model.fitted.terms:
        if any(group not in known for group in term.switch):
            raise ValueError(f"the switch of term {term.name!r} refers to an unknown group")
        parts.append((term.name, (term.left, term.right), [number for number, _ in term.layers]))
    for step in model.fitted.steps:
        if step.multiple < 0:
            raise ValueError(f"the multiple {step.multiple} of step {step.name!r} is negative")
        parts.append((step.name, (step.size,), step.layers))
    for name, sizes, layers in parts:
        if any(size.fixed < 0 or any(g not in known or m < 0 for g, m in size.multiples) for size in sizes):
            raise ValueError(f"a size of term {name!r} is negative or refers to an unknown group")
        if not layers or any(number not in range(len(model.layers)) for number in layers):
            raise ValueError(f"term {name!r} refers to an unknown layer")


# ---------------------------------------------------------------- fitting


def fit(
    profile: Profile,
    family: str = "auto",
    *,
    resource: str = "energy",
    allow_drift: bool = False,
    curve: bool = False,
) -> EnergyModel:
    """Fit an energy model to a profile and cross-validate it.

    Args:
        profile: Profile of one network on one device.
        family: `bilinear` (the paper's), `physical`, or `auto`: the one with the smaller cross-validated error.
            Hyperparameters of a family are chosen within each fold.
        resource: `energy` or `latency`.
        allow_drift: Accept a profile whose reference varied by more than the limit.
        curve: Also compute the learning curve, and keep the held-out prediction of every sample.

    Raises:
        BadFile: If a sample is invalid.
        BadMeasurement: If there are too few samples, the device drifted, or the family is unknown.
        EccError: If `profile` is something else, such as the path of its file.
    """
    if not isinstance(profile, Profile):
        raise EccError(
            f"profile is {type(profile).__name__}; give a Profile, from ecc.profile or ecc.Profile.load(FILE)."
        )
    if family != "auto" and family not in FAMILIES:
        raise BadMeasurement(f"model family {family!r} is unknown; choose one of auto, {', '.join(FAMILIES)}.")
    samples = samples_from_profile(profile, resource, allow_drift=allow_drift)
    check_sample_count(samples)
    names = list(FAMILIES) if family == "auto" else [family]
    errors = {name: cross_validate(FAMILIES[name], samples) for name in names}
    found = {name: evaluate_family(name, samples, errors[name]) for name in names}
    chosen = names[0]
    for name in names[1:]:
        if found[name].mean < _MIN_IMPROVEMENT * found[chosen].mean:
            chosen = name
    quality = FitQuality(
        families=found,
        noise=measurement_noise(profile, resource),
        outlier_widths=find_outlier_widths(errors[chosen], samples),
    )
    if curve:
        predicted = (samples.values * (1 + errors[chosen])).tolist()
        pairs = zip(samples.values.tolist(), predicted, strict=True)
        quality = replace(
            quality,
            learning_curve=learning_curve(FAMILIES[chosen], samples, CURVE_SIZES),
            held_out=tuple((float(f"{value:.6g}"), float(f"{guess:.6g}")) for value, guess in pairs),
        )
    return build_model(FAMILIES[chosen](samples), samples, profile, resource, quality)


def build_model(
    fitted: FittedModel, samples: Samples, profile: Profile, resource: str, quality: FitQuality | None = None
) -> EnergyModel:
    """An energy model with the origin of a profile."""
    header, structure = profile.header, samples.structure
    dense = samples.values[samples.is_dense]
    return EnergyModel(
        fingerprint=structure.fingerprint,
        groups=structure.groups,
        full_widths=structure.full_widths,
        min_widths=structure.min_widths,
        width_steps=structure.width_steps(header.design.width_multiple or 1),
        branches=tuple(branch.name for branch in structure.branches),
        branch_groups=structure.branch_groups,
        layers=tuple(layer.path for layer in structure.layers),
        resource=resource,
        origin=Origin(
            meter=header.meter,
            batch=header.batch,
            device_type=header.device_type,
            settings=header.settings,
            samples=len(samples),
            width_multiple=header.design.width_multiple,
            environment=header.environment if header.settings is not None else {},
        ),
        fitted=fitted,
        dense_sample=float(dense.mean()) if len(dense) else None,
        quality=quality or FitQuality(),
    )
