"""What several verbs choose alike: the task and its data, the device to train on, and what weighs the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ecc.errors import BadMeasurement, EccError

from .parameters import Option

if TYPE_CHECKING:
    import torch

    from ecc.energy import EnergyModel
    from ecc.measure import EnergySource
    from ecc.task import Task

DataOption = Annotated[
    Path | None,
    Option("--data", metavar="FOLDER", help="Of a bundled network: ImageNet, Cityscapes, CIFAR-10, CamVid, ..."),
]
WeightsOption = Annotated[
    Path | None, Option("--weights", metavar="FILE", help="Of a bundled network: published, as safetensors.")
]
SizeOption = Annotated[
    str | None, Option("--size", metavar="PIXELS", help="Of a bundled network's images: 128, or 360x480.")
]
FreezeOption = Annotated[
    list[str] | None,
    Option("--freeze", metavar="PATTERN", help="Keep the outputs of modules whole: 'layer1.*'. Repeatable."),
]
BatchSizeOption = Annotated[
    int | None, Option("--batch-size", metavar="N", help="Images in a training batch; as the paper if not given.")
]

MinShareOption = Annotated[
    float, Option("--min-width-ratio", metavar="SHARE", help="No group keeps less of its channels.")
]
RoundToOption = Annotated[
    int | None, Option("--width-multiple", metavar="N", help="Widths in multiples of N; as the profile's.")
]
MicroBatchOption = Annotated[
    int | None, Option("--micro-batch", metavar="N", help="Items at once, where a batch does not fit.")
]


def task_of(
    spec: str,
    data: Path | None,
    weights: Path | None,
    size: str | None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
) -> Task:
    """The task with its data, as the options above name them; what there is to know is told on stderr."""
    import typer

    from ecc.zoo.registry import find_task

    return find_task(
        spec,
        data,
        weights,
        size=None if size is None else parse_size(size),
        batch_size=batch_size,
        device=device,
        tell=lambda line: typer.echo(line, err=True),
    )


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "128" or "360x480".

    Raises:
        EccError: If it is neither.
    """
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text.strip())
    if found is None:
        raise EccError(f"size {text!r} cannot be read; write 128, or height x width as 360x480.")
    return int(found[1]), int(found[2] or found[1])


def usable_device(device: str) -> str:
    """The same name, if torch can compute there.

    Raises:
        EccError: If it cannot, with torch's reason.
    """
    import torch

    try:
        torch.zeros(1, device=device).item()  # the device `meta` makes tensors, but has no numbers
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise EccError(f"device {device!r} cannot be used here: {reason}. Give --device cpu or leave it out.") from None
    return device


def source_of(spec: str, energy: EnergyModel) -> EnergySource | None:
    """The meter or platform of the energy model; None if the model's word must do.

    Raises:
        BadMeasurement: If it cannot be read here, with the way out.
    """
    from ecc.measure import find_meter

    if spec == "none":
        return None
    origin = energy.origin
    if spec == "auto" and origin.meter.name == "platform":
        return find_meter(f"platform:{origin.meter.device_id}")
    try:
        return find_meter(spec if spec != "auto" else origin.meter.name, device_type=origin.device_type)
    except EccError as error:
        if spec != "auto":
            raise
        raise BadMeasurement(
            f"the energy model was measured by {origin.meter.name} on {origin.meter.device}, which cannot be read "
            f"here: {error} Compress on that device, or say --meter none to trust the model's predictions."
        ) from None
