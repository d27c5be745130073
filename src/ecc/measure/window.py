"""Measure a network in windows that start and end on counter ticks, and repeat windows until they agree.

    idle probe | warm-up | .. tick [ window ] tick .. state .. tick [ window ] tick .. state ..
                           ^ the device stays busy from here to the end

Faults are refused, not averaged: see `CounterWatch`, `check_steps`, `check_state` and `BadMeasurement`.

Two errors limit a window. First its edges: a tick is only known to lie between two readings of the counter, so the
counter is read closely when a tick is due, and a tick that was seen late does not become an edge. Second aliasing: a
sensor that averages over a part of each period sees different layers of the network at each tick. So a window is
extended by a few ticks until the joules per tick agree.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ecc.errors import BadMeasurement, option_hint
from ecc.settings import MeasureSettings

from .counter import POLL_SECONDS, CounterProbe, CounterWatch, Tick, check_steps, probe_counter
from .measurement import Measurement, Window, combine_repeats, relative_interval
from .meter import Analytic, Clock, Declared, DeviceState, HasState, Meter, MeterInfo, Timed
from .thermal import throttling_reasons
from .workload import QueuedWorkload, Workload, make_workload

if TYPE_CHECKING:  # this module runs on boards without torch
    import torch
    from torch import nn

    from ecc.task import Inputs

MAX_POWER_DISAGREEMENT, MAX_POWER_LAG = 1.5, 3.0
"""Largest allowed ratio between the power reading of the device and the counter's mean power, and the inverse ratio.

