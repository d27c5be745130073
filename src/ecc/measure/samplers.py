"""Where the samples of a profile come from: a device that is measured, or a platform that is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ecc.errors import BadMeasurement, EccError, first_line
from ecc.graph import ChannelGraph, with_widths
from ecc.settings import Design, MeasureSettings, deployment, refuse_runner_of_file
from ecc.task import Inputs
from ecc.torch_utils import device_of

from .counter import CounterProbe
from .environment import environment
from .measurement import Measurement, combine_repeats
from .meter import Analytic, Clock, Meter, Provenance, Reading
from .profile import ProfileHeader, Sample
from .remote.agent import measured_fields
from .remote.client import RemoteMeter, RemoteProfiler
from .runner_search import RunnerSearch
from .runners import PreparedRunner, draw_inputs, prepare_runner, resolve_runner
from .runners.runtime import SESSIONS, import_runtime
from .window import check_device, measure, measure_model, probe_under_load


def reason_of(error: BaseException) -> str:
    """Reason of a failure as a sentence."""
    line = str(error) if isinstance(error, EccError) else first_line(error)
    return line if line.endswith(".") else f"{line}."


class Profiler(Protocol):
    """Measures or computes samples."""

    drifts: bool
    """Whether the device changes with time, so that the reference is measured again and again."""

    def header(self, design: Design) -> ProfileHeader:
        """Header of the samples from here, without the counter."""

    def adopt_runner(self, header: ProfileHeader) -> None:
        """Use the runner of a profile that is resumed, if the user chose none; refuse one in a Python file."""

    def prepare(self, counter: CounterProbe | None = None) -> CounterProbe | None:
        """Use known properties of the counter, or observe it under the dense network."""

    def sample(self, index: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Measure one width configuration."""

    def clear(self) -> None:
        """Free the memory of the last network."""


def open_profiler(
    model: nn.Module,
    graph: ChannelGraph,
    example_input: Inputs,
    meter: Meter,
    settings: MeasureSettings,
    **options: Any,
) -> DeviceProfiler | RemoteProfiler:
    """The profiler of a meter: of this machine, or of a board. The arguments are those of `DeviceProfiler`."""
    if isinstance(meter, RemoteMeter):
        return meter.open_profiler(model, graph, example_input, settings, options.get("runner_search"))
    return DeviceProfiler(model, graph, example_input, meter, settings, **options)


