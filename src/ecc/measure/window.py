"""Measuring: warm up, keep the device busy, start and end each window on counter ticks, repeat until sure.

    idle probe | warm-up | .. tick [ window ] tick .. state .. tick [ window ] tick .. state ..
                           ^ the device stays busy from here to the end

Faults are refused, not averaged: see `CounterWatch`, `check_steps`, `check_state` and `BadMeasurement`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import nn

from ecc.errors import BadMeasurement
from ecc.task import Inputs

from .counter import CounterProbe, probe_counter
from .measurement import Measurement, MeasureSettings, Window, combine, relative_interval
from .meter import Analytic, Clock, Meter, MeterInfo
from .runner import InferenceRunner, prepare_runner
from .tick_alignment import WindowAligner, check_state, device_state
from .workload import make_workload

MAX_POWER_DISAGREEMENT = 1.5
"""The counter and the device's own power reading may differ by this factor over the windows."""

_IGNORED_WATTS = 5.0  # below this, differences between the two are those of small sensors


def measure_model(
    model: nn.Module,
    example_input: Inputs,
    meter: Meter,
    settings: MeasureSettings | None = None,
    *,
    counter: CounterProbe | None = None,
    clock: Clock | None = None,
) -> Measurement:
    """Measures one inference of a network on the device where its weights are.

    Args:
        model: The network; left as it is.
        example_input: One batch. Floating-point tensors only give their shape, unless `input_data="example"`.
        meter: From `find_meter`, or your own.
        settings: How to run and how long to measure.
        counter: From `probe`, to measure many networks on one device; probed here when it is None.
        clock: The time; the system's by default.

    Raises:
        BadMeasurement: If the measurement must not be trusted.
    """
    refuse_analytic(meter)
    settings = settings or MeasureSettings()
    with runner_for(settings, model, example_input) as ready:
        return measure(
            ready.run,
            meter,
            replace(settings, mode=ready.mode),
            device=ready.device,
            batch=ready.batch,
            counter=counter,
            clock=clock,
        )


def runner_for(
    settings: MeasureSettings, model: nn.Module, example_input: Inputs
) -> AbstractContextManager[InferenceRunner]:
    """The network ready to run as the settings say."""
    return prepare_runner(
        model,
        example_input,
        mode=settings.mode,
        precision=settings.precision,
        memory_format=settings.memory_format,
        cudnn_autotune=settings.cudnn_autotune,
        input_data=settings.input_data,
    )


def measure(
    run: Callable[[], object],
    meter: Meter,
    settings: MeasureSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    batch: int = 1,
    inferences_per_run: int = 1,
    counter: CounterProbe | None = None,
    clock: Clock | None = None,
) -> Measurement:
    """Measures a function that performs one inference, or a few.

    Args:
        run: Computes on `device`. On CUDA it may return before the device is done, and should.
        meter: From `find_meter`, or your own.
        settings: How long to measure; mode, precision and the like are only recorded here, as they are given.
        device: Where `run` computes.
        batch: Items in one inference; recorded.
        inferences_per_run: Inferences in one call of `run`.
        counter: From `probe`; probed here when it is None.
        clock: The time; the system's by default.

    Raises:
        BadMeasurement: If the measurement must not be trusted.
    """
    refuse_analytic(meter)
    settings, clock, device = settings or MeasureSettings(), clock or Clock(), torch.device(device)
    info = meter.describe()
    check_device(info, device)
    with _current(device), _no_garbage_collection():
        for _ in range(settings.warmup_runs):
            run()
        if counter is None:
            check_state(device_state(meter), info, settings)  # before long work, but with our own context alive
        read_seconds = _time_of_a_reading(meter, clock) if counter is None else counter.read_seconds
        load, chunk_seconds = make_workload(run, device.type, clock, read_seconds=read_seconds)
        try:
            counter = counter or probe_counter(meter, load, settings.probe_seconds, clock=clock)
            aligner = WindowAligner(load, chunk_seconds, meter, counter, settings, clock)
            aligner.warm_up()
            windows = tuple(aligner.windows())
        finally:
            load.drain()
    if inferences_per_run != 1:
        windows = tuple(_per_inference(window, inferences_per_run) for window in windows)
    joules, seconds, rule = combine(windows, info.provenance)
    idle = counter.idle_watts
    measurement = Measurement(
        joules=joules,
        seconds=seconds,
        net_joules=None if idle is None else joules - idle * seconds,
        idle_watts=idle,
        relative_ci=relative_interval([window.joules for window in windows]),
        batch=batch,
        device_type=device.type,
        combined_by=rule,
        tick_seconds=aligner.tick_seconds,
        windows=windows,
        meter=info,
        settings=settings,
    )
    _check_power(measurement)
    return measurement


# ---------------------------------------------------------------- what is refused


def refuse_analytic(meter: object) -> None:
    """Refuses a source that reads nothing off a device: its joules must not pass for measured ones.

    Raises:
        BadMeasurement: If it is an `Analytic`.
    """
    if isinstance(meter, Analytic) and not isinstance(meter, Meter):
        info = meter.describe()
        raise BadMeasurement(
            f"{info.name} ({info.device}) tells joules without running anything, so there is nothing to measure "
            "with it. Ask for its cost(graph, widths), give it to a profile, or choose a meter with find_meter()."
        )


def check_device(info: MeterInfo, device: torch.device) -> None:
    """Refuses a meter that does not see what the device does.

    Raises:
        BadMeasurement: If the meter covers another kind of device, or another specimen.
    """
    if info.covers and device.type not in info.covers:
        raise BadMeasurement(
            f"the network runs on {device}, but meter {info.name} ({info.device}) only sees "
            f"{' and '.join(info.covers)}. Move the network, or choose a meter for {device.type}."
        )
    if info.name == "nvml" and device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
        if uuid is not None and str(uuid).removeprefix("GPU-") != info.device_id.removeprefix("GPU-"):
            raise BadMeasurement(
                f"the network runs on {device}, which is GPU-{uuid}, but the meter reads {info.device_id}. "
                f"Choose nvml:GPU-{uuid}."
            )


def _check_power(measurement: Measurement) -> None:
    """Refuses a counter that contradicts the device's own power reading."""
    sensor, counted = measurement.sensor_watts, measurement.watts
    if sensor is None or abs(sensor - counted) < _IGNORED_WATTS:
        return
    if max(sensor, counted) > MAX_POWER_DISAGREEMENT * min(sensor, counted):
        raise BadMeasurement(
            f"the counter of {measurement.meter.name} says {counted:.1f} W and the power reading of "
            f"{measurement.meter.device} {sensor:.1f} W, more than a factor {MAX_POWER_DISAGREEMENT:g} "
            "apart: one of them is wrong. Compare both over a minute with `ecc doctor`, or update the driver."
        )


def _time_of_a_reading(meter: Meter, clock: Clock) -> float:
    started = clock.now()
    for _ in range(3):
        meter.read()
    return (clock.now() - started) / 3


def _per_inference(window: Window, inferences_per_run: int) -> Window:
    return Window(
        **{
            **vars(window),
            "joules": window.joules / inferences_per_run,
            "seconds": window.seconds / inferences_per_run,
            "inferences": window.inferences * inferences_per_run,
        }
    )


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Marks go into the queue of the current GPU, so it must be the one that computes."""
    if device.type != "cuda" or device.index is None:
        yield
        return
    with torch.cuda.device(device):
        yield


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection can stop the host for longer than the queue lasts."""
    was_enabled = gc.isenabled()
    gc.collect(1)  # the young: a full collection goes through all of torch's own objects
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