The reading may be a mean over the last second or that of an idle moment between two kernels, so it can be far below
the power of a load that has just begun."""

_IGNORED_WATTS = 5.0  # smaller differences are due to the sensors
_TICK_JITTER = 0.03  # fraction of a period by which a tick may come early
_READS_PER_WINDOW = 25  # of a counter that changes with every reading; enough to detect a fault
_MIN_CHUNKS = 5  # in a window of queued work, whose edges are interpolated within a chunk
_MAX_LATE_TICKS = 5  # late ticks that are skipped before one is accepted as an edge
_MAX_EXTRA_TICKS = 5  # extension of a window whose ticks differ


def measure_model(
    model: nn.Module,
    example_input: Inputs,
    meter: Meter,
    settings: MeasureSettings | None = None,
    *,
    counter: CounterProbe | None = None,
    clock: Clock | None = None,
) -> Measurement:
    """Measure one inference of a network on the device of its parameters.

    Args:
        model: The network; it is not changed.
        example_input: One batch. Only the shapes of floating-point tensors are used, unless `input_data="example"`.
        meter: A meter from `find_meter`, or your own.
        settings: How to run the network and how long to measure.
        counter: Result of `probe_counter`, if many networks are measured on one device.
        clock: Time functions; those of the system by default.

    Raises:
        BadMeasurement: If the measurement cannot be trusted.
    """
    from .runners import prepare_runner

    refuse_analytic(meter)
    with prepare_runner(model, example_input, settings) as runner:
        return measure(
            runner.run,
            meter,
            replace(settings or MeasureSettings(), runner=runner.runner),
            device=runner.device,
            batch=runner.batch,
            is_asynchronous=runner.is_asynchronous,
            counter=counter,
            clock=clock,
        )


def measure(
    run: Callable[[], object],
    meter: Meter,
    settings: MeasureSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    batch: int = 1,
    inferences_per_run: int = 1,
    is_asynchronous: bool = True,
    counter: CounterProbe | None = None,
    clock: Clock | None = None,
) -> Measurement:
    """Measure a function that performs one or more inferences.

    Args:
        run: Computes on `device`. On CUDA it should return before the device is done.
        meter: A meter from `find_meter`, or your own.
        settings: How long to measure. Runner, precision and similar settings are only recorded.
        device: Where `run` computes.
        batch: Items in one inference; only recorded.
        inferences_per_run: Inferences in one call of `run`.
        is_asynchronous: Whether `run` returns before the device is done; on the CPU it never does.
        counter: Result of `probe_counter`; determined here by default.
        clock: Time functions; those of the system by default.

    Raises:
        BadMeasurement: If the measurement cannot be trusted.
    """
    refuse_analytic(meter)
    settings, clock, device = settings or MeasureSettings(), clock or Clock(), str(device)
    device_type, _, index = device.partition(":")
    info = meter.describe()
    check_device(info, device)
    # CUDA events are recorded on the current device, so it must be the one that computes.
    torch: Any = sys.modules.get("torch")
    current = torch.cuda.device(int(index)) if device_type == "cuda" and index and torch else nullcontext()
    with current, _no_garbage_collection():
        for _ in range(settings.warmup_runs):
            run()
        if counter is None:
            check_state(device_state(meter), info, settings)  # before long work, with our own CUDA context alive
        read_seconds = _time_reading(meter, clock) if counter is None else counter.read_seconds
        load, chunk_seconds = make_workload(
            run, device_type, clock, read_seconds=read_seconds, is_asynchronous=is_asynchronous
        )
        try:
            counter = counter or probe_counter(meter, load, settings.probe_seconds, clock=clock)
            aligner = WindowAligner(load, chunk_seconds, meter, counter, settings, clock, inferences_per_run)
            aligner.warm_up()
            windows = tuple(aligner.windows())
        finally:
            load.drain()
    joules, seconds = (
        combine_repeats([getattr(window, name) for window in windows], info.provenance)
        for name in ("joules", "seconds")
    )
    idle = counter.idle_watts if info.has_energy else None
    measurement = Measurement(
        joules=joules,
        seconds=seconds,
        net_joules=None if idle is None else joules - idle * seconds,
        idle_watts=idle,
        relative_ci=relative_interval([window.joules for window in windows]),
        batch=batch,
        device_type=device_type,
        combined_by="minimum" if isinstance(info.provenance, Declared | Timed) else "median",
        tick_seconds=aligner.tick_seconds,
        windows=windows,
        meter=info,
        settings=settings,
    )
    _check_power(measurement)
    return measurement


def probe_under_load(
    run: Callable[[], object],
    meter: Meter,
    settings: MeasureSettings,
    *,
    device: torch.device | str,
    is_asynchronous: bool = True,
    clock: Clock | None = None,
) -> CounterProbe:
    """Observe the counter of a meter idle and under a function, before many networks are measured with it.

    The arguments are those of `measure`.

    Raises:
        BadMeasurement: If the counter decreases.
    """
    clock = clock or Clock()
    for _ in range(settings.warmup_runs):
        run()
    load, _ = make_workload(run, str(device).partition(":")[0], clock, is_asynchronous=is_asynchronous)
    return probe_counter(meter, load, settings.probe_seconds, clock=clock)


def _time_reading(meter: Meter, clock: Clock) -> float:
    started = clock.now()
    for _ in range(3):
        meter.read()
    return (clock.now() - started) / 3


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which can stall the host for longer than the queue lasts."""
    was_enabled = gc.isenabled()
    gc.collect(1)  # young objects only: a full collection traverses all of torch's objects
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- windows -----------------------------------------------------------------------------------------


