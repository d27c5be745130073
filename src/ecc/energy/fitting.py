"""`fit`: from a profile to an energy model, with an honest account of how well it predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ecc.errors import BadMeasurement
from ecc.measure.profile import Profile

from .families import Family, FittedModel, bilinear, physical
from .model import EnergyModel, Origin
from .quality import LEAST_ROWS, Quality, check_rows, cross_validated, learning_curve, outlier_widths, quality_of
from .regression import Array
from .samples import RESOURCES, Samples, samples_from_profile

FAMILIES: dict[str, Family] = {"bilinear": bilinear, "physical": physical}
"""Sums of fitted products, by name."""

CURVE_SIZES = (15, 20, 30, 40, 60, 80, 120, 160, 200, 300, 500, 1000, 2000, 5000)
OUTLIERS_SHOWN = 3
_MARGIN = 0.98  # a family must be better than the simpler one by this factor to be chosen


def fit(
    profile: Profile,
    family: str = "auto",
    *,
    resource: str = "energy",
    allow_drift: bool = False,
    curve: bool = False,
) -> EnergyModel:
    """Learns what widths cost on the device of a profile.

    Args:
        profile: Of one network.
        family: `bilinear` (the paper's), `physical`, or `auto`: the one that predicts best in cross-validation, where
            whatever a family chooses for itself is chosen anew within each fold.
        resource: `energy` or `latency`.
        allow_drift: Takes a profile whose reference varied by more than is trusted.
        curve: Also keeps what is drawn about a fit: a learning curve, which tells whether more rows would help, and
            each row's value beside what was predicted without it.

    Raises:
        BadFile: If a row is no measurement.
        BadMeasurement: If there are too few rows, the device was not steady, or the family is unknown.
    """
    if family != "auto" and family not in FAMILIES:
        raise BadMeasurement(f"there is no family {family!r} of models; there are auto, {', '.join(FAMILIES)}.")
    samples = samples_from_profile(profile, resource, allow_drift=allow_drift)
    check_rows(samples)
    noise = noise_of(profile, resource)
    names = list(FAMILIES) if family == "auto" else [family]
    errors = {name: cross_validated(FAMILIES[name], samples) for name in names}
    found = {name: judged(name, samples, noise, errors[name]) for name in names}
    chosen = names[0]
    for name in names[1:]:
        if found[name].mean < _MARGIN * found[chosen].mean:
            chosen = name
    quality: dict[str, Any] = {
        "chosen": chosen,
        **found[chosen].to_dict(),
        "families": {name: quality.to_dict() for name, quality in found.items()},
        "outlier_widths": outlier_widths(errors[chosen], samples),
    }
    if curve:
        sizes = [size for size in CURVE_SIZES if LEAST_ROWS <= size <= len(samples)]
        quality["learning_curve"] = [list(point) for point in learning_curve(FAMILIES[chosen], samples, sizes).items()]
        predicted = samples.values * (1 + errors[chosen])
        points = zip(samples.values.tolist(), predicted.tolist(), strict=True)
        quality["held_out"] = [[float(f"{value:.6g}"), float(f"{guess:.6g}")] for value, guess in points]
    return model_of(FAMILIES[chosen](samples), samples, profile, resource, quality)


def judged(name: str, samples: Samples, noise: float | None, errors: Array | None = None) -> Quality:
    """How well a family predicts.

    Args:
        name: Of the family.
        samples: To fit to.
        noise: Of one measurement.
        errors: Cross-validated ones, if at hand.
    """
    errors = cross_validated(FAMILIES[name], samples) if errors is None else errors
    quality = quality_of(errors, samples, noise)
    if not samples.is_dense.any():
        return quality
    dense = samples.take(samples.is_dense)
    fitted = FAMILIES[name](samples).at(dense.widths) / dense.values - 1
    return replace(quality, dense_fitted=float(fitted.mean()))


def model_of(
    fitted: FittedModel, samples: Samples, profile: Profile, resource: str, quality: dict[str, Any] | None = None
) -> EnergyModel:
    """An energy model with the origin of the profile."""
    header, structure = profile.header, samples.structure
    return EnergyModel(
        fingerprint=structure.fingerprint,
        groups=structure.groups,
        full_widths=structure.full_widths,
        min_widths=structure.min_widths,
        layers=tuple(layer.path for layer in structure.layers),
        resource=resource,
        origin=Origin(
            meter=header.meter,
            batch=header.batch,
            device_type=header.device_type,
            settings=header.settings,
            rows=len(samples),
            width_multiple=header.design.width_multiple,
        ),
        fitted=fitted,
        quality=quality or {},
    )


def noise_of(profile: Profile, resource: str = "energy") -> float | None:
    """Relative standard deviation of one measurement: from rounds if there were several, else from the reference."""
    field, _ = RESOURCES[resource]
    noise, drift = profile.repeat_noise_of_field(field), profile.drift_of_field(field)
    is_run = profile.header.device_type is not None  # an analytic reference is the same each time
    return drift.noise if noise is None and is_run and drift is not None and drift.references > 2 else noise


def describe_learning_curve(quality: dict[str, Any]) -> str:
    """A sentence about whether more rows would help; empty without a learning curve."""
    curve = {int(size): float(error) for size, error in quality.get("learning_curve", [])}
    if len(curve) < 3:
        return ""
    sizes = sorted(curve)
    before, last = curve[sizes[-3]], curve[sizes[-1]]
    digits = 1 if f"{before:.1%}" != f"{last:.1%}" else 2
    trend = f"{before:.{digits}%} with {sizes[-3]} rows, {last:.{digits}%} with {sizes[-1]}"
    noise = quality.get("noise")
    if noise is not None and last < 1.25 * noise:
        return f"More rows will not help: the error ({trend}) is at the noise of the measurements, {noise:.1%}."
    if last < 0.9 * before:
        return f"More rows would help: the error still falls ({trend})."
    return f"More rows will hardly help: the error has stopped falling ({trend})."


def describe_outlier_widths(quality: dict[str, Any]) -> str:
    """A sentence about widths that cost more than wider ones; empty if there are none."""
    found = quality.get("outlier_widths", [])
    if not found:
        return ""
    told = [
        f"with {one['width']} channels in {one['group']} ({one['networks']} networks) {one['excess']:.1%} more"
        for one in found[:OUTLIERS_SHOWN]
    ]
    more = f", and {len(found) - OUTLIERS_SHOWN} widths like these" if len(found) > OUTLIERS_SHOWN else ""
    return (
        f"Some networks cost more than predicted: {', '.join(told)}{more}. A wider network never costs less by this "
        "model, and may do so on this device. Profile in larger steps (--width-multiple), or keep such a group whole "
        "(--freeze)."
    )


__all__ = ["FAMILIES", "Quality", "describe_outlier_widths", "fit", "model_of", "noise_of", "describe_learning_curve"]
