"""`study`: everything that can be drawn about a fit, as plain values for a file.

Predicted against measured, each by a model that had not seen the row; errors over widths; learning curves; and the
paper's figures: the error over iterations of Adam, of the bilinear model and of perceptrons behind it.
"""

from __future__ import annotations

from typing import Any

from ecc.measure.profile import Profile

from .fitting import CURVE_SIZES, FAMILIES, judged, noise_of
from .paper import ITERATIONS, fit_as_paper
from .quality import cross_validated, learning_curve
from .samples import RESOURCES, samples_from_profile

ABLATION_FORMAT = "ecc fit study 1"
"""The format, in its file."""

HIDDEN_LAYERS = (0, 1, 2, 3)
"""Of the paper's ablation; none is the bilinear model."""


def run_ablation(
    profile: Profile,
    *,
    resource: str = "energy",
    allow_drift: bool = False,
    iterations: int = ITERATIONS,
) -> dict[str, Any]:
    """Cross-validates all families on a profile.

    Args:
        profile: Of one network.
        resource: `energy` or `latency`.
        allow_drift: Takes a profile whose reference varied by more than is trusted.
        iterations: Of Adam, for the paper's figures; 0 leaves them out.

    Raises:
        BadFile, BadMeasurement: As `fit`.
    """
    samples = samples_from_profile(profile, resource, allow_drift=allow_drift)
    header, noise = profile.header, noise_of(profile)
    sizes = [size for size in CURVE_SIZES if size <= len(samples)]
    families: dict[str, Any] = {}
    for name, family in FAMILIES.items():
        errors = cross_validated(family, samples)
        families[name] = {
            **judged(name, samples, noise, errors).to_dict(),
            "errors": [round(error, 6) for error in errors.tolist()],
            "learning_curve": [list(point) for point in learning_curve(family, samples, sizes).items()],
        }
    paper = {
        str(count): [
            list(point) for point in fit_as_paper(samples, hidden_layers=count, iterations=iterations).curve.items()
        ]
        for count in (HIDDEN_LAYERS if iterations else ())
    }
    return {
        "format": ABLATION_FORMAT,
        "resource": resource,
        "unit": RESOURCES[resource][1],
        "label": header.label,
        "device": header.meter.device,
        "batch": header.batch,
        "settings": None
        if header.settings is None
        else {
            "mode": header.settings.mode,
            "precision": header.settings.precision,
            "memory_format": header.settings.memory_format,
            "cudnn_autotune": header.settings.cudnn_autotune,
        },
        "width_multiple": header.design.width_multiple,
        "rows": len(samples),
        "noise": noise,
        "seconds_per_network": profile.seconds_per_sample,
        "values": [float(f"{value:.6g}") for value in samples.values.tolist()],
        "mean_share": [round(share, 4) for share in samples.mean_share.tolist()],
        "is_dense": samples.is_dense.tolist(),
        "families": families,
        "paper": paper,
    }