class WindowAligner:
    """Measures windows from tick to tick while a workload keeps the device busy.

    Args:
        load: Keeps the device busy.
        chunk_seconds: Length of its chunks.
        meter: The meter to read.
        counter: Properties of its counter.
        settings: Length of windows, and when they agree.
        clock: Time functions.
        inferences_per_run: Inferences in one run of the workload.

    Raises:
        BadMeasurement: If the counter does not move, or ticks too slowly for the longest window.
    """

    def __init__(
        self,
        load: Workload,
        chunk_seconds: float,
        meter: Meter,
        counter: CounterProbe,
        settings: MeasureSettings,
        clock: Clock,
        inferences_per_run: int = 1,
    ) -> None:
        self.info = meter.describe()
        if not counter.moves or counter.tick_seconds is None:
            raise BadMeasurement(
                f"the counter of {self.info.name} did not change while it was probed: it does not count what runs "
                "here. Check it with `ecc doctor`, or choose another meter."
            )
        self.tick_seconds = counter.tick_seconds
        required = settings.min_ticks * self.tick_seconds
        if required > settings.max_window_seconds:
            raise BadMeasurement(
                f"the counter of {self.info.name} ticks every {self.tick_seconds:.3g} s, so {settings.min_ticks} ticks "
                f"take {required:.3g} s; a window may take {settings.max_window_seconds:g} s. Use a faster meter, a "
                f"lower {option_hint('min_ticks')} or a longer {option_hint('max_window_seconds', cli='window')}."
            )
        self._load, self._chunk_seconds, self._inferences_per_run = load, chunk_seconds, inferences_per_run
        self._meter, self._settings, self._clock = meter, settings, clock
        self._watch = CounterWatch(meter, clock, stall_seconds=max(1.0, 10 * self.tick_seconds))
        self._gap_seconds = 0.0
        self._quiet_seconds = 0.0
        self._quiet_until = -math.inf

    def warm_up(self) -> None:
        """Run until clocks and sensor are stable, and learn how closely the counter can be observed."""
        started, seconds = self._clock.now(), max(self._settings.warmup_seconds, self.info.settle_seconds)
        while self._clock.now() - started < seconds or self._load.chunks_done < 2:
            if not self._load.advance():
                self._clock.sleep(POLL_SECONDS)
            self._watch.poll()
        self._gap_seconds = self._watch.usual_gap_seconds
        # After a tick there is nothing to see for almost a period, so the counter need not be read.
        if self.tick_seconds > 8 * self._gap_seconds:
            self._quiet_seconds = (1 - _TICK_JITTER) * self.tick_seconds - self._gap_seconds
        elif not self._sees_ticks:
            self._quiet_seconds = self._needed_seconds / _READS_PER_WINDOW

    def windows(self) -> Iterator[Window]:
        """Measure windows until they agree."""
        joules: list[float] = []
        while True:
            window = self._window()
            joules.append(window.joules)
            yield window
            interval = relative_interval(joules)
            agree = interval is not None and interval <= self._settings.target_relative_ci
            if len(joules) >= self._settings.max_repeats or (agree and len(joules) >= self._settings.min_repeats):
                return

    @property
    def _sees_ticks(self) -> bool:
        """Whether the counter is read often enough to see single ticks."""
        return self._gap_seconds < 0.5 * self.tick_seconds

    def _uncertainty(self, gap_seconds: float) -> float:
        """Uncertainty of the time of a tick: the gap between two readings, but at most one period.

        A clock that is read after a chunk of the host has no ticks that could be seen late.
        """
        if isinstance(self.info.provenance, Declared | Timed) and not isinstance(self._load, QueuedWorkload):
            return 0.0
        return min(gap_seconds, self.tick_seconds)

    # A third of the target interval may come from the edges of a window, the rest from differences between its ticks.

    @property
    def _edge_target(self) -> float:
        return self._settings.target_relative_ci / 3

    @property
    def _aliasing_target(self) -> float:
        return self._settings.target_relative_ci - self._edge_target

    @property
    def _needed_seconds(self) -> float:
        """Length of a window: as set, with enough ticks, and long enough for the uncertainty of its edges."""
        needed = max(
            self._settings.window_seconds,
            self._settings.min_ticks * self.tick_seconds,
            0.41 * self._uncertainty(self._gap_seconds) / self._edge_target,
            _MIN_CHUNKS * self._chunk_seconds if isinstance(self._load, QueuedWorkload) else 0.0,
        )
        return min(needed, self._settings.max_window_seconds)

    def _is_sharp(self, tick: Tick) -> bool:
        allowed = self._edge_target * self._needed_seconds / 0.41
        return self._uncertainty(tick.gap_seconds) <= max(allowed, 1.5 * self._uncertainty(self._gap_seconds))

    def _next_tick(self) -> Tick:
        """Keep the device busy until the counter changes."""
        while True:
            worked = self._load.advance()
            if self._clock.now() >= self._quiet_until:
                tick = self._watch.poll()
                if tick is not None:
                    unseen = tick.gap_seconds if self._sees_ticks else 0.0  # the tick may be that much older
                    self._quiet_until = tick.seconds - unseen + self._quiet_seconds
                    return tick
            if not worked:
                self._clock.sleep(POLL_SECONDS)

    def _first_tick(self) -> Tick:
        for _ in range(_MAX_LATE_TICKS):
            tick = self._next_tick()
            if self._is_sharp(tick):
                return tick
        self._quiet_seconds = 0.0  # ticks are too irregular to stop reading in between
        return self._next_tick()

    def _window(self) -> Window:
        start = self._first_tick()
        self._load.forget_before(start.seconds)
        read_seconds = self._watch.read_seconds
        chunks, host_bound = self._load.chunks_done, self._load.chunks_host_bound
        ticks = self._ticks_from(start)
        end = ticks[-1]
        read_seconds = self._watch.read_seconds - read_seconds
        chunks = max(1, self._load.chunks_done - chunks)
        host_bound = self._load.chunks_host_bound - host_bound
        inferences = self._inferences_per_run * (self._runs_at(end.seconds) - self._runs_at(start.seconds))
        state = device_state(self._meter)
        check_state(state, self.info, self._settings)
        if not isinstance(self.info.provenance, Declared | Timed):  # a clock does not jump, but work may wait
            check_steps(self.info.name, ticks, self.tick_seconds, self.info.max_watts)
        seconds = end.seconds - start.seconds
        joules = (end.joules - start.joules) / inferences
        uncertainty = math.hypot(self._uncertainty(start.gap_seconds), self._uncertainty(end.gap_seconds))
        return Window(
            joules=joules,
            seconds=seconds / inferences if self.info.has_energy else joules,  # the counter of a clock counts seconds
            window_seconds=seconds,
            inferences=inferences,
            ticks=len(ticks) - 1 if self._sees_ticks else math.floor(seconds / self.tick_seconds),
            edge_error=uncertainty / math.sqrt(12) / seconds,  # the tick is uniformly distributed in its gap
            polling_share=read_seconds / seconds,
            host_bound_share=min(1.0, host_bound / chunks),
            state=state,
        )

    def _ticks_from(self, start: Tick) -> list[Tick]:
        """Ticks up to the first sharp one after the needed time at which they agree, or are as many as allowed."""
        # Minus a quarter of a period: the last of N ticks may come early and must not be missed.
        needed = self._needed_seconds - 0.25 * self.tick_seconds
        ticks, late, most = [start], 0, 0
        while True:
            tick = self._next_tick()
            ticks.append(tick)
            seconds, count = tick.seconds - start.seconds, len(ticks) - 1
            enough = count >= self._settings.min_ticks or not self._sees_ticks
            if seconds >= needed and enough:
                most = most or count + _MAX_EXTRA_TICKS
                if (
                    self._sees_ticks
                    and count < most
                    and aliasing_error(ticks, self.tick_seconds) > self._aliasing_target
                ):
                    continue
                if self._is_sharp(tick) or late >= _MAX_LATE_TICKS:
                    return ticks
                late += 1
            if not enough and seconds > 2 * self._settings.max_window_seconds:
                raise BadMeasurement(
                    f"the counter of {self.info.name} ticked only {count} times in {seconds:.1f} s; a window needs "
                    f"{self._settings.min_ticks} ticks. Lower {option_hint('min_ticks')}, or choose a faster meter."
                )

    def _runs_at(self, seconds: float) -> float:
        while (runs := self._load.done_at(seconds)) is None:
            if not self._load.advance():
                self._clock.sleep(POLL_SECONDS)
        return runs