class DeviceProfiler:
    """Builds networks of given widths on a device and measures them.

    The device is that of the model by default. What `choose_runner` measured (`runner_search`) is only recorded.
    """

    drifts = True

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        example_input: Inputs,
        meter: Meter,
        settings: MeasureSettings,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        runner_search: RunnerSearch | None = None,
    ) -> None:
        self._model, self._graph, self._example_input = model, graph, example_input
        self._meter, self._settings, self._clock = meter, settings, clock or Clock()
        self._device = device_of(model) if device is None else _checked_device(device)
        self._counter: CounterProbe | None = None
        self._runner_reason: str | None = None
        self._search = runner_search
        self._versions: dict[str, str] | None = None
        self._dense_cost: tuple[float, ...] | None = None  # joules and seconds, if networks are measured in turns
        self._kept = ExitStack()
        self._kept_dense: PreparedRunner | None = None
        self._set_runner(*resolve_runner(settings.runner, self._device.type))
        check_device(meter.describe(), self._device)

    def header(self, design: Design) -> ProfileHeader:
        """Header of the samples from here, without the counter."""
        return ProfileHeader.of(
            self._graph,
            self._example_input,
            meter=self._meter.describe(),
            device_type=self._device.type,
            settings=self._settings,
            runner_reason=self._runner_reason,
            runner_search=self._search,
            design=design,
            environment=self.versions,
            created=_now().isoformat(timespec="milliseconds"),
        )

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software, also before anything runs."""
        name = (self._settings.runner or "").partition(":")[0]
        runtime = dict(self._versions or {})
        if name in SESSIONS:
            runtime = {name: str(import_runtime(name).__version__).partition("-")[0]}
        return {**environment(self._device.type), **runtime}

    def adopt_runner(self, header: ProfileHeader) -> None:
        """Use the runner of a profile that is resumed, if the user chose none; refuse one in a Python file."""
        if header.settings is None:
            return
        refuse_runner_of_file(header.settings.runner, self._settings.runner, "the profile")
        if self._settings.runner is None:
            self._set_runner(header.settings.runner, header.runner_reason)

    def prepare(self, counter: CounterProbe | None = None) -> CounterProbe:
        """Use known properties of the counter, or probe it under the dense network, which also decides the runner."""
        if counter is None:
            try:
                counter = self._probe()
            except (RuntimeError, MemoryError) as error:
                raise BadMeasurement(
                    f"the dense network cannot be run on {self._device} ({deployment(self._settings)}): "
                    f"{reason_of(error)}"
                ) from error
            self.clear()
        self._counter = counter
        return replace(counter, idle_state=None)

    def sample(self, index: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Measure one width configuration.

        Raises:
            RuntimeError, MemoryError: If the network cannot be run, for example for lack of memory.
        """
        try:
            network = with_widths(self._dense, self._graph, widths, device=self._device)
            if self._run_settings.in_turns:
                is_dense = all(widths[group.name] == group.width for group in self._graph.variable)
                joules, seconds, relative_ci, result = self._measure_in_turns(network, is_dense)
            else:
                result = measure_model(
                    network, self._inputs, self._meter, self._run_settings, counter=self._counter, clock=self._clock
                )
                joules, seconds, relative_ci = result.joules, result.seconds, result.relative_ci
        finally:
            self.clear()
        fields = measured_fields(result) | {
            "joules": joules,
            "seconds": seconds,
            "relative_ci": None if relative_ci is None else float(f"{relative_ci:.4g}"),
        }
        kept = tuple(widths[group.name] for group in self._graph.variable)
        return Sample(index=index, round=round_, session=session, widths=kept, measured_at=_now(), **fields)

    def refer_to(self, joules: float, seconds: float) -> None:
        """Scale networks that are measured in turns to this cost of the dense network, of an earlier session."""
        self._dense_cost = (joules, seconds)

    def _measure_in_turns(self, network: nn.Module, is_dense: bool) -> tuple[float, float, float | None, Measurement]:
        """Measure a network and the dense network alternately, two windows at a time.

        The cost is the ratio of the two, times the cost of the dense network at the first call, so the speed of the
        machine at this time cancels out. If the first network is the dense one, its cost is that cost: a ratio that
        differs from 1 by noise would shift every budget that is a share of it.

        Returns:
            Joules, seconds, the relative confidence interval of the ratio, and the last measurement of the network.
        """
        settings, provenance = self._run_settings, self._meter.describe().provenance
        pair = replace(settings, min_repeats=2, max_repeats=2)
        warm = replace(pair, warmup_seconds=0.0, warmup_runs=1)
        with self._dense_runner() as dense, prepare_runner(network, self._inputs, settings) as runner:

            def measure_pair(one: PreparedRunner, how: MeasureSettings) -> Measurement:
                return measure(
                    one.run, self._meter, how, device=one.device, batch=one.batch,
                    is_asynchronous=one.is_asynchronous, counter=self._counter, clock=self._clock,
                )  # fmt: skip

            references, results = [measure_pair(dense, pair)], list[Measurement]()
            while True:
                results.append(measure_pair(runner, warm if results else pair))
                references.append(measure_pair(dense, warm))
                windows = 2 * len(results)
                if windows < settings.min_repeats:
                    continue
                ratio, interval = ratio_in_turns(results, references, "joules", provenance)
                agree = interval is not None and interval <= settings.target_relative_ci
                if windows >= settings.max_repeats or agree:
                    break
        if self._dense_cost is None:
            measured = [*references, *results] if is_dense else references
            self._dense_cost = tuple(
                combine_repeats([getattr(window, name) for one in measured for window in one.windows], provenance)
                for name in ("joules", "seconds")
            )
            if is_dense:
                joules, seconds = self._dense_cost
                return joules, seconds, interval, results[-1]
        joules, seconds = self._dense_cost
        seconds_ratio, _ = ratio_in_turns(results, references, "seconds", provenance)
        return ratio * joules, seconds_ratio * seconds, interval, results[-1]

    @contextmanager
    def _dense_runner(self) -> Iterator[PreparedRunner]:
        """The dense network ready to run. A loaded ONNX file is kept: making it takes longer than a measurement."""
        if (self._settings.runner or "").partition(":")[0] not in SESSIONS:
            with prepare_runner(self._dense, self._inputs, self._run_settings) as dense:
                yield dense
            return
        if self._kept_dense is None:
            self._kept_dense = self._kept.enter_context(prepare_runner(self._dense, self._inputs, self._run_settings))
        yield self._kept_dense

    def clear(self) -> None:
        """Free the memory of the last network, so that each one starts like the first."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _dense(self) -> nn.Module:
        if device_of(self._model) == self._device:
            return self._model
        return with_widths(self._model, self._graph, {}, device=self._device)

    @cached_property
    def _inputs(self) -> Inputs:
        if self._settings.input_data == "random":
            return draw_inputs(self._example_input, self._device)
        return self._example_input

    def _set_runner(self, runner: str | None, reason: str | None) -> None:
        self._settings, self._runner_reason = replace(self._settings, runner=runner), reason
        self._run_settings = replace(self._settings, input_data="example")  # `_inputs` are drawn once

    def _probe(self) -> CounterProbe:
        settings = self._run_settings
        with prepare_runner(self._dense, self._inputs, settings) as runner:
            if settings.runner is None:
                self._set_runner(runner.runner, runner.reason)
            self._versions = runner.versions
            return probe_under_load(
                runner.run, self._meter, settings, device=self._device, is_asynchronous=runner.is_asynchronous,
                clock=self._clock,
            )  # fmt: skip


class AnalyticProfiler:
    """Computes samples with an analytic source. Its profiles contain nothing that changes from day to day."""

    drifts = False

    def __init__(self, graph: ChannelGraph, example_input: Inputs, source: Analytic) -> None:
        self._graph, self._example_input, self._source = graph, example_input, source

    def header(self, design: Design) -> ProfileHeader:
        """Header of the samples from here."""
        return ProfileHeader.of(
            self._graph,
            self._example_input,
            meter=self._source.describe(),
            design=design,
            environment=environment(None),
        )

    def adopt_runner(self, header: ProfileHeader) -> None:
        """Do nothing: nothing runs, so there is no runner."""

    def prepare(self, counter: CounterProbe | None = None) -> None:
        """Do nothing: there is no counter."""

    def sample(self, index: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Compute one width configuration."""
        compute: Callable[..., Reading] = self._source.cost
        has_noise = getattr(self._source, "noise", 0)  # artificial noise differs between rounds
        cost = compute(self._graph, widths, repeat=round_) if has_noise else compute(self._graph, widths)
        if not (0 < cost.joules < math.inf and 0 < cost.seconds < math.inf):
            name = self._source.describe().name
            raise BadMeasurement(f"{name} returned {cost.joules} J and {cost.seconds} s; both must be above 0.")
        kept = tuple(widths[group.name] for group in self._graph.variable)
        return Sample(index=index, round=round_, session=session, widths=kept, joules=cost.joules, seconds=cost.seconds)

    def clear(self) -> None:
        """Do nothing: there is no network."""


