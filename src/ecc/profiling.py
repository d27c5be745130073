"""The meter of a compression, and its energy model: measure a network at many widths, and fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ecc.budget import MEASURED_UNITS
from ecc.constants import RUN_PROFILE
from ecc.energy import EnergyModel, fit
from ecc.energy.regression import MIN_SAMPLES
from ecc.errors import BadMeasurement, BadTask, EccError, NoMeter, option_hint
from ecc.formatting import percent
from ecc.graph import ChannelGraph
from ecc.measure import (
    PROFILE_SETTINGS,
    Analytic,
    EnergySource,
    MeasureSettings,
    Profile,
    close_meter,
    find_meter,
    profile,
)
from ecc.measure.profiler import default_device, find_runner, profile_settings
from ecc.measure.remote.client import InstalledSpec, RemoteMeter, open_targets
from ecc.measure.tokens import workload_graph, workload_input, workload_model
from ecc.methods.base import trace_task
from ecc.options import flat_values, settings_from
from ecc.report.live import ProfileProgress
from ecc.settings import CompressSettings, refuse_runner_of_file
from ecc.task import Inputs, Task, batch_size_of, split_batch, takes_model, with_batch_size
from ecc.training import DistributedContext

SAMPLES = 250
"""Most width configurations that `compress` measures; it stops earlier when the fit is good enough."""

TARGET_ERROR = 0.02
"""Relative error of a quick fit at which `compress` stops measuring."""


@contextmanager
def open_meter(
    meter: str | EnergySource | None,
    device: torch.device,
    models: Sequence[EnergyModel] = (),
    *,
    targets: Sequence[str] = (),
    inference: Mapping[str, Any] | None = None,
    task: InstalledSpec | None = None,
) -> Iterator[EnergySource | None]:
    """The meter of a compression, closed at the end if it was opened here.

    Args:
        meter: A spec for `find_meter`, "none", an open meter, or None if nothing has to be measured.
        device: Training device: "auto" takes a meter that sees it.
        models: The energy models, if there are any: "auto" takes the meter or platform of the first one.
        targets: Machines to measure on, such as `ssh://user@host`; the meter is then one of theirs.
        inference: Runner, precision and memory format on the targets, as `CompressSettings.inference` gives them.
        task: The task, as it is named on the targets, for runners of PyTorch and analytic platforms.
    """
    if targets and meter not in (None, "none"):
        if not isinstance(meter, str):
            raise EccError("with a target, meter is the name of a meter of that machine, such as 'jetson'.")
        origin = models[0].origin.settings if models else None
        way = {} if origin is None else {name: getattr(origin, name) for name in ("runner", "precision")}
        refuse_runner_of_file(way.get("runner"), (inference or {}).get("runner"), "the energy model")
        chosen = settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), **way, **(inference or {})})
        remote = open_targets(targets[:1] if models else targets, meter, task=task, settings=chosen)
        try:
            yield remote
        finally:
            remote.close()
        return
    if not isinstance(meter, str):
        yield meter
        return
    source = _meter_of_model(meter, models[0]) if models else _meter_of_device(meter, device)
    try:
        yield source
    finally:
        if source is not None:
            close_meter(source)


def _meter_of_device(spec: str, device: torch.device) -> EnergySource:
    """A meter for a new profile."""
    if spec == "none":
        hint = option_hint("energy_model", cli="energy")
        raise NoMeter(f"without a meter an energy model is needed; give {hint}.")
    if spec != "auto":
        return find_meter(spec)
    try:
        return find_meter(spec, device_type=device.type)
    except NoMeter:
        raise NoMeter(_no_meter()) from None


def _meter_of_model(spec: str, energy: EnergyModel) -> EnergySource | None:
    """The meter or platform that an energy model was fitted on."""
    origin = energy.origin
    if spec == "none":
        return None
    if spec == "auto" and origin.meter.name == "platform":
        return find_meter(f"platform:{origin.meter.device_id}")
    if spec == "auto" and ":" in origin.meter.name:  # a program or a Python file, which a file must not choose
        raise BadMeasurement(
            f"the energy model names the meter {origin.meter.name!r}, which would be executed. If you trust it, give "
            f"{option_hint('meter', origin.meter.name)}."
        )
    try:
        return find_meter(spec if spec != "auto" else origin.meter.name, device_type=origin.device_type)
    except EccError as error:
        if spec != "auto":
            raise
        raise BadMeasurement(
            f"the energy model was measured by {origin.meter.name} on {origin.meter.device}, which cannot be read "
            f"here: {error} Compress on that device, or rely on predictions with {option_hint('meter', 'none')}."
        ) from None


def _no_meter() -> str:
    """A short list of what to do where no meter works."""
    choices = (
        (option_hint("budget", "macs=50%"), "a budget on MACs, parameters (params=2M) or bytes needs no meter"),
        (option_hint("meter", "platform:jetson-tx2"), "estimate for another device from published constants"),
        (option_hint("meter", "cputime:15W"), "CPU time multiplied by a power that you declare"),
        (option_hint("meter", "command:PROGRAM"), "read an external meter by a program that prints joules or watts"),
    )
    width = max(len(text) for text, _ in choices)
    lines = ["no energy meter works on this machine; `ecc doctor` shows why. Choose one of", ""]
    return "\n".join([*lines, *(f"  {text:<{width}}  {why}" for text, why in choices)])


def profile_and_fit(
    task: Task,
    resources: Sequence[str],
    source: EnergySource,
    folder: Path,
    *,
    distributed: DistributedContext,
    console: Console | None = None,
    width_multiple: int | None = None,
    samples: int | None = None,
    preset: str = "default",
    batch: int | None = None,
    freeze: Sequence[str] = (),
    attention: str = "heads",
    inference: Mapping[str, Any] | None = None,
    depth: bool = True,
) -> list[EnergyModel]:
    """Measure a network at many widths, and fit a model of each resource.

    The profile is `network.profile` in the folder, or `decode.profile` and `prefill.profile` for the workloads of a
    language model; a profile that was begun there is resumed. Of several processes the
    first one measures. Without `samples`, at most `SAMPLES` are measured, until the error is `TARGET_ERROR`.
    `inference` has runner, precision and memory format, as `CompressSettings.inference` gives them. With `depth`, some
    of the networks lack residual branches.
    """
    workloads = {name: task.workload_of(name) for name in dict.fromkeys(resources)}
    paths = {one: folder / (RUN_PROFILE if one is None else f"{one.name}.profile") for one in workloads.values()}
    if any(MEASURED_UNITS[one] == "J" for one in resources) and not source.describe().has_energy:
        raise BadMeasurement(
            f"{source.describe().name} is a clock and measures no energy; give a budget on latency, such as "
            f"{option_hint('budget', 'latency=50%')}, or an energy meter."
        )
    if distributed.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        graph, example = trace_task(task, None if task.workloads else batch, freeze, attention)
        wanted = profile_settings(source, **(inference or {}))
        is_local = not isinstance(source, Analytic | RemoteMeter)
        device = default_device(source, wanted.runner) if is_local else None
        steps = dict(zip(graph.structure.groups, graph.structure.width_steps(width_multiple or 1), strict=True))
        possible = math.prod(max(1, group.width // steps[group.name]) for group in graph.prunable)
        if possible < MIN_SAMPLES:
            raise BadMeasurement(
                f"{task.name}: {possible} width configurations are possible, and an energy model needs {MIN_SAMPLES}. "
                f"Give a budget that is counted, such as {option_hint('budget', 'macs=50%')}, or a smaller "
                f"{option_hint('width_multiple')}."
            )
        design: dict[str, Any] = {
            "samples": samples or min(SAMPLES, possible, max(MIN_SAMPLES, possible // 2)),
            "design": "uniform" if preset == "paper" else "mixed",
            "width_multiple": width_multiple,
            "depth": depth,
            "device": device,
            "target_error": None if samples or preset == "paper" else TARGET_ERROR,
        }
        view = ProfileProgress(console)
        board = str(source.board.target) if isinstance(source, RemoteMeter) else None
        view.announce(source.describe(), board or device)
        with view:
            for workload, path in paths.items():
                if workload is None:
                    profile_task(task, graph, example, source, path, wanted, view, resource=resources[0], **design)
                    continue
                chosen = wanted
                if str(device).startswith("cuda") and "precision" not in (inference or {}):
                    chosen = replace(wanted, precision="bf16")  # as language models are deployed
                model, inputs = workload_model(task.model, workload), workload_input(task.model, workload)
                layers = workload_graph(task.model, graph, workload, attention)
                profile(model, layers, inputs, source, path, settings=chosen, progress=view, **design)
    distributed.gather(torch.zeros(1))  # the others wait for the profile
    family = "bilinear" if preset == "paper" else "auto"
    # The result is measured in the end, so that a device that drifts is worth a warning and no refusal.
    models = [
        fit(Profile.load(paths[workload]), family, resource=resource, allow_drift=True)
        for resource, workload in workloads.items()
    ]
    if distributed.is_main:
        for one in models:
            if one.errors is not None:
                error = percent(one.errors.mean)
                view.say(f"{one.resource} model: cross-validated error {error}, {one.origin.samples} samples")
    return models


def profile_task(
    task: Task,
    graph: ChannelGraph,
    example_input: Inputs,
    source: EnergySource,
    path: Path,
    settings: MeasureSettings,
    view: ProfileProgress,
    *,
    device: str | None,
    resource: str | None = None,
    **design: Any,
) -> Profile:
    """Measure a network at many widths; runner "auto" is resolved first. Other arguments are those of `profile`."""
    calibration = calibration_inputs(task, batch_size_of(example_input)) if settings.runner == "auto" else []
    settings, search = find_runner(
        path, task.model, example_input, source, settings, device=device, evaluate=task.evaluate,
        calibration=calibration, resource=resource, report=view.say,
    )  # fmt: skip
    return profile(
        task.model, graph, example_input, source, path, settings=settings, runner_search=search, device=device,
        progress=view, **design,
    )  # fmt: skip


def check_inference(models: Sequence[EnergyModel], settings: CompressSettings) -> None:
    """Refuse a runner, precision or format that is not that of the energy models."""
    for name, value in settings.inference.items():
        for model in models:
            found = getattr(model.origin.settings, name, None)
            if found != value and not str(found).startswith(f"{value}:"):
                raise EccError(
                    f"{name} is {value!r}, but the {model.resource} model was measured with {found!r}. Leave it out, "
                    "or profile and fit again."
                )


def calibration_inputs(task: Task, batch_size: int, batches: int = 4) -> list[Inputs]:
    """Inputs of some training batches in parts of this size, for the calibration of int8.

    Empty if the task has no batches, or if only its loss knows what is in them.
    """
    if task.train_batches is None:
        return []
    drawn = [batch for _, batch in zip(range(batches), task.epoch_batches(0), strict=False)]
    try:
        found = [split_batch(batch)[0] for batch in drawn]
    except BadTask:
        if takes_model(task.loss):
            return []
        raise
    return [
        with_batch_size(inputs, batch_size, start=start)
        for inputs in found
        if isinstance(inputs, torch.Tensor | tuple | dict)
        for start in range(0, batch_size_of(inputs), batch_size)
    ]