def aliasing_error(ticks: Sequence[Tick], tick_seconds: float) -> float:
    """Relative standard error of the mean joules per tick of a window; 0 for a single tick.

    Args:
        ticks: Ticks of the window, including its first edge.
        tick_seconds: Period of the counter. The joules of a missed tick are in the next one.
    """
    joules = [
        (later.joules - earlier.joules) / max(1, round((later.seconds - earlier.seconds) / tick_seconds))
        for earlier, later in itertools.pairwise(ticks)
    ]
    if len(joules) < 2:
        return 0.0
    return statistics.stdev(joules) / math.sqrt(len(joules)) / statistics.fmean(joules)


# --- checks ------------------------------------------------------------------------------------------


def device_state(meter: Meter) -> DeviceState | None:
    """State of the device as its meter reads it, else what the kernel tells of throttling; None if nothing is known."""
    if isinstance(meter, HasState):
        return meter.state()
    reasons = throttling_reasons()
    return None if reasons is None else DeviceState(throttling=reasons)


def check_state(state: DeviceState | None, info: MeterInfo, settings: MeasureSettings) -> None:
    """Refuse a device that is shared or throttles.

    Raises:
        BadMeasurement: Unless the settings allow it.
    """
    if state is None:
        return
    if state.other_processes and not settings.allow_shared:
        raise BadMeasurement(
            f"{info.device} is also used by {', '.join(state.other_processes)}, and their energy would be counted. "
            f"Wait for them, end them, or measure anyway with {option_hint('allow_shared', True)}."
        )
    if state.throttling and not settings.allow_throttling:
        heat = "" if state.temperature_celsius is None else f" at {state.temperature_celsius:.0f} C"
        raise BadMeasurement(
            f"{info.device} throttles{heat} ({', '.join(state.throttling)}), so its clocks change during the "
            f"measurement. Let it cool down, or measure anyway with {option_hint('allow_throttling', True)}."
        )


