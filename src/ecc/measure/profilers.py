"""Where the samples of a profile come from.

Either a bench, on which networks are built and measured, or a desk, at which an analytic source is asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property

import torch
from torch import nn

from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph, with_widths
from ecc.task import Inputs

from .counter import CounterProbe, probe_counter
from .environment import environment
from .measurement import Measurement, MeasureSettings
from .meter import Analytic, Clock, Meter, NoisyAnalytic
from .profile_header import Design, ProfileHeader, input_of, network_of
from .runner import Mode, mode_on, random_inputs
from .samples import Sample
from .window import check_device, measure_model, runner_for
from .workload import make_workload


class DeviceProfiler:
    """Builds networks on a device, measures them and clears them away.

    Args:
        model: The dense network; left as it is.
        graph: Its channels.
        example_input: One batch.
        meter: Reads the device.
        settings: How networks run and how long they are measured.
        device: Where; by default where the model is.
        clock: The time.

    Raises:
        BadMeasurement: If the meter does not see the device.
    """

    drifts = True
    """Its device changes with time: the reference tells."""

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        example_input: Inputs,
        meter: Meter,
        settings: MeasureSettings,
        device: torch.device | str | None,
        clock: Clock,
    ) -> None:
        self._model, self._graph, self._example_input = model, graph, example_input
        self._meter, self._settings, self._clock = meter, settings, clock
        here = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._device = _existing(device) if device is not None else here
        self._counter: CounterProbe | None = None
        self._mode_reason: str | None = None
        self._run_in(*mode_on(settings.mode, self._device))
        check_device(meter.describe(), self._device)

    def header(self, design: Design) -> ProfileHeader:
        """What samples from here mean; the counter is not known yet."""
        return ProfileHeader(
            **network_of(self._graph),
            **input_of(self._example_input),
            meter=self._meter.describe(),
            device_type=self._device.type,
            settings=self._settings,
            mode_reason=self._mode_reason,
            design=design,
            environment=environment(self._device.type),
            created=_now(),
        )

    def continue_as(self, header: ProfileHeader) -> None:
        """Takes over the mode of a profile that is continued, where none was asked for."""
        if self._settings.mode == "auto" and header.settings is not None:
            self._run_in(header.settings.mode, header.mode_reason)

    def ready(self, counter: CounterProbe | None) -> CounterProbe:
        """Takes over what is known of the counter, or probes it under the dense network, which also decides the mode.

        Raises:
            BadMeasurement: If the dense network cannot be run.
        """
        if counter is None:
            try:
                counter = self._probed()
            except (RuntimeError, MemoryError) as error:
                raise BadMeasurement(
                    f"the dense network cannot be run on {self._device} in mode {self._settings.mode!r}: "
                    f"{first_line(error)}"
                ) from error
            self.clear()
        self._counter = counter
        return counter

    def sample(self, number: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Measures one network.

        Raises:
            BadMeasurement: If the measurement must not be trusted.
            RuntimeError, MemoryError: If the network cannot be run, as for want of memory.
        """
        try:
            result = self._measured(widths)
        finally:
            self.clear()
        return Sample(
            index=number,
            round=round_,
            session=session,
            widths=tuple(widths[group.name] for group in self._graph.prunable),
            joules=result.joules,
            seconds=result.seconds,
            relative_ci=_short(result.relative_ci),
            edge_error=_short(result.edge_error),
            ticks=result.ticks,
            temperature_celsius=result.temperature_celsius,
            clock_mhz=result.clock_mhz,
            power_capped=result.power_capped,
            host_bound_share=_short(result.host_bound_share),
            measured_at=_now(),
        )

    def clear(self) -> None:
        """Gives the memory of the last network back, so that each begins as the first did."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ networks

    @cached_property
    def _source(self) -> nn.Module:
        """The dense network on the device: slices are taken from it there."""
        here = next((parameter.device for parameter in self._model.parameters()), self._device)
        return self._model if here == self._device else with_widths(self._model, self._graph, {}, device=self._device)

    @cached_property
    def _inputs(self) -> Inputs:
        if self._settings.input_data == "random":
            return random_inputs(self._example_input, self._device)
        return self._example_input

    def _run_in(self, mode: Mode, reason: str | None) -> None:
        self._settings, self._mode_reason = replace(self._settings, mode=mode), reason
        self._each = replace(self._settings, input_data="example")  # of `_inputs`, which are drawn once

    def _measured(self, widths: Mapping[str, int]) -> Measurement:
        network = with_widths(self._source, self._graph, widths, device=self._device)
        return measure_model(network, self._inputs, self._meter, self._each, counter=self._counter, clock=self._clock)

    def _probed(self) -> CounterProbe:
        settings = self._each
        with runner_for(settings, self._source, self._inputs) as ready:
            if settings.mode == "auto":
                self._run_in(ready.mode, ready.mode_reason)
            for _ in range(settings.warmup_runs):
                ready.run()
            load, _ = make_workload(ready.run, self._device.type, self._clock)
            return probe_counter(self._meter, load, settings.probe_seconds, clock=self._clock)


class AnalyticProfiler:
    """Asks an analytic source; nothing is built, and nothing that changes from day to day is written down.

    Args:
        graph: Of the networks.
        example_input: One batch; only its shape counts.
        source: Knows what they cost.
    """

    drifts = False

    def __init__(self, graph: ChannelGraph, example_input: Inputs, source: Analytic) -> None:
        self._graph, self._example_input, self._source = graph, example_input, source

    def header(self, design: Design) -> ProfileHeader:
        """What samples from here mean."""
        return ProfileHeader(
            **network_of(self._graph),
            **input_of(self._example_input),
            meter=self._source.describe(),
            device_type=None,
            settings=None,
            design=design,
            environment=environment(None),
            created=None,
        )

    def continue_as(self, header: ProfileHeader) -> None:
        """There is no mode to take over."""

    def ready(self, counter: CounterProbe | None) -> None:
        """There is no counter to probe."""

    def sample(self, number: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Computes one network.

        Raises:
            BadMeasurement: If the source gives no positive numbers.
        """
        if isinstance(self._source, NoisyAnalytic):
            cost = self._source.cost(self._graph, widths, repeat=round_)
        else:
            cost = self._source.cost(self._graph, widths)
        for name, value in (("joules", cost.joules), ("seconds", cost.seconds)):
            if not (math.isfinite(value) and value > 0):
                raise BadMeasurement(f"{self._source.describe().name} gave {value} {name}; it must give more than 0.")
        kept = tuple(widths[group.name] for group in self._graph.prunable)
        return Sample(
            index=number, round=round_, session=session, widths=kept, joules=cost.joules, seconds=cost.seconds
        )

    def clear(self) -> None:
        """There is nothing to clear away."""


def default_device(source: Meter | Analytic) -> str:
    """The device to run on when none is named: an accelerator that is here and that the meter sees, else the CPU."""
    covers = source.describe().covers
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps}
    for name in backends:
        if (not covers or name in covers) and backends[name].is_available():
            return name
    return "cpu"


def _existing(device: torch.device | str) -> torch.device:
    """The device as torch names it on tensors: `cuda:0` for `cuda`."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise BadMeasurement(f"device {str(device)!r} cannot be used here: {first_line(error)}") from None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _short(value: float | None) -> float | None:
    """Four digits: what describes the quality of a number need not be long."""
    return None if value is None else float(f"{value:.4g}")


def first_line(error: BaseException) -> str:
    """What an exception says, as a sentence."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if line.endswith(".") else f"{line}."
