"""What several verbs choose alike: the device to train on, and what weighs the results."""

from __future__ import annotations

import torch

from ecc.energy import EnergyModel
from ecc.errors import BadMeasurement, EccError
from ecc.measure import Source, find_meter


def usable_device(device: str) -> str:
    """The same name, if torch can compute there.

    Raises:
        EccError: If it cannot, with torch's reason.
    """
    try:
        torch.zeros(1, device=device).item()  # the device `meta` makes tensors, but has no numbers
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise EccError(f"device {device!r} cannot be used here: {reason}. Give --device cpu or leave it out.") from None
    return device


def source_of(spec: str, energy: EnergyModel) -> Source | None:
    """The meter or platform of the energy model; None if the model's word must do.

    Raises:
        BadMeasurement: If it cannot be read here, with the way out.
    """
    if spec == "none":
        return None
    origin = energy.origin
    if spec == "auto" and origin.meter.name == "platform":
        return find_meter(f"platform:{origin.meter.device_id}")
    try:
        return find_meter(spec if spec != "auto" else origin.meter.name, runs_on=origin.device_type)
    except EccError as error:
        if spec != "auto":
            raise
        raise BadMeasurement(
            f"the energy model was measured by {origin.meter.name} on {origin.meter.device}, which cannot be read "
            f"here: {error} Compress on that device, or say --meter none to trust the model's predictions."
        ) from None
