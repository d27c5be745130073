"""All families of energy models on one profile, with the error of each sample: the data of the figures of a fit."""

from __future__ import annotations

from dataclasses import dataclass

from ecc.measure import MeasureSettings
from ecc.measure.profile import Profile

from .families import FAMILIES
from .model import CURVE_SIZES
from .quality import FitErrors, cross_validate, evaluate_family, learning_curve, measurement_noise
from .regression import RESOURCES, samples_from_profile

ABLATION_FORMAT = "ecc fit ablation 2"


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


def run_ablation(profile: Profile, *, resource: str = "energy", allow_drift: bool = False) -> FitAblation:
    """Cross-validate all families on a profile; the arguments are those of `fit`."""
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
    )