def _checked_device(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors have it: `cuda:0` for `cuda`."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        raise BadMeasurement(f"device {str(device)!r} cannot be used here: {reason_of(error)}") from None


_RESAMPLES = 200  # of the bootstrap


def ratio_in_turns(
    results: Sequence[Measurement], references: Sequence[Measurement], name: str, provenance: Provenance
) -> tuple[float, float | None]:
    """Cost of a network relative to a reference that was measured before, between and after its measurements.

    The windows of each are combined as the repeats of one measurement are (`combine_repeats`), and then divided. The
    ratio of a single turn is disturbed by every program that slows one of its windows.

    Returns:
        The ratio, and the relative half width of its 95 % confidence interval, from a bootstrap over the turns; None
        for one turn.
    """
    costs, dense = (
        np.array([[getattr(window, name) for window in one.windows] for one in measured])
        for measured in (results, references)
    )
    around = np.hstack([dense[:-1], dense[1:]])  # of each turn, the reference before and after it

    def combined(windows: NDArray[np.float64]) -> float:
        return combine_repeats(windows.ravel().tolist(), provenance)

    ratio, turns = combined(costs) / combined(around), len(costs)
    if turns < 2:
        return ratio, None
    drawn = np.random.default_rng(0).integers(turns, size=(_RESAMPLES, turns))
    found = [combined(costs[rows]) / combined(around[rows]) for rows in drawn]
    low, high = np.quantile(found, [0.025, 0.975])
    return ratio, float(high - low) / 2 / ratio


def _now() -> datetime:
    return datetime.now(timezone.utc)