def refuse_analytic(meter: object) -> None:
    """Refuse a source that reads no device: its joules must not be labelled as measured.

    Raises:
        BadMeasurement: If it is an `Analytic`.
    """
    if isinstance(meter, Analytic) and not isinstance(meter, Meter):
        info = meter.describe()
        raise BadMeasurement(
            f"{info.name} ({info.device}) computes joules without running anything, so it cannot measure. Use its "
            "cost(graph, widths), use it for a profile, or choose a meter with find_meter()."
        )


def check_device(info: MeterInfo, device: torch.device | str) -> None:
    """Refuse a meter that does not see the work of a device.

    Raises:
        BadMeasurement: If the meter covers another type of device, or another device of that type.
    """
    kind = str(device).partition(":")[0]
    if info.covers and kind not in info.covers:
        raise BadMeasurement(
            f"the network runs on {device}, but meter {info.name} ({info.device}) only sees "
            f"{' and '.join(info.covers)}. Move the network, or choose a meter for {kind}."
        )
    torch: Any = sys.modules.get("torch")  # without it, another runtime computes, and its device is not known here
    if info.name == "nvml" and kind == "cuda" and torch and not has_uuid(device, info.device_id):
        uuid = torch.cuda.get_device_properties(device).uuid
        raise BadMeasurement(
            f"the network runs on {device}, which is GPU-{uuid}, but the meter reads {info.device_id}. "
            f"Choose nvml:GPU-{uuid}."
        )


def has_uuid(device: torch.device | str, device_id: str) -> bool:
    """Whether a GPU has this UUID, as far as torch knows it."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return uuid is None or str(uuid).removeprefix("GPU-") == device_id.removeprefix("GPU-")


def visible_device_type(info: MeterInfo, accelerators: Sequence[str]) -> str | None:
    """The first torch device type that a meter sees and that is available; the CPU comes last."""
    import torch

    for kind in (*accelerators, "cpu"):
        backend: Any = getattr(torch.backends if kind == "mps" else torch, kind, None)
        is_available = kind == "cpu" or (backend is not None and backend.is_available())
        if is_available and (not info.covers or kind in info.covers):
            return kind
    return None


def _check_power(measurement: Measurement) -> None:
    """Refuse a counter that contradicts the power reading of the device."""
    sensor, counted = measurement.sensor_watts, measurement.watts
    if sensor is None or abs(sensor - counted) < _IGNORED_WATTS:
        return
    limit = MAX_POWER_DISAGREEMENT if sensor > counted else MAX_POWER_LAG
    if max(sensor, counted) > limit * min(sensor, counted):
        raise BadMeasurement(
            f"the energy counter of {measurement.meter.name} shows {counted:.1f} W, and the power reading of "
            f"{measurement.meter.device} {sensor:.1f} W, more than a factor of {limit:g} apart. One "
            "of them is wrong: compare both with `ecc doctor`, or update the driver."
        )
